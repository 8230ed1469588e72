"""Charts as inline SVG text: lines on logarithmic axes, a roofline, and bars. Colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 16, 48


class Series(NamedTuple):
    """One line or cloud of points; `colour` is the number of a CSS class."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    line: bool = True
    titles: tuple[str, ...] = ()


class Axis:
    """A logarithmic or linear axis over what it must show, with its ticks."""

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
    return f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def _open(title: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'


def _frame(x: Axis, y: Axis, x_name: str, y_name: str, x_ticks: Sequence[float] | None = None) -> list[str]:
    parts = []
    for tick in x.ticks() if x_ticks is None else x_ticks:
        at = x(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 16, short(tick)))
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 6, at + 4, short(tick), "end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 10, x_name, extra='class="name"'))
    up = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(14, up, y_name, extra=f'class="name" transform="rotate(-90 14 {up:.1f})"'))
    return parts


def _draw(series: Sequence[Series], x: Axis, y: Axis) -> list[str]:
    parts = []
    for s in series:
        spots = [(x(a), y(b)) for a, b in s.points]
        if s.line and len(spots) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
            parts.append(f'<polyline class="line c{s.colour}" points="{path}"/>')
        for i, (a, b) in enumerate(spots):
            title = s.titles[i] if s.titles else f"{s.name}: {short(s.points[i][0])}, {short(s.points[i][1])}"
            tip = f"<title>{escape(title)}</title>"
            parts.append(f'<circle class="dot c{s.colour}" cx="{a:.1f}" cy="{b:.1f}" r="4">{tip}</circle>')
    for i, s in enumerate(series):
        at = TOP + 12 + 20 * i
        parts.append(f'<circle class="dot c{s.colour}" cx="{WIDTH - RIGHT + 16}" cy="{at - 4}" r="5"/>')
        parts.append(_text(WIDTH - RIGHT + 28, at, s.name, "start"))
    return parts


def lines(series: Sequence[Series], x_name: str, y_name: str, zero: bool = False) -> str:
    """y over x, both logarithmic; with `zero` y is linear and starts at 0."""
    xs = [a for s in series for a, _ in s.points]
    ys = [b for s in series for _, b in s.points]
    x, y = Axis(xs, LEFT, WIDTH - RIGHT), Axis(ys, HEIGHT - BOTTOM, TOP, log=not zero, zero=zero)
    points = sorted(set(xs))
    ticks = points if 1 < len(points) <= 8 else None
    parts = [*_frame(x, y, x_name, y_name, ticks), *_draw(series, x, y)]
    return _open(f"{y_name} over {x_name}", HEIGHT) + "".join(parts) + "</svg>"


def roofline(series: Sequence[Series], roof: Callable[[float], float] | None) -> str:
    """Achieved TFLOP/s over FLOP per byte; the roof is that of the measured ceilings, if they are known."""
    xs = [a for s in series for a, _ in s.points]
    span = (min(xs) / 2, max(xs) * 2)
    ys = [b for s in series for _, b in s.points] + ([roof(v) for v in span] if roof else [])
    x, y = Axis([*xs, *span], LEFT, WIDTH - RIGHT), Axis(ys, HEIGHT - BOTTOM, TOP)
    parts = _frame(x, y, "FLOP per byte", "TFLOP/s")
    if roof:
        steps = [span[0] * (span[1] / span[0]) ** (i / 60) for i in range(61)]
        path = " ".join(f"{x(v):.1f},{y(roof(v)):.1f}" for v in steps)
        parts.append(f'<polyline class="roof" points="{path}"/>')
    return _open("roofline", HEIGHT) + "".join([*parts, *_draw(series, x, y)]) + "</svg>"


def bars(rows: Sequence[tuple[str, float, int]], name: str) -> str:
    """Horizontal bars around 1: (label, value, colour)."""
    step, left, right = 24, 300, 70
    height = TOP + step * len(rows) + 36
    scale = (WIDTH - left - right) / max(*(v for _, v, _ in rows), 1.0)
    parts = []
    for i, (label, value, colour) in enumerate(rows):
        at = TOP + step * i
        shown = label if len(label) <= 44 else label[:43] + "…"
        parts.append(_text(left - 8, at + 15, shown, "end", f'data-full="{escape(label, quote=True)}"'))
        box = f'x="{left}" y="{at + 3}" width="{max(value * scale, 1):.1f}" height="{step - 7}"'
        parts.append(f'<rect class="bar c{colour}" {box}><title>{escape(label)}: {value:.3f}</title></rect>')
        parts.append(_text(left + value * scale + 6, at + 15, f"{value:.2f}x", "start"))
    one = left + scale
    bottom = TOP + step * len(rows)
    parts.append(f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 4}" y2="{bottom}"/>')
    parts.append(_text(left, bottom + 24, name, "start", 'class="name"'))
    return _open(name, height) + "".join(parts) + "</svg>"
