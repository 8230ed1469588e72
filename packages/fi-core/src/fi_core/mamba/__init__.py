"""Selective state spaces (Mamba-2): the short convolution, and the update of states by tokens of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.linear_attention.ops import selective_state_update as _update
from fi_core.linear_attention.trace import SELECTIVE
from fi_core.mamba.checkpointing_ssu import allocate_checkpointing_ssu_scratch, checkpointing_ssu
from fi_core.mamba.conv import causal_conv1d_fn, causal_conv1d_update
from fi_core.mamba.replayssm_materialize import replayssm_materialize
from fi_core.mamba.ssd_combined import SSDCombined, mamba_chunk_scan_combined_varlen, ssd_combined_fwd
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = [
    "SSDCombined",
    "allocate_checkpointing_ssu_scratch",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "checkpointing_ssu",
    "mamba_chunk_scan_combined_varlen",
    "replayssm_materialize",
    "selective_state_update",
    "ssd_combined_fwd",
]

_ALGORITHMS = ("auto", "simple", "vertical", "horizontal")
_BACKENDS = ("auto", "flashinfer")


def _with_heads(x: torch.Tensor | None, place: int, ndim: int) -> torch.Tensor | None:
    """x, with a dimension of one head at `place` if it has `ndim` without one."""
    return x.unsqueeze(place) if x is not None and x.ndim == ndim else x


def _scales(x: torch.Tensor | None, ndim: int) -> torch.Tensor | None:
    """Scales of rows, without a last dimension of 1."""
    return x.squeeze(-1) if x is not None and x.ndim == ndim + 1 and x.shape[-1] == 1 else x


@fi_api(trace=SELECTIVE)
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Updates states by the tokens of each request, one after the other, and reads them (arXiv:2405.21060).

    For each token and head, in fp32: `S = exp(dt A) S + dt x B^T`, `out = S C + D x`, `out *= silu(z)`.

    Args:
        state: `[slots, heads, dim, dstate]`, fp32, bf16 or fp16, updated in place; int16 or int8 with state_scale.
        x: `[batch, heads, dim]`, `[batch, T, heads, dim]`, or `[total_tokens, heads, dim]` with cu_seqlens.
        dt: shape of x. One number for each head, broadcast over dim (stride 0), is fastest; so it is below.
        A: `[heads, dim, dstate]`, fp32.
        B, C: `[.., groups, dstate]`, dtype of x; groups divides heads.
        D: `[heads, dim]`, or None.
        z: shape and dtype of x, or None.
        dt_bias: `[heads, dim]`, or None.
        dt_softplus: whether dt is `softplus(dt + dt_bias)`.
        state_batch_indices: `[batch]` or `[batch, T]`, int32 or int64, the slot of each request, in the first column;
            None: row i has slot i.
        pad_slot_id: the slot of requests that are padding: nothing of them is read or written.
        state_scale: `[slots, heads, dim]`, fp32, updated in place: a row of integers times its scale is the state. The
            largest number of a row becomes 32767 or 127.
        out: like x; allocated if None.
        disable_state_update: whether the states stay as they are.
        intermediate_states_buffer: `[rows, >= T, heads, dim, dstate]`, dtype of state; receives the state after each
            token.
        intermediate_state_indices: `[batch]`, the rows of that buffer; None: row i.
        intermediate_state_scales: `[rows, >= T, heads, dim]`, fp32: receives the scales of that buffer, if of integers.
        rand_seed: `[1]`, int64: fp16 states are rounded up or down at random, so that they are right on average; with
            the same seed they are the same. None: to nearest.
        philox_rounds: of Philox4x32, which gives the random numbers.
        cache_steps, algorithm: accepted; they have no effect.
        dst_state_batch_indices: `[batch]`, the slots to write, if others than those read; or, with cu_seqlens,
            `[batch, T]`, the slot of the state after each token. pad_slot_id is not written.
        cu_seqlens: `[batch + 1]`, int32 or int64, offsets of packed requests.
        num_accepted_tokens: `[batch]`; request i starts from slot `state_batch_indices[i, n - 1]`. It needs cu_seqlens
            and indices of `[batch, T]`.
        backend: "auto" or "flashinfer"; both select the kernels of this library.

    Each tensor may lack the dimension of heads, if there is one: x `[batch, dim]`, state `[slots, dim, dstate]`, A
    `[dim, dstate]`, B and C `[batch, dstate]`, D and dt_bias `[dim]`.

    Returns:
        out.

    Raises:
        ValueError: a shape, stride, device, algorithm or backend is wrong; scales or rand_seed do not fit the state.
        TypeError: a dtype is wrong.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(_ALGORITHMS)}; got {algorithm!r}")
    if rand_seed is not None and not hasattr(rand_seed, "dtype"):
        raise TypeError(f"rand_seed must be an int64 tensor of 1 element; got {type(rand_seed).__name__}")
    if out is None:
        out = x.new_empty(x.shape)
    result, no_heads = out, state.ndim == 3
    if cu_seqlens is None:
        x, out, dt, B, C = (t.unsqueeze(1) if t.ndim == 2 else t for t in (x, out, dt, B, C))
        z = _with_heads(z, 1, 2)
    _update(
        out, _with_heads(state, 1, 3), x, dt=dt, A=_with_heads(A, 0, 2), B=B, C=C, D=_with_heads(D, 0, 1), z=z,
        dt_bias=_with_heads(dt_bias, 0, 1), dt_softplus=dt_softplus, state_batch_indices=state_batch_indices,
        dst_state_batch_indices=dst_state_batch_indices, pad_slot_id=pad_slot_id,
        disable_state_update=disable_state_update,
        intermediate_states_buffer=_with_heads(intermediate_states_buffer, 2, 4 if no_heads else 0),
        intermediate_state_indices=intermediate_state_indices, cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
        state_scale=_with_heads(_scales(state_scale, 3), 1, 2 if no_heads else 0),
        intermediate_state_scales=_with_heads(_scales(intermediate_state_scales, 4), 2, 3 if no_heads else 0),
        rand_seed=rand_seed, philox_rounds=philox_rounds,
    )  # fmt: skip
    return result
