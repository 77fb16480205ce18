"""Docs that would drift without a test: reasons, statuses, the file tree, settings, options.

The reference pages, links and examples are in test_docs_reference.py.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import fuel_core
from fuel_core.cli.app import command
from fuel_core.cli.repl import COMMANDS
from fuel_core.discovery import Status

ROOT = Path(__file__).resolve().parent.parent


def _first_column(text: str) -> list[str]:
    """Code words in the first column of a file's tables."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_every_reason_and_disposition_is_explained_and_no_other() -> None:
    documented = _first_column((ROOT / "docs" / "reasons.md").read_text())
    dispositions = [member.name for member in fuel_core.Disposition]
    reasons = [member.value for member in fuel_core.Reason]
    assert sorted(documented) == sorted(dispositions + reasons)


def test_every_plugin_status_is_explained() -> None:
    documented = _first_column((ROOT / "docs" / "families.md").read_text())
    kinds: type[Enum] = Status
    assert sorted(documented) == sorted(str(member.value) for member in kinds)


def test_readme_file_tree_names_every_part_of_the_core() -> None:
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("fuel_core/\n") :]
    shown = set(re.findall(r"^  ([\w.]+)/? ", tree, re.MULTILINE))
    here = {
        path.name for path in (ROOT / "fuel_core").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert here - {"__main__.py"} <= shown
    assert {name for name in shown if name.endswith(".py")} <= here


def test_settings_in_the_readme_are_the_ones_the_code_reads() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "fuel_core").rglob("*.py"))
    read = set(re.findall(r'environ(?:\.get\(|\[)"(FUEL_\w+)"', code))
    assert read
    documented = set(re.findall(r"`(FUEL_\w+)", (ROOT / "README.md").read_text()))
    assert documented == read


def _sections(text: str) -> dict[str, str]:
    """Heading of the second level -> what stands under it."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_verb_and_option_is_documented_and_no_other() -> None:
    sections = _sections((ROOT / "docs" / "cli.md").read_text())
    tables = "".join(text for text in sections.values())
    explained = {option for row in re.findall(r"^\| (`--[^|]*)", tables, re.MULTILINE) for option in _options(row)}
    verbs = command().commands
    documented = {heading.split()[1].strip("`"): text for heading, text in sections.items() if heading.startswith("`")}
    assert sorted(documented) == sorted(verbs)
    for verb, parsed in verbs.items():
        real = {option for parameter in parsed.params for option in parameter.opts if option.startswith("--")}
        real.discard("--help")
        # --json is spoken of in the text as well, and -n is the short form of another.
        assert _options(documented[verb]) == real, f"docs/cli.md, fuel {verb}"
        assert real <= explained, f"docs/cli.md explains no {sorted(real - explained)}"


def _options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_every_command_of_a_conversation_is_documented() -> None:
    documented = re.findall(r"^\| `(/\w+)`", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert documented == list(COMMANDS)


def test_docs_say_what_a_mapped_file_and_a_held_plan_do_not_survive() -> None:
    requests = (ROOT / "docs" / "requests.md").read_text()
    assert re.search(r"mapped from the checkpoint's files.*truncate.*in place", requests, re.DOTALL)
    assert re.search(
        r"does not follow:.*attributes.*hooks.*`forward`", (ROOT / "docs" / "decode-plans.md").read_text(), re.S
    )


def test_compatibility_promise_names_the_number_in_force_and_every_public_list() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"fuel_core.families.v{fuel_core.FAMILY_API}" in text
    assert f"tests/family_api_v{fuel_core.FAMILY_API}.json" in text
    assert (ROOT / "tests" / f"family_api_v{fuel_core.FAMILY_API}.json").exists()
    for module in ("fuel_core", "fuel_core.layers", "fuel_core.errors"):
        assert f"`{module}.__all__`" in text
