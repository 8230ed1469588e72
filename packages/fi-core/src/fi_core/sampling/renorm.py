"""Computes a new row from each row: softmax, renormalised probabilities, masked logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.sampling import ops, trace
from fi_core.sampling.arguments import row_arguments, rows_of

if TYPE_CHECKING:
    import torch


def _rewrite(
    input: torch.Tensor,
    name: str,
    output: int,
    dtype: torch.dtype | None = None,
    **parameters: torch.Tensor | float,
) -> torch.Tensor:
    """Returns the rows renormalised or masked; dtype None: in the dtype that kernels read."""
    input, rows = rows_of(input, name)
    out = input.new_empty(*input.shape, dtype=dtype)
    ops.sample(out, input, output=output, logits=name == "logits", **row_arguments(parameters, rows))
    return out


@fi_api(trace=trace.SOFTMAX)
def softmax(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Computes `exp(x_j - max x) / sum_i exp(x_i - max x)` with `x = logits / temperature` for each row, in fp32.

    Results are within 2e-6 relative; below 2^-126 they are about 0.

    Args:
        logits: `[rows, vocab]`, fp32, fp16 or bf16. -inf has probability 0; elements of +inf share 1; NaN stays NaN and
            is no part of the sum; a row of -inf gives zeros.
        temperature: a number, or a float tensor `[rows]`, 0 or more. None: 1. 0, and a negative element of a tensor,
            gives equal probabilities (the caller makes the greedy choice).
        enable_pdl: accepted for compatibility; programmatic dependent launch is on where the hardware supports it.

    Returns:
        probs: fp32 `[rows, vocab]`.

    Raises:
        ValueError: a shape or device is wrong, or a temperature is negative.
        TypeError: a dtype is wrong, or temperature is neither a number nor a tensor.
    """
    import torch

    if temperature is None:
        return _rewrite(logits, "logits", ops.RENORMALISE, torch.float32)
    return _rewrite(logits, "logits", ops.RENORMALISE, torch.float32, temperature=temperature)


@fi_api(trace=trace.TOP_P_RENORM)
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """Divides the top-p set of each row by its sum; the other elements become 0.

    The set is that of `top_p_sampling_from_probs`.

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; NaN stays NaN, and a row of zeros stays zeros.
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
        is_deterministic: accepted for compatibility; results are always deterministic.

    Returns:
        renorm_probs: fp32 `[rows, vocab]`.

    Raises:
        ValueError: a shape, stride, device or parameter range is wrong.
        TypeError: a dtype is wrong, or a parameter is neither a number nor a tensor.
    """
    import torch

    return _rewrite(probs, "probs", ops.RENORMALISE, torch.float32, top_p=top_p)


@fi_api(trace=trace.TOP_K_RENORM)
def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int, is_deterministic: bool = False) -> torch.Tensor:
    """Divides the k largest elements of each row, ties included, by their sum; the others become 0.

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; NaN stays NaN.
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
        is_deterministic: accepted for compatibility; results are always deterministic.

    Returns:
        renorm_probs: `[rows, vocab]` of the dtype of probs.

    Raises:
        ValueError: a shape, stride, device or parameter range is wrong.
        TypeError: a dtype is wrong, or a parameter is neither a number nor a tensor.
    """
    return _rewrite(probs, "probs", ops.RENORMALISE, top_k=top_k).to(probs.dtype)


@fi_api(trace=trace.TOP_K_MASK)
def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keeps the k largest logits of each row and all equal to the k-th largest; the others become -inf.

    Args:
        logits: `[rows, vocab]`, fp32, fp16 or bf16; NaN stays NaN.
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.

    Returns:
        masked_logits: `[rows, vocab]` of the dtype of logits.

    Raises:
        ValueError: a shape, stride, device or parameter range is wrong.
        TypeError: a dtype is wrong, or a parameter is neither a number nor a tensor.
    """
    return _rewrite(logits, "logits", ops.MASK_OUT, top_k=top_k).to(logits.dtype)


top_k_renorm_prob, top_p_renorm_prob = top_k_renorm_probs, top_p_renorm_probs  # FlashInfer's older names
