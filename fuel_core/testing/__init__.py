"""What the core ships for testing: the sabotage table. It may import anything; the library never imports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Sabotage"]


@dataclass(frozen=True)
class Sabotage:
    """One defect: what it is called, what it breaks, and how it is put in (once, for the life of the process)."""

    name: str
    breaks: str
    apply: Callable[[], None]
