"""Tokens that sampling functions draw: exact sets, distribution, any row content, reproducibility, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.harness import impls, using
from families.sampling_reference import (
    INF,
    NAN,
    adversarial,
    allowed,
    assert_distribution,
    dyadic,
    normal_logits,
)
from fi_core.sampling import get_seed_and_offset, sample_from_logits

DRAWS = {"cuda": 1 << 20, "cpu": 1 << 18}
VOCABS = [1, 31, 129, 4097, 32000, 50257]
LARGE = [128256, 151936, 262144]
Draw = Callable[..., Any]


def rows_for(vocab: int) -> int:
    return 64 if vocab < 5000 else 3


def inside(samples: torch.Tensor, kept: torch.Tensor) -> bool:
    return bool(kept.gather(1, samples.long().unsqueeze(1)).all())


def uneven(n: int, device: str, low: float, high: float) -> torch.Tensor:
    return torch.linspace(low, high, n, device=device)


@pytest.mark.parametrize("vocab", [*VOCABS, *LARGE])
@pytest.mark.parametrize("batch", [0, 1, 3, 64])
def test_drawn_tokens_are_allowed(vocab: int, batch: int, device: str) -> None:
    """Drawn tokens pass each filter, by a sort in fp64. Parameters are numbers and tensors."""
    seeds = 3
    if batch > rows_for(vocab) and device == "cpu":
        batch, seeds = 2, 1
    probs = dyadic(batch, vocab, device)
    k = torch.randint(1, vocab + 2, (batch,), generator=torch.Generator().manual_seed(1)).to(device)
    p, m = uneven(batch, device, 0.05, 1.0), uneven(batch, device, 0.0, 1.0)
    for impl in impls("sample", device):
        with using("sample", impl):
            for seed in range(seeds):
                at = {"seed": seed, "offset": 0, "return_valid": True}
                for args, draw, filters in (
                    ((), fi_core.sampling_from_probs, {}),
                    ((p,), fi_core.top_p_sampling_from_probs, {"top_p": p}),
                    ((0.5,), fi_core.top_p_sampling_from_probs, {"top_p": 0.5}),
                    ((k.int(),), fi_core.top_k_sampling_from_probs, {"top_k": k}),
                    ((7,), fi_core.top_k_sampling_from_probs, {"top_k": 7}),
                    ((m,), fi_core.min_p_sampling_from_probs, {"min_p": m}),
                    ((k.int(), p), fi_core.top_k_top_p_sampling_from_probs, {"top_k": k, "top_p": p}),
                ):
                    samples, valid = draw(probs, *args, **at)
                    assert samples.shape == (batch,) and samples.dtype == torch.int32 and bool(valid.all())
                    assert inside(samples, allowed(probs, **filters)), (impl, draw.__name__, seed)
                samples = fi_core.top_k_top_p_sampling_from_probs(
                    probs, k.int(), p, filter_apply_order="joint", seed=seed, offset=0
                )
                assert inside(samples, allowed(probs, top_k=k, top_p=p, joint=True))


@pytest.mark.parametrize(
    ("device", "vocab"),
    [
        *(("cpu", v) for v in (1, 31, 513)),
        *(pytest.param("cuda", v, marks=pytest.mark.gpu) for v in (1, 31, 513, 32000, 50257, *LARGE)),
    ],
)
def test_a_thousand_rows(vocab: int, device: str) -> None:
    """Draws from a thousand rows, eight of which differ."""
    few = dyadic(8, vocab, device)
    probs = few.repeat(125, 1)
    at: dict[str, Any] = {"seed": 3, "offset": 4}
    for impl in impls("sample", device):
        with using("sample", impl):
            for samples, filters in (
                (fi_core.sampling_from_probs(probs, **at), {}),
                (fi_core.top_p_sampling_from_probs(probs, 0.7, **at), {"top_p": 0.7}),
                (fi_core.top_k_sampling_from_probs(probs, 20, **at), {"top_k": 20}),
                (fi_core.min_p_sampling_from_probs(probs, 0.3, **at), {"min_p": 0.3}),
                (fi_core.top_k_top_p_sampling_from_probs(probs, 20, 0.7, **at), {"top_k": 20, "top_p": 0.7}),
            ):
                assert inside(samples, allowed(few, **filters).repeat(125, 1)), (impl, filters)


def chi_square_cases() -> dict[str, tuple[Draw, dict[str, Any]]]:
    """Functions that draw from rows of logits, and the filters they apply."""
    return {
        "logits": (lambda x, i, **r: fi_core.sampling_from_logits(x, i, **r), {}),
        "probs": (lambda x, i, **r: fi_core.sampling_from_probs(x.softmax(-1), i, **r), {}),
        "top_k": (lambda x, i, **r: fi_core.top_k_sampling_from_probs(x.softmax(-1), 9, i, **r), {"top_k": 9}),
        "top_p": (lambda x, i, **r: fi_core.top_p_sampling_from_probs(x.softmax(-1), 0.7, i, **r), {"top_p": 0.7}),
        "top_p_half": (lambda x, i, **r: fi_core.top_p_sampling_from_probs(x.softmax(-1), 0.5, i, **r), {"top_p": 0.5}),
        "min_p": (lambda x, i, **r: fi_core.min_p_sampling_from_probs(x.softmax(-1), 0.2, i, **r), {"min_p": 0.2}),
        "top_k_top_p": (
            lambda x, i, **r: fi_core.top_k_top_p_sampling_from_probs(x.softmax(-1), 12, 0.8, i, **r),
            {"top_k": 12, "top_p": 0.8},
        ),
        "joint": (
            lambda x, i, **r: fi_core.top_k_top_p_sampling_from_probs(x.softmax(-1), 12, 0.8, i, "joint", **r),
            {"top_k": 12, "top_p": 0.8, "joint": True},
        ),
        "top_k_top_p_logits": (
            lambda x, i, **r: fi_core.top_k_top_p_sampling_from_logits(x, 12, 0.8, i, **r),
            {"top_k": 12, "top_p": 0.8},
        ),
        "fused": (
            lambda x, i, **r: sample_from_logits(
                3.0 * x[1:].expand(len(i), -1), temperature=3.0, top_k=12, top_p=0.8, min_p=0.05, **r
            )[0],
            {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
        ),
    }


@pytest.mark.parametrize("vocab", [2, 31, 300])
@pytest.mark.parametrize("case", sorted(chi_square_cases()))
def test_distribution(case: str, vocab: int, device: str) -> None:
    draw, filters = chi_square_cases()[case]
    x = normal_logits(2, vocab, device, scale=1.5)
    indices = torch.zeros(DRAWS[device], dtype=torch.int32, device=device)
    want = x[1].double().softmax(-1)
    kept = want.where(allowed(want.unsqueeze(0).float(), **filters)[0], 0.0)
    for impl in impls("sample", device):
        with using("sample", impl):
            assert_distribution(draw(x, indices + 1, seed=11, offset=5), kept)


@pytest.mark.parametrize("vocab", [31, 128256])
def test_seeds_per_output_give_independent_draws(vocab: int, device: str) -> None:
    """Seeds and offsets per output give independent draws: token counts follow the row's distribution."""
    n = 1 << 14 if device == "cuda" else 1 << 10
    probs = dyadic(1, vocab, device)
    indices = torch.zeros(n, dtype=torch.int64, device=device)
    seeds, offsets = torch.arange(n, device=device) * 977, torch.arange(n, device=device) // 3
    samples = fi_core.sampling_from_probs(probs, indices, seed=seeds, offset=offsets)
    assert samples.dtype == torch.int64
    buckets = 16
    edges = (torch.arange(vocab, device=device) * buckets) // vocab
    share = torch.zeros(buckets, dtype=torch.float64, device=device).index_add_(0, edges, probs[0].double())
    assert_distribution(edges[samples], share)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("vocab", [2, 33, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_row_content(vocab: int, logits: bool, dtype: torch.dtype, device: str) -> None:
    rows, sets = adversarial(vocab, device, logits, dtype)
    n = rows.shape[0]
    clean = torch.full((1, vocab), 0.5, dtype=dtype, device=device)
    for impl in impls("sample", device):
        with using("sample", impl):
            for seed in range(4):
                for filters in ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 2, "top_p": 0.5}):
                    samples, valid = _any(rows, logits, filters, seed, torch.zeros(n, device=device).long())
                    for i, choice in enumerate(sets):
                        token = int(samples[i])
                        assert 0 <= token < vocab
                        assert bool(valid[i]) == bool(choice), (impl, filters, i)
                        assert not choice or token in choice, (impl, filters, i, token)
                    # A finite row in a batch with such rows draws the same token as alone.
                    mixed = torch.cat([rows, clean, rows])
                    lone = _any(clean, logits, filters, seed, torch.tensor([seed], device=device))[0]
                    seeds = torch.full((2 * n + 1,), seed, device=device)
                    assert _any(mixed, logits, filters, seed, seeds)[0][n] == lone[0]


