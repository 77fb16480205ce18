"""Gemma 3: the text releases, and the text decoders of the multimodal ones.

Differs from Llama in:
- everything that ``gemma.py`` lists, and of ``gemma2.py`` the four norms, the scale of queries and, where a config sets
  it, the cap on logits;
- queries and keys are normalised over head_dim, with gain 1 + weight, before they rotate;
- windows on all layers but every sixth (``sliding_window_pattern``); ``layer_types`` decides where present;
- windowed layers rotate by ``rope_local_base_freq`` alone, the others by ``rope_theta`` with the scaling of the config;
- scores are not capped: a config that asks for it is refused, because the reference does not do it either;
- model_type ``gemma3`` keeps the decoder's config under ``text_config`` and its tensors under a prefix, beside those of
  a vision tower and a projector, which are left out; what such a config leaves out is what the reference class says.

model_types ``gemma3_text`` and ``gemma3``; GGUF architecture ``gemma3``. Files of it state no schedule, no scale and no
local base: the scalar is head_dim, save in the release of 62 layers, where it is hidden_size / heads. Gemma Team 2025
(arXiv 2503.19786); defaults follow ``configuration_gemma3`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuel_core import ConfigReader, RawConfig, RopeParameters, RopePlan, RopeVariant, errors
from torch import Tensor

from fuel_gemma import gemma
from fuel_gemma.gemma import GemmaRMSNorm
from fuel_gemma.gemma2 import (
    DENSE,
    WINDOWED,
    Gemma2Attention,
    Gemma2Backbone,
    Gemma2Config,
    Gemma2Layer,
    query_scalar,
    schedule,
)

MODEL_TYPES = ("gemma3_text", "gemma3")
GGUF_ARCHITECTURES = ("gemma3",)

DEFAULTS = {
    **gemma.DEFAULTS,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
SIZES = {
    **gemma.SIZES,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 262208,
}
_PERIOD = 6
# Depths of the releases whose queries are scaled by hidden_size / heads.
_SCALED_BY_WIDTH = (62,)

_GGUF_PATTERN = "gguf:attention.sliding_window_pattern"
_GGUF_NO_BASE = "gguf: default of rope.freq_base"


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """Resolved spec of a gemma3 decoder; ``rope`` is that of the layers without a window."""

    rope_local: RopeParameters
    """Of the layers with a window."""


def resolve_config(raw: RawConfig) -> Gemma3Config:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    _check_nested(raw)
    raw = _as_config(raw)
    reader = gemma.reader_of(raw, DEFAULTS, SIZES, "gemma3")
    values = gemma.common_values(reader)
    if reader.optional_float("attn_logit_softcapping") is not None:
        raise errors.ConfigError(
            f"{raw.source('attn_logit_softcapping')}: expected 'attn_logit_softcapping' to be null, found "
            f"{raw['attn_logit_softcapping']!r} for family 'gemma3'; the reference does not cap scores, set it to null"
        )
    return reader.finish(
        Gemma3Config,
        **values,
        **schedule(reader, values["num_hidden_layers"], _period(reader)),
        rope=reader.rope(layer_type=DENSE, kinds=gemma.ROPE_KINDS),
        rope_local=reader.rope(
            layer_type=WINDOWED,
            theta_key="rope_local_base_freq",
            scaled=False,
            kinds=gemma.ROPE_KINDS,
            into="rope_local",
        ),
        query_pre_attn_scalar=query_scalar(reader, values, _SCALED_BY_WIDTH),
        attn_logit_softcapping=None,
        final_logit_softcapping=reader.optional_float("final_logit_softcapping"),
    )


class Gemma3Attention(Gemma2Attention):
    """Gemma 2's attention, with normalised queries and keys."""

    def __init__(self, c: Gemma2Config) -> None:
        super().__init__(c)
        self.q_norm = GemmaRMSNorm(c.head_dim, c)
        self.k_norm = GemmaRMSNorm(c.head_dim, c)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, T, H, K]``, keys and values ``[B, T, G, K]`` of ``x [B, T, D]``."""
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Gemma3Layer(Gemma2Layer):
    """One decoder block."""

    attention = Gemma3Attention


class Gemma3Backbone(Gemma2Backbone):
    """Gemma 2's hooks, with two rotations."""

    config: Gemma3Config
    layer = Gemma3Layer

    def decode_family(self) -> str:
        return "gemma3"

    def decode_rope_plan(self) -> RopePlan:
        c = self.config
        local, whole = (
            RopeVariant.from_parameters(rope.rotary_width(c.head_dim), rope) for rope in (c.rope_local, c.rope)
        )
        return RopePlan.per_layer_variant(
            c.num_hidden_layers, local, whole, lambda layer: c.layer_types[layer] == WINDOWED
        )

    def decode_bound_fields(self) -> frozenset[str]:
        return super().decode_bound_fields() | {"rope_local"}


def tensor_name(name: str) -> str | None:
    """Tensor of a ``gemma3`` checkpoint, in either layout -> parameter; None for what is not the decoder's."""
    name = name.removeprefix("model.") if name.startswith("model.language_model.") else name
    if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    if not name.startswith("language_model."):
        return name
    name = name.removeprefix("language_model.")
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _check_nested(raw: RawConfig) -> None:
    """Refuse a config that nests another decoder."""
    if raw.nested_model_type not in (None, "gemma3_text"):
        raise errors.UnsupportedCheckpointError(
            "config.json: expected the text_config of a gemma3 checkpoint to be gemma3_text, found model_type "
            f"{raw.nested_model_type!r}; a newer release may know it"
        )


def _as_config(raw: RawConfig) -> RawConfig:
    """Put what a GGUF file says in its own words, or means by saying nothing, under names of a config."""
    if raw.format != "gguf":
        return raw
    changed: dict[str, Any] = {}
    if raw.source("rope_theta") == _GGUF_NO_BASE:
        changed["rope_theta"] = DEFAULTS["rope_theta"]
    pattern = raw.get(_GGUF_PATTERN)
    if raw.get("sliding_window") is None:
        changed["sliding_window_pattern"] = 1  # how a file says that no layer has a window
    elif isinstance(pattern, list):  # whether each layer has one
        changed["layer_types"] = [WINDOWED if windowed else DENSE for windowed in pattern]
    elif isinstance(pattern, bool):  # all of the list alike
        changed["layer_types"] = [WINDOWED if pattern else DENSE] * int(raw.get("num_hidden_layers") or 0)
    elif pattern is not None:
        changed["sliding_window_pattern"] = pattern
    return raw.with_values(changed, "family: what a GGUF file leaves out") if changed else raw


def _period(reader: ConfigReader) -> int:
    """How far one layer without a window is from the next; under its older name where the newer is absent."""
    key = "sliding_window_pattern"
    return reader.int(key if reader.raw.get(key) is not None else f"_{key}", _PERIOD)
