"""The kit's own toy family passes every check, and each wrong family fails the check that is named for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuel_core.testing.negative_controls import CONTROLS, Control, failures
from fuel_core.testing.registry import checks
from fuel_core.testing.runner import Unit, run_unit, units
from fuel_core.testing.toy import CONFORMANCE
from fuel_core.testing.workspace import Workspace

DOCS = Path(__file__).resolve().parent.parent / "docs"
UNITS = units(CONFORMANCE)


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    made = Workspace(CONFORMANCE)
    yield made
    made.close()


@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_the_right_family_passes(unit: Unit, workspace: Workspace) -> None:
    result = run_unit(unit, workspace)
    assert result.outcome in ("passed", "skipped"), result.detail
    if result.outcome == "skipped":
        assert (unit.check.name.startswith("hygiene."), result.detail) == (
            True,
            "the declaration names no distribution",
        )


@pytest.mark.parametrize("control", CONTROLS, ids=[control.name for control in CONTROLS])
def test_a_wrong_family_fails_the_check_named_for_it(control: Control) -> None:
    assert failures(control)


def test_there_are_enough_wrong_families_and_most_checks_have_one() -> None:
    assert len(CONTROLS) >= 25
    assert Counter(control.name for control in CONTROLS).most_common(1)[0][1] == 1
    shown = {control.caught_by for control in CONTROLS}
    # Each of these stands beside a check that has its control, asks the core for something that a family's arithmetic
    # can hardly spoil, or needs a package.
    without = {
        "correctness.the_last_slot",
        "correctness.half_precision_activations",
        "identity.bound_fields_are_shown",
        "identity.allocations_are_told_apart",
        "identity.capacity_dtype_and_device_are_keyed",
        "bound.recorded_elsewhere_the_ops_are_equal",
        "interleavings.two_models_alternate",
        "hygiene.imports_no_torch",
        "hygiene.metadata_is_complete",
        "hygiene.wheel_installs_and_passes",
    }
    assert {one.name for one in checks()} - shown == without


def test_the_table_of_wrong_families_is_current() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| `([\w.]+)` \| (.+) \|$", (DOCS / "negative-controls.md").read_text(), re.MULTILINE
    )
    assert [row[:3] for row in rows] == [(c.name, c.wrong, c.caught_by) for c in CONTROLS]
    assert not [name for name, *_, said in rows if said == "**nothing**"]
