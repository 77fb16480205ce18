"""The `compiled` backend: native code for the layers, made ahead of time, one library for each distinct recording.

Embedding and head stay recorded. Code checks nothing about its inputs, so everything attached is checked here, and code
is compared with its recording before it is first used in a process. Using it needs no compiler stack.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fuel_core.code_cache import CacheUnusable, CodeCache, Entry
from fuel_core.errors import PlanError, TopologyChanged
from fuel_core.plan_backends import build_job, lowering
from fuel_core.plan_backends.code_key import code_key, compiler, environment, index_key
from fuel_core.plan_backends.graph_text import UnwritableGraph, write_graph
from fuel_core.plan_backends.recorded import HeldPlan
from fuel_core.plan_backends.recording import ProgramSegment, Recording, StepProgram
from fuel_core.plan_backends.segments import HIDDEN, Segment, SegmentBinding
from fuel_core.token_data import StepSymbols

__all__ = ["BuiltCode", "CodeInProcess", "CodeOnDisk", "CompiledPlan", "NativeCode", "code_on_disk"]

log = logging.getLogger("fuel.code")

_INTEGERS = ("cached_len", "attended_len", "window_start")


class NativeCode:
    """Loaded, verified code of one recording. ``lost`` says why it may not be run any more."""

    def __init__(self, key: str, run: lowering.Run, recording: Recording) -> None:
        self.key, self.run = key, run
        self.signature = lowering.Signature.of(recording)
        self.lost: str | None = None

    def refusal(self, recording: Recording, tensors: Mapping[str, Tensor], weights: Sequence[Tensor]) -> str | None:
        """Why the code must not be given these; None where it may. Only what it reads counts."""
        assert recording.layout is not None
        named = {layout.name: layout for layout in recording.layout.tensors}
        for name in self.signature.tensors:
            if name in tensors and (why := named[name].refusal(tensors[name])) is not None:
                return why
        for i in self.signature.weights:
            if (why := recording.layout.weights[i].refusal(weights[i])) is not None:
                return why
        return None


class CompiledPlan(HeldPlan):
    """A step program whose layers run native code. Holds, re-points and refuses as ``HeldPlan`` does."""

    backend = "compiled"

    def __init__(
        self,
        program: StepProgram,
        segments: Sequence[Segment],
        bindings: Sequence[SegmentBinding],
        codes: Mapping[str, NativeCode],
    ) -> None:
        """codes: by recording fingerprint. Raises PlanError where an attached tensor is not what code was made for."""
        self._codes = dict(codes)
        self._distinct = tuple(self._codes.values())
        super().__init__(program, segments, bindings)

    def _bind(self) -> None:
        """Lay out each call's arguments once: a step only fills in the hidden state and the carriers."""
        self._calls = []
        rows = zip(self.program.segments, self._segments, self._bindings, self._fingerprints, strict=True)
        for part, segment, binding, fingerprint in rows:
            takes_hidden = segment.tensors[:1] == (HIDDEN,)
            code = self._codes.get(fingerprint)
            if code is None:
                before = [binding.tensors[name] for name in segment.tensors if name != HIDDEN]
                layout: Any = (takes_hidden, before, bool(segment.symbols), part.weights)
            else:
                why = code.refusal(part.recording, binding.tensors, part.weights)
                if why is not None:
                    raise PlanError(
                        f"{segment.name}: native code cannot be attached: {why}; drop the session and build again"
                    )
                signature = code.signature
                arguments = [None if name == HIDDEN else binding.tensors[name] for name in signature.tensors]
                at = len(arguments)
                carriers = [(at + i, _INTEGERS.index(name)) for i, name in enumerate(signature.symbols)]
                arguments += [None] * len(carriers)
                arguments += [part.weights[i] for i in signature.weights]
                hidden_at = signature.tensors.index(HIDDEN) if HIDDEN in signature.tensors else None
                layout = (code.run, arguments, hidden_at, carriers)
            self._calls.append((part.recording, fingerprint, code is not None, binding.mask_variant, layout))

    def run(self, symbols: StepSymbols) -> Tensor:
        """Run one step on what is bound now; returns the head's output ``[B, 1, V]``, float32, the caller's own.

        Raises TopologyChanged, before anything has run, when a recording was rewritten or code was lost since this
        plan was built, and PlanError when code fails.
        """
        if not self._calls:
            raise PlanError("held plan: attached KV buffers expected, found none; repoint it to a cache first")
        for code in self._distinct:
            if code.lost is not None:
                raise TopologyChanged(f"held plan: its native code expected, found it lost ({code.lost}); build again")
        hidden: Tensor | None = None
        cached, attended, starts = symbols.cached_len, symbols.attended_len, symbols.window_starts
        carrier = lowering.carrier
        of_step = (carrier(cached), carrier(attended))
        carriers = [(*of_step, carrier(start)) for start in starts]
        for recording, fingerprint, is_code, variant, layout in self._calls:
            if recording.fingerprint is not fingerprint:
                raise TopologyChanged(
                    "held plan: the op list it was built with expected, found another; drop the session and build again"
                )
            if is_code:
                run, arguments, hidden_at, places = layout
                if hidden_at is not None:
                    arguments[hidden_at] = hidden
                ours = carriers[variant]
                for at, which in places:
                    arguments[at] = ours[which]
                try:
                    hidden = run(arguments)[0]
                except RuntimeError as error:
                    self._codes[fingerprint].lost = " ".join(str(error).split())[:200]
                    raise PlanError(
                        f"native code failed ({self._codes[fingerprint].lost}); the next step runs without it"
                    ) from error
                continue
            takes_hidden, tensors, takes_integers, weights = layout
            integers = (cached, attended, starts[variant]) if takes_integers else ()
            if takes_hidden:
                hidden = recording.run(hidden, *tensors, *integers, *weights)
            else:
                hidden = recording.run(*tensors, *integers, *weights).contiguous()
        assert hidden is not None
        return hidden


