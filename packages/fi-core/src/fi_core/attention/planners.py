"""Planners that engines call by themselves: which wrapper a call is for."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch


class Planned(Protocol):
    _int_workspace_buffer: torch.Tensor


T = TypeVar("T", bound=Planned)


class Owners(Generic[T]):
    """Wrappers by the address of their int workspace, which is how a planner is told whom it plans for."""

    def __init__(self) -> None:
        self._wrappers: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, wrapper: T) -> None:
        self._wrappers[wrapper._int_workspace_buffer.data_ptr()] = wrapper

    def of(self, int_workspace_buffer: torch.Tensor) -> T:
        """The wrapper to which it belongs; ValueError if it is of none."""
        wrapper = self._wrappers.get(int_workspace_buffer.data_ptr())
        if wrapper is None:
            raise ValueError("int_workspace_buffer: the one of a wrapper is required (wrapper._int_workspace_buffer)")
        return wrapper
