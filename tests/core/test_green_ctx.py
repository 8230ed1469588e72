"""Green contexts: how SMs are divided, with a stand-in for the driver; on a GPU, that kernels stay on their SMs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from fi_core import green_ctx
from fi_core.errors import LibraryError


def target(reference: Any) -> Any:
    """What ctypes.byref points to."""
    return reference._obj


class Driver:
    """A GPU of 132 SMs that divides them in steps of 8."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.step = 8  # that it tells

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuDeviceGetDevResource(self, _device: Any, found: Any, kind: int) -> int:
        made = target(found)
        made.sm_count, made.type, made.least, made.step = 132, kind, self.step, self.step
        return 0

    def cuDevSmResourceSplitByCount(
        self, parts: Any, count: Any, source: Any, rest: Any, _flags: Any, least: Any
    ) -> int:
        whole, made, remains = map(target, (source, count, rest))
        if whole.sm_count != 132:
            return 915  # as the driver answers to a part of a part
        size = -(-least.value // 8) * 8
        made.value = min(made.value, whole.sm_count // size)
        for index in range(made.value):
            parts[index].sm_count = size
        remains.sm_count = whole.sm_count - made.value * size
        return 0

    def cuGreenCtxStreamCreate(self, stream: Any, *_: Any) -> int:
        self.streams.append(1 + len(self.streams))
        target(stream).value = self.streams[-1]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(green_ctx, "driver_library", lambda: made)
    monkeypatch.setattr(green_ctx, "cuda_index", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: _Done())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device))
    return made


class _Done:
    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("step", [8, 0])
def test_groups_and_what_remains(driver: Driver, step: int) -> None:
    driver.step = step
    streams, resources = green_ctx.split_device_green_ctx("cuda", 2, 20)
    assert [r.sm.smCount for r in resources] == [24, 24, 84]
    assert [pointer for pointer, _ in streams] == [1, 2, 3]
    _, resources = green_ctx.split_device_green_ctx_by_sm_count("cuda", [8, 17])
    assert [r.sm.smCount for r in resources] == [8, 24, 100]


def test_too_many_sms(driver: Driver) -> None:
    with pytest.raises(RuntimeError, match="sm_counts: 132 SMs have 2 units of 64; 3 are required in all"):
        green_ctx.split_device_green_ctx("cuda", 3, 60)
    with pytest.raises(ValueError, match="num_groups, min_count: at least 1 each is required; got 0 and 8"):
        green_ctx.split_device_green_ctx("cuda", 0, 8)
    with pytest.raises(ValueError, match="sm_counts: numbers from 1 on"):
        green_ctx.split_device_green_ctx_by_sm_count("cuda", [])


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    green_ctx.driver_library.cache_clear()
    monkeypatch.setattr(green_ctx, "LIBRARY", "libno-driver-here.so")
    with pytest.raises(LibraryError, match=r"an NVIDIA driver for CUDA 12\.4 or later is required"):
        green_ctx.driver_library()
    assert ctypes.sizeof(green_ctx._Resource) == 144


@pytest.mark.gpu
def test_kernels_on_their_sms() -> None:
    """The same product on a third of the SMs takes longer, and gives the same result."""
    streams, resources = green_ctx.split_device_green_ctx_by_sm_count("cuda", [16, 64])
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert [r.sm.smCount for r in resources[:2]] == [16, 64]
    assert sum(r.sm.smCount for r in resources) <= total
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    want, times = a @ a, []
    for stream in streams[:2]:
        with torch.cuda.stream(stream):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(3):
                got = a @ a
            marks[0].record()
            for _ in range(10):
                got = a @ a
            marks[1].record()
            marks[1].synchronize()
        torch.testing.assert_close(got, want, rtol=1e-1, atol=1.0)
        times.append(marks[0].elapsed_time(marks[1]))
    assert times[0] > 2 * times[1]
