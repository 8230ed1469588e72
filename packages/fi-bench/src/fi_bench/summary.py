"""Records in the words and figures that people read; shared by tables, comparisons and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fi_bench.catalog import family_of
from fi_bench.console import human_time
from fi_bench.record import Record


def describe(found: Record) -> str:
    """The parameters that differ from their defaults, in a few words."""
    defaults = {flag.dest or flag.name: flag.default for flag in family_of(found["routine"]).flags}
    words = []
    for name, value in found["params"].items():
        if name in defaults and value not in (None, defaults[name]):
            words.append(name if value is True else f"{name}={value}")
    return " ".join(words)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One line per record."""
    found = []
    for r in records:
        row = {"routine": r["routine"], "case": describe(r), "backend": r["backend"], "trial": r["trial"]}
        row |= {"status": r["status"], "median": "-", "95% interval": "-", "TB/s": "-", "TFLOP/s": "-"}
        if r.get("stats"):
            s = r["stats"]
            row |= {
                "median": human_time(s["median"]),
                "95% interval": f"{human_time(s['ci_low'])} .. {human_time(s['ci_high'])}",
                "TB/s": f"{r['derived']['tb_per_sec']:.3f}",
                "TFLOP/s": f"{r['derived']['tflops']:.3f}",
            }
        row |= {"timer": r.get("timer", "-"), "cache": r.get("cache_state", "-"), "id": r["record_id"]}
        found.append(row)
    return found
