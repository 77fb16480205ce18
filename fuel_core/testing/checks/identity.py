"""Both halves of identity: what differs is not served by an old plan, and what is equal keeps it."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuel_core.backbone import DecodeBackbone
from fuel_core.checkpoint import RawConfig
from fuel_core.decode_shape import ModelInstanceId, ShapeKey
from fuel_core.errors import FuelError
from fuel_core.mask_and_rope import MaskPlan, RopePlan
from fuel_core.persistent_decode import InferenceContext, Validity
from fuel_core.persistent_decode.build import session_key
from fuel_core.testing.registry import check, require
from fuel_core.testing.structure import step_log
from fuel_core.testing.workspace import PATHS, Case, Workspace, distance

# -- configs that differ in one field -----------------------------------------------------------------------------


def candidates(value: Any) -> list[Any]:
    """Other values that a field might take, nearest first."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in (value + 1, value * 2, value // 2, value - 1, 1) if v != value]
    if isinstance(value, float):
        return [value * 0.5, value * 2.0, value + 1.0]
    if value is None:
        return [3, 0.5, 30.0]
    if isinstance(value, str):
        return ["bfloat16" if value != "bfloat16" else "float32"] if "float" in value else []
    if isinstance(value, tuple | list) and value:
        kind = type(value)
        swapped = [kind((*value[1:], value[0])), kind(reversed(value))]
        return [
            *(v for v in swapped if v != value),
            *(kind((other, *value[1:])) for other in candidates(value[0]) if not isinstance(value[0], str)),
        ]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = []
        for name in ("theta", "factor", *(f.name for f in dataclasses.fields(value))):
            inner = getattr(value, name, None)
            if isinstance(inner, float):
                other = dataclasses.replace(value, **{name: inner * 0.37 + 1.0})
                made += [] if other in made else [other]
        theta = getattr(value, "theta", None)
        if isinstance(theta, float):
            made.insert(1, dataclasses.replace(value, theta=theta * 0.05))
        return made
    return []


def _elsewhere(case: Case, name: str) -> list[Any]:
    """Values of a field in the other declared configs: of a word, no other can be thought of."""
    value, found = getattr(case.spec, name), []
    for spec in case.workspace.declared_specs.values():
        other = getattr(spec, name, None)
        if other is None or other == value or other in found:
            continue
        # One value for each layer: as many as there are here.
        if not isinstance(other, tuple | list) or (isinstance(value, type(other)) and len(other) == len(value)):
            found.append(other)
    return found


@dataclass(frozen=True)
class Variant:
    """A config that differs from the declared one in one place, built: its structure, key and plans."""

    field: str
    log: tuple[Any, ...]
    key: ShapeKey
    mask: MaskPlan
    rope: RopePlan


def _described(case: Case, field: str, spec: Any) -> Variant | None:
    """The variant, or None where the family refuses it or cannot run it."""
    try:
        model = case.build(spec)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.zero_()
        for taker, source in model.tied_weights():
            path, _, leaf = taker.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(source))
        return Variant(field, step_log(model), model.structure_key(), model.mask_plan, model.rope_plan)
    except (FuelError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError):
        return None


def _specs(case: Case) -> Iterator[tuple[str, Any]]:
    """(place, spec) of configs that differ in one field of the spec, or one key of config.json."""
    spec = case.spec
    for field in dataclasses.fields(spec):
        if field.name == "sources":
            continue
        # A model_type names an architecture, whose other fields would have to go with it.
        more = [] if field.name == "model_type" else _elsewhere(case, field.name)
        for value in (*candidates(getattr(spec, field.name)), *more):
            try:
                yield field.name, dataclasses.replace(spec, **{field.name: value})
            except (FuelError, ValueError, TypeError):
                continue
    names = {field.name for field in dataclasses.fields(spec)}
    for key, value in dict(case.raw).items():
        if key in names or key in ("architectures", "model_type", "transformers_version") or isinstance(value, Mapping):
            continue
        written = (config.get(key) for config in case.workspace.declared_configs.values())
        for other in (*candidates(value), *(v for v in written if isinstance(v, str) and v != value)):
            try:
                yield key, case.family.resolve_config(RawConfig.from_config({**dict(case.raw), key: other}))
            except (FuelError, ValueError, TypeError, KeyError):
                continue


def variants(case: Case) -> tuple[Variant, list[Variant]]:
    """The declared config, and for each field the first other value that the family accepts."""
    kept = case.__dict__.get("_variants")
    if kept is None:
        base = _described(case, "", case.spec)
        require(base is not None, f"{case.name}: the declared config cannot be built and probed")
        found: dict[str, Variant] = {}
        seen: set[Any] = set()
        for name, spec in _specs(case):
            told = tuple((f.name, repr(getattr(spec, f.name))) for f in dataclasses.fields(spec) if f.name != "sources")
            if name in found or told in seen:
                continue
            seen.add(told)
            made = _described(case, name, spec)
            if made is not None:
                found[name] = made
        kept = case.__dict__["_variants"] = (base, list(found.values()))
    base, others = kept
    assert base is not None
    return base, others


