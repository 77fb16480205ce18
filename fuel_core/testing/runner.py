"""Runs a declaration's checks one unit (a check on a config) at a time, offline, and says how each went."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from fuel_core.errors import ConformanceError
from fuel_core.testing.declaration import Conformance
from fuel_core.testing.registry import OPTIONAL, Check, CheckFailed, CheckSkipped, checks, verify

if TYPE_CHECKING:
    from fuel_core.testing.workspace import Workspace

__all__ = ["Result", "Unit", "run_checks", "run_unit", "units"]


@dataclass(frozen=True)
class Unit:
    """One check on one config, or on the whole family."""

    check: Check
    config: str | None

    @property
    def name(self) -> str:
        return self.check.name if self.config is None else f"{self.check.name}[{self.config}]"

    def expected_failure(self, declaration: Conformance) -> str | None:
        """Why it is expected to fail, if it is."""
        reasons = declaration.expected_failures
        return reasons.get(self.name) or reasons.get(self.check.name)


@dataclass(frozen=True)
class Result:
    """How one unit went: passed, failed, skipped, xfailed (as expected), xpassed (though failure was expected)."""

    name: str
    outcome: str
    detail: str
    seconds: float

    @property
    def is_bad(self) -> bool:
        return self.outcome in ("failed", "xpassed")


def units(declaration: Conformance, *, optional: bool = False, only: Sequence[str] = ()) -> list[Unit]:
    """What there is to run. ``only``: names of checks, or topics. Raises ConformanceError for one that is neither."""
    verify(declaration)
    every = checks()
    known = {one.name for one in every} | {one.name.partition(".")[0] for one in every}
    unknown = sorted(set(only) - known)
    if unknown:
        raise ConformanceError(f"no check or topic is called {', '.join(unknown)}; choose from docs/conformance.md")
    chosen: list[Unit] = []
    for one in every:
        named = not only or one.name in only or one.name.partition(".")[0] in only
        if not named or (one.group == OPTIONAL and not optional and one.name not in only):
            continue
        chosen += [Unit(one, name) for name in declaration.configs] if one.per_config else [Unit(one, None)]
    return chosen


@contextmanager
def _offline() -> Iterator[None]:
    """Refuse every connection: what a check needs, it makes. Native code for models of a moment it does not."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CheckFailed("a check reached for the network; families and oracles work offline")

    builds = os.environ.get("FUEL_COMPILE")
    os.environ["FUEL_COMPILE"] = "0"
    kept = socket.socket.connect
    socket.socket.connect = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.connect = kept  # type: ignore[method-assign]
        if builds is None:
            os.environ.pop("FUEL_COMPILE", None)
        else:
            os.environ["FUEL_COMPILE"] = builds


def call_unit(unit: Unit, workspace: Workspace) -> None:
    """Run one unit. Raises CheckFailed, CheckSkipped, or what the family raised."""
    missing = unit.check.needs - set(workspace.declaration.capabilities)
    if missing:
        raise CheckSkipped(f"needs {', '.join(sorted(missing))}")
    with _offline():
        unit.check.run(workspace if unit.config is None else workspace.case(unit.config))


def run_unit(unit: Unit, workspace: Workspace) -> Result:
    """Run one unit and judge it. A family that raises fails the check; ConformanceError is the declaration's fault."""
    started = time.perf_counter()
    reason = unit.expected_failure(workspace.declaration)
    outcome, detail = "passed", ""
    try:
        call_unit(unit, workspace)
    except CheckSkipped as skipped:
        return Result(unit.name, "skipped", str(skipped), time.perf_counter() - started)
    except ConformanceError:
        raise
    except Exception as error:
        detail = str(error) if isinstance(error, CheckFailed) else f"{unit.config or 'family'}: {_told(error)}"
        outcome = "failed"
    if reason is not None:
        outcome = "xfailed" if outcome == "failed" else "xpassed"
        detail = reason if outcome == "xfailed" else f"passes, though it is expected to fail ({reason})"
    return Result(unit.name, outcome, detail, time.perf_counter() - started)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def run_checks(
    declaration: Conformance,
    *,
    optional: bool = False,
    only: Sequence[str] = (),
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run a declaration's checks in this process, offline; one `Result` for each check and config.

    `optional`: the optional ones as well. `only`: names of checks, or topics. `report`: called with each result as it
    comes. Raises ConformanceError for a declaration that cannot be used and for names that there are not.
    """
    from fuel_core.testing.workspace import Workspace

    chosen = units(declaration, optional=optional, only=only)
    workspace = Workspace(declaration)
    results = []
    try:
        for unit in chosen:
            results.append(run_unit(unit, workspace))
            if report is not None:
                report(results[-1])
    finally:
        workspace.close()
    return results
