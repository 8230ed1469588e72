"""Times a call that several processes make together: a sample is the time of the slowest rank."""

from __future__ import annotations

import functools
import itertools
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fi_bench.case import Inputs
from fi_bench.measure import loops
from fi_bench.measure.samples import Cache, Call, Measurement, Options
from fi_core.testing import l2

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")
_COUNT = 30  # of samples for `auto`: all ranks must take the same number
_CALLS = 20  # in a CUDA graph
_MOST_SECONDS = 30.0  # of samples
_WARM_SECONDS = 2.0  # in the first seconds of a process calls take 10 to 30 % longer (H200)


def count(args: Namespace) -> int:
    """How many processes a case takes."""
    return int(getattr(args, "ranks", 1))


def grouped() -> bool:
    """Whether this process is one of several ranks."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def gathered(value: Value) -> list[Value]:
    """The values of all ranks; collective. One process has its own."""
    if not grouped():
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure_ranks(call: Call, inputs: Inputs, device: torch.device, options: Options) -> Measurement:
    """All ranks make the same calls, so their numbers do not depend on the clock of one; the cache is warm."""
    warmup = max(options.dry_run_iters, 1)
    for _ in range(warmup):
        call(inputs)
    take, timer = _on_gpu(call, inputs, options) if device.type == "cuda" else _on_cpu(call, inputs)
    once = max(gathered(take()))
    asked = _COUNT if options.num_iters == "auto" else int(options.num_iters)
    taken = min(asked, max(3, int(_MOST_SECONDS * 1e9 / once)))
    samples = [max(ranks) for ranks in zip(*gathered([take() for _ in range(taken)]), strict=True)]
    size, touched = l2.get_l2_cache_size(device), l2.touched_bytes(inputs)
    found = Measurement(samples, timer, Cache("warm", "none", touched <= size, 1, touched, size), warmup=warmup)
    if taken < asked:
        found.warnings.append(f"{taken} of {asked} samples were taken, because one takes {once / 1e9:.3g} s")
    return found


def _on_cpu(call: Call, inputs: Inputs) -> tuple[Callable[[], float], str]:
    import torch.distributed as dist

    walk = itertools.repeat(inputs)
    once = max(gathered(loops.wall_ns(call, walk, 1)))
    repeats = max(1, int(loops.SHORTEST_SAMPLE_NS / max(once, 1)))

    def take() -> float:
        dist.barrier()
        return loops.wall_ns(call, walk, repeats)

    return take, "wall"


def _on_gpu(call: Call, inputs: Inputs, options: Options) -> tuple[Callable[[], float], str]:
    import torch
    import torch.distributed as dist

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < until:
        torch.mm(x, x)
        torch.cuda.synchronize()
    calls = [functools.partial(call, inputs)] * _CALLS
    run = loops.walk(calls) if options.graph else lambda: [one() for one in calls] and None

    def take() -> float:
        dist.barrier()
        torch.cuda.synchronize()
        return loops.replay_ns(run, 1)[0] / _CALLS

    return take, "graph_events" if options.graph else "events"
