"""The mistakes that docs/writing-a-family.md shows fail as it says: each is put into a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fuel_core.cli import main
from fuel_core.testing.runner import units

import fuel_olmo
from fuel_olmo.conformance import CONFORMANCE

TUTORIAL = Path(__file__).resolve().parents[3] / "docs" / "writing-a-family.md"
if not TUTORIAL.exists():
    pytest.skip("the tutorial is in the checkout", allow_module_level=True)

MISTAKE = re.compile(
    r"^\*\*(?P<name>[^*]+)\.\*\*[^\n]*\n\n```diff\n(?P<diff>.*?)```\n\n```text\n\$ fuel (?P<told>.*?)```", re.M | re.S
)
MISTAKES = {found["name"]: found for found in MISTAKE.finditer(TUTORIAL.read_text("utf-8"))}


def applied(diff: str, source: str) -> str:
    """The source with a diff's lines in place of those it takes out; the diff has no line numbers."""
    kinds = [(line[:1], line[1:]) for line in diff.splitlines()]
    before = "".join(f"{text}\n" for kind, text in kinds if kind in "- ")
    after = "".join(f"{text}\n" for kind, text in kinds if kind in "+ ")
    assert source.count(before) == 1
    return source.replace(before, after)


def plain(text: str) -> str:
    """A line less what may differ between machines: measured numbers and spacing."""
    return " ".join(re.sub(r"\d+\.\d+(e-?\d+)?", "#", text).split())


def test_inspect_shows_the_rows_of_the_tutorial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name, rows) = re.findall(r"```text\n\$ fuel inspect (\S+)\n(.*?)```", TUTORIAL.read_text("utf-8"), re.S)[0]
    published = json.loads((Path(__file__).parent / "published_configs.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(published[name]["config"]))
    assert main(["inspect", str(tmp_path)]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert all(" ".join(row.split()) in printed for row in rows.splitlines())


def test_closing_line_of_a_check_counts_what_there_is() -> None:
    ((passed, skipped),) = re.findall(r"^olmo: (\d+) checks passed, (\d+) skipped$", TUTORIAL.read_text("utf-8"), re.M)
    assert int(passed) + int(skipped) == len(units(CONFORMANCE))


def test_there_are_three_mistakes() -> None:
    assert len(MISTAKES) == 3


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_fails_as_shown(name: str, tmp_path: Path) -> None:
    command, *shown = MISTAKES[name]["told"].splitlines()
    package = tmp_path / "fuel_olmo"
    package.mkdir()
    for file in Path(fuel_olmo.__file__).parent.glob("*.py"):
        text = file.read_text("utf-8")
        (package / file.name).write_text(applied(MISTAKES[name]["diff"], text) if file.name == "olmo.py" else text)
    path = os.pathsep.join(entry for entry in (str(tmp_path), os.environ.get("PYTHONPATH")) if entry)
    # By module: which installed package is meant by a name is not what this is about.
    arguments = [word if word != "olmo" else "fuel_olmo.conformance:CONFORMANCE" for word in shlex.split(command)]
    done = subprocess.run(
        [sys.executable, "-m", "fuel_core", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    said = [plain(line) for line in done.stderr.splitlines()]
    places = [said.index(plain(line)) for line in shown if line != "..."]
    assert places == sorted(places)
