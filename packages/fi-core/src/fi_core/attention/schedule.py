"""The schedule of planned batch decode: its buffers in the two workspaces, and the tables it was computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import pages_of_chunk
from fi_core.attention.ops import decode as ops
from fi_core.runtime.dispatch import Choice
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

_MAX_CARVED = 64  # buffers that are kept; an engine may plan batches of many sizes


def carve(
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    head_dim_vo: int,
    sizes: ops.Sizes,
    fallback: ops.Sizes,
) -> ops.Buffers:
    """Places a schedule in the int workspace, and its partials behind it or, if they do not fit, in the other.

    Args:
        int_workspace, float_workspace: contiguous tensors.
        head_dim_vo: head dim of the values.
        sizes: the preferred sizes.
        fallback: the sizes where there is no room for the preferred ones.

    Raises:
        ValueError: names the workspace that is too small, and the bytes that are required.
    """
    import torch

    schedule, partials = _bytes(sizes, head_dim_vo)
    spare = int_workspace.nbytes - schedule
    # Partials of extra work ranges do not go to the float workspace, which other streams may share.
    if partials > (spare if sizes.num_ctas == fallback.num_ctas else max(spare, float_workspace.nbytes)):
        sizes = fallback
        schedule, partials = _bytes(sizes, head_dim_vo)
    if int_workspace.nbytes < schedule:
        raise ValueError(f"int_workspace_buffer: {schedule} bytes are required; got {int_workspace.nbytes}")
    words = _as(int_workspace, torch.int32)
    if schedule + partials <= int_workspace.nbytes:
        room, first = words.view(torch.float32), schedule // 4
    elif partials <= float_workspace.nbytes:
        room, first = _as(float_workspace, torch.float32), 0
    else:
        raise ValueError(f"float_workspace_buffer: {partials} bytes are required; got {float_workspace.nbytes}")
    workspace = room[first : first + partials // 4].view(sizes.max_partials, ops.Q_TILE, head_dim_vo + 2)
    return ops.Buffers(words[: sizes.schedule_words], workspace, sizes.num_ctas, sizes.num_ranges, sizes.split_kv)


def _as(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A flat view as the 4-byte dtype, without the bytes at the end that do not fill an element."""
    import torch

    if buffer.dtype is dtype and buffer.ndim == 1:
        return buffer
    flat = buffer.view(torch.uint8).view(-1) if buffer.dtype is not torch.uint8 or buffer.ndim > 1 else buffer
    return (flat if flat.numel() % 4 == 0 else flat[: flat.numel() // 4 * 4]).view(dtype)


def _bytes(sizes: ops.Sizes, head_dim_vo: int) -> tuple[int, int]:
    """(bytes of the schedule, bytes of the partials)."""
    return round_up(4 * sizes.schedule_words, 256), 4 * sizes.max_partials * ops.Q_TILE * (head_dim_vo + 2)


def _split_kv(fixed_split_size: int | None, page_size: int, disable_split_kv: bool) -> int:
    """The op's `split_kv` for these two arguments of plan; fixed_split_size is in pages."""
    pages = pages_of_chunk(fixed_split_size)
    if disable_split_kv:
        return ops.NO_SPLIT
    return ops.BALANCED if pages is None else ops.kv_chunk_tiles(pages * page_size)


class DecodeSchedule:
    """The schedule of one planned batch after another, in the same workspaces.

    Args:
        int_workspace: private to the owner; holds the schedule and, if they fit, the partials.
        float_workspace: may be shared with other owners; holds the partials that do not fit.
        capacity: the number of page indices that chunks are sized for, where it must not depend on the batch (CUDA
            graphs); None: that of the batch.
    """

    def __init__(self, int_workspace: torch.Tensor, float_workspace: torch.Tensor, capacity: int | None) -> None:
        self.int_workspace, self.float_workspace, self.capacity = int_workspace, float_workspace, capacity
        self.most_ctas = ops.MAX_RANGES  # fewer than fit, where another kernel runs beside this one
        self.buffers: ops.Buffers | None = None  # None before the first plan
        self.heads_per_tile = 1  # of the plan
        self._carved: dict[Any, ops.Buffers] = {}

    def _sizes(
        self,
        batch_size: int,
        indices: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        q_len: int,
        split_kv: int,
        choice: Choice | None = None,
    ) -> ops.Sizes:
        of_tile = ops.heads_per_tile(choice, batch_size, heads, kv_heads, q_len, split_kv) if choice else 1
        q_tiles = ops.num_q_tiles(heads, kv_heads, q_len, of_tile)
        tokens = (self.capacity or indices) * page_size
        sizes = ops.buffer_sizes(self.int_workspace.device, batch_size, q_tiles, split_kv, tokens, choice)
        return sizes._replace(num_ctas=min(sizes.num_ctas, self.most_ctas))

    def workspace_bytes(
        self,
        head_dim: int,
        batch_size: int,
        indices: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        q_len: int,
        fixed_split_size: int | None,
    ) -> tuple[int, int]:
        """(bytes of the float workspace, bytes of the int workspace) that `plan` needs for these arguments."""
        split_kv = _split_kv(fixed_split_size, page_size, False)
        sizes = self._sizes(batch_size, indices, heads, kv_heads, page_size, q_len, split_kv)
        schedule, partials = _bytes(sizes, head_dim)
        return (0, schedule + partials) if schedule + partials <= self.int_workspace.nbytes else (partials, schedule)

    def plan(
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
        fixed_split_size: int | None,
        disable_split_kv: bool,
        choice: Choice,
    ) -> list[int]:
        """Computes the schedule of a batch on the device.

        Args:
            indptr, last_page_len, kv_len: tables on the device, as in `ops.plan`.
            indices: number of page indices.
            heads, kv_heads, head_dim, page_size, window_left, q_len: the shape of the batch.
            fixed_split_size, disable_split_kv: as in the plan of the wrapper.
            choice: the kernel that is expected to run.

        Returns:
            The plan info, a list of integers.
        """
        self.batch_size, self.page_size, self.q_len = indptr.numel() - 1, page_size, q_len
        self.tables = indptr, last_page_len, kv_len
        split_kv = _split_kv(fixed_split_size, page_size, disable_split_kv)
        self.heads_per_tile = ops.heads_per_tile(choice, self.batch_size, heads, kv_heads, q_len, split_kv)
        self._head_dim = head_dim
        self._q_tiles = ops.num_q_tiles(heads, kv_heads, q_len, self.heads_per_tile)
        if split_kv <= 0:  # sizes depend on whether there is little work; then one page stands for all
            indices = int(indices * page_size // ops.KV_TILE * self._q_tiles <= ops.MOST_TILES_OF_TWO_CTAS)
        self._shape = self.batch_size, indices, heads, kv_heads, page_size, q_len, split_kv, choice
        self.buffers = self.buffers_for(head_dim)
        self.replan(window_left)
        return [self.batch_size, self._q_tiles, self.buffers.num_ctas, split_kv, q_len, window_left]

    def replan(self, window_left: int) -> None:
        """Computes the schedule of the same batch for another window."""
        assert self.buffers is not None
        ops.plan(self.buffers, *self.tables, self.page_size, self._q_tiles, q_len=self.q_len, window_left=window_left)
        self.window_left = window_left

    def limit_ctas(self, most: int) -> None:
        """Computes the schedule of the same batch for at most this many CTAs."""
        if most != self.most_ctas:
            self.most_ctas = most
            self.buffers = self.buffers_for(self._head_dim)
            self.replan(self.window_left)

    def buffers_for(self, head_dim_vo: int) -> ops.Buffers:
        """The buffers of the planned batch for values of this head dim."""
        key = self._shape, self.most_ctas, head_dim_vo
        if key not in self._carved:
            if len(self._carved) == _MAX_CARVED:
                self._carved.clear()
            if head_dim_vo == self._head_dim:
                sizes, fallback = self._sizes(*self._shape), self._sizes(*self._shape[:-1])
            else:  # the planned schedule has the sizes for which its own head dim left room
                assert self.buffers is not None
                schedule, workspace, *numbers = self.buffers
                sizes = fallback = ops.Sizes(schedule.numel(), workspace.shape[0], *numbers)
            self._carved[key] = carve(self.int_workspace, self.float_workspace, head_dim_vo, sizes, fallback)
        return self._carved[key]
