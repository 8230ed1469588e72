"""Products of 16-bit tokens and fp8 weights beyond their descriptions: every code, many shapes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from families.harness import assert_close, assert_guards, guarded, rand
from fi_core.gemm import mm_bf16_fp8, mm_bf16_fp8_workspace_bytes, mm_fp16_fp8

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 300, 2064),
        (9, 40, 96),
        (16, 1000, 400),
        (33, 256, 4096),
        (100, 131, 640),
        (8, 7200, 256),
        (5, 28700, 96),
        (64, 200, 2048),  # few rows: CTAs share k
        (140, 72, 272),  # weights become bf16 first
        (3, 33, 100),  # rows are not aligned
    ],
)
def test_weights_of_8_bits(m: int, n: int, k: int, device: str) -> None:
    """Tails of m, n and k; strided rows; each output type; a bias."""
    a = guarded((m, k), torch.bfloat16, device, row_padding=8).copy_(rand(m, k, dtype=torch.bfloat16, device=device))
    b, alpha = rand(n, k, dtype=E4M3, device=device, seed=1), torch.tensor([0.25], device=device)
    want = a.double() @ b.double().T * 0.25
    near_zero = float(want.abs().max()) * max(1e-6, k * 4e-10)  # tensor cores cut each of k / 16 sums to 24 bits
    for dtype in (torch.float32, torch.bfloat16):
        out = guarded((m, n), dtype, device, row_padding=3)
        assert mm_bf16_fp8(a, b, alpha, out=out) is out
        assert_close(out, want, tolerance=(1e-5 if dtype is torch.float32 else 4e-3, near_zero))
        assert_guards(out)
        bias = rand(n, dtype=dtype, device=device, seed=2)
        got = mm_bf16_fp8(a, b, alpha, bias=bias, out_dtype=dtype)
        assert_close(got, want + bias.double(), tolerance=(1e-5 if dtype is torch.float32 else 4e-3, near_zero))


@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float16])
def test_every_code(tokens: torch.dtype, device: str) -> None:
    """A token that picks one k gives each weight itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat_interleave(16).view(-1, 16)  # without NaN
    b = codes.to(device).view(E4M3)
    product = mm_bf16_fp8 if tokens is torch.bfloat16 else mm_fp16_fp8
    one = torch.ones(1, device=device)
    got = product(torch.eye(16, dtype=tokens, device=device), b, one, out_dtype=torch.float32)
    assert torch.equal(got.T, b.float())


def test_leading_dimensions_are_rows(device: str) -> None:
    a, b = rand(2, 3, 64, dtype=torch.bfloat16, device=device), rand(24, 64, dtype=E4M3, device=device)
    alpha = torch.tensor(0.5, device=device)
    got = mm_bf16_fp8(a, b, alpha)
    assert got.shape == (2, 3, 24) and got.dtype is torch.bfloat16
    assert torch.equal(got.view(6, 24), mm_bf16_fp8(a.view(6, 64), b, alpha))
    assert mm_bf16_fp8(a[0, 0], b, alpha).shape == (24,)
    assert mm_bf16_fp8(a[:, :0], b, alpha).shape == (2, 0, 24)
    assert mm_fp16_fp8(a.half(), b, alpha).dtype is torch.float16


def test_no_workspace_is_needed(device: str) -> None:
    a, b = torch.ones(2, 32, dtype=torch.bfloat16, device=device), torch.ones(16, 32, device=device).to(E4M3)
    assert mm_bf16_fp8_workspace_bytes(2, 16, 32) == 0
    workspace = torch.empty(0, dtype=torch.uint8, device=device)
    assert (mm_bf16_fp8(a, b, a.new_ones(1).float(), workspace=workspace, backend="cute-dsl") == 32).all()
    with pytest.raises(ValueError, match="m must be 0 or more"):
        mm_bf16_fp8_workspace_bytes(-1, 16, 32)


BF16, ONE = torch.ones(2, 32).bfloat16(), torch.ones(1)
FP8 = torch.ones(16, 32).to(E4M3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mm_bf16_fp8(BF16.half(), FP8, ONE), TypeError, "a must be torch.bfloat16; got torch.float16"),
        (lambda: mm_fp16_fp8(BF16, FP8, ONE), TypeError, "a must be torch.float16"),
        (lambda: mm_bf16_fp8(BF16, BF16, ONE), TypeError, "b must be float8_e4m3fn"),
        (lambda: mm_bf16_fp8(BF16, FP8[:, :16], ONE), ValueError, r"a must have shape \[\.\., k\] and b \[n, k\]"),
        (lambda: mm_bf16_fp8(BF16, FP8, torch.ones(2)), ValueError, "alpha must be one fp32 element"),
        (lambda: mm_bf16_fp8(BF16, FP8, ONE, tactic="a"), ValueError, "tactic must be None"),
        (lambda: mm_bf16_fp8(BF16, FP8, ONE, out=BF16), ValueError, r"out must have shape \[2, 16\]"),
        (lambda: mm_bf16_fp8(BF16, FP8, ONE, bias=torch.ones(16)), TypeError, "bias"),
        (
            lambda: mm_bf16_fp8(BF16.expand(3, 2, 32).transpose(0, 1), FP8, ONE),
            ValueError,
            "a must be contiguous but for strided rows",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
