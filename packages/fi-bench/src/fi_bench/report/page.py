"""`fi-bench report`: one self-contained HTML file with tables, roofline, sweeps and speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fi_bench import calibrate, record
from fi_bench.calibrate import Ceilings
from fi_bench.console import human_time, say
from fi_bench.errors import OK, UsageError
from fi_bench.parsing import Parser, underscored
from fi_bench.report import svg
from fi_bench.summary import describe

Record = record.Record
_COLOURS = 8

_STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1b1f24; --dim: #59636e; --grid: #d8dee4; --head: #f3f5f7;
  --c0: #1f6feb; --c1: #d1570a; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989; --c5: #0a7ea4; --c6: #9a6700;
  --c7: #57606a;
  --bad: #c21f2d; --ok: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --bg: #0f1318; --fg: #e6eaef; --dim: #9aa4af; --grid: #2c343d;
  --head: #1a2027; --c0: #58a6ff; --c1: #f0883e; --c2: #56d364; --c3: #bc8cff; --c4: #f778ba; --c5: #56c8d8;
  --c6: #e3b341; --c7: #adb6c0; --bad: #ff7b72; --ok: #56d364; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 90rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: .4rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--grid); text-align: left; white-space: nowrap; }
th { background: var(--head); } td.n { text-align: right; } td.case { white-space: normal; min-width: 14rem; }
.scroll { overflow-x: auto; } .bad { color: var(--bad); } .ok { color: var(--ok); } .dim { color: var(--dim); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; } svg { width: 100%; max-width: 46rem; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--fg); }
svg .name { fill: var(--dim); } .grid { stroke: var(--grid); } .line { fill: none; stroke-width: 2; }
.roof { fill: none; stroke: var(--dim); stroke-dasharray: 6 4; stroke-width: 2; } .one { stroke: var(--fg); }
""" + "".join(
    f".line.c{i} {{ stroke: var(--c{i}) }} .dot.c{i}, .bar.c{i} {{ fill: var(--c{i}) }}\n" for i in range(_COLOURS)
)


class Row:
    """All processes of one case and backend, as the page shows it."""

    def __init__(self, group: Sequence[Record], ceilings: dict[str, Ceilings]) -> None:
        self.first = first = group[0]
        self.routine, self.backend, self.params = first["routine"], first["backend"], first["params"]
        self.case, self.case_key = describe(first), first["case_key"]
        self.ns = statistics.median(r["stats"]["median"] for r in group)
        self.low = min(r["stats"]["ci_low"] for r in group)
        self.high = max(r["stats"]["ci_high"] for r in group)
        self.processes = len(group)
        work = first["work"]
        self.flops, self.bytes = work["flops"], work["bytes"]
        self.ceiling = ceilings.get(calibrate.machine(first["env"], first["device"]))
        limit = self.ceiling.seconds(self.flops, self.bytes) if self.ceiling else None
        self.of_limit = 100 * limit / (self.ns / 1e9) if limit else None


def group_rows(records: Iterable[Record], ceilings: dict[str, Ceilings]) -> list[Row]:
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for r in records:
        if r.get("stats"):
            groups.setdefault((r["routine"], r["case_key"], r["backend"]), []).append(r)
    return [Row(group, ceilings) for group in groups.values()]


def html(records: Sequence[Record], ceilings: dict[str, Ceilings], baseline: str | None, title: str) -> str:
    """The whole page."""
    rows = group_rows(records, ceilings)
    colours = {name: i % _COLOURS for i, name in enumerate(dict.fromkeys(row.backend for row in rows))}
    parts = [f"<h1>{escape(title)}</h1>", _machines(records), "<h2>Results</h2>", _table(rows)]
    parts.append(_left_out(records))
    parts += _roofline(rows, colours)
    parts += _sweeps(rows, colours)
    if baseline is not None:
        parts += _speedups(rows, colours, baseline)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _machines(records: Sequence[Record]) -> str:
    seen: dict[str, None] = {}
    for r in records:
        e = r.get("env")
        if e:
            versions = f"fi-core {e['fi_core']}, torch {e['packages'].get('torch')}, CUDA {e['cuda'] or '-'}"
            where = (
                f"{e['gpu']}, driver {e['driver']}" if r["device"] == "cuda" else f"{e['cpu']}, {e['threads']} threads"
            )
            seen[f"{where}; {versions}; commit {e['commit'] or '-'}"] = None
    return "".join(f'<p class="dim">{escape(line)}</p>' for line in seen)


def _cell(value: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(value)}</td>' if kind else f"<td>{escape(value)}</td>"