@check()
def fields_that_decide_ops_are_keyed(case: Case) -> None:
    """A config field that changes what a step does and is no part of the key: an old plan would answer for it."""
    base, others = variants(case)
    case.require(len(others) >= 3, "no field of the config could be changed; the check would be vacuous")
    for other in others:
        if other.log != base.log:
            case.require(other.key != base.key, f"{other.field} changes the ops of a step and not the shape key")


@check()
def fields_that_only_bind_are_not_keyed(case: Case) -> None:
    """A field that reaches the step through masks or tables alone and is baked: a change builds for nothing."""
    base, others = variants(case)
    for other in others:
        plans = other.mask != base.mask or other.rope != base.rope
        same = other.mask.structure() == base.mask.structure() and other.rope.structure() == base.rope.structure()
        if other.log == base.log and plans and same:
            case.require(
                other.key == base.key,
                f"{other.field} only changes what is bound, and yet the shape key; list it in decode_bound_fields",
            )


@check()
def an_equal_config_keeps_the_plan(case: Case) -> None:
    """A key that changes although nothing did."""
    model = case.model()
    ids = case.ids(6)
    run = case.run(model, ids[:2], capacity=8)
    key = model.decode_shape_key()
    model._set_config(dataclasses.replace(model.decode_config()))
    case.require(model.decode_shape_key() == key, "an equal config, another object, gives another key")
    case.run(model, ids[2:], cache=run.cache, ctx=run.ctx)
    case.require(
        run.ctx.stats.plans_built == 1, f"an equal config built {run.ctx.stats.plans_built} plans: {_events(run)}"
    )


def _events(run: Any) -> str:
    return "; ".join(map(str, list(run.ctx.plan_events)[-4:]))


def _bound_values(case: Case, name: str) -> list[Any]:
    declared = case.declaration.bound_changes.get(name)
    value = getattr(case.shared.decode_config(), name)
    if declared is not None:
        return [v for v in declared if v != value]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value + 2, max(1, value - 2)] if value > 1 else [value + 2]
    return [] if value is None else (candidates(value) or _elsewhere(case, name))[:2]


@check()
def bound_fields_are_followed(case: Case) -> None:
    """A field listed as bound that is baked all the same: the model changes and the held plan does not."""
    for name in sorted(case.shared.decode_bound_fields()):
        for path in PATHS:
            model = case.model()
            ids = case.ids(case.length)
            run = case.run(model, ids, path=path)
            before = torch.stack([row for _, row in run.rows])
            for value in _bound_values(case, name):
                model.reconfigure(**{name: value})
                run.cache.truncate_to(0)
                again = case.run(model, ids, cache=run.cache, ctx=run.ctx)
                after = torch.stack([row for _, row in again.rows])
                changed = dataclasses.replace(case.spec, **{name: value})
                expected = case.fresh(case.model(spec=changed), ids)
                case.close(
                    after, expected, f"{name} = {value!r}, set on a live model, against one built with it ({path})"
                )
                case.require(run.ctx.stats.plans_built == 1, f"{name} = {value!r} built a plan: {_events(run)}")
                moved = distance(after, before)
                case.require(moved > 1e-4, f"{name} = {value!r} changes nothing ({moved:.3g}); a bound field must show")
                before = after


@check(per_config=False)
def bound_fields_are_shown(workspace: Workspace) -> None:
    """A bound field that no config gives a value, so that nothing could notice if it were baked."""
    listed: set[str] = set()
    shown: set[str] = set()
    for case in workspace.cases:
        for name in case.shared.decode_bound_fields():
            listed.add(name)
            if _bound_values(case, name):
                shown.add(name)
    require(listed <= shown, f"no config shows {', '.join(sorted(listed - shown))}; declare bound_changes or a config")


@check()
def instances_are_told_apart(case: Case) -> None:
    """A plan, or anything derived from weights, that serves another model: identity by class or address."""
    ids = case.ids(8)
    first = case.model()
    second = case.model(seed=1)
    for plan in ("off", "recorded"):
        ctx = InferenceContext("cpu", plan=plan)
        a, b = case.cache(first, 12), case.cache(second, 12)
        for model, cache, seed in ((first, a, 0), (second, b, 1), (first, a, 0), (second, b, 1)):
            cache.truncate_to(0)
            run = case.run(model, ids, cache=cache, ctx=ctx)
            case.rows_close(run, case.truth(ids, seed), f"two models in one process, seed {seed}, plan {plan}")
        if plan == "recorded":
            case.require(ctx.stats.plans_built == 2, f"two models built {ctx.stats.plans_built} plans: {_events(run)}")
    numbers = [first.instance_id, second.instance_id]
    twin = copy.deepcopy(first)
    numbers.append(twin.instance_id)
    del twin
    gc.collect(1)
    for _ in range(4):  # one after another at what may be the same address
        numbers.append(case.build().instance_id)
    for number in numbers:
        case.require(isinstance(number, ModelInstanceId), f"instance_id must be counted by the core, found {number!r}")
    counted = [number.get() for number in numbers]
    case.require(len(set(counted)) == len(counted), f"instance ids are recycled: {counted}")


