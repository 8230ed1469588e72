"""Charts as inline SVG text: lines on logarithmic axes, a roofline, and bars. Colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

HEIGHT, NARROW, WIDE = 340, 640, 1120
LEFT, RIGHT, TOP, BOTTOM = 62, 128, 14, 46
_LINE = 16  # between labels


class Point(NamedTuple):
    """A mark; low and high are the ends of its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


class Series(NamedTuple):
    """One line or cloud of points; `colour` is the number of a CSS class."""

    name: str
    points: tuple[Point, ...]
    colour: int
    line: bool = True


class Roof(NamedTuple):
    """Measured ceilings: of memory in TB/s and of arithmetic in TFLOP/s."""

    memory: float
    arithmetic: float

    def __call__(self, intensity: float) -> float:
        return min(self.memory * intensity, self.arithmetic)


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
    return f"{value:.6g}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def _rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(title: str, parts: Sequence[str], width: float, height: float = HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
    return head + "".join(parts) + "</svg>"


def _mark(kind: int, x: float, y: float, title: str) -> str:
    """Circle, square, triangle or diamond: series differ without colour too."""
    r, css = 4.5, f'class="mark c{kind}"'
    tip = f"<title>{escape(title)}</title>"
    if kind % 4 == 0:
        return f'<circle {css} cx="{x:.1f}" cy="{y:.1f}" r="{r}">{tip}</circle>'
    if kind % 4 == 1:
        return f'<rect {css} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{tip}</rect>'
    corners = {2: ((0, -r - 0.5), (r + 0.5, r), (-r - 0.5, r)), 3: ((0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0))}
    path = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners[kind % 4])
    return f'<polygon {css} points="{path}">{tip}</polygon>'


def _frame(x: Axis, y: Axis, x_name: str, y_name: str, x_ticks: Sequence[float] | None = None) -> list[str]:
    parts = []
    bottom, right = y.low, x.high
    for tick in y.ticks():
        parts.append(_rule("grid", LEFT, y(tick), right, y(tick)))
        parts.append(_text(LEFT - 7, y(tick) + 4, short(tick), "end", 'class="tick"'))
    for tick in x.ticks() if x_ticks is None else x_ticks:
        parts.append(_rule("axis", x(tick), bottom, x(tick), bottom + 4))
        parts.append(_text(x(tick), bottom + 17, short(tick), extra='class="tick"'))
    parts.append(_rule("axis", LEFT, bottom, right, bottom))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, x_name, extra='class="name"'))
    up = (TOP + bottom) / 2
    parts.append(_text(13, up, y_name, extra=f'class="name" transform="rotate(-90 13 {up:.1f})"'))
    return parts


def _apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in their order, a label apart and inside."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    for before, i in zip([None, *order], order, strict=False):
        found[i] = max(found[i], low if before is None else found[before] + _LINE)
    limit = high
    for i in reversed(order):
        found[i] = min(found[i], limit)
        limit = found[i] - _LINE
    return found


def _draw(series: Sequence[Series], x: Axis, y: Axis) -> list[str]:
    parts = []
    for s in series:
        spots = [(x(p.x), y(p.y)) for p in s.points]
        for p, (a, _) in zip(s.points, spots, strict=True):
            if p.low and p.high and abs(y(p.low) - y(p.high)) > 2:
                parts.append(_rule(f"whisker c{s.colour}", a, y(p.low), a, y(p.high)))
        if s.line and len(spots) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
            parts.append(f'<polyline class="line c{s.colour}" points="{path}"/>')
        for p, (a, b) in zip(s.points, spots, strict=True):
            parts.append(_mark(s.colour, a, b, p.title or f"{s.name}: {short(p.x)}, {short(p.y)}"))
    return parts


def _labels(series: Sequence[Series], x: Axis, y: Axis) -> list[str]:
    """Names at the ends of their lines, drawn aside where those are close."""
    ends = [(x(s.points[-1].x), y(s.points[-1].y)) for s in series]
    heights = _apart([b for _, b in ends], TOP + 4, HEIGHT - BOTTOM - 4)
    parts, at = [], x.high + 14
    for s, (a, b), height in zip(series, ends, heights, strict=True):
        parts.append(_rule(f"lead c{s.colour}", a + 6, b, at - 4, height))
        parts.append(_text(at, height + 4, s.name, "start"))
    return parts


def _legend(series: Sequence[Series], at: float, top: float) -> list[str]:
    parts = []
    for i, s in enumerate(series):
        parts.append(_mark(s.colour, at, top + 20 * i, s.name))
        parts.append(_text(at + 12, top + 4 + 20 * i, s.name, "start"))
    return parts


