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


def _ring(p: Namespace) -> dict[str, Any]:
    return sizes_of(
        p, "batch_size", "seq_len", "ring", "nheads", "dim", "dstate", "ngroups", dtype="input_dtype",
        state_dtype="state_dtype",
    )  # fmt: skip


def _torch_ring(x: Inputs) -> Any:
    """Token after token, where no state is stored: of the plain description the held tokens leave room."""
    import torch
    from torch.nn.functional import silu, softplus

    slots, tokens, ring = x.state_batch_indices.long(), x.x.shape[1], x.x_cache.shape[2]
    group, held = x.x.shape[2] // x.B.shape[2], int(x.prev_num_accepted_tokens[0])
    rows = (x.ring_start[slots, None] + torch.arange(held + tokens, device=slots.device)) % ring
    own, new = slots[:, None], rows[:, held:]
    x.x_cache[own, :, new], x.B_cache[own, :, new] = x.x, x.B
    x.dt_cache[own, :, new] = softplus(x.dt[..., 0].float() + x.dt_bias[:, 0])
    state = x.state[slots].float()
    for j in range(held + tokens):
        at = slots, slice(None), rows[:, j]
        step, b = x.dt_cache[at][..., None, None], x.B_cache[at].float().repeat_interleave(group, 1)[:, :, None]
        state = state * (step * x.A).exp() + step * x.x_cache[at].float()[..., None] * b
        if j >= held:
            t = j - held
            y = (state * x.C[:, t].float().repeat_interleave(group, 1)[:, :, None]).sum(-1)
            x.out[:, t] = (y + x.D * x.x[:, t].float()) * silu(x.z[:, t].float())
    return x.out, x.state, x.x_cache, x.B_cache, x.dt_cache


def _ssd(p: Namespace) -> dict[str, Any]:
    return sizes_of(
        p, "batch_size", "seq_len", "nheads", "dim", "dstate", "ngroups", "has_z", "dt_softplus",
        dtype="input_dtype", state_dtype="state_dtype",
    )  # fmt: skip


def _torch_ssd(x: Inputs) -> Any:
    """Token after token, of sequences of one length."""
    import torch
    from torch.nn.functional import silu, softplus

    n, group = x.initial_states.shape[0], x.x.shape[2] // x.B.shape[2]
    value, step, b, c = (t[0].unflatten(0, (n, -1)).float() for t in (x.x, x.dt, x.B, x.C))
    step = step + x.dt_bias
    step = softplus(step) if x.dt_softplus else step
    b, c = (t.repeat_interleave(group, 2) for t in (b, c))
    state, outputs = x.initial_states.float(), []
    for t in range(value.shape[1]):
        added = (step[:, t, :, None] * value[:, t])[..., None] * b[:, t, :, None]
        state = state * (step[:, t] * x.A).exp()[..., None, None] + added
        outputs.append((state * c[:, t, :, None]).sum(-1) + x.D[:, None].float() * value[:, t])
    out = torch.stack(outputs, 1).flatten(0, 1)[None]
    return (out if x.z is None else out * silu(x.z.float())).to(x.x.dtype), state.to(x.initial_states.dtype)


CASES = (
    described("mamba.causal_conv1d_fn", _conv, None, _torch_conv, op="causal_conv1d"),
    described("mamba.causal_conv1d_update", _conv, None, _torch_conv_update, op="causal_conv1d"),
    described("mamba.checkpointing_ssu", _ring, None, _torch_ring, op="checkpointing_ssu"),
    described("mamba.ssd_combined_fwd", _ssd, None, _torch_ssd, op="ssd_combined"),
)
