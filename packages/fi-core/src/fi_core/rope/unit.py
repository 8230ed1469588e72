"""Entries of the rope kernels, which differ in types only."""

from __future__ import annotations

from fi_core.spec.op import Entry

# 128 threads with 8 vectors of 16 bytes in flight each, 4 blocks an SM; more than 4 heads at once spill.
_THREADS, _HEADS_AT_ONCE, _MOST_HEADS, _THREADS_PER_SM = 128, 4, 10, 512


def entries(function: str, types: str, vector: int) -> tuple[Entry, ...]:
    """In order of preference; config = (vector elements, interleaved, most heads a thread, threads wanted per SM)."""
    return tuple(
        Entry(
            f"{function}_{order}_{vec}",
            f"{function}<{types}, {vec}, {_HEADS_AT_ONCE if vec > 1 else 1}, {'true' if interleaved else 'false'}>",
            _THREADS,
            (vec, interleaved, _MOST_HEADS, _THREADS_PER_SM),
        )
        for vec in (vector, 1)
        for interleaved, order in enumerate(("halves", "neighbours"))
    )
