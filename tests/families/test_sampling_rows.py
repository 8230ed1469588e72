"""Rows that sampling functions compute (softmax, renormalised, masked), and logits adjusted before the draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, impls, using
from families.sampling_reference import INF, NAN, allowed, assert_distribution, dyadic, normal_logits
from fi_core.sampling import sample_from_logits, top_k_renorm_prob, top_p_renorm_prob
from fi_core.sampling.trace import (
    _softmax_reference,
    _top_k_mask_reference,
    _top_k_renorm_reference,
    _top_p_renorm_reference,
)

TOLERANCE = (2e-6, 1e-12)
SHAPES = [(3, 1), (5, 31), (2, 129), (3, 4097), (2, 32000), (1, 128256), (0, 50), (70, 300)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = normal_logits(*shape, device, scale=4.0).to(dtype)
    t = torch.linspace(0.3, 2.0, shape[0], device=device)
    for impl in impls("sample", device):
        with using("sample", impl):
            for temperature in (None, 0.7, t, t.half(), t.double()):
                got = fi_core.softmax(x, temperature)
                assert got.dtype == torch.float32 and got.shape == shape
                used = temperature.float() if isinstance(temperature, torch.Tensor) else temperature
                assert_close(got, _softmax_reference(x, used), tolerance=TOLERANCE)
                assert got.numel() == 0 or float(got.max()) <= 1
            uniform = fi_core.softmax(x, 0.0)
            assert_close(uniform, torch.full(shape, 1 / shape[1]), tolerance=TOLERANCE)


def test_softmax_of_extremes(device: str) -> None:
    x = torch.tensor(
        [[1e30, 1e30, -INF, 0], [INF, 0, INF, -INF], [NAN, 1, 1, -INF], [-INF] * 4, [-3e38, 3e38, 0, 0], [5, 5, 5, 5]],
        device=device,
    )
    want = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [NAN, 0.5, 0.5, 0], [0] * 4, [0, 1, 0, 0], [0.25] * 4])
    for impl in impls("sample", device):
        with using("sample", impl):
            assert_close(fi_core.softmax(x), want, tolerance=(0, 0))


@pytest.mark.parametrize("shape", SHAPES)
def test_renormalised_sets_are_exact(shape: tuple[int, int], device: str) -> None:
    rows, vocab = shape
    probs = dyadic(*shape, device)
    k = torch.randint(0, vocab + 2, (rows,), generator=torch.Generator().manual_seed(2)).int().to(device)
    p = torch.linspace(0.0, 1.0, rows, device=device)
    for impl in impls("sample", device):
        with using("sample", impl):
            for top_k in (k, 1, 7, vocab, vocab + 1):
                got = fi_core.top_k_renorm_probs(probs, top_k)
                assert torch.equal(got > 0, allowed(probs, top_k=top_k)), (impl, top_k)
                assert_close(got, _top_k_renorm_reference(probs, top_k), tolerance=TOLERANCE)
                masked = fi_core.top_k_mask_logits(probs, top_k)
                if isinstance(top_k, int) and top_k <= vocab:
                    assert torch.equal(masked.double(), _top_k_mask_reference(probs, top_k))
            for top_p in (p, 0.3, 0.9, 0.999, 1.0):
                got = fi_core.top_p_renorm_probs(probs, top_p)
                assert torch.equal(got > 0, allowed(probs, top_p=top_p)), (impl, top_p)
                assert_close(got, _top_p_renorm_reference(probs, top_p), tolerance=TOLERANCE)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("vocab", [5000, 128256])
def test_top_p_of_any_distribution(vocab: int, scale: float, device: str) -> None:
    """From flat to peaked rows, the kept mass reaches top_p, and without its smallest element does not."""
    probs = normal_logits(2, vocab, device, scale=scale).softmax(-1)
    for impl in impls("sample", device):
        with using("sample", impl):
            for p in (0.01, 0.5, 0.9, 0.999):
                kept = fi_core.top_p_renorm_probs(probs, p) > 0
                mass = probs.double().where(kept, 0.0)
                least = probs.double().where(kept, INF).amin(-1, keepdim=True)
                total = probs.double().sum(-1)
                assert (mass.sum(-1) >= p * total - 1e-5).all()
                assert (mass.where(mass > least, 0.0).sum(-1) < p * total + 1e-5).all()
                assert torch.equal(kept, probs >= least), "the kept elements are the largest"


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_top_k_of_any_size(scale: float, device: str) -> None:
    x = normal_logits(2, 50257, device, scale=scale)
    x[1, ::3] = 0.5  # a third of the row ties
    for impl in impls("sample", device):
        with using("sample", impl):
            for k in (1, 2, 50, 1000, 2048, 4097, 20000, 33000, 50256):
                got = fi_core.top_k_mask_logits(x, k)
                assert torch.equal(got.double(), _top_k_mask_reference(x, k)), (impl, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_keep_their_dtype(dtype: torch.dtype, device: str) -> None:
    x = normal_logits(3, 777, device, scale=2.0).to(dtype)
    probs = x.double().softmax(-1).to(dtype)
    for impl in impls("sample", device):
        with using("sample", impl):
            got = fi_core.top_k_mask_logits(x, 20)
            assert got.dtype == dtype
            single = x.float() if dtype == torch.float64 else x
            assert torch.equal(got.double(), _top_k_mask_reference(single, 20))
            renormed = fi_core.top_k_renorm_probs(probs, 20)
            assert renormed.dtype == dtype
            assert_close(renormed, _top_k_renorm_reference(probs, 20), tolerance=(1e-2, 1e-6))
            assert fi_core.top_p_renorm_probs(probs, 0.5).dtype == torch.float32
            assert fi_core.softmax(x).dtype == torch.float32


def test_rows_without_probability(device: str) -> None:
    rows = torch.tensor([[0.0, 0, 0], [NAN, NAN, NAN], [NAN, 0.5, 0.5], [INF, 1, 1]], device=device)
    want = torch.tensor([[0.0, 0, 0], [NAN, NAN, NAN], [NAN, 0.5, 0.5], [1.0, 0, 0]])
    for impl in impls("sample", device):
        with using("sample", impl):
            assert_close(top_k_renorm_prob(rows, 2), want, tolerance=(0, 0))
            assert_close(top_p_renorm_prob(rows, 0.99), want, tolerance=(0, 0))
            masked = fi_core.top_k_mask_logits(torch.full((2, 5), -INF, device=device), 2)
            assert torch.equal(masked, torch.full((2, 5), -INF, device=device))


def adjusted_reference(x: torch.Tensor, a: dict[str, Any]) -> torch.Tensor:
    """Returns the adjusted logits over temperature, in fp64."""
    y = x.double().cpu().clone()
    for row in range(y.shape[0]):
        for token, count in zip(a["seen_token_ids"][row].tolist(), a["seen_token_counts"][row].tolist()):
            if token < 0:
                continue
            y[row, token] *= 1 / a["repetition_penalty"] if y[row, token] > 0 else a["repetition_penalty"]
            if count:
                y[row, token] -= float(a["frequency_penalty"][row]) * count + a["presence_penalty"]
    y += a["bias"].double().cpu()
    bits = a["bitmask"].cpu().long() & 0xFFFFFFFF
    tokens = torch.arange(y.shape[1])
    allowed_bits = (bits[:, tokens // 32] >> (tokens % 32)) & 1
    return y.where(allowed_bits.bool(), -INF) / a["temperature"].double().cpu().unsqueeze(1)


@pytest.mark.parametrize("per_row_bias", [False, True])
def test_adjusted_logits(per_row_bias: bool, device: str) -> None:
    """Penalties, bias, bitmask and temperature together give the expected distribution of draws."""
    rows, vocab, n = 2, 40, 1 << 20
    generator = torch.Generator().manual_seed(3)
    a: dict[str, Any] = {
        "seen_token_ids": torch.tensor([[3, 7, 11, -1], [0, 39, -1, 20]], dtype=torch.int32),
        "seen_token_counts": torch.tensor([[2, 0, 1, 9], [1, 3, 4, 0]], dtype=torch.int32),
        "bias": torch.randn(*([rows] if per_row_bias else []), vocab, generator=generator),
        "bitmask": torch.randint(-(2**31), 2**31 - 1, (rows, 2), generator=generator).int() | 0x181,
        "temperature": torch.tensor([0.8, 1.7]),
        "frequency_penalty": torch.tensor([0.3, -0.2]),
    }
    a = {name: value.to(device) for name, value in a.items()}
    a |= {"repetition_penalty": 1.4, "presence_penalty": 0.5}
    x = normal_logits(rows, vocab, device, scale=1.5)
    want = adjusted_reference(x, a).softmax(-1)
    for impl in impls("sample", device):
        with using("sample", impl):
            for row in range(rows):
                some = {k: v[row : row + 1].expand(n, -1) if isinstance(v, torch.Tensor) and v.ndim == 2 else v
                        for k, v in a.items()}  # fmt: skip
                for name in ("temperature", "frequency_penalty"):
                    some[name] = a[name][row : row + 1].expand(n).contiguous()
                for name in ("seen_token_ids", "seen_token_counts"):
                    some[name] = some[name].contiguous()
                tokens, valid = sample_from_logits(x[row : row + 1].expand(n, -1), seed=2, offset=row, **some)
                assert bool(valid.all())
                assert_distribution(tokens, want[row])


@pytest.mark.parametrize("vocab", [50, 4001, 128256])
def test_adjusted_logits_are_the_same_for_every_implementation(vocab: int, device: str) -> None:
    rows, slots = 3, 20
    generator = torch.Generator().manual_seed(vocab)
    seen = torch.stack([torch.randperm(vocab, generator=generator)[:slots] for _ in range(rows)]).int()
    a: dict[str, Any] = {
        "seen_token_ids": seen,
        "seen_token_counts": torch.randint(0, 3, (rows, slots), generator=generator).int(),
        "bias": torch.randn(rows, vocab, generator=generator),
        "bitmask": torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), generator=generator).int(),
        "temperature": torch.tensor([0.5, 1.0, 2.0]),
    }
    fixed = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.2, "seed": 4, "offset": 5}
    x = normal_logits(rows, vocab, "cpu", scale=2.0)
    for filters in ({}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.05}):
        want, _ = sample_from_logits(x, **a, **fixed, **filters)
        before = x.to(device)
        on_device = {name: value.to(device) for name, value in a.items()}
        for impl in impls("sample", device):
            with using("sample", impl):
                got, valid = sample_from_logits(before, **on_device, **fixed, **filters)
                assert torch.equal(got.cpu(), want) and bool(valid.all())
                assert torch.equal(before.cpu(), x), "logits are not modified"


def test_greedy(device: str) -> None:
    x = normal_logits(4, 4000, device)
    x[1, 30] = x[1, 3000] = 9.0
    t = torch.tensor([0.0, 0.0, 1e-9, 1.0], device=device)
    for impl in impls("sample", device):
        with using("sample", impl):
            for seed in range(5):
                tokens, _ = sample_from_logits(x, temperature=t, seed=seed, offset=0)
                assert tokens[:3:2].tolist() == x.argmax(-1)[:3:2].tolist() and tokens[1] == 30


def test_nan_temperature(device: str) -> None:
    """A row with NaN temperature gets token 0 and is invalid; other rows draw the same tokens as without it."""
    x = normal_logits(3, 3000, device)
    good = torch.tensor([1.0, 1.0, 0.5], device=device)
    bad = torch.tensor([1.0, NAN, 0.5], device=device)
    for impl in impls("sample", device):
        with using("sample", impl):
            for filters in ({}, {"top_k": 5}, {"top_k": 600}, {"top_p": 0.9}, {"top_p": 0.1}, {"min_p": 0.1}):
                tokens, valid = sample_from_logits(x, temperature=bad, seed=1, offset=0, **filters)
                expected, _ = sample_from_logits(x, temperature=good, seed=1, offset=0, **filters)
                assert valid.tolist() == [True, False, True] and tokens[1] == 0, filters
                assert torch.equal(tokens[::2], expected[::2]), filters
