"""Controls whether a timed call finds its inputs in the L2 cache: flushes it, or rotates over copies of the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

ROTATION_FACTOR = 5  # bytes of all copies in L2 sizes; 2 suffice in theory, 5 allow for hashed, sliced caches


def get_l2_cache_size(device: torch.device | str | int | None = None) -> int:
    """Returns the bytes of a GPU's L2 cache, or of the CPU's last-level cache if device is a CPU."""
    import torch

    if device is not None and torch.device(device).type == "cpu":
        return _cpu_cache_size()
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _cpu_cache_size() -> int:
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    texts = [p.read_text().strip() for p in sizes]
    return max((int(t[:-1]) * units[t[-1]] for t in texts if t[-1:] in units), default=32 << 20)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor of nested tuples, lists and dicts, in order."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def touched_bytes(tree: Any) -> int:
    """Returns the bytes that all tensors of a tree address; bytes that views of one storage share count once."""
    seen: dict[int, int] = {}
    for t in tensors_in(tree):
        if t.numel() == 0:
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(t.size(), t.stride(), strict=True))
        storage = t.untyped_storage()
        addressed = seen.get(storage.data_ptr(), 0) + min(t.numel(), extent) * t.element_size()
        seen[storage.data_ptr()] = min(addressed, storage.nbytes())
    return sum(seen.values())


def clone_tree(tree: Any) -> Any:
    """Copies the tensors of a tree with their strides; views of one storage share one storage in the copy too."""
    return _copied(tree, {})


def _copied(node: Any, copies: dict[int, torch.UntypedStorage]) -> Any:
    """`clone_tree` of a node. copies: the storages that are copied, by address. No inner function: it would be a cycle
    that holds the copies until a collection.
    """
    import torch

    if isinstance(node, torch.Tensor):
        storage = node.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        twin = torch.empty(0, dtype=node.dtype, device=node.device)
        return twin.set_(copies[storage.data_ptr()], node.storage_offset(), node.size(), node.stride())
    if isinstance(node, dict):
        return {key: _copied(value, copies) for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_copied(value, copies) for value in node))
    if isinstance(node, list | tuple):
        return type(node)(_copied(value, copies) for value in node)
    return node


def calculate_rotation_count(
    tensors: Iterable[torch.Tensor], device: torch.device | str | int | None = None, min_rotations: int = 2
) -> int:
    """Returns how many copies of the tensors calls must rotate over to find a cold L2 cache; 1 if they exceed it."""
    total = touched_bytes(list(tensors))
    needed = ROTATION_FACTOR * get_l2_cache_size(device)
    if total == 0 or total >= needed:
        return 1
    return max(min_rotations, math.ceil(needed / total) + 1)


def make_flush(
    device: torch.device | str | int | None = None, size: int | None = None, how: Literal["write", "read"] = "write"
) -> Callable[[], object]:
    """Makes a function that evicts the content of the L2 cache.

    Args:
        device: CUDA device; the current one if None.
        size: bytes to write or read; twice the L2 cache if None.
        how: "write" leaves the cache full of dirty lines, whose write-back competes with the next kernel; "read" leaves
            clean lines.

    Returns:
        The function.
    """
    import torch

    where = torch.device("cuda" if device is None else device)
    buffer = torch.zeros((size or 2 * get_l2_cache_size(where)) // 4, dtype=torch.int32, device=where)
    return buffer.zero_ if how == "write" else buffer.max
