"""Announcing that something goes away. Imports nothing of ours."""

from __future__ import annotations

import threading
import warnings

__all__ = ["warn_deprecated"]

_announced: set[str] = set()
_lock = threading.Lock()


def warn_deprecated(what: str, *, instead: str, removal: str) -> None:
    """Say, once per process, that `what` goes away with fuel-core `removal` and what to use `instead`.

    Called by the deprecated function itself; the DeprecationWarning names the line that called that function. Where
    warnings are errors, every call raises.
    """
    with _lock:
        if what in _announced:
            return
        # 1 is this function, 2 the deprecated one, 3 whoever called it.
        warnings.warn(
            f"{what} is deprecated and goes away in fuel-core {removal}; use {instead}",
            DeprecationWarning,
            stacklevel=3,
        )
        _announced.add(what)
