"""Phi-1, Phi-1.5 and Phi-2.

Differs from Llama in:
- attention and MLP read one and the same normalised input and are added to the residual together;
- LayerNorm with gain and bias, one in a layer and one at the end;
- every projection has a bias, the head as well;
- the MLP has two matrices, with the tanh form of GELU between them;
- the first ``partial_rotary_factor`` of a head rotates, the rest passes through;
- ``qk_layernorm`` normalises queries and keys of each head before they rotate.

model_type ``phi``; GGUF architecture ``phi2``, whose files hold q, k and v as one matrix or as three. Li et al. 2023
(arXiv 2309.05463). The norm of queries and keys follows ``modeling_phi`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim, V vocab_size.
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
    errors,
    layers,
)
from torch import Tensor, nn

MODEL_TYPES = ("phi",)
GGUF_ARCHITECTURES = ("phi2",)
GGUF_NAMES = {
    "output_norm": "model.final_layernorm",
    "blk.{bid}.attn_qkv": "model.layers.{bid}.self_attn.qkv_proj",
    "blk.{bid}.attn_output": "model.layers.{bid}.self_attn.dense",
    "blk.{bid}.ffn_up": "model.layers.{bid}.mlp.fc1",
    "blk.{bid}.ffn_down": "model.layers.{bid}.mlp.fc2",
}

DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 10000.0,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
}
# Of a config.json without the key; a GGUF file without its own means that the whole head rotates.
_ROTARY_SHARE = 0.5

# Keys of the first releases -> those of today.
_OLD_SPELLING = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_key_value_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
}


@dataclass(frozen=True, kw_only=True)
class PhiConfig(DecoderConfig):
    """Resolved spec of a phi checkpoint."""

    layer_norm_eps: float
    qk_layernorm: bool = False
    fused_qkv: bool = False
    """q, k and v are one matrix in the file, and stay one."""


def resolve_config(raw: RawConfig) -> PhiConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    raw = _todays_spelling(raw)
    defaults = dict(DEFAULTS)
    if raw.format != "gguf":
        defaults["partial_rotary_factor"] = _ROTARY_SHARE
    reader = ConfigReader(raw, defaults, family="phi")
    fused = raw.format == "gguf" and reader.bool("fused_qkv", False)
    if raw.format != "gguf":
        reader.note("fused_qkv", "family")
    return reader.finish(
        PhiConfig,
        **reader.common(),
        rope=reader.rope(kinds=("default", "linear", "dynamic")),
        hidden_act=reader.str("hidden_act", choices=("gelu_new",)),
        layer_norm_eps=reader.float("layer_norm_eps"),
        qk_layernorm=reader.bool("qk_layernorm", False),
        fused_qkv=fused,
    )


def _todays_spelling(raw: RawConfig) -> RawConfig:
    raw = raw.renamed(_OLD_SPELLING)
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if "n_embd" in raw and raw.get("intermediate_size") is None and type(hidden) is int:
        raw = raw.with_values({"intermediate_size": 4 * hidden}, "derived: 4 * n_embd")
    width = raw.get("rotary_dim")
    if width is None or raw.get("partial_rotary_factor") is not None:
        return raw
    if type(hidden) is type(heads) is int and hidden > 0:
        if type(width) is not int or not 0 < width * heads <= hidden:
            raise errors.ConfigError(
                f"{raw.source('rotary_dim')}: expected 'rotary_dim' to be an integer between 1 and the width of a "
                f"head, found {width!r:.80} for family 'phi'; correct the config"
            )
        share = width * heads / hidden
        raw = raw.with_values(
            {"partial_rotary_factor": share}, f"derived: {raw.source('rotary_dim')}: rotary_dim / head_dim"
        )
    return raw


class PhiAttention(nn.Module):
    """Grouped-query attention with biases, of which the first features of a head rotate."""

    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.qkv_proj = layers.Linear(c.hidden_size, q_width + 2 * kv_width, bias=True) if c.fused_qkv else None
        if self.qkv_proj is None:
            self.q_proj = layers.Linear(c.hidden_size, q_width, bias=True)
            self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=True)
            self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=True)
        self.dense = layers.Linear(q_width, c.hidden_size, bias=True)
        self.q_layernorm = layers.LayerNorm(c.head_dim, c.layer_norm_eps) if c.qk_layernorm else None
        self.k_layernorm = layers.LayerNorm(c.head_dim, c.layer_norm_eps) if c.qk_layernorm else None

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = (rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2) for rows in self._project(x))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        return self.dense(layers.attend(inputs, q, self.head_dim**-0.5))

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """``[B, T, H * K]``, and ``[B, T, G * K]`` twice"""
        if self.qkv_proj is None:
            return layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        return split_qkv(self.qkv_proj(x), self.dense.in_features)


def split_qkv(qkv: Tensor, q_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """One product ``[B, T, (H + 2 G) * K]`` -> its parts of q (``q_width`` wide), k and v."""
    kv_width = (qkv.shape[-1] - q_width) // 2
    return (
        qkv.narrow(-1, 0, q_width),
        qkv.narrow(-1, q_width, kv_width),
        qkv.narrow(-1, q_width + kv_width, kv_width),
    )


class PhiMLP(nn.Module):
    """Two matrices and the tanh form of GELU."""

    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.fc1 = layers.Linear(c.hidden_size, c.intermediate_size, bias=True)
        self.fc2 = layers.Linear(c.intermediate_size, c.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PhiLayer(nn.Module):
    """One decoder block: attention and MLP side by side."""

    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.self_attn = PhiAttention(c)
        self.mlp = PhiMLP(c)
        self.input_layernorm = layers.LayerNorm(c.hidden_size, c.layer_norm_eps)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        x = self.input_layernorm(inputs.h)
        h: Tensor = self.self_attn(x, inputs) + self.mlp(x) + inputs.h
        return h


class PhiModel(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PhiLayer(c) for _ in range(c.num_hidden_layers))
        self.final_layernorm = layers.LayerNorm(c.hidden_size, c.layer_norm_eps)


class PhiBackbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: PhiConfig

    def __init__(self, config: PhiConfig) -> None:
        super().__init__()
        self.config = config
        self.model = PhiModel(config)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size, bias=True)

    def decode_family(self) -> str:
        return "phi"

    def layer_state_specs(self) -> Sequence[KeyValue]:
        c = self.config
        return [KeyValue(c.num_key_value_heads, c.head_dim)] * c.num_hidden_layers

    def decode_dims(self) -> DecodeDims:
        c = self.config
        width = c.rope.rotary_width(c.head_dim)
        return DecodeDims.of(self.layer_state_specs(), hidden=c.hidden_size, vocab=c.vocab_size, rope_width=width)

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
        return self.lm_head(self.model.final_layernorm(h))

    def tied_weights(self) -> tuple[tuple[str, str], ...]:
        # The head's bias is its own.
        return (("lm_head.weight", "model.embed_tokens.weight"),) if self.config.tie_word_embeddings else ()
