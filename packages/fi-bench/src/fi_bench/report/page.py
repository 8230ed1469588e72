"""`fi-bench report`: one self-contained HTML file with tables, roofline, sweeps and speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_bench import calibrate, record
from fi_bench.calibrate import Ceilings
from fi_bench.console import figure, human_time, say
from fi_bench.errors import OK, OutputError, UsageError
from fi_bench.files import writable
from fi_bench.parsing import Parser, underscored
from fi_bench.report import charts
from fi_bench.report.rows import Record, Row, axis_of, baseline_rows, group_rows, routines_of, shorten
from fi_bench.summary import describe

COLOURS = 12  # series beyond these repeat them; their marks differ too
Colours = dict[str, int]


def html(records: Sequence[Record], ceilings: dict[str, Ceilings], baseline: str | None, title: str) -> str:
    """The whole page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    rows = group_rows(records, ceilings)
    shared = {routine: shorten([row for row in rows if row.routine == routine]) for routine in routines_of(rows)}
    colours = {name: i % COLOURS for i, name in enumerate(dict.fromkeys(row.backend for row in rows))}
    base = baseline_rows(rows, baseline) if baseline else {}
    with_work = [row for row in rows if row.flops and row.bytes]
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html.j2")
    return page.render(
        title=title,
        colours=COLOURS,
        machines=_machines(records),
        figures=_figures(rows, records, base, baseline),
        baseline=baseline,
        speedups=_speedups(rows, colours, base, baseline, shared),
        roofline=_roofline(with_work, colours) if with_work else None,
        ceilings=any(row.ceiling for row in with_work),
        routines=[_routine(name, rows, words, colours, base, baseline) for name, words in shared.items()],
        left_out=_left_out(records),
    )


def _machines(records: Sequence[Record]) -> list[str]:
    """A line for each machine and day."""
    seen: dict[str, None] = {}
    for r in records:
        e = r.get("env")
        if e:
            packages = e.get("packages") or {}
            versions = f"fi-core {e.get('fi_core')} · torch {packages.get('torch')} · CUDA {e.get('cuda') or '-'}"
            on_gpu = r.get("device") == "cuda"
            where = (
                f"{e.get('gpu')} · driver {e.get('driver')}"
                if on_gpu
                else f"{e.get('cpu')}, {e.get('threads')} threads"
            )
            commit = f" · commit {e['commit']}" if e.get("commit") else ""
            seen[f"{where} · {versions}{commit} · {r['timestamp'][:10]}"] = None
    return list(seen)


def _figures(
    rows: Sequence[Row], records: Sequence[Record], base: dict[str, Row], baseline: str | None
) -> list[tuple[str, str, str]]:
    """(figure, what it is, class) of the boxes at the top."""
    cases = len({(row.routine, row.case_key) for row in rows})
    found = [(str(cases), f"cases of {len({row.routine for row in rows})} routines", "")]
    for backend in dict.fromkeys(row.backend for row in rows if row.backend != baseline):
        ratios = [base[row.case_key].ns / row.ns for row in rows if row.backend == backend and row.case_key in base]
        if ratios:
            middle = statistics.median(ratios)  # a case of thousands, such as a loop in torch, does not move it
            words = f"{backend} over {baseline}, the median case; {_times(min(ratios))} .. {_times(max(ratios))}"
            found.append((_times(middle), words, "good" if middle > 1 else "bad"))
    checked = [r for r in records if r.get("refcheck")]
    wrong = sum(r["refcheck"]["status"] == "mismatch" for r in checked)
    if checked:
        right = f"{len(checked) - wrong} / {len(checked)}"
        found.append((right, "results checked against fp64", "bad" if wrong else ""))
    unmeasured = sum(r["status"] not in ("ok", "mismatch") for r in records)
    if unmeasured:
        found.append((str(unmeasured), "rows not measured", "warn"))
    return found


