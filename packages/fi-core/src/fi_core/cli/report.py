"""The report of a command: data for --json, and the same as lines of text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fi_core.runtime.env import env

COLOURS = {"green": 32, "yellow": 33, "red": 31, "dim": 2}


class UsageError(Exception):
    """A command was called with invalid arguments; the text names the valid ones."""


class Report(NamedTuple):
    data: Any
    lines: Sequence[str]
    ok: bool = True


def paint(text: str, colour: str) -> str:
    """The text in a colour on a terminal, or if the user forces colours; else unchanged."""
    if env.no_color or env.term == "dumb" or not (env.force_color or sys.stdout.isatty()):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def section(title: str, rows: Iterable[tuple[str, object]]) -> list[str]:
    """`=== title ===` and a line for each row."""
    return [f"=== {title} ===", *(f"{name}: {value}" for name, value in rows), ""]


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(header), *(len(row[i]) for row in cells)) if cells else len(header) for i, header in enumerate(headers)
    ]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"

    return [line(list(headers)), line(["-" * width for width in widths]), *map(line, cells)]


def size(count: int) -> str:
    """Bytes in words: "12.3 kB"."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
