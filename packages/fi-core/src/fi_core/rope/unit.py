"""Entries of the rope kernels, which differ in types only."""

from __future__ import annotations

from fi_core.spec.op import Entry

# 4 blocks of 128 threads an SM, each thread with 2 vectors of 16 bytes of 4 heads in flight: 64 KB an SM. More need
# more than 128 registers a thread.
_THREADS, _BLOCKS_PER_SM, _HEADS_AT_ONCE, _MOST_HEADS = 128, 4, 4, 10


def entries(function: str, types: str, vector: int) -> tuple[Entry, ...]:
    """In order of preference; config = (vector elements, interleaved, most heads a thread, threads wanted per SM)."""
    return tuple(
        Entry(
            f"{function}_{order}_{vec}",
            f"{function}<{types}, {vec}, {_HEADS_AT_ONCE if vec > 1 else 1}, {'true' if interleaved else 'false'}>",
            _THREADS,
            (vec, interleaved, _MOST_HEADS, _THREADS * _BLOCKS_PER_SM),
            blocks_per_sm=_BLOCKS_PER_SM,
        )
        for vec in (vector, 1)
        for interleaved, order in enumerate(("halves", "neighbours"))
    )
