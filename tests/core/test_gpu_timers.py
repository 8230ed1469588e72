"""bench_gpu_time's GPU paths with stand-ins for CUPTI, events and graphs: which one runs, on which copies, and when."""

from __future__ import annotations

import enum
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fi_core.testing import l2, timing
from fi_core.testing.cupti import CuptiRecorder, CuptiUnavailableError


class FakeCupti(types.ModuleType):
    """Buffers what is 'launched' and delivers it on flush, as CUPTI does."""

    class ActivityKind(enum.IntEnum):
        MEMCPY = 1
        MEMSET = 2
        CONCURRENT_KERNEL = 10

    def __init__(self) -> None:
        super().__init__("cupti.cupti")
        self.clock, self.pending, self.enabled = 0, [], set()
        self.deliver: Callable[[list[Any]], None] = lambda records: None
        self.finalized = 0

    def activity_register_callbacks(self, requested: Callable[[], Any], completed: Callable[[list[Any]], None]) -> None:
        assert requested()[0] > 0
        self.deliver = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        records, self.pending = self.pending, []
        self.deliver(records)

    def finalize(self) -> None:
        self.finalized += 1

    def launch(self, name: str, duration: int, gap: int = 5, kind: int = 10) -> None:
        if kind in self.enabled:
            start = self.clock + gap
            self.clock = start + duration
            self.pending.append(
                types.SimpleNamespace(
                    kind=kind,
                    name=name,
                    start=start,
                    end=self.clock,
                    grid_x=3,
                    grid_y=2,
                    grid_z=1,
                    registers_per_thread=40,
                )
            )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    module, package = FakeCupti(), types.ModuleType("cupti")
    package.cupti = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    return module


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing._Call, "on_gpu", lambda self: True)
    monkeypatch.setattr(l2, "make_flush", lambda *a, **k: lambda: None)


def test_a_window_holds_one_call_and_not_the_flush(fake: FakeCupti) -> None:
    def call() -> None:
        fake.launch("kernel_a", 100)
        fake.launch("kernel_b", 50, gap=20)
        fake.launch("", 10, kind=2)

    with CuptiRecorder() as recorder:
        for _ in range(3):
            window = recorder.window(call, before=lambda: fake.launch("flush", 9999))
            assert window.names == ("kernel_a", "kernel_b", "memset")
            assert window.sum_ns == 160
            assert window.span_ns == 100 + 20 + 50 + 5 + 10, "the gap between kernels is in the span"
            assert window.activities[0].grid == (3, 2, 1)
        with pytest.raises(ValueError, match="recorded no kernel"):
            recorder.window(lambda: None)
    assert fake.enabled == set()
    assert fake.finalized == 1


def test_bench_gpu_time_by_cupti_returns_spans(fake: FakeCupti, on_gpu: None) -> None:
    times = timing.bench_gpu_time(lambda: fake.launch("k", 2000), enable_cupti=True, num_iters=4, dry_run_iters=1)
    assert times.samples == [0.002] * 4


def test_unlike_calls_are_an_error(fake: FakeCupti, on_gpu: None) -> None:
    names = iter(f"k{i // 8}" for i in range(100))
    with pytest.raises(ValueError, match=r"Inconsistent kernel names.*k0.*k1"):
        timing.bench_gpu_time(lambda: fake.launch(next(names), 10), enable_cupti=True, num_iters=9, dry_run_iters=0)


def test_a_missing_or_refusing_cupti_says_why(monkeypatch: pytest.MonkeyPatch, fake: FakeCupti) -> None:
    def refuse(kind: int) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS\nmore")

    monkeypatch.setattr(fake, "activity_enable", refuse)
    with pytest.raises(CuptiUnavailableError, match=r"MULTIPLE_SUBSCRIBERS.*another profiler"), CuptiRecorder():
        pass
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(CuptiUnavailableError, match="pip install -U cupti-python"):
        CuptiRecorder()


def test_without_cupti_it_warns_and_uses_events(monkeypatch: pytest.MonkeyPatch, on_gpu: None) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setattr(timing, "_event_times", lambda run, n, flush: [1.5] * n)
    with pytest.warns(UserWarning, match="CUPTI is not installed.*Falling back to CUDA events"):
        median, std = timing.bench_gpu_time(lambda: None, enable_cupti=True, num_iters=3)
    assert (median, std) == (1.5, 0.0)


class Graphs:
    """Stands in for capture: remembers the calls of each graph."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture(self, calls: list[Any]) -> types.SimpleNamespace:
        self.calls = list(calls)
        return types.SimpleNamespace(replay=lambda: None)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, on_gpu: None) -> Graphs:
    found = Graphs()
    monkeypatch.setattr(timing, "capture_graph", found.capture)
    monkeypatch.setattr(timing, "_event_times", lambda run, n, flush: [float(len(found.calls))] * n)
    monkeypatch.setattr(l2, "get_l2_cache_size", lambda device=None: 1000)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return found


def test_the_graph_walks_over_every_copy(graphs: Graphs) -> None:
    """The walk is as long as the rotation: ten calls over fifty copies would meet a warm cache."""
    x = torch.ones(100, dtype=torch.uint8)
    times = timing.bench_gpu_time(lambda t: t, input_args=(x,), use_cuda_graph=True, num_iters=2, dry_run_iters=0)
    assert len(graphs.calls) == 51
    storages = {call.args[0].untyped_storage().data_ptr() for call in graphs.calls}
    assert len(storages) == 51
    assert times.samples == [1.0, 1.0], "the time of a replay is divided by the calls in it"


def test_big_inputs_and_warm_graphs_are_not_copied(graphs: Graphs) -> None:
    big = torch.ones(6000, dtype=torch.uint8)
    for kwargs in (
        {"args": (big,)},
        {"args": (big[:10],), "cold_l2_cache": False},
        {"args": (big,), "rotate_buffers": False},
    ):
        timing.bench_gpu_time(lambda t: t, use_cuda_graph=True, num_iters=1, dry_run_iters=0, **kwargs)
        assert len(graphs.calls) == 10
        assert len({call.args[0].data_ptr() for call in graphs.calls}) == 1


def test_a_closure_cannot_be_cold_and_is_told(graphs: Graphs) -> None:
    with pytest.warns(UserWarning, match="measures a warm cache"):
        timing.bench_gpu_time(lambda: None, use_cuda_graph=True, num_iters=1, dry_run_iters=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timing.bench_gpu_time(lambda: None, use_cuda_graph=True, num_iters=1, dry_run_iters=0, cold_l2_cache=False)


def test_iteration_counts_follow_the_time_budget(monkeypatch: pytest.MonkeyPatch, on_gpu: None) -> None:
    monkeypatch.setattr(timing, "_event_times", lambda run, n, flush: [2.0] * n)
    calls = []
    times = timing.bench_gpu_time(lambda: calls.append(1), dry_run_time_ms=10, repeat_time_ms=30)
    assert len(calls) == 1 + 5, "one call before the estimate, five of warm-up"
    assert len(times.samples) == 15
