"""OLMo-2.

Differs from a plain pre-norm decoder (RMSNorm, grouped-query attention with rotary positions, SwiGLU) in:
- attention and MLP read the residual as it is, and what they give is normalised before it is added;
- queries and keys are normalised over the whole projection, before they are cut into heads and rotated;
- a norm multiplies by its gain in float32 and rounds once;
- ``attention_bias`` is the one switch of biases: q, k, v and o; the MLP has none.

model_type ``olmo2``; GGUF architecture ``olmo2``, which files of OLMo-3 bear as well: those have windows and are
refused. OLMo team 2025 (arXiv 2501.00656). The places of the norms follow ``modeling_olmo2`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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

MODEL_TYPES = ("olmo2",)
GGUF_ARCHITECTURES = ("olmo2",)

# Of the reference class, for keys that a file may leave out; GGUF files name no activation. The base of the rotation
# has no default: every release states one, and a guessed one gives fluent nonsense on long text.
DEFAULTS: Mapping[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """Resolved spec of an olmo2 checkpoint."""

    rms_norm_eps: float
    attention_bias: bool = False


def resolve_config(raw: RawConfig) -> OlmoConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    if raw.format == "gguf" and raw.get("sliding_window"):
        raise errors.UnsupportedCheckpointError(
            f"{raw.source('sliding_window')}: expected OLMo-2, which has no window, found a window of "
            f"{raw['sliding_window']}: this is OLMo-3, which converters store as olmo2; use a file of OLMo-2"
        )
    reader = ConfigReader(raw, DEFAULTS, family="olmo")
    return reader.finish(
        OlmoConfig,
        **reader.common(),
        rope=reader.rope(kinds=("default", "linear", "banded", "yarn")),
        hidden_act=reader.str("hidden_act", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
        attention_bias=reader.bool("attention_bias", False),
    )


class OlmoRMSNorm(layers.RMSNorm):
    """RMS normalisation over the last axis; gain included in float32, rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width] -> [..., width]`` in x's dtype."""
        gain = self.weight.to(torch.float32)
        return layers.rms_norm(x.to(torch.float32), gain, self.eps).to(x.dtype)


class OlmoAttention(nn.Module):
    """Grouped-query attention whose queries and keys are normalised before they are cut into heads."""

    def __init__(self, c: OlmoConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = layers.Linear(c.hidden_size, q_width, bias=c.attention_bias)
        self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.o_proj = layers.Linear(q_width, c.hidden_size, bias=c.attention_bias)
        self.q_norm = OlmoRMSNorm(q_width, c.rms_norm_eps)
        self.k_norm = OlmoRMSNorm(kv_width, c.rms_norm_eps)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = layers.project(x, self.q_proj, self.k_proj, self.v_proj)  # [B, T, H*K], [B, T, G*K] twice
        q, k, v = (
            rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2) for rows in (self.q_norm(q), self.k_norm(k), v)
        )  # [B, H, T, K], [B, G, T, K] twice
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        return self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5))


class OlmoMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: OlmoConfig) -> None:
        super().__init__()
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        return layers.swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class OlmoLayer(nn.Module):
    """One decoder block: the norms come after what they normalise."""

    def __init__(self, c: OlmoConfig) -> None:
        super().__init__()
        self.self_attn = OlmoAttention(c)
        self.mlp = OlmoMLP(c)
        self.post_attention_layernorm = OlmoRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_feedforward_layernorm = OlmoRMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        h = inputs.h + self.post_attention_layernorm(self.self_attn(inputs.h, inputs))
        return h + self.post_feedforward_layernorm(self.mlp(h))


class OlmoModel(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    def __init__(self, c: OlmoConfig) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(OlmoLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = OlmoRMSNorm(c.hidden_size, c.rms_norm_eps)


class OlmoBackbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: OlmoConfig

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = OlmoModel(config)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "olmo"

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
        return self.lm_head(self.model.norm(h))

    def tied_weights(self) -> tuple[tuple[str, str], ...]:
        return (("lm_head.weight", "model.embed_tokens.weight"),) if self.config.tie_word_embeddings else ()
