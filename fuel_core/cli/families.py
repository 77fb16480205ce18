"""`fuel families`: which plugins are installed and where each stands. Reads metadata; imports none unless asked."""

from __future__ import annotations

from typing import Annotated

import typer

from fuel_core.cli.options import Json
from fuel_core.cli.output import note, print_json, stdout_console, table

__all__ = ["families"]


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
    good = (discovery.Status.OK, discovery.Status.NOT_LOADED, discovery.Status.DISABLED)
    bad = [record for record in records if record.status not in good]
    if json:
        print_json({"family_api": FAMILY_API, "families": [record.as_dict() for record in records]})
    elif not records:
        print("No family is installed. Families are separate packages: see docs/families.md")
    else:
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
            if record.detail:
                note(f"{record.name}: {record.detail}")
            if record.traceback:
                note(record.traceback.rstrip())
    if strict and bad:
        note(f"fuel: {len(bad)} of {len(records)} families cannot be used: {', '.join(r.name for r in bad)}")
        raise typer.Exit(2)
