"""Cases of what Mamba-2 layers have besides the update of states by one token."""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Tolerance, Work, dtype_of
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
        p,
        "batch_size",
        "seq_len",
        "ring",
        "nheads",
        "dim",
        "dstate",
        "ngroups",
        dtype="input_dtype",
        state_dtype="state_dtype",
    )


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


_LAYERS = 4
_HELD = 5  # tokens that are replayed


def _rings(p: Namespace, device: Any, generator: Any) -> Inputs:
    """Of each request, slot i of each layer goes to slot batch_size + i."""
    from fi_core.observe.draw import Draw

    draw, n = Draw(device, generator, nasty=False), p.batch_size
    dtype, state, heads = dtype_of(p.input_dtype), dtype_of(p.state_dtype), (_LAYERS, 2 * n, p.nheads)
    rows = draw.integers(0, n, (_LAYERS, n)) * 0 + draw.permutation(n)
    return Inputs(
        state=draw.normal((*heads, p.dim, p.dstate), state),
        x_cache=draw.normal((*heads, p.ring, p.dim), dtype),
        B_cache=draw.normal((_LAYERS, 2 * n, p.ngroups, p.ring, p.dstate), dtype),
        dt_cache=draw.normal((*heads, p.ring), "float32").abs(),
        A=-draw.normal((_LAYERS, p.nheads), "float32").abs(),
        src_slots=rows,
        dst_slots=rows + n,
        ring_start=draw.integers(0, p.ring, (n,)),
    )


def _materialize(function: Any, x: Inputs) -> Any:
    """The tables of addresses are made in the first, untimed call."""
    import torch

    call = x.__dict__.get("call")
    if call is None:
        tables: dict[str, Any] = {}
        for name in ("state", "x_cache", "B_cache", "dt_cache"):
            pools = x[name].unbind(0)
            tables[f"{name}_ptrs"] = torch.tensor([pool.data_ptr() for pool in pools]).to(x.state.device)
            tables[f"{name}_slot_strides"] = torch.tensor([pool.stride(0) for pool in pools]).to(x.state.device)
        rates = torch.tensor([rate.data_ptr() for rate in x.A.unbind(0)]).to(x.state.device)
        call = x.__dict__["call"] = functools.partial(
            function,
            **tables,
            A_ptrs=rates,
            state_scale_ptrs=rates * 0,
            state_scale_slot_strides=rates * 0,
            src_slots=x.src_slots,
            dst_slots=x.dst_slots,
            ring_start=x.ring_start,
            replay_prefix_len=torch.full_like(x.ring_start, _HELD),
            active_request_indices=torch.arange(len(x.ring_start), dtype=torch.int32, device=x.state.device),
            state_dtype=x.state.dtype,
            input_dtype=x.x_cache.dtype,
            matrixA_dtype=x.A.dtype,
            dim=x.state.shape[3],
            dstate=x.state.shape[4],
            num_heads=x.state.shape[2],
            heads_per_group=x.state.shape[2] // x.B_cache.shape[2],
            max_window=_HELD,
            ring_buffer_len=x.x_cache.shape[3],
        )
    call()
    return x.state


def _replayed(x: Inputs, dtype: Any) -> torch.Tensor:
    """The states, with those of the destinations, computed in dtype."""
    group = x.state.shape[2] // x.B_cache.shape[2]
    found: torch.Tensor = x.state.clone() if dtype is None else x.state.to(dtype)
    for layer in range(_LAYERS):
        source = x.src_slots[layer].long()
        state, rate = found[layer, source].to(dtype or x.A.dtype), x.A[layer].to(dtype or x.A.dtype)
        for j in range(_HELD):
            at = source, slice(None), ((x.ring_start + j) % x.x_cache.shape[3]).long()
            step, value, key = (t[layer][at].to(state.dtype) for t in (x.dt_cache, x.x_cache, x.B_cache))
            added = (step[..., None] * value)[..., None] * key.repeat_interleave(group, 1)[:, :, None]
            state = state * (step * rate).exp()[..., None, None] + added
        found[layer, x.dst_slots[layer].long()] = state.to(found.dtype)
    return found


def _materialize_reference(x: Inputs) -> dict[str, Any]:
    import torch

    return {"state": _replayed(x, torch.float64)}


def _materialize_work(p: Namespace, x: Inputs) -> Work:
    """Reads a state and its inputs, writes a state."""
    states = x.state.numel() // 2
    row = x.x_cache.element_size() * _LAYERS * p.batch_size * _HELD
    inputs = row * (p.nheads * p.dim + p.ngroups * p.dstate)
    return Work(3 * states * _HELD, 2 * states * x.state.element_size() + inputs)


def _ssd(p: Namespace) -> dict[str, Any]:
    return sizes_of(
        p,
        "batch_size",
        "seq_len",
        "nheads",
        "dim",
        "dstate",
        "ngroups",
        "has_z",
        "dt_softplus",
        dtype="input_dtype",
        state_dtype="state_dtype",
    )


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
    Case(
        routine="replayssm_materialize",
        function="mamba.replayssm_materialize",
        make=_rings,
        call=_materialize,
        outputs=lambda x, _: {"state": x.state},
        reference=_materialize_reference,
        work=_materialize_work,
        torch=lambda x: x.state.copy_(_replayed(x, None)),
        op="replayssm_materialize",
        tolerance={"state": Tolerance(1e-2, 1e-2)},
    ),
    described("mamba.ssd_combined_fwd", _ssd, None, _torch_ssd, op="ssd_combined"),
)
