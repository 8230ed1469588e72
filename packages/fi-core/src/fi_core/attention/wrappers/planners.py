"""Planners that serving engines call behind the wrappers: `_cached_module`, `fast_decode_plan` and related
functions.
"""

from __future__ import annotations

import weakref
from typing import Any

from fi_core.observe.log import fi_api
from fi_core.runtime.errors import PlanError
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch

# By the address of their int workspace, by which a planner finds the wrapper to plan for.
_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def add(wrapper: Any) -> None:
    """Makes a wrapper known to the planners."""
    _wrappers[wrapper._int_workspace_buffer.data_ptr()] = wrapper


def owner(int_workspace_buffer: torch.Tensor) -> Any:
    """The wrapper that owns the workspace. Raises ValueError if none does."""
    wrapper = _wrappers.get(int_workspace_buffer.data_ptr())
    if wrapper is None:
        raise ValueError("int_workspace_buffer: the one of a wrapper is required (wrapper._int_workspace_buffer)")
    return wrapper


class _Runner:
    def run(self, wrapper: Any, *args: Any, **options: Any) -> Any:
        return wrapper.run(*args, **options)

    paged_run = ragged_run = run


class Planner(_Runner):
    """`_cached_module` of a prefill wrapper, and of a decode wrapper with use_tensor_cores."""

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        is_cuda_graph_enabled: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int = -1,
        disable_split_kv: bool = False,
        num_colocated_ctas: int = 0,
        uniform_q_len: int = 0,
        *unused: Any,
    ) -> list[int]:
        """Plans for the wrapper that owns the int workspace; its page table must be in place.

        Arguments that are not listed are ignored. Options of the wrapper's plan that are not arguments here are kept.

        Args:
            int_workspace_buffer: identifies the wrapper.
            qo_indptr: int32 `[batch_size + 1]`, offsets of query tokens, on the host or on the device. Decode uses
                total_num_rows instead: all its requests have the same number of rows.
            kv_indptr: int32 `[batch_size + 1]`, offsets of pages, or of ragged keys, likewise.
            kv_len_arr: int32 `[batch_size]`, tokens of each request, likewise.
            total_num_rows, batch_size: rows of q and requests.
            num_qo_heads, num_kv_heads, page_size, head_dim_qk, head_dim_vo, causal, window_left, fixed_split_size,
                disable_split_kv: as in the wrapper's plan.

        Returns:
            The plan info.
        """
        wrapper = owner(int_workspace_buffer)
        fields = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "page_size": page_size}
        fields |= {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}
        wrapper._begin_plan(**fields)
        fields |= {"causal": causal, "window_left": window_left}
        tables, split = (qo_indptr, kv_indptr, kv_len_arr), (fixed_split_size, disable_split_kv)
        return wrapper._plan_lengths(fields, tables, total_num_rows, split)  # type: ignore[no-any-return]


class DecodePlanner(_Runner):
    """`_cached_module` of a decode wrapper without use_tensor_cores; lengths are those of its last_page_len."""

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        indptr: torch.Tensor,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        is_cuda_graph_enabled: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim_qk: int,
        head_dim_vo: int,
        empty_q_data: torch.Tensor | None = None,
        empty_kv_data: torch.Tensor | None = None,
    ) -> list[int]:
        """As `Planner.plan`, with offsets of pages in indptr, and with logits_soft_cap."""
        wrapper = owner(int_workspace_buffer)
        wrapper._begin_plan(num_qo_heads, num_kv_heads, page_size, head_dim=head_dim_qk)
        dims = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo, "page_size": page_size}
        scores: dict[str, Any] = {"causal": False, "window_left": window_left, "soft_cap": logits_soft_cap or 0.0}
        fields = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, **dims, **scores}
        tables, rows = (None, indptr, None), indptr.numel() - 1
        return wrapper._plan_lengths(fields, tables, rows, (None, False))  # type: ignore[no-any-return]


PLANNER, DECODE_PLANNER = Planner(), DecodePlanner()