def _times(ratio: float) -> str:
    """2.00x, 0.031x, 12.3x: three figures, so that small ratios differ."""
    return f"{ratio:.3f}x" if ratio < 0.1 else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _speedups(
    rows: Sequence[Row], colours: Colours, base: dict[str, Row], baseline: str | None, shared: dict[str, str]
) -> list[dict[str, Any]]:
    """The ratios over the baseline, by routine; a case's name stands beside its first bar."""
    found = [(row, base[row.case_key].ns / row.ns) for row in rows if row.backend != baseline and row.case_key in base]
    largest = max((max(ratio, 1 / ratio) for _, ratio in found), default=1.0)
    groups: dict[str, list[dict[str, Any]]] = {}
    named: set[tuple[str, str]] = set()
    for row, ratio in found:
        case = "" if (row.routine, row.case_key) in named else row.short
        named.add((row.routine, row.case_key))
        groups.setdefault(row.routine, []).append(
            {
                "case": case,
                "backend": row.backend,
                "colour": colours[row.backend],
                "bar": charts.bar(ratio, largest),
                "text": _times(ratio),
            }
        )
    return [{"routine": name, "shared": shared[name], "ratios": ratios} for name, ratios in groups.items()]


def _roofline(rows: Sequence[Row], colours: Colours) -> charts.Chart:
    ceilings = {row.ceiling for row in rows if row.ceiling}
    top = ceilings.pop() if len(ceilings) == 1 else None
    series = []
    for name, colour in colours.items():
        points = tuple(
            charts.Point(
                row.flops / row.bytes,
                row.flops / row.ns / 1e3,
                title=f"{name}: {row.routine} {row.case}: {human_time(row.ns)}",
            )
            for row in rows
            if row.backend == name
        )
        if points:
            series.append(charts.Series(name, points, colour, line=False))
    units = sorted({row.unit for row in rows})
    roofs = [charts.Roof(top.memory / 1e12, getattr(top, unit) / 1e12) for unit in units] if top else []
    return charts.roofline(series, roofs)


@dataclass(frozen=True)
class Column:
    text: str
    right: bool


@dataclass(frozen=True)
class Cell:
    """One cell of a table; `doubt` is shown as a tooltip, `share` as a meter."""

    text: str = "-"
    kind: str = ""
    span: int = 1
    colour: int | None = None
    doubt: str = ""
    share: float | None = None


def _routine(
    name: str, rows: Sequence[Row], shared: str, colours: Colours, base: dict[str, Row], baseline: str | None
) -> dict[str, Any]:
    """The table and the charts of one routine; the backends of a case stand together, the fastest in bold."""
    mine = [row for row in rows if row.routine == name]
    how = [_how(row) for row in mine]
    alike = {key: len({h.get(key) for h in how}) == 1 for key in how[0]}
    columns = _columns(mine, [key for key in how[0] if not alike[key]], baseline)
    lines = []
    for case_key in dict.fromkeys(row.case_key for row in mine):
        same = [row for row in mine if row.case_key == case_key]
        fastest = min(row.ns for row in same)
        for i, row in enumerate(same):
            cells = _cells(row, len(same) > 1 and row.ns == fastest, colours, base)
            cells["case"] = Cell(row.short, "case", len(same))
            kept = [cells[c.text.partition(" ")[0]] for c in columns if i == 0 or c.text != "case"]
            lines.append({"first": i == 0, "cells": kept})
    return {
        "name": name,
        "shared": shared,
        "how": ", ".join(f"{key} {how[0][key]}" for key in how[0] if alike[key]),
        "columns": columns,
        "rows": lines,
        "charts": list(_sweeps(mine, colours)),
    }


def _columns(rows: Sequence[Row], how: Sequence[str], baseline: str | None) -> list[Column]:
    over = [Column(f"over {baseline}", True)] if baseline else []
    return [
        *([Column("case", False)] if any(row.short for row in rows) else []),
        Column("backend", False),
        Column("median", True),
        Column("95% interval", True),
        *over,
        Column("TB/s", True),
        Column("TFLOP/s", True),
        Column("% of limit", False),
        Column("SM MHz", True),
        Column("check", False),
        *(Column(key, False) for key in how),
        *([Column("processes", True)] if any(row.processes > 1 for row in rows) else []),
    ]


