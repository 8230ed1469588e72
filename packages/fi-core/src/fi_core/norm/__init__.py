"""RMSNorm and LayerNorm, with residual-add and fp8-output forms."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fi_core.norm import ops, trace
from fi_core.norm.dit import (
    fused_dit_gate_residual_layernorm_gamma_beta as fused_dit_gate_residual_layernorm_gamma_beta,
)
from fi_core.norm.dit import (
    fused_dit_gate_residual_layernorm_scale_shift as fused_dit_gate_residual_layernorm_scale_shift,
)
from fi_core.norm.dit import fused_dit_residual_layernorm_scale_shift as fused_dit_residual_layernorm_scale_shift
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def _scale_tensor(scale: torch.Tensor | float, input: torch.Tensor) -> torch.Tensor:
    """Converts a float scale, which FlashInfer accepts too, to a tensor; this allocates and launches a fill kernel."""
    if isinstance(scale, (int, float)):
        import torch

        message = "scale: a number costs an allocation and a kernel each call; pass a float32 tensor with one element"
        warnings.warn(message, FutureWarning, stacklevel=4)
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
    """Computes `input * weight / sqrt(mean(input^2) + eps)` over the last dimension (RMSNorm, arXiv:1910.07467).

    The arithmetic is in fp32 with one rounding.

    Args:
        input: `[n, d]` or `[n, heads, d]`, fp16, bf16 or fp32. Rows may be strided; the last dimension is contiguous.
        weight: `[d]`, dtype of input.
        eps: added to the mean of the squares.
        out: shape and dtype of input; may be input itself. Allocated if None.
        enable_pdl: programmatic dependent launch; None enables it where the hardware has it (sm_90 and later).

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
    """
    if out is None:
        import torch

        out = torch.empty_like(input)
    ops.rmsnorm(out, input, weight, eps, enable_pdl)
    return out


@fi_api
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `silu(rmsnorm(input, weight, eps))` in fp32 with one rounding.

    Args:
        input: `[n, d]`, bf16 or fp16.
        weight: `[d]`, dtype of input.
        eps: as for `rmsnorm`.
        out: `[n, d]`, dtype of input, or e4m3, which saturates. Allocated in the dtype of input if None.
        block_scale: must be None.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        UnsupportedError: block_scale, or out in 4 bits.
    """
    import torch

    if out is None:
        out = torch.empty_like(input)
    if block_scale is not None or out.dtype not in (input.dtype, torch.float8_e4m3fn):
        raise UnsupportedError(
            f"block_scale must be None, and out of {input.dtype} or float8_e4m3fn; got out of {out.dtype}: call "
            "nvfp4_quantize on the result in 16 bits"
        )
    if out.shape != input.shape:
        raise ValueError(f"out must have shape {list(input.shape)}; got {list(out.shape)}")
    if weight.dtype is not input.dtype:
        raise TypeError(f"weight must have the dtype of input, {input.dtype}; got {weight.dtype}")
    wide = torch.nn.functional.silu(rmsnorm(input.float(), weight.float(), eps))
    return out.copy_(wide.clamp_(-448, 448) if out.dtype is torch.float8_e4m3fn else wide)


@fi_api(trace=trace.GEMMA_RMSNORM)
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Computes `input * (1 + weight) / sqrt(mean(input^2) + eps)`, the RMSNorm of Gemma.

    `1 + weight` is computed in fp32. Everything else is as in `rmsnorm`.

    Args:
        input: `[n, d]` or `[n, heads, d]`, fp16, bf16 or fp32.
        weight: `[d]`, dtype of input.
        eps: added to the mean of the squares.
        out: shape and dtype of input; may be input itself. Allocated if None.
        enable_pdl: programmatic dependent launch, as for `rmsnorm`.

    Returns:
        out.
    """
    if out is None:
        import torch

        out = torch.empty_like(input)
    ops.rmsnorm(out, input, weight, eps=eps, weight_bias=1.0, enable_pdl=enable_pdl)
    return out


@fi_api(trace=trace.FUSED_ADD_RMSNORM)
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds the residual and normalizes, in place.

    `residual = input + residual; input = rmsnorm(residual, weight, eps)`.
    The sum is fp32, and the norm is computed from the fp32 sum, before the sum is rounded into residual.

    Args:
        input: `[n, d]`, fp16, bf16 or fp32; receives the norm. Rows may be strided; the last dimension is contiguous.
        residual: shape and dtype of input; receives the sum. Rows may be strided.
        weight: `[d]`, dtype of input.
        eps: added to the mean of the squares.
        enable_pdl: programmatic dependent launch, as for `rmsnorm`.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
    """
    if residual is None:
        raise TypeError("residual must be a torch.Tensor; got None")
    ops.rmsnorm(input, input, weight, eps, enable_pdl, residual=residual)


