"""How many plans, how many ops: built once, nothing extra emitted, nothing shared that belongs to the caller."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuel_core.errors import FuelError
from fuel_core.mask_and_rope import MaskPlan
from fuel_core.persistent_decode import InferenceContext, forward_decode_step, forward_with_kv_context
from fuel_core.testing.registry import check
from fuel_core.testing.structure import step_log
from fuel_core.testing.workspace import PATHS, Case, distance
from fuel_core.token_data import DecodeLayerInputs, compute_decode_token_host


@check()
def one_plan_for_many_tokens(case: Case) -> None:
    """A key that is never equal, so that every token builds: right text at a fraction of the speed."""
    for count in (2, 10, 200):
        limit = getattr(case.spec, "max_position_embeddings", count)
        ids = case.ids(min(count, limit))
        for path in PATHS if count < 200 else PATHS[:1]:
            run = case.run(case.shared, ids, path=path)
            stats = run.ctx.stats
            found = (stats.plans_built, stats.rebinds, stats.fresh_steps, stats.replans)
            expected = (1, len(ids) - 1, 0, dict[str, int]())
            told = "; ".join(map(str, list(run.ctx.plan_events)[-3:]))
            case.require(found == expected, f"{len(ids)} tokens: (built, rebinds, fresh, replans) {found}: {told}")
    ctx = InferenceContext("cpu")
    cache = case.cache(case.shared, 16)
    case.run(case.shared, case.ids(10), [4, 1, 1, 2], cache=cache, ctx=ctx)
    case.require(ctx.stats.plans_built == 1, "a step of several tokens threw the held plan away")


@check()
def op_counts_stay(case: Case) -> None:
    """A plan that grows: with the position, the capacity, or from one build to the next."""
    for path in PATHS:
        counts = set()
        for capacity in (12, 40):
            run = case.run(case.shared, case.ids(4), path=path, capacity=capacity)
            before = run.ctx.sessions[0].ops
            case.run(case.shared, case.ids(6), cache=run.cache, ctx=run.ctx)
            case.require(run.ctx.sessions[0].ops == before, f"the held plan's ops changed while it ran ({path})")
            counts.add(len(before))
        again = case.run(case.model(), case.ids(2), path=path, capacity=12)
        counts.add(len(again.ctx.sessions[0].ops))
        case.require(len(counts) == 1, f"equal models have plans of {sorted(counts)} ops ({path})")
        case.require(again.ctx.stats.recordings == 0, f"a second model of equal structure was recorded anew ({path})")


@check()
def uniform_plans_emit_nothing_extra(case: Case) -> None:
    """Ops for a scale, a mask or a rotation that the config does not have."""
    model = case.model()
    log = step_log(model)
    embed = [op for op in log[0] if isinstance(op, tuple)]
    scaled = any("mul" in str(op[0]) for op in embed)
    has_scale = model.decode_dims().embed_scale is not None
    case.require(scaled == has_scale, f"embed_scale is {model.decode_dims().embed_scale}, embedding ops {embed}")
    n_layers = model.decode_dims().n_layers
    # The arithmetic of a layer must not depend on whether its one mask variant is dense or windowed.
    model.mask_plan = MaskPlan([None], [0] * n_layers)
    dense = [len(ops) for ops in step_log(model)]
    model.mask_plan = MaskPlan([4], [0] * n_layers)
    windowed = [len(ops) for ops in step_log(model)]
    case.require(dense == windowed, f"a uniform window emits other ops than a dense plan: {windowed} for {dense}")


class _HeadRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the rows of results as wide as the vocabulary that were made from something of another width."""

    def __init__(self, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() >= 2 and out.shape[-1] == self.vocab:
            given = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
            # A view, a cast or a sum of logits was counted when the logits were made; memory alone is nothing yet.
            if given and not any(t.numel() == out.numel() and t.shape[-1:] == out.shape[-1:] for t in given):
                rows = out.numel() // self.vocab
                # A weight turned about is as wide as the vocabulary too, and holds nothing new.
                self.rows += 0 if any(t.numel() == out.numel() for t in given) else rows
        return out


@check()
def head_runs_on_the_last_row(case: Case) -> None:
    """Logits computed for every row of a prompt: most of the memory and time of a long prefill."""
    model, ids = case.shared, case.ids(case.prompt)
    seen = {model.decode_dims().hidden, getattr(case.spec, "intermediate_size", 0)}
    case.require(case.vocab not in seen, f"vocab {case.vocab} equals another width, rows cannot be told apart")
    with _HeadRows(case.vocab) as counted:
        forward_with_kv_context(model, ids, case.cache(model, 16), InferenceContext("cpu", plan="off"))
    case.require(counted.rows == 1, f"a prompt of {len(ids)} ids computes logits for {counted.rows} rows, 1 expected")


@check()
def logits_belong_to_the_caller(case: Case) -> None:
    """Logits that a later step overwrites."""
    for path in PATHS:
        for plan in ("off", "recorded"):
            model, ids = case.model(), case.ids(6)
            cache, ctx = case.cache(model, 8), InferenceContext("cpu", offset_path=path, plan=plan)
            chunks = [ids[:2], *([token] for token in ids[2:])]
            held = [forward_decode_step(model, chunks[0], cache, ctx)]
            copies = [held[0].clone()]
            for chunk in chunks[1:]:
                held.append(forward_decode_step(model, chunk, cache, ctx))
                copies.append(held[-1].clone())
            for index, (row, copy) in enumerate(zip(held, copies, strict=True)):
                case.require(torch.equal(row, copy), f"logits of step {index} were overwritten ({path}, {plan})")


_CAPACITY = 11


def _layer_inputs(case: Case, layer_idx: int, starts: tuple[int, ...]) -> list[DecodeLayerInputs]:
    """Inputs of one token for each row, at these positions, on the device-offset path; the same whenever asked."""
    model = case.shared
    rope, mask = model.rope_plan.variant_for_layer(layer_idx), model.mask_plan.variant_for_layer(layer_idx)
    width = model.rope_plan.variants[rope].width
    spec = model.layer_state_specs()[layer_idx]
    generator = torch.Generator().manual_seed(5)
    made = []
    for start in starts:
        host = compute_decode_token_host(model.mask_plan, model.rope_plan, [0], start, mask_columns=_CAPACITY)
        assert host.mask is not None
        state = {s.name: torch.randn(s.buffer_shape(1, _CAPACITY), generator=generator) for s in spec.slots}
        made.append(
            DecodeLayerInputs(
                h=torch.randn(1, 1, model.decode_dims().hidden, generator=generator),
                cos=torch.from_numpy(host.rope_cos)[rope, :, :width].view(1, 1, 1, width),
                sin=torch.from_numpy(host.rope_sin)[rope, :, :width].view(1, 1, 1, width),
                mask=torch.from_numpy(host.mask)[mask].view(1, 1, 1, _CAPACITY),
                offset=torch.tensor([start]),
                cached_len=0,
                attended_len=0,
                window_start=0,
                state=state,
                state_spec=spec,
                layer_idx=layer_idx,
            )
        )
    return made


def _together(rows: list[DecodeLayerInputs]) -> DecodeLayerInputs:
    """The same rows as one batch."""
    stacked = {name: torch.cat([getattr(row, name) for row in rows]) for name in ("h", "cos", "sin", "mask", "offset")}
    state = {name: torch.cat([row.state[name] for row in rows]) for name in rows[0].state}
    return dataclasses.replace(rows[0], **stacked, state=state)  # type: ignore[arg-type]


@check()
def a_batch_of_two_is_two_of_one(case: Case) -> None:
    """A layer that drops or mixes the batch: squeezed, viewed as one row, or reduced over it."""
    model = case.shared
    for index in range(model.decode_dims().n_layers):
        alone = _layer_inputs(case, index, (2, 5))
        both = _together(_layer_inputs(case, index, (2, 5)))
        with torch.no_grad():
            expected = torch.cat([model.decode_apply_layer(index, row) for row in alone])
            try:
                found = model.decode_apply_layer(index, both)
            except (RuntimeError, FuelError, ValueError) as error:
                case.require(False, f"layer {index} fails on a batch of two: {' '.join(str(error).split())[:200]}")
        case.close(found, expected, f"layer {index} on a batch of two", 1e-5)
        for name, written in both.state.items():
            error_in_state = distance(written, torch.cat([row.state[name] for row in alone]))
            case.require(error_in_state < 1e-5, f"layer {index} writes {name!r} wrongly in a batch")
