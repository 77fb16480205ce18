"""What is baked and what is bound, by construction: record elsewhere, run at every length, change what is bound."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from fuel_core.errors import RecordingError
from fuel_core.kv_cache import KvCache
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant
from fuel_core.persistent_decode import InferenceContext, forward_decode_step
from fuel_core.testing.registry import check, fail
from fuel_core.testing.structure import RECORD_AT, trace_segments
from fuel_core.testing.workspace import PATHS, Case, distance

_ELSEWHERE: Mapping[str, int] = {"cached_len": 150, "attended_len": 151, "window_start": 13}
_ELSEWHERE_CAPACITY = 401
EVERY_LENGTH = 300
"""Past both lengths that the core records and compares at (92 and 257)."""


@check()
def every_layer_records(case: Case) -> None:
    """A layer that branches on a length and was never traced, because its ops looked like another layer's."""
    try:
        trace_segments(case.shared)
    except RecordingError as error:
        fail(f"{case.name}: {error}")


def _graph(recording: Any) -> tuple[Hashable, ...]:
    """The recorded ops with their constants; symbols by the name of their node, so lengths do not show."""
    nodes = recording.graph_module.graph.nodes
    # Symbols print as s0, s7, u3...: which number they got depends on nothing that is baked.
    return tuple((n.op, str(n.target), re.sub(r"\b[su]\d+\b", "s", str((n.args, n.kwargs)))) for n in nodes)


@check()
def recorded_elsewhere_the_ops_are_equal(case: Case) -> None:
    """An integer of the step that became a constant: recorded at other positions and lengths, the ops differ."""
    for device_offset in (False, True):
        here = trace_segments(case.shared, RECORD_AT, device_offset=device_offset, distinct=True)
        there = trace_segments(case.shared, _ELSEWHERE, _ELSEWHERE_CAPACITY, device_offset=device_offset, distinct=True)
        case.require(len(here) == len(there), f"{len(here)} structures at some lengths, {len(there)} at others")
        for index, (a, b) in enumerate(zip(here, there, strict=True)):
            case.require(_graph(a) == _graph(b), f"segment {index} records other ops at other positions")


@check()
def every_length_equals_a_fresh_step(case: Case) -> None:
    """A layer that does otherwise from some length on, which no probed length shows: every length is run."""
    model = case.shared
    count = min(EVERY_LENGTH, getattr(case.spec, "max_position_embeddings", EVERY_LENGTH))
    ids = case.ids(count)
    held = case.cache(model, count)
    fresh = case.cache(model, count)
    on, off = InferenceContext("cpu", offset_path="symbol"), InferenceContext("cpu", offset_path="symbol", plan="off")
    for length, token in enumerate(ids, 1):
        a, b = forward_decode_step(model, [token], held, on), forward_decode_step(model, [token], fresh, off)
        error = distance(a, b)
        if error > 1e-5 * max(1.0, float(b.abs().max())):
            fail(f"{case.name}: at length {length} the held plan is {error:.3g} away from a fresh step")
    case.require(on.stats.rebinds == count - 1, f"no reuse over {count} steps: {on.stats}")
    sizes = (3, 17, 129, 300)
    for capacity in sizes:  # on the device path the only length a layer can see is the capacity
        run = case.run(model, ids[:3], path="device", capacity=capacity)
        expected = case.fresh(model, ids[:3])
        case.rows_close(run, expected, f"a capacity of {capacity} on the device path", 1e-5)


@check(needs=("window",))
def window_and_mask_are_one_entry(case: Case) -> None:
    """A layer that takes its window from somewhere else than the plan entry that its mask is made from."""
    model = case.model()
    plan = model.mask_plan
    if all(window is None for window in plan.windows):
        return
    ids = case.ids(case.length)
    for width in (2, 3, (case.window or 1) + 3):
        model.mask_plan = MaskPlan([None if w is None else width for w in plan.windows], plan.per_layer)
        found = [
            torch.stack([row for _, row in case.run(model, ids, chunks, path=path, plan=mode).rows][-4:])
            for path in PATHS
            for mode in ("off", "recorded")
            for chunks in ([], [case.prompt])
        ]
        for other in found[1:]:
            case.close(other, found[0], f"a window of {width}: mask and window start disagree between paths or plans")


def _stretched(plan: RopePlan) -> RopePlan:
    return RopePlan([RopeVariant(tuple(f * 0.3 for f in v.inv_freq), v.scale) for v in plan.variants], plan.per_layer)


@check()
def assigned_plans_are_followed(case: Case) -> None:
    """A plan assigned to a live model that a held step ignores, or that costs a rebuild."""
    for path in PATHS:
        model, ids = case.model(), case.ids(case.length)
        run = case.run(model, ids, path=path)
        changes: list[tuple[str, Any]] = []
        if "rope" in case.declaration.capabilities:
            changes.append(("rope_plan", _stretched(model.rope_plan)))
        if any(w is not None for w in model.mask_plan.windows):
            narrow = [None if w is None else max(1, w - 1) for w in model.mask_plan.windows]
            changes.append(("mask_plan", MaskPlan(narrow, model.mask_plan.per_layer)))
        for name, plan in changes:
            setattr(model, name, plan)
            run.cache.truncate_to(0)
            again = case.run(model, ids, cache=run.cache, ctx=run.ctx)
            case.rows_close(again, case.fresh(model, ids), f"after {name} was assigned ({path})", 1e-5)
            case.require(run.ctx.stats.plans_built == 1, f"assigning {name} of equal structure built a plan ({path})")
            if name == "rope_plan":
                case.require(distance(again.last, run.last) > 1e-4, f"{name} does not reach the logits ({path})")


@check()
def layers_leave_bound_data_alone(case: Case) -> None:
    """A layer that writes into its mask or its tables: the next layer, and the next step, read what it left."""
    model, ids = case.shared, case.ids(5)
    for device_offset in (False, True):
        cache = case.cache(model, 8)
        case.run(model, ids[:4], [4], cache=cache, path="device" if device_offset else "symbol")
        data = model.build_decode_token_data(ids[4:], cache, device_offset=device_offset, mask_columns=8)
        kept = {name: getattr(data, name).clone() for name in ("token_ids", "cos", "sin", "mask")}
        with torch.no_grad():
            _run_segments(model, data, cache, device_offset)
        for name, before in kept.items():
            after = getattr(data, name)
            case.require(torch.equal(after, before), f"a layer writes into {name}, which is bound for every layer")


def _run_segments(model: Any, data: Any, cache: KvCache, device_offset: bool) -> Tensor:
    from fuel_core.persistent_decode.build import bind_segments, decode_segments, run_segments

    segments = decode_segments(model, cache.dtype, device_offset=device_offset, all_positions=False)
    return run_segments(segments, bind_segments(model, segments, data, cache), data)


@check()
def steps_are_repeatable(case: Case) -> None:
    """A step that depends on more than its inputs: dropout left on, a counter of its own, a random number."""
    model, ids = case.shared, case.ids(case.prompt)
    for plan in ("off", "recorded"):
        runs = [case.run(model, ids, plan=plan) for _ in range(2)]
        for (index, a), (_, b) in zip(runs[0].rows, runs[1].rows, strict=True):
            case.require(
                torch.equal(a, b), f"the same ids give other logits the second time, position {index} ({plan})"
            )
