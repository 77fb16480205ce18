"""The picture of `fuel bench --plot`: what each token cost, and what holding a plan gained.

matplotlib is an optional extra: it is looked for before anything is measured, and imported by nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuel_core.errors import BackendUnavailableError, ConfigError

__all__ = ["check_plot", "draw", "sparkline"]

_SUFFIXES = (".png", ".svg", ".pdf")
_BARS = "▁▂▃▄▅▆▇█"


def check_plot(file: Path) -> None:
    """Refuse a file that could not be drawn, before anything is measured.

    Raises ConfigError for another suffix or a place that cannot be written, BackendUnavailableError without matplotlib.
    """
    if file.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot: a name ending in {', '.join(_SUFFIXES)} expected, found {str(file)!r}; choose one")
    folder = file.parent
    if file.is_dir() or not folder.is_dir():
        found = f"that {folder} is none" if not file.is_dir() else f"the folder {file}"
        raise ConfigError(f"--plot: a file in a folder that is there expected, found {found}; make it, or name another")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"--plot: a place to write to expected, found {file} without permission; name another")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        missing = " ".join(str(error).split())
        raise BackendUnavailableError(
            f'--plot: matplotlib expected, found none that imports ({missing}); pip install "fuel-core[bench]"'
        ) from error


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Values as bars of eight heights from the least to the greatest, medians of neighbours where there are many."""
    from statistics import median

    width = min(width, len(values))
    pieces = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    heights = [median(piece) for piece in pieces]
    low, span = min(heights), max(heights) - min(heights)
    return "".join(_BARS[0 if span == 0 else min(int((height - low) / span * 8), 7)] for height in heights)


def draw(file: Path, title: str, sides: Mapping[str, Sequence[Sequence[float]]], fresh: str) -> None:
    """Draw every side's milliseconds a token, and each one's ratio to `fresh` below.

    sides: label -> for each run, the seconds of each step. The line is the median over the runs, the band their range.
    """
    from statistics import median

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    middles: dict[str, list[float]] = {}
    for label, runs in sides.items():
        steps: list[Any] = [[1e3 * each for each in step] for step in zip(*runs, strict=True)]
        middles[label] = [median(step) for step in steps]
        at = range(1, len(steps) + 1)
        (line,) = upper.plot(at, middles[label], label=label)
        upper.fill_between(at, [min(s) for s in steps], [max(s) for s in steps], color=line.get_color(), alpha=0.15)
        if label != fresh:
            ratios = [d1 / d2 for d1, d2 in zip(middles[fresh], middles[label], strict=True)]
            lower.plot(at, ratios, color=line.get_color())
    lower.axhline(1.0, color="grey", linewidth=0.8)
    upper.set_title(title, fontsize="medium", parse_math=False)
    upper.set(ylabel="ms a token")
    upper.set_ylim(bottom=0)
    upper.legend()
    lower.set(xlabel="decode step after the prompt", ylabel=f"{fresh} / D2")
    figure.savefig(file)
