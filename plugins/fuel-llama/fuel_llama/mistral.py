"""Mistral: 7B, Nemo, Small, Ministral and Devstral, text only.

Differs from Llama in:
- every layer attends through a window where ``sliding_window`` is set, and to the whole prefix where it is null;
  ``layer_types`` (model_type ``ministral``) says which layers do;
- no bias anywhere;
- ``ministral3`` multiplies queries by 1 + beta ln(1 + floor(p / L)) at position p, with beta ``llama_4_scaling_beta``
  and L ``original_max_position_embeddings``, both inside the RoPE block;
- ``mistral3`` keeps the decoder's config under ``text_config`` and its tensors under a prefix, beside those of a
  vision tower, which are left out.

model_types ``mistral``, ``ministral``, ``ministral3`` and ``mistral3``; GGUF architecture ``mistral3`` (files of the
older releases say ``llama`` and state no window). Jiang et al. 2023 (arXiv 2310.06825). The temperature follows
``modeling_ministral3`` of transformers. Quantised releases (fp8) are refused by name.

Shape letters: B batch, T tokens of this step, H query heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuel_core import ConfigReader, DecodeLayerInputs, MaskPlan, RawConfig, errors, layers
from torch import Tensor

from fuel_llama.llama import DEFAULTS as LLAMA_DEFAULTS
from fuel_llama.llama import LlamaAttention, LlamaBackbone, LlamaConfig
from fuel_llama.schedules import WINDOWED, layer_types

MODEL_TYPES = ("mistral", "ministral", "ministral3", "mistral3")
GGUF_ARCHITECTURES = ("mistral3",)

# A config.json without the key means what its reference class says, which is not what a null means.
_WINDOW_OF_ABSENT_KEY = 4096
_BETA = "llama_4_scaling_beta"
_GGUF_BETA = "gguf:attention.temperature_scale"
_GGUF_LOG_MULTIPLIER = "gguf:yarn_log_multiplier"


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Resolved spec of a mistral checkpoint."""

    sliding_window: int | None
    layer_types: tuple[str, ...] | None
    """``sliding_attention`` or ``full_attention`` per layer; None where all layers are alike."""
    llama_4_scaling_beta: float | None
    original_max_position_embeddings: int | None
    """L of the temperature. Part of every recording, so not read from ``rope``, which may change on a live model."""


def resolve_config(raw: RawConfig) -> MistralConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    variant = _variant(raw)
    tempered = variant == "ministral3"
    raw = _one_rope_spelling(raw, tempered=tempered)
    defaults = dict(LLAMA_DEFAULTS)
    if tempered:
        del defaults["rope_theta"]
    elif raw.format != "gguf":
        defaults["sliding_window"] = _WINDOW_OF_ABSENT_KEY
    reader = ConfigReader(raw, defaults, family="mistral")
    values = reader.common()
    kinds, allow = (("yarn",), (_BETA,)) if tempered else (("default", "linear", "banded", "yarn"), ())
    rope = reader.rope(kinds=kinds, allow=allow)
    beta = dict(rope.extra).get(_BETA)
    if tempered and beta is None:
        raise errors.ConfigError(
            f"{raw.source('rope_parameters')}: expected {_BETA!r} in the RoPE block of a ministral3 checkpoint, found "
            "none; complete the config"
        )
    place = raw.source("rope_parameters" if "rope_parameters" in raw else "rope_scaling") if tempered else "not given"
    reader.note(_BETA, place)
    reader.note("original_max_position_embeddings", place)
    window = reader.optional_int("sliding_window")
    return reader.finish(
        MistralConfig,
        **values,
        rope=replace(rope, extra=()),
        hidden_act=reader.str("hidden_act", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
        sliding_window=window,
        layer_types=None if tempered else layer_types(reader, values["num_hidden_layers"], window),
        llama_4_scaling_beta=beta,
        original_max_position_embeddings=rope.original_max_position_embeddings if tempered else None,
    )


class TemperedAttention(LlamaAttention):
    """Llama's attention with queries that grow with their position."""

    def __init__(self, c: MistralConfig) -> None:
        super().__init__(c)
        assert c.llama_4_scaling_beta is not None
        assert c.original_max_position_embeddings is not None
        self.beta, self.span = c.llama_4_scaling_beta, c.original_max_position_embeddings

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = (
            rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for rows in layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        )  # [B, H, T, K], [B, G, T, K] twice
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin) * self._temperature(inputs).to(q.dtype)
        out: Tensor = self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5))
        return out

    def _temperature(self, inputs: DecodeLayerInputs) -> Tensor:
        """float32 ``[B or 1, 1, T, 1]``"""
        positions = torch.arange(inputs.seq_len, device=inputs.h.device)
        if inputs.offset is None:
            positions = (positions + inputs.cached_len).unsqueeze(0)
        else:
            positions = positions + inputs.offset.unsqueeze(1)
        spans = torch.div(positions, self.span, rounding_mode="floor").to(torch.float32)
        return (torch.log1p(spans) * self.beta + 1.0)[:, None, :, None]


