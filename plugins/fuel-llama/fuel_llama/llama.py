"""Llama 1, 2, 3 and 3.x, and releases with the same arithmetic (SmolLM, SmolLM2).

model_type ``llama``; GGUF architecture ``llama``. Touvron et al. 2023 (arXiv 2302.13971, 2307.09288), Grattafiori et
al. 2024 (arXiv 2407.21783). Pre-norm decoder: RMSNorm, grouped-query attention with rotary positions over the whole
head, SwiGLU; biases where the config says so; the head may share the embedding; head_dim is independent of hidden_size.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuel_core import (
    ConfigReader,
    DecodeBackbone,
    DecodeDims,
    DecodeLayerInputs,
    DecoderConfig,
    Family,
    KeyValue,
    MaskPlan,
    RawConfig,
    RopePlan,
    RopeVariant,
    layers,
)
from torch import Tensor, nn

# What the published configs leave out: Llama 1 and 2 state no base and no activation.
DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Resolved spec of a llama checkpoint."""

    rms_norm_eps: float
    attention_bias: bool = False
    mlp_bias: bool = False


def resolve_config(raw: RawConfig) -> LlamaConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = ConfigReader(raw, DEFAULTS, family="llama")
    return reader.finish(
        LlamaConfig,
        **reader.common(),
        rope=reader.rope(kinds=("default", "linear", "banded", "yarn")),
        hidden_act=reader.str("hidden_act", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
        attention_bias=reader.bool("attention_bias", False),
        mlp_bias=reader.bool("mlp_bias", False),
    )


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = layers.Linear(c.hidden_size, q_width, bias=c.attention_bias)
        self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.o_proj = layers.Linear(q_width, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = (
            rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for rows in layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        )  # [B, H, T, K], [B, G, T, K] twice
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        return self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5))


class LlamaMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        return layers.swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class LlamaLayer(nn.Module):
    """One decoder block."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(c)
        self.mlp = LlamaMLP(c)
        self.input_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        h: Tensor = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        h = h + self.mlp(self.post_attention_layernorm(h))
        return h


class LlamaModel(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)


class LlamaBackbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "llama"

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


def tensor_name(name: str) -> str | None:
    """Checkpoint tensor -> parameter. Old checkpoints store each layer's frequencies, which are no weights."""
    return None if name.endswith(".rotary_emb.inv_freq") else name


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    gguf_architectures=("llama",),
    resolve_config=resolve_config,
    build=LlamaBackbone,
    tensor_names=tensor_name,
    defaults=DEFAULTS,
)
