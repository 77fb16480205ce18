"""Settings every test of this suite runs under."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models are so small that a second thread only waits."""
    torch.set_num_threads(1)


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