def _table(rows: Sequence[Row]) -> str:
    names = ("routine", "case", "backend", "median", "95% interval", "TB/s", "TFLOP/s", "% of limit", "processes",
             "timer", "cache", "SM MHz", "check")  # fmt: skip
    lines = []
    for row in rows:
        r = row.first
        status = r.get("refcheck", {}).get("status", "-")
        rate = 1e9 / row.ns / 1e12
        clock = r["clocks"].get("sm_mhz_mean")
        cells = [
            _cell(row.routine),
            _cell(row.case, "case"),
            _cell(row.backend),
            _cell(human_time(row.ns), "n"),
            _cell(f"{human_time(row.low)} .. {human_time(row.high)}", "n"),
            _cell(f"{row.bytes * rate:.3f}", "n"),
            _cell(f"{row.flops * rate:.3f}", "n"),
            _cell(f"{row.of_limit:.0f}" if row.of_limit else "-", "n"),
            _cell(str(row.processes), "n"),
            _cell(r["timer"]),
            _cell(f"{r['cache_state']} ({r['cache']['how']})"),
            _cell(f"{clock:.0f}" if clock else "-", "n"),
            _cell(status, {"ok": "ok", "mismatch": "bad"}.get(status, "dim")),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _left_out(records: Sequence[Record]) -> str:
    """Rows without a time, with their reason: a gap in a table is never silent."""
    rows = {
        (r["routine"], describe(r), r["backend"], r["status"], r.get("reason", "")): None
        for r in records
        if not r.get("stats")
    }
    if not rows:
        return ""
    lines = "".join(f"<tr>{''.join(_cell(str(cell)) for cell in row)}</tr>" for row in rows)
    return f'<h2>Not measured</h2><div class="scroll"><table><tbody>{lines}</tbody></table></div>'


def _figure(title: str, drawing: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{drawing}</figure>"


def _roofline(rows: Sequence[Row], colours: dict[str, int]) -> Iterator[str]:
    with_work = [row for row in rows if row.flops and row.bytes]
    if not with_work:
        return
    yield "<h2>Roofline</h2>"
    ceilings = {row.ceiling for row in with_work if row.ceiling}
    if not ceilings:
        yield '<p class="dim">No ceilings of this machine are known: <code>fi-bench calibrate</code> measures them.</p>'
    top = ceilings.pop() if len(ceilings) == 1 else None
    series = [
        svg.Series(
            name,
            tuple((row.flops / row.bytes, row.flops / row.ns / 1e3) for row in with_work if row.backend == name),
            colour,
            line=False,
            titles=tuple(f"{row.routine} {row.case}: {human_time(row.ns)}" for row in with_work if row.backend == name),
        )
        for name, colour in colours.items()
        if any(row.backend == name for row in with_work)
    ]
    roof = (lambda x: min(top.copy * x, top.matmul) / 1e12) if top else None
    title = "achieved, against the measured ceilings" if top else "achieved"
    yield f'<div class="charts">{_figure(title, svg.roofline(series, roof))}</div>'


def axis_of(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(axis, what is fixed, rows) wherever one number varies over at least two values and all else stays."""
    found = []
    numbers = sorted(
        {name for row in rows for name, v in row.params.items() if type(v) is int and name != "random_seed"}
    )
    for axis in numbers:
        families: dict[str, list[Row]] = {}
        for row in rows:
            if axis not in row.params:
                continue
            rest = {name: v for name, v in row.params.items() if name != axis}
            families.setdefault(f"{row.routine} {sorted(rest.items(), key=str)}", []).append(row)
        for members in families.values():
            if len({row.params[axis] for row in members}) > 1:
                fixed = " ".join(w for w in members[0].case.split() if not w.startswith(f"{axis}="))
                found.append((axis, f"{members[0].routine} {fixed}", members))
    return found


def _sweeps(rows: Sequence[Row], colours: dict[str, int]) -> Iterator[str]:
    charts = []
    for axis, fixed, members in axis_of(rows):
        for name, value in (("time, us", lambda row: row.ns / 1e3), ("% of limit", lambda row: row.of_limit)):
            series = []
            for backend, colour in colours.items():
                mine = [row for row in members if row.backend == backend and value(row)]
                points = sorted((float(row.params[axis]), float(value(row))) for row in mine)
                if points:
                    series.append(svg.Series(backend, tuple(points), colour))
            if series:
                charts.append(_figure(fixed, svg.lines(series, axis, name, zero=name.startswith("%"))))
    if charts:
        yield f'<h2>Along an axis</h2><div class="charts">{"".join(charts)}</div>'


def _speedups(rows: Sequence[Row], colours: dict[str, int], baseline: str) -> Iterator[str]:
    base = {row.case_key: row.ns for row in rows if row.backend == baseline}
    if not base:
        raise UsageError(f"--baseline {baseline}: no row has this backend; there are {', '.join(colours)}")
    found = [
        (f"{row.routine} {row.case} · {row.backend}", base[row.case_key] / row.ns, colours[row.backend])
        for row in rows
        if row.backend != baseline and row.case_key in base
    ]
    if found:
        yield f"<h2>Speed-up over {escape(baseline)}</h2>"
        yield svg.bars(found, f"times as fast as {baseline}; right of the line is faster")


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench report", description="One self-contained HTML file from results.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="result files (.jsonl or .csv)")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    parser.add_argument("--baseline", metavar="BACKEND", help="draw speed-ups over this backend")
    parser.add_argument("--title", default="fi-bench report")
    parser.add_argument("--ceilings", type=Path, help="file of `fi-bench calibrate` (default: the kept ones)")
    args = parser.parse_args(underscored(words))
    records: list[Any] = [r for file in args.files for r in record.read(file)]
    if not any(r.get("stats") for r in records):
        raise UsageError(f"{', '.join(args.files)}: no measured row")
    text = html(records, calibrate.load(args.ceilings), args.baseline, args.title)
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {args.output}: cannot be written ({error.strerror})") from None
    say("INFO", f"{args.output}: {len(text) / 1024:.0f} KiB")
    return OK
