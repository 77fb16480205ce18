"""`fuel compile`, and native code as the other verbs meet it. Builds are faked; test_compiled.py has real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_code import FakeBuilds
from plugin_site import Site
from toy_family import install_toy_family, write_toy_checkpoint

from fuel_core import cli
from fuel_core.plan_backends import compiled, recording


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    install_toy_family(site)
    return str(write_toy_checkpoint(tmp_path / "toy", template=True))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBuilds:
    monkeypatch.setattr(recording, "_shared", recording._Shared())
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path / "fuel"))
    return FakeBuilds(monkeypatch)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report: dict[str, Any] = json.loads(out)
    return report


def test_compile_says_what_was_built_where_and_how_large(
    model: str, fake: FakeBuilds, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = told(capsys, "compile", model)
    assert report["cache"] == str(tmp_path / "fuel")
    (segment,) = report["segments"]
    assert (segment["segment"], segment["status"]) == ("layer 0", "built")
    assert (segment["build_seconds"], segment["bytes"], segment["error"], segment["bound"]) == (1.0, 4, 1e-7, 5e-5)
    assert report["cache_entries"] == 5, "code, three recordings, and which code is the model's"
    assert told(capsys, "compile", model)["segments"][0]["status"] == "found"
    assert len(fake.jobs) == 1
    assert cli.main(["compile", model]) == 0
    out = capsys.readouterr().out
    assert (
        "layer 0 and its like: found, built in 1.0 s, 4 B; differs from the recorded step by 1.0e-07 (bound 5.0e-05)"
        in out
    )


def test_clear_empties_the_cache_first(model: str, fake: FakeBuilds, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "compile", model)
    fake.code.loaded.clear()
    report = told(capsys, "compile", model, "--clear")
    assert report["cleared"]["entries"] == 5
    assert report["segments"][0]["status"] == "built"
    assert len(fake.jobs) == 2


def test_what_is_compiled_is_what_the_other_verbs_find(
    model: str, fake: FakeBuilds, capsys: pytest.CaptureFixture[str]
) -> None:
    before = told(capsys, "generate", model, "w1 w2", "-n", "5")
    told(capsys, "compile", model)
    for plan in ("auto", "compiled"):
        report = told(capsys, "generate", model, "w1 w2", "-n", "5", "--plan", plan)
        assert report["stats"]["plan_backend"] == "compiled"
        assert report["token_ids"] == before["token_ids"]
    report = told(capsys, "generate", model, "w1 w2", "-n", "5", "--dtype", "bfloat16")
    assert report["stats"]["plan_backend"] == "recorded", "other activations are other code"
    assert len(fake.jobs) == 1
    assert told(capsys, "bench", model, "--plan", "compiled", "-n", "4", "--pairs", "1")["tokens_equal"]


def test_nothing_that_could_be_made_is_a_line_and_exit_code_2(
    model: str, fake: FakeBuilds, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    report = told(capsys, "compile", model, code=2)
    assert report["segments"][0]["status"] == "failed"
    assert "no C++ compiler" in report["segments"][0]["detail"]


def test_a_folder_that_is_not_ours_is_not_emptied(
    model: str, fake: FakeBuilds, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told(capsys, "compile", model)
    (tmp_path / "fuel").chmod(0o777)
    assert cli.main(["compile", model, "--clear"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fuel: ")
    assert "only you can write to" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("verb", "started"), [("chat", 1), ("generate", 0)])
def test_a_chat_asks_for_code_at_once_and_a_single_text_does_not(
    verb: str,
    started: int,
    model: str,
    fake: FakeBuilds,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUEL_COMPILE", "1")
    told(capsys, verb, model, "w1 w2", "-n", "20")
    assert fake.background == [True] * started
