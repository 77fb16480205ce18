"""Ctrl-C at any point of a step: the model goes on being right, and keeps the cache wherever it is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from toy_backbone import latent_toy, new_cache, toy
from toy_llm import make

import fuel_core
from fuel_core.backbone import DecodeBackbone
from fuel_core.errors import CapacityError
from fuel_core.generation import Generation
from fuel_core.llm import LanguageModel
from fuel_core.persistent_decode import InferenceContext
from fuel_core.plan_backends.build_job import Job

CORE = Path(fuel_core.__file__).parent
# Where state lives that a step changes. Layers and plans only compute; a few of their lines stand for all.
WATCHED = {
    str(CORE / name)
    for name in (
        "llm.py",
        "kv_cache.py",
        "generation/decode_loop.py",
        "generation/sampling.py",
        "persistent_decode/entry.py",
        "persistent_decode/context.py",
        "persistent_decode/driver.py",
        "persistent_decode/session.py",
    )
}


@contextmanager
def interrupt_at(point: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[list[tuple[str, int]]]:
    """Raise `error` before the `point`-th line (from 0) that runs in the watched files; -1 for nowhere.

    The value lists the lines as they run.
    """
    lines: list[tuple[str, int]] = []

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == point + 1:
                sys.settrace(None)
                raise error
        return on_line

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_line if frame.f_code.co_filename in WATCHED else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def points_of(action: Callable[[], object]) -> list[int]:
    """Where every line that `action` runs comes for the last time."""
    with interrupt_at(-1) as lines:
        action()
    return sorted({line: point for point, line in enumerate(lines)}.values())


PROMPT = [3, 14, 15, 9, 26, 53]


def started(model: DecodeBackbone, steps: int, ctx: InferenceContext) -> Generation:
    # The first step is the prefill, the second builds the plan, the others rebind it.
    run = Generation(model, PROMPT, new_cache(model), ctx, max_new_tokens=6)
    for _ in range(steps):
        run.step()
    return run


@pytest.mark.parametrize("kind", ["positional", "rolling"])
@pytest.mark.parametrize("steps", [0, 1, 3], ids=["prefill", "build", "rebind"])
def test_generation_interrupted_at_any_line_of_a_step_goes_on_as_if_it_had_not_been(kind: str, steps: int) -> None:
    model: DecodeBackbone = latent_toy(rolling=True) if kind == "rolling" else toy(window=4, windowed_layers=(1,))
    # Plans cost most of the time here: none for the prefill, and one that is held for all interrupted rebinds.
    held_ctx = InferenceContext(plan="recorded" if steps else "off")

    def fresh_run() -> Generation:
        return started(model, steps, InferenceContext(plan="recorded") if steps == 1 else held_ctx)

    expected = [token.token_id for token in started(model, 0, InferenceContext(plan="off"))]
    list(fresh_run())  # what is recorded once per structure is not part of a step
    points = points_of(fresh_run().step)
    assert len(points) > 40
    interrupted = 0
    for point in points:
        run = fresh_run()
        held, fresh = run.cache.cached_len, run.ctx.stats.fresh_steps
        with suppress(KeyboardInterrupt), interrupt_at(point):
            run.step()
            interrupted -= 1
        interrupted += 1
        assert run.cache.cached_len >= held, "what was computed is not thrown away"
        list(run)
        assert run.token_ids == expected, point
        if kind == "positional" and steps:
            assert run.ctx.stats.fresh_steps == fresh, "an interrupted decode step costs no prefill"
    assert interrupted > 0.9 * len(points)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_model_interrupted_at_any_line_of_a_reply_serves_the_next_from_its_cache(temperature: float) -> None:
    prompt = [3, 14, 15, 9, 26, 53]

    def ask(llm: LanguageModel) -> list[int]:
        return llm.generate(prompt, 3, temperature=temperature, seed=3).token_ids

    llm = make()
    expected = ask(llm)
    points = points_of(lambda: ask(llm))
    assert len(points) > 100
    interrupted = 0
    for point in points:
        with suppress(KeyboardInterrupt), interrupt_at(point):
            ask(llm)
            interrupted -= 1
        interrupted += 1
        done = llm.generate(prompt, 3, temperature=temperature, seed=3)
        assert done.token_ids == expected, point
        assert done.usage.cached_tokens == len(prompt) - 1, f"the cache was lost at {point}"
        assert done.stats.plans_built <= 1
    assert interrupted > 0.9 * len(points)
    assert len(llm._slots) == 1, "the thread's own slot served them all"


def test_interrupted_prefill_of_a_model_keeps_its_finished_chunks() -> None:
    llm = make(prefill_chunk=8)

    def interrupt(done: int, total: int) -> None:
        if done == 16:
            raise KeyboardInterrupt

    prompt = [1, 2, 3, 4] * 10
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, 3, on_progress=interrupt)
    done = llm.generate(prompt, 3)
    assert done.usage.cached_tokens == 16
    assert done.token_ids == make().generate(prompt, 3).token_ids


def test_stream_that_was_interrupted_is_closed_and_the_reply_can_be_asked_for_again() -> None:
    llm = make()
    stream = llm.stream("hello world", 6)
    first = next(stream)
    with pytest.raises(KeyboardInterrupt), interrupt_at(30):
        next(stream)
    assert next(stream, None) is None
    assert stream.completion is None
    again = llm.generate("hello world", 6)
    assert again.token_ids[0] == first.token_id
    assert again.usage.cached_tokens == 1


def test_memory_that_runs_out_while_a_plan_is_built_leaves_the_model_usable() -> None:
    """Not only whoever presses a key stops a step half-way."""
    prompt = [3, 14, 15, 9, 26, 53]
    expected = make().generate(prompt, 3).token_ids
    points = points_of(lambda: make().generate(prompt, 3))
    for point in points[5::40]:
        llm = make()
        with suppress(MemoryError, CapacityError), interrupt_at(point, MemoryError):
            llm.generate(prompt, 3)
        assert llm.generate(prompt, 3).token_ids == expected, point


def test_cache_that_cannot_grow_says_so_and_serves_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(limit=4096)
    short, long = [3, 14, 15], [1, 2, 3, 4] * 200
    expected = llm.generate(short, 3).token_ids
    usual = torch.zeros

    def refuse(size: Any, *args: Any, **options: Any) -> torch.Tensor:
        if max(size, default=0) > 512:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return usual(size, *args, **options)

    with monkeypatch.context() as full:
        full.setattr("fuel_core.kv_cache.torch.zeros", refuse)
        with pytest.raises(CapacityError, match=r"could not be allocated.*smaller max_seq_len"):
            llm.generate(long, 3)
        assert llm.generate(short, 3).token_ids == expected
    assert llm.generate(long, 3).token_ids == make(limit=4096).generate(long, 3).token_ids


# The address space ends where it is, or a little beyond: what a plan's first build imports, traces and allocates has no
# room. Then the limit is lifted.
_NO_ROOM = """
import resource, sys, warnings
import torch
from toy_llm import make

