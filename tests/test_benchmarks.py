"""benchmarks/: the arithmetic of pairs, the form of a result, and what happens to an engine that is not there.

Nothing is timed: engines are toys, and their times are written down here.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _scripts_import_each_other() -> Iterator[None]:
    # As Python does for the script it is told to run.
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def compare() -> Any:
    return importlib.import_module("compare")


@pytest.fixture(scope="module")
def report() -> Any:
    return importlib.import_module("compare_report")


class Toy:
    """An engine whose every token takes `ms` and is one more than the last; `slow` holds the machine's state."""

    def __init__(self, compare: Any, ms: float, slow: list[float], fails: str = "", parts: int = 10**6) -> None:
        self.compare, self.ms, self.slow, self.fails, self.parts = compare, ms, slow, fails, parts
        self.asked: list[str] = []
        self.closed = False

    def ask(self, do: str, **arguments: Any) -> Any:
        self.asked.append(do)
        if do == self.fails:
            raise self.compare.WorkerError("no such thing here")
        if do == "encode":
            return list(range(len(arguments["text"]) // 8))
        if do == "about":
            return {"versions": {"toy": "1"}}
        if do == "load":
            return {"load_s": 0.0}
        ms = self.ms * self.slow[0]
        tokens = arguments["tokens"]
        if do == "cold":
            times = {"import_ms": 1.0, "load_ms": 1.0, "first_token_ms": 2 * ms, "all_tokens_ms": 9 * ms}
            return times | {"base_mib": {"peak": 10.0}, "mib": {"peak": 10 + ms, "anonymous": ms}}
        ids = [i if i < self.parts else -1 for i in range(tokens)]
        return {"token_ids": ids, "prompt_ms": ms * len(arguments["prompt"]), "step_ms": [ms] * (tokens - 1)}

    def cpu_s(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(compare: Any, report: Any) -> Callable[..., tuple[dict[str, Any], dict[str, list[Toy]]]]:
    def run(
        toys: Mapping[str, Mapping[str, Any]], scenarios: list[str], pairs: int = 4
    ) -> tuple[dict[str, Any], dict[str, list[Toy]]]:
        slow = [1.0]
        made: dict[str, list[Toy]] = {}

        def spawn(name: Any) -> Toy:
            toy = Toy(compare, slow=slow, **toys[str(name)])
            made.setdefault(str(name), []).append(toy)
            return toy

        def where(name: Any) -> dict[str, Any]:
            return {"model": "toy", "weights": name.weights, "mode": name.mode, "threads": 1}

        machine = {"cpu": "a CPU", "flags": ["avx2"], "cores": 2, "memory_gib": 8.0, "system": "Linux"}
        result = {
            "format": report.FORMAT,
            "facts": {
                "date": "2000-01-01 00:00 UTC",
                "command": "python benchmarks/compare.py toy.gguf",
                "commit": "0123",
                "machine": machine,
                "model": {"name": "toy.gguf", "bytes": 1, "sha256": "00"},
            },
            "settings": {"threads": 1},
            "engines": {},
            "left_out": [],
            "cells": [],
        }
        group = [compare.EngineName.parse(word) for word in toys]
        compare.compare(group, scenarios, 8, pairs, 2, spawn, where, result)
        return result, made

    return run


def _pair(reference: float, other: float, *, engine: str = "b", others_cpu: float = 0.0) -> dict[str, Any]:
    return {"engine": engine, "reference": {"ms": reference, "others_cpu": others_cpu}, "other": {"ms": other}}


def test_ratio_is_the_median_of_the_pairs_own_ratios(report: Any) -> None:
    found = report.ratios([_pair(10, 30), _pair(30, 60), _pair(100, 50)], "ms")["b"]
    # The medians' ratio would be 50 / 30.
    assert (found["median"], found["least"], found["greatest"], found["pairs"]) == (2.0, 0.5, 3.0, 3)


def test_ratio_keeps_engines_apart(report: Any) -> None:
    found = report.ratios([_pair(10, 20), _pair(10, 5, engine="c")], "ms")
    assert {engine: each["median"] for engine, each in found.items()} == {"b": 2.0, "c": 0.5}


@pytest.mark.parametrize(("quiet", "expected"), [(2, 7.0), (3, 2.0)])
def test_ratio_counts_quiet_pairs_alone_where_there_are_three(report: Any, quiet: int, expected: float) -> None:
    pairs = [_pair(1, 2)] * quiet + [_pair(1, 7, others_cpu=report.QUIET + 0.01)] * 4
    found = report.ratios(pairs, "ms")["b"]
    assert (found["median"], found["quiet"], found["measured"]) == (expected, quiet, quiet + 4)


def test_summary_takes_medians_and_the_least_of_what_is_named_best(report: Any) -> None:
    turns = [{"ms": 3, "best_ms": 2}, {"ms": 9, "best_ms": 1}, {"ms": 4, "best_ms": 3}]
    assert report.summary(turns) == {"ms": 4, "best_ms": 1}


@pytest.mark.parametrize(
    ("other", "expected"), [([1, 2, 3], (True, None)), ([1, 2, 4], (False, 2)), ([1, 2], (False, 2))]
)
def test_tokens_are_equal_or_part_somewhere(report: Any, other: list[int], expected: tuple[bool, int | None]) -> None:
    found = report.tokens_part([1, 2, 3], other)
    assert (found["equal"], found["part_after"]) == expected


def test_turns_alternate_and_each_goes_first_as_often(run: Any) -> None:
    result, made = run({"fuel:f32:recorded": {"ms": 10}, "llama.cpp:f32": {"ms": 5}}, ["decode"])
    (cell,) = result["cells"]
    assert [pair["order"][0] for pair in cell["pairs"]] == ["reference", "other"] * 2
    # One unmeasured run each, then one a pair.
    assert [toy.asked.count("run") for toys in made.values() for toy in toys] == [5, 5]
    assert cell["reference"] == "fuel:f32:recorded"
    assert cell["ratios"]["ms_per_token"]["llama.cpp:f32"]["median"] == 0.5
    assert all(toy.closed for toys in made.values() for toy in toys)


def test_result_has_every_scenario_and_is_plain_json(run: Any, report: Any, compare: Any, tmp_path: Path) -> None:
    toys = {"fuel:f32:recorded": {"ms": 10}, "transformers:f32:eager": {"ms": 20, "parts": 6}}
    result, made = run(toys, list(compare.SCENARIOS))
    assert {cell["scenario"] for cell in result["cells"]} == set(compare.SCENARIOS)
    for cell in result["cells"]:
        assert set(cell["fields"]) == set(cell["engines"]["fuel:f32:recorded"]) - {"others_cpu"}
        for field in cell["ratios"]:
            assert cell["ratios"][field]["transformers:f32:eager"]["pairs"] == (2 if cell["conditions"]["cold"] else 4)
    prefill = next(cell for cell in result["cells"] if cell["scenario"] == "prefill")
    assert prefill["engines"]["fuel:f32:recorded"]["tokens_per_second"] == pytest.approx(100)
    decode = next(cell for cell in result["cells"] if cell["scenario"] == "decode")
    assert decode["tokens"]["transformers:f32:eager"] == {"equal": False, "compared": 8, "part_after": 6}
    # A long-lived process each, and a fresh one for each cold turn: (1 unmeasured + 2 pairs) of ttft and of memory.
    assert [len(each) for each in made.values()] == [7, 7]

    written = report.write(result, tmp_path, "one")
    again = report.write(result, tmp_path, "one")
    assert [path.name for path in written + again] == ["one.json", "one.md", "one-2.json", "one-2.md"]
    assert json.loads(written[0].read_text()) == result
    page = written[1].read_text()
    for said in ("python benchmarks/compare.py toy.gguf", "2000-01-01", "commit 0123", "a CPU", "avx2", "toy 1"):
        assert said in page
    assert "| **2.00** (2.00-2.00, 4 pairs) |" in page
    assert "part after 6" in page


@pytest.mark.parametrize("fails", ["load", "run"])
@pytest.mark.parametrize("absent", [0, 1])
def test_engine_that_fails_is_named_and_costs_the_others_nothing(
    run: Any, report: Any, fails: str, absent: int
) -> None:
    names = ["fuel:int8:compiled", "llama.cpp:q8_0", "fuel:int8:recorded"]
    toys: dict[str, dict[str, Any]] = {name: {"ms": 10} for name in names}
    toys[names[absent]]["fails"] = fails
    result, _ = run(toys, ["decode"])
    assert {each["engine"]: each["why"] for each in result["left_out"]} == {names[absent]: "no such thing here"}
    (cell,) = result["cells"]
    assert list(cell["engines"]) == [name for name in names if name != names[absent]]
    assert f"- `{names[absent]}`" in report.markdown(result)


def test_engine_alone_is_measured_without_ratio(run: Any) -> None:
    result, _ = run({"fuel:f32:recorded": {"ms": 10}, "llama.cpp:f32": {"ms": 1, "fails": "load"}}, ["decode"])
    assert result["cells"][0]["engines"]["fuel:f32:recorded"]["ms_per_token"] == 10
    assert result["cells"][0]["pairs"] == []


@pytest.mark.parametrize("word", ["vllm", "fuel:f32:recorded:2", "fuel::off", "llama.cpp:f32:eager", ""])
def test_engine_word_that_means_nothing_is_refused(compare: Any, word: str) -> None:
    with pytest.raises(ValueError, match=r"engines: fuel:WEIGHTS:PLAN, .* expected, found"):
        compare.EngineName.parse(word)


def test_engine_words_have_defaults(compare: Any) -> None:
    words = ("fuel", "fuel:int4", "transformers:bf16", "llama.cpp")
    parsed = [str(compare.EngineName.parse(word)) for word in words]
    assert parsed == ["fuel:auto:auto", "fuel:int4:auto", "transformers:bf16:eager", "llama.cpp:auto"]


def test_default_groups_can_be_read(compare: Any) -> None:
    for group in compare.GROUPS:
        names = [compare.EngineName.parse(word) for word in group.split(",")]
        assert names[0].engine == "fuel"
        assert len(set(names)) == len(names)


def test_worker_names_a_missing_peer_and_survives_a_mistake(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is installed here, this one is found first.
    (tmp_path / "llama_cpp.py").write_text("raise ModuleNotFoundError('gone', name='llama_cpp')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = compare.WorkerProcess(sys.executable, "llama.cpp", 1, 60)
    load = {"model": "m.gguf", "weights": "auto", "mode": "", "threads": 1, "capacity": 8}
    with pytest.raises(compare.WorkerError, match=r"^llama_cpp is not installed \(pip install llama-cpp-python\)$"):
        worker.ask("load", **load)
    with pytest.raises(compare.WorkerError, match="AttributeError"):
        worker.ask("run", prompt=[1], tokens=1, capacity=8)
    worker.close()


def test_worker_that_died_says_of_what(compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = compare.WorkerProcess(sys.executable, "llama.cpp", 1, 60)
    with pytest.raises(compare.WorkerError, match=r"illegal instruction.*benchmarks/README.md"):
        worker.ask("load", model="m.gguf", weights="auto", mode="", threads=1, capacity=8)
    worker.close()


def test_peer_that_reads_no_folder_says_so(compare: Any, tmp_path: Path) -> None:
    files = compare.Files(tmp_path, tmp_path / "scratch", sys.executable, sys.executable)
    with pytest.raises(compare.WorkerError, match=r"reads \.gguf files"):
        files.path(compare.EngineName.parse("llama.cpp:auto"))
    assert files.path(compare.EngineName.parse("transformers:f32")) == str(tmp_path)


def test_llama_cpp_is_built_with_what_the_cpu_has_and_never_with_amx() -> None:
    cmake_args = importlib.import_module("native_flags").cmake_args
    small = cmake_args("flags\t\t: sse4_2 avx avx2 fma f16c bmi2\n").split()
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_AVX512=OFF"} <= set(small)
    wide = "avx512f avx512cd avx512vl avx512dq avx512bw avx512_vnni amx_tile amx_int8"
    large = cmake_args(f"flags\t\t: sse4_2 avx avx2 fma f16c bmi2 {wide}\n")
    assert "-DGGML_AVX512=ON" in large
    assert "-DGGML_AVX512_VNNI=ON" in large
    assert "AMX" not in large
    # All that GGML's option switches on must be there.
    assert "-DGGML_AVX512=OFF" in cmake_args("flags\t\t: avx2 avx512f avx512cd\n")


def test_weights_rewritten_as_q8_0_stay_what_they_were(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(source, "toy")
    writer.add_uint32("toy.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    # Multiples of the scale a block of 32 gets, so that Q8_0 holds them exactly.
    matrix = np.tile(np.linspace(-127, 127, 32).round().astype(np.float32) / 64, (3, 2))
    vector = np.array([0.1, 0.2], dtype=np.float32)
    writer.add_tensor("w", matrix)
    writer.add_tensor("v", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    importlib.import_module("prepare_weights").write_gguf(source, "q8_0", target)
    reader = gguf.GGUFReader(target)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"w": "Q8_0", "v": "F32"}
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    np.testing.assert_array_equal(values["w"], matrix)
    np.testing.assert_array_equal(values["v"], vector)
    assert reader.fields["toy.block_count"].contents() == 2
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
