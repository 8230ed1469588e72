"""MXFP8 and groups of 8 bits: scales by hand, padding, layouts of fp32 scales, refusals, equality of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from fi_core import SfLayout


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().cpu().view(torch.uint8)


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(448.0, 0), (449.0, 1), (896.0, 1), (897.0, 2), (224.0, -1), (1.0, -8), (0.0, -127), (float("inf"), 127)],
)
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_block(amax: float, exponent: int, device: str) -> None:
    x = torch.full((1, 32), amax / 4 if amax < 1e9 else 1.0, device=device)
    x[0, 5] = -amax
    q, scales = fi_core.mxfp8_quantize(x, False)
    assert scales.tolist() == [exponent + 127]
    assert float(q[0, 5]) == pytest.approx(max(-448.0, -amax * 2.0**-exponent), rel=1 / 16)
    if amax in (448.0, 896.0, 224.0, 1.0):
        assert torch.equal(fi_core.mxfp8_dequantize_host(q, scales, False), x.float())


def test_the_inverse_is_within_half_a_step(device: str) -> None:
    x = normal(37, 160).to(device)
    for layout in SfLayout:
        q, scales = fi_core.mxfp8_quantize(x, sf_swizzle_layout=layout)
        y = fi_core.mxfp8_dequantize_host(q, scales, sf_swizzle_layout=layout)
        amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
        assert ((y - x.float()).abs() <= x.float().abs() / 16 + amax * 2.0**-15).all()


def test_rows_are_padded_with_zeros(device: str) -> None:
    x = normal(5, 96).to(device)
    q, scales = fi_core.mxfp8_quantize(x, False, alignment=256)
    plain, plain_scales = fi_core.mxfp8_quantize(x, False)
    assert q.shape == (5, 256)
    assert torch.equal(bits(q[:, :96]), bits(plain))
    assert not bits(q[:, 96:]).any()
    assert torch.equal(scales.view(5, 8)[:, :3], plain_scales.view(5, 3))
    assert not scales.view(5, 8)[:, 3:].any()
    many, _ = fi_core.mxfp8_quantize(x.view(1, 5, 96).expand(2, 5, 96), alignment=128)
    assert many.shape == (2, 5, 128)


@pytest.mark.parametrize("mask", [[0, 1, 129, 200], [5, 200, 128, 3]])
def test_groups_are_quantized_alone(mask: list[int], device: str) -> None:
    x = normal(4, 200, 160).to(device)
    q, scales = fi_core.mxfp8_grouped_quantize(x, torch.tensor(mask, dtype=torch.int32, device=device))
    assert q.shape == (200, 256, 4)
    assert scales.shape == (32, 4, 2, 4, 2, 4)
    for i, count in enumerate(mask):
        alone, alone_scales = fi_core.mxfp8_quantize(x[i, :count], alignment=128)
        assert torch.equal(bits(q[:count, :, i]), bits(alone))
        tiles = scales.permute(5, 2, 4, 0, 1, 3)[i, : -(-count // 128)]
        assert torch.equal(tiles.reshape(-1), alone_scales)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_groups_of_a_row(size: int, dtype: torch.dtype, device: str) -> None:
    x = normal(7, 512).to(device)
    q, s = fi_core.per_token_group_quant_8bit(x, size, dst_dtype=dtype)
    limit = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    groups = x.float().unflatten(-1, (-1, size))
    assert torch.equal(s.cpu(), groups.abs().amax(-1).cpu() / limit)  # CUDA multiplies by the reciprocal
    want = (groups / s[..., None]).flatten(-2)
    assert torch.equal(bits(q), bits((want.round() if dtype == torch.int8 else want).clamp(-limit, limit).to(dtype)))
    assert torch.equal(q.float().abs().unflatten(-1, (-1, size)).amax(-1), torch.full_like(s, limit))


def test_fp32_scales_by_columns(device: str) -> None:
    x = normal(7, 256).to(device)
    q, s = fi_core.per_token_group_quant_8bit(x, 64)
    for aligned, pitch in ((False, 7), (True, 8)):
        column_q, columns = fi_core.per_token_group_quant_8bit(
            x, 64, column_major_scales=True, scale_tma_aligned=aligned
        )
        assert columns.stride() == (1, pitch)
        assert torch.equal(columns, s)
        assert torch.equal(bits(column_q), bits(q))
    q, powers = fi_core.per_token_group_quant_8bit(x, 64, column_major_scales=True, scale_ue8m0=True)
    assert torch.equal(powers, torch.exp2(s.log2().ceil()))
    assert torch.equal(bits(q), bits((x.float().unflatten(-1, (-1, 64)) / powers[..., None]).flatten(-2).to(q.dtype)))


def test_special_values(device: str) -> None:
    x = torch.zeros(1, 64, device=device)
    x[0, 16:20] = torch.tensor([float("nan"), 2.0, -0.0, -1.0])
    x[0, 32:34] = torch.tensor([float("inf"), 3.0])
    q, s = fi_core.per_token_group_quant_8bit(x, 16)
    assert s.tolist() == [
        [pytest.approx(1e-10 / 448), pytest.approx(2 / 448), float("inf"), pytest.approx(1e-10 / 448)]
    ]
    assert bits(q)[0, 16:20].tolist() == [0x7F, 0x7E, 0x80, 0xF6]
    assert bits(q)[0, 32:34].tolist() == [0x7F, 0]
    assert not bits(q)[0, :16].any()
    assert fi_core.per_token_group_quant_8bit(x, 16, dst_dtype=torch.int8)[0][0, 16] == 0
    assert not bits(fi_core.per_token_group_quant_8bit(x[:, :16], 16, eps=0.0)[0]).any()


@pytest.mark.parametrize("shape", [(64,), (3, 5, 64), (0, 64)])
def test_groups_of_any_shape(shape: tuple[int, ...], device: str) -> None:
    x = normal(*shape).to(device)
    q, s = fi_core.per_token_group_quant_8bit(x, 32)
    assert q.shape == shape
    assert s.shape == (*shape[:-1], 2)


def test_groups_of_strided_elements_are_refused_for_their_stride() -> None:
    """Not for their rank, which may be any."""
    with pytest.raises(ValueError, match="x must be contiguous in its last dimension"):
        fi_core.per_token_group_quant_8bit(torch.ones(2, 3, 64, 2)[..., 0], 32)


X = torch.zeros(4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fi_core.mxfp8_quantize(X[:, :40]), ValueError, r"input .*multiple of 32; got \[4, 40\]"),
        (lambda: fi_core.mxfp8_quantize(X, alignment=48), ValueError, "alignment: a positive multiple of 32"),
        (lambda: fi_core.mxfp8_quantize(X, backend="x"), ValueError, "backend: .* got 'x'"),
        (lambda: fi_core.mxfp8_quantize(X, sf_swizzle_layout=1), ValueError, "sf_swizzle_layout: a member of SfLayout"),
        (
            lambda: fi_core.mxfp8_grouped_quantize(X, torch.zeros(4, dtype=torch.int32)),
            ValueError,
            r"a: shape \[b, m, k\] is required; got \[4, 64\]",
        ),
        (
            lambda: fi_core.mxfp8_grouped_quantize(X[None], torch.zeros(1, dtype=torch.int32), "triton"),
            ValueError,
            "backend: .* got 'triton'",
        ),
        (
            lambda: fi_core.per_token_group_quant_8bit(X, 64, 1e-10, None, False, False, False, "triton"),
            ValueError,
            "backend: .* got 'triton'",
        ),
        (lambda: fi_core.per_token_group_quant_8bit(X, 48), ValueError, "group_size: 16, 32, .* got 48"),
        (lambda: fi_core.per_token_group_quant_8bit(X, 128), ValueError, r"x .*multiple of 128; got \[4, 64\]"),
        (
            lambda: fi_core.per_token_group_quant_8bit(X, 16, dst_dtype=torch.uint8),
            TypeError,
            "dst_dtype: float8_e4m3fn, float8_e5m2 or int8",
        ),
        (
            lambda: fi_core.per_token_group_quant_8bit(X, 16, scale_ue8m0=True),
            ValueError,
            "column_major_scales: True is required with",
        ),
        (
            lambda: fi_core.mxfp8_dequantize_host(X.to(torch.float8_e4m3fn), torch.zeros(9, dtype=torch.uint8)),
            ValueError,
            r"scale_tensor must have shape .* in layout_128x4, or be flat; got \[9\]",
        ),
        (
            lambda: fi_core.mxfp8_dequantize_host(X.to(torch.int8), torch.zeros(128, 4, dtype=torch.uint8)),
            TypeError,
            "input: uint8 or float8_e4m3fn is required; got torch.int8",
        ),
    ],
)
def test_refusals_name_the_argument(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    shuffled = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    for x in (every.view(256, 256), shuffled.view(256, 256)):
        calls: list[Any] = [fi_core.mxfp8_quantize]
        for out in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            calls.append(lambda a, out=out: fi_core.per_token_group_quant_8bit(a, 64, dst_dtype=out))
        for call in calls:
            for a, b in zip(call(x), call(x.cuda()), strict=True):
                assert torch.equal(bits(a), bits(b))
