"""The gemma family for fuel. The models are imported when a checkpoint needs one, not before."""

from __future__ import annotations

from collections.abc import Callable

from fuel_core import Family, hookimpl

__version__ = "0.1.0"


@hookimpl
def register_families(register: Callable[[Family], None]) -> None:
    from fuel_gemma.family import FAMILY

    register(FAMILY)
