"""Where decoding happens and what it remembers: device, offset path, held sessions, events, counters.

A context may serve several models and caches in turn. It is not a queue: a second thread waits for the first
to finish its step.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from fuel_core.decode_shape import Component, Difference, ShapeKey
from fuel_core.errors import BackendUnavailableError
from fuel_core.persistent_decode.session import DecodeSession, Disposition, Reason, SessionKey, SessionSlot, Validity
from fuel_core.plan_backends import LIBRARY, resolve_backend

__all__ = ["COMPILE_AFTER", "DecodeStats", "InferenceContext", "PlanEvent"]

OFFSET_PATHS = ("auto", "device", "symbol")
_EVENTS_KEPT = 64
_CHOICES_KEPT = 64

COMPILE_AFTER = 64
"""Steps that a structure is served without native code before some is made for it in the background."""

log = logging.getLogger("fuel.plan")


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """One decision about a held plan. Equal decisions in a row are one event with a count."""

    step: int
    """Which forward call of the context, from 1; of the first, where ``count`` > 1."""
    disposition: Disposition
    reason: Reason
    component: str | None = None
    was: Component = None
    now: Component = None
    count: int = 1

    def __str__(self) -> str:
        steps = f"step {self.step}" if self.count == 1 else f"steps {self.step}..{self.step + self.count - 1}"
        detail = f": {self.component} {self.was} -> {self.now}" if self.component else ""
        return f"{steps} {self.disposition.name} ({self.reason.value}){detail}"


@dataclass(slots=True)
class DecodeStats:
    """Counters of one context. rebinds = decode steps - plans built - fresh single-token steps."""

    plans_built: int = 0
    """Plans attached."""
    rebinds: int = 0
    """Steps served by a held plan."""
    rebound_kv: int = 0
    """Held plans re-pointed to another KV allocation."""
    replans: dict[str, int] = field(default_factory=dict)
    """Plans built although another was held, by reason."""
    fresh_steps: int = 0
    """Steps executed fresh (D1)."""
    recomputed_tokens: int = 0
    """Cached positions computed again, because the sequence came to turn by other RoPE frequencies."""
    recordings: int = 0
    """Traces taken."""
    handovers: int = 0
    """Generations that moved to a faster backend."""
    plan_backend: str = "off"
    prompt_tokens: int = 0
    prompt_ms: float = 0.0
    decode_steps: int = 0
    decode_ms: float = 0.0

    @property
    def decode_ms_per_token(self) -> float:
        """Mean wall time of a single-token step, milliseconds."""
        return self.decode_ms / self.decode_steps if self.decode_steps else 0.0

    def as_dict(self) -> dict[str, object]:
        """The published counters, ready for JSON."""
        return {
            "plans_built": self.plans_built,
            "rebinds": self.rebinds,
            "rebound_kv": self.rebound_kv,
            "replans": dict(self.replans),
            "fresh_steps": self.fresh_steps,
            "recomputed_tokens": self.recomputed_tokens,
            "recordings": self.recordings,
            "handovers": self.handovers,
            "plan_backend": self.plan_backend,
            "prompt_ms": round(self.prompt_ms, 3),
            "decode_ms_per_token": round(self.decode_ms_per_token, 3),
        }

    def copy(self) -> DecodeStats:
        return replace(self, replans=dict(self.replans))


class InferenceContext:
    """Device, offset path and plan backend, and the sessions held for them.

    offset_path: ``symbol`` (attention reads the live prefix), ``device`` (the write position is a tensor and attention
    covers the capacity), ``auto`` (symbol on a CPU, device elsewhere). plan: ``auto``, ``off`` or a backend name.
    max_sessions: how many held plans are kept, least recently used dropped first. compile_after: under ``auto``, how
    many steps a structure is served before native code is made for it in the background (0: at once).
    Raises BackendUnavailableError for words or devices that do not exist here.

    Which backend serves a model is chosen at its first single-token step, and again only after ``refresh_backend()``,
    which a generation calls when it begins: no sequence of steps changes its backend on its own.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        offset_path: str = "auto",
        plan: str = "auto",
        max_sessions: int = 4,
        compile_after: int = COMPILE_AFTER,
    ) -> None:
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            # torch's own message stays in the traceback: it may name every backend that exists anywhere.
            without = str(device).startswith("cuda") and torch.version.cuda is None
            install = ", or install a torch that is built with CUDA" if without else ""
            raise BackendUnavailableError(
                f"device {str(device)!r} cannot be used here: expected {' or '.join(_devices())}; "
                f"use device='cpu'{install}"
            ) from error
        if offset_path not in OFFSET_PATHS:
            raise BackendUnavailableError(
                f"offset_path: one of {', '.join(OFFSET_PATHS)} expected, found {offset_path!r}; use 'auto'"
            )
        if max_sessions < 1:
            raise BackendUnavailableError(f"max_sessions: at least 1 expected, found {max_sessions}; give one")
        self.offset_path = offset_path if offset_path != "auto" else "symbol" if self.device.type == "cpu" else "device"
        self.plan = plan
        self.backend = resolve_backend(plan, self.device)
        self.max_sessions = max_sessions
        self.compile_after = compile_after
        self.stats = DecodeStats(plan_backend=self.backend)
        self.plan_events: deque[PlanEvent] = deque(maxlen=_EVENTS_KEPT)
        self.explain_plan = "plan" in os.environ.get("FUEL_LOG", "").split(",")
        self.step = 0
        self.lock = threading.RLock()
        self._sessions: list[SessionSlot] = []
        self._chosen: dict[tuple[ShapeKey, torch.dtype], str] = {}
        # What was chosen before refresh_backend(), so that a move can be told from a beginning.
        self._chosen_before: dict[tuple[ShapeKey, torch.dtype], str] = {}
        if self.backend == "compiled" and self.offset_path != "symbol":
            # Lengths that only the device knows leave code nothing to gain over the same kernels recorded.
            self.backend = self.stats.plan_backend = "recorded"
            LIBRARY.warn("plan 'compiled' serves the symbol offset path; on the device-offset path steps stay recorded")
            self.record(Disposition.ABSENT, Reason.NO_CODE, Difference("offset_path", "symbol", self.offset_path))

    # -- backend ------------------------------------------------------------------------------------

    @property
    def may_compile(self) -> bool:
        """Whether native code can serve steps of this context at all."""
        return (
            self.plan in ("auto", "compiled")
            and self.backend in ("recorded", "compiled")
            and self.device.type == "cpu"
            and self.offset_path == "symbol"
        )

    def backend_of(self, shape_key: ShapeKey, dtype: torch.dtype) -> str:
        """The backend that serves this model on caches of ``dtype``: as chosen, or as the context began."""
        return self._chosen.get((shape_key, dtype), self.backend) if self.may_compile else self.backend

    def is_chosen(self, shape_key: ShapeKey, dtype: torch.dtype) -> bool:
        return (shape_key, dtype) in self._chosen

    def choose_backend(self, shape_key: ShapeKey, dtype: torch.dtype, backend: str) -> Difference | None:
        """Serve this model on ``backend`` from now on; returns the move where it is one to a faster backend.

        A move is counted, and the sessions it leaves behind are dropped.
        """
        choice = (shape_key, dtype)
        before = self._chosen.get(choice, self._chosen_before.pop(choice, None))
        while len(self._chosen) >= _CHOICES_KEPT:
            del self._chosen[next(iter(self._chosen))]
        self._chosen[choice] = backend
        if before == "recorded" and backend == "compiled":
            moved = Difference("backend", before, backend)
            self.stats.handovers += 1
            for slot in list(self._sessions):
                key = None if slot.session is None else slot.session.key
                if key is not None and (key.shape_key, key.cache_dtype, key.backend) == (*choice, before):
                    slot.session = None
                    self._sessions.remove(slot)
                    self.record(Disposition.DROPPED, Reason.HANDOVER, moved)
            return moved
        return None

    def forget_backend(self, shape_key: ShapeKey) -> None:
        """Choose this model's backend anew at its next single-token step."""
        for choice in [choice for choice in self._chosen if choice[0] == shape_key]:
            del self._chosen[choice]

    def refresh_backend(self) -> None:
        """Let models move to a faster backend at their next single-token step, if there is one by now.

        A `Generation` calls this when it begins and stays where it began; whoever calls `forward_decode_step` in a
        loop of their own calls it between sequences. Costs one look at the disk for each model that is used after it.
        """
        if not self.may_compile:
            return
        with self.lock:
            LIBRARY.poll()
            if self.plan == "auto":
                self._chosen_before |= self._chosen
                self._chosen = {choice: name for choice, name in self._chosen.items() if name == "compiled"}
                while len(self._chosen_before) > _CHOICES_KEPT:
                    del self._chosen_before[next(iter(self._chosen_before))]

    # -- held sessions ------------------------------------------------------------------------------

    @property
    def sessions(self) -> tuple[DecodeSession, ...]:
        """Held sessions, most recently used first."""
        return tuple(slot.session for slot in self._sessions if slot.session is not None)

    def take_slot(self, now: SessionKey) -> tuple[SessionSlot, Difference | None]:
        """The slot to use for a step that needs ``now``, and what kept the nearest other session from serving it.

        A session of equal structure is chosen whatever its allocation. Sessions that can never serve again are let go.
        """
        for slot in self._sessions:
            if slot.session is not None:
                slot.session.release_if_orphaned()
        self._sessions = [slot for slot in self._sessions if slot.session is not None]
        nearest: Difference | None = None
        for slot in self._sessions:
            assert slot.session is not None
            verdict = slot.session.verdict(now)
            if verdict.validity is not Validity.STALE:
                self._sessions.remove(slot)
                return slot, None
            same_model = slot.session.key.shape_key.get("instance") == now.shape_key.get("instance")
            if nearest is None or (same_model and nearest.component == "instance"):
                nearest = verdict.difference
        return SessionSlot(), nearest

    def put_slot(self, slot: SessionSlot) -> None:
        """Keep a slot as the most recently used; evict beyond ``max_sessions``."""
        if slot.session is None:
            return
        self._sessions.insert(0, slot)
        while len(self._sessions) > self.max_sessions:
            evicted = self._sessions.pop()
            if evicted.session is not None:
                evicted.session = None
                self.record(
                    Disposition.DROPPED,
                    Reason.EVICTED,
                    Difference("sessions", self.max_sessions + 1, self.max_sessions),
                )

    def drop_stale_epochs(self, now: SessionKey) -> Difference | None:
        """Drop sessions of the same model whose weights have moved since: they can never be valid again."""
        gone: Difference | None = None
        for slot in list(self._sessions):
            assert slot.session is not None
            key = slot.session.key.shape_key
            same_model = key.get("instance") == now.shape_key.get("instance")
            if same_model and key.get("epoch") != now.shape_key.get("epoch"):
                gone = Difference("epoch", key.get("epoch"), now.shape_key.get("epoch"))
                slot.session = None
                self._sessions.remove(slot)
                self.record(Disposition.DROPPED, Reason.WEIGHTS_EPOCH, gone)
        return gone

    def checkpoint(self) -> Callable[[], None]:
        """Remember what is held, decided and counted; returns the call that puts it back after a failed step.

        A session that was re-pointed meanwhile is whole and stays where it points, and so does what is told of it.
        """
        held = [(slot, slot.session) for slot in self._sessions]
        events, replans, rebound = self.plan_events.copy(), dict(self.stats.replans), self.stats.rebound_kv
        recomputed = self.stats.recomputed_tokens
        chosen, before, handovers = dict(self._chosen), dict(self._chosen_before), self.stats.handovers

        def restore() -> None:
            for slot, session in held:
                slot.session = session
            self._sessions = [slot for slot, _ in held]
            if self.stats.rebound_kv == rebound:
                self.plan_events.clear()
                self.plan_events.extend(events)
                self.stats.replans = replans
                self._chosen, self._chosen_before, self.stats.handovers = chosen, before, handovers
                self.stats.recomputed_tokens = recomputed

        return restore

    def drop_sessions(self) -> None:
        """Drop every held session."""
        with self.lock:
            for slot in self._sessions:
                slot.session = None
                self.record(Disposition.DROPPED, Reason.ON_REQUEST)
            self._sessions.clear()

    # -- what happened --------------------------------------------------------------------------------

    def record(self, disposition: Disposition, reason: Reason, difference: Difference | None = None) -> PlanEvent:
        """Note a decision: the last 64 are kept, equal ones in a row as one."""
        component = None if difference is None else difference.component
        was, now = (None, None) if difference is None else (difference.was, difference.now)
        event = PlanEvent(self.step, disposition, reason, component, was, now)
        last = self.plan_events[-1] if self.plan_events else None
        # A count stands for consecutive steps, so that "steps 3..64" is true of every step between.
        if last is not None and last == replace(event, step=self.step - last.count, count=last.count):
            event = self.plan_events[-1] = replace(last, count=last.count + 1)
            return event
        self.plan_events.append(event)
        log.debug("%s", event)
        if self.explain_plan:
            print(f"fuel plan: {event}", file=sys.stderr)
        return event

    def count_replan(self, reason: Reason) -> None:
        self.stats.replans[reason.value] = self.stats.replans.get(reason.value, 0) + 1

    def __repr__(self) -> str:
        return (
            f"InferenceContext({self.device}, offset_path={self.offset_path!r}, plan={self.backend!r}, "
            f"held={len(self.sessions)})"
        )


def _devices() -> list[str]:
    """Devices that torch can use here."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()) if kind is not None)]
