"""Families that are wrong on purpose, each in one place, and the check that must notice.

A check that has never been seen to fail proves nothing. Every control here is the toy family with one defect that
would be silent in use, or loud only much later, and names the check that is there for it. The table is written by

    python -m fuel_core.testing.negative_controls --out docs/negative-controls.md
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuel_core import DecodeDims, DecodeLayerInputs, Family, KeyValue, MaskPlan, RawConfig, RopePlan, layers
from fuel_core.testing import toy
from fuel_core.testing.declaration import Conformance
from fuel_core.testing.oracles import Logits
from fuel_core.testing.registry import checks
from fuel_core.testing.runner import run_checks
from fuel_core.testing.toy import CONFORMANCE, ToyAttention, ToyBackbone, ToyConfig, ToyLayer, ToyMLP, ToyModel

__all__ = ["CONTROLS", "Control", "main", "table"]


@dataclass(frozen=True)
class Control:
    """One wrong family."""

    name: str
    wrong: str
    """What is wrong, in one line."""
    caught_by: str
    """The check that must fail."""
    config: str
    """The config it is shown on."""
    make: Callable[[], Conformance]

    def declaration(self, *, whole: bool = True) -> Conformance:
        """The wrong family; with the one config that shows it unless ``whole``."""
        made = self.make()
        return made if whole else dataclasses.replace(made, configs={self.config: made.configs[self.config]})


CONTROLS: list[Control] = []


def _control(name: str, wrong: str, caught_by: str, config: str = "windowed") -> Callable[[Any], Any]:
    def add(make: Callable[[], Conformance]) -> Callable[[], Conformance]:
        CONTROLS.append(Control(name, wrong, caught_by, config, make))
        return make

    return add


def _family(
    build: Callable[[ToyConfig], Any] = ToyBackbone, resolve: Callable[[RawConfig], Any] | None = None
) -> Family:
    return dataclasses.replace(toy.FAMILY, build=build, resolve_config=resolve or toy.resolve_config)


def _with(family: Family, **changes: Any) -> Conformance:
    return dataclasses.replace(CONFORMANCE, family=family, **changes)


def _attention(wrong: type[ToyAttention]) -> Conformance:
    class Layer(ToyLayer):
        def __init__(self, c: ToyConfig, layer_idx: int) -> None:
            super().__init__(c, layer_idx)
            self.self_attn = wrong(c)
            self.self_attn.layer_idx = layer_idx  # type: ignore[assignment]

    return _layer(Layer)


def _layer(wrong: type[ToyLayer]) -> Conformance:
    class Model(ToyModel):
        layer_class = wrong

    class Backbone(ToyBackbone):
        model_class = Model

    return _with(_family(Backbone))


def _mlp(wrong: type[ToyMLP]) -> Conformance:
    class Layer(ToyLayer):
        def __init__(self, c: ToyConfig, layer_idx: int) -> None:
            super().__init__(c, layer_idx)
            self.mlp = wrong(c)

    return _layer(Layer)


def _attend(self: ToyAttention, inputs: DecodeLayerInputs, q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Tensor:
    """The toy's attention from rotated rows on."""
    layers.write_state(inputs, "k", k)
    layers.write_state(inputs, "v", v)
    options = {"scale": self.head_dim**-0.5, "softcap": self.softcap, **changes}
    return self.o_proj(layers.attend(inputs, q, **options))


# -- arithmetic ---------------------------------------------------------------------------------------------------


@_control("doubled-position", "queries and keys are turned twice", "correctness.fresh_steps")
def _doubled_position() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            cos, sin = inputs.cos, inputs.sin
            q, k = (layers.rotate(layers.rotate(r, cos, sin), cos, sin) for r in (q, k))
            return _attend(self, inputs, q, k, v)

    return _attention(Wrong)


@_control("interleaved-rotation", "neighbouring features are paired instead of the halves", "correctness.fresh_steps")
def _interleaved_rotation() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            q, k = (layers.rotate_interleaved(r, inputs.cos, inputs.sin) for r in (q, k))
            return _attend(self, inputs, q, k, v)

    return _attention(Wrong)


