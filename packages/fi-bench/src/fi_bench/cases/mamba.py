"""Cases of what Mamba-2 layers have besides the update of states by one token."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch


def _conv(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "batch_size", "seq_len", "dim", "width", dtype="input_dtype")


def _convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`[n, dim, width - 1 + T]` to `[n, dim, T]`, with silu."""
    import torch

    y = torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=weight.shape[0])
    return torch.nn.functional.silu(y)


def _torch_conv(x: Inputs) -> Any:
    """Sequences of one length."""
    import torch

    before = x.weight.shape[1] - 1
    rows = x.x.unflatten(1, (x.cache_indices.shape[0], -1)).transpose(0, 1)
    slots = x.cache_indices.long()
    inputs = torch.cat([x.conv_states[slots] * x.has_initial_state[:, None, None], rows], 2)
    x.conv_states[slots] = inputs[:, :, inputs.shape[2] - before :]
    return _convolve(inputs, x.weight, x.bias).transpose(0, 1).flatten(1), x.conv_states


def _torch_conv_update(x: Inputs) -> Any:
    import torch

    before, slots = x.weight.shape[1] - 1, x.conv_state_indices.long()
    inputs = torch.cat([x.conv_state[slots], x.x], 2)
    x.conv_state[slots] = inputs[:, :, inputs.shape[2] - before :]
    return _convolve(inputs, x.weight, x.bias), x.conv_state


CASES = (
    described("mamba.causal_conv1d_fn", _conv, None, _torch_conv, op="causal_conv1d"),
    described("mamba.causal_conv1d_update", _conv, None, _torch_conv_update, op="causal_conv1d"),
)
