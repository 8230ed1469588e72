"""Measures device times of kernels, memcpys and memsets by CUPTI activity records (cupti-python, CUDA 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

_BUFFER_BYTES = 8 << 20


class CuptiUnavailableError(RuntimeError):
    """CUPTI is not usable; the text gives the reason and a remedy."""


class Activity(NamedTuple):
    """One kernel, memcpy or memset; times are in nanoseconds."""

    name: str
    start: int
    end: int
    grid: tuple[int, int, int] | None = None
    registers: int | None = None


class Window(NamedTuple):
    """The device activities of one call."""

    activities: tuple[Activity, ...]

    @property
    def span_ns(self) -> int:
        """Time from the start of the first activity to the end of the last, gaps included."""
        return max(a.end for a in self.activities) - min(a.start for a in self.activities)

    @property
    def sum_ns(self) -> int:
        """Sum of the activities' times, gaps excluded."""
        return sum(a.end - a.start for a in self.activities)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(a.name for a in self.activities))


def _load() -> Any:
    try:
        from cupti import cupti  # pyright: ignore[reportAttributeAccessIssue]  (it resolves `cupti` to this file)
    except ImportError as error:
        raise CuptiUnavailableError("CUPTI is not installed. Try 'pip install -U cupti-python'.") from error
    return cupti


class CuptiRecorder:
    """Context manager that records device activities: `window(fn)` returns those of one fn().

    CUPTI allows one subscriber per process.
    """

    def __init__(self) -> None:
        self._cupti = _load()
        kinds = self._cupti.ActivityKind
        self._kinds = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        self._names = {int(kinds.MEMCPY): "memcpy", int(kinds.MEMSET): "memset"}
        self._seen: list[Activity] = []

    def __enter__(self) -> Self:
        enabled: list[Any] = []
        try:
            self._cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._on_buffer)
            for kind in self._kinds:
                self._cupti.activity_enable(kind)
                enabled.append(kind)
        except Exception as error:  # its error classes differ between versions
            for kind in enabled:
                self._cupti.activity_disable(kind)
            raise CuptiUnavailableError(
                f"CUPTI refuses to record ({str(error).splitlines()[0]}). Is another profiler attached?"
            ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        self._cupti.finalize()

    def _on_buffer(self, records: list[Any]) -> None:
        for r in records:
            if r.kind in self._names:
                self._seen.append(Activity(self._names[int(r.kind)], r.start, r.end))
            else:
                grid = (r.grid_x, r.grid_y, r.grid_z)
                self._seen.append(Activity(r.name, r.start, r.end, grid, r.registers_per_thread))

    def window(self, fn: Callable[[], object], before: Callable[[], object] | None = None) -> Window:
        """Runs fn and returns its device activities.

        Args:
            fn: the call to record.
            before: runs first and is not recorded (a cache flush).

        Raises:
            ValueError: fn ran nothing on the device.
        """
        import torch

        if before is not None:
            before()
        torch.cuda.synchronize()
        self._cupti.activity_flush_all(1)
        self._seen.clear()
        fn()
        torch.cuda.synchronize()
        self._cupti.activity_flush_all(1)
        if not self._seen:
            raise ValueError("CUPTI recorded no kernel, memcpy or memset in this call: does it run on the GPU?")
        return Window(tuple(sorted(self._seen, key=lambda a: a.start)))
