"""fuel and its peers on the same model and prompt, in alternating pairs: one command, one result.

    python benchmarks/compare.py MODEL.gguf [--scenario decode|prefill|ttft|length|capacity|memory|all]

Every engine sits in a process of its own and waits on a pipe while another is measured. Engines come in groups; each
member is measured right beside the group's reference, first and second by turns, and compared by the median of the
ratios of those pairs. What is not installed, or not in this release of fuel, is left out and named. See README.md here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import compare_report as report

HERE = Path(__file__).resolve().parent
PEERS = ("transformers", "llama.cpp")

GROUPS = (
    "fuel:f32:compiled,fuel:f32:recorded,fuel:f32:off,transformers:f32:eager,transformers:f32:compiled,llama.cpp:f32",
    "fuel:bf16:compiled,fuel:bf16:recorded,fuel:bf16:off,transformers:bf16:eager,transformers:bf16:compiled,"
    "llama.cpp:bf16,llama.cpp:f16",
    "fuel:auto:compiled,fuel:auto:recorded,fuel:auto:off,llama.cpp:auto",
    "fuel:int8:compiled,fuel:int8:recorded,llama.cpp:q8_0",
    "fuel:int4:compiled,fuel:int4:recorded,llama.cpp:auto",
)
"""Equal weights side by side; the first of a group that is there is its reference."""

PROMPT = "A plan that is held fits the next token as well as the last, because nothing it was built from has changed:"
LONG_TEXT = HERE.parent / "LICENSE-APACHE"  # a text of some 2,000 tokens that every checkout has

SCENARIOS = ("decode", "prefill", "ttft", "length", "capacity", "memory")


class WorkerError(Exception):
    """An engine that cannot be measured, with the reason."""


@dataclass(frozen=True)
class EngineName:
    """`engine:weights:mode`, as in `fuel:f32:recorded`; weights and mode may be left away."""

    engine: str
    weights: str
    mode: str

    @classmethod
    def parse(cls, text: str) -> EngineName:
        """Raises ValueError for an engine that is none, or more than three words."""
        defaults = {"fuel": ("auto", "auto"), "transformers": ("f32", "eager"), "llama.cpp": ("auto", "")}
        words = text.strip().split(":")
        if words[0] not in defaults or len(words) > (2 if words[0] == "llama.cpp" else 3) or not all(words):
            raise ValueError(
                f"engines: fuel:WEIGHTS:PLAN, transformers:WEIGHTS:MODE or llama.cpp:WEIGHTS expected, found {text!r}"
            )
        return cls(words[0], *(given or default for given, default in zip_defaults(words[1:], defaults[words[0]])))

    def __str__(self) -> str:
        return ":".join(filter(None, (self.engine, self.weights, self.mode)))


def zip_defaults(given: Sequence[str], defaults: Sequence[str]) -> list[tuple[str | None, str]]:
    return [(given[i] if i < len(given) else None, default) for i, default in enumerate(defaults)]


class Driven(Protocol):
    """An engine that answers: a `WorkerProcess`, or whatever stands in for one."""

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to one request. Raises WorkerError."""

    def cpu_s(self) -> float | None:
        """CPU time it has used, in seconds; None where it cannot be known."""

    def close(self) -> None: ...


