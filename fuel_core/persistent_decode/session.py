"""A held plan and the key it was built against: when it may run, when it must not, and why.

One list of components decides validity and its explanation, so the two cannot drift apart.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass, fields

import torch

from fuel_core.decode_shape import Component, Difference, KvAllocId, ShapeKey, explain
from fuel_core.errors import PlanError
from fuel_core.kv_cache import KvCache
from fuel_core.plan_backends import HeldPlan
from fuel_core.token_data import DecodeTokenData

__all__ = ["DecodeSession", "Disposition", "Reason", "SessionKey", "SessionSlot", "Validity", "Verdict"]


class Validity(enum.Enum):
    """What a held session is to the step at hand."""

    VALID = "valid"
    ALLOCATION_CHANGED = "allocation changed"
    STALE = "stale"


class Disposition(enum.Enum):
    """What happened to a held session."""

    ABSENT = "absent"
    """There was none for this step: a plan is built, or the step runs fresh."""
    KEPT = "kept"
    REBOUND = "rebound"
    """Re-pointed to another KV allocation; the plan was kept."""
    DROPPED = "dropped"


class Reason(enum.Enum):
    """Why. Every member is explained in docs/reasons.md."""

    FIRST_STEP = "first_step"
    UNCHANGED = "unchanged"
    ALLOCATION = "allocation"
    MULTI_TOKEN = "multi_token"
    PLAN_OFF = "plan_off"
    CAPACITY = "capacity"
    CACHE_DTYPE = "cache_dtype"
    DEVICE = "device"
    OFFSET_PATH = "offset_path"
    BACKEND = "backend"
    HANDOVER = "handover"
    NO_CODE = "no_code"
    INSTANCE = "instance"
    WEIGHTS_EPOCH = "weights_epoch"
    MASK_STRUCTURE = "mask_structure"
    ROPE_STRUCTURE = "rope_structure"
    ROPE_LENGTH = "rope_length"
    STRUCTURE = "structure"
    REPOINT_REFUSED = "repoint_refused"
    TOPOLOGY_CHANGED = "topology_changed"
    EVICTED = "evicted"
    ON_REQUEST = "on_request"


_REASON_OF = {
    "max_seq_len": Reason.CAPACITY,
    "cache_dtype": Reason.CACHE_DTYPE,
    "device": Reason.DEVICE,
    "offset_path": Reason.OFFSET_PATH,
    "backend": Reason.BACKEND,
    "instance": Reason.INSTANCE,
    "epoch": Reason.WEIGHTS_EPOCH,
    "mask_plan": Reason.MASK_STRUCTURE,
    "rope_plan": Reason.ROPE_STRUCTURE,
}


def reason_for(component: str) -> Reason:
    """The reason that a differing key component stands for."""
    return _REASON_OF.get(component, Reason.STRUCTURE)


def reason_of(difference: Difference) -> Reason:
    """The reason that a difference stands for: as ``reason_for``, but a move to native code has a name of its own."""
    if (difference.component, difference.was, difference.now) == ("backend", "recorded", "compiled"):
        return Reason.HANDOVER
    return reason_for(difference.component)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Validity, and the component that decided it."""

    validity: Validity
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Everything a held plan was built against. ``shape_key`` keeps its components, so a hash collision is harmless."""

    seq: int
    max_seq_len: int
    n_layers: int
    cache_dtype: torch.dtype
    device: torch.device
    offset_path: str
    backend: str
    shape_key: ShapeKey
    alloc_id: KvAllocId

    def verdict(self, now: SessionKey) -> Verdict:
        """What a session built against this key is to a step that needs ``now``."""
        if self.shape_key != now.shape_key:
            return Verdict(Validity.STALE, explain(self.shape_key, now.shape_key)[0])
        for field in fields(self):
            was, is_now = getattr(self, field.name), getattr(now, field.name)
            if field.name not in ("shape_key", "alloc_id") and was != is_now:
                return Verdict(Validity.STALE, Difference(field.name, _printable(was), _printable(is_now)))
        if self.alloc_id != now.alloc_id:
            difference = Difference("alloc_id", self.alloc_id.get(), now.alloc_id.get())
            return Verdict(Validity.ALLOCATION_CHANGED, difference)
        return Verdict(Validity.VALID)


def _printable(value: object) -> Component:
    return value if isinstance(value, bool | int | str) else str(value).removeprefix("torch.")


class DecodeSession:
    """One held plan, attached: the key, the plan, the bound tensors it reads.

    Strong references keep everything baked alive; the cache itself is only watched, so that a session can let go of
    buffers whose cache is gone.
    """

    __slots__ = ("_cache", "bound", "key", "plan")

    def __init__(self, key: SessionKey, plan: HeldPlan, bound: DecodeTokenData, cache: KvCache) -> None:
        self.key = key
        self.plan = plan
        self.bound = bound
        self._cache = weakref.ref(cache)

    @property
    def ops(self) -> tuple[str, ...]:
        """Every op of a step, in order."""
        return self.plan.ops

    @property
    def reads(self) -> frozenset[str]:
        """Bound inputs that the plan reads; the others are not uploaded."""
        return self.plan.reads

    @property
    def device_offset(self) -> bool:
        return self.key.offset_path == "device"

    def verdict(self, now: SessionKey) -> Verdict:
        """VALID, ALLOCATION_CHANGED or STALE, with the component that differs."""
        return self.key.verdict(now)

    def rebind_kv(self, cache: KvCache, now: SessionKey) -> str | None:
        """Re-point to ``cache``'s buffers; returns why not (then nothing has changed), None on success."""
        if not self.plan.repointable:
            return f"plan backend {self.plan.backend!r} has its addresses baked in"
        cache.ensure_storage()
        try:
            self.plan.check_weights()
        except PlanError as error:
            return str(error)
        refusal = self.plan.repoint([cache.layer(i) for i in range(cache.n_layers)])
        if refusal is None:
            self.key = now
            self._cache = weakref.ref(cache)
        return refusal

    def release_if_orphaned(self) -> None:
        """Let go of KV buffers whose cache no longer exists or has moved to another allocation."""
        cache = self._cache()
        if cache is None or cache.alloc_id != self.key.alloc_id:
            self.plan.detach()


@dataclass(slots=True)
class SessionSlot:
    """Where a caller of the persistent entry keeps its session."""

    session: DecodeSession | None = None
