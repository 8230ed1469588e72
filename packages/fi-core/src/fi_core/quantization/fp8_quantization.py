"""Quantization to 8 bits with block scales: MXFP8 and groups of a token's elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.quantization import inverse_trace, ops, trace
from fi_core.quantization.fp4_quantization import grouped_scales
from fi_core.quantization.layout import (
    SfLayout,
    bytes_of,
    check_scales_of,
    checked_layout,
    layout_of,
    matrix_of,
    scale_shape,
)
from fi_core.quantization.ops import FLOAT_SCALE, POWER_OF_TWO_SCALE, UE8M0_SCALE
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = ["mxfp8_dequantize_host", "mxfp8_grouped_quantize", "mxfp8_quantize", "per_token_group_quant_8bit"]

_MX_BLOCK = 32


def _check_backend(backend: str) -> None:
    if backend not in ("cutile", "cuda"):
        raise ValueError(f'backend: "cutile" or "cuda" is required, which name the same kernels; got {backend!r}')


def _layout(swizzled: bool, layout: SfLayout | None) -> SfLayout:
    return layout_of(swizzled) if layout is None else checked_layout("sf_swizzle_layout", layout)


@fi_api(trace=trace.MXFP8_QUANTIZE)
def mxfp8_quantize(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes to MXFP8: e4m3 with a power-of-two scale (ue8m0) per block of 32.

    `sf = 2^ceil(log2(amax / 448))`, `q = e4m3(input / sf)`, rounded to nearest even and saturated (OCP Microscaling
    Formats 1.0, with the exponent rounded up). NaN does not count for amax, the largest magnitude of a block, and stays
    NaN; infinity becomes 448, with the largest scale.

    Args:
        input: `[..., m, k]`, fp16, bf16 or fp32, k a multiple of 32. A matrix may have strided rows.
        is_sf_swizzled_layout: True: scales in the 128x4 layout, padded with zeros; False: linear.
        alignment: k of the result is padded with zeros to a multiple of this, itself a multiple of 32.
        enable_pdl: programmatic dependent launch; None enables it where the hardware has it (sm_90 and later).
        backend: "cuda" or "cute-dsl"; FlashInfer's names, of which both select the kernels of fi.
        sf_swizzle_layout: the layout of the scales; None: as is_sf_swizzled_layout.

    Returns:
        (x_q, sf): `[..., m, k padded]`, e4m3, and the scales of the padded matrix, flat, uint8.

    Raises:
        ValueError: A shape, stride, device, alignment or layout does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    import torch

    if backend not in ("cuda", "cute-dsl"):
        raise ValueError(f'backend: "cuda" or "cute-dsl" is required, which name the same kernels; got {backend!r}')
    if alignment <= 0 or alignment % _MX_BLOCK:
        raise ValueError(f"alignment: a positive multiple of 32 is required; got {alignment}")
    layout, matrix = _layout(is_sf_swizzled_layout, sf_swizzle_layout), matrix_of("input", input)
    rows, k = matrix.shape
    width = round_up(k, alignment)
    out = input.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    padded_rows, padded_columns = scale_shape(layout, rows, width // _MX_BLOCK)
    scales = input.new_empty(padded_rows * padded_columns, dtype=torch.uint8)
    ops.block_quantize(
        out,
        scales,
        matrix,
        block_size=_MX_BLOCK,
        scale_format=UE8M0_SCALE,
        layout=layout.value,
        enable_pdl=enable_pdl,
    )
    return out if input.ndim == 2 else out.view(*input.shape[:-1], width), scales


@fi_api(trace=trace.MXFP8_GROUPED_QUANTIZE)
def mxfp8_grouped_quantize(
    a: torch.Tensor, mask: torch.Tensor, backend: str = "cutile"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the valid rows of each group to MXFP8, as `mxfp8_quantize`, for grouped GEMMs with masked rows.

    Args:
        a: `[b, m, k]`, fp16, bf16 or fp32, k a multiple of 32; the last dimension is contiguous.
        mask: `[b]`, int32, the number of valid rows of each group; read on the device, clamped to 0 ... m.
        backend: "cutile" or "cuda"; FlashInfer's names, of which both select the kernels of fi.

    Returns:
        (x_q, sf): `[m, padded k, b]`, e4m3, with k padded to a multiple of 128, and
        `[32, 4, padded m / 128, 4, padded k / 128, b]`, uint8. Both are views of contiguous tensors with the group
        first, the second in the 128x4 layout. Rows from the mask on are not written; scales of such rows are 0 in the
        last tile of 128 rows with a valid one, and not written in later ones.

    Raises:
        ValueError: A shape, stride, device or the backend does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    _check_backend(backend)
    if mask is None:
        raise TypeError("mask must be a torch.Tensor; got None")
    import torch

    if a.ndim != 3:
        raise ValueError(f"a: shape [b, m, k] is required; got {list(a.shape)}")
    b, m, k = a.shape
    width = round_up(k, 128)
    out = a.new_empty((b, m, width), dtype=torch.float8_e4m3fn)
    scales = a.new_empty((b, *scale_shape(SfLayout.layout_128x4, m, width // _MX_BLOCK)), dtype=torch.uint8)
    ops.block_quantize(out, scales, a, mask=mask, block_size=_MX_BLOCK, scale_format=UE8M0_SCALE)
    return out.permute(1, 2, 0), grouped_scales(scales)


@fi_api(trace=inverse_trace.MXFP8_DEQUANTIZE_HOST)
def mxfp8_dequantize_host(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> torch.Tensor:
    """Computes `input * 2^(scale - 127)` in fp32, the inverse of `mxfp8_quantize`.

    Args:
        input: `[m, k]`, e4m3, or uint8 with the same bits.
        scale_tensor: the scales of blocks of 32, uint8 or float8_e8m0fnu: flat as `mxfp8_quantize` returns them, or as
            `[m, k / 32]`, padded in a swizzled layout.
        is_sf_swizzled_layout: as for `mxfp8_quantize`.
        sf_swizzle_layout: as for `mxfp8_quantize`.

    Returns:
        `[m, k]`, fp32, on the device of input.

    Raises:
        ValueError: A shape or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    import torch

    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    values = bytes_of("input", input, "float8_e4m3fn").view(torch.float8_e4m3fn)
    matrix = matrix_of("input", values).contiguous()
    out = torch.empty(matrix.shape, dtype=torch.float32, device=input.device)
    scales = bytes_of("scale_tensor", scale_tensor, "float8_e8m0fnu").contiguous()
    check_scales_of("scale_tensor", scales, input.shape, _MX_BLOCK, layout)
    ops.block_dequantize(out, matrix, scales, block_size=_MX_BLOCK, scale_format=UE8M0_SCALE, layout=layout.value)
    return out.view(input.shape)