class WorkerProcess:
    """`engine_worker.py` at the other end of a pipe. It inherits the environment, and threads limited to `threads`."""

    def __init__(self, python: str, engine: str, threads: int, timeout_s: float) -> None:
        self.idle_cpu_s = 0.0
        self._timeout_s, self._python = timeout_s, python
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                [python, str(HERE / "engine_worker.py"), engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=env,
            )
        except OSError as error:
            raise WorkerError(f"{python} does not start: {error.strerror}") from None

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        # One line answers one request, so nothing is ever left in a buffer that select() cannot see.
        if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
            self._process.kill()
            raise WorkerError(f"no answer to {do!r} within {self._timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        answer = json.loads(line)
        if "ok" not in answer:
            raise WorkerError(answer.get("missing") or answer["error"])
        self.idle_cpu_s += answer["idle_cpu_s"]
        return answer["ok"]

    def _last_words(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGILL:
            return "died of an illegal instruction: it was built for another CPU; see benchmarks/README.md, fair builds"
        self._stderr.seek(0)
        said = self._stderr.read().strip().splitlines()
        return f"ended with status {code}" + (f": {said[-1][:200]}" if said else "")

    def cpu_s(self) -> float | None:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()


@dataclass(frozen=True)
class Cell:
    """One thing to measure: `tokens` after a prompt of `prompt` ids, in a cache of `capacity` positions."""

    scenario: str
    title: str
    prompt: Sequence[int]
    tokens: int
    capacity: int
    fields: Mapping[str, str]
    compared: Sequence[str]
    reuse: bool = False
    """Whether the prompt may stay in the cache between turns, where only what follows it is measured."""
    cold: bool = False
    """Whether every turn is a fresh process."""


DECODE_FIELDS = {"ms_per_token": "ms", "best_ms_per_token": "ms"}


def cells(scenarios: Sequence[str], short: Sequence[int], long: Sequence[int], tokens: int) -> list[Cell]:
    """What the scenarios measure. `short` and `long` are ids of the two texts; `long` is cut, or repeated, to fit."""

    def cut(n: int) -> list[int]:
        return (list(long) * (n // max(len(long), 1) + 1))[:n]

    n, decode = len(short), ("ms_per_token", "best_ms_per_token")
    found = []
    for scenario in scenarios:
        if scenario == "decode":
            title = f"Decode: {tokens} tokens after {n}, capacity 256"
            found.append(Cell(scenario, title, short, tokens, max(256, n + tokens), DECODE_FIELDS, decode))
        elif scenario == "prefill":
            fields = {"prompt_ms": "ms", "tokens_per_second": "tokens/s"}
            found.append(Cell(scenario, "Prefill: 512 tokens", cut(512), 1, 1024, fields, ("prompt_ms",)))
        elif scenario == "ttft":
            title = f"Time to the first token, warm: prompt of {n}"
            found.append(Cell(scenario, title, short, 1, 256, {"first_token_ms": "ms"}, ("first_token_ms",)))
            fields = {"first_token_ms": "ms", "all_tokens_ms": "ms", "load_ms": "ms", "import_ms": "ms"}
            title = (
                f"Time to the first and to the 16th token, cold: a fresh process after its base import, prompt of {n}"
            )
            found.append(Cell(scenario, title, short, 16, 256, fields, ("first_token_ms", "all_tokens_ms"), cold=True))
        elif scenario in ("length", "capacity"):
            for length, capacity in ((100, 4096), (2000, 4096)) if scenario == "length" else ((100, 256), (100, 4096)):
                title = f"{scenario.capitalize()}: {tokens} tokens after {length}, capacity {capacity}"
                tall = max(capacity, length + tokens)
                found.append(Cell(scenario, title, cut(length), tokens, tall, DECODE_FIELDS, decode, reuse=True))
        else:
            fields = {"peak_mib": "MiB", "beyond_base_mib": "MiB", "anonymous_mib": "MiB"}
            title = "Memory: a fresh process, prompt of 512 and 16 tokens, capacity 1024"
            found.append(Cell(scenario, title, cut(512), 16, 1024, fields, ("peak_mib", "beyond_base_mib"), cold=True))
    return found


def turn(cell: Cell, driven: Driven, where: Mapping[str, Any]) -> tuple[report.Turn, list[int]]:
    """One measured turn: a value for each field of the cell, and the tokens that were generated."""
    run = {"prompt": list(cell.prompt), "tokens": cell.tokens, "capacity": cell.capacity}
    if cell.cold:
        done = driven.ask("cold", **where, **run)
        if cell.scenario == "ttft":
            return {name: done[name] for name in cell.fields}, []
        if not done["mib"]:
            raise WorkerError("memory: /proc/self/status expected, found none on this system")
        peak = done["mib"]["peak"]
        values = (peak, peak - done["base_mib"]["peak"], done["mib"]["anonymous"])
        return dict(zip(cell.fields, values, strict=True)), []
    done = driven.ask("run", **run, reuse=cell.reuse)
    if cell.scenario == "prefill":
        return {
            "prompt_ms": done["prompt_ms"],
            "tokens_per_second": len(cell.prompt) / done["prompt_ms"] * 1e3,
        }, []
    if cell.scenario == "ttft":
        return {"first_token_ms": done["prompt_ms"]}, []
    steps = done["step_ms"]
    return {"ms_per_token": statistics.median(steps), "best_ms_per_token": min(steps)}, done["token_ids"]


Spawn = Callable[[EngineName], Driven]


class _LostError(Exception):
    """An engine that failed in the middle of a cell."""

    def __init__(self, name: EngineName, why: WorkerError) -> None:
        super().__init__(str(why))
        self.name = name


def measure(
    cell: Cell,
    names: Sequence[EngineName],
    pairs: int,
    one: Callable[[EngineName, Cell], tuple[report.Turn, list[int]]],
    left_out: list[dict[str, str]],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any] | None:
    """One cell over one group, whose first able engine is the reference; None where no engine is able.

    `one` measures one turn. An engine that fails is put on `left_out` with its reason, and the cell is measured without
    it: again from the beginning, because it may have been the reference.
    """
    able, tokens = list(names), dict[EngineName, list[int]]()
    while able:
        try:
            for name in able:
                if name not in tokens:
                    # Unmeasured: plans are built, code is compiled, memory is touched, files come into memory.
                    say(f"{cell.title}: {name}, first run")
                    tokens[name] = _try(one, name, cell)[1]
            return _pairs(cell, able, pairs, one, tokens, say)
        except _LostError as lost:
            left_out.append({"engine": str(lost.name), "cell": cell.title, "why": str(lost)})
            able.remove(lost.name)
    return None


def _try(
    one: Callable[[EngineName, Cell], tuple[report.Turn, list[int]]], name: EngineName, cell: Cell
) -> tuple[report.Turn, list[int]]:
    try:
        return one(name, cell)
    except WorkerError as error:
        raise _LostError(name, error) from None


def _pairs(
    cell: Cell,
    able: Sequence[EngineName],
    pairs: int,
    one: Callable[[EngineName, Cell], tuple[report.Turn, list[int]]],
    tokens: Mapping[EngineName, list[int]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    reference, *others = able
    measured: list[dict[str, Any]] = []
    turns: dict[EngineName, list[report.Turn]] = {name: [] for name in able}
    for number in range(pairs):
        say(f"{cell.title}: round {number + 1} of {pairs}")
        if not others:
            turns[reference].append(_try(one, reference, cell)[0])
        for other in others:
            sides = {}
            for side in report.order_of(number):
                name = reference if side == "reference" else other
                sides[side] = _try(one, name, cell)[0]
                turns[name].append(sides[side])
            measured.append({"engine": str(other), "order": list(report.order_of(number)), **sides})
    return {
        "scenario": cell.scenario,
        "title": f"{cell.title} ({reference.weights})",
        "conditions": {
            "prompt_tokens": len(cell.prompt),
            "tokens": cell.tokens,
            "capacity": cell.capacity,
            "cold": cell.cold,
        },
        "reference": str(reference),
        "fields": dict(cell.fields),
        "engines": {str(name): report.summary(turns[name]) for name in able},
        "ratios": {field: report.ratios(measured, field) for field in cell.compared},
        "pairs": measured,
        "tokens": {str(name): report.tokens_part(tokens[reference], tokens[name]) for name in others}
        if tokens[reference]
        else {},
        "load_average": os.getloadavg()[0],
    }


def watched(driven: Driven, cell: Cell, where: Mapping[str, Any]) -> tuple[report.Turn, list[int]]:
    """One turn, with `others_cpu`: the part of the machine's CPU time that went to others meanwhile."""
    before, began = (_busy_s(), driven.cpu_s()), time.perf_counter()
    values, ids = turn(cell, driven, where)
    wall, after = time.perf_counter() - began, (_busy_s(), driven.cpu_s())
    spent = [b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    # The system counts in hundredths of a second.
    if len(spent) == 2 and wall > 0.1:
        return {**values, "others_cpu": max(0.0, (spent[0] - spent[1]) / wall / (os.cpu_count() or 1))}, ids
    return values, ids


def _busy_s() -> float | None:
    """CPU time that the whole machine has spent on anything, in seconds."""
    try:
        fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return None
    # user, nice and system; guest time is within user, and the rest is waiting.
    return sum(fields[:3]) / os.sysconf("SC_CLK_TCK")


# ---- weights, facts and the command ---------------------------------------------------------------------------------


class Files:
    """Which file or folder an engine reads, written from the model where the engine needs another format."""

    def __init__(self, model: Path, scratch: Path, fuel_python: str, peers_python: str) -> None:
        self.model, self.scratch = model, scratch
        self.fuel_python, self.peers_python = fuel_python, peers_python

    def path(self, name: EngineName) -> str:
        """Raises WorkerError where this engine cannot read the model, or what is missing to write it differently."""
        gguf = self.model.suffix == ".gguf"
        if name.engine == "fuel" or (name.engine == "transformers" and not gguf):
            return str(self.model)
        if name.engine == "transformers":
            weights = "bf16" if name.weights == "auto" else name.weights
            return self._prepared(weights, f"{self.model.stem}-{weights}", self.peers_python)
        if not gguf:
            raise WorkerError("llama.cpp reads .gguf files; convert the folder, or compare on a .gguf")
        if name.weights == "auto":
            return str(self.model)
        return self._prepared(name.weights, f"{self.model.stem}-{name.weights}.gguf", self.fuel_python)

    def _prepared(self, weights: str, name: str, python: str) -> str:
        target = self.scratch / name
        if not target.exists():
            self.scratch.mkdir(parents=True, exist_ok=True)
            command = [python, str(HERE / "prepare_weights.py"), str(self.model), weights, str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr.strip() or "no word").splitlines()[-1]
                raise WorkerError(f"its weights could not be written: {said[:200]}")
        return str(target)


FLAGS = re.compile(r"sse4_2|avx|fma$|f16c|bmi2|amx|vnni|asimd|sve")


def machine() -> dict[str, Any]:
    """What this machine is, as far as speed depends on it."""
    info, cpu, flags = Path("/proc/cpuinfo"), platform.processor() or platform.machine(), []
    if info.exists():
        text = info.read_text()
        if named := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            cpu = named[1]
        if listed := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE):
            flags = sorted(flag for flag in listed[1].split() if FLAGS.match(flag))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "flags": flags,
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str:
    """Commit of this checkout, `+changes` where the tree differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if git("diff", "HEAD") else "")
    except OSError:
        return "unknown"


def facts(model: Path, argv: Sequence[str]) -> dict[str, Any]:
    digest = None
    if model.is_file():
        with model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Names instead of paths: what stands before the last part is of one machine only.
    words = [Path(word).name if "/" in word else word for word in argv]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "benchmarks/compare.py", *words]),
        "commit": commit(),
        "machine": machine(),
        "model": {
            "name": model.name,
            "bytes": model.stat().st_size if model.is_file() else None,
            "sha256": digest,
        },
    }


def default_name(result: Mapping[str, Any]) -> str:
    """`compare_MODEL_HARDWARE_DATE`."""
    about = result["facts"]
    cpu = re.search(r"epyc|xeon|ryzen|core|apple|neoverse", about["machine"]["cpu"].lower())
    hardware = f"{cpu[0] if cpu else 'cpu'}-{about['machine']['cores']}c"
    return f"compare_{Path(about['model']['name']).stem.lower()}_{hardware}_{about['date'][:10]}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("model", type=Path, help="a .gguf file, or a Hugging Face folder")
    made.add_argument("--scenario", action="append", choices=[*SCENARIOS, "all"], help="may be repeated; decode")
    made.add_argument("--engines", action="append", metavar="A,B,...", help="one group; may be repeated")
    made.add_argument("--pairs", type=int, default=5, help="pairs of turns (5)")
    made.add_argument("--cold-pairs", type=int, default=3, help="pairs of fresh processes (3)")
    made.add_argument("--tokens", type=int, default=32, help="tokens of a decode turn (32)")
    made.add_argument("--threads", type=int, default=2, help="threads of an engine (2)")
    made.add_argument("--fuel-python", default=sys.executable, help="the Python that has fuel-core (this one)")
    made.add_argument("--peers-python", default=sys.executable, help="the Python that has the peers (this one)")
    made.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result (benchmarks/results)")
    made.add_argument("--name", help="name of the result's files (compare_MODEL_HARDWARE_DATE)")
    made.add_argument("--scratch", type=Path, default=HERE.parent / ".models", help="folder of rewritten weights")
    made.add_argument("--timeout", type=float, default=900, help="seconds an engine may take for one answer (900)")
    return made


def main() -> None:
    options = parser().parse_args()
    if options.pairs < 1 or options.cold_pairs < 1 or options.threads < 1 or options.tokens < 3:
        sys.exit("at least 1 pair, 1 thread and 3 tokens expected")
    if not options.model.exists():
        sys.exit(f"{options.model}: a .gguf file or a folder expected, found nothing")
    try:
        groups = [[EngineName.parse(word) for word in group.split(",")] for group in options.engines or GROUPS]
    except ValueError as error:
        sys.exit(str(error))
    asked = options.scenario or ["decode"]
    scenarios = list(SCENARIOS) if "all" in asked else list(dict.fromkeys(asked))
    files = Files(options.model, options.scratch, options.fuel_python, options.peers_python)

    def spawn(name: EngineName) -> WorkerProcess:
        python = options.peers_python if name.engine in PEERS else options.fuel_python
        return WorkerProcess(python, name.engine, options.threads, options.timeout)

    def where(name: EngineName) -> dict[str, Any]:
        return {
            "model": files.path(name),
            "weights": name.weights,
            "mode": name.mode,
            "threads": options.threads,
        }

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result: dict[str, Any] = {
        "format": report.FORMAT,
        "facts": facts(options.model, sys.argv[1:]),
        "settings": {
            "threads": options.threads,
            "pairs": options.pairs,
            "cold_pairs": options.cold_pairs,
            "tokens": options.tokens,
            "scenarios": scenarios,
            "groups": [[str(name) for name in group] for group in groups],
        },
        "engines": {},
        "left_out": [],
        "cells": [],
    }
    # Ctrl-C, or a time limit's signal, ends the measuring; the cells that are complete are a result.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for group in groups:
            compare(group, scenarios, options.tokens, options.pairs, options.cold_pairs, spawn, where, result, say)
    except KeyboardInterrupt:
        result["left_out"].append({"engine": "what came after", "why": "interrupted"})
    if not result["cells"]:
        for each in result["left_out"]:
            say(f"{each['engine']}: {each['why']}")
        sys.exit("nothing could be measured")
    written = report.write(result, options.out, options.name or default_name(result))
    written += picture(written[0], (sys.executable, options.peers_python), say)
    print(report.markdown(result))
    say("written: " + ", ".join(path.name for path in written))


def compare(
    group: Sequence[EngineName],
    scenarios: Sequence[str],
    tokens: int,
    pairs: int,
    cold_pairs: int,
    spawn: Spawn,
    where: Callable[[EngineName], Mapping[str, Any]],
    result: dict[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure one group and add what was found, and what could not be, to `result`."""
    left_out: list[dict[str, str]] = result["left_out"]
    warm: dict[EngineName, Driven] = {}
    try:
        for name in group:
            say(f"{name}: loading")
            try:
                warm[name] = spawn(name)
                warm[name].ask("load", **where(name), capacity=256)
                result["engines"][str(name)] = warm[name].ask("about")
            except WorkerError as error:
                left_out.append({"engine": str(name), "why": str(error)})
                result["engines"].pop(str(name), None)
                if name in warm:
                    warm.pop(name).close()
        if not warm:
            return
        # One engine's ids for all: what is compared is the speed of decoding, and a tokenizer is quick or it is not.
        speaker = next(iter(warm.values()))
        texts = (PROMPT, LONG_TEXT.read_text())
        try:
            short, long = (speaker.ask("encode", text=text) for text in texts)
        except WorkerError as error:
            left_out += [{"engine": str(name), "why": f"no prompt: {error}"} for name in warm]
            return

        def one(name: EngineName, cell: Cell) -> tuple[report.Turn, list[int]]:
            if not cell.cold:
                return watched(warm[name], cell, {})
            fresh = spawn(name)
            try:
                return watched(fresh, cell, where(name))
            finally:
                fresh.close()

        for cell in cells(scenarios, short, long, tokens):
            found = measure(cell, list(warm), cold_pairs if cell.cold else pairs, one, left_out, say)
            if found is not None:
                result["cells"].append(found)
        for name, driven in warm.items():
            try:
                about = driven.ask("about")
            except WorkerError:
                continue  # it is on the list already, with why
            ran = about.get("plan", {}).get("plan_backend", name.mode)
            if name.mode not in ("auto", ran):
                left_out.append({"engine": str(name), "why": f"ran as {ran!r} in spite of its name"})
            result["engines"][str(name)] = about | {"idle_cpu_s": getattr(driven, "idle_cpu_s", 0.0)}
    finally:
        for driven in warm.values():
            driven.close()


def picture(source: Path, pythons: Sequence[str], say: Callable[[str], None]) -> list[Path]:
    """The result drawn beside its JSON, by the first Python that has matplotlib."""
    target, said = source.with_suffix(".png"), ""
    for python in pythons:
        command = [python, str(HERE / "compare_report.py"), str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return [target]
        said = (done.stderr.strip() or "no word").splitlines()[-1]
    say(f"no picture: {said}")
    return []


if __name__ == "__main__":
    main()
