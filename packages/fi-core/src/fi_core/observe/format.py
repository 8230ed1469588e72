"""How the API log prints a value: tensors with layout and statistics, enums, containers, numbers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

from fi_core.utils import is_graph_capturing

if TYPE_CHECKING:
    import torch


def describe(value: Any, depth: int, statistics: bool) -> list[str]:
    """The lines of a value, indented by two spaces per level of depth."""
    pad = "  " * depth
    return [pad + line for line in _lines(value, statistics)]


def _lines(value: Any, statistics: bool) -> list[str]:
    import torch

    if isinstance(value, torch.Tensor):
        return ["Tensor(", *(f"  {line}" for line in _tensor_lines(value, statistics)), ")"]
    if isinstance(value, Enum):
        return [f"{type(value).__name__}.{value.name} (value={value.value})"]
    if isinstance(value, dict):
        return _container("{", "}", ((f"{key}: ", item) for key, item in value.items()), statistics)
    if isinstance(value, (list, tuple)):
        left, right = ("[", "]") if isinstance(value, list) else ("(", ")")
        return _container(left, right, ((f"[{i}]: ", item) for i, item in enumerate(value)), statistics)
    return repr(value).splitlines() or [""]


def _container(left: str, right: str, items: Iterator[tuple[str, Any]], statistics: bool) -> list[str]:
    inner: list[str] = []
    for head, item in items:
        first, *rest = _lines(item, statistics)
        inner += [f"  {head}{first}", *(f"  {line}" for line in rest)]
    return [left, *inner, right] if inner else [left + right]


def _tensor_lines(tensor: torch.Tensor, statistics: bool) -> Iterator[str]:
    yield f"shape={tuple(tensor.shape)}"
    yield f"stride={tensor.stride()}"
    yield f"dtype={tensor.dtype}"
    yield f"device={tensor.device}"
    yield f"requires_grad={tensor.requires_grad}"
    yield f"is_contiguous={tensor.is_contiguous()}"
    if statistics:
        if is_graph_capturing():
            yield "[statistics skipped: CUDA graph capture in progress]"
        elif tensor.numel() == 0:
            yield "[statistics skipped: no elements]"
        else:
            try:
                yield from list(_statistics(tensor))
            except Exception as error:  # a dtype without these operations, or a device out of memory
                yield f"[statistics failed: {type(error).__name__}: {error}]"


def _statistics(tensor: torch.Tensor) -> Iterator[str]:
    import torch

    values = tensor.detach()
    if tensor.is_floating_point():
        values = values.float() if values.dtype != torch.float64 else values
        yield f"min={values.min().item():.6f}"
        yield f"max={values.max().item():.6f}"
        yield f"mean={values.mean().item():.6f}"
        yield f"nan_count={int(values.isnan().sum())}"
        yield f"inf_count={int(values.isinf().sum())}"
    elif not tensor.is_complex():
        values = values.int() if values.dtype in (torch.bool, torch.uint16, torch.uint32) else values
        yield f"min={values.min().item()}"
        yield f"max={values.max().item()}"
        yield f"mean={values.double().mean().item():.6f}"
