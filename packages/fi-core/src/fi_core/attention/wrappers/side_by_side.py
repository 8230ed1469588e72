"""Decode beside prefill: the memory-bound kernel runs on some SMs while the compute-bound one runs on the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fi_core.attention.contract import check_workspace, row_elements
from fi_core.attention.ops.decode import MAX_RANGES
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.runtime.lazy import torch
from fi_core.runtime.machine import multiprocessors_of, target_of

# Of an H200, by which SMs are divided: bytes that decode reads and operations of prefill, a microsecond; us that
# prefill takes besides; and the share of the SMs on which decode reads as fast as on all
# (docs/notes/prefill-mixed-batches.md).
_BYTES, _OPERATIONS, _PROLOGUE, _SATURATING = 4.2e6, 690e6, 18.0, 0.64
# The shorter kernel takes longer than this (us), or they run one after another: fork and join of streams cost 4 us.
_LEAST = 10.0


def halves(
    float_workspace_buffer: torch.Tensor, kv_layout: str, jit_args: Sequence[Any] | None
) -> tuple[BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper]:
    """A wrapper for prefill and one for decode, each with a part of the workspace, which may run at the same time."""
    check_workspace(float_workspace_buffer, "float_workspace_buffer")
    room = float_workspace_buffer.view(-1).view(torch.uint8)
    quarter = len(room) // 4 // 256 * 256
    prefill = BatchPrefillWithPagedKVCacheWrapper(room[quarter:], kv_layout, jit_args=jit_args)
    options: dict[str, Any] = {"use_tensor_cores": True, "jit_args": jit_args}
    return prefill, BatchDecodeWithPagedKVCacheWrapper(room[:quarter], kv_layout, **options)


def operations(heads: int, dims: int, causal: bool, lengths: list[tuple[float, float]]) -> float:
    """Multiplications and additions of prefill. dims: sum of both head dims; lengths: (qo_len, kv_len) of requests."""
    return 2 * heads * dims * sum(qo_len * (kv_len - causal * min(qo_len, kv_len) / 2) for qo_len, kv_len in lengths)


def lengths_of(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, pages: int, page_size: int
) -> list[tuple[float, float]]:
    """About (qo_len, kv_len) of each request, the same for all if only the device knows. pages: of all requests."""
    batch = qo_indptr.numel() - 1
    if qo_indptr.is_cpu and kv_indptr.is_cpu:
        rows, ends = qo_indptr.diff().tolist(), kv_indptr.diff().tolist()
        return [(qo_len, page_size * count) for qo_len, count in zip(rows, ends)]
    mean = page_size * pages / max(batch, 1)
    return [(mean, mean)] * batch  # as without cached keys


def prefill_ctas(device: torch.device, decode_bytes: float, prefill_operations: float) -> int:
    """The CTAs of prefill with which it ends together with decode on the other SMs; 0: SMs are not divided."""
    decode, prefill = decode_bytes / _BYTES, prefill_operations / _OPERATIONS
    if target_of(device).kind == "cpu" or min(decode, prefill) < _LEAST:
        return 0
    prefill += _PROLOGUE
    share = prefill / decode
    if share > 1 - _SATURATING:  # decode on the rest reads slower than on all SMs
        share = prefill / (prefill + _SATURATING * decode)
    multiprocessors = multiprocessors_of(device)
    return min(max(round(share * multiprocessors), 4), multiprocessors - 4)


def divide(decode: BatchDecodeWithPagedKVCacheWrapper, v: torch.Tensor, prefill_operations: float) -> int:
    """Divides the SMs between a planned decode over a cache whose values are `v` and prefill: returns the latter's
    CTAs.

    Decode gets another schedule where its number of CTAs changes, which happens on the device.
    """
    elements, row_bytes, plan = row_elements(v), v.shape[-1] * v.dtype.itemsize, decode._plan
    token_bytes = plan.num_kv_heads * (plan.head_dim + elements) * row_bytes / elements
    tokens = plan.page_indices.numel() * plan.page_size
    ctas = prefill_ctas(decode.device, tokens * token_bytes, prefill_operations)
    decode._change(most_ctas=multiprocessors_of(decode.device) - ctas if ctas else MAX_RANGES)
    return ctas


@functools.lru_cache(maxsize=64)
def _side(device: torch.device, stream: int) -> tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]:
    """A stream beside `stream`, and the events of fork and join."""
    return torch.cuda.Stream(device), torch.cuda.Event(), torch.cuda.Event()


def side_by_side(ctas: int, device: torch.device, prefill: Callable[[], Any], decode: Callable[[], Any]) -> Any:
    """Calls both, and returns what `prefill` returns. Where SMs are divided, decode runs on a stream of its own.

    It may be captured in a CUDA graph. decode must write into tensors that exist.
    """
    if not ctas:
        decode()
        return prefill()
    current = torch.cuda.current_stream(device)
    side, fork, join = _side(device, current.cuda_stream)
    fork.record(current)
    side.wait_event(fork)
    torch.cuda.set_stream(side)
    try:
        decode()
    finally:
        torch.cuda.set_stream(current)
        join.record(side)
    try:
        return prefill()
    finally:  # also where it raises: the caller may free what decode uses, and a capture needs the join
        current.wait_event(join)
