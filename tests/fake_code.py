"""Code without a compiler: builds that take no time, and code that runs the recording it was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fuel_core.code_cache import CodeCache
from fuel_core.plan_backends import build_job, compiled, lowering
from fuel_core.plan_backends.recording import Recording


class FakeJob:
    """A build that ends when it is told to."""

    def __init__(self, end: Callable[[], None], keys: Sequence[str]) -> None:
        self.running, self.keys, self.why, self._end = True, tuple(keys), None, end

    def finish(self, why: str | None = None) -> None:
        if why is None:
            self._end()
        self.running, self.why = False, why

    def wait(self) -> None:
        self.finish(self.why)

    def failure(self) -> str | None:
        return self.why


class FakeBuilds:
    """Stands in for the compiler in one test. ``change`` edits what the code computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[FakeJob] = []
        self.background: list[bool] = []
        self.loads = 0
        self.recordings: dict[str, Recording] = {}
        self.change: Callable[[Tensor], Tensor] | None = None
        self.fail: str | None = None
        self.code = compiled.CodeInProcess()
        monkeypatch.setattr(compiled, "compiler", lambda: "/usr/bin/c++")
        monkeypatch.setattr(build_job, "start", self.start)
        monkeypatch.setattr(lowering, "load", self.load)
        for module in (
            "plan_backends",
            "persistent_decode.build",
            "persistent_decode.entry",
            "persistent_decode.context",
        ):
            monkeypatch.setattr(f"fuel_core.{module}.LIBRARY", self.code)

    def start(self, cache: CodeCache, parts: Sequence[dict[str, Any]], *, background: bool) -> FakeJob:
        def end() -> None:
            for part in parts:
                self.recordings[part["key"]] = build_job.read_recording(part)
                cache.store(part["key"], {"code/a.wrapper.so": b"code"}, {"seconds": 1.0, "error": 1e-7, "bound": 5e-5})

        job = FakeJob(end, [part["key"] for part in parts])
        job.why = self.fail
        self.jobs.append(job)
        self.background.append(background)
        return job

    def load(self, folder: Path) -> lowering.Run:
        recording = self.recordings[folder.parent.name]
        signature = lowering.Signature.of(recording)
        self.loads += 1

        def run(arguments: list[Any]) -> list[Tensor]:
            n, m = len(signature.tensors), len(signature.symbols)
            named = dict(zip(signature.tensors, arguments[:n], strict=True))
            lengths = {s: a.shape[0] for s, a in zip(signature.symbols, arguments[n : n + m], strict=True)}
            weights = dict(zip(signature.weights, arguments[n + m :], strict=True))
            output = recording.run(
                *(named.get(name) for name in recording.tensors),
                *(lengths.get(name) for name in recording.symbols),
                *(weights.get(i) for i in range(recording.n_weights)),
            )
            return [output if self.change is None else self.change(output)]

        return run