def _any(
    x: torch.Tensor, logits: bool, filters: dict[str, Any], seed: int, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.full_like(offsets, seed)
    if logits:
        return sample_from_logits(x, seed=seeds, offset=offsets, **filters)
    at: dict[str, Any] = {"seed": seeds, "offset": offsets, "return_valid": True}
    if "min_p" in filters:
        return fi_core.min_p_sampling_from_probs(x, filters["min_p"], **at)  # type: ignore[return-value]
    k, p = filters.get("top_k", 0), filters.get("top_p", 1.0)
    return fi_core.top_k_top_p_sampling_from_probs(x, k, p, **at)  # type: ignore[return-value]


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.2, "min_p": 0.01},
    {"top_k": 900, "top_p": 0.95},
    {"top_k": 60, "top_p": 0.8, "filter_apply_order": "joint"},
]


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("vocab", [31, 5003, 128256])
def test_the_draw_depends_only_on_the_row(vocab: int, scale: float, device: str) -> None:
    """With a seed per row, the token is the same for any position, batch, address and implementation."""
    n = 6
    x = normal_logits(n, vocab, "cpu", scale=scale)
    seeds, offsets = torch.arange(n) + 100, torch.arange(n) * 4
    canvas = torch.zeros(n, vocab + 3, device=device)
    shuffled = torch.tensor([4, 0, 5, 2, 1, 3])
    for filters in FILTERS:
        want, _ = sample_from_logits(x, seed=seeds, offset=offsets, **filters)
        for impl in impls("sample", device):
            with using("sample", impl):
                y, s, o = x.to(device), seeds.to(device), offsets.to(device)
                got, _ = sample_from_logits(y, seed=s, offset=o, **filters)
                assert torch.equal(got.cpu(), want), (impl, filters)
                order = shuffled.to(device)
                got, _ = sample_from_logits(y[order], seed=s[order], offset=o[order], **filters)
                assert torch.equal(got.cpu(), want[shuffled]), (impl, filters)
                one, _ = sample_from_logits(y[3:4], seed=s[3:4], offset=o[3:4], **filters)
                assert int(one) == int(want[3])
                for shift in (1, 2, 3):  # rows with any alignment
                    rows = canvas[:, shift:]
                    rows.copy_(y[:, : vocab + 3 - shift] if shift == 3 else torch.nn.functional.pad(y, (0, 3 - shift)))
                    part = canvas[:, shift : shift + vocab]
                    got, _ = sample_from_logits(part, seed=s, offset=o, **filters)
                    assert torch.equal(got.cpu(), want), (impl, filters, shift)