# -- what code there is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltCode:
    """What is known about the code of one recording."""

    segment: str
    key: str
    status: str
    """``built``, ``found`` (it was on disk), ``refused`` or ``failed``."""
    detail: str = ""
    seconds: float = 0.0
    bytes: int = 0
    error: float | None = None
    """Worst relative difference from the recording, where it was compared when it was made."""
    bound: float | None = None

    @property
    def usable(self) -> bool:
        return self.status in ("built", "found")


@dataclass(frozen=True)
class CodeOnDisk:
    """What the cache holds for one model, as far as looking tells."""

    status: str
    """``there``, ``partly``, ``none``, ``refused``, or ``unusable`` where the folder is."""
    folder: str
    detail: str = ""
    layers: int = 0
    """Distinct layers that take code; 0 where that is not known, because none was ever made for the model here."""
    found: int = 0
    bytes: int = 0


def code_on_disk(identity: str) -> CodeOnDisk:
    """The code of a model (``shelf_identity``) in the cache. Records, loads and changes nothing."""
    cache = CodeCache.of_this_user()
    try:
        index = cache.look(index_key(identity, environment()))
        keys = [] if index is None else [str(key) for key in index.about.get("code", ())]
        entries = [entry for entry in map(cache.look, keys) if entry is not None]
    except CacheUnusable as error:
        return CodeOnDisk("unusable", str(cache.root), str(error))
    refused = [str(entry.about["refused"]) for entry in entries if "refused" in entry.about]
    if refused:
        return CodeOnDisk("refused", str(cache.root), refused[0], len(keys))
    status = "none" if not entries else "there" if len(entries) == len(keys) else "partly"
    return CodeOnDisk(status, str(cache.root), "", len(keys), len(entries), sum(entry.size for entry in entries))


