"""Statistics against known distributions and exact counts."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from fi_bench import stats


@pytest.mark.parametrize(("n", "rank"), [(5, 0), (6, 1), (9, 2), (20, 6), (30, 10), (100, 40)])
def test_rank_of_the_median_interval_is_exact(n: int, rank: int) -> None:
    """Textbook ranks; and the definition: coverage >= 95 %, and one rank further in it would be less."""
    assert stats.order_rank(n, 0.95) == rank

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert rank == 0 or coverage(rank) >= 0.95
    assert coverage(rank + 1) < 0.95


@pytest.mark.parametrize("draw", [random.Random(1).gauss, lambda a, b: random.expovariate(1.0)])
def test_median_interval_covers_the_median(draw: object) -> None:
    random.seed(7)
    truth = 0.0 if draw.__name__ == "gauss" else math.log(2)  # type: ignore[attr-defined]
    hits = 0
    for _ in range(1500):
        low, _, high = stats.median_interval([draw(0.0, 1.0) for _ in range(30)])  # type: ignore[operator]
        hits += low <= truth <= high
    assert 0.94 <= hits / 1500 <= 0.975  # exact: 95.7 %


def test_summary_of_known_samples() -> None:
    s = stats.summary([float(x) for x in range(1, 101)])
    assert (s["n"], s["median"], s["mean"], s["min"], s["max"]) == (100, 50.5, 50.5, 1, 100)
    assert s["std"] == pytest.approx(math.sqrt((100**2 - 1) / 12))
    assert s["std1"] == pytest.approx(math.sqrt(100 * 101 / 12))
    assert (s["q1"], s["q3"], s["mad"]) == (25.75, 75.25, 25.0)
    assert (s["ci_low"], s["ci_high"]) == (40, 61)
    assert "p99" not in s
    assert stats.summary([float(x) for x in range(1, 202)])["p99"] == pytest.approx(199)


def test_the_middle_half_is_robust_and_finer_than_the_ticks_of_a_timer() -> None:
    assert stats.midmean([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0]) == 4.5
    assert stats.midmean([3.0]) == 3.0
    rng = random.Random(2)
    ticks = [32 * round(rng.gauss(1674, 60) / 32) for _ in range(400)]
    assert statistics.median(ticks) % 32 == 0
    assert stats.midmean(ticks) == pytest.approx(1674, rel=0.005)


def test_outliers_are_counted_and_kept() -> None:
    samples = [10.0 + 0.01 * i for i in range(30)] + [10.55, 30.0]
    s = stats.summary(samples)
    assert (s["outliers_mild"], s["outliers_severe"], s["max"]) == (1, 1, 30.0)


def test_one_sample_is_enough_to_summarise() -> None:
    s = stats.summary([3.0])
    assert (s["median"], s["q1"], s["std1"], s["ci_low"], s["ci_high"]) == (3.0, 3.0, 0.0, 3.0, 3.0)


def test_doubts_name_the_spread_and_a_slow_start() -> None:
    steady = [100.0 + i % 3 for i in range(30)]
    assert stats.doubts(steady) == []
    assert "first sample" in stats.doubts([180.0, *steady])[0]
    assert "may fluctuate" in stats.doubts([100.0 + 15 * (i % 2) for i in range(30)])[0]
    assert "significant" in stats.doubts([100.0 + 50 * (i % 2) for i in range(30)])[0]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 5)])
def test_rank_sum_counts_by_enumeration(n: int, m: int) -> None:
    counts = [0] * (n * m + 1)
    for chosen in itertools.combinations(range(n + m), n):
        others = [i for i in range(n + m) if i not in chosen]
        counts[sum(a > b for a in chosen for b in others)] += 1
    assert tuple(counts) == stats.rank_sum_counts(n, m)


def test_shift_interval_is_exact_for_five_against_five() -> None:
    a, b = [0.0, 1.0, 2.0, 3.0, 4.0], [10.0, 11.0, 12.0, 13.0, 14.0]
    differences = sorted(y - x for x in a for y in b)
    found = stats.shift_interval(a, b)
    # P(U <= 2) = 4 / 252 on each side: the third smallest and largest differences cover 96.8 %
    assert found == (differences[2], 10.0, differences[-3])
    assert stats.shift_interval(a[:3], b[:3]).high == math.inf, "three a side cannot give 95 %"


def test_shift_interval_covers_the_shift() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(2000):
        found = stats.shift_interval([rng.gauss(0, 1) for _ in range(5)], [rng.gauss(0.7, 1) for _ in range(5)])
        hits += found.low <= 0.7 <= found.high
    assert 0.955 <= hits / 2000 <= 0.98  # exact: 96.8 %


def test_geomean() -> None:
    assert stats.geomean([0.5, 2.0]) == pytest.approx(1.0)
    assert stats.geomean([1.0, 8.0]) == pytest.approx(statistics.geometric_mean([1.0, 8.0]))
