"""Timers: CUPTI, CUDA graph with events, events with a blocking kernel, wall clock. `measure` picks one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_bench.case import Inputs
from fi_bench.measure.gpu import FALLBACK, measure_gpu
from fi_bench.measure.ranks import grouped, measure_ranks
from fi_bench.measure.samples import Cache, Call, Measurement, Options
from fi_bench.measure.wall import measure_cpu

if TYPE_CHECKING:
    import torch

__all__ = ["FALLBACK", "Cache", "Call", "Measurement", "Options", "measure"]


def measure(call: Call, inputs: Inputs, work_bytes: int, device: torch.device, options: Options) -> Measurement:
    """Times call(inputs). A call may overwrite its inputs; they are copied as often as a cold cache needs."""
    if grouped():
        return measure_ranks(call, inputs, device, options)
    if device.type == "cpu":
        return measure_cpu(call, inputs, work_bytes, options)
    return measure_gpu(call, inputs, work_bytes, device, options)
