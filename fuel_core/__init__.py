"""fuel: decode language models one token at a time, with held plans that are never the wrong ones.

The public names, loaded on first use: importing this package imports no torch.

    import fuel_core as fuel
    llm = fuel.load("path/to/checkpoint")
    print(llm.generate("The capital of France is", max_new_tokens=8).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module it is loaded from.
_HOME = {
    "Checkpoint": "fuel_core.checkpoint",
    "Completion": "fuel_core.llm",
    "ConfigReader": "fuel_core.checkpoint",
    "Conversation": "fuel_core.conversation",
    "DataConsts": "fuel_core.persistent_decode",
    "DecodeBackbone": "fuel_core.backbone",
    "DecodeDims": "fuel_core.backbone",
    "DecodeLayerInputs": "fuel_core.backbone",
    "DecodeSession": "fuel_core.persistent_decode",
    "DecodeStats": "fuel_core.persistent_decode",
    "DecoderConfig": "fuel_core.checkpoint",
    "Disposition": "fuel_core.persistent_decode",
    "FAMILY_API": "fuel_core.families",
    "Family": "fuel_core.families",
    "FuelError": "fuel_core.errors",
    "Generation": "fuel_core.generation",
    "InferenceContext": "fuel_core.persistent_decode",
    "KeyValue": "fuel_core.kv_cache",
    "KvAllocId": "fuel_core.decode_shape",
    "KvCache": "fuel_core.kv_cache",
    "LanguageModel": "fuel_core.llm",
    "LayerStateSpec": "fuel_core.kv_cache",
    "MaskPlan": "fuel_core.mask_and_rope",
    "ModelInstanceId": "fuel_core.decode_shape",
    "PersistentDecodeModel": "fuel_core.backbone",
    "PlanEvent": "fuel_core.persistent_decode",
    "RawConfig": "fuel_core.checkpoint",
    "Reason": "fuel_core.persistent_decode",
    "RopeParameters": "fuel_core.checkpoint",
    "RopePlan": "fuel_core.mask_and_rope",
    "RopeVariant": "fuel_core.mask_and_rope",
    "SamplingParams": "fuel_core.generation",
    "SessionSlot": "fuel_core.persistent_decode",
    "ShapeKey": "fuel_core.decode_shape",
    "ShapeKeyHasher": "fuel_core.decode_shape",
    "Slots": "fuel_core.kv_cache",
    "StateSlot": "fuel_core.kv_cache",
    "Validity": "fuel_core.persistent_decode",
    "explain": "fuel_core.decode_shape",
    "forward_decode_step": "fuel_core.persistent_decode",
    "forward_with_kv_context": "fuel_core.persistent_decode",
    "forward_with_kv_context_persistent": "fuel_core.persistent_decode",
    "hookimpl": "fuel_core.families",
    "load": "fuel_core.llm",
    "load_weights": "fuel_core.checkpoint",
    "open_checkpoint": "fuel_core.checkpoint",
    "profile_ranges": "fuel_core.profiling",
}
_MODULES = ("errors", "layers")

__all__ = [
    "FAMILY_API",
    "Checkpoint",
    "Completion",
    "ConfigReader",
    "Conversation",
    "DataConsts",
    "DecodeBackbone",
    "DecodeDims",
    "DecodeLayerInputs",
    "DecodeSession",
    "DecodeStats",
    "DecoderConfig",
    "Disposition",
    "Family",
    "FuelError",
    "Generation",
    "InferenceContext",
    "KeyValue",
    "KvAllocId",
    "KvCache",
    "LanguageModel",
    "LayerStateSpec",
    "MaskPlan",
    "ModelInstanceId",
    "PersistentDecodeModel",
    "PlanEvent",
    "RawConfig",
    "Reason",
    "RopeParameters",
    "RopePlan",
    "RopeVariant",
    "SamplingParams",
    "SessionSlot",
    "ShapeKey",
    "ShapeKeyHasher",
    "Slots",
    "StateSlot",
    "Validity",
    "errors",
    "explain",
    "forward_decode_step",
    "forward_with_kv_context",
    "forward_with_kv_context_persistent",
    "hookimpl",
    "layers",
    "load",
    "load_weights",
    "open_checkpoint",
    "profile_ranges",
]

if TYPE_CHECKING:
    from fuel_core import errors, layers
    from fuel_core.backbone import DecodeBackbone, DecodeDims, DecodeLayerInputs, PersistentDecodeModel
    from fuel_core.checkpoint import (
        Checkpoint,
        ConfigReader,
        DecoderConfig,
        RawConfig,
        RopeParameters,
        load_weights,
        open_checkpoint,
    )
    from fuel_core.conversation import Conversation
    from fuel_core.decode_shape import KvAllocId, ModelInstanceId, ShapeKey, ShapeKeyHasher, explain
    from fuel_core.errors import FuelError
    from fuel_core.families import FAMILY_API, Family, hookimpl
    from fuel_core.generation import Generation, SamplingParams
    from fuel_core.kv_cache import KeyValue, KvCache, LayerStateSpec, Slots, StateSlot
    from fuel_core.llm import Completion, LanguageModel, load
    from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant
    from fuel_core.persistent_decode import (
        DataConsts,
        DecodeSession,
        DecodeStats,
        Disposition,
        InferenceContext,
        PlanEvent,
        Reason,
        SessionSlot,
        Validity,
        forward_decode_step,
        forward_with_kv_context,
        forward_with_kv_context_persistent,
    )
    from fuel_core.profiling import profile_ranges


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"fuel_core.{name}")
    raise AttributeError(f"module 'fuel_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
