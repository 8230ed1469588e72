"""Low-rank adapters of linear layers: many in a batch, each token with its own or none (LoRA, arXiv:2106.09685).

The delta of a token with adapter l is `scale B[l] (A[l] x)`. Names and arguments are those of vLLM's punica functions.
Weights that several tokens share are read once; sums have one order, without atomics. Nothing waits for the device, and
which token has which adapter is read from device memory, so that a captured graph serves other adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.lora.ops import EXPAND as _EXPAND
from fi_core.lora.ops import MOST_SLICES as _MOST_SLICES
from fi_core.lora.ops import SHRINK as _SHRINK
from fi_core.lora.ops import lora_delta as _delta
from fi_core.lora.trace import EXPAND, SHRINK, linear
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["add_lora_linear", "bgmv_expand", "bgmv_expand_slice", "bgmv_shrink"]


def _bank(name: str, weights: torch.Tensor) -> torch.Tensor:
    """`[loras, 1, rows, k]`; `[loras, rows, k]` is taken too."""
    if weights.ndim == 3:
        return weights.unsqueeze(1)
    if weights.ndim != 4 or weights.shape[1] != 1:
        raise ValueError(f"{name} must have shape [loras, 1, rows, k]; got {list(weights.shape)}")
    return weights


@fi_api(trace=SHRINK)
def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Computes `output_tensor[t] = scaling A[lora_indices_tensor[t]] inputs[t]`, zeros for tokens without an adapter.

    Args:
        inputs: `[tokens, in]`, bf16 or fp16; in is a multiple of 8.
        lora_a_weights: `[loras, 1, rank, in]` or `[loras, rank, in]`, dtype of inputs; rank is 8 to 256, a multiple of
            8: pad with zeros.
        output_tensor: `[tokens, rank]`, bf16, fp16 or fp32, written.
        lora_indices_tensor: `[tokens]`, int32 or int64; -1: no adapter.
        scaling: a factor of the outputs.

    Raises:
        ValueError: a shape, stride, device or index does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    bank = _bank("lora_a_weights", lora_a_weights)
    _delta(output_tensor, inputs, lora_indices_tensor, a=bank, stage=_SHRINK, scale=scaling, fill=True)


@fi_api(trace=EXPAND)
def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Adds `B[lora_indices_tensor[t]] inputs[t]` to output_tensor[t], or writes it there.

    Args:
        inputs: `[tokens, rank]`, dtype of the weights, or fp32, which is rounded to it.
        lora_b_weights: `[loras, 1, out, rank]` or `[loras, out, rank]`, bf16 or fp16; out is a multiple of 8, rank as
            for `bgmv_shrink`.
        output_tensor: `[tokens, out or more]`, bf16, fp16 or fp32; its first columns are written.
        lora_indices_tensor: `[tokens]`, int32 or int64. Tokens of -1 have no adapter: nothing is added to them, and
            zeros are written.
        add_inputs: False writes the products in place of what output_tensor holds.

    Raises:
        ValueError: a shape, stride, device or index does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    _expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, None, add_inputs)


@fi_api
def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Does what `bgmv_expand` does for the columns from slice_offset on of output_tensor.

    Args:
        inputs, lora_b_weights, output_tensor, lora_indices_tensor, add_inputs: as for `bgmv_expand`.
        slice_offset: the first column; even for outputs of 16 bits.
        slice_size: the columns, as many as rows of lora_b_weights.

    Raises:
        ValueError: a shape, stride, device, offset or index does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    _expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor, slice_offset, slice_size, add_inputs)


def _expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    first: int,
    columns: int | None,
    adds: bool,
) -> None:
    bank = _bank("lora_b_weights", weights)
    rows = bank.shape[2]
    if columns is not None and columns != rows:
        raise ValueError(f"slice_size must be {rows}, the rows of lora_b_weights; got {columns}")
    if output.ndim != 2 or not 0 <= first <= output.shape[1] - rows:
        raise ValueError(
            f"output_tensor must have shape [tokens, {first + rows} or more]; got {list(output.shape)} and "
            f"slice_offset {first}"
        )
    out = output if rows == output.shape[1] else output[:, first : first + rows]
    _delta(out, inputs, indices, b=bank, stage=_EXPAND, add=adds, fill=not adds)


@fi_api(trace=linear)
def add_lora_linear(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Sequence[torch.Tensor],
    lora_b_stacked: Sequence[torch.Tensor],
    scale: float,
    output_slices: Sequence[int],
    *,
    lora_indices: torch.Tensor,
    buffer: torch.Tensor | None = None,
) -> None:
    """Adds `scale B_s[l] (A_s[l] x[t])`, l = lora_indices[t], to slice s of the columns of y[t], in one launch.

    A[l] x[t] has fp32 sums, rounded to the dtype of the weights before the second product, whose sums are rounded to
    the dtype of y before they are added.

    Args:
        y: `[..., sum of output_slices]`, bf16, fp16 or fp32: the outputs of the layer. Tokens of -1 keep their bits.
        x: `[..., in]`, bf16 or fp16; in is a multiple of 8.
        lora_a_stacked: for each slice `[loras, 1, rank, in]`, dtype of x.
        lora_b_stacked: for each slice `[loras, 1, output_slices[s], rank]`, dtype of x; ranks are 8 to 256, multiples
            of 8: pad with zeros.
        scale: a factor of what is added.
        output_slices: columns of each slice, multiples of 8. More than three slices take a launch for each three.
        lora_indices: `[tokens]`, int32 or int64; -1: no adapter.
        buffer: accepted; nothing lies between the products.

    Raises:
        ValueError: a shape, stride, device or index does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    count = len(output_slices)
    if not count or len(lora_a_stacked) != count or len(lora_b_stacked) != count:
        raise ValueError(
            f"lora_a_stacked and lora_b_stacked must have a tensor for each of output_slices, {count}, at least 1; got "
            f"{len(lora_a_stacked)} and {len(lora_b_stacked)}"
        )
    a = [_bank("lora_a_stacked", w) for w in lora_a_stacked]
    b = [_bank("lora_b_stacked", w) for w in lora_b_stacked]
    for w, columns in zip(b, output_slices):
        if w.shape[2] != columns:
            raise ValueError(f"lora_b_stacked must have {columns} rows, those of output_slices; got {list(w.shape)}")
    width = sum(output_slices)
    if y.ndim < 1 or y.shape[-1] != width:
        raise ValueError(f"y must have {width} columns, the sum of output_slices; got {list(y.shape)}")
    if x.ndim < 1 or not x.shape[-1]:
        raise ValueError(f"x must have shape [..., in], in at least 8; got {list(x.shape)}")
    if y.ndim != 2:
        try:
            y = y.view(-1, width)
        except RuntimeError:
            raise ValueError(f"y must be a view of [tokens, columns]; got strides {list(y.stride())}") from None
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    first = 0
    for s in range(0, count, _MOST_SLICES):
        last = s + _MOST_SLICES
        banks = [w for pair in zip(a[s:last], b[s:last]) for w in pair]
        _delta(y, x, lora_indices, *banks, scale=scale, begin=first, add=True)
        first += sum(output_slices[s:last])
