"""examples/: each runs as a reader would run it, says what its README says, and none is left out."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from plugin_site import Site
from toy_family import install_toy_family, write_toy_checkpoint

from fuel_core import cli

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
README = (FOLDER / "README.md").read_text()

Run = Callable[..., str]


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    install_toy_family(site)
    return str(write_toy_checkpoint(tmp_path / "toy", template=True))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """What an example prints, run as `python examples/NAME.py ARGUMENTS`. It must not end in an error."""

    def run(name: str, *arguments: str) -> str:
        path = FOLDER / name
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code: object = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as done:
            code = done.code
        printed = capfd.readouterr()
        assert code in (None, 0), f"{code}\n{printed}"
        return printed.out

    return run


def test_every_example_is_listed_and_run() -> None:
    assert EXAMPLES
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (FOLDER / target).exists(), f"examples/README.md links to {target}"
    here = Path(__file__).read_text()
    for path in EXAMPLES:
        assert f"[{path.name}]({path.name})" in README, "examples/README.md lists every example"
        assert f'run("{path.name}"' in here, "a test below runs every example"


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES if path.name != "own_family.py"])
def test_an_example_without_arguments_says_how_it_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=rf"python examples/{name} MODEL"):
        runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES if path.name != "own_family.py"])
def test_an_example_ends_in_one_line_where_there_is_no_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "nowhere"])
    with pytest.raises(SystemExit, match=r"nowhere.*\w$") as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert "\n" not in str(ended.value.code)


def test_two_models_each_keep_their_plan_and_one_too_few_rebuilds(run: Run, model: str) -> None:
    out = run("two_models.py", model)
    for title in ("first model", "second model"):
        assert f"{title}: plans built 1, rebinds 4" in out
    # Twelve steps are two prompts, two builds and eight rebinds; with room for one plan, every step is a build.
    assert "max_sessions=4: plans built 2, rebinds 8" in out
    assert "max_sessions=1: plans built 10, rebinds 0" in out
    assert re.search(r"ABSENT \(instance\): instance \d+ -> \d+", out)
    assert "DROPPED (evicted): sessions 2 -> 1" in out


def test_two_models_may_be_two_checkpoints(run: Run, model: str, tmp_path: Path) -> None:
    out = run("two_models.py", model, str(write_toy_checkpoint(tmp_path / "other", template=True)))
    assert "max_sessions=4: plans built 2, rebinds 8" in out


def test_many_prompts_share_one_plan(run: Run, model: str) -> None:
    out = run("many_prompts.py", model)
    assert "in a row: plans built 1 for 6 prompts" in out
    assert re.search(r"prompt 1: .* plans built 1, recordings \d, rebinds 6\n", out)
    # To the toy's tokenizer these prompts are alike: all but the last token of each is cached, and that is a rebind.
    assert len(re.findall(r"prompt [2-6]: .* plans built 0, recordings 0, rebinds 8\n", out)) == 5
    assert "lower level: plans built 1, rebinds 41" in out
    assert re.search(r"2 threads: plans built [12] .*recordings 0", out)
    assert "lower level gives the same text: True" in out
    assert "threads give the same text: True" in out


def test_custom_sampler_is_its_own_seed_and_leaves_the_plan(run: Run, model: str) -> None:
    out = run("custom_sampler.py", model, "w1 w2 w3")
    assert "plans built 1, " in out
    first, second = re.findall(r"seed \d: '(.*)'", out)
    assert first != second
    words = first.split()
    pairs = list(pairwise(words))
    assert len(pairs) >= 10
    assert len(set(pairs)) == len(pairs), "no pair of tokens twice"
    assert run("custom_sampler.py", model, "w1 w2 w3") == out


def test_streaming_gives_each_reply_whole_and_ends_the_one_given_up_on(run: Run, model: str) -> None:
    out = run("streaming.py", model)
    for name in ("first", "second"):
        pieces = re.findall(rf"^\[{name}\] '(.*)'$", out, re.MULTILINE)
        assert len(pieces) == 12
        assert f"{name}: {''.join(pieces)!r}" in out
    assert out.count("[gave up]") == 1


def test_own_family_decodes_and_starts_its_checks(run: Run) -> None:
    out = run("own_family.py", "contract.family_record", "contract.dims_agree")
    assert re.search(r"ids \[\d.*\]; plans built 1, rebinds 10\n", out)
    assert "3 of 3 checks passed" in out


def test_own_family_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(FOLDER / "own_family.py")]) == 0, capsys.readouterr()


@pytest.mark.parametrize("name", ["two_models.py", "many_prompts.py"])
def test_the_readme_shows_what_an_example_prints(name: str, run: Run, model: str) -> None:
    """Counts and events are the same whatever the model is, but for lengths of prompts and numbers of recordings."""
    section = README.partition(f"## {name}")[2].partition("\n## ")[0]
    block = section.split("```")[1].splitlines()
    shown = [line for line in block if re.search(r"plans built|^    step", line)]
    printed = [_comparable(line) for line in run(name, model).splitlines()]
    assert len(shown) >= 6
    for line in shown:
        assert _comparable(line) in printed


def _comparable(line: str) -> str:
    """`line` without what depends on the model: lengths, numbers of distinct layers, and how a prompt ends."""
    line = re.sub(r"\d+ tokens, \d+ from the cache|2 threads: plans built \d|recordings \d+", "", line)
    return re.sub(r"instance \d+ -> \d+|^(prompt .*) rebinds [78]$", r"\1", line)
