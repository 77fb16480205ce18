"""`fuel doctor`: what this machine and this installation offer, and what about them is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli.families import print_families
from fuel_core.cli.options import Json
from fuel_core.cli.output import bytes_text, note, print_json, stdout_console, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["doctor"]


def doctor(
    load: Annotated[bool, typer.Option("--load", help="Import each family plugin, to see whether it works.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 for remarks as well as for problems.")] = False,
    json: Json = False,
) -> None:
    """Show versions, devices, compiler, cache and families, and what is wrong with them."""
    from fuel_core.diagnosis import diagnose
    from fuel_core.discovery import strict_setting

    report = diagnose(load=load)
    if json:
        print_json(report.as_dict())
    else:
        shown = table("what", "found")
        for what, found in _rows(report.facts):
            shown.add_row(what, found)
        stdout_console().print(shown)
        print()
        print_families(report.families, faults=False)
    for line in report.remarks:
        note(f"remark: {line}")
    for line in report.problems:
        note(f"problem: {line}")
    if report.problems or (report.remarks and (strict or strict_setting())):
        raise typer.Exit(2)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, found) of the report, in reading order."""
    core, torch, cpu = facts["core"], facts["torch"], facts["cpu"]
    yield "fuel-core", f"{core['version']}, {core['folder']}"
    yield "python", f"{core['python']}, {core['executable']}"
    yield "platform", core["platform"]
    if torch["error"] is None:
        built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
        yield "torch", f"{torch['version']} ({built}, commit {torch['commit'][:10]})"
        yield "threads", f"{torch['threads']} (OMP_NUM_THREADS {cpu['OMP_NUM_THREADS'] or 'not set'})"
    else:
        yield "torch", f"cannot be imported: {torch['error']}"
    yield "CPU", f"{cpu['model']}, {cpu['cpus_usable']} of {cpu['cpus']} CPUs usable"
    if torch["error"] is None:
        yield (
            "CPU code",
            f"{torch['cpu_capability']} in torch; the CPU has {', '.join(cpu['features']) or 'none named'}",
        )
    for device in facts["devices"]:
        memory = "" if device["memory_bytes"] is None else bytes_text(device["memory_bytes"])
        yield "device", ", ".join(filter(None, (device["name"], device["description"], memory)))
    compiler, cache = facts["compiler"], facts["cache"]
    yield "C++ compiler", "none" if compiler["path"] is None else f"{compiler['path']}, {compiler['version']}"
    if cache["exists"]:
        held = f"{cache['files']} files, {bytes_text(cache['size_bytes'])}"
        yield "cache", f"{cache['folder']} ({cache['from']}; {cache['owner']}, mode {cache['mode']}; {held})"
    else:
        yield "cache", f"{cache['folder']} ({cache['from']}; not there yet)"
    for need in facts["dependencies"]:
        if need["name"] != "torch":
            yield need["name"], f"{need['version'] or 'not installed'} (expected {need['required'] or 'any'})"
    for tool in facts["optional"]:
        yield tool["name"], f"{tool['version'] or 'not installed'} (optional: {tool['for']})"
    for name, value in facts["settings"].items():
        yield name, repr(value)
