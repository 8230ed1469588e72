"""Kernel entries of rope and rope_quantize, which differ in their dtypes only."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.spec.op import Entry


class RopeConfig(NamedTuple):
    vec_size: int  # elements per vector
    interleaved: int
    max_heads_per_thread: int
    threads_per_sm: int  # a grid with fewer threads processes fewer heads per thread


# An SM runs 4 CTAs of 128 threads. Each thread loads 2 vectors of 16 bytes of 4 heads before it uses one, so 64 KB are
# in flight per SM. More heads need more than 128 registers per thread.
_THREADS, _CTAS_PER_SM, _UNROLLED_HEADS, _MAX_HEADS_PER_THREAD = 128, 4, 4, 10


def entries(function: str, types: str, vec_sizes: tuple[int, ...]) -> tuple[Entry, ...]:
    """Kernel entries in order of preference, by the elements of a vector."""
    return tuple(
        Entry(
            f"{function}_{layout}_{vec}",
            f"{function}<{types}, {vec}, {_UNROLLED_HEADS if vec > 1 else 1}, {'true' if interleaved else 'false'}>",
            _THREADS,
            RopeConfig(vec, interleaved, _MAX_HEADS_PER_THREAD, _THREADS * _CTAS_PER_SM),
            ctas_per_sm=_CTAS_PER_SM,
        )
        for vec in vec_sizes
        for interleaved, layout in enumerate(("neox", "interleaved"))
    )