def _how(row: Row) -> dict[str, str]:
    """How the row was measured."""
    r = row.first
    load = {"load": r["regime"]} if r["device"] == "cuda" else {}
    return {"timer": r["timer"], **load, "cache": f"{r['cache_state']} ({r['cache'].get('how')})"}


def _cells(row: Row, best: bool, colours: Colours, base: dict[str, Row]) -> dict[str, Cell]:
    """The cells of a row, by the first word of their column."""
    r = row.first
    status = (r.get("refcheck") or {}).get("status", "-")
    clock = r["clocks"].get("sm_mhz_mean")
    against = base.get(row.case_key)
    return {
        "backend": Cell(row.backend, colour=colours[row.backend]),
        "median": Cell(human_time(row.ns), "n best" if best else "n", doubt="; ".join(row.warnings)),
        "95%": Cell(f"{human_time(row.low)} … {human_time(row.high)}", "n dim"),
        "over": Cell(_times(against.ns / row.ns) if against else "-", "n"),
        "TB/s": Cell(figure(row.bytes / row.ns / 1e3), "n"),
        "TFLOP/s": Cell(f"{row.flops / row.ns / 1e3:.3g}" if row.flops else "-", "n"),
        "%": Cell(kind="meter", share=row.of_limit),
        "processes": Cell(str(row.processes), "n"),
        **{name: Cell(value, "dim") for name, value in _how(row).items()},
        "SM": Cell(f"{clock:.0f}" if clock else "-", "n dim"),
        "check": Cell(status, {"ok": "good", "mismatch": "bad"}.get(status, "dim")),
    }


def _left_out(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Rows without a time, each with its reason."""
    found = (
        (r["routine"], describe(r), r["backend"], r["status"], str(r.get("reason", "")))
        for r in records
        if not r.get("stats")
    )
    return list(dict.fromkeys(found))


def _along(members: Sequence[Row], axis: str, colours: Colours, of_limit: bool) -> list[charts.Series]:
    series = []
    for backend, colour in colours.items():
        points = []
        for row in members:
            if row.backend != backend or (of_limit and not row.of_limit):
                continue
            value = row.params[axis.partition(" ")[0]]
            x, title = float(value), f"{backend}, {axis} = {value}: {human_time(row.ns)}"
            if of_limit:
                points.append(charts.Point(x, float(row.of_limit or 0), title=title))
            else:
                points.append(charts.Point(x, row.ns / 1e3, row.low / 1e3, row.high / 1e3, title))
        if points:
            series.append(charts.Series(backend, tuple(sorted(points)), colour))
    return series


def _sweeps(rows: Sequence[Row], colours: Colours) -> Iterator[tuple[str, charts.Chart]]:
    """(title, chart) of time and of the share of the limit along each axis."""
    for axis, fixed, members in axis_of(rows):
        for name, of_limit in (("time, us", False), ("% of limit", True)):
            series = _along(members, axis, colours, of_limit)
            if series:
                yield f"{name} {fixed}".rstrip(), charts.lines(series, axis, name, zero=of_limit)


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench report", description="One self-contained HTML file from results.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="result files (.jsonl or .csv)")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    parser.add_argument("--baseline", metavar="BACKEND", help="show speed-ups over this backend")
    parser.add_argument("--title", default="fi-bench report")
    parser.add_argument("--ceilings", type=Path, help="file of `fi-bench calibrate` (default: the kept ones)")
    args = parser.parse_args(underscored(words))
    records: list[Any] = [r for file in args.files for r in record.read(file)]
    if not any(r.get("stats") for r in records):
        raise UsageError(f"{', '.join(args.files)}: no measured row")
    text = html(records, calibrate.load(args.ceilings), args.baseline, args.title)
    try:
        writable(args.output, "--output").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{args.output}: cannot be written ({error.strerror})") from None
    say("INFO", f"{args.output}: {len(text) / 1024:.0f} KiB")
    return OK