@_control("keys-not-rotated", "only queries are rotated", "correctness.fresh_steps")
def _keys_not_rotated() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            return _attend(self, inputs, layers.rotate(q, inputs.cos, inputs.sin), k, v)

    return _attention(Wrong)


@_control(
    "wrong-head-groups", "query heads read the kv heads in turn, not in groups", "correctness.fresh_steps", "plain"
)
def _wrong_head_groups() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            q, k = (layers.rotate(r, inputs.cos, inputs.sin) for r in (q, k))
            heads, groups = q.shape[1], k.shape[1]
            order = torch.arange(heads).view(heads // groups, groups).t().flatten().tolist()
            layers.write_state(inputs, "k", k)
            layers.write_state(inputs, "v", v)
            out = layers.attend(inputs, q[:, order], self.head_dim**-0.5, softcap=self.softcap)
            back = [order.index(h) for h in range(heads)]
            b, t, _ = out.shape
            return self.o_proj(out.view(b, t, heads, -1)[:, :, back].reshape(b, t, -1))

    return _attention(Wrong)


@_control("scale-of-hidden", "scores are scaled by the hidden width, not by the head's", "correctness.fresh_steps")
def _scale_of_hidden() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            q, k = (layers.rotate(r, inputs.cos, inputs.sin) for r in (q, k))
            return _attend(self, inputs, q, k, v, scale=x.shape[-1] ** -0.5)

    return _attention(Wrong)


@_control("softcap-forgotten", "scores are not capped", "correctness.fresh_steps")
def _softcap_forgotten() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            q, k = (layers.rotate(r, inputs.cos, inputs.sin) for r in (q, k))
            return _attend(self, inputs, q, k, v, softcap=None)

    return _attention(Wrong)


@_control("gate-and-up-swapped", "the activation is put on the wrong half of the MLP", "correctness.fresh_steps")
def _gate_and_up_swapped() -> Conformance:
    class Wrong(ToyMLP):
        def forward(self, x: Tensor) -> Tensor:
            return layers.swiglu(x, self.up_proj, self.gate_proj, self.down_proj)

    return _mlp(Wrong)


@_control("eps-hard-coded", "norms use 1e-6 whatever the config says", "correctness.fresh_steps", "plain")
def _eps_hard_coded() -> Conformance:
    class Wrong(ToyLayer):
        def __init__(self, c: ToyConfig, layer_idx: int) -> None:
            super().__init__(c, layer_idx)
            self.input_layernorm = layers.RMSNorm(c.hidden_size, 1e-6)

    return _layer(Wrong)


@_control("window-off-by-one", "a window of w sees w + 1 positions", "correctness.windows_crossed_twice")
def _window_off_by_one() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_mask_plan(self) -> MaskPlan:
            plan = super().decode_mask_plan()
            return MaskPlan([None if w is None else w + 1 for w in plan.windows], plan.per_layer)

    return _with(_family(Wrong))


@_control(
    "window-on-every-layer", "layers that should see everything have a window", "correctness.windows_crossed_twice"
)
def _window_on_every_layer() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_mask_plan(self) -> MaskPlan:
            n, window = self.config.num_hidden_layers, self.config.sliding_window
            return MaskPlan.dense(n) if window is None else MaskPlan.split_window(n, n, window)

    return _with(_family(Wrong), capabilities=CONFORMANCE.capabilities - {"window_variants"})


@_control("bases-swapped", "windowed layers rotate with the other layers' base", "correctness.fresh_steps")
def _bases_swapped() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_rope_plan(self) -> RopePlan:
            plan = super().decode_rope_plan()
            return RopePlan(plan.variants[::-1], plan.per_layer)

    return _with(_family(Wrong))


@_control("scaling-ignored", "the scaling of the frequencies is not applied", "correctness.high_positions", "partial")
def _scaling_ignored() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_rope_plan(self) -> RopePlan:
            width = self.config.rope.rotary_width(self.config.head_dim)
            return RopePlan.single(self.config.rope.theta, self.config.num_hidden_layers, width=width)

    return _with(_family(Wrong))


@_control("cast-before-scale", "the embedding is cast and scaled by the family", "correctness.embedding_rows")
def _cast_before_scale() -> Conformance:
    class Embedding(layers.Embedding):
        scale: float = 1.0

        def forward(self, token_ids: Tensor) -> Tensor:
            return (super().forward(token_ids).to(torch.bfloat16) * self.scale).float()

    class Wrong(ToyBackbone):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.model.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            self.model.embed_tokens.scale = config.embed_scale or 1.0

        def decode_dims(self) -> DecodeDims:
            return dataclasses.replace(super().decode_dims(), embed_scale=None)

    return _with(_family(Wrong))


@_control(
    "plain-product",
    "a projection multiplies by its weight without asking for its format",
    "correctness.weight_formats",
)
def _plain_product() -> Conformance:
    class Wrong(ToyMLP):
        def forward(self, x: Tensor) -> Tensor:
            gated = F.silu(x @ self.gate_proj.weight.t()) * self.up_proj(x)
            return self.down_proj(gated)

    return _mlp(Wrong)


@_control("prompt-positions", "every row of a chunk is turned like its first", "correctness.chunked_prompts")
def _prompt_positions() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            q, k = (layers.rotate(r, inputs.cos[:, :, :1], inputs.sin[:, :, :1]) for r in (q, k))
            return _attend(self, inputs, q, k, v)

    return _attention(Wrong)


@_control("future-visible", "rows of a prompt see the rows after them", "correctness.every_position", "plain")
def _future_visible() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            if inputs.offset is None:
                inputs = dataclasses.replace(inputs, mask=inputs.mask * 0.0)
                inputs.mask.nan_to_num_(0.0)
            return super().forward(x, inputs)

    return _attention(Wrong)


# -- contract -----------------------------------------------------------------------------------------------------


@_control(
    "bias-forgotten", "the query bias is loaded and never added", "contract.every_weight_reaches_the_logits", "plain"
)
def _bias_forgotten() -> Conformance:
    class Wrong(ToyAttention):
        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().heads(x)
            if self.q_proj.bias is not None:
                b, t, _ = x.shape
                plain = F.linear(x, self.q_proj.weight)
                q = plain.view(b, t, -1, self.head_dim).transpose(1, 2)
            return q, k, v

    return _attention(Wrong)


@_control("norm-forgotten", "the MLP reads the residual as it is", "contract.every_weight_reaches_the_logits")
def _norm_forgotten() -> Conformance:
    class Wrong(ToyLayer):
        def forward(self, inputs: DecodeLayerInputs) -> Tensor:
            h = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
            out: Tensor = h + self.mlp(h)
            return out

    return _layer(Wrong)


@_control(
    "tensor-skipped", "tensors that the family does not know are left out by name", "contract.tensors_are_used_once"
)
def _tensor_skipped() -> Conformance:
    known = ("model.", "lm_head.")
    family = dataclasses.replace(toy.FAMILY, tensor_names=lambda name: name if name.startswith(known) else None)
    return _with(family)


@_control("hidden-misreported", "dims say another hidden width than the embedding has", "contract.dims_agree")
def _hidden_misreported() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_dims(self) -> DecodeDims:
            return dataclasses.replace(super().decode_dims(), hidden=self.config.intermediate_size)

    return _with(_family(Wrong))


@_control("plan-too-short", "the mask plan covers one layer less", "contract.dims_agree")
def _plan_too_short() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_mask_plan(self) -> MaskPlan:
            plan = super().decode_mask_plan()
            return MaskPlan(plan.windows, plan.per_layer[:-1])

    return _with(_family(Wrong))


@_control(
    "state-too-large",
    "the state specs have a kv head for every query head",
    "contract.steps_write_their_own_rows",
    "plain",
)
def _state_too_large() -> Conformance:
    class Wrong(ToyBackbone):
        def layer_state_specs(self) -> Sequence[KeyValue]:
            c = self.config
            return [KeyValue(c.num_attention_heads, c.head_dim)] * c.num_hidden_layers

    return _with(_family(Wrong))


@_control(
    "rows-rewritten", "every step normalises the keys it finds in the cache", "contract.steps_write_their_own_rows"
)
def _rows_rewritten() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            out = super().forward(x, inputs)
            inputs.state["k"].mul_(0.999)
            return out

    return _attention(Wrong)


@_control("spec-not-frozen", "the resolved spec can be changed", "contract.config_is_frozen")
def _spec_not_frozen() -> Conformance:
    @dataclass
    class Loose:
        inner: Any = None
        model_type: str = "toy"

        def __getattr__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "inner"), name)

    def resolve(raw: RawConfig) -> Any:
        return Loose(toy.resolve_config(raw))

    return _with(_family(resolve=resolve))


