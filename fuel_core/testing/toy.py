"""A whole small family: what the kit is tested on, and an example to read.

It uses public names only, as a plugin does. Beside it stands its reference: a forward over the whole sequence in
float64 that shares no code with the decode path.

Shape letters: B batch, T tokens of this step, H query heads, K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    errors,
    layers,
)
from fuel_core.testing import Conformance, reference_oracle

__all__ = ["CONFORMANCE", "FAMILY", "ToyBackbone", "ToyConfig", "reference", "resolve_config"]

WINDOWED, DENSE = "sliding_attention", "full_attention"
_OPTIONAL = ("local_rope_theta", "embed_scale", "attn_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class ToyConfig(DecoderConfig):
    """Resolved spec of the toy."""

    rms_norm_eps: float
    attention_bias: bool = False
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    local_rope_theta: float | None = None
    """Base of the windowed layers; None: the same as the others'."""
    embed_scale: float | None = None
    attn_logit_softcapping: float | None = None


def resolve_config(raw: RawConfig) -> ToyConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = ConfigReader(raw, {"rms_norm_eps": 1e-6}, family="toy")
    values = reader.common()
    window = reader.optional_int("sliding_window")
    count = values["num_hidden_layers"]
    optional = {key: reader.float(key) if raw.get(key) is not None else None for key in _OPTIONAL}
    kinds = reader.list("layer_types", length=count)
    if kinds is not None and any(kind not in (WINDOWED, DENSE) for kind in kinds):
        raise errors.ConfigError(
            f"{raw.source('layer_types')}: expected layer_types to hold {WINDOWED} and {DENSE}, found {kinds!r:.80} "
            "for family 'toy'; correct the config"
        )
    return reader.finish(
        ToyConfig,
        **values,
        rope=reader.rope(kinds=("default", "linear", "yarn")),
        hidden_act=reader.str("hidden_act", "silu", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
        attention_bias=reader.bool("attention_bias", False),
        layer_types=tuple(kinds) if kinds else ((DENSE if window is None else WINDOWED),) * count,
        sliding_window=window,
        **optional,
    )


class ToyAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.head_dim, self.softcap = c.head_dim, c.attn_logit_softcapping
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = layers.Linear(c.hidden_size, q_width, bias=c.attention_bias)
        self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.o_proj = layers.Linear(q_width, c.hidden_size)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, T, D]`` -> q ``[B, H, T, K]``, k and v ``[B, G, T, K]``."""
        b, t, _ = x.shape
        q, k, v = layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (rows.view(b, t, -1, self.head_dim).transpose(1, 2) for rows in (q, k, v))
        return q, k, v

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        q, k, v = self.heads(x)
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        return self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5, softcap=self.softcap))


class ToyMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return layers.swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class ToyLayer(nn.Module):
    """Pre-norm block."""

    def __init__(self, c: ToyConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.input_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = ToyAttention(c)
        self.post_attention_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = ToyMLP(c)

    def forward(self, inputs: DecodeLayerInputs) -> Tensor:
        h: Tensor = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class ToyModel(nn.Module):
    """The part of the checkpoint under the prefix ``model.``."""

    layer_class: type[ToyLayer] = ToyLayer

    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.embed_tokens = layers.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(c, i) for i in range(c.num_hidden_layers))
        self.norm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)


class ToyBackbone(DecodeBackbone):
    """The hooks, in the order a step calls them."""

    config: ToyConfig
    model_class: type[ToyModel] = ToyModel

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "toy"

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
        c = self.config
        if c.sliding_window is None:
            return MaskPlan.dense(c.num_hidden_layers)
        return MaskPlan.per_layer_window(c.num_hidden_layers, c.sliding_window, lambda i: c.layer_types[i] == WINDOWED)

    def decode_rope_plan(self) -> RopePlan:
        c = self.config
        width = c.rope.rotary_width(c.head_dim)
        base = RopeVariant.from_parameters(width, c.rope)
        if c.local_rope_theta is None:
            return RopePlan.single(base, c.num_hidden_layers)
        local = RopeVariant.default(width, c.local_rope_theta)
        return RopePlan.per_layer_variant(c.num_hidden_layers, local, base, lambda i: c.layer_types[i] == WINDOWED)

    def decode_bound_fields(self) -> frozenset[str]:
        return frozenset({"rope", "local_rope_theta", "sliding_window"})

    def decode_token_embedding(self) -> layers.Embedding:
        return self.model.embed_tokens

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        h: Tensor = self.model.layers[layer_idx](inputs)
        return h

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(h))

    def tied_weights(self) -> tuple[tuple[str, str], ...]:
        return (("lm_head.weight", "model.embed_tokens.weight"),) if self.config.tie_word_embeddings else ()


FAMILY = Family(
    name="toy", model_types=("toy",), gguf_architectures=(), resolve_config=resolve_config, build=ToyBackbone
)


# -- the truth -----------------------------------------------------------------------------------------------------


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain


def _turned(x: Tensor, frequencies: Sequence[float], scale: float) -> Tensor:
    """X ``[T, heads, K]``, position = row: each pair is a complex number that is turned."""
    half = len(frequencies)
    angle = torch.outer(torch.arange(x.shape[0], dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    turn = torch.polar(torch.full_like(angle, scale), angle)[:, None]
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), dim=-1)


def _rotation(c: ToyConfig, layer_idx: int) -> tuple[list[float], float]:
    """Inverse frequencies and the factor on cos and sin (yarn: Peng et al. 2023, arXiv 2309.00071)."""
    width = c.rope.rotary_width(c.head_dim)
    local = c.local_rope_theta is not None and c.layer_types[layer_idx] == WINDOWED
    theta = c.local_rope_theta if local else c.rope.theta
    assert theta is not None
    plain = [theta ** (-2.0 * i / width) for i in range(width // 2)]
    if local or c.rope.kind == "default":
        return plain, 1.0
    factor, original = c.rope.factor, c.rope.original_max_position_embeddings
    assert factor is not None
    if c.rope.kind == "linear":
        return [f / factor for f in plain], 1.0
    assert original is not None

    def turning(times: float) -> float:
        return width * math.log(original / (times * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first, last = max(math.floor(turning(32.0)), 0), min(math.ceil(turning(1.0)), width - 1)
    ramp = [min(max((i - first) / max(last - first, 0.001), 0.0), 1.0) for i in range(width // 2)]
    return [f * (1.0 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)], 0.1 * math.log(factor) + 1.0


def reference(c: ToyConfig, weights: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """Logits ``[T, V]``, float64, of the whole sequence."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    h = w["model.embed_tokens.weight"][list(ids)] * (1.0 if c.embed_scale is None else c.embed_scale)
    t, group = len(ids), c.num_attention_heads // c.num_key_value_heads
    rows, columns = torch.arange(t)[:, None], torch.arange(t)[None, :]

    def product(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    for i in range(c.num_hidden_layers):
        place = f"model.layers.{i}"
        x = _norm(h, w[f"{place}.input_layernorm.weight"], c.rms_norm_eps)
        q, k, v = (product(x, f"{place}.self_attn.{n}_proj").view(t, -1, c.head_dim) for n in "qkv")
        frequencies, scale = _rotation(c, i)
        q, k = _turned(q, frequencies, scale), _turned(k, frequencies, scale)
        seen = columns <= rows
        if c.sliding_window is not None and c.layer_types[i] == WINDOWED:
            seen = seen & (rows - columns < c.sliding_window)
        heads = []
        for n in range(c.num_attention_heads):
            scores = q[:, n] @ k[:, n // group].T / math.sqrt(c.head_dim)
            if c.attn_logit_softcapping is not None:
                scores = c.attn_logit_softcapping * torch.tanh(scores / c.attn_logit_softcapping)
            heads.append(torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v[:, n // group])
        h = h + product(torch.cat(heads, -1), f"{place}.self_attn.o_proj")
        x = _norm(h, w[f"{place}.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = product(x, f"{place}.mlp.gate_proj"), product(x, f"{place}.mlp.up_proj")
        h = h + product(gate * torch.sigmoid(gate) * up, f"{place}.mlp.down_proj")
    head = w["model.embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]
    return _norm(h, w["model.norm.weight"], c.rms_norm_eps) @ head.T


# -- the declaration -----------------------------------------------------------------------------------------------

BASE: Mapping[str, Any] = {
    "model_type": "toy",
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}

CONFORMANCE = Conformance(
    family=FAMILY,
    configs={
        "plain": {**BASE, "attention_bias": True, "rms_norm_eps": 1e-3},
        "windowed": {
            **BASE,
            "layer_types": [WINDOWED, DENSE, WINDOWED],
            "sliding_window": 5,
            "local_rope_theta": 100.0,
            "num_key_value_heads": 4,
            "embed_scale": 3.3,
            "attn_logit_softcapping": 2.5,
        },
        "partial": {
            **BASE,
            "sliding_window": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.6,
            },
        },
    },
    capabilities={
        "bias",
        "embed_scale",
        "full_heads",
        "grouped_heads",
        "partial_rotary",
        "rope",
        "rope_variants",
        "tied_head",
        "window",
        "window_variants",
    },
    oracle=reference_oracle(reference),
)
