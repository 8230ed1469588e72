"""Products of groups of rows with a matrix each, as experts of an MoE layer need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.gemm import trace
from fi_core.gemm.backends import takes_backends
from fi_core.gemm.dense import is_16_bit, is_fp8, output
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api

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
        gemm(out, a, b, None if alpha is None else alpha.reshape(1), m_indptr=m_indptr)
    except Exception:
        is_fp8(a, b)
        raise
    return out
