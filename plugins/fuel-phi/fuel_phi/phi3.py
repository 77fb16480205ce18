"""Phi-3, Phi-3.5, Phi-4-mini and Phi-4.

Differs from Llama in:
- q, k and v are one matrix, split by rows after the product, and so are gate and up;
- every layer attends through a window where ``sliding_window`` is set;
- ``longrope`` (``su`` in early files) divides the frequencies by one of two lists, whichever the length of the sequence
  asks for, and scales cos and sin alike under both;
- the first ``partial_rotary_factor`` of a head rotates, the rest passes through;
- no bias anywhere.

model_type ``phi3``; GGUF architecture ``phi3``. Abdin et al. 2024 (arXiv 2404.14219). Windows and the choice of the
list follow ``modeling_phi3`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim, I intermediate
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from fuel_core import (
    ConfigReader,
    DecodeBackbone,
    DecodeDims,
    DecodeLayerInputs,
    DecoderConfig,
    KeyValue,
    MaskPlan,
    RawConfig,
    RopePlan,
    RopeVariant,
    layers,
)
from torch import Tensor, nn

from fuel_phi.phi import split_qkv

MODEL_TYPES = ("phi3",)
GGUF_ARCHITECTURES = ("phi3",)
GGUF_NAMES = {"blk.{bid}.ffn_up": "model.layers.{bid}.mlp.gate_up_proj"}

DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}
_ORIGINAL = "original_max_position_embeddings"

# GGUF files that were converted before the key existed say nothing of the window that Phi-3-mini-4k and
# Phi-3-medium-4k have: (layers, positions, rows of the vocabulary) -> window.
_UNSTATED_WINDOWS = {(32, 4096, 32064): 2047, (40, 4096, 32064): 2047}


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Resolved spec of a phi3 checkpoint."""

    rms_norm_eps: float
    sliding_window: int | None


def resolve_config(raw: RawConfig) -> Phi3Config:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    raw = _stated_window(raw) if raw.format == "gguf" else _one_longrope(raw)
    reader = ConfigReader(raw, DEFAULTS, family="phi3")
    return reader.finish(
        Phi3Config,
        **reader.common(),
        rope=reader.rope(kinds=("default", "longrope")),
        hidden_act=reader.str("hidden_act", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
        sliding_window=reader.optional_int("sliding_window"),
    )


def _one_longrope(raw: RawConfig) -> RawConfig:
    """Name the scaling of early files as it is named today; the length beside it counts, as in the reference."""
    for key in ("rope_scaling", "rope_parameters"):
        block = raw.get(key)
        if not isinstance(block, Mapping) or not isinstance(block.get("long_factor"), list | tuple):
            continue
        changed = dict(block)
        if block.get("rope_type", block.get("type")) == "yarn":
            # Two lists are none of YaRN's numbers: the first 128k release used the word for something else.
            changed.pop("type", None)
            changed["rope_type"] = "longrope"
        if raw.get(_ORIGINAL) is not None:
            changed[_ORIGINAL] = raw[_ORIGINAL]
        raw = raw.with_values({key: changed}, raw.source(key))
    return raw


def _stated_window(raw: RawConfig) -> RawConfig:
    """The window of a GGUF file: 0 stands for none, and what early files leave out is supplied."""
    if raw.get("sliding_window") == 0:
        return raw.with_values({"sliding_window": None}, f"{raw.source('sliding_window')} is 0")
    if "sliding_window" not in raw:
        shape = tuple(raw.get(key) for key in ("num_hidden_layers", "max_position_embeddings", "vocab_size"))
        window = next((width for known, width in _UNSTATED_WINDOWS.items() if known == shape), None)
        if window is not None:
            return raw.with_values({"sliding_window": window}, "family: not stated by early GGUF files")
    return raw


class Phi3Attention(nn.Module):
    """Grouped-query attention whose q, k and v are one product."""

    def __init__(self, c: Phi3Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.qkv_proj = layers.Linear(c.hidden_size, q_width + 2 * kv_width)
        self.o_proj = layers.Linear(q_width, c.hidden_size)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = (
            rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for rows in split_qkv(self.qkv_proj(x), self.o_proj.in_features)
        )  # [B, H, T, K], [B, G, T, K] twice
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        return self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5))


class Phi3MLP(nn.Module):
    """SwiGLU whose gate and up are one product."""

    def __init__(self, c: Phi3Config) -> None:
        super().__init__()
        self.gate_up_proj = layers.Linear(c.hidden_size, 2 * c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [B, T, I] each
        return self.down_proj(F.silu(gate) * up)


class Phi3Layer(nn.Module):
    """One decoder block."""

    def __init__(self, c: Phi3Config) -> None:
        super().__init__()
        self.self_attn = Phi3Attention(c)
        self.mlp = Phi3MLP(c)
        self.input_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        h: Tensor = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        h = h + self.mlp(self.post_attention_layernorm(h))
        return h


class Phi3Model(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    def __init__(self, c: Phi3Config) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Phi3Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)


class Phi3Backbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: Phi3Config

    def __init__(self, config: Phi3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Phi3Model(config)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "phi3"

    def layer_state_specs(self) -> Sequence[KeyValue]:
        c = self.config
        return [KeyValue(c.num_key_value_heads, c.head_dim)] * c.num_hidden_layers

    def decode_dims(self) -> DecodeDims:
        c = self.config
        width = c.rope.rotary_width(c.head_dim)
        return DecodeDims.of(self.layer_state_specs(), hidden=c.hidden_size, vocab=c.vocab_size, rope_width=width)

    def decode_mask_plan(self) -> MaskPlan:
        c = self.config
        if c.sliding_window is None:
            return MaskPlan.dense(c.num_hidden_layers)
        return MaskPlan([c.sliding_window], [0] * c.num_hidden_layers)

    def decode_rope_plan(self) -> RopePlan:
        c = self.config
        variant = RopeVariant.from_parameters(c.rope.rotary_width(c.head_dim), c.rope)
        return RopePlan.single(variant, c.num_hidden_layers)

    def decode_bound_fields(self) -> frozenset[str]:
        # Frequencies and widths reach a held plan through bound data alone; whether there is a window is the plan's.
        return frozenset({"rope", "sliding_window"})

    def decode_token_embedding(self) -> layers.Embedding:
        return self.model.embed_tokens

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        h: Tensor = self.model.layers[layer_idx](inputs)
        return h

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(h))

    def tied_weights(self) -> tuple[tuple[str, str], ...]:
        return (("lm_head.weight", "model.embed_tokens.weight"),) if self.config.tie_word_embeddings else ()
