"""`fuel families`: which plugins are installed and where each stands. Reads metadata; imports none unless asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fuel_core.cli.options import Json
from fuel_core.cli.output import note, print_json, stdout_console, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuel_core.discovery import FamilyRecord

__all__ = ["families", "print_families", "unusable"]


def families(
    load: Annotated[bool, typer.Option("--load", help="Import each plugin, to see whether it works.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 if a plugin is broken, incompatible or missing.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the installed families, their packages and what they serve."""
    from fuel_core import discovery
    from fuel_core.families import FAMILY_API

    records = discovery.families(load=load)
    if json:
        print_json({"family_api": FAMILY_API, "families": [record.as_dict() for record in records]})
    else:
        print_families(records)
    bad = unusable(records)
    if bad and (strict or discovery.strict_setting()):
        note(f"fuel: {len(bad)} of {len(records)} families cannot be used: {', '.join(r.name for r in bad)}")
        raise typer.Exit(2)


def unusable(records: Sequence[FamilyRecord]) -> list[FamilyRecord]:
    """Those that cannot serve as they stand, and nobody asked for that."""
    from fuel_core.discovery import Status

    good = (Status.OK, Status.NOT_LOADED, Status.DISABLED)
    return [record for record in records if record.status not in good]


def print_families(records: Sequence[FamilyRecord], *, faults: bool = True) -> None:
    """The table on stdout; with `faults`, what is wrong, and why, on stderr. Tracebacks go there in any case."""
    if not records:
        print("No family is installed. Families are separate packages: see docs/families.md")
        return
    shown = table("family", "status", "package", "API", "model types", "GGUF architectures")
    for record in records:
        shown.add_row(
            record.name,
            str(record.status),
            record.package,
            ", ".join(map(str, record.api)),
            ", ".join(record.model_types),
            ", ".join(record.gguf_architectures),
        )
    stdout_console().print(shown)
    for record in records:
        for line in (record.detail, *record.warnings):
            if line and faults:
                note(f"{record.name}: {line}")
        if record.traceback:
            note(record.traceback.rstrip())
