"""The inverses of the quantizers to e2m1, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.quantization import inverse_trace, ops
from fi_core.quantization.layout import (
    SfLayout,
    bytes_of,
    check_scales_of,
    checked_layout,
    in_fp32,
    layout_of,
    matrix_of,
)
from fi_core.quantization.ops import E4M3_SCALE, UE8M0_SCALE

if TYPE_CHECKING:
    import torch


def _dequantize(
    layout: SfLayout, block: int, scale_format: int, global_scale: torch.Tensor | None = None, **named: torch.Tensor
) -> torch.Tensor:
    """The inverse of a quantizer. named: values and scales, by the names of the public function."""
    import torch

    (name, values), (scales_name, scales) = named.items()
    matrix = matrix_of(name, bytes_of(name, values, "float4_e2m1fn_x2"), "k / 2").contiguous()
    out = torch.empty(matrix.shape[0], 2 * matrix.shape[1], dtype=torch.float32, device=values.device)
    kind = "float8_e4m3fn" if scale_format == E4M3_SCALE else "float8_e8m0fnu"
    scales = bytes_of(scales_name, scales, kind).contiguous()
    check_scales_of(scales_name, scales, (*values.shape[:-1], out.shape[1]), block, layout)
    ops.block_dequantize(
        out, matrix, scales, in_fp32(global_scale), block_size=block, scale_format=scale_format, layout=layout.value
    )
    return out.view(*values.shape[:-1], out.shape[1]) if values.ndim > 2 else out


@fi_api(trace=inverse_trace.E2M1_AND_UFP8SF_SCALE_TO_FLOAT)
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """Computes `e2m1 * scale * global_scale` in fp32 on the CPU: the inverse of `fp4_quantize`.

    Args:
        e2m1_tensor: `[m, k / 2]`, uint8, on any device; copied to the CPU.
        ufp8_scale_tensor: the scales, as `fp4_quantize` returns them or flat, on any device: uint8, or the dtype that
            ufp8_type names.
        global_scale_tensor: `[1]`, 1 / the global scale of the quantization; None: 1.
        sf_vec_size: elements of a block.
        ufp8_type: 1: e4m3 scales; 0: ue8m0.
        is_sf_swizzled_layout: as for `fp4_quantize`.
        is_sf_8x4_layout: as for `fp4_quantize`.

    Returns:
        `[m, k]`, fp32, on the CPU.

    Raises:
        ValueError: A shape or ufp8_type does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    if ufp8_type not in (0, 1):
        raise ValueError(f"ufp8_type: 0 (ue8m0) or 1 (e4m3) is required; got {ufp8_type}")
    return _dequantize(
        layout_of(is_sf_swizzled_layout, is_sf_8x4_layout),
        sf_vec_size,
        E4M3_SCALE if ufp8_type else UE8M0_SCALE,
        None if global_scale_tensor is None else global_scale_tensor.cpu(),
        e2m1_tensor=e2m1_tensor.cpu(),
        ufp8_scale_tensor=ufp8_scale_tensor.cpu(),
    )


@fi_api(trace=inverse_trace.MXFP4_DEQUANTIZE)
def mxfp4_dequantize(
    a_fp4: torch.Tensor,
    a_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> torch.Tensor:
    """Computes `e2m1 * 2^(scale - 127)` in fp32, the inverse of `mxfp4_quantize`, on the device of a_fp4.

    Args:
        a_fp4: `[m, k / 2]`, uint8.
        a_sf: the scales of blocks of 32, uint8 or float8_e8m0fnu, as `mxfp4_quantize` returns them, or flat.
        sfLayout: their layout.

    Returns:
        `[m, k]`, fp32.

    Raises:
        ValueError: A shape, device or layout does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    return _dequantize(checked_layout("sfLayout", sfLayout), 32, UE8M0_SCALE, a_fp4=a_fp4, a_sf=a_sf)


@fi_api(trace=inverse_trace.MXFP4_DEQUANTIZE_HOST)
def mxfp4_dequantize_host(weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Computes `e2m1 * 2^(scale - 127)` in fp32 for linear scales.

    Args:
        weight: `[m, k / 2]`, uint8.
        scale: `[m, k / group_size]`, or flat; uint8 or float8_e8m0fnu.
        group_size: elements of a block.

    Returns:
        `[m, k]`, fp32, on the device of weight.

    Raises:
        ValueError: A shape or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    return _dequantize(SfLayout.layout_linear, group_size, UE8M0_SCALE, weight=weight, scale=scale)
