"""Defects put into an author's own family, one at a time: which of them do the checks notice?

The negative controls show that the checks can fail on a toy. This shows that they can fail on the family at hand, with
its configs and its tolerances. A mutation that survives is either harmless there, or a config is missing that would
show it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fuel_core import layers
from fuel_core.backbone import DecodeBackbone
from fuel_core.decode_shape import ModelInstanceId, explain
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant
from fuel_core.testing.declaration import Conformance
from fuel_core.testing.runner import Unit, run_unit, units
from fuel_core.testing.structure import projection_biases
from fuel_core.testing.workspace import Case, Workspace
from fuel_core.token_data import DecodeLayerInputs

__all__ = ["Mutation", "Outcome", "mutations", "sabotage"]


@dataclass(frozen=True)
class Mutation:
    """One defect: how it gets into a built model, a loaded one, or the functions that the family calls."""

    name: str
    breaks: str
    caught_by: str
    """The check that should notice; it runs first."""
    applies: Callable[[Case], bool]
    """Whether a config has what is broken."""
    built: Callable[[DecodeBackbone], None] | None = None
    loaded: Callable[[DecodeBackbone], None] | None = None
    spec: Callable[[Any], Any] | None = None
    """Gives the spec that is built in place of the right one."""
    patch: Callable[[list[int]], AbstractContextManager[object]] | None = None
    """Puts the defect into shared functions; adds to the list whenever one of them is called."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation: ``caught`` (by which check), ``survived``, or ``does not apply``."""

    name: str
    breaks: str
    outcome: str
    by: str
    detail: str


# -- ways to put one in ---------------------------------------------------------------------------------------------


def _override(**methods: Callable[..., Any]) -> Callable[[DecodeBackbone], None]:
    """Replace methods of one model: each takes the model, the method it replaces, and that one's arguments."""

    def apply(model: DecodeBackbone) -> None:
        made: dict[str, Any] = {}
        for name, wrong in methods.items():
            original = getattr(type(model), name)

            def method(self: Any, *args: Any, _wrong: Any = wrong, _original: Any = original, **kwargs: Any) -> Any:
                return _wrong(self, functools.partial(_original, self), *args, **kwargs)

            made[name] = method
        model.__class__ = type("Sabotaged", (type(model),), made)

    return apply


def _everywhere(original: Any, wrong: Any) -> Iterator[AbstractContextManager[object]]:
    """Patches of every module that holds ``original`` under some name, but the core's own arithmetic."""
    for name, module in list(sys.modules.items()):
        core = name.startswith("fuel_core.") and not name.startswith("fuel_core.testing.")
        if module is None or (core and name != "fuel_core.layers"):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                yield mock.patch.object(module, attribute, wrong)


