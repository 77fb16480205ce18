"""`fuel new-family`: write a family package that installs and passes its checks, to be changed into another."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fuel_core.cli.options import Json
from fuel_core.cli.output import note, print_json

__all__ = ["new_family"]

_DOCS = "docs/writing-a-family.md"


def new_family(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the family is called: zebra makes fuel-zebra.")],
    model_type: Annotated[
        str | None,
        typer.Option(
            "--model-type", metavar="WORD", help="config.json's model_type that it serves.", show_default="NAME"
        ),
    ] = None,
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="The folder to write it to.")] = Path("."),
    json: Json = False,
) -> None:
    """Write a family package, with a toy model that passes every check, to start from."""
    from fuel_core.testing.scaffold import names_of
    from fuel_core.testing.scaffold import new_family as write

    names = names_of(name, model_type)
    path, files = write(names, into)
    commands = [f"pip install -e {shlex.quote(_typed(path))}", f"fuel check {names.name}"]
    if json:
        print_json(
            {
                "family": names.name,
                "model_type": names.model_type,
                "distribution": names.distribution,
                "module": names.module,
                "path": str(path.absolute()),
                "files": files,
                "next": commands,
                "docs": _DOCS,
            }
        )
        return
    if name != names.name:
        note(f"fuel: the family is called {names.name!r}, its package {names.distribution!r}")
    print(f"{_typed(path)}: {len(files)} files, a toy that passes every check. Next:\n")
    for command in commands:
        print(f"  {command}")
    print(f"\n{_DOCS} says how the toy becomes an architecture.")


def _typed(path: Path) -> str:
    """The path so that pip takes it for one, and not for the name of a package."""
    text = str(path)
    return text if path.is_absolute() or path.parts[0] == os.pardir else os.path.join(os.curdir, text)
