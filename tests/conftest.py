"""Settings every core test runs under. Core tests import no family plugin: they use toys."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from plugin_site import site

__all__ = ["site"]


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once on torch's own ops and once on the kernels, whatever this machine would choose."""
    from fuel_core import native
    from fuel_core.native import ops

    name: str = request.param
    if name == "torch":
        monkeypatch.setattr(ops, "_state", (False, 0))
    elif not native.is_active():
        pytest.skip(f"no kernels: {native.status()}")
    return name


@pytest.fixture(autouse=True, scope="session")
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernels are there before the first test, here and in every process that a test starts."""
    from fuel_core import native
    from fuel_core.native import build

    library = build.shared_object(patience=None)
    if library is not None and native.is_active():
        cache = tmp_path_factory.getbasetemp() / "fuel-cache"
        cache.mkdir(mode=0o700)
        shutil.copytree(library.parent, cache / library.parent.parent.name / library.parent.name)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A developer's FUEL_* variables must not decide what a test sees, nor their code cache what it runs.

    No test starts a build in the background unless it sets FUEL_COMPILE itself.
    """
    for name in [name for name in os.environ if name.startswith("FUEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path_factory.getbasetemp() / "fuel-cache"))
    monkeypatch.setenv("FUEL_COMPILE", "0")
    if "fuel_core.plan_backends" in sys.modules:
        # Code that an earlier test had made would serve this one's plans as well.
        sys.modules["fuel_core.plan_backends"].LIBRARY.loaded.clear()
