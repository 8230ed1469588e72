"""Records as readable text, for tables, comparisons and reports."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from fi_bench.catalog import family_of
from fi_bench.console import figure, human_time
from fi_bench.record import Record, parameters


def describe(found: Record) -> str:
    """The parameters of a record that differ from their defaults."""
    return _differing(found["routine"], found["params"])


def describe_point(point: Namespace) -> str:
    """The parameters of a point that differ from their defaults."""
    return _differing(point.routine, parameters(point))


def _differing(routine: str, params: Mapping[str, Any]) -> str:
    defaults = {flag.dest or flag.name: flag.default for flag in family_of(routine).flags}
    words = []
    for name, value in params.items():
        if name in defaults and value not in (None, defaults[name]):
            words.append(name if value is True else f"{name}={value}")
    return " ".join(words)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One line per record."""
    found = []
    for r in records:
        row = {"routine": r["routine"], "case": describe(r), "backend": r["backend"], "trial": r["trial"]}
        row |= {"status": r["status"], "median": "-", "95% interval": "-", "TB/s": "-", "TFLOP/s": "-", "host": "-"}
        if r.get("stats"):
            s = r["stats"]
            row |= {
                "median": human_time(s["median"]),
                "95% interval": f"{human_time(s['ci_low'])} .. {human_time(s['ci_high'])}",
                "TB/s": figure(r["derived"]["tb_per_sec"]),
                "TFLOP/s": figure(r["derived"]["tflops"]),
            }
        if r.get("host_ns"):
            row["host"] = human_time(r["host_ns"])
        row |= {"timer": r.get("timer", "-"), "cache": r.get("cache_state", "-"), "id": r["record_id"]}
        found.append(row)
    return found
