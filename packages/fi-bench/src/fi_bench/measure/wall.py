"""Wall-clock timing of CPU backends, and of the host side of GPU calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from fi_bench.case import Inputs
from fi_bench.measure.loops import SHORTEST_SAMPLE_NS, queued_ns, wall_ns
from fi_bench.measure.samples import Cache, Call, Measurement, Options, collect, rotation
from fi_core.testing import l2

_HOST_BATCHES = 10


def measure_cpu(call: Call, inputs: Inputs, work_bytes: int, options: Options) -> Measurement:
    """Each sample is the mean of enough calls to last 20 us; warm unless cold was asked for."""
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
    once = wall_ns(call, walk, 1)
    repeats = 1 if options.cache == "cold" else max(1, int(SHORTEST_SAMPLE_NS / max(once, 1)))

    def take(n: int) -> list[float]:
        return [wall_ns(call, walk, repeats) for _ in range(n)]

    found = Measurement(collect(take, options.num_iters, time.monotonic), "wall", cache, warmup=options.dry_run_iters)
    if not cache.verified:
        why = "does not fit in the last-level cache" if cache.asked == "warm" else "memory does not allow enough copies"
        found.warnings.append(f"cache is {cache.state}: {cache.footprint_bytes} bytes, {why} ({cache.cache_bytes})")
    return found


def host_cost_ns(run: Callable[[], object]) -> float:
    """Mean time until a GPU call returns; the call does not wait for the GPU."""
    import torch

    batches = []
    for _ in range(_HOST_BATCHES):
        torch.cuda.synchronize()
        batches.append(queued_ns(run))
    torch.cuda.synchronize()
    return sum(batches) / len(batches)
