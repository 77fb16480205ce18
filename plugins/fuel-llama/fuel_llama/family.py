"""What this package hands to the core: one family, whose architectures share Llama's modules."""

from __future__ import annotations

from typing import Any

from fuel_core import DecodeBackbone, Family, RawConfig

from fuel_llama import llama, mistral, smollm3


def _module(raw: RawConfig) -> Any:
    """The model file that serves a checkpoint, by exact name."""
    if raw.format == "gguf":
        by_name = {arch: module for module in (mistral, smollm3) for arch in module.GGUF_ARCHITECTURES}
        return by_name.get(raw.gguf_architecture, llama)
    by_name = {word: module for module in (mistral, smollm3) for word in module.MODEL_TYPES}
    return by_name.get(raw.model_type, llama)


def resolve_config(raw: RawConfig) -> llama.LlamaConfig:
    """Raw config -> the spec of its architecture. Raises ConfigError naming the key, what was expected and found."""
    spec: llama.LlamaConfig = _module(raw).resolve_config(raw)
    return spec


def build(config: llama.LlamaConfig) -> DecodeBackbone:
    """Spec -> backbone; the spec's class says which."""
    if isinstance(config, mistral.MistralConfig):
        return mistral.MistralBackbone(config)
    if isinstance(config, smollm3.SmolLM3Config):
        return smollm3.SmolLM3Backbone(config)
    return llama.LlamaBackbone(config)


def tensor_name(name: str) -> str | None:
    """Checkpoint tensor -> parameter; None for one that is no weight of the decoder."""
    renamed = llama.tensor_name(name)
    return None if renamed is None else mistral.tensor_name(renamed)


FAMILY = Family(
    name="llama",
    model_types=(*llama.FAMILY.model_types, *mistral.MODEL_TYPES, *smollm3.MODEL_TYPES),
    gguf_architectures=(*llama.FAMILY.gguf_architectures, *mistral.GGUF_ARCHITECTURES, *smollm3.GGUF_ARCHITECTURES),
    resolve_config=resolve_config,
    build=build,
    tensor_names=tensor_name,
    defaults=llama.DEFAULTS,
)
