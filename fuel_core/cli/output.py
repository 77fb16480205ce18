"""Printing: results on stdout, everything else on stderr, colour only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["bytes_text", "note", "print_json", "stdout_console", "table"]


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object and a newline. Non-finite numbers are not JSON: they are refused with ValueError."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def note(line: str) -> None:
    """Write a line for the person at the terminal."""
    print(line, file=sys.stderr)


def stdout_console() -> Console:
    """A console for tables. Piped output is not folded to a guessed width."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=10_000)
    return console


def table(*columns: str) -> Table:
    """A plain table with these headings."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def bytes_text(count: int) -> str:
    """`count` bytes for reading: "269.0 MB (269,030,016 bytes)"; decimal units."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit} ({count:,} bytes)"
