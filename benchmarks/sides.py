"""Times of several ways to do the same on one GPU, interleaved, by fi-bench's timers: for the scripts beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from fi_bench.measure.wall import host_cost_ns
from fi_core.testing.l2 import make_flush
from fi_core.testing.timing import capture_graph

Sides = dict[str, Callable[[], object]]  # by name
_FLUSH_BYTES, _UNCOUNTED = 256 << 20, 3


@functools.cache
def _flush() -> Callable[[], object]:
    return make_flush(size=_FLUSH_BYTES)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    return capture_graph([call])


def replay_us(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int, *, wait: bool = False) -> dict[str, list[float]]:
    """Microseconds of each replay between two events, one of each graph in turn, each behind a flush of the L2.

    wait: for the device after each replay, so that it rests between long kernels, which power holds back.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {side: [] for side in graphs}
    for _ in range(rounds + _UNCOUNTED):
        for side, graph in graphs.items():
            _flush()()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events[side].append((begin, end))
            if wait:
                torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {side: [b.elapsed_time(e) * 1e3 for b, e in pairs[_UNCOUNTED:]] for side, pairs in events.items()}


def gpu_us(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """`replay_us` of each side's call."""
    return replay_us({side: captured(call) for side, call in sides.items()}, rounds)


def host_us(call: Callable[[], object]) -> float:
    """Microseconds until a call returns, the GPU's work not awaited."""
    return host_cost_ns(call) / 1e3
