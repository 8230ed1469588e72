"""Products whose numbers of rows differ, and products that are added to a matrix, by the names of FlashInfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.gemm.backends import takes_backends
from fi_core.gemm.dense import is_16_bit
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api
from fi_core.utils import int32_index

if TYPE_CHECKING:
    import torch


def _rows(a: torch.Tensor, transposed: bool) -> torch.Tensor:
    return a.mT.contiguous() if transposed else a


@fi_api
@takes_backends("cutile")
def masked_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    masked_m: torch.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "cutile",
    static_persistent: bool | None = None,
) -> torch.Tensor:
    """Computes `a[q] @ b[q]` for the first `masked_m[q]` rows of each matrix q, in fp32 with one rounding.

    Args:
        a: `[q, m, k]`, bf16 or fp16; `[q, k, m]` with transpose_a, which is copied.
        b: `[q, k, n]`, dtype of a; `[q, n, k]` with transpose_b.
        masked_m: `[q]`, int32 or int64; rows of each matrix. Other rows of the result are not defined.
        transpose_a, transpose_b: the order of a and b.
        out: `[q, m, n]`, dtype of a; rows may be strided. Allocated if None.
        backend: a name of FlashInfer; it selects the kernels of this library.
        static_persistent: accepted; it chooses kernels of FlashInfer.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        BackendSupportedError: There is no backend of this name.
    """
    is_16_bit(a, b)
    a = _rows(a, transpose_a)
    if out is None:
        out = a.new_empty(*a.shape[:-1], b.shape[-2 if transpose_b else -1])
    elif out.dtype is not a.dtype:
        raise TypeError(f"out must have the dtype of a, {a.dtype}; got {out.dtype}")
    gemm(out, a, b, masked_m=int32_index(masked_m), b_transposed=not transpose_b)
    return out


@fi_api
@takes_backends("cutile")
def ragged_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    max_m: int,
    max_m_device: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = True,
    out_dtype: torch.dtype | None = None,
    backend: str = "cutile",
) -> torch.Tensor:
    """Computes `a[m_indptr[q] : m_indptr[q + 1]] @ b[q].T` for each segment q, in fp32 with one rounding.

    Args:
        a: `[total_m, k]`, bf16 or fp16; `[k, total_m]` with transpose_a, which is copied.
        b: `[q, n, k]`, dtype of a; `[q, k, n]` without transpose_b.
        m_indptr: `[q + 1]`, int32 or int64. Segments may be empty. Rows of no segment are not defined.
        max_m, max_m_device: accepted; the offsets tell the rows of the longest segment.
        transpose_a, transpose_b: the order of a and b.
        out_dtype: bf16, fp16 or fp32; None means that of a.
        backend: a name of FlashInfer; it selects the kernels of this library.

    Returns:
        `[total_m, n]`.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        BackendSupportedError: There is no backend of this name.
    """
    is_16_bit(a, b)
    a = _rows(a, transpose_a)
    out = a.new_empty(a.shape[0], b.shape[-2 if transpose_b else -1], dtype=out_dtype)
    gemm(out, a, b, m_indptr=int32_index(m_indptr), b_transposed=not transpose_b)
    return out


@fi_api
@takes_backends("cutile")
def gemm_alpha_beta(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = True,
    alpha: float = 1.0,
    beta: float = 0.0,
    num_sms: int | None = None,
    backend: str = "cutile",
) -> torch.Tensor:
    """Computes `c = alpha * a @ b.T + beta * c` in fp32 with one rounding, in place.

    Args:
        a: `[m, k]`, bf16 or fp16; `[k, m]` with trans_a, which is copied.
        b: `[n, k]`, dtype of a; `[k, n]` without trans_b.
        c: `[m, n]`, bf16, fp16 or fp32; not read if beta is 0. It must not share storage with a or b.
        trans_a, trans_b: the order of a and b.
        alpha, beta: numbers.
        num_sms: accepted.
        backend: a name of FlashInfer; it selects the kernels of this library.

    Returns:
        c.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        BackendSupportedError: There is no backend of this name.
    """
    import torch

    is_16_bit(a, b)
    if c.dtype not in (torch.bfloat16, torch.float16, torch.float32):  # integers would take rounded sums
        raise TypeError(f"c must be bf16, fp16 or fp32; got {c.dtype}")
    if c.numel() and c.untyped_storage().data_ptr() in (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()):
        raise ValueError("c must not share storage with a or b, which are read while it is written")
    factor = None if alpha == 1 else a.new_full((1,), alpha, dtype=torch.float32)
    out = c if beta == 0 else c.new_empty(c.shape, dtype=torch.float32)
    gemm(out, _rows(a, trans_a), b, factor, b_transposed=not trans_b)
    return c if beta == 0 else c.copy_(out.add_(c.float(), alpha=beta))
