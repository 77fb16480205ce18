"""Writes a family package that installs and passes its checks as it is: what `fuel new-family` does.

Knows names, files and folders, and no model: the package's text stands in `templates`, where `{{word}}` is filled in.
What exists is never written over, and what is not complete never appears: the package is written aside and renamed.
Importing it imports no torch.
"""

from __future__ import annotations

import errno
import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import importlib_metadata
from packaging.requirements import Requirement
from packaging.version import Version

import fuel_core
from fuel_core import discovery
from fuel_core.errors import FamilyConflictError, NewFamilyError
from fuel_core.families import FAMILY_API

__all__ = ["Names", "core_range", "names_of", "new_family"]

FILES: Final[Mapping[str, str]] = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "PUBLISHING.md": "PUBLISHING.md",
    "LICENSE-APACHE": "LICENSE-APACHE",
    "LICENSE-MIT": "LICENSE-MIT",
    ".gitignore": "gitignore",
    ".github/workflows/check.yml": "check.yml",
    "{{module}}/__init__.py": "package/__init__.py",
    "{{module}}/{{name}}.py": "package/model.py",
    "{{module}}/family.py": "package/family.py",
    "{{module}}/conformance.py": "package/conformance.py",
    "{{module}}/reference.py": "package/reference.py",
    "{{module}}/py.typed": "package/py.typed",
    "tests/conftest.py": "tests/conftest.py",
    "tests/test_conformance.py": "tests/test_conformance.py",
    "tests/test_{{name}}.py": "tests/test_model.py",
}
"""File of the package -> its template, less the ending. Templates end in .tmpl, so that no tool takes them for code."""

_LONGEST = 24
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\Z")
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}\Z")
# Files beside the model file, which has the family's name.
_TAKEN_FILES = ("conformance", "family", "reference")
_CLASSES = ("Attention", "Backbone", "Config", "Layer", "MLP", "Model")
_TOOLS = ("torch", "build", "hatchling", "mypy", "pytest", "ruff", "transformers")


@dataclass(frozen=True)
class Names:
    """One family's name as each place spells it."""

    name: str
    """Of the family, its model file and, unless said otherwise, the model_type: ``my_zebra``."""
    model_type: str

    @property
    def distribution(self) -> str:
        return f"fuel-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        return f"fuel_{self.name}"

    @property
    def class_name(self) -> str:
        """What the names of its classes begin with: ``MyZebra``."""
        return "".join(part.capitalize() for part in self.name.split("_"))


def names_of(asked: str, model_type: str | None = None) -> Names:
    """The names that follow from ``asked``: ``Zebra``, ``fuel-zebra`` and ``zebra`` are one family.

    Raises NewFamilyError for a name that cannot be a module, or a model_type that cannot be an entry point.
    """
    name = plain_name(asked)
    if not _NAME.match(name) or len(name) > _LONGEST:
        raise NewFamilyError(
            f"new-family: a name of up to {_LONGEST} letters a to z, digits and single dashes expected, beginning with "
            f"a letter, found {asked!r}; {_suggestion(asked)}"
        )
    names = Names(name, name if model_type is None else model_type)
    if keyword.iskeyword(name):
        raise NewFamilyError(
            f"new-family: a name that a module can have expected, found {asked!r}, a word of Python's own; "
            f"use another, such as '{name}-lm'"
        )
    taken = [f"{name}.py"] if name in _TAKEN_FILES else []
    # `raw` would call its config RawConfig, which the model file imports from the core.
    taken += [made for ending in _CLASSES if (made := names.class_name + ending) in fuel_core.__all__]
    if taken:
        raise NewFamilyError(
            f"new-family: a name of its own expected, found {asked!r}, whose package would have two {taken[0]}; "
            f"use another, such as '{name}-lm'"
        )
    if not _MODEL_TYPE.match(names.model_type):
        raise NewFamilyError(
            "new-family: --model-type: up to 40 letters, digits, dashes and underscores expected, as config.json "
            f"has them, found {names.model_type!r}; copy it from a config.json"
        )
    return names


def plain_name(asked: str) -> str:
    """The family's name that is meant: ``my_zebra`` for ``My-Zebra`` and ``fuel-my-zebra``."""
    name = asked.strip().lower().replace("-", "_")
    return name.removeprefix("fuel_")


def _suggestion(asked: str) -> str:
    """What to use instead; what keeps fewer than three characters has no near one."""
    near = re.sub(r"[^a-z0-9]+", "_", plain_name(asked)).strip("_")
    near = re.sub(r"^[0-9_]+", "", near)[:_LONGEST].rstrip("_")
    return f"use '{near.replace('_', '-')}'" if _NAME.match(near) and near[2:] else "use one such as 'zebra'"


