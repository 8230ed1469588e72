"""The look of the report: colours in light and dark, type, tables and charts."""

from __future__ import annotations

COLOURS = 12  # series beyond these repeat them; their marks differ too

# Contrast of each series with its background is at least 3:1; neighbours differ in lightness as well as in hue.
_LIGHT = {
    "bg": "#fbfbfa", "card": "#ffffff", "fg": "#1c2127", "dim": "#5c6670", "line": "#e3e6e9", "grid": "#eceef0",
    "head": "#f4f5f6", "bad": "#c0262d", "good": "#15803d", "warn": "#9a5b00", "track": "#e9ecef",
    "c0": "#1d63d8", "c1": "#d9660b", "c2": "#14804a", "c3": "#8b46c9", "c4": "#c92a6b", "c5": "#0b7f95",
    "c6": "#8f6a00", "c7": "#5b6570", "c8": "#a14b1f", "c9": "#4a4fc4", "c10": "#5d8a00", "c11": "#b5179e",
}  # fmt: skip
_DARK = {
    "bg": "#0e1116", "card": "#151a21", "fg": "#e8ebee", "dim": "#9aa5b1", "line": "#2a323b", "grid": "#232a32",
    "head": "#1b2129", "bad": "#ff7b72", "good": "#56d364", "warn": "#e3b341", "track": "#2a323b",
    "c0": "#62a8ff", "c1": "#f5923f", "c2": "#4fce7b", "c3": "#c297ff", "c4": "#ff80b5", "c5": "#52cfe0",
    "c6": "#e0b62f", "c7": "#aab4be", "c8": "#e39a6d", "c9": "#9aa0ff", "c10": "#a8d43f", "c11": "#f38be8",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 2.2rem 1.4rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .8rem; } h3 { font-size: .95rem; margin: 0 0 .5rem; font-weight: 600; }
h2 .shared { color: var(--dim); font-size: .85rem; font-weight: 400; margin-left: .5rem; }
p { margin: .3rem 0; } code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace; }
.dim { color: var(--dim); } .bad { color: var(--bad); } .good { color: var(--good); } .warn { color: var(--warn); }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.3rem 0 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem 1.1rem;
  min-width: 9rem; }
.figures b { display: block; font-size: 1.45rem; line-height: 1.25; font-weight: 650; }
.figures span { color: var(--dim); font-size: .82rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem; margin: 0; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .7rem; text-align: left; white-space: nowrap; vertical-align: top; }
th { background: var(--head); color: var(--dim); font-weight: 600; border-bottom: 1px solid var(--line); }
td.case { white-space: normal; min-width: 11rem; max-width: 22rem; }
th.n, td.n { text-align: right; } tbody tr.first td { border-top: 1px solid var(--line); }
tbody tr:first-child td { border-top: 0; } td.best { font-weight: 650; } td.reason { white-space: normal; }
.meter { display: inline-block; width: 4.2rem; height: .5rem; border-radius: 3px; background: var(--track);
  margin-right: .5rem; vertical-align: .04rem; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--c0); }
.key { display: inline-block; width: .62rem; height: .62rem; border-radius: 2px; margin-right: .45rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem;
  margin-top: 1rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
svg text { fill: var(--fg); } svg .name, svg .tick { fill: var(--dim); } svg .group { font-weight: 600; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); } .one { stroke: var(--dim); }
.wide { overflow-x: auto; } .wide svg { min-width: 54rem; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .whisker { stroke-width: 1.5; opacity: .55; }
.roof { fill: none; stroke: var(--dim); stroke-width: 2; stroke-dasharray: 7 5; }
.mark { stroke: var(--card); stroke-width: 1; } .lead { stroke-width: 1; opacity: .5; }
@media print { body { background: none; } .card, .scroll { break-inside: avoid; } }
"""


def css() -> str:
    series = "".join(
        f".line.c{i}, .whisker.c{i}, .lead.c{i} {{ stroke: var(--c{i}) }} "
        f".mark.c{i}, .bar.c{i} {{ fill: var(--c{i}) }} .key.c{i} {{ background: var(--c{i}) }}\n"
        for i in range(COLOURS)
    )
    return (
        f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}\n{_RULES}{series}"
    )