@fi_api(trace=trace.GEMMA_FUSED_ADD_RMSNORM)
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds the residual and normalizes, in place, with the weight of Gemma: `1 + weight`, computed in fp32.

    Everything else is as in `fused_add_rmsnorm`.

    Args:
        input: `[n, d]`, fp16, bf16 or fp32; receives the norm.
        residual: shape and dtype of input; receives the sum.
        weight: `[d]`, dtype of input.
        eps: added to the mean of the squares.
        enable_pdl: programmatic dependent launch, as for `rmsnorm`.
    """
    if residual is None:
        raise TypeError("residual must be a torch.Tensor; got None")
    ops.rmsnorm(input, input, weight, eps=eps, residual=residual, weight_bias=1.0, enable_pdl=enable_pdl)


@fi_api(trace=trace.RMSNORM_QUANT)
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Computes `out = rmsnorm(input, weight, eps) / scale` in fp8, rounded once and saturated to the finite range.

    Args:
        out: shape of input, fp8 e4m3 or e5m2; receives the result.
        input: as for `rmsnorm`.
        weight: as for `rmsnorm`.
        scale: `[]` or `[1]`, fp32, on the device of input: the dequantization scale, real value = out * scale. The
            kernel reads it on the device and multiplies by 1 / scale in fp32, which is infinite for a scale below
            2^-128. A number is accepted with a FutureWarning, because converting it to a tensor
            allocates and launches a kernel in each call.
        eps: added to the mean of the squares.
        enable_pdl: programmatic dependent launch, as for `rmsnorm`.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
    """
    ops.rmsnorm(out, input, weight, scale=_scale_tensor(scale, input), eps=eps, enable_pdl=enable_pdl)


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
    """Adds the residual and normalizes to fp8.

    `residual = input + residual; out = rmsnorm(residual, weight, eps) / scale`.
    The norm is computed from the fp32 sum, before the sum is rounded into residual. input does not change.

    Args:
        out: shape of input, fp8 e4m3 or e5m2; receives the norm, saturated to the finite range.
        input: `[n, d]`, fp16, bf16 or fp32, as for `fused_add_rmsnorm`.
        residual: shape and dtype of input; receives the sum.
        weight: `[d]`, dtype of input.
        scale: `[]` or `[1]`, fp32, as for `rmsnorm_quant`.
        eps: added to the mean of the squares.
        enable_pdl: programmatic dependent launch, as for `rmsnorm`.
    """
    if residual is None:
        raise TypeError("residual must be a torch.Tensor; got None")
    ops.rmsnorm(
        out, input, weight, residual=residual, scale=_scale_tensor(scale, input), eps=eps, enable_pdl=enable_pdl
    )


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
    """Adds the residual, normalizes, and quantizes the norm to e4m3 with one scale per block of 128 elements of a row.

    `residual = input + residual; normed_out = rmsnorm(residual, weight, eps)`. For each block of rounded normed_out,
    `scale = max(max(abs(block)), 1e-10) / 448` and `out = normed_out / scale`, so `normed_out = out * scale`. The
    tensor input does not change.

    Args:
        out: `[n, d]`, e4m3; receives the quantized norm. Rows start at multiples of 8 bytes.
        block_scale: `[d / 128, n rounded up to a multiple of 4]`, fp32, contiguous; receives the scale of row i, block
            j at `block_scale[j, i]`. Columns from n on are not written.
        normed_out: `[n, d]`, dtype of input; receives the norm. It may be input itself.
        input: `[n, d]`, fp16 or bf16, d a multiple of 128. Rows may be strided and start at multiples of 16 bytes, also
            in residual and normed_out; the last dimension is contiguous.
        residual: `[n, d]`, dtype of input; receives the sum.
        weight: `[d]`, dtype of input.
        eps: added to the mean of the squares.
        enable_pdl: programmatic dependent launch, as for `rmsnorm`.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
    """
    ops.rmsnorm_block_quant(
        out, block_scale, normed_out, input, residual=residual, weight=weight, eps=eps, enable_pdl=enable_pdl
    )


@fi_api(trace=trace.LAYERNORM)
def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Computes `(input - mean) / sqrt(var + eps) * gamma + beta` over the last dimension (LayerNorm, arXiv:1607.06450).

    The variance is the biased one. The arithmetic is in fp32 with one rounding.

    Args:
        input: `[n, d]`, fp16, bf16 or fp32. Rows may be strided; the last dimension is contiguous.
        gemma: `[d]`, fp32, the scale gamma (the argument's name is FlashInfer's).
        beta: `[d]`, fp32, the shift.
        eps: added to the variance.

    Returns:
        A new tensor with the shape and dtype of input.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
    """
    import torch

    out = torch.empty_like(input)
    ops.layernorm(out, input, gemma, beta, eps=eps)
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
    """Computes `out = layernorm(input, gemma, beta, eps) / scale` in fp8.

    The result is rounded once and saturated to the finite range.

    Args:
        out: `[n, d]`, fp8 e4m3 or e5m2; receives the result.
        input: `[n, d]`, as for `layernorm`.
        gemma: `[d]`, fp32, the scale gamma.
        beta: `[d]`, fp32, the shift.
        scale: `[]` or `[1]`, fp32, as for `rmsnorm_quant`.
        eps: added to the variance.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit; the text names the argument.
    """
    ops.layernorm(out, input, gemma, beta, scale=_scale_tensor(scale, input), eps=eps)
