"""docs/writing-a-family.md shows parts of a package that exists: each block is looked for in the file it names.

That the failures it shows are real is the package's own suite's business: this one imports no family.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from fuel_core.cli import main

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "docs" / "writing-a-family.md"
EXAMPLE = ROOT / "examples" / "fuel-olmo"
BLOCK = re.compile(r"^(?:<!-- fragment: (?P<place>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


def missing(tutorial: str, root: Path) -> list[str]:
    """What is wrong with the blocks of a tutorial: code that names no file, or is not in the file it names."""
    found = []
    for block in BLOCK.finditer(tutorial):
        where = f"line {tutorial[: block.start()].count(chr(10)) + 1}"
        place = block["place"]
        if place is None:
            if block["language"] in ("python", "toml"):
                found.append(f"{where}: names no file")
            continue
        if not (root / place).is_file():
            found.append(f"{where}: no file {place}")
        elif f"\n{block['text']}" not in f"\n{(root / place).read_text('utf-8')}":
            found.append(f"{where}: not in {place}")
    return found


def test_every_block_of_code_is_in_the_file_it_names() -> None:
    assert missing(TUTORIAL.read_text("utf-8"), ROOT) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nx = 1\n```", "line 1: names no file"),
        ("<!-- fragment: a.py -->\n```python\nx = 2\n```", "line 1: not in a.py"),
        ("<!-- fragment: a.py -->\n```python\n = 1\n```", "line 1: not in a.py"),  # lines are whole
        ("say\n\n<!-- fragment: b.py -->\n```python\nx = 1\n```", "line 3: no file b.py"),
    ],
)
def test_what_the_comparison_complains_about(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("y = 0\nx = 1\n")
    assert missing(f"{text}\n", tmp_path) == [complaint]
    assert missing("<!-- fragment: a.py -->\n```python\nx = 1\n```\n", tmp_path) == []


def test_every_difference_of_the_model_file_is_shown() -> None:
    shown = "".join(block["text"] for block in BLOCK.finditer(TUTORIAL.read_text("utf-8")) if block["place"])
    (head,) = re.findall(r"^Differs from .*?\n\n", (EXAMPLE / "fuel_olmo" / "olmo.py").read_text("utf-8"), re.M | re.S)
    assert head.strip() in shown
    for part in (
        "class OlmoRMSNorm",
        "self.q_norm = ",
        "self.post_feedforward_layernorm(self.mlp(h))",
        "CONFORMANCE = ",
    ):
        assert part in shown


# What the tutorial says in words.
IN_WORDS = {
    "    errors,",
    "True logits come from transformers, which is in the `test` extra.",
    "from fuel_core.testing import Conformance, transformers_oracle",
}


def test_every_line_that_the_scaffold_does_not_write_is_shown(tmp_path: Path) -> None:
    """Whoever follows the tutorial from `fuel new-family` ends with this package, and nothing is left to guess."""
    # Under another name: the example's own may be installed.
    assert main(["new-family", "zebra", "--model-type", "zebra2", "--into", str(tmp_path)]) == 0
    shown = "".join(block["text"] for block in BLOCK.finditer(TUTORIAL.read_text("utf-8")) if block["place"])
    for file in ("__init__.py", "family.py", "olmo.py", "conformance.py"):
        given = (tmp_path / "fuel-zebra" / "fuel_zebra" / file.replace("olmo", "zebra")).read_text("utf-8")
        given = given.replace("zebra", "olmo").replace("Zebra", "Olmo")
        lines = (EXAMPLE / "fuel_olmo" / file).read_text("utf-8").splitlines()
        assert {line for line in lines if line not in {*given.splitlines(), *shown.splitlines()}} <= IN_WORDS, file


def test_config_shown_is_that_of_the_release() -> None:
    published = json.loads((EXAMPLE / "tests" / "published_configs.json").read_text("utf-8"))["OLMo-2-1124-7B"][
        "config"
    ]
    (shown,) = (json.loads(b["text"]) for b in BLOCK.finditer(TUTORIAL.read_text("utf-8")) if b["language"] == "json")
    assert shown.items() <= published.items()


def test_requirements_and_lengths_named_are_those_of_the_package() -> None:
    text = TUTORIAL.read_text("utf-8")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    for word in re.findall(r"`((?:fuel-core|transformers)[><=][^`]*)`", text):
        assert word in [*project["dependencies"], *project["optional-dependencies"]["test"]]
    files = sorted((EXAMPLE / "fuel_olmo").glob("*.py"))
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    assert f"the package has {len(lines)} lines, {sum(bool(line.strip()) for line in lines)}" in text.replace("\n", " ")
