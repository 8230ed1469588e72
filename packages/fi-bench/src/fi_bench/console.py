"""The output of the command: results on stdout in FlashInfer's format, progress and usage errors on stderr."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from fi_core.runtime.env import env

_COLOURS = {"PERF": "32", "WARNING": "33", "ERROR": "31"}
_STYLES = {
    "FASTER": "green",
    "SLOWER": "bold red",
    "AMBIGUOUS": "yellow",
    "ok": "green",
    "mismatch": "bold red",
    "failed": "bold red",
    "crashed": "bold red",
    "timeout": "bold red",
    "skipped": "dim",
    "-": "dim",
    "ready": "green",
}


def coloured(stream: TextIO) -> bool:
    """NO_COLOR and TERM=dumb switch colour off, FORCE_COLOR on; else a terminal decides."""
    if env.no_color or env.term == "dumb":
        return False
    return env.force_color or stream.isatty()


Say = Callable[[str, str], None]
_elsewhere: list[Say] = []  # the lines of a worker go to the process that prints them


def say(kind: str, text: str) -> None:
    """`[KIND] text` on stdout."""
    if _elsewhere:
        _elsewhere[-1](kind, text)
        return
    tag = f"[{kind}]"
    if kind in _COLOURS and coloured(sys.stdout):
        tag = f"\x1b[{_COLOURS[kind]}m{tag}\x1b[0m"
    with Progress.hidden():
        print(f"{tag} {text}", flush=True)


@contextlib.contextmanager
def said_to(listener: Say) -> Iterator[None]:
    """Inside the block, lines go to the listener."""
    _elsewhere.append(listener)
    try:
        yield
    finally:
        _elsewhere.pop()


def complain(text: str) -> None:
    """One line on stderr about a usage error."""
    print(f"[ERROR] fi-bench: {' '.join(text.split())}", file=sys.stderr, flush=True)


def figure(value: float) -> str:
    """Three decimals, as FlashInfer's benchmark prints; three significant digits if those would read 0.000."""
    digits = 3 if value >= 0.0005 or value <= 0 else 2 - math.floor(math.log10(value))
    return f"{value:.{digits}f}"


def perf(backend: str, median_ms: float, std_ms: float, tflops: float, tb_per_sec: float) -> None:
    say(
        "PERF",
        f"{backend.ljust(15)}:: median time {figure(median_ms)} ms; std {figure(std_ms)} ms; "
        f"achieved tflops {figure(tflops)} TFLOPs/sec; achieved tb_per_sec {figure(tb_per_sec)} TB/sec",
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


class Progress:
    """A bar with the time left, on stderr if that is a terminal. It is drawn at steps only: a thread that redraws it
    would disturb the measurement.
    """

    shown: Any = None  # the rich.progress.Progress on screen, if any

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if total > 1 and sys.stderr.isatty() and env.term != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (MofNCompleteColumn(), BarColumn(24), TimeRemainingColumn(), TextColumn("{task.description}"))
            screen = Console(stderr=True, no_color=not coloured(sys.stderr))
            self._bar = Bar(
                *columns,
                console=screen,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            Progress.shown = self._bar
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            Progress.shown = None
            self._bar.stop()

    def step(self, what: str) -> None:
        """Shows the task that starts."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, refresh=True)

    def done(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    @classmethod
    @contextlib.contextmanager
    def hidden(cls) -> Iterator[None]:
        """Clears the bar while a line is printed."""
        if cls.shown is None or not sys.stdout.isatty():
            yield
            return
        cls.shown.live.stop()
        yield
        cls.shown.live.start(refresh=True)


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
    if sys.stdout.isatty() and write is print:
        _rich_table(names, cells)
        return
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in [names, ["-" * w for w in widths], *cells]:
        write("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _rich_table(names: list[str], cells: list[list[str]]) -> None:
    """On a terminal: columns that shrink to its width, figures to the right, verdicts in colour."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for i, name in enumerate(names):
        figures = all(line[i][:1].isdigit() or line[i] in ("-", "") for line in cells)
        shown.add_column(name, justify="right" if figures else "left", overflow="fold")
    for line in cells:
        shown.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    Console(no_color=not coloured(sys.stdout), highlight=False).print(shown)