@_control(
    "one-spelling",
    "the base is read from the old spelling of the config alone",
    "contract.config_spellings_agree",
    "plain",
)
def _one_spelling() -> Conformance:
    def resolve(raw: RawConfig) -> Any:
        if isinstance(raw.get("rope_parameters"), Mapping):
            rest = {k: v for k, v in raw["rope_parameters"].items() if k != "rope_theta"}
            raw = raw.with_values({"rope_parameters": {**rest, "rope_theta": 500.0}}, "default")
        return toy.resolve_config(raw)

    return _with(_family(resolve=resolve))


class _Renaming:
    """Writes one key of a config under its other name, as a reference library does with names it has dropped."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def prepare(self, name: str, config: Mapping[str, Any], folder: Path, family: Family, seed: int) -> Logits:
        written = {self.new if key == self.old else key: value for key, value in config.items()}
        return CONFORMANCE.oracle.prepare(name, written, folder, family, seed)


@_control(
    "declared-spelling",
    "the name that releases have for the epsilon is ignored, the reference's own is read",
    "contract.config_spellings_agree",
    "plain",
)
def _declared_spelling() -> Conformance:
    plain = dict(CONFORMANCE.configs["plain"])
    plain["layer_norm_epsilon"] = plain.pop("rms_norm_eps")
    oracle = _Renaming("layer_norm_epsilon", "rms_norm_eps")
    return _with(toy.FAMILY, configs={**CONFORMANCE.configs, "plain": plain}, oracle=oracle)


@_control(
    "unchecked-number", "a number of the config is used without a look at it", "contract.hostile_configs_are_refused"
)
def _unchecked_number() -> Conformance:
    def resolve(raw: RawConfig) -> Any:
        width = raw.get("sliding_window")
        return toy.resolve_config(raw if width is None else raw.with_values({"sliding_window": int(width)}, "rounded"))

    return _with(_family(resolve=resolve))


@_control("build-allocates", "build makes a table of its own", "contract.build_allocates_nothing")
def _build_allocates() -> Conformance:
    class Wrong(ToyBackbone):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.register_buffer("table", torch.arange(512, device="cpu"), persistent=False)

    return _with(_family(Wrong))


@_control("nameless", "the family gives no name for its errors", "contract.errors_carry_the_family")
def _nameless() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_family(self) -> str:
            return ""

    return _with(_family(Wrong))


@_control("claimed-in-vain", "a capability that no config shows", "contract.capabilities_are_true")
def _claimed_in_vain() -> Conformance:
    return _with(toy.FAMILY, capabilities=CONFORMANCE.capabilities | {"named_slots"})


@_control("not-claimed", "a capability that configs show and nobody claims", "contract.capabilities_are_true")
def _not_claimed() -> Conformance:
    return _with(toy.FAMILY, capabilities=CONFORMANCE.capabilities - {"window"})


@_control(
    "blind-fixture", "hidden 64, as wide as the queries, and a window that never bites", "contract.fixtures_can_see"
)
def _blind_fixture() -> Conformance:
    windowed = {**CONFORMANCE.configs["windowed"], "hidden_size": 64, "head_dim": 16, "sliding_window": 200}
    return _with(toy.FAMILY, configs={**CONFORMANCE.configs, "windowed": windowed})


@_control("model-type-unlisted", "a config of a model_type that the family does not serve", "contract.family_record")
def _model_type_unlisted() -> Conformance:
    other = {**CONFORMANCE.configs["plain"], "model_type": "toy2"}
    return _with(toy.FAMILY, configs={**CONFORMANCE.configs, "plain": other})


# -- identity -----------------------------------------------------------------------------------------------------


@_control(
    "stale-scalar", "the soft cap is listed as bound and baked into the ops", "identity.bound_fields_are_followed"
)
def _stale_scalar() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_bound_fields(self) -> frozenset[str]:
            return super().decode_bound_fields() | {"attn_logit_softcapping"}

    return _with(_family(Wrong))


@_control("memoised-plan", "the mask plan is made once and kept by the family", "identity.bound_fields_are_followed")
def _memoised_plan() -> Conformance:
    class Wrong(ToyBackbone):
        _mine: MaskPlan | None = None

        def decode_mask_plan(self) -> MaskPlan:
            if self._mine is None:
                self._mine = super().decode_mask_plan()
            return self._mine

    return _with(_family(Wrong))


@_control("forgotten-field", "the soft cap takes no part in the key", "identity.fields_that_decide_ops_are_keyed")
def _forgotten_field() -> Conformance:
    @dataclass(frozen=True, kw_only=True)
    class Config(ToyConfig):
        attn_logit_softcapping: float | None = dataclasses.field(default=None, compare=False)

    def resolve(raw: RawConfig) -> Any:
        spec = toy.resolve_config(raw)
        return Config(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})

    return _with(_family(resolve=resolve))


@_control("narrowed-config", "the key sees a part of the config", "identity.fields_that_decide_ops_are_keyed")
def _narrowed_config() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_config(self) -> Any:
            return dataclasses.replace(self.config, attn_logit_softcapping=None)

    return _with(_family(Wrong))


@_control(
    "over-keyed-rope",
    "the frequencies are baked, though only tables carry them",
    "identity.fields_that_only_bind_are_not_keyed",
)
def _over_keyed_rope() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_bound_fields(self) -> frozenset[str]:
            return super().decode_bound_fields() - {"rope", "local_rope_theta"}

    return _with(_family(Wrong))


@_control("always-stale", "the config is another at every look", "plans.one_plan_for_many_tokens")
def _always_stale() -> Conformance:
    count = itertools.count()

    class Wrong(ToyBackbone):
        def decode_config(self) -> Any:
            return dataclasses.replace(self.config, max_position_embeddings=10_000 + next(count))

    return _with(_family(Wrong))


@_control(
    "equal-is-not-same",
    "a config counts as changed when it is another object",
    "identity.an_equal_config_keeps_the_plan",
)
def _equal_is_not_same() -> Conformance:
    class Wrong(ToyBackbone):
        def _set_config(self, config: Any) -> None:
            super()._set_config(config)
            self.bump_weights_epoch()

    return _with(_family(Wrong))


@_control("identity-by-address", "a model is told by its address", "identity.instances_are_told_apart")
def _identity_by_address() -> Conformance:
    class Address:
        def __init__(self, number: int) -> None:
            self.number = number

        def get(self) -> int:
            return self.number

    class Wrong(ToyBackbone):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self._instance_id: Any = Address(id(self))

    return _with(_family(Wrong))


@_control(
    "shared-memo",
    "a product of weights is remembered by layer number, for all models",
    "identity.instances_are_told_apart",
)
def _shared_memo() -> Conformance:
    remembered: dict[int, Tensor] = {}

    class Wrong(ToyAttention):
        layer_idx = 0

        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            weight = remembered.setdefault(self.layer_idx, self.o_proj.weight.detach())
            q, k, v = self.heads(x)
            q, k = (layers.rotate(r, inputs.cos, inputs.sin) for r in (q, k))
            layers.write_state(inputs, "k", k)
            layers.write_state(inputs, "v", v)
            out = layers.attend(inputs, q, self.head_dim**-0.5, softcap=self.softcap)
            return F.linear(out, weight)

    return _attention(Wrong)


@_control(
    "memo-by-address", "what was derived from weights is remembered by id()", "interleavings.addresses_are_reused"
)
def _memo_by_address() -> Conformance:
    remembered: dict[int, Tensor] = {}

    class Wrong(ToyBackbone):
        def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
            # The same address again and again, as an allocator gives it: one slot for all.
            weight = remembered.setdefault(0, self.lm_head.weight.detach().clone())
            return F.linear(self.model.norm(h), weight)

    return _with(_family(Wrong))


@_control(
    "weights-copied",
    "a fused copy of weights is made at the first step and kept",
    "identity.replaced_weights_are_followed",
)
def _weights_copied() -> Conformance:
    class Wrong(ToyMLP):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "fused"):
                fused = torch.cat((self.gate_proj.weight, self.up_proj.weight)).detach()
                self.register_buffer("fused", fused, persistent=False)
            weight: Tensor = self.get_buffer("fused")
            gate, up = F.linear(x, weight.to(x.dtype)).chunk(2, dim=-1)
            return self.down_proj(F.silu(gate) * up)

    return _mlp(Wrong)


# -- bound data ---------------------------------------------------------------------------------------------------


@_control(
    "window-from-elsewhere",
    "the window start comes from the config, the mask from the plan",
    "bound.window_and_mask_are_one_entry",
)
def _window_from_elsewhere() -> Conformance:
    class Wrong(ToyAttention):
        def __init__(self, c: ToyConfig) -> None:
            super().__init__(c)
            self.window = c.sliding_window

        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            if inputs.offset is None and self.window is not None:
                inputs = dataclasses.replace(inputs, window_start=inputs.window_start * 0)
            return super().forward(x, inputs)

    return _attention(Wrong)


@_control(
    "long-branch", "from 150 positions on a layer does otherwise", "bound.every_length_equals_a_fresh_step", "plain"
)
def _long_branch() -> Conformance:
    class Wrong(ToyAttention):
        layer_idx = 0

        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            out = super().forward(x, inputs)
            # The first layer is clean, so its recording is shared and the others are never traced.
            length = layers.read_state(inputs, "k").shape[2]
            return out * 0.5 if self.layer_idx > 0 and length > 150 else out

    return _attention(Wrong)


@_control(
    "untraced-branch",
    "a later layer branches on a length beyond any that a test decodes",
    "bound.every_layer_records",
    "plain",
)
def _untraced_branch() -> Conformance:
    class Wrong(ToyAttention):
        layer_idx = 0

        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            out = super().forward(x, inputs)
            length = layers.read_state(inputs, "k").shape[2]
            return out * 0.5 if self.layer_idx > 0 and length > 100_000 else out

    return _attention(Wrong)


@_control(
    "mask-written", "a layer adds to the mask that all layers share", "bound.layers_leave_bound_data_alone", "plain"
)
def _mask_written() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            inputs.mask.sub_(0.01)
            return super().forward(x, inputs)

    return _attention(Wrong)


@_control("own-tables", "the family rotates with frequencies of its own", "bound.assigned_plans_are_followed")
def _own_tables() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
            plan = self.decode_rope_plan()
            variant = plan.variants[plan.variant_for_layer(layer_idx)]
            inv_freq = torch.tensor(variant.inv_freq, dtype=torch.float64)
            if inputs.offset is None:
                at = inputs.cached_len + torch.arange(inputs.seq_len)
            else:
                at = inputs.offset + torch.arange(inputs.seq_len)
            angles = torch.outer(at.double(), inv_freq).repeat(1, 2)[None, None]
            cos, sin = (angles.cos() * variant.scale).float(), (angles.sin() * variant.scale).float()
            return super().decode_apply_layer(layer_idx, dataclasses.replace(inputs, cos=cos, sin=sin))

    return _with(_family(Wrong))


@_control("dropout-left-on", "features are dropped at random", "bound.steps_are_repeatable")
def _dropout_left_on() -> Conformance:
    class Wrong(ToyMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.01, training=True))

    return _mlp(Wrong)


@_control("baked-position", "a layer reads its position into a number", "correctness.held_steps")
def _baked_position() -> Conformance:
    class Wrong(ToyAttention):
        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            q, k, v = self.heads(x)
            q, k = (layers.rotate(r, inputs.cos, inputs.sin) for r in (q, k))
            return _attend(self, inputs, q * (1.0 + float(inputs.cos.flatten()[0]) * 1e-3), k, v)

    return _attention(Wrong)


# -- plans and interleavings --------------------------------------------------------------------------------------


@_control("head-on-every-row", "logits are computed for every row of a prompt", "plans.head_runs_on_the_last_row")
def _head_on_every_row() -> Conformance:
    class Wrong(ToyBackbone):
        _rows: Tensor | None = None

        def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
            h = super().decode_apply_layer(layer_idx, inputs)
            if layer_idx == self.config.num_hidden_layers - 1 and inputs.seq_len > 1:
                self._rows = self.lm_head(self.model.norm(h))
            return h

    return _with(_family(Wrong))


@_control("logits-in-a-buffer", "logits are returned in a buffer of the model", "plans.logits_belong_to_the_caller")
def _logits_in_a_buffer() -> Conformance:
    class Wrong(ToyBackbone):
        def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
            logits = super().decode_final_norm_and_head(h)
            held = self._buffers.get("logits")
            if held is None or held.shape != logits.shape or held.dtype != logits.dtype:
                self.register_buffer("logits", torch.zeros_like(logits), persistent=False)
            return self.get_buffer("logits").copy_(logits)

    return _with(_family(Wrong))


@_control(
    "scale-always-emitted", "the embedding is multiplied by one", "plans.uniform_plans_emit_nothing_extra", "plain"
)
def _scale_always_emitted() -> Conformance:
    class Embedding(layers.Embedding):
        def forward(self, token_ids: Tensor) -> Tensor:
            return super().forward(token_ids) * 1.0

    class Wrong(ToyBackbone):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.model.embed_tokens = Embedding(config.vocab_size, config.hidden_size)

    return _with(_family(Wrong))


@_control("growing-plan", "a model made later does more ops", "plans.op_counts_stay", "plain")
def _growing_plan() -> Conformance:
    made = itertools.count()

    class Wrong(ToyBackbone):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.extra = next(made)

        def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
            out = super().decode_final_norm_and_head(h)
            for _ in range(self.extra):
                out = out + 0.0
            return out

    return _with(_family(Wrong))


@_control("batch-squeezed", "a layer takes the batch for one row", "plans.a_batch_of_two_is_two_of_one")
def _batch_squeezed() -> Conformance:
    class Wrong(ToyAttention):
        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().heads(x[:1])
            b = x.shape[0]
            return q.expand(b, -1, -1, -1), k.expand(b, -1, -1, -1), v.expand(b, -1, -1, -1)

    return _attention(Wrong)


@_control("freed-buffer", "a layer keeps the first KV buffer it saw", "interleavings.two_caches_alternate")
def _freed_buffer() -> Conformance:
    class Wrong(ToyAttention):
        first: Mapping[str, Tensor] | None = None

        def forward(self, x: Tensor, inputs: DecodeLayerInputs) -> Tensor:
            if self.first is None:
                self.first = dict(inputs.state)
            if self.first["k"].shape == inputs.state["k"].shape:
                inputs = dataclasses.replace(inputs, state=self.first)
            return super().forward(x, inputs)

    return _attention(Wrong)


@_control("own-counter", "the family counts positions itself", "interleavings.swapped_and_rewound")
def _own_counter() -> Conformance:
    class Wrong(ToyBackbone):
        seen = 0

        def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
            if layer_idx == 0:
                self.seen += inputs.seq_len
            h = super().decode_apply_layer(layer_idx, inputs)
            return h * (1.0 if self.seen <= 16 else 0.9)

    return _with(_family(Wrong))


@_control("error-swallowed", "a layer that fails is skipped", "interleavings.errors_in_mid_step")
def _error_swallowed() -> Conformance:
    class Wrong(ToyBackbone):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "decode_apply_layer":
                inner = value

                def careful(layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
                    try:
                        out: Tensor = inner(layer_idx, inputs)
                    except RuntimeError:
                        return inputs.h
                    return out

                value = careful
            super().__setattr__(name, value)

    return _with(_family(Wrong))


@_control(
    "conversation-remembered",
    "the last hidden state of one step is mixed into the next",
    "interleavings.two_caches_alternate",
)
def _conversation_remembered() -> Conformance:
    class Wrong(ToyBackbone):
        last: Tensor | None = None

        def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
            mixed = h if self.last is None else h + 0.01 * self.last.to(h.dtype)
            self.last = h[:, -1:].clone()
            return super().decode_final_norm_and_head(mixed)

    return _with(_family(Wrong))


@_control("private-imports", "the family imports what the core may change without notice", "hygiene.public_names_only")
def _private_imports() -> Conformance:
    folder = Path(tempfile.mkdtemp(prefix="fuel-control-"))
    source = "from fuel_core.token_data import DecodeLayerInputs\n\ndef build(config):\n    raise NotImplementedError\n"
    (folder / "fuel_private_control.py").write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        import importlib

        module = importlib.import_module("fuel_private_control")
    finally:
        sys.path.remove(str(folder))
    return _with(_family(module.build))


# -- the table ----------------------------------------------------------------------------------------------------


def _per_config(name: str) -> bool:
    return next(one.per_config for one in checks() if one.name == name)


def failures(control: Control) -> list[str]:
    """What the named check says of a wrong family; empty if it notices nothing."""
    declaration = control.declaration(whole=not _per_config(control.caught_by))
    return [result.detail for result in run_checks(declaration, only=[control.caught_by]) if result.is_bad]


def table(found: Mapping[str, str]) -> str:
    """The table as Markdown. ``found``: control -> what the check said."""
    lines = ["| wrong family | what is wrong | caught by | what it said |", "|---|---|---|---|"]
    for control in CONTROLS:
        said = _ADDRESS.sub("0x...", found[control.name]).replace("|", "\\|")
        lines.append(f"| `{control.name}` | {control.wrong} | `{control.caught_by}` | {said} |")
    return "\n".join(lines) + "\n"


_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")

_HEADING = """# Negative controls

Each row is the kit's toy family with one defect that would be silent in use, or loud only later, and the check of the
[conformance kit](conformance.md) that is there for it. The right toy passes every check. A check that has never been
seen to fail proves nothing: every row is a test, and the table is written by

    python -m fuel_core.testing.negative_controls --out docs/negative-controls.md

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run each named check on its wrong family and write the table; returns 1 if one passes."""
    parser = argparse.ArgumentParser(description="Run the check named for each wrong family, and write the table.")
    parser.add_argument("--out", type=Path, help="write the table as Markdown here")
    args = parser.parse_args(argv)
    found: dict[str, str] = {}
    for control in CONTROLS:
        said = failures(control)
        found[control.name] = said[0] if said else "**nothing**"
        print(f"{control.name}: {'caught' if said else 'NOT caught'} by {control.caught_by}", flush=True)
    survivors = [name for name, said in found.items() if said == "**nothing**"]
    if args.out:
        args.out.write_text(_HEADING + table(found), encoding="utf-8")
    if survivors:
        print(f"not caught: {', '.join(survivors)}", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
