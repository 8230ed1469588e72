"""Products of groups of rows with a matrix each, as experts of an MoE layer need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.gemm import block_scaled_trace, trace
from fi_core.gemm.backends import takes_backends
from fi_core.gemm.block_scaled import MXFP8, Rows, Scaled, fp4_format, scaled
from fi_core.gemm.dense import is_16_bit, is_fp8, output
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api
from fi_core.quantization.layout import SfLayout, checked_layout

if TYPE_CHECKING:
    import torch


@fi_api(trace=trace.GROUPED_BF16)
@takes_backends("cudnn", "auto")
def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """Computes `a[m_indptr[g] : m_indptr[g + 1]] @ b[g].T` for each group g, in fp32 with one rounding.

    Args:
        a: `[cum_m, k]`, bf16 or fp16; rows may be strided.
        b: `[groups, n, k]`, dtype of a.
        m_indptr: `[groups + 1]`, int32. Groups may be empty. Rows of no group are not written.
        out: `[cum_m, n]`; allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        backend: "cudnn" or "auto"; both select the kernels of this library.
        tactic: accepted; a cost model chooses the tile shape.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    try:
        out = output(a, (a.shape[0], b.shape[-2]), out, out_dtype)
        if a.dtype.itemsize == 1:  # which the operator multiplies too
            is_16_bit(a, b)
        gemm(out, a, b, m_indptr=m_indptr)
    except Exception:
        is_16_bit(a, b)
        raise
    return out


@fi_api(trace=trace.GROUPED_FP8)
@takes_backends("cudnn", "auto")
def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """As `grouped_mm_bf16` for fp8 operands, times alpha.

    Args:
        a: `[cum_m, k]`, e4m3 or e5m2.
        b: `[groups, n, k]`, e4m3 or e5m2, but not both e5m2.
        m_indptr, out, out_dtype, backend, tactic: as for `grouped_mm_bf16`.
        alpha: one fp32 element; None means 1.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    if alpha is not None and alpha.numel() != 1:
        raise ValueError(f"alpha must have one element; got {list(alpha.shape)}")
    try:
        out = output(a, (a.shape[0], b.shape[-2]), out, out_dtype)
        if a.dtype.itemsize != 1:
            is_fp8(a, b)
        gemm(out, a, b, None if alpha is None else alpha.reshape(1), m_indptr=m_indptr)
    except Exception:
        is_fp8(a, b)
        raise
    return out


def _multiply(
    left: Scaled,
    right: Scaled,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    n: int,
) -> torch.Tensor:
    if alpha is not None and alpha.numel() != 1:
        raise ValueError(f"alpha must have one element; got {list(alpha.shape)}")
    a, b = left.bf16(), right.bf16()
    out = output(a, (a.shape[0], n), out, out_dtype)
    gemm(out, a, b.view(-1, n, b.shape[-1]), None if alpha is None else alpha.reshape(1), m_indptr=m_indptr)
    return out


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(
            f"a must have shape [cum_m, k] and b [groups, n, k] (fp4: k / 2); got {list(a.shape)} and {list(b.shape)}"
        )


@fi_api(trace=block_scaled_trace.GROUPED_FP4)
@takes_backends("cudnn", "auto")
def grouped_mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """As `grouped_mm_bf16` for fp4 operands with block scales, times alpha. Both operands become bf16 first.

    Args:
        a: `[cum_m, k / 2]`, uint8: two e2m1 a byte, an even k in the lower half.
        b: `[groups, n, k / 2]`, uint8.
        a_descale: `[cum_m, k / block_size]`, or in the 128x4 layout
            `[cum_m padded to 128, k / block_size padded to 4]`; uint8 or e4m3 (block_size 32: ue8m0). A shape that fits
            both is read as the latter.
        b_descale: `[groups, n, k / block_size]`; or in the 128x4 layout, flat for all rows, or
            `[groups, n padded to 128, k / block_size padded to 4]`.
        m_indptr: `[groups + 1]`, int32. Groups may be empty. Rows of no group are not written.
        alpha: one fp32 element; None means 1.
        out: `[cum_m, n]`; allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        block_size: 16 (NVFP4) or 32 (MXFP4).
        backend, tactic: as for `grouped_mm_bf16`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    _check(a, b)
    format = fp4_format(block_size)
    left, right = scaled("a", a, "a_descale", a_descale, format), scaled("b", b, "b_descale", b_descale, format)
    return _multiply(left, right, m_indptr, alpha, out, out_dtype, b.shape[1])


@fi_api(trace=block_scaled_trace.GROUPED_MXFP8)
@takes_backends("cudnn", "auto")
def grouped_mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
    sf_layout: SfLayout = SfLayout.layout_128x4,
) -> torch.Tensor:
    """As `grouped_mm_bf16` for MXFP8 operands. Both operands become bf16 first, which holds them exactly.

    Args:
        a: `[cum_m, k]`, e4m3; k is a multiple of 32.
        b: `[groups, n, k]`, e4m3.
        a_descale: powers of two (ue8m0) of 32 values of k, uint8: `[cum_m padded to 128, k / 32 padded to 4]` in the
            128x4 layout, or flat.
        b_descale: `[groups, n padded to 128, k / 32 padded to 4]`, or flat for all rows.
        m_indptr, out, out_dtype, backend, tactic: as for `grouped_mm_bf16`.
        sf_layout: of both scales; `SfLayout.layout_linear` means `[cum_m, k / 32]` and `[groups, n, k / 32]`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    _check(a, b)
    checked_layout("sf_layout", sf_layout)
    left = scaled("a", a, "a_descale", a_descale, MXFP8, sf_layout, Rows.NEVER)
    right = scaled("b", b, "b_descale", b_descale, MXFP8, sf_layout, Rows.NEVER)
    return _multiply(left, right, m_indptr, None, out, out_dtype, b.shape[1])
