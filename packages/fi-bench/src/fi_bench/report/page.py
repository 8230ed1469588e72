"""`fi-bench report`: one self-contained HTML file with tables, roofline, sweeps and speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fi_bench import calibrate, record, stats
from fi_bench.calibrate import Ceilings
from fi_bench.console import human_time, say
from fi_bench.errors import OK, UsageError
from fi_bench.parsing import Parser, underscored
from fi_bench.report import svg
from fi_bench.report.style import COLOURS, css
from fi_bench.summary import describe

Record = record.Record
Colours = dict[str, int]


class Row:
    """All processes of one case and backend, as the page shows it."""

    def __init__(self, group: Sequence[Record], ceilings: dict[str, Ceilings]) -> None:
        self.first = first = group[0]
        self.routine, self.backend, self.params = first["routine"], first["backend"], first["params"]
        self.case, self.case_key = describe(first), first["case_key"]
        self.short = self.case  # without what all cases of the routine share
        self.ns = statistics.median(r["stats"]["median"] for r in group)
        self.low = min(r["stats"]["ci_low"] for r in group)
        self.high = max(r["stats"]["ci_high"] for r in group)
        self.processes = len(group)
        self.warnings = list(dict.fromkeys(w for r in group for w in r["warnings"]))
        work = first["work"]
        self.flops, self.bytes = work["flops"], work["bytes"]
        self.ceiling = ceilings.get(calibrate.machine(first["env"], first["device"]))
        self.unit = work.get("unit", "matmul")
        limit = self.ceiling.seconds(self.flops, self.bytes, self.unit) if self.ceiling else None
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
    shared = {routine: _shorten([row for row in rows if row.routine == routine]) for routine in _routines(rows)}
    colours = {name: i % COLOURS for i, name in enumerate(dict.fromkeys(row.backend for row in rows))}
    base = _baseline(rows, baseline) if baseline else {}
    parts = [f"<h1>{escape(title)}</h1>", _machines(records), _figures(rows, records, base, baseline)]
    if baseline:
        parts += _speedups(rows, colours, base, baseline, shared)
    parts += _roofline(rows, colours)
    for routine, words in shared.items():
        mine = [row for row in rows if row.routine == routine]
        parts.append(f'<h2>{escape(routine)} <span class="shared">{escape(words)}</span></h2>')
        parts += [_table(mine, colours, base, baseline), *_sweeps(mine, colours)]
    parts += [_left_out(records), _HOW_TO_READ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css()}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _routines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.routine for row in rows))


def _shorten(rows: Sequence[Row]) -> str:
    """Leaves each row of a routine the words in which its cases differ, none for one case, and returns the others."""
    differ = [
        name
        for name in rows[0].params
        if name != "random_seed" and len({str(row.params.get(name)) for row in rows}) > 1
    ]
    for row in rows:
        values = ((name, row.params.get(name)) for name in differ)
        row.short = " ".join(name if value is True else f"{name}={value}" for name, value in values)
    return " ".join(word for word in rows[0].case.split() if word.partition("=")[0] not in differ)


_HOW_TO_READ = """<h2>How to read this</h2><div class="dim">
<p>Times are medians over the samples of a process, and over processes where there are several; the interval is that
of order statistics at 95 %. TFLOP/s and TB/s are analytic counts over the median. The limit is the time that the
measured ceilings of this machine, of memory and of matrix products, allow for the work. A speed-up is the time of the
baseline over that of the row.</p>
<p>Differences below 2 % within one process are no differences: <code>fi-bench compare</code> judges several.</p></div>
"""


def _machines(records: Sequence[Record]) -> str:
    seen: dict[str, None] = {}
    for r in records:
        e = r.get("env")
        if e:
            versions = f"fi-core {e['fi_core']} · torch {e['packages'].get('torch')} · CUDA {e['cuda'] or '-'}"
            where = (
                f"{e['gpu']} · driver {e['driver']}" if r["device"] == "cuda" else f"{e['cpu']}, {e['threads']} threads"
            )
            commit = f" · commit {e['commit']}" if e["commit"] else ""
            seen[f"{where} · {versions}{commit} · {r['timestamp'][:10]}"] = None
    return "".join(f'<p class="dim">{escape(line)}</p>' for line in seen)


def _figures(rows: Sequence[Row], records: Sequence[Record], base: dict[str, Row], baseline: str | None) -> str:
    """What one wants to know at first sight."""
    cases = len({(row.routine, row.case_key) for row in rows})
    found = [(str(cases), f"cases of {len({row.routine for row in rows})} routines", "")]
    for backend in dict.fromkeys(row.backend for row in rows if row.backend != baseline):
        ratios = [base[row.case_key].ns / row.ns for row in rows if row.backend == backend and row.case_key in base]
        if ratios:
            mean = stats.geomean(ratios)
            words = f"{backend} over {baseline}, worst {min(ratios):.2f}x"
            found.append((f"{mean:.2f}x", words, "good" if mean > 1 else "bad"))
    checked = [r for r in records if r.get("refcheck")]
    wrong = sum(r["refcheck"]["status"] == "mismatch" for r in checked)
    if checked:
        found.append(
            (f"{len(checked) - wrong} / {len(checked)}", "results checked against fp64", "bad" if wrong else "")
        )
    slow = sum(r["status"] not in ("ok", "mismatch") for r in records)
    if slow:
        found.append((str(slow), "rows not measured", "warn"))
    return '<div class="figures">{}</div>'.format(
        "".join(
            f'<div><b class="{kind}">{escape(value)}</b><span>{escape(words)}</span></div>'
            for value, words, kind in found
        )
    )


def _cell(value: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(value)}</td>' if kind else f"<td>{escape(value)}</td>"


def _table(rows: Sequence[Row], colours: Colours, base: dict[str, Row], baseline: str | None) -> str:
    """The cases of one routine, the backends of a case together, the fastest one in bold."""
    names = ["backend", "*median", "*95% interval", "*TB/s", "*TFLOP/s", "% of limit", "*SM MHz", "check"]
    how = [_how(row) for row in rows]
    alike = {name: len({h[name] for h in how}) == 1 for name in how[0]}
    names += [name for name in how[0] if not alike[name]]
    if baseline:
        names.insert(3, f"*over {baseline}")
    if any(row.short for row in rows):
        names.insert(0, "case")
    if any(row.processes > 1 for row in rows):
        names.append("*processes")
    lines = []
    for case_key in dict.fromkeys(row.case_key for row in rows):
        same = [row for row in rows if row.case_key == case_key]
        fastest = min(row.ns for row in same)
        for i, row in enumerate(same):
            cells = _cells(row, len(same) > 1 and row.ns == fastest, colours, base)
            cells["case"] = f'<td class="case" rowspan="{len(same)}">{escape(row.short)}</td>' if i == 0 else ""
            kept = [cells[name.lstrip("*").partition(" ")[0]] for name in names]
            lines.append(f"<tr{' class=first' if i == 0 else ''}>{''.join(kept)}</tr>")
    head = "".join(f"<th{' class=n' if name[0] == '*' else ''}>{escape(name.lstrip('*'))}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    said = ", ".join(f"{name} {how[0][name]}" for name in how[0] if alike[name])
    return f'<p class="dim">{escape(said)}</p><div class="scroll">{table}</div>'


def _how(row: Row) -> dict[str, str]:
    """How the row was measured."""
    r = row.first
    load = {"load": r["regime"]} if r["device"] == "cuda" else {}
    return {"timer": r["timer"], **load, "cache": f"{r['cache_state']} ({r['cache']['how']})"}


def _cells(row: Row, best: bool, colours: Colours, base: dict[str, Row]) -> dict[str, str]:
    """The cells of a row, by the first word of their heading."""
    r = row.first
    status = r.get("refcheck", {}).get("status", "-")
    clock = r["clocks"].get("sm_mhz_mean")
    against = base.get(row.case_key)
    meter = "-"
    if row.of_limit:
        meter = f'<span class="meter"><i style="width:{min(row.of_limit, 100):.0f}%"></i></span>{row.of_limit:.0f}'
    key = f'<span class="key c{colours[row.backend]}"></span>'
    doubt = f' title="{escape("; ".join(row.warnings), quote=True)}"' if row.warnings else ""
    return {
        "backend": f"<td>{key}{escape(row.backend)}</td>",
        "median": f'<td class="n{" best" if best else ""}"{doubt}>{doubt and "&#9888; "}{human_time(row.ns)}</td>',
        "95%": _cell(f"{human_time(row.low)} … {human_time(row.high)}", "n dim"),
        "over": _cell(f"{against.ns / row.ns:.2f}x" if against else "-", "n"),
        "TB/s": _cell(f"{row.bytes / row.ns / 1e3:.3f}", "n"),
        "TFLOP/s": _cell(f"{row.flops / row.ns / 1e3:.3g}" if row.flops else "-", "n"),
        "%": f"<td>{meter}</td>",
        "processes": _cell(str(row.processes), "n"),
        **{name: _cell(value, "dim") for name, value in _how(row).items()},
        "SM": _cell(f"{clock:.0f}" if clock else "-", "n dim"),
        "check": _cell(status, {"ok": "good", "mismatch": "bad"}.get(status, "dim")),
    }


def _left_out(records: Sequence[Record]) -> str:
    """Rows without a time, with their reason: a gap in a table is never silent."""
    rows = {
        (r["routine"], describe(r), r["backend"], r["status"], r.get("reason", "")): None
        for r in records
        if not r.get("stats")
    }
    if not rows:
        return ""
    kinds = ("", "case", "", "warn", "reason")
    lines = "".join(f"<tr>{''.join(_cell(str(c), k) for c, k in zip(row, kinds, strict=True))}</tr>" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in ("routine", "case", "backend", "status", "reason"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<h2>Not measured</h2><div class="scroll">{table}</div>'


def _figure(title: str, drawing: str, kind: str = "") -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<figure class="card {kind}">{heading}{drawing}</figure>'


def _roofline(rows: Sequence[Row], colours: Colours) -> Iterator[str]:
    with_work = [row for row in rows if row.flops and row.bytes]
    if not with_work:
        return
    yield "<h2>Roofline</h2>"
    ceilings = {row.ceiling for row in with_work if row.ceiling}
    if not ceilings:
        yield '<p class="dim">No ceilings of this machine are known: <code>fi-bench calibrate</code> measures them.</p>'
    top = ceilings.pop() if len(ceilings) == 1 else None
    series = []
    for name, colour in colours.items():
        points = tuple(
            svg.Point(row.flops / row.bytes, row.flops / row.ns / 1e3,
                      title=f"{name}: {row.routine} {row.case}: {human_time(row.ns)}")
            for row in with_work
            if row.backend == name
        )  # fmt: skip
        if points:
            series.append(svg.Series(name, points, colour, line=False))
    units = sorted({row.unit for row in with_work})
    roofs = [svg.Roof(top.memory / 1e12, getattr(top, unit) / 1e12) for unit in units] if top else []
    title = "achieved, against the measured ceilings" if top else "achieved"
    yield _figure(title, svg.roofline(series, roofs), "wide")


def axis_of(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(axis, what is fixed, rows) of one routine, wherever a number varies over at least two values and all else stays.

    Numbers that are always equal, as lengths of a square prefill, are one axis: `s_kv = s_qo`.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(rows[0].params):
        values = tuple(row.params[name] for row in rows)
        if name != "random_seed" and all(type(v) is int for v in values) and len(set(values)) > 1:
            together.setdefault(values, []).append(name)
    found = []
    for names in together.values():
        families: dict[str, list[Row]] = {}
        for row in rows:
            rest = {name: v for name, v in row.params.items() if name not in names}
            families.setdefault(str(sorted(rest.items(), key=str)), []).append(row)
        for members in families.values():
            if len({row.params[names[0]] for row in members}) > 1:
                fixed = " ".join(w for w in members[0].short.split() if w.partition("=")[0] not in names)
                found.append((" = ".join(names), fixed, members))
    return found


def _along(members: Sequence[Row], axis: str, colours: Colours, of_limit: bool) -> list[svg.Series]:
    series = []
    for backend, colour in colours.items():
        points = []
        for row in members:
            if row.backend != backend or (of_limit and not row.of_limit):
                continue
            value = row.params[axis.partition(" ")[0]]
            x, title = float(value), f"{backend}, {axis} = {value}: {human_time(row.ns)}"
            if of_limit:
                points.append(svg.Point(x, float(row.of_limit or 0), title=title))
            else:
                points.append(svg.Point(x, row.ns / 1e3, row.low / 1e3, row.high / 1e3, title))
        if points:
            series.append(svg.Series(backend, tuple(sorted(points)), colour))
    return series


def _sweeps(rows: Sequence[Row], colours: Colours) -> Iterator[str]:
    charts = []
    for axis, fixed, members in axis_of(rows):
        for name, of_limit in (("time, us", False), ("% of limit", True)):
            series = _along(members, axis, colours, of_limit)
            if series:
                charts.append(_figure(f"{name} {fixed}".rstrip(), svg.lines(series, axis, name, zero=of_limit)))
    if charts:
        yield f'<div class="charts">{"".join(charts)}</div>'


def _baseline(rows: Sequence[Row], baseline: str) -> dict[str, Row]:
    base = {row.case_key: row for row in rows if row.backend == baseline}
    if not base:
        has = ", ".join(dict.fromkeys(row.backend for row in rows))
        raise UsageError(f"--baseline {baseline}: no row has this backend; there are {has}")
    return base


def _speedups(
    rows: Sequence[Row], colours: Colours, base: dict[str, Row], baseline: str, shared: dict[str, str]
) -> Iterator[str]:
    groups: dict[str, list[svg.Bar]] = {}
    for row in rows:
        if row.backend != baseline and row.case_key in base:
            ratio = base[row.case_key].ns / row.ns
            title = f"{row.routine}  {shared[row.routine]}"
            groups.setdefault(title, []).append(svg.Bar(row.short, ratio, colours[row.backend], row.backend))
    if groups:
        yield f"<h2>Speed-up over {escape(baseline)}</h2>"
        drawing = svg.bars(list(groups.items()), f"times as fast as {baseline}; right of the line is faster")
        yield _figure("", drawing, "wide")


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
