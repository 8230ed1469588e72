"""Wall-clock timing of CPU backends, and of the host side of GPU calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from fi_bench.case import Inputs
from fi_bench.measure import Cache, Call, Measurement, Options, collect, rotation
from fi_core.testing import l2

_SHORTEST_SAMPLE_NS = 20_000  # the clock and the loop cost some 0.1 us
_HOST_CALLS = 200


def measure_cpu(call: Call, inputs: Inputs, work_bytes: int, options: Options) -> Measurement:
    """Each sample is the mean of so many calls that it lasts 20 us; warm unless cold was asked for."""
    import torch

    device = torch.device("cpu")
    if options.cache == "cold":
        copies, cache = rotation(inputs, work_bytes, device)
    else:
        size = l2.get_l2_cache_size(device)
        touched = l2.touched_bytes(inputs)
        copies, cache = [inputs], Cache("warm", "none", touched <= size, 1, touched, size)
    walk = itertools.cycle(copies)
    for _ in range(max(options.dry_run_iters, 1)):
        call(next(walk))
    once = _one(call, walk, 1)
    repeats = 1 if options.cache == "cold" else max(1, int(_SHORTEST_SAMPLE_NS / max(once, 1)))

    def take(n: int) -> list[float]:
        return [_one(call, walk, repeats) for _ in range(n)]

    found = Measurement(collect(take, options.num_iters, time.monotonic), "wall", cache, warmup=options.dry_run_iters)
    if not cache.verified:
        why = "does not fit in the last-level cache" if cache.asked == "warm" else "memory does not allow enough copies"
        found.warnings.append(f"cache is {cache.state}: {cache.footprint_bytes} bytes, {why} ({cache.cache_bytes})")
    return found


def _one(call: Call, walk: Iterator[Inputs], repeats: int) -> float:
    inputs = [next(walk) for _ in range(repeats)]
    start = time.perf_counter_ns()
    for x in inputs:
        call(x)
    return (time.perf_counter_ns() - start) / repeats


def host_cost_ns(run: Callable[[], object]) -> float:
    """Mean time until a GPU call returns: the queue is never full, the GPU is not awaited inside."""
    import torch

    total, done = 0, 0
    while done < _HOST_CALLS:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(20):
            run()
        total += time.perf_counter_ns() - start
        done += 20
    torch.cuda.synchronize()
    return total / done
