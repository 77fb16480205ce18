"""The package around the family: what importing it costs, what it imports, what it publishes, whether it installs."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuel_core.testing.registry import OPTIONAL, check, require, skip
from fuel_core.testing.workspace import Workspace


def _distribution(workspace: Workspace) -> Any:
    import importlib_metadata

    name = workspace.declaration.distribution
    if name is None:
        skip("the declaration names no distribution")
    try:
        return importlib_metadata.distribution(name)
    except importlib_metadata.PackageNotFoundError:
        require(False, f"distribution {name!r} is not installed; install it, or correct the declaration")


def _modules(workspace: Workspace) -> set[str]:
    """Top-level modules of the plugin: those that its entry points name."""
    points = _distribution(workspace).entry_points
    found = {p.value.partition(":")[0].partition(".")[0] for p in points if p.group.startswith("fuel_core.families.")}
    require(found, "the distribution publishes no entry point in fuel_core.families.v1")
    return found


@check(per_config=False)
def imports_no_torch(workspace: Workspace) -> None:
    """A plugin that pays for torch, or for its models, when it is merely looked at."""
    for module in sorted(_modules(workspace)):
        code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
        paths = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONPATH": paths},
        )
        require(done.returncode == 0, f"import {module} fails: {done.stderr.strip().splitlines()[-1:]}")
        require(
            not done.stdout.split(), f"import {module} imports {done.stdout.strip()}; import models inside the hook"
        )


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every absolute import in a file, wherever it stands; name None for ``import module``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def private_imports(paths: list[Path]) -> list[str]:
    """Imports of the core that are not public, one line each."""
    public = {
        name: set(importlib.import_module(name).__all__)
        for name in ("fuel_core", "fuel_core.layers", "fuel_core.errors", "fuel_core.testing")
    }
    found = []
    for path in paths:
        for module, name in imports(path):
            if module.partition(".")[0] == "fuel_core" and (
                module not in public or (name is not None and name not in public[module])
            ):
                found.append(f"{path.name} imports {name or 'all'} from {module}")
    return found


def family_files(workspace: Workspace) -> list[Path]:
    """The Python files of the package that the family's build and resolve_config live in."""
    files: set[Path] = set()
    for function in (workspace.family.build, workspace.family.resolve_config):
        module = sys.modules[function.__module__]
        top = module.__name__.partition(".")[0]
        package = sys.modules[top]
        if hasattr(package, "__path__") and top != "fuel_core":
            files |= {path for folder in package.__path__ for path in Path(folder).rglob("*.py")}
        elif module.__file__ is not None:
            files.add(Path(module.__file__))
    return sorted(files)


@check(per_config=False)
def public_names_only(workspace: Workspace) -> None:
    """A plugin that leans on names the core may change without notice."""
    found = private_imports(family_files(workspace))
    require(not found, f"{len(found)} imports of private names: {'; '.join(found[:4])}")


@check(per_config=False)
def metadata_is_complete(workspace: Workspace) -> None:
    """A model_type or architecture without an entry point, so that no checkpoint finds the family; no core bound."""
    distribution, family = _distribution(workspace), workspace.family
    points = distribution.entry_points
    for group, words in (
        ("fuel_core.model_types", family.model_types),
        ("fuel_core.gguf_architectures", family.gguf_architectures),
    ):
        published = {point.name for point in points if point.group == group}
        missing, extra = sorted(set(words) - published), sorted(published - set(words))
        require(not missing, f"{group}: no entry point for {', '.join(missing)}")
        require(not extra, f"{group}: entry points that the family does not serve: {', '.join(extra)}")
    names = {p.name for p in points if p.group.startswith("fuel_core.families.")}
    require(family.name in names, f"fuel_core.families.v1: no entry point named {family.name!r}")
    metadata = distribution.metadata
    requires = [r for r in distribution.requires or () if r.replace("_", "-").startswith("fuel-core")]
    require(requires, "the distribution does not require fuel-core")
    require(any("<" in r or "~=" in r or "==" in r for r in requires), f"no upper bound on fuel-core: {requires[0]}")
    for key in ("Requires-Python", "Summary"):
        require(metadata.get(key), f"the metadata lacks {key}")
    require(metadata.get("License") or metadata.get("License-Expression"), "the metadata names no license")


@check(group=OPTIONAL, per_config=False)
def wheel_installs_and_passes(workspace: Workspace) -> None:
    """A module or data file that is in the checkout and not in the wheel."""
    project = workspace.declaration.project
    if project is None:
        skip("the declaration names no project folder")
    if importlib.util.find_spec("build") is None:
        skip("needs the package build")
    modules = sorted(_modules(workspace))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, project]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        require(done.returncode == 0, f"the wheel does not build: {done.stdout[-300:]}{done.stderr[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        target = Path(folder) / "site"
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
        ]
        done = subprocess.run([*install, str(wheel)], capture_output=True, text=True, check=False, timeout=300)
        require(done.returncode == 0, f"the wheel does not install: {done.stderr[-300:]}")
        # The wheel in front of everything else, and the checkout nowhere: what it lacks cannot be found beside it.
        here = Path(project).resolve()
        rest = [path for path in sys.path if path and here != Path(path).resolve()]
        done = subprocess.run(
            [sys.executable, "-I", "-c", _IN_WHEEL, str(target), *modules, "--", workspace.family.name, *rest],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
            cwd=folder,
        )
        require(done.returncode == 0, f"the installed wheel does not pass: {done.stderr.strip()[-400:]}")


_IN_WHEEL = """
import importlib, pathlib, sys
target, *rest = sys.argv[1:]
modules, (family, *paths) = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
sys.path[:] = [target, *paths, *sys.path]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(getattr(f, "__module__", f)).lower()]
for name in modules:
    found = pathlib.Path(importlib.import_module(name).__file__)
    assert pathlib.Path(target) in found.parents, f"{name} comes from {found}, not from the wheel"
from fuel_core.testing.locate import declaration_of
from fuel_core.testing.runner import run_checks
results = run_checks(declaration_of(family), only=["contract", "correctness.held_steps"])
sys.exit("; ".join(f"{r.name}: {r.detail}" for r in results if r.is_bad) or 0)
"""
