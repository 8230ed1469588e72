"""Products of 16-bit tokens and fp8 weights (W8A16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.gemm import block_scaled_trace as trace
from fi_core.gemm.backends import takes_backends
from fi_core.gemm.dense import output
from fi_core.gemm.few_bits_op import gemm_few_bits, streams
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch


def _rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """x as a matrix of its rows."""
    if x.ndim == 2:
        return x
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(f"{name} must be contiguous but for strided rows of a matrix; got {x.stride()}") from None


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    tactic: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    import torch

    if a.dtype is not dtype:
        raise TypeError(f"a must be {dtype}; got {a.dtype}")
    if b.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"b must be float8_e4m3fn; got {b.dtype}")
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[1]:
        raise ValueError(f"a must have shape [.., k] and b [n, k]; got {list(a.shape)} and {list(b.shape)}")
    if alpha.dtype is not torch.float32 or alpha.numel() != 1:
        raise ValueError(f"alpha must be one fp32 element; got {list(alpha.shape)} of {alpha.dtype}")
    if tactic is not None:
        raise ValueError(f"tactic must be None: a cost model picks the tile; got {tactic!r}")
    out = output(a, (*a.shape[:-1], b.shape[0]), out, out_dtype or (dtype if out is None else None))
    if out.shape != (*a.shape[:-1], b.shape[0]):
        raise ValueError(f"out must have shape {[*a.shape[:-1], b.shape[0]]}; got {list(out.shape)}")
    rows, to = _rows("a", a), _rows("out", out)
    if dtype is torch.bfloat16 and streams(rows, b):
        gemm_few_bits(to, rows, b, alpha=alpha, bias=bias, block_size=0)
    else:
        gemm(to, rows, b.to(dtype), alpha.reshape(1), bias=bias)
    return out


@fi_api(trace=trace.MM_BF16_FP8)
@takes_backends("auto", "cute-dsl")
def mm_bf16_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    tactic: str | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `alpha * a @ b.T + bias` of bf16 tokens and e4m3 weights (W8A16) with fp32 sums and one rounding.

    bf16 holds every e4m3 value. On Hopper up to 128 tokens stream the weights, which become bf16 in registers; else a
    copy of the weights in bf16 is made in each call.

    Args:
        a: `[.., k]`, bf16; the leading dimensions can be seen as one. Any number of tokens works, 0 too.
        b: `[n, k]`, e4m3; rows may be strided. NaN weights give NaN or finite results.
        alpha: one fp32 element, the value that a 1 of b stands for.
        bias: `[n]`, of the dtype of the result.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        out: `[.., n]`; allocated if None.
        backend: a name of FlashInfer; both select the kernels of this library.
        tactic: None: a cost model picks the tile.
        workspace: accepted; the kernels need none.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit, or a tactic is given; the text names the argument.
        TypeError: A dtype does not fit.
        BackendSupportedError: There is no backend of this name.
    """
    import torch

    return _multiply(a, b, alpha, bias, out_dtype, out, tactic, torch.bfloat16)


@fi_api(trace=trace.MM_FP16_FP8)
@takes_backends("auto", "cute-dsl")
def mm_fp16_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    tactic: str | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `mm_bf16_fp8` for fp16 tokens. Each call makes a copy of the weights in fp16, which holds their values.

    Args:
        a: `[.., k]`, fp16.
        b, alpha, bias, out, backend, tactic, workspace: as for `mm_bf16_fp8`.
        out_dtype: bf16, fp16 or fp32; None means that of out, or fp16.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit, or a tactic is given; the text names the argument.
        TypeError: A dtype does not fit.
        BackendSupportedError: There is no backend of this name.
    """
    import torch

    return _multiply(a, b, alpha, bias, out_dtype, out, tactic, torch.float16)


def mm_bf16_fp8_workspace_bytes(
    m: int, n: int, k: int, device: torch.device | None = None, tactic: str | None = None
) -> int:
    """The bytes of workspace that `mm_bf16_fp8` and `mm_fp16_fp8` need: 0 for every product.

    Args:
        m, n, k: of the product.
        device, tactic: accepted.

    Returns:
        0.

    Raises:
        ValueError: m is negative, or n or k not positive.
    """
    if m < 0 or n < 1 or k < 1:
        raise ValueError(f"m must be 0 or more, n and k at least 1; got {m}, {n}, {k}")
    return 0


mm_fp16_fp8_workspace_bytes = mm_bf16_fp8_workspace_bytes
