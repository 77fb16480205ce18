"""Gemma 1.

Differs from Llama in:
- embeddings are multiplied by sqrt(hidden_size), rounded to the dtype that the checkpoint declares;
- the gain of a norm is 1 + weight; normalised value and gain are multiplied in float32 and rounded once;
- the gate of the MLP is the tanh form of GELU, whatever ``hidden_act`` says; ``hidden_activation`` decides where it is
  present;
- head_dim is 256 unless stated, whatever hidden_size and the number of heads are;
- the head shares the embedding unless the config says otherwise.

model_type ``gemma``; GGUF architecture ``gemma``, whose files store 1 + weight for every norm. Gemma Team 2024 (arXiv
2403.08295); rounding and activation follow ``modeling_gemma`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
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
    errors,
    layers,
)
from torch import Tensor, nn

MODEL_TYPES = ("gemma",)
GGUF_ARCHITECTURES = ("gemma",)

# What the reference class takes for a key that a config.json leaves out.
DEFAULTS: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# Sizes that a GGUF file always means to state: there, a head without a width is hidden_size / heads.
SIZES: Mapping[str, Any] = {"head_dim": 256}

ROPE_KINDS = ("default", "linear", "banded", "yarn")
# Published word -> form of GELU.
_GELU: Mapping[str, str] = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Resolved spec of a gemma checkpoint."""

    rms_norm_eps: float
    attention_bias: bool
    embed_scale: float
    """Factor on the embeddings."""
    gain_offset: float
    """What is added to the stored weight of a norm: 1, or 0 where the file stores the gain itself."""


def reader_of(raw: RawConfig, defaults: Mapping[str, Any], sizes: Mapping[str, Any], family: str) -> ConfigReader:
    """A reader that fills in the reference class's sizes for config.json alone."""
    return ConfigReader(raw, defaults if raw.format == "gguf" else {**defaults, **sizes}, family=family)


def common_values(reader: ConfigReader) -> dict[str, Any]:
    """Values of the fields of ``GemmaConfig``, save ``rope``. Raises ConfigError for what cannot be."""
    if reader.bool("use_bidirectional_attention", False):
        raise errors.ConfigError(
            f"{reader.raw.source('use_bidirectional_attention')}: expected a decoder, found "
            f"use_bidirectional_attention true for family {reader.family!r}; choose a "
            "checkpoint that is no encoder"
        )
    values = reader.common()
    stored_whole = reader.raw.format == "gguf"
    reader.note("embed_scale", f"derived: sqrt(hidden_size) in {values['dtype']}")
    reader.note("gain_offset", "gguf: norms are stored as gains" if stored_whole else "family")
    return {
        **values,
        "hidden_act": reader.str("hidden_activation", choices=_GELU, into="hidden_act"),
        "rms_norm_eps": reader.float("rms_norm_eps"),
        "attention_bias": reader.bool("attention_bias", False),
        "embed_scale": embed_scale(values["hidden_size"], values["dtype"]),
        "gain_offset": 0.0 if stored_whole else 1.0,
    }


def embed_scale(hidden_size: int, dtype: str) -> float:
    """sqrt(hidden_size) as the reference holds it in a model of this dtype: 96 in bfloat16 is 9.8125."""
    root = torch.tensor(hidden_size**0.5, dtype=torch.float32, device="cpu")
    return float(root.to(getattr(torch, dtype)))


def resolve_config(raw: RawConfig) -> GemmaConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = reader_of(raw, DEFAULTS, SIZES, "gemma")
    return reader.finish(GemmaConfig, **common_values(reader), rope=reader.rope(kinds=ROPE_KINDS))


class GemmaRMSNorm(nn.Module):
    """RMS normalisation over the last axis with gain ``offset + weight``; everything in float32, rounded once."""

    def __init__(self, width: int, c: GemmaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps, self.offset = c.rms_norm_eps, c.gain_offset

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width] -> [..., width]`` in x's dtype."""
        gain = self.weight.to(torch.float32)
        if self.offset:
            # At every call, so that an edit of the weight in place reaches the next step.
            gain = gain + self.offset
        return F.rms_norm(x.to(torch.float32), x.shape[-1:], gain, self.eps).to(x.dtype)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...


class GemmaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.scale: float = c.head_dim**-0.5
        self.softcap: float | None = None
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = layers.Linear(c.hidden_size, q_width, bias=c.attention_bias)
        self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.o_proj = layers.Linear(q_width, c.hidden_size, bias=c.attention_bias)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, T, H, K]``, keys and values ``[B, T, G, K]`` of ``x [B, T, D]``."""
        q, k, v = layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        shape = (*x.shape[:2], -1, self.head_dim)
        return q.view(shape), k.view(shape), v.view(shape)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        q, k, v = (rows.transpose(1, 2) for rows in self.heads(x))
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        return self.o_proj(layers.attend(inputs, q, self.scale, softcap=self.softcap))


class GemmaMLP(nn.Module):
    """A linear unit gated by GELU (Shazeer 2020)."""

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__()
        self.form = _GELU[c.hidden_act]
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        gate, up = layers.project(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.gelu(gate, approximate=self.form) * up)


class GemmaLayer(nn.Module):
    """One decoder block."""

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(c)
        self.mlp = GemmaMLP(c)
        self.input_layernorm = GemmaRMSNorm(c.hidden_size, c)
        self.post_attention_layernorm = GemmaRMSNorm(c.hidden_size, c)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        h: Tensor = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        h = h + self.mlp(self.post_attention_layernorm(h))
        return h


class GemmaModel(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    def __init__(self, c: GemmaConfig, layer: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.num_hidden_layers))
        self.norm = GemmaRMSNorm(c.hidden_size, c)


class GemmaBackbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: GemmaConfig
    layer: Callable[[Any], nn.Module] = GemmaLayer

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GemmaModel(config, type(self).layer)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "gemma"

    def layer_state_specs(self) -> Sequence[KeyValue]:
        c = self.config
        return [KeyValue(c.num_key_value_heads, c.head_dim)] * c.num_hidden_layers

    def decode_dims(self) -> DecodeDims:
        c = self.config
        return DecodeDims.of(
            self.layer_state_specs(),
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            rope_width=c.rope.rotary_width(c.head_dim),
            embed_scale=c.embed_scale,
        )

    def decode_mask_plan(self) -> MaskPlan:
        return MaskPlan.dense(self.config.num_hidden_layers)

    def decode_rope_plan(self) -> RopePlan:
        c = self.config
        variant = RopeVariant.from_parameters(c.rope.rotary_width(c.head_dim), c.rope)
        return RopePlan.single(variant, c.num_hidden_layers)

    def decode_bound_fields(self) -> frozenset[str]:
        # Frequencies reach a held plan through the bound tables alone.
        return frozenset({"rope"})

    def decode_token_embedding(self) -> layers.Embedding:
        return self.model.embed_tokens

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        h: Tensor = self.model.layers[layer_idx](inputs)
        return h

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(h))

    def tied_weights(self) -> tuple[tuple[str, str], ...]:
        return (("lm_head.weight", "model.embed_tokens.weight"),) if self.config.tie_word_embeddings else ()
