"""Charts as numbers: scales, ticks and places of marks. The template `charts.html.j2` draws them as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WIDTH, HEIGHT = 460, 300
WIDE, TALL = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 30, 44
_CHARACTER, _GAP = 7.5, 10.0  # of a tick label


class Point(NamedTuple):
    """A mark; low and high are the ends of its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


class Series(NamedTuple):
    """One line, or one cloud of points; `colour` is the number of a CSS class."""

    name: str
    points: tuple[Point, ...]
    colour: int
    line: bool = True


class Roof(NamedTuple):
    """Measured ceilings: memory in TB/s and arithmetic in TFLOP/s."""

    memory: float
    arithmetic: float

    def __call__(self, intensity: float) -> float:
        return min(self.memory * intensity, self.arithmetic)


class Axis:
    """A logarithmic or linear axis over the values that it must show, with its ticks."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool = True, zero: bool = False) -> None:
        self.log = log and min(values) > 0
        small, large = min(values), max(values)
        if self.log:
            small, large = math.log10(small), math.log10(large)
            pad = max((large - small) * 0.06, 0.05)
            small, large = small - pad, large + pad
        else:
            small, large = (0.0 if zero else small), large * 1.08 or 1.0
        self.small, self.large, self.low, self.high = small, large, low, high

    def __call__(self, value: float) -> float:
        v = math.log10(value) if self.log else value
        return self.low + (v - self.small) / ((self.large - self.small) or 1) * (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice((self.large - self.small) / 5)
            first = math.ceil(self.small / step)
            return [step * i for i in range(first, int(self.large / step) + 1)]
        decades = range(math.floor(self.small), math.ceil(self.large) + 1)
        for mantissas in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
            found = [m * 10.0**d for d in decades for m in mantissas]
            found = [v for v in found if self.small <= math.log10(v) <= self.large]
            if len(found) >= 3:
                return found
        return found


def _nice(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(m * size for m in (1.0, 2.0, 5.0, 10.0) if m * size >= step)


def short(value: float) -> str:
    """A tick in few characters: 4096 as 4096, 0.00025 as 2.5e-4."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.6g}" if abs(value) >= 1000 else f"{value:.4g}"


class Tick(NamedTuple):
    at: float
    label: str


class Mark(NamedTuple):
    """One point of a series; its shape is `colour` modulo 4, so that series differ without colour too."""

    colour: int
    x: float
    y: float
    title: str
    whisker: tuple[float, float] | None = None


class Path(NamedTuple):
    css: str
    points: str


class Label(NamedTuple):
    x: float
    y: float
    anchor: str
    text: str
    degrees: float = 0.0


@dataclass
class Chart:
    """What the template draws, in units of the view box."""

    width: int
    height: int
    title: str
    x_name: str
    y_name: str
    rows: list[Tick]
    columns: list[Tick]
    paths: list[Path] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    legend: list[tuple[int, str]] = field(default_factory=list)

    left, right, top = LEFT, RIGHT, TOP

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM


def _spread(ticks: Sequence[Tick]) -> list[Tick]:
    """The ticks whose labels do not touch the one before."""
    kept: list[Tick] = []
    for tick in ticks:
        need = _CHARACTER * (len(tick.label) + len(kept[-1].label)) / 2 + _GAP if kept else 0.0
        if not kept or tick.at - kept[-1].at >= need:
            kept.append(tick)
    return kept


def _framed(title: str, x: Axis, y: Axis, names: tuple[str, str], size: tuple[int, int], at: Sequence[float]) -> Chart:
    rows = [Tick(y(v), short(v)) for v in y.ticks()]
    return Chart(*size, title, *names, rows, _spread([Tick(x(v), short(v)) for v in at]))


def _path(css: str, spots: Sequence[tuple[float, float]]) -> Path:
    return Path(css, " ".join(f"{a:.1f},{b:.1f}" for a, b in spots))


