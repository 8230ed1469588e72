"""The machine that calls are for: that of torch's devices, or a rehearsed one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fi_core.runtime.spec.target import CPU, Target, cuda_target

watchers: list[Callable[[], None]] = []  # called where a rehearsal begins or ends


_LAUNCH = re.compile(r"(.+): grid (\d+) x (\d+) x (\d+), (\d+) threads, (\d+) B shared, clusters of (\d+)(, pdl)?")


class Launch(NamedTuple):
    """One kernel launch as the host module makes it: the kernel entry and its shape. predicted: times in us of the
    configurations that a cost model finds the fastest; the first is this one.
    """

    entry: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: int
    pdl: bool
    predicted: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        shape = f"grid {' x '.join(map(str, self.grid))}, {self.threads} threads, {self.shared_bytes} B shared"
        cluster = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{self.entry}: {shape}{cluster}{', pdl' if self.pdl else ''}"


def launches(text: str | None) -> tuple[Launch, ...]:
    """The launches that a rehearsed kernel tells, in order, each behind its predictions: "~ 12.60 words"."""
    found, predicted = [], list[tuple[str, float]]()
    for line in (text or "").splitlines():
        if line.startswith("~"):
            _, us, words = line.split(maxsplit=2)
            predicted.append((words, float(us)))
        elif match := _LAUNCH.match(line):
            entry, *numbers, pdl = match.groups()
            x, y, z, threads, shared, cluster = map(int, numbers)
            found.append(Launch(entry, (x, y, z), threads, shared, cluster, bool(pdl), tuple(predicted)))
            predicted = []
    return tuple(found)


class Rehearsal:
    """Calls for another machine: each choice and each launch is computed, and nothing runs.

    Tensors are on the CPU and are not read. `calls` has choice and launches of each call; `files`, those of a variant.

    Args:
        target: the rehearsed target.
        multiprocessors, shared_limit: of its device; the latter in bytes of a CTA.
        has_launcher: of an op; without one `calls` has the op in place of the choice, or no launches of a variant.
    """

    def __init__(self, target: Target, multiprocessors: int, shared_limit: int, has_launcher: Any = bool) -> None:
        self.target, self.multiprocessors, self.shared_limit = target, multiprocessors, shared_limit
        self.calls: list[tuple[Any, tuple[Launch, ...] | None]] = []
        self.files: dict[Any, tuple[Any, ...]] = {}
        self.has_launcher = has_launcher

    def note(self, choice: Any, told: str | None = None) -> None:
        """Keeps a call. told: its launches, as `Kernel.run` tells them."""
        self.calls.append((choice, launches(told)))

    def __enter__(self) -> Rehearsal:
        _rehearsals.append(self)
        for changed in watchers:
            changed()
        return self

    def __exit__(self, *_: object) -> None:
        _rehearsals.pop()
        for changed in watchers:
            changed()


_rehearsals: list[Rehearsal] = []  # the innermost counts


def rehearsal() -> Rehearsal | None:
    return _rehearsals[-1] if _rehearsals else None


def target_of(device: Any) -> Target:
    """The target of a torch device, or of the current rehearsal."""
    return _rehearsals[-1].target if _rehearsals else _target_of(device)


@functools.cache
def _target_of(device: Any) -> Target:
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ValueError(f"device: a cpu or cuda device is required of tensors; got {device}")
    import torch

    return cuda_target(*torch.cuda.get_device_capability(device))


def multiprocessors_of(device: Any) -> int:
    """SMs of a CUDA device, or of the rehearsed device."""
    return _rehearsals[-1].multiprocessors if _rehearsals else _multiprocessors_of(device)


@functools.cache
def _multiprocessors_of(device: Any) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