@pytest.mark.parametrize("vocab", [4000, 65537])
def test_top_k_with_ties(vocab: int, device: str) -> None:
    """A small k of rows where many elements tie with the k-th, or few have probability: equal to the CPU's tokens."""
    x = normal_logits(9, vocab, "cpu", scale=2.0)
    x[0] = 0.5
    x[1] = (x[1] * 2).round() / 2
    x[2, 2000:] = -INF
    x[2] = (x[2] * 4).round()
    x[3, 30:] = NAN
    x[4, 100:500] = INF
    x[5, 5000:] = -INF
    x[6, 7] = 1e30
    x[7] = (x[7] > 6) * 20.0
    seeds, k = torch.arange(9), torch.tensor([1, 5, 0, 30, 40, 50, 2000, vocab, 60], dtype=torch.int32)
    by_row = {"top_k": k, "top_p": torch.tensor([0.5, 1.0, 1.0, 0.8, 0.9, 1.0, 0.9, 0.3, 0.0])}
    some = {"top_k": 31, "top_p": 0.7}, {"top_k": 20, "min_p": 0.1}, {"top_p": 0.6}
    for filters in ({}, {"top_k": 1}, {"top_k": 30}, *some, by_row):
        there: dict[str, Any] = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in filters.items()}
        for logits in (True, False):
            y = x if logits else x.clamp(max=20.0).exp()
            want, valid = _any(y, logits, filters, 0, seeds)
            for impl in impls("sample", device):
                with using("sample", impl):
                    got, drawn = _any(y.to(device), logits, there, 0, seeds.to(device))
                    assert torch.equal(got.cpu(), want) and torch.equal(drawn.cpu(), valid), (impl, filters)


