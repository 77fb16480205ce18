"""Gemma 2.

Differs from Llama in:
- everything that ``gemma.py`` lists;
- four norms a block: what attention and MLP return is normalised before it is added to the residual;
- every other layer, the first included, attends through a window of ``sliding_window`` positions; ``layer_types``
  decides where present;
- scores are ``attn_logit_softcapping * tanh(scores / attn_logit_softcapping)`` before the mask;
- logits are capped the same way by ``final_logit_softcapping``;
- queries are scaled by ``query_pre_attn_scalar ** -0.5``, not by that of head_dim.

model_type ``gemma2``; GGUF architecture ``gemma2``, whose files state neither schedule nor scale: the scalar is
head_dim, save in the release of 46 layers, where it is hidden_size / heads. Gemma Team 2024 (arXiv 2408.00118); the
schedule follows ``configuration_gemma2`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from fuel_core import ConfigReader, DecodeLayerInputs, MaskPlan, RawConfig, errors
from torch import Tensor, nn

from fuel_gemma import gemma
from fuel_gemma.gemma import GemmaAttention, GemmaBackbone, GemmaConfig, GemmaMLP, GemmaRMSNorm

MODEL_TYPES = ("gemma2",)
GGUF_ARCHITECTURES = ("gemma2",)

DEFAULTS = {
    **gemma.DEFAULTS,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
SIZES = {**gemma.SIZES, "query_pre_attn_scalar": 256}
_PERIOD = 2
# Depths of the releases whose queries are scaled by hidden_size / heads.
_SCALED_BY_WIDTH = (46,)

WINDOWED, DENSE = "sliding_attention", "full_attention"
_GGUF_SCALE = "gguf:attention.scale"


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Resolved spec of a gemma2 checkpoint."""

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    sliding_window: int | None
    """None where no layer has a window."""
    layer_types: tuple[str, ...]
    """``sliding_attention`` or ``full_attention`` for each layer."""


def resolve_config(raw: RawConfig) -> Gemma2Config:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = gemma.reader_of(raw, DEFAULTS, SIZES, "gemma2")
    values = gemma.common_values(reader)
    return reader.finish(
        Gemma2Config,
        **values,
        **schedule(reader, values["num_hidden_layers"], _PERIOD),
        rope=reader.rope(kinds=gemma.ROPE_KINDS),
        query_pre_attn_scalar=query_scalar(reader, values, _SCALED_BY_WIDTH),
        attn_logit_softcapping=reader.optional_float("attn_logit_softcapping"),
        final_logit_softcapping=reader.optional_float("final_logit_softcapping"),
    )


def schedule(reader: ConfigReader, n_layers: int, period: int) -> dict[str, Any]:
    """Values of ``layer_types`` and ``sliding_window``: as the list says, or else every ``period``-th layer is dense.

    Raises ConfigError for another word, a list of another length, and a windowed layer without a width.
    """
    kinds = reader.list("layer_types", length=n_layers)
    if kinds is None:
        kinds = tuple(WINDOWED if (layer + 1) % period else DENSE for layer in range(n_layers))
        reader.note("layer_types", f"derived: every {period}. layer is dense")
    place = f"{reader.raw.source('layer_types')}: expected"
    window = reader.optional_int("sliding_window")
    for layer, kind in enumerate(kinds):
        if kind not in (WINDOWED, DENSE):
            raise errors.ConfigError(
                f"{place} layer_types[{layer}] to be {WINDOWED} or {DENSE}, found {kind!r:.80} for family "
                f"{reader.family!r}; correct the config"
            )
        if kind == WINDOWED and window is None:
            raise errors.ConfigError(
                f"{place} a sliding_window, since layer {layer} is {WINDOWED}, found none for family "
                f"{reader.family!r}; add the width"
            )
    return {"layer_types": kinds, "sliding_window": window if WINDOWED in kinds else None}


def query_scalar(reader: ConfigReader, values: dict[str, Any], scaled_by_width: Collection[int]) -> float:
    """``query_pre_attn_scalar``, which a GGUF file does not state: the depth says which release it is."""
    key = "query_pre_attn_scalar"
    if reader.raw.format != "gguf":
        return reader.float(key)
    scale = reader.raw.get(_GGUF_SCALE)
    if scale is not None:
        reader.note(key, f"{reader.raw.source(_GGUF_SCALE)} ** -2")
        factor = reader.float(_GGUF_SCALE)
        if not 1e-9 < factor < 1e9:  # its square has to be a number as well
            raise errors.ConfigError(
                f"{reader.raw.source(_GGUF_SCALE)}: expected {_GGUF_SCALE!r} to be a number between 1e-9 and 1e9, "
                f"found {factor!r} for family {reader.family!r}; convert the model again"
            )
        return float(factor**-2)
    if values["num_hidden_layers"] in scaled_by_width:
        reader.note(key, "family: hidden_size / num_attention_heads at this depth")
        return float(values["hidden_size"] / values["num_attention_heads"])
    reader.note(key, "family: head_dim")
    return float(values["head_dim"])


class Gemma2Attention(GemmaAttention):
    """Gemma's attention, with a scale of its own and capped scores."""

    def __init__(self, c: Gemma2Config) -> None:
        super().__init__(c)
        self.scale = c.query_pre_attn_scalar**-0.5
        self.softcap = c.attn_logit_softcapping


class Gemma2Layer(nn.Module):
    """One decoder block."""

    attention: type[GemmaAttention] = Gemma2Attention

    def __init__(self, c: Gemma2Config) -> None:
        super().__init__()
        self.self_attn = type(self).attention(c)
        self.mlp = GemmaMLP(c)
        self.input_layernorm = GemmaRMSNorm(c.hidden_size, c)
        self.post_attention_layernorm = GemmaRMSNorm(c.hidden_size, c)
        self.pre_feedforward_layernorm = GemmaRMSNorm(c.hidden_size, c)
        self.post_feedforward_layernorm = GemmaRMSNorm(c.hidden_size, c)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        h: Tensor = self.self_attn(self.input_layernorm(inputs.h), inputs)
        h = inputs.h + self.post_attention_layernorm(h)
        fed: Tensor = self.mlp(self.pre_feedforward_layernorm(h))
        return h + self.post_feedforward_layernorm(fed)


class Gemma2Backbone(GemmaBackbone):
    """Gemma's hooks, with windows and capped logits."""

    config: Gemma2Config
    layer = Gemma2Layer

    def decode_family(self) -> str:
        return "gemma2"

    def decode_mask_plan(self) -> MaskPlan:
        c = self.config
        if c.sliding_window is None:
            return MaskPlan.dense(c.num_hidden_layers)
        return MaskPlan.per_layer_window(c.num_hidden_layers, c.sliding_window, lambda i: c.layer_types[i] == WINDOWED)

    def decode_bound_fields(self) -> frozenset[str]:
        # A width reaches a held plan through masks and window starts alone; whether there is one is the plan's.
        return super().decode_bound_fields() | {"sliding_window"}

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        logits, cap = super().decode_final_norm_and_head(h), self.config.final_logit_softcapping
        if cap is None:
            return logits
        return torch.tanh(logits.to(torch.float32) / cap) * cap
