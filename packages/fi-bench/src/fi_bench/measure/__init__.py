"""Timers: CUPTI, CUDA graph with events, events with a blocking kernel, wall clock. `measure` picks one and says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs
from fi_core.testing import l2

if TYPE_CHECKING:
    import torch

COLD_FACTOR = 2.0  # a walk over this many times the cache leaves nothing of its start in it
MOST_COPIES = 8192
MEMORY_SHARE = 0.4  # of what is free, for the copies of the inputs
AUTO_BATCH, AUTO_MOST, AUTO_HALF_WIDTH, AUTO_SECONDS = 30, 1500, 0.005, 3.0


@dataclass(frozen=True)
class Options:
    """What the user asked of the measurement."""

    num_iters: int | str = 30  # or "auto"
    dry_run_iters: int = 5
    cache: str = "cold"  # cold | warm
    flush: str = "write"
    regime: str = "auto"  # auto | burst | sustained
    graph: bool = True
    cupti: bool = True


@dataclass
class Cache:
    """The state of the cache before each call: what was asked, how it was made, and whether that is certain."""

    asked: str
    how: str = "none"  # none | rotate | flush-write | flush-read
    verified: bool = False
    copies: int = 1
    footprint_bytes: int = 0
    cache_bytes: int = 0

    @property
    def state(self) -> str:
        """cold, warm, or what it was meant to be with a question mark."""
        return self.asked if self.verified else f"{self.asked}?"


@dataclass
class Measurement:
    """Samples of one backend on one case, and everything that is needed to judge them."""

    samples_ns: list[float]
    timer: str  # cupti | graph_events | events | wall
    cache: Cache
    timer_reason: str = ""  # why not the timer before it
    regime: str = "sustained"  # burst: the device rested between samples
    warmup: int = 0
    discarded: int = 0
    sum_ns: list[float] = field(default_factory=list)  # cupti: busy time without gaps
    sm_mhz: list[float] = field(default_factory=list)
    host_ns: float | None = None  # how long a call takes to return
    kernels: list[dict[str, Any]] = field(default_factory=list)
    clocks: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


Call = Callable[[Inputs], Any]


def measure(call: Call, inputs: Inputs, work_bytes: int, device: torch.device, options: Options) -> Measurement:
    """Time call(inputs). The inputs may be written to; what must be cold is copied, as often as it takes."""
    if device.type == "cpu":
        from fi_bench.measure.wall import measure_cpu

        return measure_cpu(call, inputs, work_bytes, options)
    from fi_bench.measure.gpu import measure_gpu

    return measure_gpu(call, inputs, work_bytes, device, options)


def rotation(inputs: Inputs, work_bytes: int, device: torch.device) -> tuple[list[Inputs], Cache]:
    """Copies of the inputs whose touched bytes together are COLD_FACTOR caches, as far as memory allows.

    Counted is what a call must touch at least (`work_bytes`), not what its tensors could hold: a paged cache of which a
    call writes one row does not make the next call cold.
    """
    cache_bytes = l2.get_l2_cache_size(device)
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # what earlier cases left in torch's pool is free memory
    size = max(l2.touched_bytes(inputs), 1)
    per_call = max(min(work_bytes, size), 1)
    wanted = max(2, math.ceil(COLD_FACTOR * cache_bytes / per_call) + 1)
    affordable = 1 + int(MEMORY_SHARE * _free_bytes(device) / size)
    copies = min(wanted, affordable, MOST_COPIES)
    cache = Cache("cold", "rotate", copies >= wanted, copies, copies * per_call, cache_bytes)
    return [inputs, *(Inputs(l2.clone_tree(inputs)) for _ in range(copies - 1))], cache


def _free_bytes(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 30
    return int(found.split()[1]) * 1024


def collect(take: Callable[[int], list[float]], num_iters: int | str, now: Callable[[], float]) -> list[float]:
    """`take(n)` for the asked count, or until the median's 95 % interval is narrow, or time is over."""
    from fi_bench.stats import median_interval

    if num_iters != "auto":
        return take(int(num_iters))
    samples: list[float] = []
    end = now() + AUTO_SECONDS
    while len(samples) < AUTO_MOST:
        samples += take(AUTO_BATCH)
        low, middle, high = median_interval(samples)
        if (high - low) / 2 <= AUTO_HALF_WIDTH * middle or now() > end:
            break
    return samples
