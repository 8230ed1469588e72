"""What pages, docstrings and messages show: fenced blocks, code between backticks, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "packages/*/README.md", "benchmarks/*.md", "docs/**/*.md")
    for page in ROOT.glob(pattern)
    if not any(part.startswith("_") for part in page.relative_to(ROOT).parts)
)
SOURCES = [*sorted(ROOT.glob("packages/*/src/**/*.py")), *sorted(ROOT.glob("tools/*.py")), ROOT / "noxfile.py"]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)  # tables that a program writes
SHELL = ("", "sh", "bash")
OF_THE_GUIDE = "squared_relu"  # an op that test_adding_an_op adds to a copy, with the commands that name it


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages; "" is a fence without one."""
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def spans(text: str) -> list[str]:
    """Code between backticks, outside of fences."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def lines() -> dict[str, str]:
    """Lines of shell blocks, with those that they go on in, and code between backticks of pages and sources; of each
    the first place.
    """
    found: dict[str, str] = {}
    for page in PAGES:
        if page.name != "CHANGELOG.md":  # it tells of what was
            shown = [line for block in blocks(page, *SHELL) for line in block.replace("\\\n", " ").splitlines()]
            for line in (*shown, *spans(page.read_text())):
                found.setdefault(" ".join(re.sub(r"(^| +)#.*", "", line).split()), name(page))
    for source in SOURCES:
        for span in re.findall(r"`([^`]+)`", source.read_text()):
            found.setdefault(" ".join(span.split()), name(source))
    return {line: place for line, place in found.items() if OF_THE_GUIDE not in line}


class Table(NamedTuple):
    page: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, title: str) -> list[str]:
        return [row[self.head.index(title)] for row in self.rows]


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def tables(page: Path) -> Iterator[Table]:
    """The tables of a page that are written by hand."""
    text = MARKED.sub("", FENCE.sub("", page.read_text()))
    for found in re.findall(r"^(?:\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = found.splitlines()
        yield Table(name(page), _cells(head), tuple(map(_cells, rows)))