@dataclass
class CodeInProcess:
    """The code of this process: what is loaded, what was refused, and the one build that may be running."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Never held while something is built: decoding threads take it."""
    loaded: dict[str, NativeCode] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    job: build_job.Job | None = None
    waiting: list[StepProgram] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """Keys that a background build was asked for: no second one in this process, whatever became of it."""
    warned: set[str] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    """Models whose code is written down in the cache."""

    # -- look up -----------------------------------------------------------------------------------------

    def codes(self, program: StepProgram) -> dict[str, NativeCode]:
        """Usable code by recording fingerprint; empty unless every layer of the program has some.

        Loads and verifies what is on disk. Never builds, never raises.
        """
        found: dict[str, NativeCode] = {}
        with self.lock:
            for segment in program.compilable:
                code = self._code(segment)
                if code is None:
                    return {}
                found[segment.recording.fingerprint] = code
            if found:
                self._list(CodeCache.of_this_user(), program)
        return found

    def _list(self, cache: CodeCache, program: StepProgram) -> None:
        """Write down which code is the program's, so that it can be looked for without recording anything."""
        if program.identity is None or program.identity in self.listed:
            return
        self.listed.add(program.identity)
        key = index_key(program.identity, environment())
        if not cache.has(key):
            codes = [self.key(segment.recording) for segment in program.compilable]
            with contextlib.suppress(CacheUnusable):
                cache.store(key, {}, {"kind": "index", "code": codes})

    def refuses(self, program: StepProgram) -> bool:
        """Whether there is code of the program that must not be used."""
        with self.lock:
            return any(
                segment.recording.layout is not None and self.key(segment.recording) in self.refused
                for segment in program.compilable
            )

    def key(self, recording: Recording) -> str:
        """The name of the recording's code on this machine, as it is now."""
        return code_key(recording.fingerprint, recording.layout, environment())

    def _code(self, segment: ProgramSegment) -> NativeCode | None:
        recording = segment.recording
        if recording.layout is None or not recording.as_traced:
            return None
        key = self.key(recording)
        code = self.loaded.get(key)
        if code is not None:
            return code if code.lost is None else None
        if key in self.refused:
            return None
        cache = CodeCache.of_this_user()
        try:
            entry = cache.find(key)
        except CacheUnusable as error:
            self.warn(str(error))
            return None
        return None if entry is None else self._load(cache, entry, segment)

    def _load(self, cache: CodeCache, entry: Entry, segment: ProgramSegment) -> NativeCode | None:
        if "refused" in entry.about:
            self._refuse(entry.key, segment, str(entry.about["refused"]))
            return None
        recording = segment.recording
        try:
            code = NativeCode(entry.key, lowering.load(entry.folder / "code"), recording)
        except (RuntimeError, OSError) as error:
            # Whole, and yet not loadable: of no use to anyone.
            cache.remove(entry.key)
            self.warn(f"{segment.name}: native code could not be loaded ({' '.join(str(error).split())[:200]})")
            return None
        why = code.refusal(recording, {}, segment.weights)
        if why is None:
            bound = lowering.bound_of(recording)
            found = lowering.worst_error(code.run, recording, segment.weights, lowering.SPOT_CHECKS)
            if not found <= bound:
                why = f"differs from the recording by {found:.2g}, where {bound:.2g} is rounding"
        if why is not None:
            self._refuse(entry.key, segment, why)
            return None
        self.loaded[entry.key] = code
        return code

    def _refuse(self, key: str, segment: ProgramSegment, why: str) -> None:
        self.refused[key] = why
        self.warn(f"{segment.name}: native code is refused and the recorded step stays in use: {why}")

    # -- build -----------------------------------------------------------------------------------------

    def build(self, program: StepProgram, *, again: bool = False) -> list[BuiltCode]:
        """Make the code that is missing, and wait for it. again: also what was refused.

        What cannot be made stands in the result; one warning says so.
        """
        cache, results = CodeCache.of_this_user(), []
        with self.lock:
            if again:
                for segment in program.compilable:
                    key = self.key(segment.recording)
                    if self.refused.pop(key, None) is not None or self._is_refused(cache, key):
                        cache.remove(key)
            missing = self._missing(cache, program)
        failure = self._run(cache, program, missing) if missing else None
        made = {segment.name for segment in missing}
        with self.lock:
            for segment in program.compilable:
                results.append(self._outcome(cache, segment, failure, built=segment.name in made))
            if results and all(each.usable for each in results):
                self._list(cache, program)
        return results

    def _is_refused(self, cache: CodeCache, key: str) -> bool:
        try:
            entry = cache.find(key)
        except CacheUnusable:
            return False
        return entry is not None and "refused" in entry.about

    def _missing(self, cache: CodeCache, program: StepProgram) -> list[ProgramSegment]:
        missing = []
        for segment in program.compilable:
            key = self.key(segment.recording)
            if key in self.loaded or key in self.refused:
                continue
            try:
                entry = cache.find(key)
            except CacheUnusable:
                entry = None  # and why, whoever builds will say
            if entry is None:
                missing.append(segment)
        return missing

    def _run(self, cache: CodeCache, program: StepProgram, missing: Sequence[ProgramSegment]) -> str | None:
        """Build and wait; returns why it failed."""
        why = self._unable(cache)
        if why is None:
            try:
                job = self._start(cache, program, missing, background=False)
                job.wait()
                why = job.failure()
            except (OSError, CacheUnusable, UnwritableGraph) as error:
                why = " ".join(str(error).split())
        if why is not None:
            self.warn(f"no native code could be made, the recorded step stays in use: {why}")
        return why

    def _outcome(self, cache: CodeCache, segment: ProgramSegment, failure: str | None, *, built: bool) -> BuiltCode:
        key = self.key(segment.recording)
        if self._code(segment) is None:
            why = self.refused.get(key)
            return BuiltCode(segment.name, key, "failed" if why is None else "refused", why or failure or "")
        about, size = dict[str, Any](), 0
        try:
            entry = cache.find(key)
            if entry is not None:
                about, size = entry.about, entry.size
        except CacheUnusable:
            pass
        return BuiltCode(
            segment.name,
            key,
            "built" if built else "found",
            str(cache.root),
            float(about.get("seconds", 0.0)),
            size,
            about.get("error"),
            about.get("bound"),
        )

    def _unable(self, cache: CodeCache) -> str | None:
        """Why nothing can be built here."""
        if compiler() is None:
            return "no C++ compiler was found; install g++, or name one with CXX"
        if not sys.executable:
            return "the path of the Python interpreter is not known here, and a build is a process of its own"
        try:
            cache.prepare()
        except CacheUnusable as error:
            return str(error)
        return None

    def _start(
        self, cache: CodeCache, program: StepProgram, missing: Sequence[ProgramSegment], *, background: bool
    ) -> build_job.Job:
        parts = [build_job.part(self.key(segment.recording), segment.recording) for segment in missing]
        # With them on disk a later process need not trace anything either.
        for stored in {s.shelf_key: s for s in program.segments if s.shelf_key is not None}.values():
            if not cache.has(str(stored.shelf_key)):
                about = {
                    "kind": "recording",
                    "graph": write_graph(stored.recording.graph_module),
                    "tensors": stored.recording.tensors,
                    "symbols": stored.recording.symbols,
                    "fingerprint": stored.recording.fingerprint,
                }
                cache.store(str(stored.shelf_key), {}, about)
        self._list(cache, program)
        return build_job.start(cache, parts, background=background)

    # -- in the background ---------------------------------------------------------------------------------

    def served(self, program: StepProgram, after: int) -> None:
        """Note a step served without code; ask for a build once a structure has served ``after`` of them."""
        if not program.compilable:
            return
        for segment in program.compilable:
            segment.recording.rebinds += 1
        first = program.compilable[0].recording
        if first.rebinds >= after and not first.asked and builds_allowed():
            first.asked = True
            self.want(program)

    def want(self, program: StepProgram) -> None:
        """Have the program's missing code built in the background, once; returns at once and never raises."""
        if not program.compilable or not builds_allowed():
            return
        with self.lock:
            keys = {self.key(segment.recording) for segment in program.compilable}
            if keys <= self.asked:
                return
            self.asked |= keys
            self.waiting.append(program)
            self.poll()

    def poll(self) -> None:
        """See how the running build fares, and start the next one. Called between generations; returns at once."""
        with self.lock:
            if self.job is not None:
                if self.job.running:
                    return
                why, self.job = self.job.failure(), None
                if why is not None:
                    self.warn(f"native code could not be built in the background, the recorded step stays: {why}")
            while self.waiting and self.job is None:
                program, cache = self.waiting.pop(0), CodeCache.of_this_user()
                missing = self._missing(cache, program)
                if not missing:
                    continue
                why = self._unable(cache)
                if why is None:
                    try:
                        self.job = self._start(cache, program, missing, background=True)
                    except (OSError, CacheUnusable, UnwritableGraph) as error:
                        why = " ".join(str(error).split())
                if why is not None:
                    self.warn(f"native code cannot be built, the recorded step stays in use: {why}")

    def warn(self, line: str) -> None:
        """Say it once."""
        if line not in self.warned:
            self.warned.add(line)
            log.warning("fuel: %s", line)


def builds_allowed() -> bool:
    """Whether builds may start by themselves (``FUEL_COMPILE=0`` says no; what was asked for in words is built)."""
    return os.environ.get("FUEL_COMPILE", "1").lower() not in ("0", "off", "no", "false")


LIBRARY = CodeInProcess()
