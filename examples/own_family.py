"""A family of one's own in one file: decode random weights with it, then run its conformance checks.

    python examples/own_family.py                    # decode, then the checks (about a minute)
    python examples/own_family.py --only contract    # decode, then one topic of them; options are those of `fuel check`

"Parallel" is made up: attention and a SwiGLU MLP read the same norm and are added to the stream side by side. To give a
family to others, put it into a package with entry points (docs/families.md); `fuel.load` then finds it by model_type.

Shape letters: B batch, T tokens of this step, D hidden, H query heads, G kv heads, K head_dim.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fuel_core as fuel
from fuel_core import layers
from fuel_core.testing import Conformance, reference_oracle

TINY = {
    "model_type": "parallel",
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(fuel.DecoderConfig):
    """The resolved spec. Every field decides a plan's identity, except those that the backbone lists as bound."""

    rms_norm_eps: float


def resolve_config(raw: fuel.RawConfig) -> ParallelConfig:
    """config.json -> spec. The reader's errors name the key, its place, what was expected and what was found."""
    reader = fuel.ConfigReader(raw, {}, family="parallel")
    return reader.finish(
        ParallelConfig,
        **reader.common(),
        rope=reader.rope(kinds=("default",)),
        hidden_act=reader.str("hidden_act", "silu", choices=("silu",)),
        rms_norm_eps=reader.float("rms_norm_eps"),
    )


class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)). Attributes carry the checkpoint's tensor names."""

    def __init__(self, c: ParallelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.norm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = layers.Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = layers.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = layers.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = layers.Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, inputs: fuel.DecodeLayerInputs) -> Tensor:
        """[B, T, D] -> [B, T, D]. Neither plans nor cache offsets occur here: `layers` knows them."""
        x = self.norm(inputs.h)
        b, t, _ = x.shape
        q, k, v = (
            rows.view(b, t, -1, self.head_dim).transpose(1, 2)  # [B, H or G, T, K]
            for rows in layers.project(x, self.q_proj, self.k_proj, self.v_proj)
        )
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        attended = layers.attend(inputs, layers.rotate(q, inputs.cos, inputs.sin), self.head_dim**-0.5)
        return inputs.h + self.o_proj(attended) + layers.swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class ParallelBackbone(fuel.DecodeBackbone):
    """The hooks, in the order in which a step calls them."""

    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ParallelLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def decode_family(self) -> str:
        return "parallel"

    def layer_state_specs(self) -> Sequence[fuel.KeyValue]:
        return [fuel.KeyValue(self.config.num_key_value_heads, self.config.head_dim)] * self.config.num_hidden_layers

    def decode_dims(self) -> fuel.DecodeDims:
        c = self.config
        return fuel.DecodeDims.of(
            self.layer_state_specs(), hidden=c.hidden_size, vocab=c.vocab_size, rope_width=c.head_dim
        )

    def decode_mask_plan(self) -> fuel.MaskPlan:
        return fuel.MaskPlan.dense(self.config.num_hidden_layers)

    def decode_rope_plan(self) -> fuel.RopePlan:
        c = self.config
        return fuel.RopePlan.single(fuel.RopeVariant.from_parameters(c.head_dim, c.rope), c.num_hidden_layers)

    def decode_bound_fields(self) -> frozenset[str]:
        return frozenset({"rope"})  # reaches a step through the tables alone, so a change of it keeps the plan

    def decode_token_embedding(self) -> layers.Embedding:
        return self.embed_tokens

    def decode_apply_layer(self, layer_idx: int, inputs: fuel.DecodeLayerInputs) -> Tensor:
        h: Tensor = self.layers[layer_idx](inputs)
        return h

    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        return self.lm_head(self.norm(h))


FAMILY = fuel.Family(
    name="parallel",
    model_types=("parallel",),
    gguf_architectures=(),
    resolve_config=resolve_config,
    build=ParallelBackbone,
)


def reference(c: ParallelConfig, weights: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """The truth: logits `[T, V]` of a whole sequence, in float64, from the formulas and nothing of the family above."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    assert c.rope.theta is not None

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt() * w[name]

    half, t = c.head_dim // 2, len(ids)
    frequencies = torch.tensor([c.rope.theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(t).double(), frequencies))[:, None]

    def turned(x: Tensor) -> Tensor:
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((z.real, z.imag), -1)

    future = torch.ones(t, t).triu(1).bool()
    h = w["embed_tokens.weight"][list(ids)]
    for i in range(c.num_hidden_layers):
        x = norm(h, f"layers.{i}.norm.weight")
        q, k, v, gate, up = (x @ w[f"layers.{i}.{name}_proj.weight"].T for name in ("q", "k", "v", "gate", "up"))
        q, k, v = (rows.view(t, -1, c.head_dim) for rows in (q, k, v))
        k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (turned(k), v))
        scores = torch.einsum("thk,shk->hts", turned(q), k) / c.head_dim**0.5
        mixed = torch.einsum("hts,shk->thk", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1)
        h = h + mixed @ w[f"layers.{i}.o_proj.weight"].T
        h = h + (torch.nn.functional.silu(gate) * up) @ w[f"layers.{i}.down_proj.weight"].T
    return norm(h, "norm.weight") @ w["lm_head.weight"].T


CONFORMANCE = Conformance(
    family=FAMILY,
    configs={"tiny": TINY, "ungrouped": {**TINY, "num_key_value_heads": 4}},
    capabilities={"rope", "grouped_heads", "full_heads"},
    oracle=reference_oracle(reference),
)


def open_model(folder: Path) -> fuel.LanguageModel:
    """What `fuel.load` does once it has found the family."""
    checkpoint = fuel.open_checkpoint(folder)
    with torch.device("meta"):  # shapes only: weights come from the checkpoint
        backbone = FAMILY.build(FAMILY.resolve_config(checkpoint.raw))
    fuel.load_weights(backbone, checkpoint, FAMILY)
    return fuel.LanguageModel(backbone.eval().requires_grad_(False), checkpoint=checkpoint, plan="recorded")


def decode_random_weights() -> None:
    with torch.device("meta"):
        shapes = FAMILY.build(resolve_config(fuel.RawConfig.from_config(TINY))).state_dict()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(TINY))
        save_file(
            {key: torch.randn(tensor.shape) * 0.2 for key, tensor in shapes.items()}, folder / "model.safetensors"
        )
        with open_model(folder) as llm:
            done = llm.generate([3, 14, 15], max_new_tokens=12)  # no tokenizer here, so ids
            print(f"ids {done.token_ids}; plans built {done.stats.plans_built}, rebinds {done.stats.rebinds}")


def main(*options: str) -> int:
    decode_random_weights()
    # `pytest examples/own_family.py` collects the same checks as tests.
    return subprocess.call([sys.executable, "-m", "fuel_core", "check", __file__, *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
