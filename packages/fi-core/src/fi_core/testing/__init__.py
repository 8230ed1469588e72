"""Helpers that time and check kernels, such as `bench_gpu_time`. Importing this module does not import torch."""

from __future__ import annotations

import importlib
from typing import Any

from fi_core.runtime.errors import missing_attribute

# Where each public name lives.
_HOMES = {
    "fi_core.testing.attention": (
        "attention_flops",
        "attention_flops_with_actual_seq_lens",
        "attention_tb_per_sec",
        "attention_tb_per_sec_with_actual_seq_lens",
        "attention_tflops_per_sec",
        "attention_tflops_per_sec_with_actual_seq_lens",
    ),
    "fi_core.testing.timing": (
        "BenchTimes",
        "bench_cpu_time",
        "bench_gpu_time",
        "bench_gpu_time_with_cuda_event",
        "bench_gpu_time_with_cudagraph",
        "bench_gpu_time_with_cupti",
    ),
    "fi_core.testing.utils": ("set_seed", "sleep_after_kernel_run"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise missing_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
