"""Small helpers of benchmarks and tests, and under their usual path the ones that live in sibling modules."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from fi_core.testing.l2 import calculate_rotation_count, get_l2_cache_size, make_flush
from fi_core.testing.quantize import dequantize_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8, quantize_fp8

__all__ = [
    "aggregate_gpu_time_across_ranks",
    "bench_kineto",
    "calculate_rotation_count",
    "count_bytes",
    "dequantize_fp8",
    "get_l2_cache_size",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "quantize_fp8",
    "set_seed",
    "sleep_after_kernel_run",
]


def set_seed(random_seed: int) -> None:
    """Seed torch on all devices, numpy if it is there, and random."""
    import torch

    random.seed(random_seed)
    torch.manual_seed(random_seed)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(random_seed)


def sleep_after_kernel_run(execution_time: float) -> None:
    """Let the GPU cool down after a kernel of `execution_time` ms: 5x as long, at most a second."""
    time.sleep(min(execution_time / 200, 1.0))


def count_bytes(*tensors: Any) -> int:
    """Bytes of all elements of tensors, also in nested lists and tuples; None counts nothing."""
    total = 0
    for t in tensors:
        if isinstance(t, list | tuple):
            total += count_bytes(*t)
        elif t is not None:
            total += t.numel() * t.element_size()
    return total


def aggregate_gpu_time_across_ranks(times: Sequence[float], aggregate_op: Callable[[Any], float] = max) -> list[float]:
    """Each time reduced over the ranks of torch.distributed; unchanged where there is one rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(times)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(times))
    return [aggregate_op(column) for column in zip(*gathered, strict=True)]


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
) -> float | tuple[float, ...]:
    """Seconds per call spent in the kernels whose name contains `kernel_names`, from torch's profiler."""
    import torch

    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    flush = make_flush() if flush_l2 else None
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_tests):
            if flush is not None:
                flush()
            fn()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    if not suppress_kineto_output:
        print(events.table(sort_by="cuda_time_total", max_name_column_width=100))
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    seconds = []
    for name in names:
        hits = [e for e in events if name in e.key]
        if not hits or (len(hits) > 1 and not with_multiple_kernels):
            found = [e.key for e in hits or events]
            raise ValueError(f"kernel_names: {name!r} must match one kernel of the profile, got {found}")
        seconds.append(sum(e.device_time_total for e in hits) / num_tests / 1e6)
    return seconds[0] if isinstance(kernel_names, str) else tuple(seconds)
