"""Draws the charts of the README and of docs/performance, and fills their tables, from benchmarks/results.

`nox -s charts`, or `python docs/charts.py` where matplotlib is installed. Each SVG carries the numbers that it shows in
its description, so a test compares it with the data without drawing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import results  # noqa: E402
from results import Result  # noqa: E402

FOLDER = HERE / "images"
WIDTH = 4.8  # inches; 346 points, about the width of a phone, so that text there keeps its size
FASTER, EQUAL, SLOWER, RULE, TEXT = "#1f6fb4", "#8a8f98", "#d1670c", "#c9ced6", "#24292f"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fi",  # the same file for the same data
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": RULE,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


def colour(speedup: float) -> str:
    if speedup > 1 + results.SAME:
        return FASTER
    return SLOWER if speedup < 1 / (1 + results.SAME) else EQUAL


def shown(found: Sequence[Result]) -> str:
    """The numbers of a chart as text: its description, and what a test compares."""
    return "; ".join(f"{result.case}: {result.speedup:.2f}x" for result in found)


def _figure(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update(STYLE)
    return plt.subplots(figsize=(WIDTH, height), layout="constrained")


def _ticks(axis: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    every = (
        [0.6, 0.8, 1, 1.2, 1.4, 1.7, 2]
        if high / low < 2.7
        else [0.5, 0.7, 1, 1.4, 2, 3]
        if high / low < 6
        else [1, 2, 5, 10, 20]
    )
    ticks = [tick for tick in every if low <= tick <= high]
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.tick_params(length=0)


def _titles(figure: Any, title: str, label: str) -> None:
    """Over and below the whole figure, which is wider than its axis."""
    figure.suptitle(title, fontweight="bold", fontsize=10.5)
    figure.supxlabel(label, fontsize=9)


def bars(path: Path, title: str, found: Sequence[Result], label: str) -> None:
    """One bar a case, from 1x to the speedup on a logarithmic axis."""
    figure, axis = _figure(0.9 + 0.235 * len(found))
    speedups = [result.speedup for result in found]
    low, high = min(0.88, min(speedups) * 0.88), max(1.25, max(speedups) * 1.22)
    _ticks(axis, low, high)
    axis.barh(range(len(found)), [s - 1 for s in speedups], left=1, height=0.66, color=[colour(s) for s in speedups])
    axis.axvline(1, color=TEXT, linewidth=0.9)
    for y, speedup in enumerate(speedups):
        end = (max(speedup, 1), y)  # beside the bar, where no name of a case stands
        axis.annotate(f"{speedup:.2f}x", end, (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(found)), [result.case for result in found])
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.set_xlim(low, high)
    _titles(figure, title, label)
    _save(figure, path, title, shown(found))


def strips(path: Path, title: str, families: Sequence[results.Family], label: str) -> None:
    """One row a family, one dot a case."""
    figure, axis = _figure(0.95 + 0.42 * len(families))
    every = [result.speedup for family in families for result in family.results]
    low, high = min(every) * 0.92, max(every) * 1.1
    _ticks(axis, low, high)
    axis.axvline(1, color=TEXT, linewidth=0.9)
    for y, family in enumerate(families):
        speedups = sorted(result.speedup for result in family.results)
        axis.axhline(y, color=RULE, linewidth=0.6, zorder=0)
        heights = [y + (index % 5 - 2) * 0.085 for index in range(len(speedups))]
        axis.scatter(speedups, heights, s=15, c=[colour(s) for s in speedups], alpha=0.75, linewidths=0)
        axis.plot([results.geometric(family.results)] * 2, [y - 0.32, y + 0.32], color=TEXT, linewidth=2.2)
    axis.set_yticks(range(len(families)), [f"{f.name.replace('`', '')} ({len(f.results)})" for f in families])
    axis.set_ylim(len(families) - 0.4, -0.6)
    axis.set_xlim(low, high)
    _titles(figure, title, label)
    _save(figure, path, title, shown_families(families))


def shown_families(families: Sequence[results.Family]) -> str:
    return "; ".join(f"{f.name} ({len(f.results)}): {results.geometric(f.results):.2f}x" for f in families)


def _save(figure: Any, path: Path, title: str, description: str) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(exist_ok=True)
    metadata = {"Date": None, "Creator": None, "Title": title, "Description": description}
    figure.savefig(path, format="svg", metadata=metadata, facecolor="white")
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


AXIS = "speedup over the fastest peer; above 1x fi is faster"


def _topk() -> list[Result]:
    return [r for r in results.topk() if "x131072 " in r.case and not r.case.endswith("k64")]


def _timers() -> list[Result]:
    """The time of plain events over that of CUPTI."""
    return [Result(row["case"], row["cupti"], {"events": row["events"]}) for row in results.rows("timers")]


# File -> (title, what it shows, label of the axis).
CHARTS: dict[str, tuple[str, Callable[[], list[Result]], str]] = {
    "decode": ("Batch decode, H200", results.decode, AXIS),
    "prefill": ("Batch prefill, H200", lambda: results.prefill() + results.prefill_fp8(), AXIS),
    "prefill-mma": ("Batch prefill, mma.sync kernels, H200", results.prefill_mma, "speedup over FlashInfer fa2"),
    "sampling": ("Sampling, H200", results.sampling, "speedup over FlashInfer"),
    "topk": ("Top-k of 131072, unsorted, H200", _topk, "speedup over torch.topk"),
    "elementwise": ("Norm, activation, rope, page, H200", results.elementwise, "speedup over FlashInfer"),
    "custom-attention": ("Attention variants, H200", results.custom_attention, "time of the built-in kernel / variant"),
    "timers": ("Timer events beside CUPTI, H200", _timers, "time by events / time by CUPTI"),
}
OVERVIEW = "h200"


def descriptions() -> dict[str, str]:
    """What each SVG must say, by file name."""
    found = {name: shown(source()) for name, (_, source, _) in CHARTS.items()}
    return {OVERVIEW: shown_families(results.families()), **found}


def main() -> None:
    strips(FOLDER / f"{OVERVIEW}.svg", "H200: one dot a case, bar at the geometric mean", results.families(), AXIS)
    for name, (title, source, label) in CHARTS.items():
        bars(FOLDER / f"{name}.svg", title, source(), label)
    for page in results.pages():
        page.write_text(results.filled(page.read_text()))


if __name__ == "__main__":
    main()
