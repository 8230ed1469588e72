"""GEMM functions beyond their descriptions: layouts, groups, special values, backends, refusals, implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, assert_guards, guarded, impls, rand, strided, using
from fi_core import deep_gemm
from fi_core.gemm import (
    batch_deepgemm_fp8_nt_groupwise,
    fp8_blockscale_gemm_sm90,
    gemm_fp8_nt_blockscaled,
    gemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
)
from fi_core.gemm.ops import GEMM, GemmKind, GemmStores, gemm
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import BackendSupportedError
from fi_core.runtime.spec.target import Target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.bfloat16, torch.float16, E4M3]


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Tensor cores keep about 14 bits of the largest product of a sum of fp8."""
    return (2e-3, 5e-3) if dtype.itemsize == 1 else (1e-4, 1e-3)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double().mT


def weights(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return rand(*shape, dtype=dtype, device=device, seed=1, scale=0.1)


def blocks(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Scales of 128 k, and of 1 or 128 rows, as one for each element."""
    own = scale.double() if scale.shape[-2] == rows else scale.double().repeat_interleave(128, -2)[..., :rows, :]
    return own.repeat_interleave(128, -1)[..., :k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(6, 35, 72), (150, 200, 264), (33, 130, 101), (700, 64, 128), (17, 64, 4128), (49, 96, 64), (80, 32, 96)],
)
def test_every_implementation(dtype: torch.dtype, m: int, n: int, k: int, device: str) -> None:
    """Strided rows, tails of m, n and k, misaligned rows; b by rows and by columns."""
    a, b = rand(m, k, dtype=dtype, device=device), weights(n, k, dtype=dtype, device=device)
    want = product(a, b)
    for impl in impls("gemm", device):
        aligned = k * dtype.itemsize % 16 == 0
        for left in [strided(a, 16), *([] if impl.startswith("wgmma") else [strided(a, 1)])]:
            for right in (strided(b, 16), b.mT.contiguous().mT):
                major_n = right.stride(-1) != 1
                if impl.startswith("wgmma") and (not aligned or (major_n and (dtype.itemsize == 1 or n % 8))):
                    continue
                if impl == "wgmma_small_m_sm90" and major_n:
                    continue
                out = guarded((m, n), torch.float32, device, row_padding=3)
                with using("gemm", impl):
                    gemm(out, left, right)
                assert_close(out, want, tolerance=tolerance(dtype))
                assert_guards(out)


def tactics_of(impl: str, kind: str) -> list[int]:
    """Of the tiles of an implementation for any number of tokens, then with exchanged operands. k is not split."""
    if impl == "wgmma_small_m_sm90":
        return list(range(0, 32, 8))
    dtype = "bf16" if kind == "bf16" else "e4m3"
    scales = "blocks" if kind.startswith("blocks") else "rows"
    unit = choose(Request.of(GEMM, Target("cuda", "90a"), {"a": dtype, "b": dtype, "scales": scales})).spec.unit()
    assert unit
    tiles = [entry.config for entry in unit.entries]
    others = GemmStores.TMA_HALVES, GemmStores.TRANSPOSED
    plain = [i for i, t in enumerate(tiles) if t.stores not in others and t.kind == GemmKind.WGMMA]
    turned = GemmStores.EITHER, GemmStores.TRANSPOSED
    return [*plain, *(len(tiles) + i for i, t in enumerate(tiles) if t.stores in turned)]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("kind", ["bf16", "rows"])
@pytest.mark.parametrize(("m", "n", "k", "padding"), [(257, 1000, 272, 8), (70, 333, 144, 3), (530, 1000, 1024, 0)])
def test_exchanged_operands_give_the_product(kind: str, m: int, n: int, k: int, padding: int) -> None:
    """A tile may have weights as rows and tokens as columns: its transpose is stored, by vectors or by elements."""
    dtype = torch.bfloat16 if kind == "bf16" else E4M3
    a = rand(2, m, k, dtype=dtype, device="cuda")
    b = weights(2, n, k, dtype=dtype, device="cuda")
    scales: tuple[torch.Tensor, ...] = ()
    want = torch.stack([product(a[i], b[i]) for i in range(2)])
    if kind == "rows":
        sa, sb = (rand(2, r, dtype=torch.float32, device="cuda", seed=5).abs() for r in (m, n))
        scales, want = (sa, sb), want * sa.double().unsqueeze(-1) * sb.double().unsqueeze(-2)
    for tactic in tactics_of("wgmma_sm90", kind):
        out = guarded((2, m, n), torch.bfloat16, "cuda", row_padding=padding)
        with using("gemm", "wgmma_sm90"):
            gemm(out, a, b, *scales, tactic=tactic)
        assert_close(out, want, tolerance=(1e-2, 5e-2))
        assert_guards(out)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("impl", ["wgmma_sm90", "wgmma_small_m_sm90"])
@pytest.mark.parametrize("kind", ["bf16", "rows", "blocks", "blocks of columns"])
def test_a_row_does_not_see_where_its_tile_begins(kind: str, impl: str) -> None:
    """The last tile computes rows of the one before again: the same bits, as in a product of fewer rows."""
    m, n, k = 321, 8200, 4096  # weights of 32 MB, which L2 forgets
    dtype = torch.bfloat16 if kind == "bf16" else E4M3
    a, b = rand(m, k, dtype=dtype, device="cuda"), weights(n, k, dtype=dtype, device="cuda")
    scales: tuple[torch.Tensor, ...] = ()
    if kind != "bf16":
        of_k = () if kind == "rows" else (k // 128,)
        sa, sb = (
            rand(rows, *of_k, dtype=torch.float32, device="cuda", seed=5).abs()
            for rows in (m, n if kind == "rows" else -(-n // 128))
        )
        scales = (sa.mT.contiguous().mT if kind == "blocks of columns" else sa, sb)
    for tactic in tactics_of(impl, kind):
        results = []
        for rows in (m, 320, 256, 193, 129, 66):
            out = guarded((rows, n), torch.bfloat16, "cuda")
            given = (scales[0][:rows], scales[1]) if scales else ()
            with using("gemm", impl):
                gemm(out, a[:rows], b, *given, tactic=tactic)
            assert_guards(out)
            results.append(out)
        for out in results:
            assert torch.equal(out, results[0][: out.shape[0]]), f"tactic {tactic}, {out.shape[0]} rows"


@pytest.mark.parametrize("kind", ["rows", "blocks", "row_blocks"])
def test_every_scale(kind: str, device: str) -> None:
    m, n, k = 150, 260, 300
    a, b = rand(m, k, dtype=E4M3, device=device), rand(n, k, dtype=E5M2, device=device, seed=1)
    shapes = {"rows": ((m,), (n,)), "blocks": ((m, 3), (3, 3)), "row_blocks": ((2, 3), (n, 3))}[kind]
    sa, sb = (rand(*shape, dtype=torch.float32, device=device, seed=7).abs() for shape in shapes)
    sa.view(-1)[0] = 0.0
    wide = (
        (sa.double().unsqueeze(-1), sb.double().unsqueeze(-1))
        if kind == "rows"
        else (blocks(sa, m, k), blocks(sb, n, k))
    )
    want = product(a.double() * wide[0], b.double() * wide[1])
    for impl in impls("gemm", device):
        if impl.startswith("wgmma"):
            a16, b16 = strided(a, 4), strided(b, 4)  # rows of 304 bytes
        else:
            a16, b16 = a, b
        out = guarded((m, n), torch.bfloat16, device)
        with using("gemm", impl):
            gemm(out, a16, b16, sa, sb)
        assert_close(out, want, tolerance=(1e-2, 5e-2))
        assert_guards(out)


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("k", [512, 3072])
def test_several_tiles_of_a_cta_with_block_scales(k: int, by_rows: bool) -> None:
    """Two matrices with tails of m and n, and a short k: half of a tile is stored before its last products."""
    m, n = 1111, 4400
    a = rand(2, m, k, dtype=E4M3, device="cuda")
    b = weights(2, n, k, dtype=E4M3, device="cuda")
    sa = rand(2, m, k // 128, dtype=torch.float32, device="cuda", seed=2).abs()
    sb = rand(2, -(-n // 128), k // 128, dtype=torch.float32, device="cuda", seed=3).abs()
    a[0, 700, 5], sa[1, m - 1, 0] = math.nan, 0.0
    out = guarded((2, m, n), torch.bfloat16, "cuda", row_padding=8)
    gemm(out, a, b, sa if by_rows else sa.mT.contiguous().mT, sb)
    # The terms of an element add up to 100 in magnitude, of which tensor cores keep 14 bits.
    assert_close(out, product(a.double() * blocks(sa, m, k), b.double() * blocks(sb, n, k)), tolerance=(1e-2, 3e-2))
    assert_guards(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_groups(dtype: torch.dtype, device: str) -> None:
    """Empty groups, groups of one row and of several tiles; weights that indices pick; rows of no group stay."""
    sizes = [0, 1, 200, 0, 7, 64, 0]
    rows, n, k, groups = sum(sizes) + 5, 72, 160, len(sizes)
    ends = torch.tensor([0, *sizes]).cumsum(0)
    a, b = rand(rows, k, dtype=dtype, device=device), weights(3, n, k, dtype=dtype, device=device)
    pick = torch.tensor([2, 0, 1, 1, 2, 0, 0], dtype=torch.int32)
    for impl in impls("gemm", device):
        out = guarded((rows, n), torch.float32, device, row_padding=4)
        with using("gemm", impl):
            gemm(out, a, b, m_indptr=ends.int().to(device), b_indices=pick.to(device))
        for i in range(groups):
            own = slice(int(ends[i]), int(ends[i + 1]))
            assert_close(out[own], product(a[own], b[pick[i]]), tolerance=tolerance(dtype))
        assert out[int(ends[-1]) :].isnan().all()
        assert_guards(out)


def test_an_index_is_that_of_128_rows() -> None:
    x, scale = torch.ones(256, 128).to(E4M3), torch.ones(256, 1)
    b, b_scale = torch.ones(2, 128, 128).to(E4M3), torch.ones(2, 1, 1)
    indices = torch.tensor([0] * 128 + [1] * 100 + [-1] * 28, dtype=torch.int32)
    out = fi_core.gemm.group_deepgemm_fp8_nt_groupwise(x, b, scale, b_scale, indices)
    assert (out[:228] == 128).all()
    indices[200] = 0
    with pytest.raises(ValueError, match=r"m_indices must be the same, or -1, for each 128 rows.*got 0 at 200 after 1"):
        fi_core.gemm.group_deepgemm_fp8_nt_groupwise(x, b, scale, b_scale, indices)


def test_masked_rows_and_row_indices(device: str) -> None:
    a, b = rand(4, 150, 128, dtype=E4M3, device=device), rand(4, 200, 128, dtype=E4M3, device=device, seed=1)
    sa, sb = (rand(4, s, 1, dtype=torch.float32, device=device).abs() for s in (150, 2))
    masked, want = [0, 1, 150, 129], product(a.double() * blocks(sa, 150, 128), b.double() * blocks(sb, 200, 128))
    mask = torch.tensor(masked, dtype=torch.int32, device=device)
    for impl in impls("gemm", device):
        out = guarded((4, 150, 200), torch.bfloat16, device)
        with using("gemm", impl):
            batch_deepgemm_fp8_nt_groupwise(a, b, sa, sb, mask, 64, out=out)
        for i, count in enumerate(masked):
            assert_close(out[i, :count], want[i, :count], tolerance=(1e-2, 5e-2))
            assert out[i, count:].isnan().all()
        assert_guards(out)
        flat = guarded((384, 200), torch.bfloat16, device)
        indices = torch.tensor([2, -1, 0], dtype=torch.int32, device=device).repeat_interleave(128)
        x, sx = a.view(-1, 128)[:384], sa.reshape(-1, 1)[:384]
        with using("gemm", impl):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, sx), (b, sb), flat, indices)
        wide = x.double() * blocks(sx, 384, 128)
        for i, group in ((0, 2), (2, 0)):
            own = slice(i * 128, i * 128 + 128)
            assert_close(flat[own], product(wide[own], b[group].double() * blocks(sb[group], 200, 128)),
                         tolerance=(1e-2, 5e-2))  # fmt: skip
        assert flat[128:256].isnan().all()
        assert_guards(flat)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2])
def test_special_values(dtype: torch.dtype, device: str) -> None:
    """NaN and infinity propagate as in fp64, and stay in their rows; e4m3 has no infinity."""
    a = rand(20, 64, dtype=dtype, device=device)
    b = rand(24, 64, dtype=E4M3 if dtype is E5M2 else dtype, device=device, seed=1)
    values = [math.nan] if dtype is E4M3 else [math.nan, math.inf, -math.inf]
    for i, value in enumerate(values):
        a[3 + i, 5 * i] = torch.tensor(value).to(dtype)
    b[7, 60] = torch.tensor(math.nan).to(b.dtype)
    for impl in impls("gemm", device):
        out = torch.empty(20, 24, device=device)
        with using("gemm", impl):
            gemm(out, a, b)
        assert_close(out, product(a, b), tolerance=tolerance(dtype))


def test_a_scale_of_zero_gives_zero(device: str) -> None:
    a, b = (torch.full((s, 256), 448.0, device=device).to(E4M3) for s in (4, 130))
    zeros, large = torch.zeros(4, 2, device=device), torch.full((2, 2), 3e38, device=device)
    assert (gemm_fp8_nt_groupwise(a, b, zeros, large, "K") == 0).all()


def test_batched_products_of_latent_attention(device: str) -> None:
    """Heads are the batch: a is `[m, heads, k]` seen as `[heads, m, k]`, and so is out."""
    a, b = (
        rand(9, 6, 128, dtype=torch.bfloat16, device=device),
        weights(6, 64, 128, dtype=torch.bfloat16, device=device),
    )
    out = torch.empty(9, 6, 64, dtype=torch.bfloat16, device=device)
    returned = fi_core.bmm_bf16(a.transpose(0, 1), b.mT, out=out.transpose(0, 1))
    assert returned.data_ptr() == out.data_ptr()
    assert_close(out.transpose(0, 1), product(a.transpose(0, 1), b))


def test_prepared_weights(device: str) -> None:
    """Weights in the layout of low-latency kernels give what plain ones do; rows are permuted among each 32."""
    a, b = rand(5, 256, dtype=E4M3, device=device), rand(64, 256, dtype=E4M3, device=device, seed=1)
    prepared = fi_core.prepare_low_latency_gemm_weights(b, {})
    assert prepared.shape == (2, 64, 128)
    assert torch.equal(prepared[1, 8].float(), b[1, 128:].float()), "row 1 is at 8"
    assert torch.equal(prepared[0, 1].float(), b[4, :128].float()), "row 4 is at 1"
    alpha = torch.tensor([0.5], device=device)
    assert torch.equal(fi_core.mm_fp8(a, prepared, alpha), fi_core.mm_fp8(a, b, alpha, backend="cublas"))


def test_scales_of_square_shape_are_read_by_strides(device: str) -> None:
    a, b = rand(2, 256, dtype=E4M3, device=device), rand(256, 256, dtype=E4M3, device=device, seed=1)
    sa, sb = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device),
        torch.tensor([[1.0, 8.0], [2.0, 16.0]], device=device),
    )
    want = product(a.double() * blocks(sa, 2, 256), b.double() * blocks(sb, 256, 256))
    for scale_a in (sa.t().contiguous(), sa.t().contiguous().t()):  # m is the contiguous dimension
        for scale_b in (sb, sb.t()):
            got = gemm_fp8_nt_groupwise(a, b, scale_a, scale_b, backend="trtllm", out_dtype=torch.float32)
            relative, absolute = tolerance(E4M3)
            assert_close(got, want, tolerance=(relative, absolute * 4 * 16))  # the largest scales
    for scale_a in (sa, sa.t().contiguous().t()):
        got = fp8_blockscale_gemm_sm90(a, b, scale_a, sb)
        assert_close(got, want, tolerance=(1e-2, 1e-1))


def test_transposed_input_scales_with_padding(device: str) -> None:
    a, b = rand(5, 384, dtype=E4M3, device=device), rand(64, 384, dtype=E4M3, device=device, seed=1)
    sa, sb = rand(5, 3, dtype=torch.float32, device=device).abs(), rand(64, 3, dtype=torch.float32, device=device).abs()
    stored = guarded((3, 8), torch.float32, device)
    stored[:, :5] = sa.t()
    want = product(a.double() * blocks(sa, 5, 384), b.double() * blocks(sb, 64, 384))
    for scale in (sa, stored):
        assert_close(fp8_blockscale_gemm_sm90(a, b, scale, sb), want, tolerance=(1e-2, 5e-2))


def test_blockscaled_is_groupwise_with_blocks_of_rows(device: str) -> None:
    a, b = rand(200, 256, dtype=E4M3, device=device), rand(256, 256, dtype=E4M3, device=device, seed=1)
    sa, sb = (rand(2, 2, dtype=torch.float32, device=device, seed=s).abs() for s in (3, 4))
    got = gemm_fp8_nt_blockscaled(a, b, sa, sb, "K")
    assert torch.equal(got, gemm_fp8_nt_groupwise(a, b, sa, sb, "K", 1, (128, 128, 128)))
    assert torch.equal(got, gemm_fp8_nt_blockscaled(a, b, sa.t(), sb.t()))


def test_segments_by_lengths(device: str) -> None:
    wrapper = fi_core.SegmentGEMMWrapper(torch.empty(0, dtype=torch.int8, device=device), backend="sm90")
    x, w = rand(12, 64, dtype=torch.bfloat16, device=device), weights(3, 32, 64, dtype=torch.bfloat16, device=device)
    lens = torch.tensor([4, 0, 8], device=device)
    got = wrapper.run(x, w, 3, True, seg_lens=lens)
    assert_close(got, torch.cat([product(x[:4], w[0]), product(x[4:], w[2])]))
    wrapper.reset_workspace_buffer(torch.empty(1, device=device), torch.empty(1, device=device))
    assert torch.equal(got, wrapper.forward(x, w.mT.contiguous(), 3, False, seg_lens=lens))
    assert wrapper.run(x.to(E4M3), w.to(E4M3), 3, True, seg_lens=lens).dtype is torch.bfloat16


def test_tuning_changes_nothing(device: str) -> None:
    a, b = rand(5, 64, dtype=torch.bfloat16, device=device), weights(8, 64, dtype=torch.bfloat16, device=device)
    with fi_core.autotune():
        tuned = fi_core.mm_bf16(a, b.t(), backend="auto")
    assert torch.equal(tuned, fi_core.mm_bf16(a, b.t(), skip_check=True))


@pytest.mark.parametrize("name", ["mm_bf16", "bmm_bf16", "bmm_fp8", "mm_fp8", "grouped_mm_bf16", "grouped_mm_fp8"])
def test_backend_queries(name: str) -> None:
    function: Any = getattr(fi_core, name)
    assert function.is_backend_supported("cudnn")
    assert function.is_backend_supported("auto", 90)
    assert not function.is_backend_supported("cudnn", 75)
    assert not function.is_backend_supported("cuda_core")
    assert function.is_compute_capability_supported(80)
    assert not function.is_compute_capability_supported(70)


def test_queries_of_functions_without_backends() -> None:
    assert fp8_blockscale_gemm_sm90.is_compute_capability_supported(90)  # type: ignore[attr-defined]
    assert not fp8_blockscale_gemm_sm90.is_compute_capability_supported(80)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="does not have backend choices"):
        fi_core.tinygemm_bf16.is_backend_supported("cudnn")  # type: ignore[attr-defined]


def one(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def bf16(*shape: int) -> torch.Tensor:
    return one(*shape, dtype=torch.bfloat16)


def f32(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fi_core.mm_bf16(bf16(2, 8), bf16(9, 4)), ValueError, r"b must have shape \[k, n\] with k = 8"),
    (lambda: fi_core.mm_bf16(bf16(2, 8), bf16(8, 4), backend="cuda"), BackendSupportedError, "not support backend"),
    (lambda: fi_core.mm_bf16(bf16(2, 8), bf16(8, 4), bf16(3)), ValueError, r"bias must have shape"),
    (lambda: fi_core.mm_bf16(bf16(2, 8), one(8, 4)), TypeError, "b must have the dtype of a"),
    (lambda: fi_core.mm_bf16(bf16(8, 2).t(), bf16(8, 4)), ValueError, "a must be contiguous"),
    (
        lambda: fi_core.mm_bf16(bf16(2, 8), bf16(8, 4), out=bf16(2, 4), out_dtype=torch.float16),
        ValueError, "out must have out_dtype torch.float16",
    ),
    (lambda: fi_core.mm_bf16(bf16(2, 8), bf16(8, 4), out=bf16(2, 5)), ValueError, "out must have shape"),
    (lambda: fi_core.bmm_bf16(bf16(2, 3, 8), bf16(8, 4)), ValueError, r"B must have shape \[batch, k, n\]"),
    (
        lambda: fi_core.bmm_fp8(one(1, 2, 16, dtype=E5M2), one(1, 16, 4, dtype=E5M2), f32(1), f32(1), torch.bfloat16),
        ValueError, "B must be float8_e4m3fn if A is",
    ),
    (
        lambda: fi_core.bmm_fp8(bf16(1, 2, 16), one(1, 16, 4), f32(1), f32(1), torch.bfloat16),
        ValueError, "A must be float8",
    ),
    (
        lambda: fi_core.bmm_fp8(one(1, 2, 16), one(1, 16, 4), f32(3), f32(1), torch.bfloat16),
        ValueError, "A_scale must have one element",
    ),
    (lambda: fi_core.mm_fp8(one(2, 16), one(4, 16), f32(2)), ValueError, "alpha must have one element"),
    (lambda: fi_core.mm_fp8(one(2, 16), one(4, 16), f32(1), a_scale=f32(2)), ValueError, "alpha must be None"),
    (lambda: fi_core.mm_fp8(one(2, 128), one(1, 33, 128)), ValueError, "n a multiple of 32"),
    (
        lambda: fi_core.prepare_low_latency_gemm_weights(one(32, 100)), ValueError, "k % 128 == 0",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 100), one(4, 100), f32(2, 1), f32(1, 1), "K"),
        ValueError, "a must have shape .* k a multiple of 128",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(128), one(4, 128), f32(1, 1), f32(1, 1), "K"),
        ValueError, r"a must have at least two dimensions; got \[128\]",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 128), one(128), f32(2, 1), f32(0, 1), "K"),
        ValueError, r"b must have at least two dimensions; got \[128\]",
    ),
    (lambda: fi_core.mm_bf16(bf16(3, 2, 8), bf16(3, 8, 4)), ValueError, r"a must have shape \[m, k\]"),
    (
        lambda: fi_core.mm_mxfp8(one(3, 2, 32), one(3, 32, 4), f32(3, 2, 1).byte(), f32(3, 1, 4).byte()),
        ValueError, r"a must have shape \[m, k\]; got \[3, 2, 32\]",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 256), one(4, 256), f32(2, 2), f32(1, 2)),
        ValueError, 'scale_major_mode must be "K" or "MN" for backend',
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 256), one(4, 256), f32(2, 3), f32(1, 2), "K"),
        ValueError, r"a_scale must have shape \[.., 2, 2\] for mode 'K'",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 256), one(4, 256), f32(2, 2), f32(1, 2), "MN"),
        ValueError, r"b_scale must have shape \[.., 2, 1\] for mode 'MN'",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 256), one(4, 256), f32(2, 2).half(), f32(1, 2), "K"),
        TypeError, "a_scale must",
    ),
    (
        lambda: gemm_fp8_nt_groupwise(one(2, 256), one(4, 256), f32(2, 2), f32(1, 2), "K", 1, (1, 1, 128)),
        ValueError, "scale_granularity_mnk must be",
    ),
    (
        lambda: group_gemm_fp8_nt_groupwise(one(2, 256), one(1, 4, 256), f32(2, 2), f32(1, 2, 1), i32(0)),
        ValueError, "m_indptr must have shape",
    ),
    (
        lambda: fp8_blockscale_gemm_sm90(bf16(2, 128), bf16(64, 128), f32(2, 1)),
        ValueError, "input_scale should not be provided for BF16",
    ),
    (
        lambda: fp8_blockscale_gemm_sm90(one(2, 128), bf16(64, 128), f32(2, 1)),
        ValueError, "FP8 input with BF16 weight is not supported",
    ),
    (
        lambda: fp8_blockscale_gemm_sm90(bf16(2, 128), one(64, 128)),
        ValueError, "weight_scale is required when weight is FP8",
    ),
    (lambda: fp8_blockscale_gemm_sm90(bf16(2, 127), bf16(64, 127)), ValueError, "k divisible by block size 128"),
    (lambda: fp8_blockscale_gemm_sm90(f32(2, 128), bf16(64, 128)), ValueError, r"must be FP8 .* or BF16; got"),
    (lambda: fp8_blockscale_gemm_sm90(bf16(2, 128), bf16(60, 128)), ValueError, "n a multiple of 64"),
    (
        lambda: fp8_blockscale_gemm_sm90(one(2, 256), one(64, 256), f32(3, 2), f32(64, 2)),
        ValueError, "input_scale must have shape",
    ),
    (lambda: fi_core.grouped_mm_bf16(bf16(2, 8), bf16(2, 4, 8), i32(0, 1)), ValueError, "m_indptr must have shape"),
    (lambda: fi_core.grouped_mm_bf16(bf16(2, 8), bf16(1, 4, 8), i32(0, 1).long()), TypeError, "m_indptr must"),
    (lambda: fi_core.SegmentGEMMWrapper(f32(1), "fa2"), ValueError, "backend must be one of auto, sm90, sm80"),
    (
        lambda: fi_core.SegmentGEMMWrapper(f32(1)).run(bf16(2, 8), bf16(1, 4, 8), 1, True),
        ValueError, "seg_indptr must be given",
    ),
    (
        lambda: fi_core.SegmentGEMMWrapper(f32(1)).run(bf16(2, 8), bf16(3, 4, 8), 3, True, seg_lens=i32(2)),
        ValueError, r"seg_lens must have shape \[3\]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSALS, ids=[words[:40] for _, _, words in REFUSALS])
def test_refusals(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_a_result_over_an_operand_is_refused(device: str) -> None:
    """Rows of the product would be read as operands; other rows or columns of one matrix are none of it."""
    x, w = (rand(n, 64, dtype=torch.bfloat16, device=device, seed=n) for n in (48, 64))
    for name, out, a, b in (("a", x, x, w), ("b", w[:48], x, w), ("a", x[1:], x[:-1], w)):
        with pytest.raises(ValueError, match=f"out is written while {name} is read, so they must not share memory"):
            fi_core.mm_bf16(a, b.t(), out=out)
    want = fi_core.mm_bf16(x, w.t())
    for room in (torch.zeros(48, 2, 64), torch.zeros(2, 48, 64).transpose(0, 1)):
        both = room.to(device, torch.bfloat16)
        both[:, 0] = x
        assert torch.equal(fi_core.mm_bf16(both[:, 0], w.t(), out=both[:, 1]), want)
