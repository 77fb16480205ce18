"""Changes to a recorded graph before it is lowered to native code: the place for faster kernels.

A rewrite sees the graph as it was recorded and changes it in place; what comes out must compute the same. Each build is
compared with the recording as it was, so a rewrite that does not is refused with its segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

__all__ = ["REWRITES", "Rewrite"]


@dataclass(frozen=True)
class Rewrite:
    """One change. ``version`` is part of every code key: raise it whenever ``apply`` does something else."""

    name: str
    version: int
    apply: Callable[[fx.GraphModule], None]


REWRITES: tuple[Rewrite, ...] = ()
"""Applied in this order, by whichever process lowers."""