@pytest.mark.parametrize("vocab", [600, 70001])
def test_top_p_of_any_distribution(vocab: int, device: str) -> None:
    """Top-p alone of rows with unusual distributions or ties: equal to the CPU's tokens, for any batch size."""
    x = normal_logits(10, vocab, "cpu")
    for row, scale in enumerate((1e-6, 0.001, 0.3, 3.0, 4.0, 30.0)):
        x[row] *= scale
    x[6] = 0.25
    x[7] = (x[7] * 2).round() / 2
    x[8] -= 12.0
    x[8, 1::97] = 3.0  # few elements have most of the weight
    x[9, vocab // 3] = 40.0
    seeds = torch.arange(10)
    for p in (1e-9, 0.3, 0.5, 0.75, 0.9, 0.999):
        for logits in (True, False):
            y = x if logits else x.softmax(-1)
            want, _ = _any(y, logits, {"top_p": p}, 0, seeds)
            kept = allowed((x.double() if logits else y.double().log()).softmax(-1), top_p=min(p + 1e-5, 1.0))
            assert inside(want, kept)
            for impl in impls("sample", device):
                with using("sample", impl):
                    for copies in (1,) if device == "cpu" else (1, 13):  # of 130 rows, each has one CTA on an H200
                        many, each = y.to(device).repeat(copies, 1), seeds.to(device).repeat(copies)
                        got, drawn = _any(many, logits, {"top_p": p}, 0, each)
                        assert torch.equal(got.cpu(), want.repeat(copies)) and bool(drawn.all()), (impl, p, logits)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("vocab", "draws"), [(40, 1 << 18), (1500, 1 << 16)])
def test_rows_whose_proposals_are_all_rejected(vocab: int, draws: int, device: str) -> None:
    """With top-p 0.5, all proposals of one row in 65536 are rejected. Equal to the CPU's tokens."""
    probs = uneven(vocab, "cpu", 1.0, 1.1).unsqueeze(0)
    indices = torch.zeros(draws, dtype=torch.int32)
    want = fi_core.top_p_sampling_from_probs(probs, 0.5, indices, seed=5, offset=1)
    assert bool(allowed(probs, top_p=0.5 + 1e-5)[0][want.long()].all())
    for impl in impls("sample", device):
        with using("sample", impl):
            got = fi_core.top_p_sampling_from_probs(probs.to(device), 0.5, indices.to(device), seed=5, offset=1)
            assert torch.equal(got.cpu(), want), impl


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_draw_as_their_fp32_copies(dtype: torch.dtype, device: str) -> None:
    for vocab in (33, 4099, 32000):
        x = normal_logits(5, vocab, device, scale=3.0).to(dtype)
        for impl in impls("sample", device):
            with using("sample", impl):
                for filters in FILTERS:
                    half, _ = sample_from_logits(x, seed=5, offset=6, **filters)
                    single, _ = sample_from_logits(x.float(), seed=5, offset=6, **filters)
                    assert torch.equal(half, single)


def test_randomness(device: str) -> None:
    """Equal seed and offset repeat a draw, either changes it, rows differ, and tensors act as numbers do."""
    x = normal_logits(1, 5000, device).softmax(-1).expand(64, -1).contiguous()

    def draw(seed: Any, offset: Any) -> torch.Tensor:
        return fi_core.sampling_from_probs(x, seed=seed, offset=offset)  # type: ignore[return-value]

    first = draw(1, 2)
    assert torch.equal(first, draw(1, 2)) and first.unique().numel() > 40
    for other in (draw(2, 2), draw(1, 3), draw(1 << 63, 2), draw(1, (1 << 40) + 2)):
        assert int((other == first).sum()) < 8
    one = torch.tensor([1], device=device)
    assert torch.equal(first, draw(one, one + 1))
    each = torch.ones(64, dtype=torch.int64, device=device)
    same = draw(each, each + 1)
    assert same.unique().numel() == 1 and same[0] == first[0], "with a seed per row, the row is not part of the counter"
    assert torch.equal(draw(one.to(torch.uint64), one.to(torch.uint64)), draw(1, 1))
    assert draw(-1 % (1 << 64), 0).shape == (64,)


