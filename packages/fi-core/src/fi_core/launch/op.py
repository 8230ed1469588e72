"""The launcher of an op: from tensors to a bound kernel by one dict look-up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fi_core.launch import torch_op
from fi_core.launch.kernel import Kernel, bind
from fi_core.spec.dtype import short_name
from fi_core.spec.op import Op
from fi_core.spec.target import CPU, Target, cuda_target

KeyFunction = Callable[..., tuple[Any, ...]]


class Launcher:
    """Calls `op` with the arguments of its schema.

    `key(*arguments)` returns (`tensor.get_device()`, axis values in the op's order); dtypes may be torch dtypes. An op
    whose caller may choose the implementation adds its name as a last value, "" for the first that takes the axes. It
    runs on every call: keep it to attribute reads (`tensor.device` makes an object and takes twice the time).
    """

    def __init__(self, op: Op, key: KeyFunction) -> None:
        self.op, self.key = op, key
        self.kernels: dict[tuple[Any, ...], Kernel] = {}
        self._calls: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._impl: str | None = None
        _launchers[op.name] = self
        if "torch" in sys.modules:  # else at the first call: declaring ops must not import torch
            torch_op.register(self)

    def __call__(self, *arguments: Any) -> None:
        if torch_op.is_tracing():
            torch_op.call(self.op.name, arguments)
            return
        key = self.key(*arguments)
        call = self._calls.get(key)
        if call is None:
            call = self._bind(key, arguments)
        call(*arguments)

    def _bind(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Callable[..., None]:
        torch_op.register(self)
        _, *values = key
        device = next(a.device for a in arguments if hasattr(a, "device"))
        axes = {n: short_name(v) if type(v).__name__ == "dtype" else v for n, v in zip(self.op.axes, values)}
        named = values[len(axes)] if len(values) > len(axes) else None
        kernel = bind(self.op.spec(target_of(device), axes, self._impl or named or None), device.index or 0)
        self.kernels[key] = kernel
        self._calls[key] = kernel.call
        return kernel.call

    @contextlib.contextmanager
    def using(self, impl: str) -> Iterator[None]:
        """Inside the block the named implementation is used, for tests and benchmarks (not thread safe)."""
        self.op.impl(impl)
        before = self._impl, self._calls
        self._impl, self._calls = impl, {}
        try:
            yield
        finally:
            self._impl, self._calls = before


_launchers: dict[str, Launcher] = {}


def launchers() -> dict[str, Launcher]:
    """The launchers of the families imported so far, by op name."""
    return dict(_launchers)


def target_of(device: Any) -> Target:
    """The target of a torch device."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ValueError(f"tensors must be on a cpu or cuda device; got {device}")
    import torch

    return cuda_target(*torch.cuda.get_device_capability(device))
