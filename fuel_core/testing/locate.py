"""Finds a family's declaration: published by its package, or in a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fuel_core.errors import ConformanceError
from fuel_core.testing.declaration import Conformance
from fuel_core.testing.scaffold import plain_name

__all__ = ["GROUP", "declaration_of"]

GROUP = "fuel_core.conformance"
"""Entry-point group: family name -> "module:NAME" of its Conformance."""


def declaration_of(family: str) -> Conformance:
    """The declaration that ``family`` stands for: a family's name, "module:NAME", or a Python file that has one.

    A name is taken as new-family takes it: ``my-zebra`` is ``my_zebra``.

    Raises ConformanceError naming what is published.
    """
    if family.endswith(".py"):
        return _only_one(_module_of(Path(family)), family)
    import importlib_metadata

    points = {point.name: point for point in importlib_metadata.entry_points(group=GROUP)}
    plain = plain_name(family)
    point = points.get(family) or points.get(plain)
    value = family if ":" in family else point.value if point is not None else None
    if value is None:
        # The folder that new-family makes.
        folder = f" (pip install -e ./fuel-{plain.replace('_', '-')})" if plain.isidentifier() else ""
        raise ConformanceError(
            f"check: a family with a declaration expected ({', '.join(sorted(points)) or 'none is published'}), found "
            f"{family!r}; install its package{folder}, or give the declaration's file or module:NAME. A package "
            f"publishes one in the entry-point group {GROUP}"
        )
    module, _, name = value.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConformanceError(
            f"check: {value} expected to be a Conformance, found none ({error}); correct the name"
        ) from error
    if not isinstance(found, Conformance):
        raise ConformanceError(
            f"check: {value} expected to be a Conformance, found {type(found).__name__}; name it as module:NAME"
        )
    return found


def _module_of(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConformanceError(
            f"check: a Python file with a Conformance expected, found no file {str(path)!r}; check the path"
        )
    spec = importlib.util.spec_from_file_location(f"fuel_check_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConformanceError(
            f"check: a file that imports expected, found {path} failing with {type(error).__name__}: {error}; mend it"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _only_one(module: ModuleType, where: str) -> Conformance:
    named = getattr(module, "conformance", None)
    if isinstance(named, Conformance):
        return named
    found = list({id(v): v for v in vars(module).values() if isinstance(v, Conformance)}.values())
    if len(found) != 1:
        raise ConformanceError(
            f"check: one Conformance expected in {where}, found {len(found)}; call the one meant `conformance`"
        )
    return found[0]
