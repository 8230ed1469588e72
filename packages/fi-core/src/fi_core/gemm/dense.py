"""Products of one or several pairs of matrices, without scales or with those of tensors and rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fi_core.gemm import trace
from fi_core.gemm.backends import takes_backends
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    import torch

_BLOCK_K = 128  # columns of a block of prepared weights
_SHUFFLED_ROWS = 32  # rows that are permuted among themselves


def are_columns(b: torch.Tensor, a: torch.Tensor, name: str = "b", *, batched: bool = False) -> None:
    """Raises unless b is `[k, n]` for a `[m, k]`, or batched `[.., k, n]` for `[.., m, k]`."""
    if a.ndim != 2 and not batched:
        raise ValueError(f"a must have shape [m, k]; got {list(a.shape)}")
    if b.ndim != a.ndim or b.shape[-2] != a.shape[-1]:
        batch = "batch, " if a.ndim == 3 else ""
        raise ValueError(f"{name} must have shape [{batch}k, n] with k = {a.shape[-1]}; got {list(b.shape)}")


def output(
    a: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """`out` if it is given and of the dtype, else a new tensor; bf16 unless told otherwise."""
    if out is None:
        import torch

        return a.new_empty(*shape, dtype=out_dtype or torch.bfloat16)  # a tuple of sizes takes half a microsecond more
    if out_dtype is not None and out.dtype is not out_dtype:
        raise ValueError(f"out must have out_dtype {out_dtype}; got {out.dtype}")
    return out


def is_fp8(a: torch.Tensor, b: torch.Tensor, a_name: str = "a", b_name: str = "b") -> None:
    """Raises unless both operands are float8, and one of them e4m3."""
    pair = a.dtype, b.dtype
    if pair in _fp8_pairs():
        return
    for name, x in ((a_name, a), (b_name, b)):
        if x.dtype not in _fp8_pairs()[0] + _fp8_pairs()[1]:
            raise ValueError(f"{name} must be float8_e4m3fn or float8_e5m2; got {x.dtype}")
    raise ValueError(f"{b_name} must be float8_e4m3fn if {a_name} is float8_e5m2; got {b.dtype}")


@functools.cache
def _fp8_pairs() -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    import torch

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return (e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3)


def is_16_bit(a: torch.Tensor, b: torch.Tensor, a_name: str = "a", b_name: str = "b") -> None:
    """Raises unless both operands are bf16, or both fp16."""
    import torch

    if a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{a_name} must be bfloat16 or float16; got {a.dtype}")
    if b.dtype is not a.dtype:
        raise TypeError(f"{b_name} must have the dtype of {a_name}, {a.dtype}; got {b.dtype}")


@fi_api(trace=trace.MM_BF16)
@takes_backends("cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl", "auto")
def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cudnn",
) -> torch.Tensor:
    """Computes `a @ b + bias` in fp32 with one rounding.

    Args:
        a: `[m, k]`, bf16 or fp16; rows may be strided. Any m works, 0 too.
        b: `[k, n]`, dtype of a. Either dimension may be the contiguous one; a transposed weight `[n, k]` is fastest.
        bias: `[n]`, dtype of the result.
        pdl: accepted; programmatic dependent launch is on where the hardware has it.
        out: `[m, n]`; rows may be strided. Allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        backend: a name of FlashInfer; all of them select the kernels of this library.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
        BackendSupportedError: There is no backend of this name.
    """
    try:
        if out is None or out_dtype is not None:
            out = output(a, (a.shape[0], b.shape[-1]), out, out_dtype)
        if a.element_size() == 1:  # which the operator multiplies too
            is_16_bit(a, b)
        gemm(out, a, b, bias=bias, b_transposed=True)
    except Exception:  # checks cost time, so that they wait for the kernel's refusal, and say it in the caller's words
        is_16_bit(a, b)
        are_columns(b, a)
        raise
    return out


@fi_api(trace=trace.BMM_BF16)
@takes_backends("cudnn", "cutlass", "cutile", "cute-dsl", "auto")
def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cudnn",
) -> torch.Tensor:
    """Computes `A[i] @ B[i]` for each matrix of a batch, in fp32 with one rounding.

    Args:
        A: `[batch, m, k]`, bf16 or fp16; rows and matrices may be strided.
        B: `[batch, k, n]`, dtype of A. Either of k and n may be the contiguous dimension.
        out: `[batch, m, n]`; allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        backend: as for `mm_bf16`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    try:
        out = output(A, (*A.shape[:-1], B.shape[-1]), out, out_dtype)
        if A.element_size() == 1:
            is_16_bit(A, B, "A", "B")
        gemm(out, A, B, b_transposed=True)
    except Exception:
        is_16_bit(A, B, "A", "B")
        are_columns(B, A, "B", batched=True)
        raise
    return out


