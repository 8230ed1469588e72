"""What decides whether a timed call finds its data in the cache: flushing, and walking over copies of the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

ROTATION_FACTOR = 5  # working set of a rotation in L2 sizes; twice would do, the rest pays for hashing and slicing


def get_l2_cache_size(device: torch.device | str | int | None = None) -> int:
    """Bytes of the L2 cache of a GPU, or of the last-level cache of this CPU for a cpu device."""
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
    """Every tensor in nested tuples, lists and dicts, in order."""
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
    """Bytes that all tensors of a tree address; what views of one storage share counts once."""
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
    """A deep copy of the tensors of a tree: strides are kept, and views of one storage still share one storage."""
    import torch

    copies: dict[int, torch.UntypedStorage] = {}

    def copy(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            storage = node.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            twin = torch.empty(0, dtype=node.dtype, device=node.device)
            return twin.set_(copies[storage.data_ptr()], node.storage_offset(), node.size(), node.stride())
        if isinstance(node, dict):
            return {key: copy(value) for key, value in node.items()}
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return type(node)(*map(copy, node))
        if isinstance(node, list | tuple):
            return type(node)(map(copy, node))
        return node

    return copy(tree)


def calculate_rotation_count(
    tensors: Iterable[torch.Tensor], device: torch.device | str | int | None = None, min_rotations: int = 2
) -> int:
    """How many copies of the tensors to walk over so that each call meets a cold cache; 1 if they are big enough."""
    total = touched_bytes(list(tensors))
    needed = ROTATION_FACTOR * get_l2_cache_size(device)
    if total == 0 or total >= needed:
        return 1
    return max(min_rotations, math.ceil(needed / total) + 1)


def make_flush(
    device: torch.device | str | int | None = None, size: int | None = None, how: Literal["write", "read"] = "write"
) -> Callable[[], object]:
    """A function that evicts what the L2 cache holds; `size` defaults to twice the cache.

    Writing leaves the cache full of dirty lines, whose write-back competes with the next kernel; reading does not.
    """
    import torch

    where = torch.device("cuda" if device is None else device)
    buffer = torch.zeros((size or 2 * get_l2_cache_size(where)) // 4, dtype=torch.int32, device=where)
    return buffer.zero_ if how == "write" else buffer.max