def _refuse_what_is_taken(names: Names) -> None:
    """Raise FamilyConflictError, naming who has it, for a name that an installed package uses."""
    for record in discovery.families():
        if not record.distribution:  # named in a setting and published by nobody
            continue
        for word in (names.name, names.model_type):
            if word == record.name:
                what = f"the family {word!r}"
            elif word in record.model_types:
                what = f"the model_type {word!r}"
            elif word in record.gguf_architectures:
                what = f"the GGUF architecture {word!r}"
            else:
                continue
            raise FamilyConflictError(
                f"new-family: a name that no installed package has expected, but {record.package} serves {what}; "
                f"choose another {'name' if word == names.name else '--model-type'}, or uninstall it"
            )
    try:
        found = importlib_metadata.distribution(names.distribution)
    except importlib_metadata.PackageNotFoundError:
        return
    raise FamilyConflictError(
        f"new-family: a name that no installed package has expected, but {names.distribution} {found.version} is "
        "installed; choose another name, or uninstall it"
    )


def core_range(version: str) -> str:
    """The cores that a package written now claims: this release, up to the next one that may change what it leans on.

    "0.1.3" -> ">=0.1.3,<0.2"; "2.4.0" -> ">=2.4.0,<3". A local part is dropped.
    """
    now = Version(version)
    end = f"0.{now.minor + 1}" if now.major == 0 else str(now.major + 1)
    return f">={now.public},<{end}"


def _words(names: Names) -> dict[str, str]:
    """What the templates ask for -> text. Versions are those that the core states for itself."""
    try:
        version = importlib_metadata.version("fuel-core")
        stated = [Requirement(line) for line in importlib_metadata.requires("fuel-core") or ()]
    except importlib_metadata.PackageNotFoundError:
        raise NewFamilyError(
            "new-family: an installed fuel-core expected, found its modules without metadata; install it with pip"
        ) from None
    needs = {need.name: f"{need.name}{_in_order(need)}" for need in stated}
    return {
        "name": names.name,
        "model_type": names.model_type,
        "distribution": names.distribution,
        "module": names.module,
        "Class": names.class_name,
        "api": str(FAMILY_API),
        "core": f"fuel-core{core_range(version)}",
        "core_version": Version(version).public,
        **{tool: needs.get(tool, tool) for tool in _TOOLS},
    }


def _in_order(need: Requirement) -> str:
    """As people write it, ">=2.13,<3": metadata has the parts in another order."""
    return ",".join(sorted(map(str, need.specifier), key=lambda part: part.startswith("<")))


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: words[found[1]], text)


def _texts(names: Names) -> dict[str, str]:
    """Relative path -> contents of the whole package."""
    words, templates = _words(names), resources.files(__name__) / "templates"
    return {
        _filled(path, words): _filled(templates.joinpath(f"{template}.tmpl").read_text("utf-8"), words)
        for path, template in FILES.items()
    }


def new_family(names: Names, into: Path) -> tuple[Path, list[str]]:
    """Write the package to a new folder in ``into``; returns the folder and its files, relative to it.

    Raises FamilyConflictError for a name that an installed package has, NewFamilyError where the folder cannot be made:
    it is there and not empty, ``into`` is no folder that can be written to, the disk is full. Then nothing has changed.
    """
    _refuse_what_is_taken(names)
    texts = _texts(names)
    target = into / names.distribution
    with _told_in_one_line(target):
        if not into.is_dir():
            raise NewFamilyError(
                f"new-family: a folder to write into expected, found {'a file' if into.exists() else 'nothing'} at "
                f"{str(into)!r}; make it first, or choose another with --into"
            )
        _refuse_what_is_there(target)
        aside = Path(tempfile.mkdtemp(prefix=f".{names.distribution}-", dir=into))
        try:
            # A folder of mkdtemp is the owner's alone; one inside it has the permissions that folders have here.
            made = aside / names.distribution
            made.mkdir()
            for path, text in texts.items():
                file = made / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", newline="\n")
            # An empty folder gives way; one that was filled meanwhile makes this fail.
            made.replace(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target, sorted(texts)


def _refuse_what_is_there(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise NewFamilyError(
            f"new-family: nothing or an empty folder expected at {str(target)!r}, found "
            f"{'a link' if target.is_symlink() else 'a file'}; remove it, or choose another place with --into"
        )
    if target.is_dir() and (held := sorted(os.listdir(target))):
        raise NewFamilyError(
            f"new-family: nothing or an empty folder expected at {str(target)!r}, found {held[0]!r}"
            f"{f' and {len(held) - 1} more' if held[1:] else ''}; remove it, or choose another name or --into"
        )


@contextmanager
def _told_in_one_line(target: Path) -> Iterator[None]:
    """What the system refuses -> NewFamilyError that says where, why and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some room, or choose another place with --into"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "choose a folder you can write to with --into"
        elif error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            advice = "something was put there meanwhile: remove it, or choose another place with --into"
        else:
            advice = "choose another place with --into"
        raise NewFamilyError(
            f"new-family: room for a new folder expected at {str(target)!r}, found "
            f"{error.strerror or type(error).__name__}; {advice}"
        ) from error
