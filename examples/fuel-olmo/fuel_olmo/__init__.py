"""The olmo family for fuel. The model is imported when a checkpoint needs it, not before."""

from __future__ import annotations

from collections.abc import Callable

from fuel_core import Family, hookimpl

__version__ = "0.1.0"


@hookimpl
def register_families(register: Callable[[Family], None]) -> None:
    from fuel_olmo.family import FAMILY

    register(FAMILY)
