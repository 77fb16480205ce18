"""How documents are compared with the code: pure functions from text to complaints, so that each can be seen to fail.

Conventions of the documents, all of them invisible or natural when read:

- A call is documented by a code span that is its signature without types: the first column of a table, or the first
  code span under a heading of the third level.
- ``<!-- fragment: why -->`` above a Python block says that it cannot run by itself. Any other Python block of a page
  runs, in order, in one namespace.
- A Python block that stands word for word in a file of ``examples/`` or ``plugins/`` is an excerpt: it is tested there.
- ``<!-- output -->`` above a block: what the Python block before it prints. ``...`` stands for anything.
- ``<!-- run -->`` above a block that begins with ``$ fuel``: the command is run, and the rest is what it prints.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^ *(`{3,})(.*)$")
_MARK = re.compile(r"^<!-- *(\w+)(?:: *(.*?))? *-->$")


# -- blocks of code ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, its text, and the mark above it."""

    line: int
    language: str
    text: str
    mark: str | None
    reason: str | None


def blocks(text: str) -> list[Block]:
    """Every fenced block of a document, in order."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        while number < len(lines) and lines[number].strip() != opening[1]:
            number += 1
        marked = _MARK.match(lines[first - 2].strip()) if first >= 2 else None
        mark, reason = (marked[1], marked[2]) if marked else (None, None)
        body = textwrap.dedent("\n".join(lines[first:number]) + "\n")
        found.append(Block(first, opening[2].strip(), body, mark, reason))
        number += 1
    return found


def without_code(text: str) -> str:
    """The document less its fenced blocks, whose lines stay as empty ones."""
    kept, fence = [], None
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence is None and mark is not None:
            fence = mark[1]
            kept.append("")
        elif fence is not None:
            fence = None if line.strip() == fence else fence
            kept.append("")
        else:
            kept.append(line)
    return "\n".join(kept)


def is_excerpt(block: Block, sources: Iterable[str]) -> bool:
    """Whether the block's lines stand in a source in this order, without others between; indentation aside."""
    return any(_unindented(block.text) in source for source in map(_unindented, sources))


def _unindented(text: str) -> str:
    return "\n" + "\n".join(line.strip() for line in text.strip().splitlines()) + "\n"


def block_complaints(text: str, sources: Iterable[str] = ()) -> list[str]:
    """Python that neither runs nor says why not, and marks that nothing understands. sources: see ``is_excerpt``."""
    found = []
    for block in blocks(text):
        if block.mark not in (None, "fragment", "output", "run"):
            found.append(f"line {block.line}: unknown mark {block.mark!r}")
        if block.mark == "fragment" and not block.reason:
            found.append(f"line {block.line}: a fragment says why it does not run: <!-- fragment: why -->")
        if block.language.startswith("python"):
            if block.language != "python":
                found.append(f"line {block.line}: language 'python' expected, found {block.language!r}")
            if block.mark != "fragment" and not is_excerpt(block, sources):
                try:
                    parse(block.text, block.line)
                except SyntaxError as error:
                    found.append(f"line {block.line}: {error}; mark a fragment with <!-- fragment: why -->")
    return found


def parse(text: str, line: int = 1) -> Any:
    """Code of a block, which may await at its top level; errors name lines of the document."""
    return compile("\n" * (line - 1) + text, "document", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def matches(expected: str, found: str) -> bool:
    """Whether an output is the one that is shown; ``...`` stands for anything, a line of it for any lines."""
    pattern = ".*?".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, found.strip(), re.DOTALL) is not None


# -- links ------------------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *$", without_code(text), re.MULTILINE):
        name = slug(heading)
        found[name] = found.get(name, -1) + 1
    return {name if n == 0 else f"{name}-{n}" for name, count in found.items() for n in range(count + 1)}


def dead_links(path: Path, text: str) -> list[str]:
    """Links of a document to files that are not there, and to headings that nothing has."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = path.parent / place if place else path
        if place and not file.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(text if not place else file.read_text()):
            found.append(f"{target}: no such heading")
    return found


# -- tables, sections and signatures ----------------------------------------------------------------------------------


def sections(text: str, level: int = 3) -> dict[str, str]:
    """Heading of one level, without backticks -> what stands under it, up to the next of that level or above."""
    found: dict[str, str] = {}
    name = None
    fence = None
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if mark is not None:
            fence = mark[1] if fence is None else None if line.strip() == fence else fence
        heading = re.match(r"(#+) +(.+)", line) if fence is None else None
        if heading is not None and len(heading[1]) <= level:
            name = heading[2].strip().replace("`", "") if len(heading[1]) == level else None
            if name is not None:
                found[name] = ""
        elif name is not None:
            found[name] += line + "\n"
    return found


def first_column(text: str) -> list[str]:
    """Code spans in the first column of the tables."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def signature(function: Callable[..., Any]) -> str:
    """A signature without types and without ``self``."""
    parameters = [
        p.replace(annotation=p.empty) for name, p in inspect.signature(function).parameters.items() if name != "self"
    ]
    return str(inspect.Signature(parameters))