@fi_api(trace=trace.PER_TOKEN_GROUP_QUANT_8BIT)
def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cutile",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes groups of elements of a row to 8 bits, with one fp32 scale per group.

    `s = max(amax, eps) / limit` and `q = x / s`, rounded to nearest even and saturated, where amax is the largest
    magnitude of the group and limit that of dst_dtype. NaN does not count for amax; it stays NaN, as int8 it becomes 0.
    A group with an infinity has the scale infinity.

    Args:
        x: `[..., k]`, fp16, bf16 or fp32, k a multiple of group_size. A matrix may have strided rows.
        group_size: elements of a group: 16, 32, 64, 128 or 256.
        eps: lower bound of amax.
        dst_dtype: float8_e4m3fn (None), float8_e5m2 or int8.
        column_major_scales: stores the scales of one column next to each other; x is a matrix then.
        scale_tma_aligned: pads these columns to a multiple of 4 scales; requires column_major_scales.
        scale_ue8m0: rounds s up to a power of two; requires column_major_scales, as in FlashInfer.
        backend: as for `mxfp8_grouped_quantize`.

    Returns:
        (x_q, x_s): the shape of x, dst_dtype, and `[..., k / group_size]`, fp32.

    Raises:
        ValueError: A shape, stride, device, flag, backend or group_size does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    import torch

    _check_backend(backend)
    dst_dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    if dst_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        raise TypeError(f"dst_dtype: float8_e4m3fn, float8_e5m2 or int8 is required; got {dst_dtype}")
    if group_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"group_size: 16, 32, 64, 128 or 256 is required; got {group_size}")
    if (scale_tma_aligned or scale_ue8m0) and not column_major_scales:
        raise ValueError("column_major_scales: True is required with scale_tma_aligned or scale_ue8m0; got False")
    if column_major_scales and x.ndim != 2:
        raise ValueError(f"x: shape [m, k] is required with column_major_scales; got {list(x.shape)}")
    matrix = matrix_of("x", x) if x.ndim > 1 else x.unsqueeze(0)
    rows, groups = matrix.shape[0], matrix.shape[1] // group_size
    out = x.new_empty(matrix.shape, dtype=dst_dtype)
    if column_major_scales:
        pitch = round_up(rows, 4) if scale_tma_aligned else rows
        scales = x.new_empty((groups, pitch), dtype=torch.float32).t()[:rows]
    else:
        scales = x.new_empty((rows, groups), dtype=torch.float32)
    ops.block_quantize(
        out,
        scales,
        matrix,
        block_size=group_size,
        eps=eps,
        scale_format=POWER_OF_TWO_SCALE if scale_ue8m0 else FLOAT_SCALE,
    )
    return (out, scales) if x.ndim == 2 else (out.view(x.shape), scales.view(*x.shape[:-1], groups))
