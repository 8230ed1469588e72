"""States after a prefix of a ring of inputs, written to other slots: what a prefix cache keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.linear_attention.mamba_ops import replayssm_materialize as _materialize
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse

if TYPE_CHECKING:
    import torch


def _number_type(dtype: torch.dtype, name: str, *allowed: str) -> int:
    word = str(dtype).removeprefix("torch.")
    if word not in allowed:
        raise TypeError(f"{name} must be {' or '.join(allowed)}; got {word}")
    return ("float32", "float16", "bfloat16").index(word)


@fi_api
def replayssm_materialize(
    state_ptrs: torch.Tensor,
    state_slot_strides: torch.Tensor,
    x_cache_ptrs: torch.Tensor,
    x_cache_slot_strides: torch.Tensor,
    B_cache_ptrs: torch.Tensor,
    B_cache_slot_strides: torch.Tensor,
    dt_cache_ptrs: torch.Tensor,
    dt_cache_slot_strides: torch.Tensor,
    A_ptrs: torch.Tensor,
    state_scale_ptrs: torch.Tensor,
    state_scale_slot_strides: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 0,
    dependency_inputs: list[torch.Tensor] | None = None,
    dependency_outputs: list[torch.Tensor] | None = None,
) -> None:
    """Writes the state after a prefix of a ring of inputs into another slot, for many layers in one launch.

    A slot and its ring (see `checkpointing_ssu`) stand for each state from the stored one to that after the held
    tokens. Of request b and each layer, the state of `src_slots[:, b]` is replayed by `replay_prefix_len[b]` tokens
    from row `ring_start[b]` of the ring on and goes to `dst_slots[:, b]`; no token means a copy. Source and ring are
    not changed.

    Args:
        state_ptrs, x_cache_ptrs, B_cache_ptrs, dt_cache_ptrs: `[layers]`, int64, the addresses of the pools of each
            layer: `[slots, heads, dim, dstate]`, `[slots, heads, R, dim]`, `[slots, groups, R, dstate]` and
            `[slots, heads, R]` (fp32). What lies in a slot has no gaps and begins at a multiple of 16 bytes. Addresses
            cannot be checked: wrong ones are undefined behaviour.
        state_slot_strides, x_cache_slot_strides, B_cache_slot_strides, dt_cache_slot_strides: `[layers]`, int64, from
            slot to slot, in elements.
        A_ptrs: `[layers]`, int64, the addresses of `[heads]` numbers.
        state_scale_ptrs, state_scale_slot_strides: `[layers]`, int64; of no use with states of floats.
        src_slots, dst_slots: `[layers, batch]`, int32; where one is pad_slot_id or negative, nothing is done.
        ring_start, replay_prefix_len: `[batch]`, int32.
        active_request_indices: `[batch]`, int32, the requests to take, then -1.
        state_dtype: fp32, bf16 or fp16.
        input_dtype: of the rings of x and B, bf16 or fp16.
        matrixA_dtype: of A, fp32, bf16 or fp16.
        dim, dstate, num_heads, heads_per_group: of each layer; on CUDA dstate is 64, 128 or 256.
        max_window: the most tokens to replay, 1 to 16.
        ring_buffer_len: R.
        pad_slot_id: the slot of padding.
        rand_seed: must be None. philox_rounds: must be 0.
        dependency_inputs, dependency_outputs: accepted; call this function outside of torch.compile.

    Raises:
        ValueError: a shape, stride or device is wrong.
        TypeError: a dtype is wrong.
        NotImplementedError: rand_seed or philox_rounds.
    """
    refuse(
        "states of integers and random rounding are those of selective_state_update",
        rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )
    _materialize(
        state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs, B_cache_slot_strides,
        dt_cache_ptrs, dt_cache_slot_strides, A_ptrs=A_ptrs, src_slots=src_slots, dst_slots=dst_slots,
        ring_start=ring_start, replay_prefix_len=replay_prefix_len, active_request_indices=active_request_indices,
        state_dtype=_number_type(state_dtype, "state_dtype", "float32", "float16", "bfloat16"),
        input_dtype=_number_type(input_dtype, "input_dtype", "bfloat16", "float16"),
        matrix_dtype=_number_type(matrixA_dtype, "matrixA_dtype", "float32", "float16", "bfloat16"), dim=dim,
        dstate=dstate, num_heads=num_heads, heads_per_group=heads_per_group, max_window=max_window,
        ring_buffer_len=ring_buffer_len, pad_slot_id=pad_slot_id,
    )  # fmt: skip
