"""Orders of events that one model and one cache never meet: alternation, swaps, errors, addresses used again."""

from __future__ import annotations

import gc
from typing import Any

from fuel_core.errors import CapacityError, DecodeError
from fuel_core.persistent_decode import InferenceContext, forward_decode_step
from fuel_core.testing.registry import check
from fuel_core.testing.workspace import PATHS, Case


@check()
def two_caches_alternate(case: Case) -> None:
    """Something of one conversation that reaches another: buffers kept by a layer, a position remembered (A, B, A)."""
    model = case.model()
    a, b = case.ids(12), case.ids(12, stream=1)
    for path in PATHS:
        for plan in ("off", "recorded"):
            ctx = InferenceContext("cpu", offset_path=path, plan=plan)
            caches = case.cache(model, 16), case.cache(model, 16)
            for step in range(12):
                for ids, cache in zip((a, b), caches, strict=True):
                    logits = forward_decode_step(model, [ids[step]], cache, ctx)
                    case.close(logits, case.truth(ids)[step], f"two caches in turn, step {step} ({path}, {plan})")


@check()
def two_models_alternate(case: Case) -> None:
    """Two models in one context that answer for each other, or that rebuild at every turn."""
    models = case.model(), case.model(seed=1)
    ids = case.ids(8)
    for path in PATHS:
        ctx = InferenceContext("cpu", offset_path=path)
        caches = [case.cache(model, 12) for model in models]
        for step, token in enumerate(ids):
            for seed, (model, cache) in enumerate(zip(models, caches, strict=True)):
                logits = forward_decode_step(model, [token], cache, ctx)
                case.close(logits, case.truth(ids, seed)[step], f"two models in turn, step {step} ({path})")
        case.require(ctx.stats.plans_built == 2, f"two models in turn built {ctx.stats.plans_built} plans ({path})")


@check()
def swapped_and_rewound(case: Case) -> None:
    """State outside the cache, which a rewind or a prompt after it does not take back."""
    ids, other = case.ids(14), case.ids(14, stream=1)
    for path in PATHS:
        for plan in ("off", "recorded"):
            model = case.model()
            ctx = InferenceContext("cpu", offset_path=path, plan=plan)
            cache = case.cache(model, 16)
            case.run(model, ids, [5], cache=cache, ctx=ctx)
            for length, chunks in ((9, []), (3, [2]), (0, [6]), (13, [])):
                if cache.has_rolling_state:
                    length, chunks = 0, [6]
                fed = (ids if length else other)[: cache.cached_len]
                keep = min(length, len(fed))
                cache.truncate_to(keep)
                whole = [*cache.token_ids, *other[keep:]]
                sizes = chunks if sum(chunks) <= len(whole) - keep else []
                run = case.run(model, whole[keep:], sizes, cache=cache, ctx=ctx)
                truth = case.truth(whole)
                for index, row in run.rows:
                    where = f"rewound to {keep}, position {keep + index} ({path}, {plan})"
                    case.close(row, truth[keep + index], where)


class _Planted(RuntimeError):
    """Raised where a test wants a step to fail."""


@check()
def errors_in_mid_step(case: Case) -> None:
    """A step that fails half-way and leaves the cache, the context or the model changed."""
    ids = case.ids(10)
    for path in PATHS:
        model = case.model()
        ctx = InferenceContext("cpu", offset_path=path)
        cache = case.cache(model, 10)
        run = case.run(model, ids[:4], [2], cache=cache, ctx=ctx)
        before = (cache.cached_len, cache.token_ids, ctx.stats.plans_built, ctx.sessions)
        hook = model.decode_apply_layer
        last = model.decode_dims().n_layers - 1

        def failing(layer_idx: int, inputs: Any, hook: Any = hook, last: int = last) -> Any:
            if layer_idx == last:
                raise _Planted
            return hook(layer_idx, inputs)

        model.decode_apply_layer = failing  # type: ignore[method-assign]
        try:
            forward_decode_step(model, ids[4:7], cache, ctx)
        except _Planted:
            pass
        else:
            case.require(False, "an error in a layer does not reach the caller")
        finally:
            del model.decode_apply_layer
        after = (cache.cached_len, cache.token_ids, ctx.stats.plans_built, ctx.sessions)
        case.require(after == before, f"a failed step changed the cache or the context ({path})")
        for bad in ([case.vocab], [-1]):
            try:
                forward_decode_step(model, bad, cache, ctx)
            except DecodeError:
                continue
            case.require(False, f"id {bad[0]} is not refused")
        if cache.has_rolling_state:
            cache.truncate_to(0)
            case.run(model, ids[:4], [2], cache=cache, ctx=ctx)
        run = case.run(model, ids[4:], cache=cache, ctx=ctx)
        for index, row in run.rows:
            case.close(row, case.truth(ids)[4 + index], f"after a failed step, position {4 + index} ({path})")
        try:
            forward_decode_step(model, ids[:1], cache, ctx)
        except CapacityError:
            continue
        case.require(False, f"a full cache is not refused on a held plan ({path})")


@check()
def addresses_are_reused(case: Case) -> None:
    """Something remembered by address: a model or cache that is gone answers for the next one at the same place."""
    ids = case.ids(6)
    for plan in ("off", "recorded"):
        ctx = InferenceContext("cpu", plan=plan)
        for turn in range(4):
            seed = turn % 2
            model = case.model(seed)
            run = case.run(model, ids, capacity=8, ctx=ctx)
            case.rows_close(run, case.truth(ids, seed), f"model {turn} of several, one after another ({plan})")
            del run, model
            gc.collect(1)
    case.require(ctx.stats.plans_built == 4, f"four models one after another built {ctx.stats.plans_built} plans")