torch.set_num_threads(1)
room, cache = int(sys.argv[1]), int(sys.argv[2])
llm = make(limit=1 << 20, max_seq_len=cache) if cache else make()
pages = int(open("/proc/self/statm").read().split()[0])
free = resource.getrlimit(resource.RLIMIT_AS)
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, free[1]))
failed = "nothing"
try:
    llm.generate([3, 14, 15, 9, 26, 53], 3)
except Exception as error:
    failed = type(error).__name__
resource.setrlimit(resource.RLIMIT_AS, free)
if cache:
    llm = make()
done = llm.generate([3, 14, 15, 9, 26, 53], 3)
print(failed, done.token_ids, done.stats.plans_built)
"""


@pytest.mark.parametrize(
    ("room", "cache", "failures"),
    [
        # The second is what the dynamic loader's failure becomes.
        (0, 0, {"MemoryError", "ImportError"}),
        (1 << 20, 0, {"MemoryError", "ImportError"}),
        (8 << 20, 0, {"MemoryError", "ImportError"}),
        (64 << 20, 1 << 18, {"CapacityError"}),
    ],
)
def test_memory_that_really_runs_out_leaves_the_model_usable(room: int, cache: int, failures: set[str]) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _NO_ROOM, str(room), str(cache)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = make().generate([3, 14, 15, 9, 26, 53], 3)
    failed, _, rest = done.stdout.partition(" ")
    assert failed in failures
    assert rest == f"{expected.token_ids} {expected.stats.plans_built}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_build_that_is_killed_is_said_and_never_trusted(number: signal.Signals) -> None:
    with tempfile.TemporaryFile() as log, subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        job = Job(process, log, ["key"])
        assert job.running
        assert job.failure() is None
        process.send_signal(number)
        process.wait()
        assert job.failure() == f"exit status {-number}"
        assert log.closed
