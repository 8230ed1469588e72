"""What a measurement is: its options, its samples, the state of the cache, and when there are samples enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs
from fi_bench.measure import loops
from fi_bench.stats import median_interval

if TYPE_CHECKING:
    import torch

AUTO_BATCH, AUTO_MOST, AUTO_HALF_WIDTH, AUTO_SECONDS = 30, 1500, 0.005, 3.0


@dataclass(frozen=True)
class Options:
    """Options of a measurement."""

    num_iters: int | str = 30  # or "auto"
    dry_run_iters: int = 5
    cache: str = "cold"  # cold | warm
    flush: str = "write"
    regime: str = "auto"  # auto | burst | sustained
    graph: bool = True
    cupti: bool = True


@dataclass
class Cache:
    """The state of the cache before each call: as requested, how it is reached, and whether that is certain."""

    asked: str
    how: str = "none"  # none | rotate | flush-write | flush-read
    verified: bool = False
    copies: int = 1
    footprint_bytes: int = 0
    cache_bytes: int = 0

    @property
    def state(self) -> str:
        """cold or warm; with a question mark if it is not certain."""
        return self.asked if self.verified else f"{self.asked}?"


@dataclass
class Measurement:
    """Samples of one backend on one case, and everything that is needed to judge them."""

    samples_ns: list[float]
    timer: str  # cupti | graph_events | events | wall
    cache: Cache
    timer_reason: str = ""  # the reason against a better timer
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


def rotation(inputs: Inputs, work_bytes: int, device: torch.device) -> tuple[list[Inputs], Cache]:
    """`loops.rotation`, and the state of the cache that it makes."""
    found = loops.rotation(inputs, work_bytes, device)
    count = len(found.copies)
    return found.copies, Cache("cold", "rotate", found.cold, count, count * found.bytes_per_call, found.cache_bytes)


def collect(take: Callable[[int], list[float]], num_iters: int | str, now: Callable[[], float]) -> list[float]:
    """`take(n)` for the asked count, or until the median's 95 % interval is narrow, or time is over."""
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
