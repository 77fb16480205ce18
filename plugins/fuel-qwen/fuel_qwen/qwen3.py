"""Qwen3, dense.

Differs from Llama in:
- queries and keys of each head are normalised (RMSNorm over head_dim, one gain for all heads) before they are rotated;
- head_dim is 128 where a config does not say, whatever hidden_size and num_attention_heads are;
- ``attention_bias`` is the one switch of biases: q, k, v and o; the MLP has none;
- windows, as in Qwen2.

model_type ``qwen3``; GGUF architecture ``qwen3``. Yang et al. 2025 (arXiv 2505.09388). The order of norm and rotation
follows ``modeling_qwen3`` of transformers.

Shape letters: B batch, T tokens of this step, H query heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuel_core import ConfigReader, DecodeLayerInputs, RawConfig, layers
from torch import Tensor, nn

from fuel_qwen.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from fuel_qwen.qwen2 import Qwen2Backbone, Qwen2Config, Qwen2Layer, Qwen2MLP, common_values, windows

MODEL_TYPES = ("qwen3",)
GGUF_ARCHITECTURES = ("qwen3",)

_HEAD_DIM_OF_ABSENT_KEY = 128


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Resolved spec of a qwen3 checkpoint."""

    attention_bias: bool


def resolve_config(raw: RawConfig) -> Qwen3Config:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    defaults: dict[str, Any] = dict(QWEN2_DEFAULTS)
    if raw.format != "gguf":  # a file without the key means hidden / heads, as readers of the format do
        defaults["head_dim"] = _HEAD_DIM_OF_ABSENT_KEY
    reader = ConfigReader(raw, defaults, family="qwen3")
    values = common_values(reader)
    return reader.finish(
        Qwen3Config,
        **values,
        **windows(reader, values["num_hidden_layers"]),
        attention_bias=reader.bool("attention_bias", False),
    )


class Qwen3Attention(nn.Module):
    """Grouped-query attention whose queries and keys are normalised head by head."""

    def __init__(self, c: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = layers.Linear(c.hidden_size, q_width, bias=c.attention_bias)
        self.k_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.v_proj = layers.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.o_proj = layers.Linear(q_width, c.hidden_size, bias=c.attention_bias)
        self.q_norm = layers.RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = layers.RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = (
            rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for rows in layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        )  # [B, H, T, K], [B, G, T, K] twice
        layers.write_state(inputs, "k", layers.rotate(self.k_norm(k), inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(self.q_norm(q), inputs.cos, inputs.sin)
        return self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5))


class Qwen3Backbone(Qwen2Backbone):
    """Qwen2's hooks around other attention."""

    config: Qwen3Config

    def block(self, layer_idx: int) -> nn.Module:
        return Qwen2Layer(self.config, Qwen3Attention(self.config), Qwen2MLP(self.config))

    def decode_family(self) -> str:
        return "qwen3"
