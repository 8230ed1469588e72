"""Selective state spaces (Mamba-2): the update of states by one or more tokens of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.linear_attention.ops import selective_state_update as _update
from fi_core.linear_attention.trace import SELECTIVE
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["selective_state_update"]

_ALGORITHMS = ("auto", "simple", "vertical", "horizontal")
_BACKENDS = ("auto", "flashinfer")


def _check_heads(name: str, x: torch.Tensor | None, first: int) -> None:
    """The kernels read one number of each head: dimensions from `first` on must be broadcast."""
    for i in range(first, 0 if x is None else x.ndim):
        if x.stride(i) and x.shape[i] != 1:  # type: ignore[union-attr]
            raise ValueError(
                f"{name} must hold one number for each head, broadcast (stride 0) over dimension {i}; got stride "
                f"{x.stride(i)}: call .expand() on a tensor of heads"  # type: ignore[union-attr]
            )


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
        state: `[slots, heads, dim, dstate]`, fp32, bf16 or fp16, updated in place, rounded to nearest.
        x: `[batch, heads, dim]`, `[batch, T, heads, dim]`, or `[total_tokens, heads, dim]` with cu_seqlens.
        dt: shape of x, one number for each head, broadcast over dim (stride 0).
        A: `[heads, dim, dstate]`, fp32, one number for each head, broadcast.
        B, C: `[.., groups, dstate]`, dtype of x; groups divides heads.
        D: `[heads, dim]`, broadcast over dim, or None.
        z: shape and dtype of x, or None.
        dt_bias: `[heads, dim]`, broadcast over dim, or None.
        dt_softplus: whether dt is `softplus(dt + dt_bias)`.
        state_batch_indices: `[batch]` or `[batch, T]`, int32 or int64, the slot of each request, in the first column;
            None: row i has slot i.
        pad_slot_id: the slot of requests that are padding: nothing of them is read or written.
        state_scale, intermediate_state_scales, rand_seed: must be None; there are no states of 8 bits and no
            stochastic rounding.
        out: like x; allocated if None.
        disable_state_update: whether the states stay as they are.
        intermediate_states_buffer: `[rows, >= T, heads, dim, dstate]`, dtype of state; receives the state after each
            token.
        intermediate_state_indices: `[batch]`, the rows of that buffer; None: row i.
        philox_rounds, cache_steps, algorithm: accepted; they have no effect.
        dst_state_batch_indices: `[batch]`, the slots to write, if others than those read; or, with cu_seqlens,
            `[batch, T]`, the slot of the state after each token. pad_slot_id is not written.
        cu_seqlens: `[batch + 1]`, int32 or int64, offsets of packed requests.
        num_accepted_tokens: `[batch]`; request i starts from slot `state_batch_indices[i, n - 1]`. It needs cu_seqlens
            and indices of `[batch, T]`.
        backend: "auto" or "flashinfer"; both select the kernels of this library.

    Returns:
        out.

    Raises:
        ValueError: a shape, stride, device, algorithm or backend is wrong.
        TypeError: a dtype is wrong.
        UnsupportedError: state_scale, intermediate_state_scales or rand_seed is given.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(_ALGORITHMS)}; got {algorithm!r}")
    for name, value in (
        ("state_scale", state_scale), ("intermediate_state_scales", intermediate_state_scales),
        ("rand_seed", rand_seed),
    ):  # fmt: skip
        if value is not None:
            raise UnsupportedError(f"{name} must be None: states have no scales and are rounded to nearest")
    _check_heads("dt", dt, dt.ndim - 1)
    _check_heads("A", A, 1)
    _check_heads("D", D, 1)
    _check_heads("dt_bias", dt_bias, 1)
    out = x.new_empty(x.shape) if out is None else out
    _update(
        out, state, x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        state_batch_indices=state_batch_indices, dst_state_batch_indices=dst_state_batch_indices,
        pad_slot_id=pad_slot_id, disable_state_update=disable_state_update,
        intermediate_states_buffer=intermediate_states_buffer,
        intermediate_state_indices=intermediate_state_indices, cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
    )  # fmt: skip
    return out
