"""Measuring: rotation and its proof, the wall clock, adaptive counts, clocks, and the device kernels' code."""

from __future__ import annotations

import ctypes
import itertools
import random
import time
import types
from typing import Any

import pytest
import torch

from fi_bench import measure
from fi_bench.case import Inputs
from fi_bench.measure import Cache, Options, device, gpu, loops, nvml, samples, wall
from fi_core.testing import l2

CPU = torch.device("cpu")


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(l2, "get_l2_cache_size", lambda where=None: 10_000)
    return 10_000


def test_rotation_touches_twice_the_cache(small_cache: int) -> None:
    x = Inputs(a=torch.ones(1000, dtype=torch.uint8), b=torch.ones(500, dtype=torch.uint8), n=3)
    copies, cache = samples.rotation(x, 1500, CPU)
    assert cache.verified
    assert cache.state == "cold"
    assert len(copies) == cache.copies == 15
    assert cache.footprint_bytes == 15 * 1500 >= 2 * small_cache
    assert len({c.a.data_ptr() for c in copies}) == 15
    assert all(torch.equal(c.a, x.a) and c.n == 3 for c in copies)


def test_what_a_call_does_not_touch_does_not_count(small_cache: int) -> None:
    """A cache of 100 pages of which one row is written: the row is the footprint."""
    x = Inputs(pool=torch.ones(5000, dtype=torch.uint8))
    _, cache = samples.rotation(x, 100, CPU)
    assert cache.copies >= 200
    assert samples.rotation(x, 10**9, CPU)[1].copies == 5, "nor can a call touch more than there is"