def _replace_parameter(model: DecodeBackbone) -> None:
    name, parameter = list(model.named_parameters())[-1]
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(parameter * -0.5, requires_grad=False))


def _assign_state(model: DecodeBackbone) -> None:
    model.load_state_dict({n: t * 1.25 for n, t in model.state_dict().items()}, assign=True)


def _move(model: DecodeBackbone) -> None:
    model.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def _in_place(model: DecodeBackbone) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


@check()
def replaced_weights_are_followed(case: Case) -> None:
    """A held plan that keeps reading weights the model no longer has, or a copy of them made on the side."""
    ids = case.ids(7)
    for swap, built in ((_replace_parameter, 2), (_assign_state, 2), (_move, 2), (_in_place, 1)):
        model = case.model()
        run = case.run(model, ids, [2], capacity=10)
        before = run.last
        swap(model)
        run.cache.truncate_to(0)
        again = case.run(model, ids, [2], cache=run.cache, ctx=run.ctx)
        expected = case.fresh(model, ids)
        case.rows_close(again, expected, f"after {swap.__name__.strip('_')}", 1e-5)
        twin = _reloaded(case, model)
        case.close(
            expected, case.fresh(twin, ids), f"fresh steps after {swap.__name__.strip('_')}, against a new model"
        )
        case.require(distance(again.last, before) > 1e-4, f"{swap.__name__.strip('_')} does not show in the logits")
        case.require(
            run.ctx.stats.plans_built == built, f"{swap.__name__}: {run.ctx.stats.plans_built} plans: {_events(run)}"
        )


def _reloaded(case: Case, model: DecodeBackbone) -> DecodeBackbone:
    """A model built anew that holds copies of the same weights: it shares nothing with the first."""
    twin = case.build()
    twin.load_state_dict({name: t.detach().clone() for name, t in model.state_dict().items()}, assign=True)
    for taker, source in twin.tied_weights():
        path, _, leaf = taker.rpartition(".")
        setattr(twin.get_submodule(path), leaf, twin.get_parameter(source))
    return twin


@check()
def allocations_are_told_apart(case: Case) -> None:
    """A held plan that reads the KV buffers it was built on after the cache was replaced, cleared or rewound."""
    ids, other = case.ids(case.prompt), case.ids(case.prompt, stream=1)
    for path in PATHS:
        model = case.model()
        first = case.run(model, ids, path=path, capacity=12)
        case.rows_close(first, case.truth(ids), f"the first cache ({path})")
        second = case.run(model, other, capacity=12, ctx=first.ctx)
        case.rows_close(second, case.truth(other), f"a second cache of equal geometry ({path})")
        stats = first.ctx.stats
        case.require(
            (stats.plans_built, stats.rebound_kv) == (1, 1), f"a cache swap must re-point the plan: {_events(first)}"
        )
        del first.cache
        gc.collect(1)
        second.cache.truncate_to(4)
        more = case.run(model, other[4:], cache=second.cache, ctx=first.ctx)
        case.rows_close(more, case.truth(other)[4:], f"a rewound cache ({path})")
        second.cache.clear()
        cleared = case.run(model, ids, cache=second.cache, ctx=first.ctx)
        case.rows_close(cleared, case.truth(ids), f"a cleared cache ({path})")
        case.require(stats.plans_built == 1, f"rewinding and clearing built a plan: {_events(first)}")


@check()
def capacity_dtype_and_device_are_keyed(case: Case) -> None:
    """A plan that serves a cache of another capacity, dtype, device or offset path."""
    model, ids = case.shared, case.ids(5)
    ctx = InferenceContext("cpu")
    small, large = case.cache(model, 8), case.cache(model, 11)
    half = case.cache(model, 8, torch.bfloat16)
    built = 0
    for cache in (small, large, half):
        run = case.run(model, ids, cache=cache, ctx=ctx)
        built += 1
        case.require(ctx.stats.plans_built == built, f"another capacity or dtype must build: {_events(run)}")
        if cache is not half:
            case.rows_close(run, case.truth(ids), f"a capacity of {cache.max_seq_len}")
    small.truncate_to(0)
    run = case.run(model, ids, cache=small, ctx=ctx)
    case.require(ctx.stats.plans_built == built, f"going back must not build: {_events(run)}")
    ctx.offset_path = "device"
    small.truncate_to(0)
    run = case.run(model, ids, cache=small, ctx=ctx)
    case.rows_close(run, case.truth(ids), "after a change of the offset path")
    case.require(ctx.stats.plans_built == built + 1, f"another offset path must build: {_events(run)}")
    now = session_key(model, small, ctx)
    elsewhere = dataclasses.replace(now, device=torch.device("meta"))
    case.require(now.verdict(elsewhere).validity is Validity.STALE, "another device is not seen")
