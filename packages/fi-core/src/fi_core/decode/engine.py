"""What serving engines reach for behind the batch decode wrapper: planners that they call by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import data_types
from fi_core.attention.planners import Owners

if TYPE_CHECKING:
    import torch

    from fi_core.decode.plan import BatchDecodePlan
    from fi_core.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper

owners: Owners[BatchDecodePlan] = Owners()


class PrefillPlanner:
    """`_cached_module` of a wrapper with use_tensor_cores: lengths come with the call."""

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
    ) -> list[int]:
        """Divides the work of the wrapper whose int workspace is given; its page table must be in place.

        kv_indptr `[batch_size + 1]` (pages), kv_len_arr `[batch_size]` (tokens), int32, on the host or the device.
        Rows of the requests are equally many. Returns the plan info. Options of plan that are no parameters here stay.
        """
        return owners.of(int_workspace_buffer)._replan(
            kv_indptr, None, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, page_size, window_left,
            total_num_rows // batch_size if batch_size else 1, fixed_split_size, disable_split_kv,
        )  # fmt: skip

    def run(self, wrapper: BatchDecodeWithPagedKVCacheWrapper, *args: Any, **options: Any) -> Any:
        return wrapper.run(*args, **options)

    paged_run = run


class DecodePlanner:
    """`_cached_module` of a wrapper without use_tensor_cores: lengths are those of its last_page_len."""

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
        """Divides the work of the wrapper whose int workspace is given; its page table must be in place.

        indptr `[batch_size + 1]` (pages), int32, on the host or the device. Returns the plan info.
        """
        wrapper = owners.of(int_workspace_buffer)
        wrapper._logits_soft_cap = logits_soft_cap
        return wrapper._replan(
            indptr, wrapper._paged_kv_last_page_len_buf, None, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
            window_left, 1, None, False,
        )  # fmt: skip

    def run(self, wrapper: BatchDecodeWithPagedKVCacheWrapper, *args: Any, **options: Any) -> Any:
        return wrapper.run(*args, **options)


PREFILL_PLANNER, DECODE_PLANNER = PrefillPlanner(), DecodePlanner()


def get_batch_decode_module(*_: Any) -> DecodePlanner:
    """The planner of wrappers without use_tensor_cores, for engines that plan by themselves; any arguments."""
    return DECODE_PLANNER


def _grouped_size_compiled_for_decode_kernels(num_qo_heads: int, num_kv_heads: int) -> bool:
    """Whether decode without tensor cores takes this ratio of heads: any whole one."""
    return num_qo_heads % num_kv_heads == 0


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
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
    """`plan` for an engine that keeps the page table on the device: nothing is copied there.

    With use_cuda_graph the caller has already written the table into the wrapper's buffers; else the given tensors, on
    the device, become the table as they are. Arguments are those of plan; global_override_indptr_cpu, the values of
    indptr on the host, is not needed, since nothing is read there.

    Raises ValueError (with use_cuda_graph: batch size, q_len_per_req or number of indices do not fit), RuntimeError
    (no plan before, or what the planner refuses).
    """
    if self._plan_info is None:
        raise RuntimeError("fast_decode_plan: call plan once before")
    self._check_table(indptr, indices, last_page_len, None, page_size, q_len_per_req)
    if not self._use_cuda_graph:
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf = last_page_len
    self._set_options(
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        data_types(q_data_type, kv_data_type, None, data_type),
    )  # fmt: skip
    try:
        self._replan(
            self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, None, num_qo_heads, num_kv_heads, head_dim,
            page_size, window_left, q_len_per_req, fixed_split_size, disable_split_kv, non_blocking,
        )  # fmt: skip
    except ValueError as error:
        raise RuntimeError(f"Error in standard plan: {error}") from error
