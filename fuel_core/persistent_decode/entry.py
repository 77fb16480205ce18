"""The calls: one that is fast by default, and the two it is made of.

``forward_decode_step`` keeps its sessions on the context and is what to call. ``forward_with_kv_context`` (D1)
executes fresh. ``forward_with_kv_context_persistent`` (D2) keeps its session where the caller says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from fuel_core.backbone import DecodeBackbone
from fuel_core.decode_shape import Difference
from fuel_core.errors import DecodeError, TopologyChanged
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode.build import DataConsts, build_decode_graph, check_step, choose_backend, session_key
from fuel_core.persistent_decode.context import InferenceContext
from fuel_core.persistent_decode.driver import rebind_and_realize_prebuilt
from fuel_core.persistent_decode.session import Disposition, Reason, SessionKey, SessionSlot, Validity, reason_of
from fuel_core.plan_backends import LIBRARY

__all__ = [
    "check_arguments",
    "drop_decode_session",
    "forward_decode_step",
    "forward_with_kv_context",
    "forward_with_kv_context_persistent",
    "refresh_decode_session",
]


def _ids(token_ids: Sequence[int] | Tensor, vocab: int, family: str) -> list[int]:
    """Token ids as a list of integers. Raises DecodeError for what is not one."""
    if isinstance(token_ids, Tensor):
        if token_ids.dim() != 1 or token_ids.dtype != torch.int64:
            raise DecodeError(
                f"{family}: token ids must be a list or a one-dimensional int64 tensor, found "
                f"{list(token_ids.shape)} {token_ids.dtype}; pass one row of ids"
            )
        ids = token_ids.tolist()
    else:
        try:
            ids = list(token_ids)
        except TypeError:
            raise DecodeError(
                f"{family}: token ids must be a list or an int64 tensor, found {type(token_ids).__name__}; for one "
                "token pass a list of one"
            ) from None
        if not all(type(i) is int for i in ids):
            found = next(type(i).__name__ for i in ids if type(i) is not int)
            raise DecodeError(f"{family}: token ids must be integers, found {found}; convert them")
    for token_id in ids:
        if not 0 <= token_id < vocab:
            raise DecodeError(
                f"{family}: token ids must lie in 0..{vocab - 1}, found {token_id}; "
                "was it made by another model's tokenizer?"
            )
    return ids


_KINDS = {"model": DecodeBackbone, "cache": KvCache, "ctx": InferenceContext, "slot": SessionSlot}
_STEP = "(model, token_ids, cache, ctx)"


def check_arguments(call: str, order: str, **given: object) -> None:
    """Raise DecodeError for arguments in the wrong places: what they lack would be missed deep inside a step."""
    for name, value in given.items():
        if not isinstance(value, _KINDS[name]):
            raise DecodeError(
                f"{call}: {name} must be a {_KINDS[name].__name__}, found {type(value).__name__}; the order is {order}"
            )


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    """The cache's dtype decides what a step computes in; recorded under a caller's autocast it would stay so."""
    enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()


@contextmanager
def _step(ctx: InferenceContext, cache: KvCache, n_tokens: int, slot: SessionSlot | None = None) -> Iterator[None]:
    """One forward call: serialised per context, no autograd, timed; a failure leaves everything as it was."""
    with ctx.lock, torch.inference_mode(False), torch.no_grad(), _no_autocast(ctx.device.type):
        ctx.step += 1
        started = time.perf_counter()
        restore, session = ctx.checkpoint(), slot.session if slot is not None else None
        try:
            yield
        except BaseException:
            ctx.step -= 1
            restore()
            if slot is not None:
                slot.session = session
            cache.abandon_step()
            raise
        elapsed = (time.perf_counter() - started) * 1e3
        if n_tokens > 1:
            ctx.stats.prompt_ms += elapsed
            ctx.stats.prompt_tokens += n_tokens
        else:
            ctx.stats.decode_ms += elapsed
            ctx.stats.decode_steps += 1


def _fresh(
    model: DecodeBackbone,
    ids: list[int],
    cache: KvCache,
    ctx: InferenceContext,
    all_positions: bool = False,
    sequence_len: int | None = None,
) -> Tensor:
    built = build_decode_graph(
        model, DataConsts.BAKED, ids, cache, ctx, all_positions=all_positions, sequence_len=sequence_len
    )
    model.weights_epoch()
    cache.advance(ids, model.content_version(), _regime(model, ids, cache, sequence_len))
    ctx.stats.fresh_steps += 1
    return built.logits[0] if all_positions else built.logits[0, -1]


_RECOMPUTE_CHUNK = 512
"""Most cached positions that are computed again at once: memory follows the chunk, results do not."""


def _regime(model: DecodeBackbone, ids: list[int], cache: KvCache, sequence_len: int | None) -> object:
    """Which frequencies the rows of a step that is about to run are turned by; None where that is always one set."""
    plan = model.rope_plan
    return plan.regime(sequence_len or cache.cached_len + len(ids)) if plan.depends_on_length else None


def _turn_alike(
    model: DecodeBackbone,
    ids: list[int],
    cache: KvCache,
    ctx: InferenceContext,
    sequence_len: int | None,
    entry: DataConsts = DataConsts.BAKED,
) -> None:
    """Compute the cached rows again where the step at hand turns by other frequencies than they were turned by.

    Frequencies may depend on how long a sequence is, and one sequence turns by one set of them: keys of one and queries
    of another do not meet at their distance. Everything that is held stays: frequencies are bound data. Counted, and
    noted under `rope_length`. After a failure the cache holds its ids as before, and the next step begins here again.
    """
    end = cache.cached_len + len(ids)
    if sequence_len is not None and (type(sequence_len) is not int or sequence_len < end):
        raise DecodeError(
            f"{model.decode_family()}: sequence_len must be an integer of at least {end}, the positions after this "
            f"step, found {sequence_len!r}; leave it out, or count the whole prompt"
        )
    regime = _regime(model, ids, cache, sequence_len)
    if cache.turned_by(regime):
        return
    check_step(model, len(ids), cache, ctx, entry.value)
    held, length = cache.token_ids, sequence_len or end
    cache.truncate_to(0)
    fresh_steps = ctx.stats.fresh_steps
    try:
        for start in range(0, len(held), _RECOMPUTE_CHUNK):
            _fresh(model, held[start : start + _RECOMPUTE_CHUNK], cache, ctx, sequence_len=length)
    except BaseException:
        cache.abandon_step()
        cache.take_back(held)
        raise
    finally:
        ctx.stats.fresh_steps = fresh_steps  # a step is what the caller asked for
    ctx.stats.recomputed_tokens += len(held)
    ctx.record(
        Disposition.KEPT if ctx.sessions else Disposition.ABSENT,
        Reason.ROPE_LENGTH,
        Difference("sequence_len", len(held), length),
    )


def forward_with_kv_context(
    model: DecodeBackbone,
    token_ids: Sequence[int] | Tensor,
    cache: KvCache,
    ctx: InferenceContext,
    *,
    all_positions: bool = False,
    sequence_len: int | None = None,
) -> Tensor:
    """Execute a step fresh (D1): prefill, multi-token verification, fallback. Held sessions stay as they are.

    token_ids: list or int64 tensor ``[T]``. sequence_len: as ``forward_decode_step`` takes it. Returns float32 logits
    ``[vocab]`` of the last position, or ``[T, vocab]``; they are the caller's own. Raises DecodeError and below; the
    cache has not moved then.
    """
    check_arguments("forward_with_kv_context", _STEP, model=model, cache=cache, ctx=ctx)
    ids = _ids(token_ids, model.decode_dims().vocab, model.decode_family())
    with _step(ctx, cache, len(ids)):
        _turn_alike(model, ids, cache, ctx, sequence_len)
        return _fresh(model, ids, cache, ctx, all_positions, sequence_len)


def refresh_decode_session(
    slot: SessionSlot,
    now: SessionKey,
    cache: KvCache,
    ctx: InferenceContext,
    on_invalidate: Callable[[], None] | None = None,
) -> Disposition:
    """Decide what becomes of the session in ``slot`` for a step that needs ``now``, and note it.

    VALID is kept. Otherwise ``on_invalidate`` runs first (it retires what reads the session, such as a captured graph,
    even when the session itself survives). ALLOCATION_CHANGED is re-pointed, or dropped where the buffers do not fit
    the recorded signature. STALE is dropped.
    """
    check_arguments("refresh_decode_session", "(slot, now, cache, ctx)", slot=slot, cache=cache, ctx=ctx)
    session = slot.session
    if session is None:
        return Disposition.ABSENT
    verdict = session.verdict(now)
    if verdict.validity is Validity.VALID:
        ctx.record(Disposition.KEPT, Reason.UNCHANGED)
        return Disposition.KEPT
    if on_invalidate is not None:
        on_invalidate()
    assert verdict.difference is not None
    reason = reason_of(verdict.difference)
    difference: Difference | None = verdict.difference
    if verdict.validity is Validity.ALLOCATION_CHANGED:
        refusal = session.rebind_kv(cache, now)
        if refusal is None:
            ctx.stats.rebound_kv += 1
            ctx.record(Disposition.REBOUND, Reason.ALLOCATION, verdict.difference)
            return Disposition.REBOUND
        reason, difference = Reason.REPOINT_REFUSED, Difference("kv", "as recorded", refusal)
    slot.session = None
    ctx.record(Disposition.DROPPED, reason, difference)
    ctx.count_replan(reason)
    return Disposition.DROPPED


def drop_decode_session(slot: SessionSlot, ctx: InferenceContext) -> None:
    """Drop the session in ``slot``, if there is one."""
    check_arguments("drop_decode_session", "(slot, ctx)", slot=slot, ctx=ctx)
    if slot.session is not None:
        slot.session = None
        ctx.record(Disposition.DROPPED, Reason.ON_REQUEST)


def _persistent(
    model: DecodeBackbone,
    ids: list[int],
    cache: KvCache,
    ctx: InferenceContext,
    slot: SessionSlot,
    nearest: Difference | None,
    now: SessionKey | None = None,
    sequence_len: int | None = None,
) -> Tensor:
    """One single-token step through a held session. ``nearest``: what kept the nearest other session from serving."""
    if now is None:
        now = session_key(model, cache, ctx)
    disposition = refresh_decode_session(slot, now, cache, ctx)
    if disposition in (Disposition.KEPT, Disposition.REBOUND):
        try:
            logits = rebind_and_realize_prebuilt(model, ids, cache, ctx, slot.session, sequence_len)
        except TopologyChanged:
            slot.session = None
            ctx.record(Disposition.DROPPED, Reason.TOPOLOGY_CHANGED)
            ctx.count_replan(Reason.TOPOLOGY_CHANGED)
            model._programs.clear()
            ctx.forget_backend(now.shape_key)
            return _fresh(model, ids, cache, ctx, sequence_len=sequence_len)
        ctx.stats.rebinds += 1
        ctx.stats.plan_backend = now.backend
        if now.backend == "recorded" and ctx.plan == "auto" and ctx.may_compile:
            assert slot.session is not None
            LIBRARY.served(slot.session.plan.program, ctx.compile_after)
        return logits[0, -1]
    built = build_decode_graph(
        model, DataConsts.REBINDABLE, ids, cache, ctx, backend=now.backend, sequence_len=sequence_len
    )
    cache.advance(ids, model.content_version(), _regime(model, ids, cache, sequence_len))
    slot.session = built.session
    assert built.session is not None
    ctx.stats.plan_backend = built.session.key.backend
    ctx.stats.plans_built += 1
    if disposition is Disposition.ABSENT:  # not before: a build that failed replaced nothing
        reason = Reason.FIRST_STEP if nearest is None else reason_of(nearest)
        ctx.record(Disposition.ABSENT, reason, nearest)
        if nearest is not None:
            ctx.count_replan(reason)
    return built.logits[0, -1]


def _runs_fresh(ids: list[int], ctx: InferenceContext) -> Reason | None:
    if len(ids) != 1:
        return Reason.MULTI_TOKEN
    return Reason.PLAN_OFF if ctx.backend == "off" else None


def forward_with_kv_context_persistent(
    model: DecodeBackbone,
    token_ids: Sequence[int] | Tensor,
    cache: KvCache,
    ctx: InferenceContext,
    slot: SessionSlot,
) -> Tensor:
    """A step through the session the caller keeps in ``slot`` (D2): the first single token builds it.

    A step of several tokens executes fresh beside the session and keeps it. Returns float32 logits ``[vocab]``.
    Raises DecodeError and below; cache, context and session are as before then.
    """
    order = "(model, token_ids, cache, ctx, slot)"
    check_arguments("forward_with_kv_context_persistent", order, model=model, cache=cache, ctx=ctx, slot=slot)
    ids = _ids(token_ids, model.decode_dims().vocab, model.decode_family())
    with _step(ctx, cache, len(ids), slot):
        _turn_alike(model, ids, cache, ctx, None, DataConsts.REBINDABLE)
        fresh = _runs_fresh(ids, ctx)
        if fresh is not None:
            logits = _fresh(model, ids, cache, ctx)
            ctx.record(Disposition.KEPT if slot.session else Disposition.ABSENT, fresh)
            return logits
        check_step(model, 1, cache, ctx, DataConsts.REBINDABLE.value)
        shape_key = model.decode_shape_key()
        backend, _ = choose_backend(model, cache, ctx, shape_key)
        return _persistent(model, ids, cache, ctx, slot, None, session_key(model, cache, ctx, backend, shape_key))


def forward_decode_step(
    model: DecodeBackbone,
    token_ids: Sequence[int] | Tensor,
    cache: KvCache,
    ctx: InferenceContext,
    *,
    keep_backend: str | None = None,
    sequence_len: int | None = None,
) -> Tensor:
    """A step through the sessions the context holds: the natural call, and the fast one.

    token_ids: list or int64 tensor ``[T]``. One token runs on a held plan (built on the first), several execute fresh
    and keep what is held. keep_backend: the backend a sequence began on, where it must stay there although the context
    has moved on (a `Generation` does). sequence_len: how many positions the sequence will have when the chunks of a
    prompt are through, where RoPE frequencies depend on that (without it, the positions after this step); rows that
    were turned by others are computed again first, from the ids the cache remembers. Returns float32 logits
    ``[vocab]``, the caller's own. Raises DecodeError and below; cache, context and sessions are as before then.
    """
    check_arguments("forward_decode_step", _STEP, model=model, cache=cache, ctx=ctx)
    ids = _ids(token_ids, model.decode_dims().vocab, model.decode_family())
    with _step(ctx, cache, len(ids)):
        _turn_alike(model, ids, cache, ctx, sequence_len, DataConsts.BAKED if len(ids) != 1 else DataConsts.REBINDABLE)
        fresh = _runs_fresh(ids, ctx)
        if fresh is not None:
            logits = _fresh(model, ids, cache, ctx, sequence_len=sequence_len)
            ctx.record(Disposition.KEPT if ctx.sessions else Disposition.ABSENT, fresh)
            return logits
        check_step(model, 1, cache, ctx, DataConsts.REBINDABLE.value)
        shape_key = model.decode_shape_key()
        backend, handover = choose_backend(model, cache, ctx, shape_key, keep_backend)
        now = session_key(model, cache, ctx, backend, shape_key)
        moved = ctx.drop_stale_epochs(now) or handover
        slot, nearest = ctx.take_slot(now)
        try:
            return _persistent(model, ids, cache, ctx, slot, moved or nearest, now, sequence_len)
        finally:
            ctx.put_slot(slot)
