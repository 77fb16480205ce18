"""Settings every core test runs under. Core tests import no family plugin: they use toys."""

from __future__ import annotations

import os

import pytest
from plugin_site import site

__all__ = ["site"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A developer's FUEL_* variables must not decide what a test sees, nor their code cache what it runs.

    No test starts a build in the background unless it sets FUEL_COMPILE itself.
    """
    for name in [name for name in os.environ if name.startswith("FUEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path_factory.getbasetemp() / "fuel-cache"))
    monkeypatch.setenv("FUEL_COMPILE", "0")