@fi_api(trace=trace.BMM_FP8)
@takes_backends("cudnn", "cublas", "cutlass", "cute-dsl", "auto")
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "cublas",
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes `A[i] @ B[i] * A_scale * B_scale` for each matrix of a batch.

    Args:
        A: `[batch, m, k]`, e4m3 or e5m2; rows and matrices may be strided.
        B: `[batch, k, n]`, e4m3 or e5m2, but not both e5m2; k is the contiguous dimension for speed.
        A_scale: one fp32 element, the value that a 1 of A stands for; or `[batch, m]`, one for each row.
        B_scale: one fp32 element; or `[batch, n]`, one for each column.
        dtype: of the result, bf16, fp16 or fp32.
        out: `[batch, m, n]`; allocated if None.
        backend: as for `mm_bf16`.
        use_fast_accum: as for `mm_fp8`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    try:
        out = output(A, (*A.shape[:-1], B.shape[-1]), out, dtype)
        if A.element_size() != 1:
            is_fp8(A, B, "A", "B")
        gemm(out, A, B, _flat(A_scale), _flat(B_scale), b_transposed=True, use_fast_accum=use_fast_accum)
    except Exception:
        is_fp8(A, B, "A", "B")
        are_columns(B, A, "B", batched=True)
        raise
    return out


def _flat(scale: torch.Tensor) -> torch.Tensor:
    """One element has one dimension, so it is not a block scale."""
    return scale.reshape(1) if scale.ndim > 1 and scale.numel() == 1 else scale


@fi_api(trace=trace.MM_FP8)
@takes_backends("trtllm_low_latency", "cublas", "cudnn", "cutlass", "cutedsl", "cute-dsl", "auto")
def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "trtllm_low_latency",
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes `alpha * a @ b.T`, or `(a * a_scale) @ (b * b_scale).T` with scales of rows.

    Args:
        a: `[m, k]`, e4m3 or e5m2; rows may be strided.
        b: `[n, k]`, e4m3 or e5m2; or weights of `prepare_low_latency_gemm_weights`, `[k / 128, n, 128]`. The latter are
            copied back to `[n, k]` in each call, so plain weights are faster.
        alpha: one fp32 element; None means 1. It excludes a_scale and b_scale.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        out: `[m, n]`; allocated if None.
        backend: as for `mm_bf16`.
        a_scale: `[m]`, fp32: the value that a 1 of each row stands for.
        b_scale: `[n]`, fp32: the same for each row of b.
        use_fast_accum: True lets the tensor cores add products over all of k, which `torch._scaled_mm` has under that
            name. It takes 0.93 to 0.97 of the time from 257 rows on (H200). Such sums keep about 14 bits: at k =
            16384 cuBLAS has a relative error of 0.0036 for random values and 0.2 for positive ones, where the default,
            which adds 128 or 256 products at a time in fp32, has up to 0.0002 and 0.002. Up to 64 rows, for some of up
            to 256, for other GPUs and on a CPU sums are in fp32 all the same.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    weight = b if b.ndim == 2 else _plain_weights(b)
    if alpha is not None:
        if a_scale is not None or b_scale is not None:
            raise ValueError("alpha must be None if a_scale or b_scale is given; multiply one of them by it")
        if alpha.numel() != 1:
            raise ValueError(f"alpha must have one element; got {list(alpha.shape)}")
        a_scale = _flat(alpha)
    try:
        if out is None or out_dtype is not None:
            out = output(a, (a.shape[0], weight.shape[0]), out, out_dtype)
        gemm(out, a, weight, a_scale, b_scale, use_fast_accum=use_fast_accum)
    except Exception:
        is_fp8(a, b)
        raise
    return out


