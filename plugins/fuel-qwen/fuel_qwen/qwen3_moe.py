"""Qwen3-MoE.

Differs from Llama in:
- the MLP of a layer is a mixture of ``num_experts`` SwiGLU blocks of ``moe_intermediate_size``, unless the layer is in
  ``mlp_only_layers`` or is none of every ``decoder_sparse_step``-th; those have a plain one of ``intermediate_size``;
- a token's experts are the ``num_experts_per_tok`` with the largest of a float32 softmax over all; their weights are
  divided by their sum with ``norm_topk_prob``, which is false where a config lacks the key, and true in a GGUF file,
  whose format has no room for it;
- queries and keys are normalised head by head, and ``attention_bias`` switches biases, as in Qwen3;
- a window, with ``use_sliding_window`` and a ``sliding_window``, is on every layer.

model_type ``qwen3_moe``; GGUF architecture ``qwen3moe``. Yang et al. 2025 (arXiv 2505.09388). Follows
``modeling_qwen3_moe`` of transformers.

Shape letters: B batch, T tokens of this step, D hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuel_core import ConfigReader, DecodeLayerInputs, RawConfig, errors, layers
from torch import Tensor, nn

from fuel_qwen.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from fuel_qwen.qwen2 import DENSE, WINDOWED, Qwen2Layer, Qwen2MLP, common_values, window_switch, window_width
from fuel_qwen.qwen3 import Qwen3Attention, Qwen3Backbone, Qwen3Config

MODEL_TYPES = ("qwen3_moe",)
GGUF_ARCHITECTURES = ("qwen3moe",)

# Far above what is published, and still sizes that torch can name when they are multiplied.
_MOST_EXPERTS = 4096
_MOST_WIDTH = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Resolved spec of a qwen3_moe checkpoint."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    """For each layer whether its MLP is a mixture: ``decoder_sparse_step`` and ``mlp_only_layers`` worked out."""


def resolve_config(raw: RawConfig) -> Qwen3MoeConfig:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = ConfigReader(raw, QWEN2_DEFAULTS, family="qwen3_moe")
    values = common_values(reader)
    n_layers = values["num_hidden_layers"]
    width = window_width(reader) if window_switch(reader) else None
    reader.note("layer_types", "derived: use_sliding_window, sliding_window")
    # Newer releases of transformers save the same number under the second name.
    written = "num_local_experts" if raw.get("num_experts") is None and "num_local_experts" in raw else "num_experts"
    experts = reader.int(written, minimum=0, maximum=_MOST_EXPERTS)
    reader.note("num_experts", raw.source(written))
    chosen = reader.int("num_experts_per_tok")
    if experts and chosen > experts:
        raise errors.ConfigError(
            f"{raw.source('num_experts_per_tok')}: expected num_experts_per_tok of at most {experts}, as many as "
            f"{written} says, found {chosen} for family 'qwen3_moe'; correct the config"
        )
    in_gguf = raw.format == "gguf"
    return reader.finish(
        Qwen3MoeConfig,
        **values,
        sliding_window=width,
        layer_types=(DENSE if width is None else WINDOWED,) * n_layers,
        attention_bias=reader.bool("attention_bias", False),
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=reader.int("moe_intermediate_size", maximum=_MOST_WIDTH),
        norm_topk_prob=reader.bool("norm_topk_prob", in_gguf, why="family: true in GGUF" if in_gguf else "default"),
        sparse_layers=_sparse_layers(reader, n_layers) if experts else (False,) * n_layers,
    )


def _sparse_layers(reader: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    step = reader.int("decoder_sparse_step", 1)
    plain = reader.ids("mlp_only_layers")
    reader.note("sparse_layers", "derived: decoder_sparse_step, mlp_only_layers")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(n_layers))


class Qwen3MoeMLP(nn.Module):
    """A mixture of SwiGLU blocks."""

    def __init__(self, c: Qwen3MoeConfig) -> None:
        super().__init__()
        self.gate = layers.Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=c.norm_topk_prob)
        self.experts = layers.Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size)

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``"""
        return layers.moe(inputs, x, self.gate, self.experts)


class Qwen3MoeBackbone(Qwen3Backbone):
    """Qwen3's hooks, with experts."""

    config: Qwen3MoeConfig

    def block(self, layer_idx: int) -> nn.Module:
        c = self.config
        mlp = Qwen3MoeMLP(c) if c.sparse_layers[layer_idx] else Qwen2MLP(c)
        return Qwen2Layer(c, Qwen3Attention(c), mlp)

    def decode_family(self) -> str:
        return "qwen3_moe"
