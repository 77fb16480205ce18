"""Settings every core test runs under. Core tests import no family plugin: they use toys."""

from __future__ import annotations

import os

import pytest
from plugin_site import site

__all__ = ["site"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's FUEL_* variables must not decide what a test sees."""
    for name in [name for name in os.environ if name.startswith("FUEL_")]:
        monkeypatch.delenv(name)
