"""Reads benchmarks/results/*.jsonl: cases with the times of fi and its peers; and Markdown tables. Needs no package."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Result(NamedTuple):
    """One case: the time of fi and of each peer that ran it, in microseconds."""

    case: str
    fi: float
    peers: dict[str, float]

    @property
    def best(self) -> float:
        return min(self.peers.values())

    @property
    def speedup(self) -> float:
        """How many times as fast as the fastest peer."""
        return self.best / self.fi


def rows(name: str, card: str = "h200") -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks" / "results" / f"{card}-{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def by_case(found: Iterable[dict[str, Any]], ours: str, peers: dict[str, str]) -> list[Result]:
    """Groups rows of one implementation each by case; cases that no peer ran are left out."""
    cases: dict[str, dict[str, float]] = {}
    for row in found:
        if "us" in row:
            cases.setdefault(row["case"], {})[row["who"]] = row["us"]
    results = []
    for case, times in cases.items():
        others = {name: times[who] for who, name in peers.items() if who in times}
        if ours in times and others:
            results.append(Result(case, times[ours], others))
    return results


OURS = "fi"


def beside(name: str, pattern: str = "") -> list[Result]:
    """Files of one row for each case and peer, fi among them."""
    found = [row | {"who": row["peer"]} for row in rows(name) if re.match(pattern, row["case"])]
    return by_case(found, OURS, {row["who"]: row["who"] for row in found if row["who"] != OURS})


def table(head: Sequence[str], found: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; columns after the first `left` are aligned to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, rule, *found))


def number(us: float | None) -> str:
    """Microseconds with three or four digits."""
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def comparison(found: Sequence[Result], head: str = "case") -> str:
    """One row a case, one column a peer, and the speedup over the fastest of them."""
    peers = list(dict.fromkeys(name for result in found for name in result.peers))
    lines = [
        (r.case, number(r.fi), f"**{r.speedup:.2f}x**", *(number(r.peers.get(name)) for name in peers)) for r in found
    ]
    return table((head, "fi us", "speedup", *(f"{name} us" for name in peers)), lines)


def geometric(found: Sequence[Result]) -> float:
    return math.exp(statistics.fmean(math.log(result.speedup) for result in found))
