"""A bounded share of the fuzzing that `make fuzz` does in full, and every file that was hard once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fuzz_files import Failure, Fuzzer, attempt, corpus, run_corpus

from fuel_core.errors import ConfigError, FuelError

HEADERS, CONFIGS = 300, 300


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("path", corpus(), ids=lambda p: p.name)
def test_saved_file_gives_our_errors_alone(fuzzer: Fuzzer, path: Path) -> None:
    run_corpus(fuzzer, path)


@pytest.mark.parametrize(
    ("kind", "count"), [("gguf", HEADERS), ("safetensors", HEADERS), ("config", CONFIGS)], ids=lambda v: str(v)
)
def test_mutated_file_works_or_gives_our_errors(fuzzer: Fuzzer, kind: str, count: int) -> None:
    worked = [fuzzer.run(f"{kind}:{i}") for i in range(count)]
    # Both outcomes occur, so the changes are neither harmless nor all caught at the first byte.
    assert 0.02 * count < sum(worked) < 0.98 * count


@pytest.mark.parametrize(
    "error", [IndexError("x"), RecursionError(), MemoryError(), SystemExit(1), ConfigError("two\nlines"), FuelError("")]
)
def test_fuzzer_fails_for_what_is_not_ours(error: BaseException) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(Failure):
        attempt(raises)


def test_fuzzer_ends_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz_files._HANG", 1)
    with pytest.raises(Failure, match="no end"):
        attempt(lambda: time.sleep(60))
