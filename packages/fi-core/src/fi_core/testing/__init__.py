"""Helpers to time and to check kernels: `bench_gpu_time` and friends. Importing this does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fi_core.testing.attention import (
        attention_flops,
        attention_flops_with_actual_seq_lens,
        attention_tb_per_sec,
        attention_tb_per_sec_with_actual_seq_lens,
        attention_tflops_per_sec,
        attention_tflops_per_sec_with_actual_seq_lens,
    )
    from fi_core.testing.timing import (
        BenchTimes,
        bench_cpu_time,
        bench_gpu_time,
        bench_gpu_time_with_cuda_event,
        bench_gpu_time_with_cudagraph,
        bench_gpu_time_with_cupti,
    )
    from fi_core.testing.utils import set_seed, sleep_after_kernel_run

_MODULE_OF = {
    "attention_flops": "attention",
    "attention_flops_with_actual_seq_lens": "attention",
    "attention_tb_per_sec": "attention",
    "attention_tb_per_sec_with_actual_seq_lens": "attention",
    "attention_tflops_per_sec": "attention",
    "attention_tflops_per_sec_with_actual_seq_lens": "attention",
    "BenchTimes": "timing",
    "bench_cpu_time": "timing",
    "bench_gpu_time": "timing",
    "bench_gpu_time_with_cuda_event": "timing",
    "bench_gpu_time_with_cudagraph": "timing",
    "bench_gpu_time_with_cupti": "timing",
    "set_seed": "utils",
    "sleep_after_kernel_run": "utils",
}
__all__ = [
    "BenchTimes",
    "attention_flops",
    "attention_flops_with_actual_seq_lens",
    "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens",
    "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens",
    "bench_cpu_time",
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "set_seed",
    "sleep_after_kernel_run",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
