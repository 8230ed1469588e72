"""The timed loops: a graph over copies of the inputs, repeated calls on a CPU, and the host side of a GPU call.

The file imports nothing of fi_bench, so that `compare-trees` can run the same loops in a process of another checkout.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

COLD_FACTOR = 2.0  # a walk over this many times the cache evicts its own start
MOST_COPIES = 8192
MEMORY_SHARE = 0.4  # of the free memory, for the copies of the inputs
LEAST_CALLS_IN_GRAPH = 10
HOST_CALLS_IN_QUEUE = 20  # the GPU's queue holds them all: no call waits for the GPU
SHORTEST_SAMPLE_NS = 20_000  # of a CPU: the clock and the loop cost some 0.1 us

Call = Callable[[Any], object]
Run = Callable[[], object]


class Rotation(NamedTuple):
    """Copies of the inputs, and whether one walk over them leaves no copy in the cache."""

    copies: list[Any]
    cold: bool
    bytes_per_call: int
    cache_bytes: int


def rotation(inputs: Any, work_bytes: int, device: torch.device) -> Rotation:
    """Copies the inputs until the bytes that one walk touches are COLD_FACTOR caches, as far as memory allows.

    A call counts with the bytes that it must touch (`work_bytes`), not with the size of its tensors: a call that writes
    one row of a paged cache does not evict that cache.
    """
    from fi_core.testing import l2

    cache_bytes = l2.get_l2_cache_size(device)
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # torch's pool keeps the memory of earlier cases
    size = max(l2.touched_bytes(inputs), 1)
    per_call = max(min(work_bytes, size), 1)
    wanted = max(2, math.ceil(COLD_FACTOR * cache_bytes / per_call) + 1)
    affordable = 1 + int(MEMORY_SHARE * _free_bytes(device) / size)
    count = min(wanted, affordable, MOST_COPIES)
    copies = [inputs, *(type(inputs)(l2.clone_tree(inputs)) for _ in range(count - 1))]
    return Rotation(copies, count >= wanted, per_call, cache_bytes)


def _free_bytes(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 30
    return int(found.split()[1]) * 1024


def calls_of(call: Call, copies: Sequence[Any], least: int = LEAST_CALLS_IN_GRAPH) -> list[Run]:
    """Calls that take the copies in turn: every copy, and at least `least` calls."""
    return [functools.partial(call, copies[i % len(copies)]) for i in range(max(least, len(copies)))]


def walk(calls: Sequence[Run]) -> Run:
    """The replay of one CUDA graph that makes all calls."""
    from fi_core.testing.timing import capture_graph

    return capture_graph(calls).replay


def replay_ns(replay: Run, count: int, wait_cycles: int = 0) -> list[float]:
    """Nanoseconds of each replay between two CUDA events.

    wait_cycles: the device spins this long before the first event, while the host enqueues calls that are not a graph;
    then they run without launch gaps.
    """
    import torch

    pairs = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if wait_cycles:
            torch.cuda.synchronize()
            torch.cuda._sleep(wait_cycles)
        start.record()
        replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e6 for start, end in pairs]


def wall_ns(call: Call, copies: Iterator[Any], repeats: int) -> float:
    """Mean nanoseconds of `repeats` calls by the wall clock, each on the next copy."""
    inputs = list(itertools.islice(copies, repeats))
    start = time.perf_counter_ns()
    for x in inputs:
        call(x)
    return (time.perf_counter_ns() - start) / repeats


def queued_ns(run: Run) -> float:
    """Mean nanoseconds until a GPU call returns, over calls that the queue of the GPU takes without waiting."""
    start = time.perf_counter_ns()
    for _ in range(HOST_CALLS_IN_QUEUE):
        run()
    return (time.perf_counter_ns() - start) / HOST_CALLS_IN_QUEUE
