"""Limits of a gate on many cases at once: the times of a backend over those of the fastest peer, and over `tuned`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fi_bench import compare, stats
from fi_bench.record import Record

_OWN = "fi_core"  # the library of a row; the others are peers
_TUNED = "tuned"
LIMITS = ("geomean", "p95", "worst", "regret", "regret_p99")


class Ratios(NamedTuple):
    """Of the cases of a rule: the time over the fastest peer's, and over that of the fastest configuration."""

    of_peer: dict[compare.Key, float]
    of_tuned: dict[compare.Key, float]

    def measures(self) -> dict[str, float]:
        """Those of LIMITS that have a case."""
        found: dict[str, float] = {}
        if peer := sorted(self.of_peer.values()):
            found |= {"geomean": stats.geomean(peer), "p95": percentile(peer, 0.95), "worst": peer[-1]}
        if tuned := sorted(self.of_tuned.values()):
            found |= {"regret": statistics.fmean(tuned), "regret_p99": percentile(tuned, 0.99)}
        return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def peers(records: Iterable[Record]) -> frozenset[str]:
    """The backends of other libraries."""
    return frozenset(r["backend"] for r in records if r.get("stats") and r.get("library") != _OWN)


def ratios(now: Mapping[compare.Key, compare.Side], keys: Iterable[compare.Key], others: Iterable[str]) -> Ratios:
    """keys: the cases of a backend. Cases without a row of a peer, or of `tuned`, are left out there."""
    found = Ratios({}, {})
    for key in keys:
        times = [now[other].median for name in others if (other := key._replace(backend=name)) in now]
        if times:
            found.of_peer[key] = now[key].median / min(times)
        if (tuned := key._replace(backend=_TUNED)) in now:
            found.of_tuned[key] = now[key].median / now[tuned].median
    return found


def exceeded(rule: Mapping[str, Any], found: Ratios) -> Iterator[tuple[str, float | None, float]]:
    """(limit, value, allowed) of each limit of a rule; the value is None where no case has one."""
    measures = found.measures()
    for name in LIMITS:
        if name in rule:
            yield name, measures.get(name), rule[name]


def row(label: str, found: Ratios, words: Mapping[compare.Key, str], rule: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the table: each measure, its limit in brackets, and the worst case."""
    measures = found.measures()
    cells = {
        name: (f"{measures[name]:.3f}" if name in measures else "-") + (f" ({rule[name]:g})" if name in rule else "")
        for name in LIMITS
    }
    worst = max(found.of_peer, key=found.of_peer.__getitem__, default=None)
    return {"cases": label, "number": len(found.of_peer), **cells, "worst case": "-" if worst is None else words[worst]}
