"""The names that fi_core.testing loads on first use. Written by tools/stubs.py; do not edit."""

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
