"""Schedules of decode over block tables: planned in a call, or once for all layers of a step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from fi_core.attention.contract import check_workspace, kv_type, page_tables
from fi_core.attention.ops import decode as ops
from fi_core.attention.ops.request import Facts
from fi_core.attention.schedule import carve
from fi_core.observe.log import fi_api
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.tensors import viewed

_MAX_CARVED = 64  # buffers that are kept per workspace; an engine may call with many batch sizes
# Steps that a plan keeps, one for each number of requests. Host time of one that comes again 3.7 us, made anew 11.8.
_MAX_STEPS = 256


class Step(NamedTuple):
    """What a schedule is made for; two calls of one step share a schedule if all of it is the same."""

    choice: Choice
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_vo: int
    page_size: int
    pages_per_request: int
    q_len: int
    window_left: int
    split_kv: int
    heads_per_tile: int
    block_tables: int  # address
    seq_lens: int  # address

    @property
    def q_tiles(self) -> int:
        return ops.num_q_tiles(self.num_qo_heads, self.num_kv_heads, self.q_len, self.heads_per_tile)

    def write(self, buffers: ops.Buffers, seq_lens: torch.Tensor) -> Callable[[], Any]:
        """The launch of the kernel that writes the schedule."""
        numbers = {"num_ctas": buffers.num_ctas, "num_ranges": buffers.num_ranges, "split_kv": buffers.split_kv}
        numbers |= {"page_size": self.page_size, "q_tiles": self.q_tiles, "pages_per_request": self.pages_per_request}
        numbers |= {"q_len": self.q_len, "window_left": self.window_left}
        return functools.partial(ops.decode_plan, buffers.schedule, None, None, seq_lens, **numbers)


def step_of(
    facts: Facts,
    pages: torch.Tensor,
    pitch: int,
    seq_lens: torch.Tensor,
    heads: tuple[int, int],
    q_len: int,
    window_left: int,
    disable_split_kv: bool,
    is_ragged: bool = False,
) -> Step:
    """The step of a call. heads: of queries and of keys. is_ragged: whether requests differ in query tokens."""
    choice = planned(ops.BATCH_DECODE, pages.device, "auto", *facts, 1, ahead=False)
    batch_size, split_kv = len(seq_lens), ops.NO_SPLIT if disable_split_kv or is_on() else ops.BALANCED
    of_tile = 1 if is_ragged else ops.heads_per_tile(choice, batch_size, *heads, q_len, split_kv)
    traced = torch.compiler.is_compiling()  # which knows no addresses
    places = (0, 0) if traced else (pages.data_ptr(), seq_lens.data_ptr())
    shape = (batch_size, *heads, facts.head_dim_vo, facts.page_size, pitch, q_len)
    return Step(choice, *shape, window_left, split_kv, of_tile, *places)


# Views of each live workspace, by its id. They are kept because making them takes as long as a launch.
_carved: dict[int, tuple[weakref.ref[torch.Tensor], dict[Any, ops.Buffers]]] = {}


def buffers_in(workspace: torch.Tensor, step: Step) -> ops.Buffers:
    """The buffers of a step in a workspace. Raises ValueError."""
    batch_size, q_tiles, head_dim, split_kv = step.batch_size, step.q_tiles, step.head_dim_vo, step.split_kv
    if torch.compiler.is_compiling():  # which knows no addresses
        fallback = ops.buffer_sizes(workspace.device, batch_size, q_tiles, split_kv)
        return carve(workspace, workspace[:0], head_dim, fallback, fallback)
    key, shape = id(workspace), (batch_size, q_tiles, head_dim, split_kv, step.choice.spec)
    entry = _carved.get(key)
    if entry is None or entry[0]() is not workspace:
        check_workspace(workspace, "workspace_buffer")
        entry = _carved[key] = weakref.ref(workspace, lambda _: _carved.pop(key, None)), {}
    buffers = entry[1].get(shape)
    if buffers is None:
        if len(entry[1]) == _MAX_CARVED:
            entry[1].clear()
        sizes = ops.buffer_sizes(workspace.device, batch_size, q_tiles, split_kv, choice=step.choice)
        fallback = ops.buffer_sizes(workspace.device, batch_size, q_tiles, split_kv)
        try:
            buffers = entry[1][shape] = carve(workspace, workspace[:0], head_dim, sizes, fallback)
        except ValueError as error:
            raise ValueError(f"workspace_buffer: too small for {batch_size} requests ({error})") from None
    return buffers


@fi_api
class ContextTablesPlan:
    """The schedules of `trtllm_batch_context_with_kv_cache` for all layers of a step (not in FlashInfer).

        step = ContextTablesPlan()   # in each step
        for layer in layers:
            trtllm_batch_context_with_kv_cache(..., block_tables, seq_lens, ..., cum_seq_lens_q, ..., plan=step)

    The first layer plans, by a launch of its own before that of its attention; others that are given the same tables
    and have the same window, heads and dtypes launch their attention alone. Another layer plans for itself and those
    like it. A plan holds what seq_lens and cum_seq_lens_q had on the device when its first layer ran: make another one
    where they have changed. Nothing is read on the host.
    """

    def __init__(self) -> None:
        self._schedules: dict[Any, tuple[torch.Tensor, Any]] = {}

    def find(self, key: Any) -> torch.Tensor | None:
        """The schedule that was made for a call like this one."""
        found = self._schedules.get(key)
        return found and found[0]

    def keep(self, key: Any, schedule: torch.Tensor, *tables: torch.Tensor | None) -> None:
        """Keeps a schedule that its call has just planned, and the tables whose addresses the key has."""
        self._schedules[key] = schedule, tables


class _Planned(NamedTuple):
    step: Step
    buffers: ops.Buffers
    write: Callable[[], Any]  # launches the kernel that writes the schedule


@fi_api
class BlockTablesPlan:
    """The schedule of `trtllm_batch_decode_with_kv_cache` for all layers of a step (not in FlashInfer).

        step = BlockTablesPlan(workspace_buffer)
        step.plan(block_tables, seq_lens, 32, 8, 128, 16, torch.bfloat16)   # one launch, in each step
        for layer in layers:
            trtllm_batch_decode_with_kv_cache(..., block_tables, seq_lens, ..., plan=step)   # one launch each

    The schedule is made from the lengths that seq_lens has when `plan` runs on the device. `plan` has to run again in
    each step, also where tables or lengths change in place; a call with others than those of the plan is refused.
    Nothing is read on the host, so that both can be captured in a CUDA graph, together or apart: a captured call finds
    the schedule where the plan before the replay has written it. A step whose arguments come again, in the same memory,
    costs little more than its launch; for that the plan holds seq_lens of up to 256 steps.

    Args:
        workspace_buffer: as of the function. Several plans may share it, if their calls do not overlap.
    """

    def __init__(self, workspace_buffer: torch.Tensor) -> None:
        check_workspace(workspace_buffer, "workspace_buffer")
        self._workspace, self._buffers = workspace_buffer, dict[Any, ops.Buffers]()
        self._steps: dict[Any, _Planned] = {}  # by the arguments of plan, since most steps repeat those of another
        self._now: _Planned | None = None
        self._began = False  # whether plan was called, which may have failed

    @fi_api
    def plan(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        q_len_per_req: int = 1,
        window_left: int = -1,
        disable_split_kv: bool = False,
    ) -> None:
        """Writes the schedule of a step on the device, by one launch. It does not synchronise.

        Args:
            block_tables, seq_lens: as of the function; calls must be given the same memory.
            num_qo_heads, num_kv_heads, head_dim, page_size: of the layers.
            q_data_type, kv_data_type, o_data_type: of queries, cache (None: of queries) and output (None: of queries).
            q_len_per_req, window_left, disable_split_kv: as of the function.

        Raises:
            ValueError: a shape, or a workspace that is too small.
            UnsupportedError: no kernel supports the layers.
        """
        self._now, self._began = None, True
        types = (q_data_type, kv_data_type, o_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        layers = (*shape, *types, q_len_per_req, window_left, disable_split_kv)
        lengths = seq_lens.data_ptr(), seq_lens.shape, seq_lens.stride(), seq_lens.dtype
        key = block_tables.data_ptr(), block_tables.shape, block_tables.stride(), lengths, layers, is_on()
        made = self._steps.get(key)
        if made is None:
            if len(self._steps) == _MAX_STEPS:
                self._steps.clear()
            made = self._steps[key] = self._made(block_tables, seq_lens, layers)
        made.write()
        self._now = made

    def _made(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, layers: tuple[Any, ...]) -> _Planned:
        """A step of these arguments of `plan`. Its launch holds seq_lens, whose address no other tensor then has."""
        num_qo_heads, num_kv_heads, head_dim, page_size, q_dtype, kv_dtype, o_dtype, *rest = layers
        pages, pitch, _ = page_tables(block_tables, True)
        lengths = viewed("seq_lens", seq_lens, -1)
        if len(lengths) != block_tables.shape[0]:
            raise ValueError(
                f"seq_lens: a length for each of the {block_tables.shape[0]} rows of block_tables is required; got "
                f"{len(lengths)}"
            )
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise ValueError(f"num_qo_heads: a multiple of {num_kv_heads} kv heads is required; got {num_qo_heads}")
        types = q_dtype, kv_type(kv_dtype or q_dtype), o_dtype or q_dtype
        facts = Facts(*types, head_dim, head_dim, num_qo_heads // num_kv_heads, page_size)
        step = step_of(facts, pages, pitch, lengths, (num_qo_heads, num_kv_heads), *rest)
        shape = step._replace(block_tables=0, seq_lens=0, pages_per_request=0)
        if shape not in self._buffers:  # the schedule of a shape keeps its address, for graphs
            shared = buffers_in(self._workspace, step)
            self._buffers[shape] = shared._replace(schedule=shared.schedule.new_empty(shared.schedule.shape))
        buffers = self._buffers[shape]
        return _Planned(step, buffers, step.write(buffers, lengths))

    def buffers(self, step: Step) -> ops.Buffers:
        """The buffers with the schedule of a step. Raises RuntimeError without a plan, ValueError with another one."""
        now = self._now
        if now is None:
            raise RuntimeError(
                "plan: " + ("the last plan failed: call plan again" if self._began else "call plan of it first")
            )
        if step != now.step:
            made, got = ({**x.choice.request.facts(), **x._asdict(), "choice": None} for x in (now.step, step))
            wrong = [f"{name}: {made[name]} was planned, got {got[name]}" for name in made if made[name] != got[name]]
            raise ValueError(f"plan: what it was made for is required; {'; '.join(wrong)}")
        return now.buffers
