"""Products of bf16 tokens and fp32 weights beyond their description: their error, batches, infinities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from families.harness import assert_guards, guarded, rand
from fi_core.gemm import mm_bf16_fp32

INF, NAN = float("inf"), float("nan")


def assert_within_bound(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """The bound that the docstring states."""
    bound = (a.shape[1] / 7 + 64) * 2.0**-24 * (a.double().abs() @ b.double().abs().T)
    assert ((got.double() - a.double() @ b.double().T).abs() <= bound).all()


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(16, 256, 7168), (1, 384, 6144), (17, 100, 4096), (5, 33, 1000), (3, 9, 7), (40, 8, 130), (2, 1, 1)],
)
def test_the_error_keeps_to_its_bound(m: int, n: int, k: int, device: str) -> None:
    """Tails of m, n and k; strided rows, also such that are not aligned; weights of very different sizes."""
    a = guarded((m, k), torch.bfloat16, device, row_padding=3).copy_(rand(m, k, dtype=torch.bfloat16, device=device))
    b = guarded((n, k), torch.float32, device, row_padding=4)
    b.copy_(
        rand(n, k, dtype=torch.float32, device=device, seed=1)
        * torch.exp2(rand(n, k, dtype=torch.float32, device=device, seed=2) * 8)
    )
    out = guarded((m, n), torch.float32, device, row_padding=5)
    assert mm_bf16_fp32(a, b, out=out) is out
    assert_within_bound(out, a, b)
    assert_guards(out)


def test_all_24_bits_of_weights_count(device: str) -> None:
    """A token that picks one k gives each weight itself, where bf16 weights would be off by 2^-9."""
    b = rand(64, 40, dtype=torch.float32, device=device) * torch.exp2(
        rand(64, 40, dtype=torch.float32, device=device, seed=1) * 30
    )
    picks = torch.eye(40, dtype=torch.bfloat16, device=device)
    assert torch.equal(mm_bf16_fp32(picks, b), b.T)


def test_a_token_has_the_same_result_in_any_batch(device: str) -> None:
    a, b = (
        rand(40, 2048, dtype=torch.bfloat16, device=device),
        rand(70, 2048, dtype=torch.float32, device=device, seed=1),
    )
    whole = mm_bf16_fp32(a, b)
    for first, last in ((0, 1), (5, 9), (16, 40)):
        assert torch.equal(mm_bf16_fp32(a[first:last], b), whole[first:last])


def test_numbers_that_are_not_finite(device: str) -> None:
    """As in fp32: terms of a weight that are 0 make no NaN of an infinity."""
    a = torch.tensor([[INF, 0.0], [1.0, 0.0], [-INF, 1.0]], dtype=torch.bfloat16, device=device)
    b = torch.tensor([[1.0, 2.0], [INF, 1.0], [NAN, 1.0], [3.4e38, 1.0], [-1.5, INF]], device=device)
    assert torch.equal(mm_bf16_fp32(a, b).nan_to_num(7.0), (a.float() @ b.T).nan_to_num(7.0))


A, B = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(16, 32)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: mm_bf16_fp32(A.half(), B), TypeError, "a must be bfloat16"),
        (lambda: mm_bf16_fp32(A, B.bfloat16()), TypeError, "b must be float32"),
        (lambda: mm_bf16_fp32(A, B[:, :16]), ValueError, r"b must have shape \[n, k\] with k = 32"),
        (lambda: mm_bf16_fp32(A, B, out=torch.ones(2, 15)), ValueError, "out must have shape"),
        (lambda: mm_bf16_fp32(A, B, out=torch.ones(2, 16).bfloat16()), TypeError, "out must be float32"),
        (lambda: mm_bf16_fp32(A[0], B), ValueError, "a must have shape"),
        (lambda: mm_bf16_fp32(A, torch.ones(32, 16).T), ValueError, "b must be contiguous"),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