INCREMENTS: dict[str, tuple[Draw, int]] = {
    "logits": (lambda x, **r: fi_core.sampling_from_logits(x, **r), 3 * 33),
    "probs": (lambda x, **r: fi_core.sampling_from_probs(x.softmax(-1), **r), 3),
    "min_p": (lambda x, **r: fi_core.min_p_sampling_from_probs(x.softmax(-1), 0.1, **r), 3),
    "top_p": (lambda x, **r: fi_core.top_p_sampling_from_probs(x.softmax(-1), 0.1, **r), 96),
    "top_k": (lambda x, **r: fi_core.top_k_sampling_from_probs(x.softmax(-1), 4, **r), 96),
    "both": (lambda x, **r: fi_core.top_k_top_p_sampling_from_probs(x.softmax(-1), 4, 0.5, **r), 96),
    "both_logits": (lambda x, **r: fi_core.top_k_top_p_sampling_from_logits(x, 4, 0.5, **r), 96),
}


@pytest.mark.parametrize("name", sorted(INCREMENTS))
def test_generators_advance(name: str, device: str) -> None:
    draw, increment = INCREMENTS[name]
    x = normal_logits(3, 33, device)
    generator = torch.Generator(device=device).manual_seed(7)
    state = generator.get_state()
    first, second = draw(x, generator=generator), draw(x, generator=generator)
    if device == "cuda":
        assert generator.get_offset() == 2 * math.ceil(increment / 4) * 4  # type: ignore[attr-defined]
        assert torch.equal(draw(x, seed=7, offset=0), first)
        assert torch.equal(draw(x, seed=7, offset=math.ceil(increment / 4) * 4), second)
    generator.set_state(state)
    assert torch.equal(draw(x, generator=generator), first)
    after = generator.get_state()
    draw(x, seed=1, offset=0)
    assert torch.equal(generator.get_state(), after)
    torch.manual_seed(3)
    default = draw(x)
    torch.manual_seed(3)
    assert torch.equal(draw(x), default)


def test_seed_and_offset() -> None:
    generator = torch.Generator().manual_seed(5)
    seed, offset = get_seed_and_offset(5, generator)
    assert offset == 0 and (seed, 0) != get_seed_and_offset(5, generator)
    with pytest.raises(ValueError, match="device"):
        get_seed_and_offset(5)


def test_disabled_filters_have_no_effect(device: str) -> None:
    x = normal_logits(4, 3000, device, scale=2.0)
    plain = fi_core.sampling_from_logits(x, seed=1, offset=1)
    for k in (0, -1, 3000, 1 << 30, torch.tensor([0, -1, 3000, 1 << 30], dtype=torch.int32, device=device)):
        assert torch.equal(fi_core.top_k_top_p_sampling_from_logits(x, k, 1.0, seed=1, offset=1), plain)
    assert torch.equal(sample_from_logits(x, min_p=0.0, seed=1, offset=1)[0], plain)
    ones = torch.ones(4, device=device)
    assert torch.equal(sample_from_logits(x, top_p=ones, temperature=ones, seed=1, offset=1)[0], plain)
    assert torch.equal(sample_from_logits(x, top_p=0.0, seed=1, offset=1)[0].long(), x.argmax(-1))


def test_indices(device: str) -> None:
    probs = dyadic(4, 700, device)
    k = torch.tensor([1, 5, 50, 0], dtype=torch.int32, device=device)
    for dtype in (torch.int32, torch.int64):
        indices = torch.tensor([3, 1, 1, 0, 2, 3, 9, -1], dtype=dtype, device=device)
        for impl in impls("sample", device):
            with using("sample", impl):
                samples, valid = fi_core.top_k_sampling_from_probs(
                    probs, k, indices, seed=3, offset=1, return_valid=True
                )
                assert samples.dtype == dtype and samples.shape == (8,)
                assert valid.tolist() == [True] * 6 + [False] * 2, "rows out of range"
                assert inside(samples[:6], allowed(probs, top_k=k)[indices[:6].long()])
                assert not samples[6:].any()


