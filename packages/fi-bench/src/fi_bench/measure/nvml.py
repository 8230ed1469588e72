"""Clocks, power, temperature and reasons for slow clocks from NVML; empty where it is not there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SLOWDOWNS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "hardware power brake",
}


def state(device: torch.device) -> dict[str, Any]:
    """The state of a torch device by NVML, which finds it by its UUID."""
    try:
        import pynvml as nvml
    except ImportError:
        return {}
    import torch

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError:
        return {}
    reads = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "mem_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temp_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "event_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    }
    found: dict[str, Any] = {}
    for name, read in reads.items():
        with contextlib.suppress(nvml.NVMLError):  # some cards do not support every query
            found[name] = read()
    return found


def slowdowns(reading: dict[str, Any]) -> set[str]:
    """The reasons, in words, why the clock is lower than it could be."""
    bits = int(reading.get("event_reasons", 0))
    return {words for bit, words in _SLOWDOWNS.items() if bits & bit}
