"""Installs made-up plugin distributions into a folder on `sys.path`: real metadata files, real modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

GOOD_MODULE = """
import sys
log = sys.modules.setdefault("fuel_import_log", type(sys)("fuel_import_log"))
log.__dict__.setdefault("names", []).append(__name__)
from fuel_core.families import Family, hookimpl

@hookimpl
def register_families(register):
    register(Family({name!r}, {model_types!r}, {gguf!r}, resolve_config=dict, build=dict))
"""


def imported() -> list[str]:
    """Names of the made-up modules imported so far, one entry per import."""
    log = sys.modules.get("fuel_import_log")
    return [] if log is None else list(log.names)


@dataclass(frozen=True)
class Asked:
    """The part of a checkpoint that discovery looks at."""

    model_type: str | None = None
    gguf_architecture: str | None = None

    @property
    def format(self) -> str:
        return "gguf" if self.gguf_architecture is not None else "huggingface"


@dataclass
class Site:
    folder: Path

    def install(
        self,
        distribution: str,
        version: str = "1.0",
        *,
        module: str | None = None,
        source: str | None = None,
        family: str | None = None,
        model_types: tuple[str, ...] = (),
        gguf: tuple[str, ...] = (),
        groups: Mapping[str, Mapping[str, str]] | None = None,
        folder: Path | None = None,
    ) -> str:
        """Write `distribution` with one plugin module; by default one that works. Returns the module's name.

        `groups` replaces the entry points that follow from the other arguments.
        """
        folder = folder or self.folder
        folder.mkdir(exist_ok=True)
        module = module or distribution.replace("-", "_")
        family = family or distribution
        model_types = model_types or (family,)
        if source is None:
            source = GOOD_MODULE.format(name=family, model_types=model_types, gguf=gguf)
        (folder / f"{module}.py").write_text(source)
        if groups is None:
            groups = {
                "fuel_core.families.v1": {family: module},
                "fuel_core.model_types": dict.fromkeys(model_types, module),
                "fuel_core.gguf_architectures": dict.fromkeys(gguf, module),
            }
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))
        importlib.invalidate_caches()
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder first on `sys.path`; everything imported meanwhile from it is forgotten when the test ends."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name == "fuel_import_log" or str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
