"""Qwen1.5, Qwen2 and Qwen2.5.

Differs from Llama in:
- the query, key and value projections always have a bias, which no config key says, and the output projection and the
  MLP never do;
- windows: none unless ``use_sliding_window`` is true and ``sliding_window`` is not null, and then on the layers from
  ``max_window_layers`` on, which may be none of them; ``layer_types`` says it instead where a config has it.

model_type ``qwen2``; GGUF architecture ``qwen2``, whose files know no window. Yang et al. 2024 (arXiv 2407.10671,
2412.15115). The windows follow ``configuration_qwen2`` of transformers. Quantised releases (awq, gptq) are refused by
name.

Shape letters: B batch, T tokens of this step, D hidden_size, H query heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

MODEL_TYPES = ("qwen2",)
GGUF_ARCHITECTURES = ("qwen2",)

# What a config that lacks the key means, as in the reference class.
DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 32768}
_WINDOW_OF_ABSENT_KEY = 4096
_DENSE_LAYERS_OF_ABSENT_KEY = 28
WINDOWED, DENSE = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Resolved spec of a checkpoint of any generation."""

    rms_norm_eps: float
    sliding_window: int | None
    """None where no layer has one, whatever the config says beside a switch that is off."""
    layer_types: tuple[str, ...]
    """``sliding_attention`` or ``full_attention`` for each layer."""


def resolve_config(raw: RawConfig) -> Qwen2Config:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = ConfigReader(raw, DEFAULTS, family="qwen2")
    values = common_values(reader)
    return reader.finish(Qwen2Config, **values, **windows(reader, values["num_hidden_layers"]))


def common_values(reader: ConfigReader) -> dict[str, Any]:
    """What every generation reads alike: everything but its windows."""
    return {
        **reader.common(),
        "rope": reader.rope(kinds=("default", "linear", "banded", "yarn")),
        "hidden_act": reader.str("hidden_act", choices=("silu",)),
        "rms_norm_eps": reader.float("rms_norm_eps"),
    }


def windows(reader: ConfigReader, n_layers: int) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types`` of the spec.

    Raises ConfigError for a word that is no layer type, a list of another length, and a windowed layer without a width
    or beside a switch that is off.
    """
    on = window_switch(reader)
    width = window_width(reader) if on else None
    kinds = reader.list("layer_types", length=n_layers)
    if kinds is None:
        first = reader.int("max_window_layers", _DENSE_LAYERS_OF_ABSENT_KEY, minimum=0) if width else n_layers
        kinds = tuple(WINDOWED if layer >= first else DENSE for layer in range(n_layers))
        reader.note("layer_types", "derived: use_sliding_window, sliding_window, max_window_layers")
    place = f"{reader.raw.source('layer_types')}: expected"
    for layer, kind in enumerate(kinds):
        if kind not in (WINDOWED, DENSE):
            raise errors.ConfigError(
                f"{place} layer_types[{layer}] to be {WINDOWED} or {DENSE}, found {kind!r:.80} for family "
                f"{reader.family!r}; correct the config"
            )
        if kind == WINDOWED and width is None:
            found = "no sliding_window" if on else "use_sliding_window false"
            raise errors.ConfigError(
                f"{place} a width for layer {layer}, which is {WINDOWED}, found {found} for family "
                f"{reader.family!r}; correct the config"
            )
    return {"sliding_window": width if WINDOWED in kinds else None, "layer_types": kinds}


def window_switch(reader: ConfigReader) -> bool:
    """``use_sliding_window``: released configs state a width beside a switch that is off."""
    return reader.bool("use_sliding_window", False, into="sliding_window")


def window_width(reader: ConfigReader) -> int | None:
    """``sliding_window``; null is none, and a config without the key means what its reference class says."""
    if "sliding_window" not in reader.raw:
        reader.note("sliding_window", "family default")
        return _WINDOW_OF_ABSENT_KEY
    return reader.optional_int("sliding_window")


class Qwen2Attention(nn.Module):
    """Grouped-query attention with rotary positions; biases on what goes in and none on what comes out."""

    def __init__(self, c: Qwen2Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = layers.Linear(c.hidden_size, q_width, bias=True)
        self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=True)
        self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=True)
        self.o_proj = layers.Linear(q_width, c.hidden_size)

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


class Qwen2MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Qwen2Config) -> None:
        super().__init__()
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        return layers.swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class Qwen2Layer(nn.Module):
    """One decoder block; other generations bring other parts."""

    def __init__(self, c: Qwen2Config, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        h: Tensor = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        h = h + self.mlp(self.post_attention_layernorm(h), inputs)
        return h


class Qwen2Model(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    def __init__(self, c: Qwen2Config, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)


class Qwen2Backbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: Qwen2Config

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen2Model(config, [self.block(layer) for layer in range(config.num_hidden_layers)])
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def block(self, layer_idx: int) -> nn.Module:
        """One decoder block of this generation."""
        return Qwen2Layer(self.config, Qwen2Attention(self.config), Qwen2MLP(self.config))

    def decode_family(self) -> str:
        return "qwen2"

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
        return MaskPlan.per_layer_window(c.num_hidden_layers, c.sliding_window, lambda i: c.layer_types[i] == WINDOWED)

    def decode_rope_plan(self) -> RopePlan:
        c = self.config
        variant = RopeVariant.from_parameters(c.rope.rotary_width(c.head_dim), c.rope)
        return RopePlan.single(variant, c.num_hidden_layers)

    def decode_bound_fields(self) -> frozenset[str]:
        # Frequencies reach a held plan through the bound tables, a width through masks and window starts alone.
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


def tensor_name(name: str) -> str | None:
    """Checkpoint tensor -> parameter. Old checkpoints store each layer's frequencies, which are no weights."""
    return None if name.endswith(".rotary_emb.inv_freq") else name
