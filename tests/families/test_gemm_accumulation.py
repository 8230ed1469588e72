"""How fp8 products are added: in fp32 each 128 k, or by the tensor cores where a caller allows it."""

from __future__ import annotations

import pytest
import torch

import fi_core
from families.harness import assert_close, rand, using
from fi_core.gemm.ops import GEMM, gemm
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.spec.target import Target

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("m", [5, 130])
def test_fast_accumulation_gives_the_product(m: int, device: str) -> None:
    a, b = rand(m, 272, dtype=E4M3, device=device), rand(80, 272, dtype=E4M3, device=device, seed=1, scale=0.1)
    want = a.double() @ b.double().T
    alpha = torch.tensor([0.5], device=device)
    got = fi_core.mm_fp8(a, b, alpha, out_dtype=torch.float32, use_fast_accum=True)
    assert_close(got, want * 0.5, tolerance=(1e-2, 1e-2))
    scales = rand(m, dtype=torch.float32, device=device).abs(), rand(80, dtype=torch.float32, device=device).abs()
    got = fi_core.mm_fp8(a, b, None, torch.float32, None, "auto", *scales, use_fast_accum=True)
    assert_close(got, want * scales[0].unsqueeze(-1) * scales[1], tolerance=(1e-2, 3e-2))
    one, many = torch.ones(1, device=device), (a.expand(3, -1, -1), b.mT.expand(3, -1, -1))
    got = fi_core.bmm_fp8(*many, one, alpha, torch.float32, use_fast_accum=True)
    assert_close(got, (want * 0.5).expand(3, -1, -1), tolerance=(1e-2, 1e-2))


def test_fast_accumulation_has_a_kernel_where_it_pays() -> None:
    """From 65 tokens on, on Hopper; other products have no kernel of their own."""

    def fast(**values: object) -> bool:
        request = Request.of(GEMM, Target("cuda", "90a"), {"a": "e4m3", "b": "e4m3", "fast_accum": True, **values})
        return bool(dict(choose(request).spec.axes)["fast_accum"])

    assert fast() and fast(tiles="groups")
    assert not fast(m=64) and not fast(scales="blocks") and not fast(a="bf16", b="bf16")


def test_fast_accumulation_is_refused_where_sums_are_in_fp32(device: str) -> None:
    out, a = torch.empty(3, 16, device=device), torch.ones(3, 128, device=device).to(torch.bfloat16)
    with pytest.raises(ValueError, match="use_fast_accum must be False with 16-bit operands"):
        gemm(out, a, a.new_ones(16, 128), use_fast_accum=True)
    scales = torch.ones(3, 1, device=device), torch.ones(1, 1, device=device)
    with pytest.raises(ValueError, match=r"use_fast_accum must be False .* scales of blocks"):
        gemm(out, a.to(E4M3), a.new_ones(16, 128).to(E4M3), *scales, use_fast_accum=True)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(("positive", "exact", "fast"), [(False, 5e-4, 0.01), (True, 2e-3, 0.5)])
def test_errors_of_long_sums(positive: bool, exact: float, fast: float) -> None:
    """Of k 16384 against fp64: fp32 sums are exact to the last bits, those of tensor cores have about 14."""
    a, b = (rand(rows, 16384, dtype=torch.float32, device="cuda", seed=rows) for rows in (200, 256))
    a, b = ((x.abs() if positive else x).to(E4M3) for x in (a, b))
    want = a.double() @ b.double().T

    def error(use_fast_accum: bool) -> float:
        out = torch.empty(200, 256, device="cuda")
        with using("gemm", "wgmma_sm90"):
            gemm(out, a, b, use_fast_accum=use_fast_accum, tactic=0)  # tiles for few tokens always add in fp32
        return float((out - want).norm() / want.norm())

    assert error(False) < exact and 2 * error(False) < error(True) < fast
