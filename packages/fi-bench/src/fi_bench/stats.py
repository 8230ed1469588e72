"""Statistics of samples and of trials, with the standard library only."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    low: float
    middle: float
    high: float


@functools.cache
def order_rank(n: int, confidence: float) -> int:
    """Largest k such that [x_(k), x_(n+1-k)] covers the median with the confidence; 0 if even the extremes do not."""
    tail, k = 0.0, 0
    while True:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence or k >= n // 2:
            return k
        k += 1


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Distribution-free interval of the median from order statistics; the whole range below six samples."""
    ordered = sorted(samples)
    k = max(order_rank(len(ordered), confidence), 1)
    return Interval(ordered[k - 1], statistics.median(ordered), ordered[-k])


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, q3


def midmean(samples: Sequence[float]) -> float:
    """Mean of the middle half: robust against outliers like a median, and finer than the ticks of a timer."""
    ordered, cut = sorted(samples), len(samples) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def mad(samples: Sequence[float]) -> float:
    """Median absolute deviation from the median."""
    middle = statistics.median(samples)
    return statistics.median([abs(x - middle) for x in samples])


def summary(samples: Sequence[float]) -> dict[str, float | int]:
    """The statistics of a record, in the unit of the samples. Outliers are counted, not removed."""
    q1, q3 = quartiles(samples)
    interval = median_interval(samples)
    iqr = q3 - q1
    middle = interval.middle
    beyond = [x for x in samples if x < q1 - 1.5 * iqr or x > q3 + 1.5 * iqr]
    severe = [x for x in beyond if x < q1 - 3 * iqr or x > q3 + 3 * iqr]
    found: dict[str, float | int] = {
        "n": len(samples),
        "median": middle,
        "mean": statistics.fmean(samples),
        "std": statistics.pstdev(samples),  # as numpy and FlashInfer's benchmark
        "std1": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        "min": min(samples),
        "max": max(samples),
        "q1": q1,
        "q3": q3,
        "iqr": iqr,
        "mad": mad(samples),
        "ci_low": interval.low,
        "ci_high": interval.high,
        "outliers_mild": len(beyond) - len(severe),
        "outliers_severe": len(severe),
    }
    if len(samples) >= 200:  # below, the tail percentiles are the extremes
        cuts = statistics.quantiles(samples, n=100, method="inclusive")
        found |= {"p95": cuts[94], "p99": cuts[98]}
    return found


def doubts(samples: Sequence[float]) -> list[str]:
    """Reasons not to trust the samples."""
    if len(samples) < 5:
        return []
    q1, q3 = quartiles(samples)
    middle = statistics.median(samples)
    spread = (q3 - q1) / middle if middle else 0.0
    found = []
    if spread > 0.25:
        found.append(f"IQR is {spread:.0%} of the median: significant influence of the environment")
    elif spread > 0.10:
        found.append(f"IQR is {spread:.0%} of the median: the system may fluctuate")
    rest = samples[1:]
    if samples[0] > statistics.median(rest) + 15 * max(mad(rest), 0.005 * middle):
        found.append("the first sample is far slower: more --dry_run_iters may be needed")
    return found


@functools.cache
def rank_sum_counts(n: int, m: int) -> tuple[int, ...]:
    """How many of the arrangements of n and m values have Mann-Whitney statistic u, for each u."""
    if n == 0 or m == 0:
        return (1,)
    without, with_one = rank_sum_counts(n, m - 1), rank_sum_counts(n - 1, m)
    counts = [0] * (n * m + 1)
    for u, c in enumerate(without):
        counts[u] += c
    for u, c in enumerate(with_one):
        counts[u + m] += c
    return tuple(counts)


def shift_interval(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Interval:
    """Hodges-Lehmann estimate of the shift from a to b, with its exact rank interval.

    Too few values for the confidence give an infinite interval: nothing is known then.
    """
    differences = sorted(y - x for x in a for y in b)
    counts = rank_sum_counts(len(a), len(b))
    total, tail, k = sum(counts), 0, 0
    while k < len(counts) and 2 * (tail + counts[k]) <= (1 - confidence) * total:
        tail += counts[k]
        k += 1
    middle = statistics.median(differences)
    return Interval(differences[k - 1], middle, differences[-k]) if k else Interval(-math.inf, middle, math.inf)


def geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))