class MistralBackbone(LlamaBackbone):
    """Llama's hooks, with windows."""

    config: MistralConfig

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        if config.llama_4_scaling_beta:
            for layer in self.model.layers:
                layer.self_attn = TemperedAttention(config)

    def decode_family(self) -> str:
        return "mistral"

    def decode_mask_plan(self) -> MaskPlan:
        c = self.config
        if c.sliding_window is None:
            return MaskPlan.dense(c.num_hidden_layers)
        return MaskPlan.per_layer_window(
            c.num_hidden_layers, c.sliding_window, lambda i: c.layer_types is None or c.layer_types[i] == WINDOWED
        )

    def decode_bound_fields(self) -> frozenset[str]:
        # A width reaches a held plan through masks and window starts alone; whether there is one is the plan's.
        return super().decode_bound_fields() | {"sliding_window"}


def tensor_name(name: str) -> str | None:
    """Tensor of a ``mistral3`` checkpoint, in either of its two layouts -> parameter; None for the vision tower's."""
    name = name.removeprefix("model.") if name.startswith("model.language_model.") else name
    if name.startswith(("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_")):
        return None
    if not name.startswith("language_model."):
        return name
    name = name.removeprefix("language_model.")
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _variant(raw: RawConfig) -> str:
    """Which decoder this is. Raises UnsupportedCheckpointError for one that is nested here and built elsewhere."""
    if raw.format == "gguf":
        return "ministral3" if raw.get(_GGUF_BETA) else "mistral"
    if raw.model_type != "mistral3":
        return raw.model_type or "mistral"
    nested = raw.nested_model_type or "mistral"
    known = MODEL_TYPES[:3]
    if nested not in known:
        raise errors.UnsupportedCheckpointError(
            f"config.json: expected the text_config of a mistral3 checkpoint to be one of {', '.join(known)}, found "
            f"model_type {nested!r}; a newer release may know it"
        )
    return nested


def _one_rope_spelling(raw: RawConfig, *, tempered: bool) -> RawConfig:
    """Give a GGUF file's RoPE block the names of a config, and drop a number that stands for another key."""
    changed: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        block = raw.get(key)
        if not isinstance(block, Mapping):
            continue
        # A copy of the key beside the block, written by releases that fill the block in themselves.
        changed[key] = {k: v for k, v in block.items() if not tempered or k != "max_position_embeddings"}
    if raw.format == "gguf" and "rope_scaling" in changed:
        block = changed["rope_scaling"]
        if tempered:
            block[_BETA] = raw[_GGUF_BETA]
        slope = block.pop(_GGUF_LOG_MULTIPLIER, None)
        if slope:
            # The format has one number for the two; its reference implementation takes 1 for the other.
            block |= {"mscale": 1.0, "mscale_all_dim": slope}
    for key, block in changed.items():
        raw = raw.with_values({key: block}, raw.source(key))
    return raw