def test_too_little_memory_is_not_reported_as_cold(small_cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_free_bytes", lambda where: 5000)
    found = measure.measure(lambda x: x.a.add_(1), Inputs(a=torch.ones(1000, dtype=torch.uint8)), 1000, CPU,
                            Options(num_iters=3, cache="cold"))  # fmt: skip
    assert (found.cache.verified, found.cache.state) == (False, "cold?")
    assert "memory does not allow enough copies" in found.warnings[0]


def test_cold_walks_over_the_copies_and_warm_does_not(small_cache: int) -> None:
    for cache, count in (("cold", 21), ("warm", 1)):
        seen = []
        x = Inputs(a=torch.ones(1000, dtype=torch.uint8))
        measure.measure(lambda x, seen=seen: seen.append(x.a.data_ptr()), x, 1000, CPU, Options(40, 2, cache))
        assert len(set(seen)) == count


def test_wall_clock_measures_a_sleep_and_a_short_call() -> None:
    slept = measure.measure(
        lambda x: time.sleep(0.003), Inputs(), 0, CPU, Options(num_iters=5, dry_run_iters=1, cache="warm")
    )
    assert slept.timer == "wall"
    assert len(slept.samples_ns) == 5
    assert 3e6 <= sorted(slept.samples_ns)[2] < 1e8
    calls = []
    short = measure.measure(
        lambda x: calls.append(1), Inputs(), 0, CPU, Options(num_iters=5, dry_run_iters=1, cache="warm")
    )
    assert len(calls) > 5 * 20, "short calls are repeated within a sample"
    assert sorted(short.samples_ns)[2] < 20_000


def test_warm_that_does_not_fit_is_doubtful(small_cache: int) -> None:
    found = measure.measure(lambda x: None, Inputs(a=torch.ones(20_000, dtype=torch.uint8)), 1, CPU,
                            Options(num_iters=2, cache="warm"))  # fmt: skip
    assert found.cache.state == "warm?"
    assert "does not fit" in found.warnings[0]


def test_auto_count_stops_when_the_median_is_known_or_time_is_over() -> None:
    taken: list[float] = []

    def steady(n: int) -> list[float]:
        taken.extend([100.0] * n)
        return [100.0] * n

    assert len(samples.collect(steady, "auto", lambda: 0.0)) == 30
    assert len(samples.collect(steady, 7, lambda: 0.0)) == 7
    rng = random.Random(5)
    clock = itertools.count()
    found = samples.collect(lambda n: [rng.uniform(50, 150) for _ in range(n)], "auto", lambda: float(next(clock)))
    assert 30 < len(found) <= 150, "until three seconds are over"
    forever = samples.collect(lambda n: [rng.uniform(50, 150) for _ in range(n)], "auto", lambda: 0.0)
    assert len(forever) == samples.AUTO_MOST


def test_megahertz_between_marks() -> None:
    assert device.megahertz((1_000, 0), (2_000, 1_980)) == 1980.0
    assert device.megahertz((2_000, 1_980), (4_000, 4_980)) == 1500.0
    assert device.megahertz((0, 0), (5_000, 9_000)) == device.megahertz((5_000, 9_000), (0, 0)) == 0.0, "missed by SM 0"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_device_kernels_compile(capability: tuple[int, int]) -> None:
    image = device.compile_kernels(capability)
    assert image[:4] == b"\x7fELF"
    assert all(name.encode() in image for name in device.NAMES)


class FakeDriver:
    """Reads back what a launch passes, as the driver would."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.status = 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *grid, shared, stream, pointers, extra = rest
        kinds = {
            "mark": (ctypes.c_uint64,),
            "hold": (ctypes.c_uint64, ctypes.c_int, ctypes.c_ulonglong),
            "read": (ctypes.c_uint64, ctypes.c_longlong, ctypes.c_uint64),
        }[function]
        values = [ctypes.cast(p, ctypes.POINTER(k)).contents.value for p, k in zip(pointers, kinds, strict=True)]
        self.launches.append((function, grid, shared, stream.value, values, extra))
        return self.status


def test_launches_pass_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    driver, released = FakeDriver(), torch.zeros(1, dtype=torch.int32)
    functions = {f"fi_bench_{name}": name for name in ("mark", "hold", "read")}
    kernels = device.Kernels(driver, functions, 132, released)  # type: ignore[arg-type]
    marks = torch.zeros(3, 2, dtype=torch.int64)
    kernels.mark(marks[2])
    for ticket in (1, 2):
        kernels.hold()
        assert int(released) == ticket - 1
        kernels.release()
        assert int(released) == ticket
    one, address = [1, 1, 1, 1, 1, 1], released.data_ptr()
    assert driver.launches == [
        ("mark", [264, 1, 1, 1, 1, 1], 0, 77, [marks.data_ptr() + 32], None),
        ("hold", one, 0, 77, [address, 1, device.HOLD_LIMIT_NS], None),
        ("hold", one, 0, 77, [address, 2, device.HOLD_LIMIT_NS], None),
    ]
    kernels.read(marks, released)
    assert driver.launches[-1][1:] == ([528, 1, 1, 512, 1, 1], 0, 77, [marks.data_ptr(), 3, address], None)
    driver.status = 700
    with pytest.raises(device.DriverError, match="launch of fi_bench_hold failed with CUresult 700"):
        kernels.hold()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> gpu.Session:
    monkeypatch.setattr(gpu.Session, "_load_kernels", lambda self: None)
    return gpu.Session(lambda x: None, Inputs(), 0, CPU, Options(num_iters=4))


def feed(session: gpu.Session, clocks: list[float], busy: bool = False) -> Any:
    clock = iter(clocks)

    def take(n: int) -> list[float]:
        mhz = [next(clock) for _ in range(n)]
        session.mhz += mhz
        if busy:
            session.busy += [m / 10 for m in mhz]
        return [1e6 / m for m in mhz]

    return take


def test_samples_at_a_slow_clock_are_taken_again_once(session: gpu.Session) -> None:
    samples = session.collected(feed(session, [1000, 500, 1000, 700, 990, 980], busy=True))
    assert session.mhz == [1000, 990, 1000, 980]
    assert samples == [1e6 / m for m in session.mhz]
    assert session.busy == [m / 10 for m in session.mhz]
    assert session.discarded == 2
    assert session.warnings == []


def test_what_stays_slow_is_kept_and_told(session: gpu.Session) -> None:
    """Samples are retaken once only: a machine that is always slow still finishes."""
    samples = session.collected(feed(session, [1000, 500, 500, 500, 510, 520, 530]))
    assert len(samples) == 4
    assert session.mhz == [1000, 510, 520, 530]
    assert session.discarded == 3
    assert "3 samples ran below 75% of the best SM clock" in session.warnings[0]


def test_bursts_rest_four_times_as_long_as_they_worked(session: gpu.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    session.rest(1e6)
    assert slept == []
    session.burst = True
    session.rest(1e6)
    session.rest(1e9)
    assert slept == [pytest.approx(0.004), pytest.approx(0.02)], "but never longer than 20 ms"
    assert session.measurement([1.0], "events", Cache("cold"), 1).regime == "burst"


def test_without_clocks_nothing_is_discarded(session: gpu.Session) -> None:
    assert len(session.collected(lambda n: [1.0] * n)) == 4
    assert session.discarded == 0


@pytest.mark.parametrize(
    ("options", "cupti_works", "graph_works", "timer", "reason"),
    [
        (Options(), True, True, "cupti", ""),
        (Options(), False, True, "graph_events", "not here"),
        (Options(), False, False, "events", "not here"),
        (Options(cupti=False), True, True, "graph_events", "CUDA events were asked for"),
        (Options(cupti=False, graph=False), True, True, "events", "no CUDA graph was asked for"),
    ],
)
def test_the_best_timer_that_works_is_used_with_a_reason(
    options: Options, cupti_works: bool, graph_works: bool, timer: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_cupti(self: gpu.Session) -> measure.Measurement:
        if not cupti_works:
            raise gpu.CuptiUnavailableError("not here")
        return self.measurement([1.0], "cupti", Cache("cold"), 1)

    walk = (lambda: None, 10, Cache("cold")) if graph_works else None
    monkeypatch.setattr(gpu.Session, "_load_kernels", lambda self: None)
    monkeypatch.setattr(gpu.Session, "_by_cupti", by_cupti)
    monkeypatch.setattr(gpu.Session, "_captured_walk", lambda self: walk)
    monkeypatch.setattr(gpu.Session, "_warm_up", lambda self, run, calls=1: 5)
    monkeypatch.setattr(gpu.Session, "_flush", lambda self: (None, Cache("cold")))
    monkeypatch.setattr(gpu.Session, "_event_times", lambda self, run, n, flush: [20.0] * n)
    found = gpu.Session(lambda x: None, Inputs(), 0, CPU, options).measure()
    assert found.timer == timer
    assert reason in found.timer_reason
    fallback = ["not here Falling back to CUDA events."] if reason == "not here" else []
    assert [text for text in found.warnings if "Falling back" in text] == fallback
    assert found.samples_ns[0] == {"cupti": 1.0, "graph_events": 2.0, "events": 20.0}[timer]


def test_slowdowns_in_words() -> None:
    assert nvml.slowdowns({"event_reasons": 0x4 | 0x40 | 0x1}) == {"power cap", "hardware thermal limit"}
    assert nvml.slowdowns({}) == set()


def test_host_cost_is_time_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert 1e5 <= wall.host_cost_ns(lambda: time.sleep(1e-4)) < 1e8
