"""Finds stop strings in text that arrives in pieces, and never lets a part of one out.

Sees text only. Stop *ids* need no matching: the loop compares them before a token becomes text.
"""

from __future__ import annotations

from collections.abc import Iterable

from fuel_core.errors import GenerationError

__all__ = ["StopStrings"]


class StopStrings:
    """Passes text through until one of `stops` is complete.

    A tail that could still become a stop string is held back. What is passed on does not depend on how the text was
    cut into pieces: the stop string that is complete first ends the text (of those that end at one place, the longest),
    and none of it is passed on.

    Raises GenerationError for stop strings that are empty or not text.
    """

    def __init__(self, stops: Iterable[str] | str = ()) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise GenerationError(
                    f"stop: a list of non-empty strings expected, found {stop!r}; leave the others out"
                )
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Text that is certain not to be part of a stop string. Once `matched` is set, nothing more passes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        hit = self._first_match()
        if hit is not None:
            start, self.matched = hit
            passed, self._held = self._held[:start], ""
            return passed
        keep = self._tail_length()
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def flush(self) -> str:
        """Text held back when generation ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _tail_length(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
