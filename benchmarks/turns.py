"""Times calls in turns, so that all of them meet the same clocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPEATS = 20


def replays(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of the call."""
    for _ in range(2):  # compiles, and gives each kernel its memory
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(*calls: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
    """Median times in microseconds of calls that take turns; `before` runs ahead of each, untimed."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(REPEATS + 3):
        for times, call in zip(found, calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 3:
                times.append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(times) for times in found]
