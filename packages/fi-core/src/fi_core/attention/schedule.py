"""The plans of batch decode, prefill and MLA, which never change, and where schedules of decode lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.ops import decode as ops
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.utils import round_up

if TYPE_CHECKING:
    from typing_extensions import Self


def carve(
    int_workspace: torch.Tensor, float_workspace: torch.Tensor, head_dim_vo: int, sizes: ops.Sizes, fallback: ops.Sizes
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
    room = room[first : first + partials // 4].view(sizes.max_partials, ops.Q_TILE, head_dim_vo + 2)
    return ops.Buffers(words[: sizes.schedule_words], room, sizes.num_ctas, sizes.num_ranges, sizes.split_kv)


def _as(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A flat view as the 4-byte dtype, without the bytes at the end that do not fill an element."""
    if buffer.dtype is dtype and buffer.ndim == 1:
        return buffer
    flat = buffer.view(torch.uint8).view(-1) if buffer.dtype is not torch.uint8 or buffer.ndim > 1 else buffer
    return (flat if flat.numel() % 4 == 0 else flat[: flat.numel() // 4 * 4]).view(dtype)


def _bytes(sizes: ops.Sizes, head_dim_vo: int) -> tuple[int, int]:
    """(bytes of the schedule, bytes of the partials)."""
    return round_up(4 * sizes.schedule_words, 256), 4 * sizes.max_partials * ops.Q_TILE * (head_dim_vo + 2)


def split_kv_of(fixed_split_size: int | None, page_size: int, disable_split_kv: bool) -> int:
    """The op's `split_kv` for these two arguments of plan. Raises ValueError.

    fixed_split_size: pages of a chunk; None, or -1, which engines pass: no chunks.
    """
    if fixed_split_size is None:
        fixed_split_size = -1
    if not isinstance(fixed_split_size, int) or fixed_split_size == 0:
        raise ValueError(
            "fixed_split_size: pages of a chunk, or None or -1 for no fixed chunks, are required; got "
            f"{fixed_split_size!r}"
        )
    if disable_split_kv:
        return ops.NO_SPLIT
    tokens = ops.INVARIANT_TOKENS * is_on() if fixed_split_size < 0 else fixed_split_size * page_size
    return ops.kv_chunk_tiles(tokens) if tokens else ops.BALANCED


class Plan:
    """What a plan fixes for its runs. A plan never changes: a wrapper whose state changes makes another one."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: a plan does not change; replace() makes another one")

    def replace(self, **fields: Any) -> Self:
        """Another plan, with these fields."""
        made = object.__new__(type(self))
        own = vars(made)
        own.update(vars(self))
        own.update(fields)
        return made


class BatchPlan(Plan):
    """What the plans of batch decode and of batch prefill have in common; the first fields are arguments of the ops."""

    partials: Any = None
    schedule: Any = None
    page_indices: Any = None  # None: ragged keys
    kv_layout: int = 0
    batch_size: int = 0
    pos_encoding: int = 0
    window_left: int = -1
    soft_cap: float = 0.0
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    mask: Any = None  # of decode: over the last q_len keys
    v_table_offset: int = 0
    num_qo_heads: int = 0
    backend: str = "auto"
    # Of the scores and the batch
    sm_scale: float | None = None  # None: 1 / sqrt(head dim of q and k)
    num_kv_heads: int = 0
    head_dim_vo: int = 0
    page_size: int = 1
    q_dtype: Any = None
    kv_dtype: Any = None
    o_dtype: Any = None
    # Tables of the wrapper; indptr: of pages, or of ragged keys
    qo_indptr: Any = None
    indptr: Any = None
    last_page_len: Any = None
    block_tables: Any = None
    # The kernel and the schedule
    choice: Any = None
    scheduled: Any = None
    scale: float = 1.0  # sm_scale or its default

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.sm_scale is None else self.sm_scale


class DecodePlan(BatchPlan):
    """The plan of batch decode, in which qo_indptr is None: each request has q_len rows."""

    num_ctas: int = 0
    num_ranges: int = 0
    split_kv: int = 0
    q_len: int = 1
    heads_per_tile: int = 1
    rows: int = 0  # of q
    window_right: int = 0
    head_dim: int = 0  # of q and k; head_dim_vo of the partials is the same until values of another one come
    lengths: tuple[Any, Any, Any] = (None, None, None)  # indptr, last_page_len, kv_len that the schedule is made from
    exact: Any = None  # the choice with the mask and the tiles of the plan, which its runs ask for
    q_tiles: int = 0  # of a request
    most_ctas: int = ops.MAX_RANGES  # fewer than fit, where another kernel runs beside this one
    scheduled: tuple[int, int] | None = None  # (window_left, num_ctas) of the schedule on the device

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return self.rows, self.num_qo_heads, self.head_dim


class DecodeWorkspaces:
    """The two workspaces of a wrapper, in which the schedules of its plans lie, one after another.

    Args:
        int_workspace: private to the owner; holds the schedule and, if they fit, the partials.
        float_workspace: may be shared with other owners; holds the partials that do not fit.
        capacity: the number of page indices that chunks are sized for, where it must not depend on the batch (CUDA
            graphs); None: that of the batch.
    """

    def __init__(self, int_workspace: torch.Tensor, float_workspace: torch.Tensor, capacity: int | None) -> None:
        self.int_workspace, self.float_workspace, self.capacity = int_workspace, float_workspace, capacity

    def sizes(self, plan: DecodePlan, indices: int, choice: Choice | None) -> ops.Sizes:
        """Sizes of the buffers for a table of this many page indices. choice: None for the fallback."""
        tokens, heads = (self.capacity or indices) * plan.page_size, plan.heads_per_tile if choice else 1
        q_tiles = ops.num_q_tiles(plan.num_qo_heads, plan.num_kv_heads, plan.q_len, heads)
        device = self.int_workspace.device
        sizes = ops.buffer_sizes(device, plan.batch_size, q_tiles, plan.split_kv, tokens, choice)
        return sizes._replace(num_ctas=min(sizes.num_ctas, plan.most_ctas))

    def bytes_for(self, plan: DecodePlan) -> tuple[int, int]:
        """(bytes of the float workspace, bytes of the int workspace) that a plan needs."""
        schedule, partials = _bytes(self.sizes(plan, plan.page_indices.numel(), None), plan.head_dim)
        return (0, schedule + partials) if schedule + partials <= self.int_workspace.nbytes else (partials, schedule)

    def work(self, plan: DecodePlan, indices: int) -> int:
        """What the sizes of buffers depend on: the page indices of chunks; else 1 where there is little work, or 0."""
        if plan.split_kv > 0:
            return indices
        return int(indices * plan.page_size // ops.KV_TILE * plan.q_tiles <= ops.MOST_TILES_OF_TWO_CTAS)

    def buffers(self, plan: DecodePlan, work: int) -> ops.Buffers:
        """The buffers of a plan, at the same addresses for plans of the same shape."""
        if plan.head_dim_vo == plan.head_dim:
            sizes, fallback = (self.sizes(plan, work, choice) for choice in (plan.choice, None))
        else:  # the planned schedule has the sizes for which its own head dim left room
            schedule, partials, *numbers = self.buffers(plan.replace(head_dim_vo=plan.head_dim), work)
            sizes = fallback = ops.Sizes(schedule.numel(), partials.shape[0], *numbers)
        return carve(self.int_workspace, self.float_workspace, plan.head_dim_vo, sizes, fallback)

    def sized(self, plan: DecodePlan, work: int) -> DecodePlan:
        """The plan with its buffers, and the scale of its scores."""
        buffers = self.buffers(plan, work)
        scheduled, scale = (plan.window_left, buffers.num_ctas), plan.scale_of(plan.head_dim)
        return plan.replace(**buffers._asdict(), scheduled=scheduled, scale=scale)


class PrefillPlan(BatchPlan):
    """The plan of batch prefill; the first fields are arguments of `batch_prefill`."""

    tile_tokens: int = 1
    causal: bool = False
    mask_indptr: Any = None
    prefix_len: Any = None
    items: Any = None
    kv_tokens: int = 0
    num_ctas: int = 0  # where another kernel runs beside this one; 0: as many as fit
    head_dim_qk: int = 0
    rows: int | None = None  # of q; None: only the device knows
    kv_last: int | None = None  # pages, or ragged keys, likewise
    item_positions: Any = None
    items_len: int = 0
    longest_item: Any = None
    out_dtype: Any = None  # of results that run allocates
    splits_kv: bool = True  # whether keys may be split
    max_partials: int = 0
    short_tile_tokens: int = 0

    @property
    def kept(self) -> str:
        """The mask that the kernel applies."""
        return "items" if self.items is not None else "plain" if self.mask is None else "custom"


class MlaPlan(Plan):
    """The plan of batch MLA. The first fields are arguments of `batch_mla`."""

    workspace: Any = None
    schedule: Any = None
    page_indices: Any = None
    batch_size: int = 0
    max_ranges: int = 0
    narrow_ranges: int = 0
    wide_ranges: int = 0
    cluster: int = 1
    sm_scale: float = 1.0
    causal: bool = False
    num_heads: int = 0
    page_size: int = 1
    fixed_splits: bool = False
    fine_splits: bool = False
    enable_pdl: bool | None = None
    backend: str = "auto"
    # Of the batch
    q_dtype: Any = None
    kv_dtype: Any = None
    head_dim_kpe: int = 0
    fp8: bool = False
    split_kv: bool = True
    sinks: bool = False  # whether a run without sinks is refused
    # Tables of the wrapper
    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_len: Any = None
