"""Named ranges for torch.profiler around the parts of a decode step; off unless asked for.

``with fuel_core.profile_ranges(): ...`` inside a ``torch.profiler.profile``, or ``FUEL_PROFILE=1`` for a whole process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

__all__ = ["RANGES", "profile_ranges", "span"]

RANGES = ("fuel.token_data", "fuel.upload", "fuel.run", "fuel.sampling")
"""What a step is divided into: its bound data on the host, written to the device, the plan itself, the next token."""

_wanted = 1 if os.environ.get("FUEL_PROFILE", "0") not in ("", "0") else 0
_OFF: AbstractContextManager[object] = nullcontext()


@contextmanager
def profile_ranges() -> Iterator[None]:
    """Mark the parts of every step in this process while the block runs. Calls nest."""
    global _wanted
    _wanted += 1
    try:
        yield
    finally:
        _wanted -= 1


def span(name: str) -> AbstractContextManager[object]:
    """A range called ``name`` (one of ``RANGES``); a shared no-op while nobody wants them."""
    if not _wanted:
        return _OFF
    from torch.profiler import record_function

    return record_function(name)