def lines(series: Sequence[Series], x_name: str, y_name: str, zero: bool = False) -> str:
    """y over x, both logarithmic; with `zero` y is linear and starts at 0."""
    xs = [p.x for s in series for p in s.points]
    ys = [v for s in series for p in s.points for v in (p.y, p.low or p.y, p.high or p.y)]
    x, y = Axis(xs, LEFT, NARROW - RIGHT), Axis(ys, HEIGHT - BOTTOM, TOP, log=not zero, zero=zero)
    points = sorted(set(xs))
    ticks = points if 1 < len(points) <= 8 else None
    parts = [*_frame(x, y, x_name, y_name, ticks), *_draw(series, x, y), *_labels(series, x, y)]
    return _svg(f"{y_name} over {x_name}", parts, NARROW)


def roofline(series: Sequence[Series], roofs: Sequence[Roof]) -> str:
    """Achieved TFLOP/s over FLOP per byte under the measured ceilings, if they are known; they share their memory."""
    xs = [p.x for s in series for p in s.points]
    ridges = [roof.arithmetic / roof.memory for roof in roofs]
    small, large = min([*xs, *(r / 2 for r in ridges)]) / 2, max([*xs, *(2 * r for r in ridges)]) * 2
    ys = [p.y for s in series for p in s.points] + [roof(v) for roof in roofs for v in (small, large)]
    x, y = Axis([small, large], LEFT, WIDE - RIGHT), Axis(ys, HEIGHT - BOTTOM, TOP)
    parts = _frame(x, y, "FLOP per byte", "TFLOP/s")
    for roof, ridge in zip(roofs, ridges, strict=True):
        path = " ".join(f"{x(v):.1f},{y(roof(v)):.1f}" for v in (small, ridge, large))
        parts.append(f'<polyline class="roof" points="{path}"/>')
        parts.append(
            _text(x(large) + 6, y(roof.arithmetic) + 4, f"{roof.arithmetic:.4g} TFLOP/s", "start", 'class="tick"')
        )
    if roofs:
        roof, ridge = roofs[0], ridges[0]
        steep = math.degrees(math.atan2(y(roof(ridge)) - y(roof(small)), x(ridge) - x(small)))
        middle = (small * ridge) ** 0.5
        a, b = x(middle), y(roof(middle)) - 8
        turn = f'class="tick" transform="rotate({steep:.1f} {a:.1f} {b:.1f})"'
        parts.append(_text(a, b, f"{roof.memory:.3g} TB/s", extra=turn))
    return _svg("roofline", [*parts, *_draw(series, x, y), *_legend(series, x.high + 20, TOP + 60)], WIDE)


class Bar(NamedTuple):
    label: str
    value: float
    colour: int
    name: str


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], name: str) -> str:
    """Ratios as bars from the line at 1, on a logarithmic axis: to the right is faster."""
    width, step, left, right, head = WIDE, 22, 330, 170, 28
    values = [bar.value for _, group in groups for bar in group]
    height = TOP + sum(head + step * len(group) for _, group in groups) + 40
    x = Axis([*values, 0.8, 1.25], left, width - right)
    bottom = height - 40
    ticks = [
        v
        for v in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
        if left <= x(v) <= width - right
    ]
    parts = [_text(x(tick), bottom + 16, f"{short(tick)}x", extra='class="tick"') for tick in ticks]
    at = float(TOP)
    for title, group in groups:
        parts.append(_text(0, at + 17, title, "start", 'class="group"'))
        at += head
        parts += [_rule("one" if tick == 1 else "grid", x(tick), at, x(tick), at + step * len(group)) for tick in ticks]
        before = None
        for bar in group:
            shown = bar.label if len(bar.label) <= 50 else "…" + bar.label[-49:]
            parts.append(_text(left - 10, at + 15, "" if bar.label == before else shown, "end"))
            before = bar.label
            a, b = sorted((x(1), x(bar.value)))
            box = f'x="{a:.1f}" y="{at + 4:.1f}" width="{max(b - a, 1.5):.1f}" height="{step - 8}" rx="2"'
            tip = f"<title>{escape(f'{title} {bar.label} {bar.name}: {bar.value:.3f}')}</title>"
            parts.append(f'<rect class="bar c{bar.colour}" {box}>{tip}</rect>')
            parts.append(_text(max(b, x(1)) + 7, at + 15, f"{bar.value:.2f}x {bar.name}", "start"))
            at += step
    parts.append(_text((left + width - right) / 2, height - 6, name, extra='class="name"'))
    return _svg(name, parts, width, height)
