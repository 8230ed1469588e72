"""RMSNorm and LayerNorm with their residual-add and fp8 forms."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fi_core.norm import ops, trace
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch


def _scale_tensor(scale: torch.Tensor | float, input: torch.Tensor) -> torch.Tensor:
    """FlashInfer takes a float too: made into a tensor, which allocates and launches a fill."""
    if isinstance(scale, (int, float)):
        import torch

        message = "scale: a number costs an allocation and a kernel each call; pass a float32 tensor with one element"
        warnings.warn(message, FutureWarning, stacklevel=3)
        return input.new_full((1,), scale, dtype=torch.float32)
    return scale


@fi_api(trace=trace.RMSNORM)
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """`input * weight / sqrt(mean(input^2) + eps)` over the last dimension (RMSNorm, arXiv:1910.07467).

    input: `[n, d]` or `[n, heads, d]`, fp16, bf16 or fp32; rows may be strided, the last dimension is contiguous.
    weight: `[d]`, same dtype. out: like input, may be input itself; allocated if None.
    Arithmetic in fp32, one rounding.
    enable_pdl: programmatic dependent launch; None means on where the hardware has it (sm_90 and later).

    Returns out. Raises ValueError (shape, stride, device) or TypeError (dtype) naming the argument.
    """
    if out is None:
        out = input.new_empty(input.shape)
    ops.rmsnorm(out, input, None, weight, None, eps, 0.0, enable_pdl)
    return out


@fi_api(trace=trace.GEMMA_RMSNORM)
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """`input * (1 + weight) / sqrt(mean(input^2) + eps)`: as `rmsnorm`, with 1 + weight formed in fp32 (Gemma)."""
    if out is None:
        out = input.new_empty(input.shape)
    ops.rmsnorm(out, input, None, weight, None, eps, 1.0, enable_pdl)
    return out


@fi_api(trace=trace.FUSED_ADD_RMSNORM)
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """In place: `s = input + residual`; residual becomes `s`, input becomes `rmsnorm(s, weight, eps)`.

    input, residual: `[n, d]`, one dtype of fp16, bf16 and fp32; rows may be strided, the last dimension is contiguous.
    weight: `[d]`, same dtype. s is fp32: the norm is taken of it before it is rounded into residual.
    enable_pdl: as for `rmsnorm`.

    Raises ValueError (shape, stride, device) or TypeError (dtype) naming the argument.
    """
    ops.rmsnorm(input, input, residual, weight, None, eps, 0.0, enable_pdl)


@fi_api(trace=trace.GEMMA_FUSED_ADD_RMSNORM)
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """As `fused_add_rmsnorm`, with 1 + weight formed in fp32 in place of weight (Gemma)."""
    ops.rmsnorm(input, input, residual, weight, None, eps, 1.0, enable_pdl)


@fi_api(trace=trace.RMSNORM_QUANT)
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`rmsnorm(input, weight, eps) / scale`, rounded once into out, which saturates at its largest finite value.

    out: fp8 e4m3 or e5m2, the shape of input. input, weight, enable_pdl: as for `rmsnorm`.
    scale: fp32 tensor of one element, shape `[]` or `[1]`, on the device of input: real value = out * scale. It is read
    on the device. A number is accepted with a FutureWarning: it is made into a tensor first, which allocates.

    Raises ValueError (shape, stride, device) or TypeError (dtype) naming the argument.
    """
    ops.rmsnorm(out, input, None, weight, _scale_tensor(scale, input), eps, 0.0, enable_pdl)


@fi_api(trace=trace.FUSED_ADD_RMSNORM_QUANT)
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`s = input + residual`; residual becomes `s`, out becomes `rmsnorm(s, weight, eps) / scale`; input stays.

    out, scale: as for `rmsnorm_quant`. input, residual, weight, eps, enable_pdl: as for `fused_add_rmsnorm`.
    """
    ops.rmsnorm(out, input, residual, weight, _scale_tensor(scale, input), eps, 0.0, enable_pdl)


@fi_api(trace=trace.FUSED_ADD_RMSNORM_FP8_BLOCK_QUANT)
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`s = input + residual`; residual becomes `s`, normed_out `rmsnorm(s, weight, eps)`, out its e4m3 form.

    input, residual, normed_out: `[n, d]`, fp16 or bf16, d a multiple of 128; rows may be strided, the last dimension is
    contiguous and rows start at multiples of 16 bytes (of 8 in out). weight: `[d]`, same dtype. input stays as it is.
    out: `[n, d]` e4m3. A block is 128 neighbours of a row: its scale is the largest magnitude of its rounded normed_out
    (1e-10 at least) / 448, and normed_out = out * scale.
    block_scale: fp32 `[d / 128, n rounded up to a multiple of 4]`, contiguous: that of row i, block j is
    `block_scale[j, i]`. What lies beyond n is not written.
    enable_pdl: as for `rmsnorm`.

    Raises ValueError (shape, stride, device) or TypeError (dtype) naming the argument.
    """
    ops.rmsnorm_block_quant(out, block_scale, normed_out, input, residual, weight, eps, enable_pdl)


@fi_api(trace=trace.LAYERNORM)
def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`(input - mean) / sqrt(var + eps) * gemma + beta` over the last dimension, biased variance (arXiv:1607.06450).

    input: `[n, d]`, fp16, bf16 or fp32; rows may be strided, the last dimension is contiguous. gemma, beta: `[d]`, fp32
    (the name is FlashInfer's). Arithmetic in fp32, one rounding.

    Returns a new tensor like input. Raises ValueError (shape, stride, device) or TypeError (dtype) naming the argument.
    """
    out = input.new_empty(input.shape)
    ops.layernorm(out, input, gemma, beta, None, eps)
    return out


@fi_api(trace=trace.LAYERNORM_QUANT)
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> None:
    """`layernorm(input, gemma, beta, eps) / scale`, rounded once into out. out, scale: as for `rmsnorm_quant`."""
    ops.layernorm(out, input, gemma, beta, _scale_tensor(scale, input), eps)
