"""The lines of the command: results on stdout in the seeds' format, progress and usage errors on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from fi_core.env import env

_COLOURS = {"PERF": "32", "WARNING": "33", "ERROR": "31"}


def coloured(stream: TextIO) -> bool:
    """NO_COLOR and TERM=dumb switch colour off, FORCE_COLOR on; else a terminal decides."""
    if env.no_color or env.term == "dumb":
        return False
    return env.force_color or stream.isatty()


def say(kind: str, text: str) -> None:
    """`[KIND] text` on stdout."""
    tag = f"[{kind}]"
    if kind in _COLOURS and coloured(sys.stdout):
        tag = f"\x1b[{_COLOURS[kind]}m{tag}\x1b[0m"
    print(f"{tag} {text}", flush=True)


def complain(text: str) -> None:
    """One line on stderr for what the user typed."""
    print(f"[ERROR] fi-bench: {' '.join(text.split())}", file=sys.stderr, flush=True)


def perf(backend: str, median_ms: float, std_ms: float, tflops: float, tb_per_sec: float) -> None:
    say(
        "PERF",
        f"{backend.ljust(15)}:: median time {median_ms:.3f} ms; std {std_ms:.3f} ms; "
        f"achieved tflops {tflops:.3f} TFLOPs/sec; achieved tb_per_sec {tb_per_sec:.3f} TB/sec",
    )


@dataclass
class Log:
    """Lines of one verbosity."""

    verbose: int = 0

    def info(self, text: str) -> None:
        if self.verbose >= 1:
            say("INFO", text)

    def lengths(self, text: str) -> None:
        if self.verbose >= 1:
            say("VERBOSE", text)

    def detail(self, name: str, value: object) -> None:
        if self.verbose >= 2:
            say("VVERBOSE", f"{name} = {value}")


def human_time(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.4g} {unit}"
    return f"{ns:.4g} ns"


@dataclass
class Progress:
    """`[3/192] rmsnorm cpu, 41 s left` on stderr: rewritten in place on a terminal, absent elsewhere."""

    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    live: bool = field(default_factory=lambda: sys.stderr.isatty() and env.term != "dumb")

    def step(self, what: str) -> None:
        if self.live and self.total > 1:
            left = (time.monotonic() - self.started) / self.done * (self.total - self.done) if self.done else None
            eta = f", {left:.0f} s left" if left is not None else ""
            print(f"\r\x1b[K[{self.done + 1}/{self.total}] {what}{eta}", end="", file=sys.stderr, flush=True)
        self.done += 1

    def clear(self) -> None:
        if self.live and self.total > 1:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]], format: str, write: Callable[[str], object] = print) -> None:
    """The rows as a table of the asked format; all have the same names."""
    if not rows:
        return
    names = list(rows[0])
    cells = [[str(row[name]) for name in names] for row in rows]
    if format == "markdown":
        write("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for line in cells:
            write("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
        return
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in [names, ["-" * w for w in widths], *cells]:
        write("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
