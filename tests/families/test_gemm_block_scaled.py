"""Products of operands with block scales beyond their descriptions: layouts, extremes, weights of kernels, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, guarded, rand
from fi_core import SfLayout
from fi_core.runtime.errors import BackendSupportedError

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def packed(rows: int, k: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * rows + k)
    return torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8).to(device)


def scales(rows: int, columns: int, device: str, low: int, high: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 17 * rows + columns)
    return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.uint8).to(device)


def wide(values: torch.Tensor, codes: torch.Tensor, block: int) -> torch.Tensor:
    """fp64 of packed values and linear scales."""
    x = CODES[torch.stack((values.cpu() & 15, values.cpu() >> 4), -1).flatten(-2).long()]
    scale = codes.cpu().view(torch.float8_e4m3fn).double() if block == 16 else torch.exp2(codes.cpu().double() - 127)
    scale = scale if block == 16 else torch.where(codes.cpu() == 255, math.nan, scale)
    return x * scale.repeat_interleave(block, -1)


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape
    return fi_core.block_scale_interleave(codes).view(-(-rows // 128) * 128, -(-columns // 4) * 4)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 300, 2080),
        (9, 40, 96),
        (16, 1000, 416),
        (33, 256, 4096),
        (100, 130, 640),
        (8, 7200, 256),
        (16, 2000, 8192),
        (5, 28700, 96),
    ],
)
def test_weights_of_4_bits(block: int, m: int, n: int, k: int, device: str) -> None:
    """Tails of m, n and k; strided rows; each output type."""
    a = guarded((m, k), torch.bfloat16, device, row_padding=8).copy_(rand(m, k, dtype=torch.bfloat16, device=device))
    b, low = packed(n, k, device), (0x20, 0x48) if block == 16 else (110, 130)
    codes = scales(n, k // block, device, *low)
    alpha = torch.tensor([0.25], device=device)
    want = a.cpu().double() @ wide(b, codes, block).T * 0.25
    near_zero = float(want.abs().max()) * max(1e-6, k * 4e-10)  # tensor cores cut each of k / 16 sums to 24 bits
    for dtype in (torch.float32, torch.bfloat16):
        out = fi_core.mm_bf16_fp4(a, b, swizzled(codes), alpha, dtype, block_size=block)
        assert_close(out, want, tolerance=(1e-5 if dtype is torch.float32 else 4e-3, near_zero))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("n", "k"), [(28700, 1056), (20800, 1312), (10500, 2080), (14500, 2080)])
def test_tokens_do_not_see_the_number_of_others(n: int, k: int, block: int) -> None:
    """Few tokens, whose kernel has 5 to 14 blocks of rows a CTA, and so many that weights are dequantized first."""
    a = rand(144, k, dtype=torch.bfloat16, device="cuda")
    b, codes = packed(n, k, "cuda"), scales(n, k // block, "cuda", *((0x20, 0x48) if block == 16 else (110, 130)))
    many = fi_core.mm_bf16_fp4(a, b, swizzled(codes), out_dtype=torch.float32, block_size=block)
    near_zero = float(many.abs().max()) * 4e-6
    for m in (8, 16):
        few = fi_core.mm_bf16_fp4(a[:m], b, swizzled(codes), out_dtype=torch.float32, block_size=block)
        assert_close(few, many[:m].double(), tolerance=(1e-5, near_zero))


@pytest.mark.parametrize("block", [16, 32])
def test_every_code_with_every_scale(block: int, device: str) -> None:
    """A token that picks one k gives each weight itself: all values times all scales, exactly where bf16 can."""
    k, rows = 32, 256
    values = torch.arange(16, dtype=torch.uint8).repeat(2).view(16, 2)
    b = (values[:, 0] + 16 * values[:, 1]).repeat(rows, 1).to(device)
    codes = torch.arange(rows, dtype=torch.uint8).view(rows, 1).repeat(1, k // block).to(device)
    if device == "cpu" and block == 32:
        codes.clamp_(min=2)  # AMX and VDPBF16PS read subnormal weights as 0
    a = torch.eye(k, dtype=torch.bfloat16, device=device)
    want = wide(b, codes, block)
    got = fi_core.mm_bf16_fp4(a, b, swizzled(codes), out_dtype=torch.float32, block_size=block).cpu().T
    held = want.abs().amax(1) <= float(torch.finfo(torch.bfloat16).max)  # else the other k are 0 times infinity
    assert torch.equal(got[held], want[held].float())
    assert not got[~held].isfinite().any()


def test_layouts_of_scales_agree(device: str) -> None:
    n, k = 200, 176
    b, codes = packed(n, k, device), scales(n, k // 16, device, 0x28, 0x40)
    a = rand(140, k, dtype=torch.bfloat16, device=device)
    want = a.cpu().double() @ wide(b, codes, 16).T
    for rows in (140, 3):
        got = fi_core.mm_bf16_fp4(a[:rows], b, swizzled(codes), out_dtype=torch.float32)
        assert_close(got, want[:rows], tolerance=(1e-4, 1e-3))
    linear = fi_core.mm_bf16_fp4(a[:3, :160], b[:, :80], codes[:, :10])
    tiled = fi_core.mm_bf16_fp4(a[:3, :160], b[:, :80], swizzled(codes[:, :10].contiguous()))
    assert torch.equal(linear, tiled)


def test_prepared_weights_are_the_weights(device: str) -> None:
    b, codes, alpha = packed(40, 96, device), scales(40, 6, device, 0x28, 0x40), torch.tensor(0.5, device=device)
    weights, tiled, factor = fi_core.prepare_bf16_fp4_weights(b, codes, alpha, backend="cute-dsl")
    assert weights is b
    assert torch.equal(tiled, swizzled(codes))
    a = rand(4, 96, dtype=torch.bfloat16, device=device)
    got = fi_core.mm_bf16_fp4(a, weights, tiled, factor, backend="cute-dsl")
    assert_close(got, a.cpu().double() @ wide(b, codes, 16).T * 0.5, tolerance=(1e-2, 1e-1))


def test_shuffled_weights(device: str) -> None:
    """backend="trtllm" takes rows in the order of its kernels, and tokens with scales in tiles of 8 rows."""
    m, n, k = 5, 256, 128
    x, w = rand(m, k, dtype=torch.bfloat16, device=device), rand(n, k, dtype=torch.bfloat16, device=device, seed=1)
    one = torch.ones(1, device=device)
    a, sa = fi_core.nvfp4_quantize(x, one, SfLayout.layout_8x4)
    b, linear = fi_core.nvfp4_quantize(w, one, SfLayout.layout_linear)
    plain = fi_core.mm_fp4(a, b.t(), sa, swizzled(linear).t(), use_8x4_sf_layout=True)
    shuffled = fi_core.shuffle_matrix_a(b, 128), fi_core.shuffle_matrix_sf_a(linear, 128).view(n, -1)
    got = fi_core.mm_fp4(a, shuffled[0].t(), sa, shuffled[1].t(), use_8x4_sf_layout=True, backend="trtllm")
    assert torch.equal(got, plain)


def mxfp8(rows: int, k: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales in rows and the fp64 product of both."""
    values = rand(rows, k, dtype=torch.float32, device=device, seed=seed).to(torch.float8_e4m3fn)
    codes = scales(rows, k // 32, device, 124, 131, seed)
    return values, codes, values.cpu().double() * torch.exp2(codes.cpu().double() - 127).repeat_interleave(32, -1)


@pytest.mark.parametrize("tiles_of_8", [False, True])
def test_shuffled_mxfp8_weights(tiles_of_8: bool, device: str) -> None:
    (a, sa, left), (b, sb, right) = mxfp8(37, 256, device), mxfp8(384, 256, device, 1)
    codes = swizzled(sa).view(-1)
    if tiles_of_8:  # (r, s) of 8 columns is at r // 8 * 64 + s // 4 * 32 + r % 8 * 4 + s % 4
        codes = torch.nn.functional.pad(sa, (0, 0, 0, 3))
        codes = codes.view(5, 8, 2, 4).transpose(1, 2).reshape(-1)
    weights = fi_core.shuffle_matrix_a(b.view(torch.uint8), 128).view(b.dtype)
    tiled = fi_core.shuffle_matrix_sf_a(sb, 128, 32).view(-1)
    got = fi_core.mm_mxfp8(
        a, weights.t(), codes, tiled, out_dtype=torch.float32, use_8x4_sf_layout=tiles_of_8, backend="trtllm"
    )
    assert_close(got, left @ right.T, tolerance=(1e-5, 1e-3))


def test_grouped_mxfp8_scales_are_swizzled_bytes(device: str) -> None:
    """The shape of rows is also that of whole tiles; rows are read as such only where sf_layout names them."""
    (a, sa, left), (b, sb, right) = mxfp8(256, 128, device), mxfp8(2 * 128, 128, device, 1)
    offsets = torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
    right = right.view(2, 128, 128)
    want = torch.cat((left[:100] @ right[0].T, left[100:] @ right[1].T))
    matrices, of_weights = b.view(2, 128, 128), torch.stack([swizzled(own) for own in sb.view(2, 128, 4)])
    got = fi_core.grouped_mm_mxfp8(a, matrices, swizzled(sa), of_weights, offsets, out_dtype=torch.float32)
    assert_close(got, want, tolerance=(1e-5, 1e-3))
    got = fi_core.grouped_mm_mxfp8(
        a, matrices, sa, sb.view(2, 128, 4), offsets, out_dtype=torch.float32, sf_layout=SfLayout.layout_linear
    )
    assert_close(got, want, tolerance=(1e-5, 1e-3))


def test_batched_mxfp8_scales_are_swizzled_where_both_fit(device: str) -> None:
    (a, sa, left), (b, sb, right) = mxfp8(256, 128, device), mxfp8(256, 128, device, 1)
    want = left.view(2, 128, 128) @ right.view(2, 128, 128).mT
    tiled = [torch.stack([swizzled(own) for own in codes.view(2, 128, 4)]) for codes in (sa, sb)]
    got = fi_core.bmm_mxfp8(a.view(2, 128, 128), b.view(2, 128, 128).mT, *tiled, torch.float32)
    assert_close(got, want, tolerance=(1e-5, 1e-3))


@pytest.mark.parametrize(("m", "n"), [(5, 72), (130, 200)])
def test_mxfp8_scales_in_rows(m: int, n: int, device: str) -> None:
    """Where their shape is not that of whole tiles."""
    (a, sa, left), (b, sb, right) = mxfp8(m, 160, device), mxfp8(n, 160, device, 1)
    assert_close(
        fi_core.mm_mxfp8(a, b.t(), sa, sb.t(), out_dtype=torch.float32), left @ right.T, tolerance=(1e-5, 1e-3)
    )


def test_quantized_operands_give_the_product(device: str) -> None:
    """What the quantizers return is what the products take."""
    x, w = (rand(rows, 256, dtype=torch.bfloat16, device=device, seed=rows) for rows in (20, 72))
    want = x.cpu().double() @ w.cpu().double().T
    norm = float(want.norm())

    def error(got: torch.Tensor) -> float:
        return float((got.cpu().double() - want).norm()) / norm

    gx, gw = ((448 * 6 / y.abs().max().float()).reshape(1) for y in (x, w))
    (a, sa), (b, sb) = fi_core.nvfp4_quantize(x, gx), fi_core.nvfp4_quantize(w, gw)
    assert error(fi_core.mm_fp4(a, b.t(), sa, sb.t(), 1 / (gx * gw))) < 0.16
    assert error(fi_core.mm_bf16_fp4(x, b, sb, 1 / gw)) < 0.12
    (a, sa), (b, sb) = fi_core.mxfp4_quantize(x), fi_core.mxfp4_quantize(w)
    assert error(fi_core.mm_fp4(a, b.t(), sa, sb.t(), block_size=32, use_nvfp4=False)) < 0.2
    (a, sa), (b, sb) = fi_core.mxfp8_quantize(x), fi_core.mxfp8_quantize(w)
    assert error(fi_core.mm_mxfp8(a, b.t(), sa, sb)) < 0.06
    (a, sa), (b, sb) = fi_core.mxfp8_quantize(x.view(2, 10, 256)), fi_core.mxfp8_quantize(w)
    got = fi_core.bmm_mxfp8(a, torch.stack((b, b)).mT, sa, torch.stack((sb, sb)).view(2, 128, 8), torch.float32)
    assert error(got.view(20, 72)) < 0.06
    one = torch.full((1,), 1 / (448 * 6), device=device)
    (a, sa, token), (b, sb) = fi_core.nvfp4_quantize(x, one, per_token_activation=True), fi_core.nvfp4_quantize(w, gw)
    assert error(fi_core.mm_fp4(a, b.t(), sa, sb.t(), 1 / gw, torch.float32) * token.unsqueeze(1)) < 0.16


def test_a_scale_of_zero_gives_zero_and_nan_spreads(device: str) -> None:
    b, a = torch.full((40, 64), 0x77, dtype=torch.uint8, device=device), torch.ones(3, 128, device=device).bfloat16()
    zeros = torch.zeros(128, 8, dtype=torch.uint8, device=device)
    assert (fi_core.mm_bf16_fp4(a, b, zeros) == 0).all()
    zeros.view(-1)[16] = 0x7F  # row 1
    got = fi_core.mm_bf16_fp4(a, b, zeros)
    assert got[:, 1].isnan().all()
    assert (got[:, [0, *range(2, 40)]] == 0).all()


def test_tuning_changes_nothing(device: str) -> None:
    b, codes = packed(40, 96, device), scales(40, 6, device, 0x28, 0x40)
    a = rand(4, 96, dtype=torch.bfloat16, device=device)
    with fi_core.autotune():
        tuned = fi_core.mm_bf16_fp4(a, b, codes, backend="auto")
    assert torch.equal(tuned, fi_core.mm_bf16_fp4(a, b, codes, skip_check=True))


@pytest.mark.parametrize(
    "name", ["mm_fp4", "mm_bf16_fp4", "mm_mxfp8", "bmm_mxfp8", "grouped_mm_fp4", "grouped_mm_mxfp8"]
)
def test_backend_queries(name: str) -> None:
    function: Any = getattr(fi_core, name)
    assert function.is_backend_supported("cudnn", 90)
    assert function.is_compute_capability_supported(80)
    assert not function.is_backend_supported("wgmma_sm90")


def u8(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.uint8)


def fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fi_core.mm_fp4(u8(2, 32), u8(33, 4), u8(128, 4), u8(4, 128)), ValueError, r"b must have shape \[k, n\]"),
    (lambda: fi_core.mm_fp4(fp8(2, 32), u8(32, 4), u8(128, 4), u8(4, 128)), ValueError, "a must be uint8"),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4), u8(4, 128)),
        ValueError, "b_descale must be contiguous in the order of b",
    ),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4), u8(128, 8).t()),
        ValueError, r"b_descale must have shape \[4, 4\], or \[128, 4\] in layout layout_128x4",
    ),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4).int(), u8(128, 4).t()),
        ValueError, "a_descale must be uint8 or float8_e4m3fn",
    ),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4), u8(128, 4).t(), block_size=32),
        ValueError, "block_size must be 16 with use_nvfp4=True",
    ),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4), u8(128, 4).t(), torch.ones(2)),
        ValueError, "alpha must have one element",
    ),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4), u8(128, 4).t(), backend="trtllm"),
        ValueError, "n a multiple of 128",
    ),
    (
        lambda: fi_core.mm_fp4(u8(2, 32), u8(4, 32).t(), u8(128, 4), u8(128, 4).t(), backend="cublas"),
        BackendSupportedError, "does not support backend",
    ),
    (
        lambda: fi_core.mm_bf16_fp4(torch.ones(2, 64), u8(4, 32), u8(128, 4)),
        ValueError, "a must be bfloat16",
    ),
    (
        lambda: fi_core.mm_bf16_fp4(torch.ones(2, 62).bfloat16(), u8(4, 32), u8(128, 4)),
        ValueError, r"a must have shape \[m, 64\]",
    ),
    (
        lambda: fi_core.mm_bf16_fp4(torch.ones(2, 40).bfloat16(), u8(4, 20), u8(128, 4)),
        ValueError, "b must have a positive k that is a multiple of 16",
    ),
    (
        lambda: fi_core.mm_mxfp8(fp8(2, 64), fp8(4, 64).t(), u8(2, 3), u8(4, 2).t()),
        ValueError, r"a_descale must have shape \[2, 2\]",
    ),
    (
        lambda: fi_core.mm_mxfp8(fp8(128, 128), fp8(4, 128).t(), u8(128, 4), u8(512)),
        ValueError, r"a_descale must not have shape \[128, 4\] .*fits rows and layout layout_128x4; pass it flat",
    ),
    (
        lambda: fi_core.mm_mxfp8(fp8(2, 128), fp8(128, 128).t(), u8(512), u8(128, 4).t()),
        ValueError, r"b_descale must not have shape \[128, 4\] .*`block_scale_interleave` of rows",
    ),
    (
        lambda: fi_core.mm_mxfp8(fp8(2, 128), fp8(128, 128).t(), u8(2, 4), u8(512), backend="trtllm"),
        ValueError, 'a_descale must be flat in a swizzled layout for backend "trtllm"',
    ),
    (
        lambda: fi_core.mm_mxfp8(fp8(2, 128), fp8(128, 128).t(), u8(8), u8(512)),
        ValueError, r"a_descale must have shape \[2, 4\], or \[128, 4\] in layout layout_128x4",
    ),
    (
        lambda: fi_core.mm_mxfp8(fp8(2, 64), fp8(4, 64).t(), u8(512), u8(512), backend="trtllm"),
        ValueError, 'b must have n a multiple of 128 for backend "trtllm"',
    ),
    (
        lambda: fi_core.bmm_mxfp8(fp8(2, 72, 128), fp8(2, 128, 128).mT, u8(1024), u8(1024), torch.bfloat16),
        ValueError, r"A_scale must have shape \[2, 128, 4\] .*1024 flat values fit one padding of each matrix",
    ),
    (
        lambda: fi_core.grouped_mm_mxfp8(fp8(2, 64), fp8(1, 4, 64), u8(2, 2), u8(512), torch.tensor([0, 2])),
        ValueError, r"a_descale must have shape \[128, 4\] in layout layout_128x4.*`block_scale_interleave` makes",
    ),
    (
        lambda: fi_core.grouped_mm_mxfp8(
            fp8(2, 64), fp8(1, 4, 64), u8(2, 2), u8(512), torch.tensor([0, 2]), sf_layout="rows"
        ),
        ValueError, "sf_layout: a member of SfLayout is required; got 'rows'",
    ),
    (
        lambda: fi_core.bmm_mxfp8(fp8(1, 2, 64), fp8(1, 64, 4), u8(5), u8(512), torch.bfloat16),
        ValueError, r"A_scale must have shape \[1, 2, 2\]",
    ),
    (
        lambda: fi_core.grouped_mm_fp4(u8(2, 32), u8(1, 4, 16), u8(2, 4), u8(1, 4, 2), torch.tensor([0, 2])),
        ValueError, r"a must have shape \[cum_m, k\] and b",
    ),
    (
        lambda: fi_core.grouped_mm_mxfp8(
            fp8(2, 64), fp8(1, 4, 64), u8(512), u8(1, 512), torch.tensor([0, 2], dtype=torch.int32),
            out=torch.empty(2, 5).bfloat16(),
        ),
        ValueError, "out must have shape",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_refusals(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