def test_check_nan(device: str) -> None:
    x = torch.ones(2, 8, device=device)
    x[1, 3] = NAN
    assert fi_core.sampling_from_probs(x, seed=0, offset=0).shape == (2,)
    with pytest.raises(ValueError, match=r"Input probs contains NaN\."):
        fi_core.top_k_sampling_from_probs(x, 2, check_nan=True)
    with pytest.raises(ValueError, match=r"Input logits contains NaN\."):
        fi_core.sampling_from_logits(x, check_nan=True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"top_p": torch.ones(2, 1)}, ValueError, r"Expected a 1D tensor or scalar for top_p, got a 2D tensor"),
        (
            {"top_k": torch.tensor(3)},
            ValueError,
            r"Expected a 1D tensor of shape \(batch_size,\) or scalar for top_k, got a 0-dimensional tensor",
        ),
        ({"top_k": torch.ones(1).int()}, ValueError, "Sampling parameter tensor batch size mismatch: top_k"),
        ({"top_p": 1.5}, ValueError, "top_p: a number from 0 to 1 is required; got 1.5"),
        ({"top_p": -0.1}, ValueError, "top_p"),
        ({"min_p": 2}, ValueError, "min_p"),
        ({"top_k": -2}, ValueError, "top_k"),
        ({"top_k": 2.5}, TypeError, "top_k must be .* integer or None; got a float"),
        ({"top_k": "3"}, TypeError, "top_k: a number or a 1D tensor is required; got str"),
        ({"top_k": math.inf}, TypeError, "top_k must be .* integer or None; got a float"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": torch.ones(2).int()}, ValueError, "temperature: a tensor of a float dtype is required"),
        ({"seed": 1}, ValueError, "seed and offset: give both or neither"),
        ({"seed": 1, "offset": torch.zeros(2).long()}, ValueError, "seed and offset: both integers or both tensors"),
        ({"seed": torch.zeros(3).long(), "offset": torch.zeros(2).long()}, ValueError, "seed: a 1D tensor of length 1"),
        ({"seed": torch.zeros(2), "offset": torch.zeros(2)}, ValueError, "seed: int64 or uint64"),
        ({"filter_apply_order": "both"}, ValueError, "Invalid filter_apply_order: 'both'"),
        ({"presence_penalty": 1.0}, ValueError, "seen_token_ids: required"),
        ({"repetition_penalty": 1.2, "bias": torch.zeros(9)}, ValueError, "seen_token_ids: required"),
        (
            {"seen_token_ids": torch.zeros(2, 1).int(), "frequency_penalty": 1.0},
            ValueError,
            "seen_token_counts: required",
        ),
        ({"bias": torch.ones(3)}, ValueError, r"bias must have shape \[vocab\] or \[batch, vocab\]"),
        ({"bitmask": torch.ones(2, 3).int()}, ValueError, r"bitmask must have shape"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sample_from_logits(torch.zeros(2, 8), **arguments)


@pytest.mark.parametrize(
    "draw", [fi_core.top_p_sampling_from_probs, fi_core.top_k_mask_logits, fi_core.top_k_renorm_probs]
)
def test_a_filter_is_required(draw: Draw) -> None:
    with pytest.raises(TypeError, match=r"top_[kp]: a number or a 1D tensor is required; got NoneType"):
        draw(torch.ones(2, 8), None)


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(TypeError, match="probs: a float dtype of 16 bits or more is required"):
        fi_core.sampling_from_probs(torch.ones(2, 8).int())
    with pytest.raises(ValueError, match=r"probs: shape \[rows, vocab\] is required; got \[8\]"):
        fi_core.sampling_from_probs(torch.ones(8), seed=0, offset=0)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        fi_core.sampling_from_probs(torch.ones(8, 4).T, seed=0, offset=0)
    with pytest.raises(TypeError, match="indices must be int32 or int64"):
        fi_core.sampling_from_probs(torch.ones(2, 8), torch.zeros(2))
    with pytest.raises(ValueError, match="vocab"):
        fi_core.sampling_from_probs(torch.ones(2, 0), seed=0, offset=0)
    double = torch.ones(2, 8).double()
    assert fi_core.sampling_from_probs(double, seed=0, offset=0).dtype == torch.int32


def test_fully_masked_rows(device: str) -> None:
    x = torch.full((3, 64), -INF, device=device)
    x[1, 5] = 0.0
    tokens, valid = sample_from_logits(x, seed=1, offset=2)
    assert valid.tolist() == [False, True, False] and tokens.tolist() == [0, 5, 0]
