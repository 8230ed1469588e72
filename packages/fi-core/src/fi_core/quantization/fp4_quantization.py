"""Quantization to 4-bit floats (e2m1) with block scales: NVFP4 and MXFP4, their layouts and their inverse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fi_core.activation import silu_and_mul
from fi_core.observe.log import fi_api
from fi_core.quantization import inverse_trace, ops, trace
from fi_core.quantization.four_over_six import NVFP44Over6Config, laid_out, quantize_rows, resolve_nvfp4_4over6
from fi_core.quantization.fp4_dequantization import (
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
)
from fi_core.quantization.layout import SfLayout, checked_layout, in_fp32, layout_of, matrix_of, scale_shape
from fi_core.quantization.ops import E4M3_SCALE, UE8M0_SCALE
from fi_core.runtime.errors import WrongDtypeError, refuse
from fi_core.utils import (
    check_shape_dtype_device,
    get_shuffle_block_size,
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
    round_up,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "get_shuffle_block_size",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_quantize",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
]


def _check_backend(backend: str) -> None:
    if backend not in ("cuda", "cute-dsl"):
        raise ValueError(f'backend: "cuda" or "cute-dsl" is required, which name the same kernels; got {backend!r}')


def _check_block(sf_vec_size: int, *supported: int) -> None:
    if sf_vec_size not in supported:
        raise NotImplementedError(f"sf_vec_size: {' or '.join(map(str, supported))} is required; got {sf_vec_size}")


def _check_recipe_block(block: int, scale_format: int = E4M3_SCALE) -> None:
    if block != 16 or scale_format != E4M3_SCALE:
        raise ValueError(f"nvfp4_4over6 must be None unless blocks of 16 have e4m3 scales; got blocks of {block}")


def _quantize(
    x: torch.Tensor,
    layout: SfLayout,
    block: int,
    scale_format: int = E4M3_SCALE,
    global_scale: torch.Tensor | None = None,
    *,
    gated: bool = False,
    inverse: bool = False,
    shuffle: bool = False,
    enable_pdl: bool | None = None,
    recipe: NVFP44Over6Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed values and the scales, `[padded rows, padded blocks of a row]`."""
    import torch

    matrix = matrix_of("input", x)
    if recipe is not None:
        _check_recipe_block(block, scale_format)
        matrix = silu_and_mul(matrix) if gated else matrix
        out, scales = quantize_rows(matrix, global_scale, recipe, inverse=inverse)
        if shuffle:
            order = get_shuffle_matrix_a_row_indices(out, 128).to(out.device)
            out, scales = out[order], scales[order]
        return out if x.ndim == 2 else out.view(*x.shape[:-1], -1), laid_out(scales, layout)
    rows, k = matrix.shape[0], matrix.shape[1] // (2 if gated else 1)
    out = x.new_empty((rows, k // 2), dtype=torch.uint8)
    scales = x.new_empty(scale_shape(layout, rows, k // block), dtype=torch.uint8)
    ops.block_quantize(
        out,
        scales,
        matrix,
        in_fp32(global_scale),
        block_size=block,
        scale_format=scale_format,
        layout=layout.value,
        gated=gated,
        inverse_global_scale=inverse,
        shuffle=shuffle,
        enable_pdl=enable_pdl,
    )
    return out if x.ndim == 2 else out.view(*x.shape[:-1], k // 2), scales


@fi_api(trace=trace.FP4_QUANTIZE)
def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each block of a row to e2m1 with one scale: NVFP4, or MXFP4 with power-of-two scales.

    With e4m3 scales, `sf = e4m3(global_scale * amax / 6)` and `q = e2m1(x / (sf / global_scale))`, so
    `x = q * sf / global_scale`. With power-of-two scales (ue8m0), `sf = 2^ceil(log2(amax / 6))` and `q = e2m1(x / sf)`
    (OCP Microscaling Formats 1.0, with the exponent rounded up). Both round to nearest even and saturate; amax is the
    largest magnitude of the block. A scale of 0 gives values 0. NaN does not count for amax and becomes 6 with its
    sign; infinity becomes 6, with the largest scale.

    Args:
        input: `[..., m, k]`, fp16, bf16, fp32 or e4m3, k a multiple of sf_vec_size. A matrix may have strided rows. If
            it is column-major (stride 1 in the dimension before the last), its transpose is quantized and both results
            are transposed.
        global_scale: `[1]`, fp32, conventionally `448 * 6 / max(abs(input))`; None: 1. Power-of-two scales ignore it.
        sf_vec_size: elements of a block, 16 or 32.
        sf_use_ue8m0: power-of-two scales.
        is_sf_swizzled_layout: True: scales in a swizzled layout, padded with zeros; False: linear.
        is_sf_8x4_layout: the swizzled layout is 8x4 instead of 128x4 (`SfLayout`).
        is_global_scale_inversed: global_scale is 1 / the factor.
        enable_pdl: programmatic dependent launch; None enables it where the hardware has it (sm_90 and later).
        backend: "cuda" or "cute-dsl"; FlashInfer's names, of which both select the kernels of fi.
        nvfp4_4over6: an `NVFP44Over6Config`, by which each block of 16 chooses between the scales of amax / 6 and
            amax / 4, computed by torch; None and False: amax / 6.

    Returns:
        (x_q, sf): `[..., m, k / 2]`, uint8, two values a byte with the even one in the lower half; and uint8,
        `[rows padded, k / sf_vec_size padded]`.

    Raises:
        NotImplementedError: sf_vec_size is not supported.
        ValueError: A shape, stride, device or backend does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    _check_backend(backend)
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    _check_block(sf_vec_size, 16, 32)
    columns = input.ndim >= 2 and input.stride(-2) == 1 and input.stride(-1) != 1
    x = input.transpose(-2, -1) if columns else input
    out, scales = _quantize(
        x,
        layout_of(is_sf_swizzled_layout, is_sf_8x4_layout),
        sf_vec_size,
        UE8M0_SCALE if sf_use_ue8m0 else E4M3_SCALE,
        None if sf_use_ue8m0 else global_scale,
        inverse=is_global_scale_inversed and global_scale is not None and not sf_use_ue8m0,
        enable_pdl=enable_pdl,
        recipe=recipe,
    )
    return (out.transpose(-2, -1), scales.transpose(-2, -1)) if columns else (out, scales)


@fi_api(trace=trace.NVFP4_QUANTIZE)
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nvfp4_4over6: object = None,
) -> tuple[torch.Tensor, ...]:
    """Quantizes to NVFP4: e2m1 with an e4m3 scale per block of 16 and one global scale, as `fp4_quantize`.

    Args:
        a: `[m, k]`, fp16, bf16, fp32 or e4m3, k a multiple of sf_vec_size.
        a_global_sf: `[1]`, fp32, conventionally `448 * 6 / max(abs(a))`.
        sfLayout: the layout of the scales.
        do_shuffle: permutes the rows of values and scales for trtllm-style kernels with an epilogue tile of 128
            (`shuffle_matrix_a`, `shuffle_matrix_sf_a`); requires the 128x4 layout, m a multiple of 128 and k of 64.
        sf_vec_size: elements of a block, 16 or 32.
        enable_pdl: programmatic dependent launch, as for `fp4_quantize`.
        backend: as for `fp4_quantize`.
        per_token_activation: each row gets a scale `s = max(abs(row)) * a_global_sf` instead, so that
            `a = a_fp4 * a_sf * s`; a_global_sf is conventionally `1 / (448 * 6)` then. NaN in a row makes s NaN.
        expanded_idx_to_permuted_idx: None: rows stay in their order; index the results to permute them.
        out_scale: None: the scales of rows are the third result.
        nvfp4_4over6: as for `fp4_quantize`.

    Returns:
        (a_fp4, a_sf): `[m, k / 2]`, uint8, and the scales, uint8, as `fp4_quantize` returns them. With
        per_token_activation also s: `[m]`, fp32.

    Raises:
        NotImplementedError: sf_vec_size, expanded_idx_to_permuted_idx or out_scale is not supported.
        ValueError: A shape, device, layout or backend does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    if a_global_sf is None:
        raise TypeError("a_global_sf must be a torch.Tensor; got None")
    _check_backend(backend)
    _check_block(sf_vec_size, 16, 32)
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    refuse("index the rows of the results", expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx)
    refuse("take the third result, or copy it", out_scale=out_scale)
    layout = checked_layout("sfLayout", sfLayout)
    if do_shuffle and (
        layout is not SfLayout.layout_128x4 or a.ndim != 2 or a.shape[0] % 128 or a.shape[1] % (4 * sf_vec_size)
    ):
        raise ValueError(
            f"do_shuffle: sfLayout 128x4 and a of shape [m, k] with m a multiple of 128 and k of {4 * sf_vec_size} are "
            f"required; got {layout.name} and {list(a.shape)}"
        )
    if not per_token_activation:
        return _quantize(
            a, layout, sf_vec_size, global_scale=a_global_sf, shuffle=do_shuffle, enable_pdl=enable_pdl, recipe=recipe
        )
    import torch

    if a.ndim != 2 or a.dtype.itemsize == 1 or a_global_sf.numel() != 1:
        got = f"{a.dtype} {list(a.shape)} and a_global_sf {list(a_global_sf.shape)}"
        raise ValueError(f"per_token_activation: a of shape [m, k] in 16 or 32 bits is required; got {got}")
    scale = torch.linalg.vector_norm(a, math.inf, -1, dtype=torch.float32) * a_global_sf.float().reshape(1)
    safe = torch.where(scale == 0, 1.0, scale)
    fp4, sf = _quantize(
        a,
        layout,
        sf_vec_size,
        global_scale=safe,
        inverse=True,
        shuffle=do_shuffle,
        enable_pdl=enable_pdl,
        recipe=recipe,
    )
    return fp4, sf, scale


@fi_api(trace=trace.MXFP4_QUANTIZE)
def mxfp4_quantize(
    a: torch.Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes to MXFP4: e2m1 with a power-of-two scale (ue8m0) per block of 32, as `fp4_quantize`.

    Args:
        a: `[m, k]`, fp16, bf16, fp32 or e4m3, k a multiple of 32.
        backend: as for `fp4_quantize`.
        enable_pdl: programmatic dependent launch, as for `fp4_quantize`.
        sfLayout: the layout of the scales.

    Returns:
        (a_fp4, a_sf): `[m, k / 2]`, uint8, and the scales, uint8, as `fp4_quantize` returns them.

    Raises:
        ValueError: A shape, device, layout or backend does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    _check_backend(backend)
    return _quantize(a, checked_layout("sfLayout", sfLayout), 32, UE8M0_SCALE, enable_pdl=enable_pdl)


@fi_api(trace=trace.SILU_AND_MUL_NVFP4_QUANTIZE)
def silu_and_mul_nvfp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    nvfp4_4over6: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `silu(input[..., :k]) * input[..., k:]`, rounds it to the dtype of input, and quantizes it to NVFP4.

    The product is that of `silu_and_mul`; the quantization is that of `fp4_quantize` with e4m3 scales.

    Args:
        input: `[..., 2 k]`, fp16, bf16 or fp32, k a multiple of sf_vec_size.
        global_scale: `[1]`, fp32.
        sf_vec_size: elements of a block, 16.
        is_sf_swizzled_layout: as for `fp4_quantize`.
        is_sf_8x4_layout: as for `fp4_quantize`.
        enable_pdl: programmatic dependent launch, as for `fp4_quantize`.
        nvfp4_4over6: as for `fp4_quantize`.

    Returns:
        (x_q, sf): `[..., k / 2]`, uint8, and the scales, uint8, as `fp4_quantize` returns them.

    Raises:
        NotImplementedError: sf_vec_size is not supported.
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    if global_scale is None:
        raise TypeError("global_scale must be a torch.Tensor; got None")
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    _check_block(sf_vec_size, 16)
    layout = layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    return _quantize(
        input, layout, sf_vec_size, global_scale=global_scale, gated=True, enable_pdl=enable_pdl, recipe=recipe
    )


def _quantize_batch(
    a: torch.Tensor,
    global_scale: torch.Tensor,
    block: int,
    mask: torch.Tensor | None,
    recipe: NVFP44Over6Config | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[b, m, k / 2]` and scales `[b, padded m, padded blocks]`, each matrix padded alone."""
    import torch

    if a.ndim != 3:
        raise ValueError(f"a: shape [b, m, k] is required; got {list(a.shape)}")
    b, m, k = a.shape
    if recipe is not None:
        _check_recipe_block(block)
        out, scales = quantize_rows(a, global_scale, recipe)
        if mask is not None:
            check_shape_dtype_device(mask, (b,), torch.int32, a.device, "mask")
            scales = scales.masked_fill(torch.arange(m, device=a.device)[:, None] >= mask.view(-1, 1, 1), 0)
        return out, laid_out(scales, SfLayout.layout_128x4)
    out = a.new_empty((b, m, k // 2), dtype=torch.uint8)
    scales = a.new_empty((b, *scale_shape(SfLayout.layout_128x4, m, k // block)), dtype=torch.uint8)
    ops.block_quantize(out, scales, a, in_fp32(global_scale), mask, block_size=block)
    return out, scales


@fi_api(trace=trace.NVFP4_BATCHED_QUANTIZE)
def nvfp4_batched_quantize(
    a: torch.Tensor, a_global_sf: torch.Tensor, sf_vec_size: int = 16, nvfp4_4over6: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a batch of matrices to NVFP4, as `fp4_quantize`; the scales of each matrix are padded alone.

    Args:
        a: `[b, m, k]`, fp16, bf16, fp32 or e4m3, k a multiple of sf_vec_size; the last dimension is contiguous.
        a_global_sf: `[1]` or `[b]`, fp32.
        sf_vec_size: elements of a block, 16 or 32.
        nvfp4_4over6: as for `fp4_quantize`.

    Returns:
        (a_fp4, a_sf): `[b, m, k / 2]`, uint8, and `[b, padded m * padded k / sf_vec_size]`, uint8, in the 128x4 layout.

    Raises:
        NotImplementedError: sf_vec_size is not supported.
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    if a_global_sf is None:
        raise TypeError("a_global_sf must be a torch.Tensor; got None")
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    _check_block(sf_vec_size, 16, 32)
    out, scales = _quantize_batch(a, a_global_sf, sf_vec_size, None, recipe)
    return out, scales.flatten(1)


@fi_api(trace=trace.SCALED_FP4_GROUPED_QUANTIZE)
def scaled_fp4_grouped_quantize(
    a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor, nvfp4_4over6: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the valid rows of each group to NVFP4, for grouped GEMMs with masked rows.

    Args:
        a: `[e, m, k]`, fp16, bf16, fp32 or e4m3, k a multiple of 16; the last dimension is contiguous.
        mask: `[e]`, int32, the number of valid rows of each group; read on the device, clamped to 0 ... m.
        a_global_sf: `[e]` or `[1]`, fp32.
        nvfp4_4over6: as for `fp4_quantize`.

    Returns:
        (a_fp4, a_sf): `[m, k / 2, e]`, uint8, and `[32, 4, padded m / 128, 4, padded k / 64, e]`, e4m3. Both are views
        of contiguous tensors with the group first, the second in the 128x4 layout. Rows from the mask on are not
        written; scales of such rows are 0 in the last tile of 128 rows with a valid one, and not written in later ones.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    if mask is None:
        raise TypeError("mask must be a torch.Tensor; got None")
    if a_global_sf is None:
        raise TypeError("a_global_sf must be a torch.Tensor; got None")
    import torch

    out, scales = _quantize_batch(a, a_global_sf, 16, mask, recipe)
    return out.permute(1, 2, 0), grouped_scales(scales.view(torch.float8_e4m3fn))


def grouped_scales(scales: torch.Tensor) -> torch.Tensor:
    """The view `[32, 4, rows / 128, 4, columns / 4, e]` of scales `[e, rows, columns]` in the 128x4 layout."""
    e, rows, columns = scales.shape
    return scales.view(e, rows // 128, columns // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


@fi_api(trace=inverse_trace.BLOCK_SCALE_INTERLEAVE)
def block_scale_interleave(unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copies linear block scales to the 128x4 layout (`SfLayout`), padded with zeros.

    Args:
        unswizzled_sf: `[m, c]` or `[e, m, c]`, uint8 or bf16; each matrix is padded alone.
        out: `[e * padded m * padded c]`, dtype of unswizzled_sf. Allocated if None.

    Returns:
        out.

    Raises:
        TypeError: unswizzled_sf has another dtype; it is an AssertionError too, as FlashInfer's.
        ValueError: A shape or device does not fit; the text names the argument.
    """
    import torch

    if unswizzled_sf.dtype not in (torch.uint8, torch.bfloat16):
        raise WrongDtypeError(f"unswizzled_sf: uint8 or bfloat16 is required; got {unswizzled_sf.dtype}")
    if unswizzled_sf.ndim not in (2, 3):
        raise ValueError(f"unswizzled_sf: shape [m, c] or [e, m, c] is required; got {list(unswizzled_sf.shape)}")
    if out is None:
        *batch, m, c = unswizzled_sf.shape
        size = (batch[0] if batch else 1) * round_up(m, 128) * round_up(c, 4)
        if size >= 2**63:
            raise ValueError(f"unswizzled_sf: too large with its padding; got {list(unswizzled_sf.shape)}")
        out = unswizzled_sf.new_empty(size)
    ops.block_scale_interleave(out, unswizzled_sf.contiguous())
    return out


nvfp4_block_scale_interleave = block_scale_interleave


def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Permutes the rows of a weight for a trtllm-style kernel, as `get_shuffle_matrix_a_row_indices` defines it.

    Args:
        input_tensor: `[m, k]`, any dtype; m a multiple of 32, or of 16 if epilogue_tile_m is not a multiple of 128.
        epilogue_tile_m: rows of the epilogue tile of the kernel.

    Returns:
        `[m, k]`, a new tensor.

    Raises:
        ValueError: input_tensor has another shape.
    """
    return input_tensor[get_shuffle_matrix_a_row_indices(input_tensor, epilogue_tile_m).to(input_tensor.device)]


def shuffle_matrix_sf_a(input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> torch.Tensor:
    """Permutes the rows of linear scales as `shuffle_matrix_a` does with those of the weight, and swizzles them.

    Args:
        input_tensor: `[m, k / num_elts_per_sf]`, uint8, m a multiple of 128, the second dimension of 4.
        epilogue_tile_m: rows of the epilogue tile of the kernel.
        num_elts_per_sf: elements that share a scale, 16 or 32.

    Returns:
        Flat, uint8, in the 128x4 layout.

    Raises:
        ValueError: input_tensor has another shape, or num_elts_per_sf another value.
    """
    indices = get_shuffle_matrix_sf_a_row_indices(input_tensor, epilogue_tile_m, num_elts_per_sf)
    return block_scale_interleave(input_tensor[indices.to(input_tensor.device)])
