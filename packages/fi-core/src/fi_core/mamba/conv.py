"""The short convolution in front of a state space: over packed sequences, and over new tokens of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.linear_attention.mamba_ops import causal_conv1d as _conv
from fi_core.linear_attention.mamba_trace import CONV, CONV_UPDATE
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

_ACTIVATIONS = {"silu": True, "swish": True, True: True, None: False, False: False}


def _silu(activation: Any) -> bool:
    try:
        return _ACTIVATIONS[activation]
    except (KeyError, TypeError):
        raise ValueError(
            f"activation must be 'silu', 'swish', True, False or None; got {activation!r}: apply another one to the "
            "result"
        ) from None


def _given(**arguments: Any) -> dict[str, Any]:
    """Those that are not None: names are slower than defaults."""
    return {name: value for name, value in arguments.items() if value is not None}


def _no_list(x: Any, name: str, other: str) -> None:
    if x is not None and not hasattr(x, "dtype"):
        raise TypeError(
            f"{name} must be a tensor of slots, or None; got {type(x).__name__}: {other} of SGLang's function of this "
            f"name has no use here, pass its cache_indices as {name}"
        )


@fi_api(trace=CONV)
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = None,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    num_computed_tokens: torch.Tensor | None = None,
    block_size_to_align: int = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Computes a causal depthwise convolution over packed sequences and keeps the last inputs of each (Mamba,
    arXiv:2312.00752, section 3.4).

    `y[c, t] = act(bias[c] + sum_k weight[c, k] x[c, t - W + 1 + k])` with sums in fp32, from k = 0 on. Call by call
    and token by token, as `causal_conv1d_update` does it, the results are the same bits.

    Args:
        x: `[dim, T]`, bf16, fp16 or fp32, a transposed `[T, dim]`; with another layout it is slower. It is not changed.
        weight: `[dim, W]`, dtype of x; W is 2 to 5.
        bias: `[dim]`, dtype of x, or None.
        conv_states: `[slots, dim, >= W - 1]`, dtype of x; the first W - 1 entries are used, the oldest first. Updated
            in place with the last W - 1 inputs of each sequence. Fastest where channels lie next to each other.
        query_start_loc: `[n + 1]`, int32 or int64, offsets of the sequences. An empty one touches nothing.
        cache_indices: `[n]`, int32 or int64, the slot of each sequence; None: slot i for sequence i. Or `[n, blocks]`,
            the slots of the blocks of a prefix cache.
        has_initial_state: `[n]`, bool: whether the slot holds inputs from before; else they are zeros. None: nowhere.
        activation: "silu" (or "swish", True), or None (False).
        pad_slot_id, null_block_id: slots of padding, as are negative ones: nothing is read or written, outputs are 0.
        block_idx_first_scheduled_token, block_idx_last_scheduled_token: `[n]`, the blocks of the first and the last
            token of the call. The state at the end of each block from the first to before the last is stored in its
            slot, that after the last token in the slot of the last block.
        initial_state_idx: `[n]`, the block whose slot holds the inputs from before; None: block 0.
        num_computed_tokens: `[n]`, the tokens of the sequence before those of this call.
        block_size_to_align: the tokens of a block; above 0 with block_idx_first_scheduled_token.
        metadata, validate_data: accepted; they have no effect.

    Returns:
        `[dim, T]`, of the layout of x. Tokens of no sequence are not written.

    Raises:
        ValueError: a shape, stride, device or activation is wrong.
        TypeError: a dtype is wrong, or cache_indices is a list.
    """
    import torch

    _no_list(cache_indices, "cache_indices", "the sixth argument, lengths on the host,")
    if x.ndim != 2:
        raise ValueError(f"x must have shape [dim, T]; got {list(x.shape)}")
    out = torch.empty_like(x)
    more = _given(
        null_block_id=null_block_id,
        initial_state_idx=initial_state_idx,
        num_computed_tokens=num_computed_tokens,
        block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
    )
    if block_size_to_align:
        more["block_size_to_align"] = block_size_to_align
    if has_initial_state is None:
        more["reads_states"] = False
    _conv(
        out.t(),
        x.t(),
        weight,
        bias,
        conv_states,
        query_start_loc,
        cache_indices,
        has_initial_state,
        _silu(activation),
        pad_slot_id,
        **more,
    )
    return out


@fi_api(trace=CONV_UPDATE)
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    null_block_id: int | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Computes the convolution of `causal_conv1d_fn` for the new tokens of each request, with the same bits.

    Args:
        x: `[B, dim]`, `[B, dim, L]`, or packed `[T, dim]` with query_start_loc; bf16, fp16 or fp32. It is not changed.
        conv_state: `[slots, dim, length]`, dtype of x, updated in place; length is W - 1 or more, with
            num_accepted_tokens W - 2 + L or more.
        weight: `[dim, W]`, dtype of x; W is 2 to 5.
        bias: `[dim]`, dtype of x, or None.
        activation: "silu" (or "swish", True), or None (False).
        conv_state_indices: `[B]`, int32 or int64, the slot of each request; None: slot i for request i. Or
            `[B, blocks]`, the slots of the blocks of a prefix cache.
        num_accepted_tokens: `[B]`, int32 or int64: how many tokens of the call before, a, are accepted. The inputs
            before are then `conv_state[a - 1 : a + W - 2]`, and afterwards the state holds these without the oldest,
            then the L new ones: the next call can accept any number of them. None: the state is the last W - 1 inputs.
        query_start_loc: `[B + 1]`, int32 or int64, offsets of packed requests.
        max_query_len: the most tokens of a request; given with query_start_loc.
        pad_slot_id, null_block_id: slots of padding, as are negative ones: nothing is read or written, outputs are 0.
        block_idx_last_scheduled_token: `[B]`, the block whose slot takes the state; None: the one that is read.
        initial_state_idx: `[B]`, the block whose slot holds the inputs before; None: block 0.
        validate_data: accepted; it has no effect.

    Returns:
        Shape and layout of x.

    Raises:
        ValueError: a shape, stride, device or activation is wrong; max_query_len is missing.
        TypeError: a dtype is wrong.
    """
    import torch

    packed = query_start_loc is not None
    if packed and max_query_len <= 0:
        raise ValueError(f"max_query_len must be above 0 with query_start_loc; got {max_query_len}")
    if x.ndim != 2 and (packed or x.ndim != 3):
        raise ValueError(
            f"x must have shape {'[T, dim]' if packed else '[B, dim] or [B, dim, L]'}; got {list(x.shape)}"
        )
    out = torch.empty_like(x)
    rows, results = x, out
    if not packed:
        rows, results = (t.unsqueeze(1) if t.ndim == 2 else t.transpose(1, 2) for t in (x, out))
    more = _given(
        null_block_id=null_block_id,
        initial_state_idx=initial_state_idx,
        num_accepted_tokens=num_accepted_tokens,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
    )
    if packed:
        more["max_query_len"] = max_query_len
    _conv(
        results,
        rows,
        weight,
        bias,
        conv_state,
        query_start_loc,
        conv_state_indices,
        None,
        _silu(activation),
        pad_slot_id,
        **more,
    )
    return out