def documented_calls(text: str) -> dict[str, str]:
    """Name -> signature, of every call in a first column or directly under a heading of the third level."""
    spans = first_column(text)
    for body in sections(text).values():
        spans += re.findall(r"\A\s*`([^`]+)`", body)
    calls = (re.fullmatch(r"([\w.]+)(\(.*\))", span) for span in spans)
    return {call[1]: call[2] for call in calls if call is not None}


def call_complaints(text: str, expected: Mapping[str, Callable[..., Any]], exhaustive: Iterable[str] = ()) -> list[str]:
    """What is missing from a page, stands there with another signature, or is gone from the code.

    exhaustive: prefixes of names (``"MaskPlan"``) of which the page may hold nothing that `expected` lacks.
    """
    documented = documented_calls(text)
    found = [f"{name}{signature(call)} is not documented" for name, call in expected.items() if name not in documented]
    for name, shown in documented.items():
        if name in expected:
            if shown != signature(expected[name]):
                found.append(f"{name}: documented as {shown}, is {signature(expected[name])}")
        elif any(name == prefix or name.startswith(f"{prefix}.") for prefix in exhaustive):
            found.append(f"{name} is documented and gone")
    return found


def list_complaints(what: str, documented: Sequence[str], expected: Iterable[str]) -> list[str]:
    """Names that one side lacks, and what is documented twice."""
    wanted = set(expected)
    found = [f"{what}: {name} is not documented" for name in sorted(wanted - set(documented))]
    found += [f"{what}: {name} is documented and gone" for name in sorted(set(documented) - wanted)]
    found += [f"{what}: {name} is documented twice" for name in sorted(set(documented)) if documented.count(name) > 1]
    return found


def public_calls(cls: type, prefix: str | None = None) -> dict[str, Callable[..., Any]]:
    """The constructor and the public methods that a class itself defines, under the names that documents use."""
    name = cls.__name__ if prefix is None else prefix
    calls: dict[str, Callable[..., Any]] = {name: cls}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("fuel_core"):
            for method, member in vars(base).items():
                if not method.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod)):
                    calls[f"{name}.{method}"] = getattr(cls, method)
    return calls


def public_properties(cls: type) -> list[str]:
    """Public properties that a class itself defines."""
    return [name for name, member in vars(cls).items() if not name.startswith("_") and _is_property(member)]


def _is_property(member: object) -> bool:
    return isinstance(member, property) or type(member).__name__ == "cached_property"


# -- files and what stands in them ------------------------------------------------------------------------------------


def place_complaints(root: Path, text: str) -> list[str]:
    """Files that a page names (``folder/file.py``, with or without ``::Name.method``) and that are not there."""
    found = []
    for span in re.findall(r"`([\w./-]+\.(?:py|toml|cpp)(?:::[\w.]+)?)`", without_code(text)):
        file, _, name = span.partition("::")
        path = root / file
        if not path.exists():
            found.append(f"{span}: no such file")
        elif name and not _defines(path, name):
            found.append(f"{span}: {file} defines no {name}")
    return found


def _defines(path: Path, dotted: str) -> bool:
    nodes: Sequence[ast.stmt] = ast.parse(path.read_text()).body
    for part in dotted.split("."):
        named = [
            n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and n.name == part
        ]
        if not named:
            return False
        nodes = named[-1].body
    return True


# -- the command ------------------------------------------------------------------------------------------------------


def command_complaints(text: str, options: Mapping[str, set[str]]) -> list[str]:
    """``fuel VERB --option`` in code, of a verb or with an option that the command does not have.

    options: verb -> its options, long and short; "" -> those of the command itself.
    """
    lines = [line.strip().removeprefix("$ ") for block in blocks(text) for line in block.text.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", without_code(text))
    found = []
    for line in [*lines, *spans]:
        words = line.split("#")[0].split("|")[-1].split()
        if len(words) < 2 or words[0] != "fuel" or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
            continue
        if words[1] not in options:
            found.append(f"{line!r}: fuel has no verb {words[1]!r}")
            continue
        used = {word.split("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)} - {"--help"}
        found += [f"{line!r}: fuel {words[1]} has no {option}" for option in sorted(used - options[words[1]])]
    return found
