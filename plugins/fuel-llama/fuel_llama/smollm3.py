"""SmolLM3.

Differs from Llama in:
- layers that do not rotate: ``no_rope_layers`` has one number per layer, and 1 means that the layer *uses* RoPE;
  without the list every ``no_rope_layer_interval``-th layer goes without;
- windows, in no published release: where ``layer_types`` says so, else with ``use_sliding_window`` and a
  ``sliding_window`` on the layers that do not rotate;
- a head that shares the embedding unless the config says otherwise, and other defaults.

model_type ``smollm3``; GGUF architecture ``smollm3``, whose files state no schedule and mean every fourth layer.
The schedule follows ``configuration_smollm3`` of transformers.

Shape letters: B batch, T tokens of this step, H query heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuel_core import ConfigReader, DecodeLayerInputs, MaskPlan, RawConfig, errors, layers
from torch import Tensor

from fuel_llama.llama import LlamaAttention, LlamaBackbone, LlamaConfig
from fuel_llama.schedules import DENSE, WINDOWED, layer_types

MODEL_TYPES = ("smollm3",)
GGUF_ARCHITECTURES = ("smollm3",)

DEFAULTS = {
    "rope_theta": 2000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """Resolved spec of a smollm3 checkpoint."""

    uses_rope: tuple[bool, ...]
    """Per layer: the published ``no_rope_layers``, under a name that says what its ones mean."""
    sliding_window: int | None
    layer_types: tuple[str, ...]


def resolve_config(raw: RawConfig) -> SmolLM3Config:
    """Raw config -> spec. Raises ConfigError naming the key, what was expected and what was found."""
    reader = ConfigReader(raw, DEFAULTS, family="smollm3")
    values = reader.common()
    uses_rope = _uses_rope(reader, values["num_hidden_layers"])
    window = reader.optional_int("sliding_window")
    kinds = layer_types(reader, len(uses_rope), window)
    if kinds is None:
        windows = reader.bool("use_sliding_window", False) and window is not None
        kinds = tuple(WINDOWED if windows and not rotates else DENSE for rotates in uses_rope)
        reader.note("layer_types", "derived: use_sliding_window, sliding_window, no_rope_layers")
    return reader.finish(
        SmolLM3Config,
        **values,
        rope=reader.rope(kinds=("default", "linear", "banded", "yarn")),
        hidden_act=reader.str("hidden_act", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
        attention_bias=reader.bool("attention_bias", False),
        mlp_bias=reader.bool("mlp_bias", False),
        uses_rope=uses_rope,
        # A width that no layer uses is not part of the model: published configs state one beside a switch that is off.
        sliding_window=window if WINDOWED in kinds else None,
        layer_types=kinds,
    )


class UnrotatedAttention(LlamaAttention):
    """Llama's attention without positions: the mask alone says what came before."""

    def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; writes this step's keys and values."""
        batch, seq_len, _ = x.shape
        q, k, v = (
            rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for rows in layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        )  # [B, H, T, K], [B, G, T, K] twice
        layers.write_state(inputs, "k", k)
        layers.write_state(inputs, "v", v)
        out: Tensor = self.o_proj(layers.attend(inputs, q, self.head_dim**-0.5))
        return out


class SmolLM3Backbone(LlamaBackbone):
    """Llama's hooks, with a schedule."""

    config: SmolLM3Config

    def __init__(self, config: SmolLM3Config) -> None:
        super().__init__(config)
        for layer, rotates in zip(self.model.layers, config.uses_rope, strict=True):
            if not rotates:
                layer.self_attn = UnrotatedAttention(config)

    def decode_family(self) -> str:
        return "smollm3"

    def decode_mask_plan(self) -> MaskPlan:
        c = self.config
        if c.sliding_window is None:
            return MaskPlan.dense(c.num_hidden_layers)
        return MaskPlan.per_layer_window(c.num_hidden_layers, c.sliding_window, lambda i: c.layer_types[i] == WINDOWED)

    def decode_bound_fields(self) -> frozenset[str]:
        # A width reaches a held plan through masks and window starts alone; whether there is one is the plan's.
        return super().decode_bound_fields() | {"sliding_window"}


def _uses_rope(reader: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    published = reader.list("no_rope_layers", into="uses_rope")
    if published is None:
        interval = reader.int("no_rope_layer_interval", 4)
        reader.note("uses_rope", f"derived: no_rope_layer_interval {interval}")
        return tuple((layer + 1) % interval != 0 for layer in range(n_layers))
    place = reader.raw.source("no_rope_layers")
    if len(published) < n_layers:
        raise errors.ConfigError(
            f"{place}: expected a number for each of the {n_layers} layers in 'no_rope_layers', found "
            f"{len(published)} for family 'smollm3'; correct the config"
        )
    for layer, value in enumerate(published):
        if value not in (0, 1):
            raise errors.ConfigError(
                f"{place}: expected no_rope_layers[{layer}] to be 1 (uses RoPE) or 0, found {value!r:.80} for family "
                "'smollm3'; correct the config"
            )
    return tuple(value == 1 for value in published[:n_layers])
