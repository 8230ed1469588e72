"""The comparison itself: what is a mismatch, and what the numbers say about it."""

from __future__ import annotations

import math

import pytest
import torch

from fi_bench import refcheck
from fi_bench.case import Inputs, Tolerance


def test_equal_is_equal() -> None:
    x = torch.randn(3, 4)
    d = refcheck.compare("o", x, x.double())
    assert d.ok
    assert (d.max_abs, d.max_rel, d.rel_l2, d.mismatches) == (0, 0, 0, 0)
    assert d.cosine == pytest.approx(1.0)


def test_numbers_of_a_known_difference() -> None:
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    got = want.clone()
    got[1, 0] = 0.5
    d = refcheck.compare("o", got, want, Tolerance(0.01, 0.1))
    assert (d.mismatches, d.elements, d.percent) == (1, 4, 25.0)
    assert d.max_abs == 0.5
    assert d.max_rel == pytest.approx(0.5 / 0.1)
    assert d.rel_l2 == pytest.approx(0.1)
    assert d.cosine == pytest.approx(25 / (5 * math.sqrt(25.25)))
    assert (d.worst_index, d.worst_got, d.worst_want) == ((1, 0), 0.5, 0.0)


@pytest.mark.parametrize(
    ("got", "want", "ok"),
    [
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (-math.inf, 1.0, False),
        (1.0, math.inf, False),
    ],
)
def test_what_is_not_finite_must_be_the_same(got: float, want: float, ok: bool) -> None:
    d = refcheck.compare("o", torch.tensor([1.0, got]), torch.tensor([1.0, want], dtype=torch.float64))
    assert d.ok == ok
    assert d.worst_index == (1,) or ok
    assert d.nan == math.isnan(got)
    assert d.inf == math.isinf(got)


def test_the_worst_index_is_a_mismatch_if_there_is_one() -> None:
    want = torch.tensor([1000.0, 1.0], dtype=torch.float64)
    d = refcheck.compare("o", torch.tensor([1001.0, 1.5], dtype=torch.float64), want, Tolerance(0.01, 0.0))
    assert d.worst_index == (1,)


def test_integers_are_exact() -> None:
    assert not refcheck.compare("o", torch.tensor([1, 2]), torch.tensor([1, 3])).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_rounding_passes_and_a_tenth_more_does_not(dtype: torch.dtype) -> None:
    want = torch.linspace(0.5, 4, 997, dtype=torch.float64)
    assert refcheck.compare("o", want.to(dtype), want).ok
    scale = 1.04 if dtype.itemsize == 2 else 1.35
    assert not refcheck.compare("o", (want * scale).to(dtype), want).ok


def test_empty_outputs_and_wrong_shapes() -> None:
    assert refcheck.compare("o", torch.empty(0, 3), torch.empty(0, 3)).ok
    with pytest.raises(ValueError, match=r"output o: shape must be \(2,\), got \(3,\)"):
        refcheck.compare("o", torch.ones(3), torch.ones(2))


def test_missing_outputs_are_an_error_but_for_peers() -> None:
    one = {"a": torch.ones(1)}
    both = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(ValueError, match="no output named b"):
        refcheck.check(one, both, {})
    assert [d.output for d in refcheck.check(one, both, {}, partial=True)] == ["a"]
    with pytest.raises(ValueError, match="no output named a, b"):
        refcheck.check({}, both, {}, partial=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_is_nan(dtype: torch.dtype) -> None:
    x = Inputs(out=torch.zeros(4, dtype=dtype), none=None, index=torch.zeros(2, dtype=torch.int32))
    refcheck.poison(x, ("out", "none", "index", "absent"))
    assert bool(x.out.float().isnan().all())
    assert x.index.tolist() == [-(2**31)] * 2
