"""The pytest plugin: a module-level `Conformance` becomes one test per check and config.

    test_conformance.py::conformance::contract.dims_agree[grouped]

Of several in one module, the one called `conformance` is meant.

Importing it imports no torch: that happens when the first check runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from fuel_core.testing.declaration import Conformance
from fuel_core.testing.registry import OPTIONAL, CheckFailed, CheckSkipped

if TYPE_CHECKING:
    from fuel_core.testing.runner import Unit
    from fuel_core.testing.workspace import Workspace

__all__ = ["ConformanceCollector", "ConformanceItem"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fuel").addoption(
        "--fuel-optional", action="store_true", help="Run the optional checks of the conformance kit as well."
    )


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> pytest.Collector | None:
    if isinstance(obj, Conformance) and isinstance(collector, pytest.Module):
        # The one that a module imports and changes is not the one it means.
        if name != "conformance" and isinstance(getattr(collector.obj, "conformance", None), Conformance):
            return None
        made: ConformanceCollector = ConformanceCollector.from_parent(collector, name=name, declaration=obj)
        return made
    return None


class ConformanceCollector(pytest.Collector):
    """The checks of one declaration. Its workspace lives until the last of them has run."""

    def __init__(self, *, declaration: Conformance, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.declaration = declaration
        self._workspace: Workspace | None = None

    def collect(self) -> Iterator[pytest.Item]:
        from fuel_core.testing.runner import units

        for unit in units(self.declaration, optional=True):
            item: ConformanceItem = ConformanceItem.from_parent(self, name=unit.name, unit=unit)
            if unit.check.group == OPTIONAL and not self.config.getoption("--fuel-optional"):
                item.add_marker(pytest.mark.skip(reason="optional: run with --fuel-optional"))
            reason = unit.expected_failure(self.declaration)
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
            yield item

    @property
    def workspace(self) -> Workspace:
        if self._workspace is None:
            from fuel_core.testing.workspace import Workspace

            self._workspace = Workspace(self.declaration)
        return self._workspace

    def teardown(self) -> None:
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None


class ConformanceItem(pytest.Item):
    """One check on one config."""

    def __init__(self, *, unit: Unit, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unit = unit

    def runtest(self) -> None:
        from fuel_core.testing.runner import call_unit

        assert isinstance(self.parent, ConformanceCollector)
        try:
            call_unit(self.unit, self.parent.workspace)
        except CheckSkipped as skipped:
            pytest.skip(str(skipped))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What failed in one line, and the defect that the check is there for; a traceback only for surprises."""
        if isinstance(excinfo.value, CheckFailed):
            return f"{self.unit.name}\n  {excinfo.value}\n  It catches: {self.unit.check.catches}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, 0, f"{getattr(self.parent, 'name', 'conformance')}::{self.name}"
