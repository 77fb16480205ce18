"""The per-token hot path: rewrite the bound data, run the held plan, advance the cache.

Shared by every model, also by those with a build body of their own. Never looks at which offset path it got.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuel_core.backbone import PersistentDecodeModel
from fuel_core.errors import PlanError
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode.build import check_step
from fuel_core.persistent_decode.context import InferenceContext
from fuel_core.persistent_decode.session import DecodeSession
from fuel_core.profiling import span

__all__ = ["rebind_and_realize_prebuilt"]


def rebind_and_realize_prebuilt(
    model: PersistentDecodeModel,
    token_ids: Sequence[int],
    cache: KvCache,
    ctx: InferenceContext,
    session: DecodeSession | None,
    sequence_len: int | None = None,
) -> Tensor:
    """One step on a held session; returns logits ``[B, 1, V]`` float32 and advances the cache.

    sequence_len: as ``forward_decode_step`` takes it.

    The caller has checked the session's validity. Raises PlanError without a session, CapacityError on a full cache,
    TopologyChanged when the plan is no longer what was built; the cache has not moved then.
    """
    if session is None:
        raise PlanError("rebind_and_realize_prebuilt: a held session is expected, found none; run a build step first")
    check_step(model, len(token_ids), cache, ctx, "forward_with_kv_context_persistent")
    cache.begin_step(len(token_ids), scrub=session.device_offset)
    model.build_decode_token_data(
        token_ids,
        cache,
        device_offset=session.device_offset,
        mask_columns=cache.max_seq_len if "mask" in session.reads else None,
        sequence_len=sequence_len,
        into=session.bound,
    )
    with span("fuel.run"):
        logits = session.plan.run(session.bound.symbols)
    plan = model.rope_plan
    length = sequence_len or cache.cached_len + len(token_ids)
    cache.advance(token_ids, model.content_version(), plan.regime(length) if plan.depends_on_length else None)
    return logits