def get_batch_decode_module(*_: Any) -> DecodePlanner:
    """The planner of wrappers without use_tensor_cores, for engines that plan by themselves. Arguments are ignored."""
    return DECODE_PLANNER


def _grouped_size_compiled_for_decode_kernels(num_qo_heads: int, num_kv_heads: int) -> bool:
    """Whether decode without tensor cores supports this ratio of heads: any integer."""
    return num_qo_heads % num_kv_heads == 0


@fi_api
def fast_decode_plan(
    self: Any,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
    data_type: torch.dtype | str | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`plan` of a decode wrapper for an engine that keeps the page table on the device; copies nothing.

    With use_cuda_graph the caller has already written the table into the wrapper's buffers. Without it the given
    tensors, on the device, become the table. Arguments that are not listed are those of
    `BatchDecodeWithPagedKVCacheWrapper.plan`.

    Args:
        self: the wrapper, planned once before.
        indptr, indices, last_page_len: the page table, on the device.
        global_override_indptr_cpu: the values of indptr on the host; not needed, because nothing is read there.

    Raises:
        ValueError: with use_cuda_graph, the batch size, q_len_per_req or the number of indices does not fit.
        RuntimeError: no plan before.
        PlanError: the planner refuses the batch; it is a RuntimeError.
    """
    if self._plan_info is None:
        raise RuntimeError("fast_decode_plan: call plan once before")
    self._forget_plan()
    batch_size, plan = self._check_table(indptr, indices, last_page_len, None), self._plan
    tables = {"indptr": indptr, "page_indices": indices, "last_page_len": last_page_len}
    if self._use_cuda_graph:
        tables = {name: getattr(plan, name) for name in tables}
    self._check_q_len(q_len_per_req)
    if q_len_per_req != 1:
        self._check_lengths(indptr, last_page_len, None, page_size, q_len_per_req)
    options = (
        batch_size, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, 0, logits_soft_cap,
        q_data_type, kv_data_type, None, data_type, sm_scale, rope_scale, rope_theta, fixed_split_size,
        disable_split_kv, q_len_per_req, None, plan.most_ctas, is_on(),
    )  # fmt: skip
    try:
        shape = self._shapes.find(options) or self._new_shape(options)
        lengths = tables["indptr"], tables["last_page_len"], None
        self._end(shape, lengths, {"block_tables": plan.block_tables, **tables}, non_blocking)
    except ValueError as error:
        raise PlanError(f"Error in standard plan: {error}") from error


def get_batch_prefill_module(backend: str, *_: Any) -> Planner:
    """The planner of the batch prefill wrappers, for engines that plan by themselves. Arguments are ignored."""
    return PLANNER


class MlaPlanner:
    """`_cached_module` of an MLA wrapper: engines call its `plan`, or `plan.default`, in the replay of a CUDA graph."""

    @staticmethod
    def plan(
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> list[int]:
        """As `Planner.plan`, with qo_indptr, kv_indptr, kv_len_arr, num_heads and causal of
        `BatchMLAPagedAttentionWrapper.plan`, on the host or on the device.
        """
        wrapper = owner(int_workspace_buffer)
        if not wrapper._was_planned:
            raise RuntimeError("plan: call plan of the wrapper once before")
        wrapper._forget_plan()
        plan = wrapper._plan.replace(causal=bool(causal))
        tables = wrapper._tables.place(qo_indptr, kv_indptr, plan.page_indices, kv_len_arr)
        batch_size = tables[3].numel()
        if (num_heads, batch_size) != (plan.num_heads, plan.batch_size):
            plan = wrapper._sized(plan.replace(num_heads=num_heads), batch_size)
        info: list[int] = wrapper._end(plan, tables)
        return info


MLA_PLANNER = MlaPlanner()
MlaPlanner.plan.default = MlaPlanner.plan  # type: ignore[attr-defined]


def get_batch_mla_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> MlaPlanner:
    """The planner of MLA wrappers, for engines that plan by themselves. Arguments are ignored."""
    return MLA_PLANNER
