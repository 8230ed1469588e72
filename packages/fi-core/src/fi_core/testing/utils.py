"""Helpers of benchmarks and tests; re-exports those of sibling modules at FlashInfer's import path."""

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
    """Seeds torch on all devices, numpy if it is installed, and random."""
    import torch

    random.seed(random_seed)
    torch.manual_seed(random_seed)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(random_seed)


def sleep_after_kernel_run(execution_time: float) -> None:
    """Sleeps 5 times `execution_time` (ms), at most one second, so that the GPU cools down."""
    time.sleep(min(execution_time / 200, 1.0))


def count_bytes(*tensors: Any) -> int:
    """Returns the bytes of all elements of tensors, also in nested lists and tuples; None counts 0."""
    total = 0
    for t in tensors:
        if isinstance(t, list | tuple):
            total += count_bytes(*t)
        elif t is not None:
            total += t.numel() * t.element_size()
    return total


def aggregate_gpu_time_across_ranks(x: Sequence[float], op: Callable[[Any], float] = max) -> list[float]:
    """Reduces each time over the ranks of torch.distributed; with one rank they are unchanged."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(x)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(x))
    return [op(column) for column in zip(*gathered, strict=True)]


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
) -> float | tuple[float, ...]:
    """Measures the seconds per call in the kernels whose names contain `kernel_names`, by torch's profiler.

    Args:
        fn: the callable.
        kernel_names: a part of a kernel name, or several.
        num_tests: number of calls.
        suppress_kineto_output: whether not to print the profile.
        trace_path: file for a Chrome trace; none is written if None.
        flush_l2: whether to flush the L2 cache before each call.
        with_multiple_kernels: whether a name may match several kernels, whose times are added.

    Returns:
        Seconds per call, or a tuple if kernel_names is a sequence.

    Raises:
        ValueError: A name matches no kernel, or several without with_multiple_kernels.
    """
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
