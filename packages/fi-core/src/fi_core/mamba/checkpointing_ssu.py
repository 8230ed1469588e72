"""States with a ring of inputs behind them (ReplaySSM): a state is read each call, and written every few calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.linear_attention.mamba_ops import checkpointing_ssu as _checkpointing_ssu
from fi_core.linear_attention.mamba_trace import CHECKPOINTING
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse

if TYPE_CHECKING:
    import torch

_ALGORITHMS = ("auto", "monolith", "two-kernel")
_INTEGER_STATES = "states of integers and random rounding are those of selective_state_update"
_MOST_TOKENS = 16


def allocate_checkpointing_ssu_scratch(
    batch_size: int,
    num_heads: int,
    num_predicted_tokens: int,
    max_window: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scratch that `checkpointing_ssu(cb_scaled=, cumAdt_vec=, cb_old=)` accepts; no kernel here needs it.

    Args:
        batch_size, num_heads: of the calls.
        num_predicted_tokens: the tokens of a call, 1 to 16.
        max_window: the most tokens that are replayed, 1 to 16.
        dtype: of x.
        device: of x.

    Returns:
        cb_scaled `[batch_size, num_heads, 32, 8]`, dtype; cumAdt_vec `[batch_size, num_heads, 16]`, fp32; cb_old
        `[batch_size, num_heads, 32, max_window rounded up to a multiple of 8, / 2]`, dtype.

    Raises:
        ValueError: a size is out of its range.
    """
    import torch

    if batch_size <= 0 or num_heads <= 0:
        raise ValueError(f"batch_size and num_heads must be above 0; got {batch_size} and {num_heads}")
    for name, value in (("num_predicted_tokens", num_predicted_tokens), ("max_window", max_window)):
        if not 0 < value <= _MOST_TOKENS:
            raise ValueError(f"{name} must be in 1 to {_MOST_TOKENS}; got {value}")
    rows = (batch_size, num_heads)
    return (
        torch.empty(*rows, 32, 8, dtype=dtype, device=device),
        torch.empty(*rows, _MOST_TOKENS, dtype=torch.float32, device=device),
        torch.empty(*rows, 32, -(-max_window // 8) * 4, dtype=dtype, device=device),
    )


@fi_api(trace=CHECKPOINTING)
def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Computes new tokens, drafts among them, from a state and the inputs behind it in a ring (ReplaySSM).

    The held tokens of a slot, `prev_num_accepted_tokens` of them from row `ring_start` on, are replayed into the state;
    then the T new tokens follow as in `selective_state_update`, and their inputs are stored behind the held ones. The
    state itself, after the held tokens, is stored only if `prev_num_accepted_tokens + 2 T > R`: then the caller
    advances ring_start by the held tokens. The caller also keeps the count of those that are accepted.

    Tokens follow one another in fp32: with fp32 states, outputs have the bits of `selective_state_update` token by
    token, whichever drafts are accepted and whenever the state is stored.

    Args:
        state: `[slots, heads, dim, dstate]`, fp32, bf16 or fp16; on CUDA dstate is 64, 128 or 256.
        x_cache: `[slots, heads, R, dim]`, dtype of x, the ring of x; R - T is 1 to 16.
        B_cache: `[slots, groups, R, dstate]`, dtype of x, the ring of B.
        dt_cache: `[slots, heads, R]`, fp32, the ring of dt after bias and softplus.
        ring_start: `[slots]`, int32, the row of the oldest held token.
        prev_num_accepted_tokens: `[slots]`, int32, the held tokens, 0 to R - T.
        x: `[batch, T, heads, dim]`, bf16 or fp16, T up to 16; or `[1, total_tokens, heads, dim]` with cu_seqlens.
        dt: shape of x, one number for each head: stride 0 in the last dimension, as of `expand`.
        A: `[heads, dim, dstate]`, fp32, one number for each head.
        B, C: `[.., groups, dstate]`, dtype of x; groups divides heads.
        out: like x.
        D: `[heads, dim]`, one number for each head, or None.
        z: shape and dtype of x, or None.
        dt_bias: `[heads, dim]`, one number for each head, or None.
        dt_softplus: whether dt is `softplus(dt + dt_bias)`.
        state_batch_indices: `[batch]`, int32 or int64, distinct slots; None: row i has slot i.
        pad_slot_id: the slot of requests that are padding, as are negative ones: nothing of them is read or written.
        state_scale, rand_seed: must be None.
        philox_rounds, d_split, precompute_heads_per_cta: accepted; they have no effect.
        cu_seqlens: `[batch + 1]`, int32 or int64, offsets of packed requests. An empty one touches nothing.
        max_seqlen: the most tokens of a packed request, T in the rules above; given with cu_seqlens only.
        enable_pdl: programmatic dependent launch is on where the hardware has it; True changes nothing.
        cb_scaled, cumAdt_vec, cb_old: all or none, as of `allocate_checkpointing_ssu_scratch`; they are not used.
        algorithm: "auto", "monolith" or "two-kernel", which needs the scratch; all of them select the same kernel.

    Returns:
        out.

    Raises:
        ValueError: a shape, stride, device or algorithm is wrong; max_seqlen is missing.
        TypeError: a dtype is wrong.
        NotImplementedError: state_scale or rand_seed.
    """
    refuse(_INTEGER_STATES, state_scale=state_scale, rand_seed=rand_seed)
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(_ALGORITHMS)}; got {algorithm!r}")
    scratch = [cb_scaled is not None, cumAdt_vec is not None, cb_old is not None]
    if any(scratch) != all(scratch) or (algorithm == "two-kernel" and not all(scratch)):
        raise ValueError(
            "cb_scaled, cumAdt_vec and cb_old must be given together, and with algorithm='two-kernel': take them from "
            "allocate_checkpointing_ssu_scratch"
        )
    if (max_seqlen is None) != (cu_seqlens is None):
        raise ValueError("max_seqlen must be given with cu_seqlens, and only then")
    _checkpointing_ssu(
        out, state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B=B, C=C, D=D, z=z,
        dt_bias=dt_bias, dt_softplus=dt_softplus, state_batch_indices=state_batch_indices, pad_slot_id=pad_slot_id,
        cu_seqlens=cu_seqlens, max_seqlen=max_seqlen or 0,
    )  # fmt: skip
    return out
