"""A decode step as a list of segments: embedding, each layer, head.

A segment is the unit that is recorded, shared and compiled. It says which tensors and which integers it takes,
by name, and how to compute its output from them. It does not know whether it is run or recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Segment", "SegmentBinding"]

HIDDEN = "h"
"""Name of the input that the previous segment produces."""


@dataclass(frozen=True)
class Segment:
    """One piece of the step, as a function of named tensors and named integers."""

    name: str
    """``embed``, ``layer 3`` or ``head``: it stands in errors."""
    tensors: tuple[str, ...]
    """Names of the tensor inputs, in order. ``h`` is the previous segment's output."""
    symbols: tuple[str, ...]
    """Names of the integer inputs, in order; empty on the device-offset path."""
    call: Callable[[Mapping[str, Tensor], Mapping[str, int]], Tensor]
    """Computes the output. State buffers among the tensors are written in place."""
    capacity_axis: Mapping[str, int]
    """Which axis of which tensor counts the positions of the KV capacity."""


@dataclass(frozen=True)
class SegmentBinding:
    """What one segment of one session is bound to: its tensors but ``h``, and its mask variant."""

    tensors: Mapping[str, Tensor]
    mask_variant: int = 0