def _function(name: str, make: Callable[[Any], Any]) -> Callable[[list[int]], AbstractContextManager[object]]:
    """Replace ``layers.NAME`` wherever the family may have it from."""

    @contextlib.contextmanager
    def patch(called: list[int]) -> Iterator[None]:
        original = getattr(layers, name)
        wrong = make(original)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(1)
            return wrong(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            for one in _everywhere(original, counted):
                stack.enter_context(one)
            yield

    return patch


def _always(_: Case) -> bool:
    return True


# -- the defects ------------------------------------------------------------------------------------------------------


def _regrouped(original: Any) -> Any:
    def attend(inputs: Any, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        heads, groups = q.shape[1], inputs.state["k"].shape[1]
        order = torch.arange(heads).view(groups, heads // groups).t().flatten().tolist()
        out = original(inputs, q[:, order], *args, **kwargs)
        b, t, width = out.shape
        back = [order.index(h) for h in range(heads)]
        result: Tensor = out.view(b, t, heads, width // heads)[:, :, back].reshape(b, t, width)
        return result

    return attend


def _keys_at_zero(original: Any) -> Any:
    """Rows of a chunk are turned by the position of the first."""
    return lambda x, cos, sin: original(x, cos[..., :1, :], sin[..., :1, :])


def _without_bias(model: DecodeBackbone) -> None:
    with torch.no_grad():
        for _, parameter in projection_biases(model):
            parameter.zero_()


def _epsilons(spec: Any) -> dict[str, float]:
    """The epsilons of a spec by field, whatever norm they are for."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if "eps" in field.name}
    return {name: value for name, value in values.items() if isinstance(value, float)}


def _smaller_epsilons(spec: Any) -> Any:
    return dataclasses.replace(spec, **{name: value * 0.1 for name, value in _epsilons(spec).items()})


def _windows(change: Callable[[int | None], int | None]) -> Callable[[DecodeBackbone], None]:
    def wrong(self: Any, original: Any) -> MaskPlan:
        plan = original()
        return MaskPlan([change(w) for w in plan.windows], plan.per_layer)

    return _override(decode_mask_plan=wrong)


def _shifted_layers(kind: str) -> Callable[[DecodeBackbone], None]:
    def wrong(self: Any, original: Any) -> Any:
        plan = original()
        shifted = (*plan.per_layer[1:], plan.per_layer[0])
        if isinstance(plan, MaskPlan):
            return MaskPlan(plan.windows, shifted)
        return RopePlan(plan.variants, shifted)

    return _override(**{kind: wrong})


def _frequencies(change: Callable[[RopeVariant], RopeVariant]) -> Callable[[DecodeBackbone], None]:
    def wrong(self: Any, original: Any) -> RopePlan:
        plan = original()
        return RopePlan([change(v) for v in plan.variants], plan.per_layer)

    return _override(decode_rope_plan=wrong)


def _scale(change: Callable[[float], float | None]) -> Callable[[DecodeBackbone], None]:
    def wrong(self: Any, original: Any) -> Any:
        dims = original()
        return dataclasses.replace(dims, embed_scale=None if dims.embed_scale is None else change(dims.embed_scale))

    return _override(decode_dims=wrong)


_first_id: list[ModelInstanceId] = []


def _one_identity(model: DecodeBackbone) -> None:
    if not _first_id:
        _first_id.append(ModelInstanceId.next())
    model._instance_id = _first_id[0]


def _nonce(self: Any, original: Any) -> Any:
    config = original()
    self.__dict__["_looks"] = self.__dict__.get("_looks", 0) + 1
    return dataclasses.replace(config, max_position_embeddings=100_000 + self._looks)


def _logits_in_a_buffer(self: Any, original: Any, h: Tensor) -> Tensor:
    out: Tensor = original(h)
    held = self.__dict__.setdefault("_held", {})
    if out.shape != getattr(held.get("logits"), "shape", None):
        held["logits"] = torch.zeros_like(out)
    result: Tensor = held["logits"].copy_(out)
    return result


def _head_on_every_row(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    h: Tensor = original(layer_idx, inputs)
    if layer_idx == len(self.layer_state_specs()) - 1 and inputs.seq_len > 1:
        self.decode_final_norm_and_head(h)
    return h


def _first_buffers(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    kept = self.__dict__.setdefault("_kept", {}).setdefault(layer_idx, dict(inputs.state))
    if all(kept[name].shape == t.shape and kept[name].dtype == t.dtype for name, t in inputs.state.items()):
        inputs = dataclasses.replace(inputs, state=kept)
    out: Tensor = original(layer_idx, inputs)
    return out


def _long_branch(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    out: Tensor = original(layer_idx, inputs)
    slot = next(slot for slot in inputs.state_spec.slots if slot.seq_axis is not None)
    assert slot.seq_axis is not None
    length = layers.read_state(inputs, slot.name).shape[slot.seq_axis]
    return out * 0.5 if layer_idx > 0 and length > 5000 else out


def _squeezed(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    out: Tensor = original(layer_idx, inputs)
    return out[:1].expand_as(out)


def _noisy(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    out: Tensor = original(layer_idx, inputs)
    return out + torch.rand_like(out) * 1e-3


def _writes_the_mask(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    inputs.mask.sub_(0.01)
    out: Tensor = original(layer_idx, inputs)
    return out


def _rewrites_rows(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    out: Tensor = original(layer_idx, inputs)
    for buffer in inputs.state.values():
        buffer.mul_(0.999)
    return out


def _counts(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    if layer_idx == 0:
        self.__dict__["_count"] = self.__dict__.get("_count", 0) + inputs.seq_len
    out: Tensor = original(layer_idx, inputs)
    return out * (1.0 if self._count <= 16 else 0.9)


def _own_window_start(self: Any, original: Any, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
    if inputs.offset is None:
        inputs = dataclasses.replace(inputs, window_start=inputs.window_start * 0)
    out: Tensor = original(layer_idx, inputs)
    return out


def _has_window(case: Case) -> bool:
    return case.window is not None


def _narrower(window: int | None) -> int | None:
    return None if window is None else max(1, window - 1)


def _rotates(case: Case) -> bool:
    return "rope" in case.declaration.capabilities


def _arithmetic() -> list[Mutation]:
    steps = "correctness.fresh_steps"
    chunks = "correctness.chunked_prompts"
    return [
        Mutation("rotate-swapped", "cos and sin are exchanged", steps, _rotates,
                 patch=_function("rotate", lambda f: lambda x, cos, sin: f(x, sin, cos))),
        Mutation("rotate-nothing", "nothing is rotated", steps, _rotates,
                 patch=_function("rotate", lambda f: lambda x, cos, sin: x)),
        Mutation("rotate-other-pairs", "the other pairing of features", steps, _rotates,
                 patch=_function("rotate", lambda f: layers.rotate_interleaved)),
        Mutation("rotate-chunk-as-one", "every row of a chunk is turned like its first", chunks, _rotates,
                 patch=_function("rotate", _keys_at_zero)),
        Mutation("interleaved-swapped", "cos and sin are exchanged in the interleaved rotation", steps, _rotates,
                 patch=_function("rotate_interleaved", lambda f: lambda x, cos, sin: f(x, sin, cos))),
        Mutation("attend-scale", "scores are a tenth too large", steps, _always,
                 patch=_function("attend", lambda f: lambda i, q, scale, *a, **k: f(i, q, scale * 1.1, *a, **k))),
        Mutation("attend-groups", "query heads read the wrong kv heads", steps,
                 lambda c: 1 < getattr(c.spec, "num_key_value_heads", 1) < getattr(c.spec, "num_attention_heads", 1),
                 patch=_function("attend", _regrouped)),
        Mutation("swiglu-swapped", "the activation is put on the other half", steps, _always,
                 patch=_function("swiglu", lambda f: lambda x, gate, up, down: f(x, up, gate, down))),
        Mutation("norm-eps", "a tenth of an epsilon of 1e-4 or more", steps,
                 lambda c: max(_epsilons(c.spec).values(), default=0.0) >= 1e-4, spec=_smaller_epsilons),
        Mutation("bias-dropped", "no projection adds its bias", steps,
                 lambda c: bool(projection_biases(c.shared)), loaded=_without_bias),
    ]  # fmt: skip


def _plans() -> list[Mutation]:
    windows = "correctness.windows_crossed_twice"
    steps = "correctness.fresh_steps"
    return [
        Mutation("window-wider", "a window of w sees w + 1", windows, _has_window,
                 built=_windows(lambda w: None if w is None else w + 1)),
        Mutation("window-narrower", "a window of w sees w - 1", windows, lambda c: (c.window or 0) > 1,
                 built=_windows(_narrower)),
        Mutation("window-nowhere", "no layer has a window", windows, _has_window,
                 built=_override(decode_mask_plan=lambda self, f: MaskPlan.dense(f().n_layers))),
        Mutation("window-other-layers", "windows are one layer off", windows,
                 lambda c: len(set(c.shared.mask_plan.per_layer)) > 1, built=_shifted_layers("decode_mask_plan")),
        Mutation("window-start-elsewhere", "the window start does not come from the mask's entry",
                 "bound.window_and_mask_are_one_entry", _has_window,
                 built=_override(decode_apply_layer=_own_window_start)),
        Mutation("rope-base", "frequencies are 2 % off", steps, _rotates,
                 built=_frequencies(lambda v: RopeVariant(tuple(f * 1.02 for f in v.inv_freq), v.scale))),
        Mutation("rope-scale", "cos and sin lose their factor", steps,
                 lambda c: any(v.scale != 1.0 for v in c.shared.rope_plan.variants),
                 built=_frequencies(lambda v: RopeVariant(v.inv_freq, 1.0))),
        Mutation("rope-other-layers", "rotations are one layer off", steps,
                 lambda c: len(set(c.shared.rope_plan.per_layer)) > 1, built=_shifted_layers("decode_rope_plan")),
        Mutation("embed-scale-dropped", "the embedding is not scaled", steps,
                 lambda c: c.shared.decode_dims().embed_scale is not None, built=_scale(lambda s: None)),
        Mutation("embed-scale-rounded", "the embedding scale is 1 % off", steps,
                 lambda c: c.shared.decode_dims().embed_scale is not None, built=_scale(lambda s: s * 1.01)),
    ]  # fmt: skip


def _engine() -> list[Mutation]:
    every = "bound.every_layer_records"
    return [
        Mutation("key-is-never-equal", "the config is another at every look", "plans.one_plan_for_many_tokens", _always,
                 built=_override(decode_config=_nonce)),
        Mutation("one-identity", "all models are one", "identity.instances_are_told_apart", _always,
                 built=_one_identity),
        Mutation("nothing-bound", "no field is listed as bound", "identity.fields_that_only_bind_are_not_keyed",
                 lambda c: bool(c.shared.decode_bound_fields()),
                 built=_override(decode_bound_fields=lambda self, f: frozenset())),
        Mutation("everything-bound", "every field is listed as bound", "identity.fields_that_decide_ops_are_keyed",
                 _always, built=_override(decode_bound_fields=lambda self, f: frozenset(
                     field.name for field in dataclasses.fields(self.decode_config())))),
        Mutation("logits-in-a-buffer", "a later step overwrites logits", "plans.logits_belong_to_the_caller", _always,
                 built=_override(decode_final_norm_and_head=_logits_in_a_buffer)),
        Mutation("head-on-every-row", "logits for every row of a prompt", "plans.head_runs_on_the_last_row", _always,
                 built=_override(decode_apply_layer=_head_on_every_row)),
        Mutation("first-buffers-kept", "layers keep the first KV buffers", "interleavings.two_caches_alternate",
                 _always, built=_override(decode_apply_layer=_first_buffers)),
        Mutation("long-branch", "a later layer does otherwise from 5000 positions on", every,
                 lambda c: c.shared.decode_dims().n_layers > 1, built=_override(decode_apply_layer=_long_branch)),
        Mutation("batch-squeezed", "a batch is taken for one row", "plans.a_batch_of_two_is_two_of_one", _always,
                 built=_override(decode_apply_layer=_squeezed)),
        Mutation("noise", "a little noise in every layer", "bound.steps_are_repeatable", _always,
                 built=_override(decode_apply_layer=_noisy)),
        Mutation("mask-written", "layers write into the mask", "bound.layers_leave_bound_data_alone", _always,
                 built=_override(decode_apply_layer=_writes_the_mask)),
        Mutation("rows-rewritten", "every step rewrites all state rows", "contract.steps_write_their_own_rows", _always,
                 built=_override(decode_apply_layer=_rewrites_rows)),
        Mutation("own-counter", "the family counts positions itself", "interleavings.swapped_and_rewound", _always,
                 built=_override(decode_apply_layer=_counts)),
    ]  # fmt: skip


def _kind(name: str) -> str:
    """A parameter's name without its layer number."""
    return re.sub(r"\.\d+\.", ".N.", name)


def _neutral(kind: str) -> Callable[[DecodeBackbone], None]:
    def apply(model: DecodeBackbone) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if _kind(name) == kind:
                    if parameter.dim() > 1:
                        parameter.copy_(parameter.flip(0))
                    else:
                        # Gains are called weight in modules of every name.
                        parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    return apply


def _weights(workspace: Workspace) -> list[Mutation]:
    kinds: dict[str, None] = {}
    for case in workspace.cases:
        kinds |= {_kind(name): None for name, _ in case.shared.named_parameters()}

    def has(kind: str) -> Callable[[Case], bool]:
        return lambda case: any(_kind(name) == kind for name, _ in case.shared.named_parameters())

    return [
        Mutation(f"weight:{kind}", "is not what the checkpoint has", "correctness.fresh_steps", has(kind),
                 loaded=_neutral(kind))
        for kind in kinds
    ]  # fmt: skip


def _keys(workspace: Workspace) -> list[Mutation]:
    """One for each field that alone tells two structures apart."""
    from fuel_core.testing.checks.identity import variants

    alone: dict[str, set[str]] = {}
    for case in workspace.cases:
        base, others = variants(case)
        for other in others:
            if other.log != base.log:
                told = {difference.component for difference in explain(base.key, other.key)}
                if told == {f"config.{other.field}"}:
                    alone.setdefault(other.field, set()).add(case.name)

    def forget(field: str) -> Callable[[DecodeBackbone], None]:
        return _override(decode_config=lambda self, f: dataclasses.replace(f(), **{field: None}))

    def shown(names: set[str]) -> Callable[[Case], bool]:
        return lambda case: case.name in names

    return [
        Mutation(f"key:{field}", "takes no part in the key", "identity.fields_that_decide_ops_are_keyed",
                 shown(names), built=forget(field))
        for field, names in alone.items()
    ]  # fmt: skip


def mutations(workspace: Workspace) -> list[Mutation]:
    """Every mutation there is for a declaration."""
    return [*_arithmetic(), *_plans(), *_engine(), *_weights(workspace), *_keys(workspace)]


# -- running them -----------------------------------------------------------------------------------------------------


class _SabotagedWorkspace(Workspace):
    """A workspace of the mutated family that shares checkpoints and truth with the clean one."""

    def __init__(self, declaration: Conformance, clean: Workspace, mutation: Mutation) -> None:
        super().__init__(declaration)
        self.mutation = mutation
        self.clean = clean

    @property
    def declared_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the whole declaration: values come from configs that the mutation does not apply to as well."""
        return self.clean.declared_configs

    def case(self, name: str) -> Case:
        if name not in self._cases:
            made = _SabotagedCase(self, name)
            shared = self.clean.case(name)
            made._prepared, made._truths = shared._prepared, shared._truths
            self._cases[name] = made
        return self._cases[name]


class _SabotagedCase(Case):
    def model(self, seed: int = 0, spec: Any = None, weights: str = "auto") -> DecodeBackbone:
        model = super().model(seed, spec, weights)
        assert isinstance(self.workspace, _SabotagedWorkspace)
        if self.workspace.mutation.loaded is not None:
            self.workspace.mutation.loaded(model)
        return model


def _run_one(mutation: Mutation, workspace: Workspace, only: Sequence[str]) -> Outcome:
    names = [case.name for case in workspace.cases if mutation.applies(case)]
    if not names:
        return Outcome(mutation.name, mutation.breaks, "does not apply", "", "no config has it")
    family = workspace.family
    if mutation.built is not None or mutation.spec is not None:
        build, put_in, change = family.build, mutation.built, mutation.spec

        def wrong(config: Any) -> DecodeBackbone:
            backbone = build(config if change is None else change(config))
            if put_in is not None:
                put_in(backbone)
            return backbone

        family = dataclasses.replace(family, build=wrong)
    declared = workspace.declaration
    declaration = dataclasses.replace(
        declared, family=family, configs={name: declared.configs[name] for name in names}, expected_failures={}
    )
    sabotaged = _SabotagedWorkspace(declaration, workspace, mutation)
    called: list[int] = []
    try:
        with mutation.patch(called) if mutation.patch is not None else contextlib.nullcontext():
            for unit in _ordered(declaration, mutation, declared, only):
                result = run_unit(unit, sabotaged)
                if result.is_bad:
                    return Outcome(mutation.name, mutation.breaks, "caught", result.name, result.detail)
                if mutation.patch is not None and not called and unit.check.name != mutation.caught_by:
                    break
    finally:
        sabotaged.close()
    if mutation.patch is not None and not called:
        return Outcome(mutation.name, mutation.breaks, "does not apply", "", "the family never calls it")
    return Outcome(mutation.name, mutation.breaks, "survived", "", f"on {', '.join(names)}")


def _ordered(declaration: Conformance, mutation: Mutation, declared: Conformance, only: Sequence[str]) -> list[Unit]:
    """The named check first. Checks of the whole declaration are left out: it was cut down to the configs at hand."""
    chosen = [unit for unit in units(declaration, only=only) if unit.config is not None]
    usable = [unit for unit in chosen if unit.expected_failure(declared) is None]
    return sorted(usable, key=lambda unit: unit.check.name != mutation.caught_by)


def sabotage(
    workspace: Workspace, *, only: Sequence[str] = (), report: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Put every mutation into the family in turn and run its checks until one fails.

    only: names of mutations. The clean family must pass first; that is the caller's to see to.
    """
    found = []
    for mutation in mutations(workspace):
        if only and mutation.name not in only:
            continue
        outcome = _run_one(mutation, workspace, ())
        found.append(outcome)
        if report is not None:
            report(outcome)
    return found
