"""Result records as the rows of a report: grouped by case and backend, with their limits, short names and axes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from fi_bench import calibrate, record
from fi_bench.calibrate import Ceilings
from fi_bench.errors import UsageError
from fi_bench.summary import describe

Record = record.Record


class Row:
    """All processes of one case and backend, as the page shows it."""

    def __init__(self, group: Sequence[Record], ceilings: dict[str, Ceilings]) -> None:
        self.first = first = group[0]
        self.routine, self.backend, self.params = first["routine"], first["backend"], first["params"]
        self.case, self.case_key = describe(first), first["case_key"]
        self.short = self.case  # without the parameters that all cases of the routine share
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


def routines_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.routine for row in rows))


def shorten(rows: Sequence[Row]) -> str:
    """Sets the short case of each row to the parameters that differ in this routine; returns the others."""
    names = dict.fromkeys(name for row in rows for name in row.params)
    differ = [name for name in names if name != "random_seed" and len({str(row.params.get(name)) for row in rows}) > 1]
    for row in rows:
        values = ((name, row.params.get(name)) for name in differ)
        given = ((name, value) for name, value in values if value is not None and value is not False)
        row.short = " ".join(name if value is True else f"{name}={value}" for name, value in given)
    return " ".join(word for word in rows[0].case.split() if word.partition("=")[0] not in differ)


def baseline_rows(rows: Sequence[Row], baseline: str) -> dict[str, Row]:
    base = {row.case_key: row for row in rows if row.backend == baseline}
    if not base:
        has = ", ".join(dict.fromkeys(row.backend for row in rows))
        raise UsageError(f"--baseline {baseline}: no row has this backend; there are {has}")
    return base


def axis_of(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(axis, fixed parameters, rows) of one routine, for each number that varies while all others stay.

    Numbers that are always equal, such as the lengths of a square prefill, are one axis: `s_kv = s_qo`.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(rows[0].params):
        values = tuple(row.params.get(name) for row in rows)
        if name != "random_seed" and all(type(v) is int for v in values) and len(set(values)) > 1:
            together.setdefault(values, []).append(name)
    found = []
    for names in together.values():
        families: dict[str, list[Row]] = {}
        for row in rows:
            rest = {name: v for name, v in row.params.items() if name not in names}
            families.setdefault(str(sorted(rest.items(), key=str)), []).append(row)
        for members in families.values():
            if len({row.params.get(names[0]) for row in members}) > 1:
                fixed = " ".join(w for w in members[0].short.split() if w.partition("=")[0] not in names)
                found.append((" = ".join(names), fixed, members))
    return found