@functools.lru_cache(maxsize=256)
def _shuffled_rows(n: int, device: torch.device) -> torch.Tensor:
    """Where each row of plain weights lies in prepared ones: of 32 rows, row r at r % 4 * 8 + r / 4."""
    import torch

    row = torch.arange(n, device=device)
    own = row % _SHUFFLED_ROWS
    return row - own + own % 4 * (_SHUFFLED_ROWS // 4) + own // 4


def _plain_weights(b: torch.Tensor) -> torch.Tensor:
    if b.ndim != 3 or b.shape[1] % _SHUFFLED_ROWS or b.shape[2] != _BLOCK_K:
        raise ValueError(f"b must have shape [n, k], or [k / 128, n, 128] with n a multiple of 32; got {list(b.shape)}")
    rows = b.view(dtype=_bytes()).index_select(1, _shuffled_rows(b.shape[1], b.device))
    return rows.transpose(0, 1).reshape(b.shape[1], -1).view(b.dtype)


def _bytes() -> torch.dtype:
    import torch

    return torch.uint8


def prepare_low_latency_gemm_weights(
    w: torch.Tensor, permutation_indices_cache: MutableMapping[torch.Size, torch.Tensor] | None = None
) -> torch.Tensor:
    """Converts weights to the layout of FlashInfer's low-latency kernels, which `mm_fp8` accepts.

    Args:
        w: `[n, k]`, fp8; n is a multiple of 32 and k of 128.
        permutation_indices_cache: accepted; the permutation is a formula.

    Returns:
        `[k / 128, n, 128]`, rows permuted among each 32.

    Raises:
        ValueError: The shape or dtype of w does not fit.
    """
    if w.dtype.itemsize != 1:
        raise ValueError(f"w must be float8_e4m3fn or float8_e5m2; got {w.dtype}")
    if w.ndim != 2 or w.shape[0] % _SHUFFLED_ROWS or w.shape[1] % _BLOCK_K:
        raise ValueError(f"w must have shape [n, k] with n % 32 == 0 and k % 128 == 0; got {list(w.shape)}")
    n, k = w.shape
    shuffled = w.new_empty(w.shape, dtype=_bytes())
    shuffled[_shuffled_rows(n, w.device)] = w.view(dtype=_bytes())
    return shuffled.view(n, k // _BLOCK_K, _BLOCK_K).transpose(0, 1).contiguous().view(w.dtype)


@fi_api(trace=trace.TINYGEMM)
@takes_backends()
def tinygemm_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> None:
    """Computes `out = input @ weight.T + bias`, as `torch.nn.functional.linear`; meant for few rows, takes any number.

    Args:
        input: `[m, k]`, bf16 or fp16; rows may be strided.
        weight: `[n, k]`, dtype of input.
        out: `[m, n]`, bf16, fp16 or fp32.
        bias: `[n]`, dtype of out.
        use_pdl: accepted; programmatic dependent launch is on where the hardware has it.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    try:
        if input.element_size() == 1:
            is_16_bit(input, weight, "input", "weight")
        gemm(out, input, weight, bias=bias)
    except Exception:
        is_16_bit(input, weight, "input", "weight")
        raise
