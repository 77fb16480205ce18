"""A chat template is found wherever checkpoints publish one, and `fuel chat` uses it to the letter."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_site import Site
from toy_family import install_toy_family, write_toy_checkpoint

from fuel_core import cli


def _template(first: str) -> str:
    turns = f"{{% for m in messages %}}{first} {{{{ m.content }}}} {{% endfor %}}"
    return turns + "{% if add_generation_prompt %}w1{% endif %}"


@pytest.fixture
def folder(site: Site, tmp_path: Path) -> Path:
    """A checkpoint without a template."""
    install_toy_family(site)
    return write_toy_checkpoint(tmp_path / "toy")


def _set_config(folder: Path, template: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def _generated(capsys: pytest.CaptureFixture[str], verb: str, folder: Path, prompt: str) -> list[int]:
    assert cli.main([verb, str(folder), prompt, "-n", "6", "--temperature", "0", "--json"]) == 0
    ids: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return ids


def _in_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, line: str
) -> list[int]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(line + "\n"))
    assert cli.main(["chat", str(folder), "-n", "6", "--temperature", "0", "--json"]) == 0
    (turn,) = json.loads(capsys.readouterr().out)["turns"]
    ids: list[int] = turn["token_ids"]
    return ids


@pytest.mark.parametrize(
    ("in_config", "in_files", "used"),
    [
        (_template("w3"), {}, "w3"),
        (None, {"chat_template.jinja": "w4"}, "w4"),
        (_template("w3"), {"chat_template.jinja": "w4"}, "w4"),
        (
            [{"name": "tool_use", "template": _template("w5")}, {"name": "default", "template": _template("w6")}],
            {},
            "w6",
        ),
        ([{"name": "only", "template": _template("w7")}], {}, "w7"),
        ([{"name": "default", "template": _template("w6")}], {"chat_template.jinja": "w4"}, "w4"),
        (None, {"chat_template.jinja": "w4", "additional_chat_templates/tool_use.jinja": "w8"}, "w4"),
    ],
    ids=["config", "jinja", "jinja wins", "named list", "one name", "jinja wins over list", "jinja and others"],
)
def test_template_is_found_and_used(
    in_config: object,
    in_files: dict[str, str],
    used: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = {
        word: _generated(capsys, "generate", folder, f"{word} w9 w1") for word in ("w3", "w4", "w5", "w6", "w7", "w8")
    }
    # The replies tell the templates apart, or this test would see nothing.
    assert len({tuple(ids) for ids in others.values()}) == len(others)
    if in_config is not None:
        _set_config(folder, in_config)
    for name, first in in_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(_template(first))
    assert _generated(capsys, "chat", folder, "w9") == others[used]
    assert _in_conversation(monkeypatch, capsys, folder, "w9") == others[used]


@pytest.mark.parametrize(
    "template",
    [None, [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}], "{% for m in %}"],
    ids=["none", "none is the default", "does not parse"],
)
def test_without_a_usable_template_chat_is_refused_and_generate_works(
    template: object, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if template is not None:
        _set_config(folder, template)

    class Unread(io.StringIO):
        def readline(self, *_: Any) -> str:
            raise AssertionError("nothing is asked of somebody who gets no answer")

    monkeypatch.setattr(sys, "stdin", Unread())
    for arguments in (["w9"], []):
        assert cli.main(["chat", str(folder), *arguments, "-n", "2"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("fuel: ")
        assert captured.err.count("\n") == 1
        assert "chat template" in captured.err
        assert "use generate" in captured.err
    assert len(_generated(capsys, "generate", folder, "w9")) == 6
