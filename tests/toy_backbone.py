"""Toy models for the core's tests, and for each a reference that shares no code with the decode path.

Sizes avoid coincidences that hide bugs: hidden 96, 4 query heads over 2 kv heads of 20, so that the q width (80)
is not hidden, and head_dim is no power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fuel_core import layers
from fuel_core.backbone import DecodeBackbone, DecodeDims, DecodeLayerInputs
from fuel_core.kv_cache import KeyValue, KvCache, LayerStateSpec, Slots, StateSlot
from fuel_core.layers.packed_formats import pieces, shape_of
from fuel_core.layers.weight_formats import FORMATS, store
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant


@dataclass(frozen=True)
class ToyConfig:
    """Resolved spec of the toy transformer."""

    vocab_size: int = 67
    hidden_size: int = 96
    intermediate_size: int = 136
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 20
    rotary_dim: int = 20
    interleaved: bool = False
    rms_norm_eps: float = 1e-5
    rope_thetas: tuple[float, ...] = (10000.0,)
    """One per variant; two: odd layers take the second."""
    window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    """None: every layer when ``window`` is set."""
    embed_scale: float | None = None
    softcap: float | None = None
    attention_bias: bool = True
    sources: dict[str, str] = field(default_factory=dict, compare=False)


class ToyLayer(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.input_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = layers.Linear(c.hidden_size, q, bias=c.attention_bias)
        self.k_proj = layers.Linear(c.hidden_size, kv, bias=c.attention_bias)
        self.v_proj = layers.Linear(c.hidden_size, kv, bias=c.attention_bias)
        self.o_proj = layers.Linear(q, c.hidden_size)
        self.post_attention_layernorm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)


class ToyBackbone(DecodeBackbone):
    """Pre-norm, grouped-query attention, SwiGLU; windows, two RoPE bases, partial and interleaved rotary on demand."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ToyLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "toy"

    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        c = self.config
        return [KeyValue(c.num_key_value_heads, c.head_dim)] * c.num_hidden_layers

    def decode_dims(self) -> DecodeDims:
        c = self.config
        return DecodeDims.of(
            self.layer_state_specs(),
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            rope_width=c.rotary_dim,
            embed_scale=c.embed_scale,
        )

    def decode_mask_plan(self) -> MaskPlan:
        c = self.config
        if c.window is None:
            return MaskPlan.dense(c.num_hidden_layers)
        chosen = range(c.num_hidden_layers) if c.windowed_layers is None else c.windowed_layers
        return MaskPlan.per_layer_window(c.num_hidden_layers, c.window, lambda i: i in chosen)

    def decode_rope_plan(self) -> RopePlan:
        c = self.config
        variants = [RopeVariant.default(c.rotary_dim, theta) for theta in c.rope_thetas]
        if len(variants) == 1:
            return RopePlan.single(variants[0], c.num_hidden_layers)
        return RopePlan.per_layer_variant(c.num_hidden_layers, variants[1], variants[0], lambda i: i % 2 == 1)

    def decode_bound_fields(self) -> frozenset[str]:
        return frozenset({"rope_thetas", "window"})

    def decode_token_embedding(self) -> layers.Embedding:
        return self.embed_tokens

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        c, layer = self.config, self.layers[layer_idx]
        b, t, _ = inputs.h.shape
        x = layer.input_layernorm(inputs.h)
        q, k, v = layers.project(x, layer.q_proj, layer.k_proj, layer.v_proj)
        q = q.view(b, t, -1, c.head_dim).transpose(1, 2)
        k = k.view(b, t, -1, c.head_dim).transpose(1, 2)
        v = v.view(b, t, -1, c.head_dim).transpose(1, 2)
        rotate = layers.rotate_interleaved if c.interleaved else layers.rotate
        layers.write_state(inputs, "k", rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = rotate(q, inputs.cos, inputs.sin)
        h = inputs.h + layer.o_proj(layers.attend(inputs, q, c.head_dim**-0.5, softcap=c.softcap))
        x = layer.post_attention_layernorm(h)
        return h + layers.swiglu(x, layer.gate_proj, layer.up_proj, layer.down_proj)

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        return self.lm_head(self.norm(h))


class LatentLayer(nn.Module):
    def __init__(self, hidden: int, latent: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm = layers.RMSNorm(hidden, 1e-5)
        self.q_proj = layers.Linear(hidden, heads * head_dim)
        self.down = layers.Linear(hidden, latent)
        self.up = layers.Linear(latent, heads * head_dim)
        self.mix = layers.Linear(3, 1)
        self.o_proj = layers.Linear(heads * head_dim, hidden)


class LatentBackbone(DecodeBackbone):
    """Keeps one latent row a position (a named positional slot), and a rolling window of the last two inputs."""

    HEADS, HEAD_DIM, LATENT = 3, 12, 22

    def __init__(self, config: ToyConfig, rolling: bool = False) -> None:
        super().__init__()
        self.config = config
        self.rolling = rolling
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LatentLayer(config.hidden_size, self.LATENT, self.HEADS, self.HEAD_DIM)
            for _ in range(config.num_hidden_layers)
        )
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "latent-toy"

    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        slots = [StateSlot("latent", (self.LATENT,))]
        if self.rolling:
            slots.append(StateSlot("recent", (2, self.config.hidden_size), kind="rolling"))
        return [Slots(tuple(slots))] * self.config.num_hidden_layers

    def decode_dims(self) -> DecodeDims:
        c = self.config
        return DecodeDims.of(
            self.layer_state_specs(), hidden=c.hidden_size, vocab=c.vocab_size, rope_width=self.HEAD_DIM
        )

    def decode_mask_plan(self) -> MaskPlan:
        n, window = self.config.num_hidden_layers, self.config.window
        return MaskPlan.dense(n) if window is None else MaskPlan.split_window(n, n, window)

    def decode_rope_plan(self) -> RopePlan:
        return RopePlan.single(RopeVariant.default(self.HEAD_DIM, 10000.0), self.config.num_hidden_layers)

    def decode_token_embedding(self) -> layers.Embedding:
        return self.embed_tokens

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        layer = self.layers[layer_idx]
        b, t, _ = inputs.h.shape
        x = layer.norm(inputs.h)
        if self.rolling:
            recent = layers.read_state(inputs, "recent")  # [B, 2, D]
            history = torch.cat((recent, x), dim=1)  # [B, 2 + T, D]
            stacked = torch.stack((history[:, :t], history[:, 1 : t + 1], history[:, 2:]), dim=-1)
            layers.write_state(inputs, "recent", history[:, -2:])
            x = layer.mix(stacked).squeeze(-1)
        q = layer.q_proj(x).view(b, t, self.HEADS, self.HEAD_DIM).transpose(1, 2)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        layers.write_state(inputs, "latent", layer.down(x))
        kv = layer.up(layers.read_state(inputs, "latent"))  # [B, N, H * K]
        kv = kv.view(b, -1, self.HEADS, self.HEAD_DIM).transpose(1, 2)
        scores = q @ kv.transpose(-1, -2) * self.HEAD_DIM**-0.5
        mask = layers.live_mask(inputs)
        if mask is not None:
            scores = scores + mask
        out = torch.softmax(scores, dim=-1) @ kv
        return inputs.h + layer.o_proj(out.transpose(1, 2).reshape(b, t, -1))

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        return self.lm_head(h)


def fill(model: nn.Module, seed: int = 0) -> None:
    """Random weights: norm gains around 1 but not 1, biases not zero, scores neither flat nor saturated."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data = (1.0 + 0.3 * noise if "norm" in name else 0.2 * noise).to(parameter.dtype)
        else:
            parameter.data = (noise * 1.6 / math.sqrt(parameter.shape[-1])).to(parameter.dtype)


def toy(seed: int = 0, **changes: object) -> ToyBackbone:
    model = ToyBackbone(ToyConfig(**changes))  # type: ignore[arg-type]
    fill(model, seed)
    return model


def latent_toy(seed: int = 0, rolling: bool = False, **changes: object) -> LatentBackbone:
    model = LatentBackbone(ToyConfig(**changes), rolling=rolling)  # type: ignore[arg-type]
    fill(model, seed)
    return model


def pack(model: DecodeBackbone, word: str) -> DecodeBackbone:
    """Store every weight in a packed format, or in int8 where that cannot hold it; returns the model."""
    for module in model.modules():
        if isinstance(module, layers.Linear | layers.Embedding):
            fits = FORMATS[word].cannot_hold(*shape_of(module)) is None
            store(module, module.weight, word if fits else "int8")
    return model


def matrix(module: layers.Linear | layers.Embedding) -> Tensor:
    """The matrix that a module stands for, float64."""
    if module.packed_format is None:
        return module.weight.double()
    stored = {name: p for name, p in module.named_parameters() if name != "bias"}
    n, k = shape_of(module)
    return torch.cat([module.weight_format.unpacked(stored, (n, k), a, b) for a, b in pieces(n, k)]).double()


def new_cache(
    model: DecodeBackbone, max_seq_len: int = 32, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> KvCache:
    return KvCache.with_capacity(model.layer_state_specs(), max_seq_len=max_seq_len, dtype=dtype, device=device)


# -- references: whole-sequence forwards in float64 that share no code with the decode path ---------------------


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _linear(x: Tensor, module: layers.Linear) -> Tensor:
    y = x @ matrix(module).T
    return y if module.bias is None else y + module.bias.double()


def _rotated(x: Tensor, theta: float | Tensor, width: int, interleaved: bool, scale: float = 1.0) -> Tensor:
    """x ``[T, heads, K]`` in float64, position = row, written as complex multiplication.

    theta: the base, or the frequencies themselves.
    """
    t = x.shape[0]
    frequency = theta
    if not isinstance(frequency, Tensor):
        frequency = frequency ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(t, dtype=torch.float64), frequency)[:, None, :]
    turn = torch.polar(torch.full_like(angle, scale), angle)
    out = x.clone()
    if interleaved:
        z = torch.complex(x[..., 0:width:2], x[..., 1:width:2]) * turn
        out[..., 0:width:2], out[..., 1:width:2] = z.real, z.imag
    else:
        half = width // 2
        z = torch.complex(x[..., :half], x[..., half:width]) * turn
        out[..., :half], out[..., half:width] = z.real, z.imag
    return out


def _visible(t: int, window: int | None) -> Tensor:
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    seen = j <= i
    return seen if window is None else seen & (i - j < window)


def attended(model: ToyBackbone, i: int, h: Tensor, frequencies: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """``[T, D]`` float64 after the attention of layer i, with its residual."""
    c, layer, t = model.config, model.layers[i], h.shape[0]
    group = c.num_attention_heads // c.num_key_value_heads
    theta: float | Tensor = c.rope_thetas[-1] if i % 2 == 1 else c.rope_thetas[0]
    if frequencies is not None:
        theta = frequencies
    windowed = c.window is not None and (c.windowed_layers is None or i in c.windowed_layers)
    x = _norm(h, layer.input_layernorm.weight, c.rms_norm_eps)
    q = _rotated(_linear(x, layer.q_proj).view(t, -1, c.head_dim), theta, c.rotary_dim, c.interleaved, scale)
    k = _rotated(_linear(x, layer.k_proj).view(t, -1, c.head_dim), theta, c.rotary_dim, c.interleaved, scale)
    v = _linear(x, layer.v_proj).view(t, -1, c.head_dim)
    heads = []
    for n in range(c.num_attention_heads):
        scores = q[:, n] @ k[:, n // group].T / math.sqrt(c.head_dim)
        if c.softcap is not None:
            scores = c.softcap * torch.tanh(scores / c.softcap)
        scores = scores.masked_fill(~_visible(t, c.window if windowed else None), -math.inf)
        heads.append(torch.softmax(scores, -1) @ v[:, n // group])
    return h + _linear(torch.cat(heads, -1), layer.o_proj)


def reference(model: ToyBackbone, ids: Sequence[int], frequencies: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Logits ``[T, V]`` float64 of the whole sequence, from the model's weights and config.

    frequencies, scale: what every layer turns by instead of the config's base.
    """
    c = model.config
    h = matrix(model.embed_tokens)[list(ids)]
    if c.embed_scale is not None:
        h = h * c.embed_scale
    for i, layer in enumerate(model.layers):
        h = attended(model, i, h, frequencies, scale)
        x = _norm(h, layer.post_attention_layernorm.weight, c.rms_norm_eps)
        gate, up = _linear(x, layer.gate_proj), _linear(x, layer.up_proj)
        h = h + _linear(gate * torch.sigmoid(gate) * up, layer.down_proj)
    return _linear(_norm(h, model.norm.weight, c.rms_norm_eps), model.lm_head)


def latent_reference(model: LatentBackbone, ids: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` float64 of the whole sequence."""
    c, t = model.config, len(ids)
    h = matrix(model.embed_tokens)[list(ids)]
    for layer in model.layers:
        x = _norm(h, layer.norm.weight, 1e-5)
        if model.rolling:
            padded = torch.cat((torch.zeros(2, x.shape[1], dtype=x.dtype), x))
            taps, shift = matrix(layer.mix)[0], padded
            x = taps[0] * shift[:t] + taps[1] * shift[1 : t + 1] + taps[2] * shift[2:]
        q = _rotated(_linear(x, layer.q_proj).view(t, model.HEADS, -1), 10000.0, model.HEAD_DIM, False)
        kv = _linear(_linear(x, layer.down), layer.up).view(t, model.HEADS, -1)
        scores = torch.einsum("qhd,khd->hqk", q, kv) / math.sqrt(model.HEAD_DIM)
        scores = scores.masked_fill(~_visible(t, c.window), -math.inf)
        out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), kv).reshape(t, -1)
        h = h + _linear(out, layer.o_proj)
    return _linear(h, model.lm_head)