def _add(chart: Chart, series: Sequence[Series], x: Axis, y: Axis) -> None:
    for s in series:
        if s.line and len(s.points) > 1:
            chart.paths.append(_path(f"line c{s.colour}", [(x(p.x), y(p.y)) for p in s.points]))
        for p in s.points:
            ends = (y(p.low), y(p.high)) if p.low and p.high else None
            whisker = ends if ends and abs(ends[0] - ends[1]) > 2 else None
            title = p.title or f"{s.name}: {short(p.x)}, {short(p.y)}"
            chart.marks.append(Mark(s.colour, x(p.x), y(p.y), title, whisker))
        chart.legend.append((s.colour, s.name))


def lines(series: Sequence[Series], x_name: str, y_name: str, zero: bool = False) -> Chart:
    """y over x, both logarithmic; with `zero` y is linear and starts at 0."""
    xs = [p.x for s in series for p in s.points]
    ys = [v for s in series for p in s.points for v in (p.y, p.low or p.y, p.high or p.y)]
    x, y = Axis(xs, LEFT, WIDTH - RIGHT), Axis(ys, HEIGHT - BOTTOM, TOP, log=not zero, zero=zero)
    points = sorted(set(xs))
    at = points if 1 < len(points) <= 8 else x.ticks()
    chart = _framed(f"{y_name} over {x_name}", x, y, (x_name, y_name), (WIDTH, HEIGHT), at)
    _add(chart, series, x, y)
    return chart


def roofline(series: Sequence[Series], roofs: Sequence[Roof]) -> Chart:
    """Achieved TFLOP/s over FLOP per byte under the measured ceilings, if they are known; roofs share the memory."""
    xs = [p.x for s in series for p in s.points]
    ridges = [roof.arithmetic / roof.memory for roof in roofs]
    small, large = min([*xs, *(r / 2 for r in ridges)]) / 2, max([*xs, *(2 * r for r in ridges)]) * 2
    ys = [p.y for s in series for p in s.points] + [roof(v) for roof in roofs for v in (small, large)]
    x, y = Axis([small, large], LEFT, WIDE - RIGHT), Axis(ys, TALL - BOTTOM, TOP)
    chart = _framed("roofline", x, y, ("FLOP per byte", "TFLOP/s"), (WIDE, TALL), x.ticks())
    for roof, ridge in zip(roofs, ridges, strict=True):
        chart.paths.append(_path("roof", [(x(v), y(roof(v))) for v in (small, ridge, large)]))
        chart.labels.append(Label(x(large), y(roof.arithmetic) + 14, "end", f"{roof.arithmetic:.4g} TFLOP/s"))
    if roofs:
        roof, ridge = roofs[0], ridges[0]
        steep = math.degrees(math.atan2(y(roof(ridge)) - y(roof(small)), x(ridge) - x(small)))
        middle = (small * ridge) ** 0.5
        chart.labels.append(Label(x(middle), y(roof(middle)) - 8, "middle", f"{roof.memory:.3g} TB/s", steep))
    _add(chart, series, x, y)
    return chart


class Bar(NamedTuple):
    """A ratio: its place on a track whose middle is 1, in percent, and how strongly it is coloured."""

    left: float
    width: float
    kind: str


# A ratio, or its inverse, takes the next shade from each limit on; below the first limit it counts as equal.
_SHADES = (1.02, 1.25, 2.0, 10.0)


def shade(ratio: float) -> str:
    """`same`, or slow1 ... slow4 and fast1 ... fast4."""
    steps = sum(max(ratio, 1 / ratio) >= limit for limit in _SHADES)
    return f"{'fast' if ratio > 1 else 'slow'}{steps}" if steps else "same"


def bar(ratio: float, largest: float) -> Bar:
    """`largest` is the farthest from 1 of all ratios of the page; it takes half of the track."""
    reach = math.log(max(largest, 1 / largest, 1.25))
    length = min(abs(math.log(ratio)) / reach, 1.0) * 50
    return Bar(50.0 if ratio >= 1 else 50.0 - length, max(length, 0.5), shade(ratio))
