"""Builds plugin distributions as wheels and installs them into virtual environments of their own.

What `plugin_site` imitates in one process, this does as a user would: hatchling builds, pip installs, and a fresh
interpreter that cannot see the checkout looks at the result. The core is a wheel as well. Everything else (torch and
the rest) is linked in from the environment that runs the tests, so that nothing is downloaded or copied.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Building happens in one process for all of them: hatchling's own PEP 517 hook, which reads the project in the current
# folder. A process for each would be most of the suite's time.
_BUILD = """
import os, sys
from hatchling.build import build_wheel
out = sys.argv[1]
for project in sys.argv[2:]:
    os.chdir(project)
    print(build_wheel(out))
"""

GOOD = """
import os
with open(os.environ.get("IMPORT_LOG", os.devnull), "a") as log:
    print(__name__, file=log)
from fuel_core import Family, hookimpl

@hookimpl
def register_families(register):
    register(Family({name!r}, {model_types!r}, (), resolve_config=dict, build=dict))
"""


def good(name: str, *model_types: str) -> str:
    """Source of a plugin that works, and that notes its import in the file named by IMPORT_LOG."""
    return GOOD.format(name=name, model_types=model_types or (name,))


@dataclass(frozen=True)
class Plugin:
    """One distribution: `source` is its module; `groups` its entry points, by default those of API 1."""

    distribution: str
    family: str
    source: str | None = None
    version: str = "1.0"
    model_types: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    groups: Mapping[str, Mapping[str, str]] | None = None
    module: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Further top-level modules: name -> source."""

    @property
    def main_module(self) -> str:
        return self.module or self.distribution.replace("-", "_")

    @property
    def wheel(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def entry_points(self) -> Mapping[str, Mapping[str, str]]:
        if self.groups is not None:
            return self.groups
        words = self.model_types or (self.family,)
        return {
            "fuel_core.families.v1": {self.family: self.main_module},
            "fuel_core.model_types": dict.fromkeys(words, self.main_module),
        }

    def write(self, folder: Path) -> Path:
        """Write the project: pyproject.toml and its modules."""
        folder.mkdir(parents=True)
        source = good(self.family, *self.model_types) if self.source is None else self.source
        modules = {self.main_module: source, **self.modules}
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        lines = [
            "[build-system]",
            'requires = ["hatchling"]',
            'build-backend = "hatchling.build"',
            "[project]",
            f"name = {json.dumps(self.distribution)}",
            f"version = {json.dumps(self.version)}",
            'requires-python = ">=3.11"',
            f"dependencies = {json.dumps(list(self.requires))}",
            "[tool.hatch.build.targets.wheel]",
            f"only-include = {json.dumps([f'{name}.py' for name in modules])}",
        ]
        for group, entries in self.entry_points().items():
            lines.append(f"[project.entry-points.{json.dumps(group)}]")
            lines += [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in entries.items()]
        (folder / "pyproject.toml").write_text("\n".join(lines) + "\n")
        return folder


def build_wheels(plugins: Iterable[Plugin], folder: Path, *, core: bool = True, projects: Iterable[Path] = ()) -> Path:
    """Build each plugin, each of the `projects` that exist, and the core, into `folder`/wheels; returns that folder."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    written = [plugin.write(folder / "projects" / f"{plugin.distribution}-{plugin.version}") for plugin in plugins]
    _run([sys.executable, "-c", _BUILD, wheels, *([ROOT] if core else []), *written, *projects])
    return wheels


@dataclass(frozen=True)
class Environment:
    """A virtual environment with its own interpreter."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    @classmethod
    def create(cls, folder: Path, wheels: Path, names: Sequence[str]) -> Environment:
        """An environment with the core and the wheels called `names`; dependencies are linked, not installed."""
        venv.create(folder, with_pip=False, symlinks=True)
        made = cls(folder)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            # What belongs to this project comes as a wheel; a .pth would bring the checkout back in.
            ours = entry.name.lower().startswith(("fuel", "_fuel", "__editable__", "_editable_impl"))
            if not ours and entry.suffix not in (".pth", ".egg-link") and entry.name != "__pycache__":
                (made.site / entry.name).symlink_to(entry)
        made.install(wheels, [next(wheels.glob("fuel_core-*.whl")).name, *names])
        return made

    def install(self, wheels: Path, names: Sequence[str], *, target: Path | None = None) -> None:
        """Install with pip, without resolving: requirements may be violated on purpose."""
        where = [] if target is None else ["--target", target]
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", *where]
        _run([*pip, "install", *options, *(wheels / name for name in names)])

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's interpreter away from the checkout. `settings` are environment variables."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FUEL_", "PYTHON"))}
        return subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            env=inherited | settings,
            cwd=self.folder,
            timeout=120,
        )

    def fuel(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "fuel_core", *arguments, **settings)

    def families(self, *arguments: str, **settings: str) -> dict[str, dict[str, Any]]:
        """`fuel families --json`, by distribution and family."""
        done = self.fuel("families", "--json", *arguments, **settings)
        assert done.returncode == 0, done.stderr
        return {f"{r['distribution']}:{r['family']}": r for r in json.loads(done.stdout)["families"]}


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
