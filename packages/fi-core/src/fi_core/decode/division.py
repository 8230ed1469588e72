"""How the work of a planned batch is divided: buffers carved from two workspaces, and the tables they were made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import pages_of_chunk
from fi_core.decode import ops
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

_MOST_CARVED = 64  # kept; more are made by batches of many sizes


def carve(
    own: torch.Tensor, shared: torch.Tensor, head_dim_vo: int, needs: ops.Sizes, else_needs: ops.Sizes
) -> ops.Buffers:
    """The schedule in `own`, and partial results behind it if they fit, else in `shared`; both contiguous.

    else_needs: sizes where there is no room for the first. Raises ValueError naming the workspace that is too small.
    """
    import torch

    schedule, partial = _bytes(needs, head_dim_vo)
    spare = own.nbytes - schedule
    # More ranges for as many blocks are not worth a place in what several streams may share.
    if partial > (spare if needs.blocks == else_needs.blocks else max(spare, shared.nbytes)):
        needs = else_needs
        schedule, partial = _bytes(needs, head_dim_vo)
    if own.nbytes < schedule:
        raise ValueError(f"int_workspace_buffer: {schedule} bytes are required; got {own.nbytes}")
    words = _as(own, torch.int32)
    if schedule + partial <= own.nbytes:
        room, first = words.view(torch.float32), schedule // 4
    elif partial <= shared.nbytes:
        room, first = _as(shared, torch.float32), 0
    else:
        raise ValueError(f"float_workspace_buffer: {partial} bytes are required; got {shared.nbytes}")
    slots = room[first : first + partial // 4].view(needs.slots, ops.ROWS, head_dim_vo + 2)
    return ops.Buffers(words[: needs.words], slots, needs.blocks, needs.ranges, needs.split)


def _as(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A flat view of the 4-byte type; a few bytes at the end may be left out."""
    import torch

    if buffer.dtype is dtype and buffer.ndim == 1:
        return buffer
    flat = buffer.view(torch.uint8).view(-1) if buffer.dtype is not torch.uint8 or buffer.ndim > 1 else buffer
    return (flat if flat.numel() % 4 == 0 else flat[: flat.numel() // 4 * 4]).view(dtype)


def _bytes(needs: ops.Sizes, head_dim_vo: int) -> tuple[int, int]:
    """Of the schedule and of partial results."""
    return round_up(4 * needs.words, 256), 4 * needs.slots * ops.ROWS * (head_dim_vo + 2)


def _split(pages: int | None, page_size: int, whole: bool) -> int:
    """The value of ops' `split` for fixed_split_size of plan (pages), or for requests that are not cut."""
    pages = pages_of_chunk(pages)
    return ops.NEVER if whole else ops.BALANCED if pages is None else ops.chunk_of(pages * page_size)


class Division:
    """The division of one batch after another over the same workspaces.

    capacity: page indices for which chunks are laid out, where that must not depend on the batch (CUDA graphs).
    """

    def __init__(self, own: torch.Tensor, shared: torch.Tensor, capacity: int | None) -> None:
        self.own, self.shared, self.capacity = own, shared, capacity
        self.buffers: ops.Buffers | None = None  # None: nothing is divided yet
        self._carved: dict[Any, ops.Buffers] = {}

    def _sizes(
        self,
        batch_size: int,
        indices: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        q_len: int,
        split: int,
        impl: str = "",
        kv: torch.dtype | None = None,
    ) -> ops.Sizes:
        units, tokens = ops.units_of(heads, kv_heads, q_len), (self.capacity or indices) * page_size
        return ops.sizes(self.own.device, batch_size, units, split, tokens, impl, kv)

    def bytes(
        self,
        head_dim: int,
        batch_size: int,
        indices: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        q_len: int,
        split: int | None,
    ) -> tuple[int, int]:
        """Of the shared and of the own workspace that a batch needs; arguments as those of `divide`."""
        needs = self._sizes(batch_size, indices, heads, kv_heads, page_size, q_len, _split(split, page_size, False))
        schedule, partial = _bytes(needs, head_dim)
        return (0, schedule + partial) if schedule + partial <= self.own.nbytes else (partial, schedule)

    def divide(
        self,
        indptr: torch.Tensor,
        last_page_len: torch.Tensor | None,
        kv_len: torch.Tensor | None,
        indices: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        q_len: int,
        split: int | None,
        whole: bool,
        impl: str,
        kv: torch.dtype,
    ) -> list[int]:
        """Divides the work on the device. Returns what describes it, as a list of integers.

        indices: how many page indices there are. split: fixed_split_size of plan; whole: no request is cut. impl, kv:
        the kernel and the type of the caches that are meant.
        """
        self.batch_size, self.page_size, self.q_len = len(indptr) - 1, page_size, q_len
        self.tables, tiles = (indptr, last_page_len, kv_len), _split(split, page_size, whole)
        self._shape = self.batch_size, indices if tiles > 0 else 0, heads, kv_heads, page_size, q_len, tiles, impl, kv
        self._units = ops.units_of(heads, kv_heads, q_len)
        self.buffers = self.of_head_dim(head_dim)
        self.again(window_left)
        return [self.batch_size, self._units, self.buffers.blocks, tiles, q_len, window_left]

    def again(self, window_left: int) -> None:
        """The same division for another window."""
        assert self.buffers is not None
        self.window_left = window_left
        ops.plan(self.buffers, *self.tables, self.page_size, self._units, q_len=self.q_len, window_left=window_left)

    def of_head_dim(self, head_dim_vo: int) -> ops.Buffers:
        """The buffers of the present batch for values of this width."""
        key = self._shape, head_dim_vo
        if key not in self._carved:
            if len(self._carved) == _MOST_CARVED:
                self._carved.clear()
            needs, fewer = self._sizes(*self._shape), self._sizes(*self._shape[:-2])
            self._carved[key] = carve(self.own, self.shared, head_dim_vo, needs, fewer)
        return self._carved[key]
