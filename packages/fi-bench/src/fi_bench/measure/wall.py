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
_MOST_SECONDS = 30.0  # of samples on a CPU, where a shape meant for a GPU may take minutes a call; three remain


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
    until = time.monotonic() + _MOST_SECONDS / 3
    warmup = 0
    while warmup < max(options.dry_run_iters, 1) and (not warmup or time.monotonic() < until):
        call(next(walk))
        warmup += 1
    once = wall_ns(call, walk, 1)
    repeats = 1 if options.cache == "cold" else max(1, int(SHORTEST_SAMPLE_NS / max(once, 1)))

    def take(n: int) -> list[float]:
        return [wall_ns(call, walk, repeats) for _ in range(n)]

    asked, most = options.num_iters, max(3, int(_MOST_SECONDS * 1e9 / max(once * repeats, 1)))
    few = asked != "auto" and int(asked) > most
    samples = collect(take, most if few else asked, time.monotonic)
    found = Measurement(samples, "wall", cache, warmup=warmup)
    if few:
        found.warnings.append(f"{most} of {asked} samples were taken, because a call takes {once / 1e9:.3g} s")
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
