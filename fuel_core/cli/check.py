"""`fuel check`: run a family's conformance checks, and put defects into it to see that they would notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli.options import Json
from fuel_core.cli.output import note, print_json, stdout_console, table

if TYPE_CHECKING:
    from fuel_core.testing.mutations import Outcome
    from fuel_core.testing.runner import Result

__all__ = ["check"]


def check(
    family: Annotated[
        str,
        typer.Argument(
            metavar="FAMILY", help="A family's name, module:NAME of its declaration, or a file that has one."
        ),
    ],
    sabotage: Annotated[
        bool, typer.Option("--sabotage", help="Then put defects into the family, and show which no check notices.")
    ] = False,
    optional: Annotated[bool, typer.Option("--optional", help="Also the optional checks (the wheel).")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this check or topic; may be given again.")
    ] = None,
    json: Json = False,
) -> None:
    """Check that a family keeps its contract, offline, on tiny checkpoints made for it."""
    # The kit imports torch, and pytest is not needed for it: both are paid for here and nowhere else.
    from fuel_core.testing.locate import declaration_of
    from fuel_core.testing.registry import checks
    from fuel_core.testing.runner import run_unit, units
    from fuel_core.testing.workspace import Workspace

    declaration = declaration_of(family)
    chosen = units(declaration, optional=optional, only=only or ())
    workspace = Workspace(declaration)
    outcomes: list[Outcome] = []
    try:
        results = [run_unit(unit, workspace) for unit in chosen]
        bad = [result for result in results if result.is_bad]
        if sabotage and not bad:
            from fuel_core.testing.mutations import sabotage as put_in

            outcomes = put_in(workspace, report=None if json else lambda o: note(f"{o.name}: {o.outcome} {o.by}"))
    finally:
        workspace.close()
    survivors = [outcome for outcome in outcomes if outcome.outcome == "survived"]
    if json:
        print_json(_report(workspace.family.name, results, outcomes if sabotage else None))
    else:
        catches = {one.name: one.catches for one in checks()}
        _show(results)
        for name, of_check in groupby(bad, key=_check_of):
            for result in of_check:
                note(f"{result.name}: {result.detail}")
            note(f"  {name} catches: {catches[name]}")
        if outcomes:
            _show_outcomes(outcomes)
        if sabotage and bad:
            note("fuel: --sabotage was left out: a family that fails already shows nothing")
    if bad or survivors:
        told = [f"{len(bad)} of {len(results)} checks failed"] if bad else []
        if len({_check_of(result) for result in bad}) > 1:
            # Checks are in the order in which to mend them: wrong arithmetic fails most of those after it.
            told = [f"{told[0]}; begin with {_check_of(bad[0])}, the others may follow from it"]
        told += [f"{len(survivors)} defects survived: {', '.join(o.name for o in survivors)}"] if survivors else []
        note(f"fuel: {workspace.family.name}: {'; '.join(told)}")
        raise typer.Exit(2)
    if not json:
        print(f"{workspace.family.name}: {_passed(results, outcomes)}")


def _passed(results: Sequence[Result], outcomes: Sequence[Outcome]) -> str:
    """What there is to say where nothing failed: ``93 checks passed, 2 skipped, 1 expected failure``."""
    counts = Counter(result.outcome for result in results)
    told = [f"{_number(counts['passed'], 'check')} passed"]
    told += [f"{counts['skipped']} skipped"] if counts["skipped"] else []
    told += [_number(counts["xfailed"], "expected failure")] if counts["xfailed"] else []
    if not outcomes:
        return ", ".join(told)
    caught = Counter(outcome.outcome for outcome in outcomes)
    defects = [f"{_number(caught['caught'], 'defect')} caught"]
    without = caught["does not apply"]
    defects += [f"{without} {'does' if without == 1 else 'do'} not apply"] if without else []
    return f"{', '.join(told)}; {', '.join(defects)}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _check_of(result: Result) -> str:
    """The check's name, without the config it ran on."""
    return result.name.partition("[")[0]


def _report(family: str, results: Sequence[Result], outcomes: Sequence[Outcome] | None) -> dict[str, Any]:
    counts = Counter(result.outcome for result in results)
    report: dict[str, Any] = {
        "family": family,
        "passed": counts["passed"],
        "failed": sum(result.is_bad for result in results),
        "skipped": counts["skipped"],
        "expected_failures": counts["xfailed"],
        "checks": [
            {"name": r.name, "outcome": r.outcome, "detail": r.detail, "seconds": round(r.seconds, 3)} for r in results
        ],
    }
    if outcomes is not None:
        report["sabotage"] = [
            {"name": o.name, "breaks": o.breaks, "outcome": o.outcome, "by": o.by, "detail": o.detail} for o in outcomes
        ]
    return report


def _show(results: Sequence[Result]) -> None:
    """One row a check: how its configs went."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        rows.setdefault(_check_of(result), []).append(result)
    shown = table("check", "outcome", "seconds")
    for name, of_check in rows.items():
        counts = Counter(result.outcome for result in of_check)
        told = ", ".join(f"{count} {outcome}" if len(of_check) > 1 else outcome for outcome, count in counts.items())
        shown.add_row(name, told, f"{sum(result.seconds for result in of_check):.1f}")
    stdout_console().print(shown)


def _show_outcomes(outcomes: Sequence[Outcome]) -> None:
    shown = table("defect", "what it breaks", "outcome", "by")
    for outcome in outcomes:
        shown.add_row(outcome.name, outcome.breaks, outcome.outcome, outcome.by or outcome.detail)
    stdout_console().print(shown)
