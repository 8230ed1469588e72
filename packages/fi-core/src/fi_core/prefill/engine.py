"""What serving engines reach for behind the batch prefill wrappers: the planner that they call by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.planners import Owners

if TYPE_CHECKING:
    import torch

    from fi_core.jit.attention import CustomAttention
    from fi_core.prefill.plan import BatchPrefillPlan

owners: Owners[BatchPrefillPlan] = Owners()


class PrefillPlanner:
    """`_cached_module` of the batch prefill wrappers."""

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
        *unused: Any,
    ) -> list[int]:
        """Lists the tiles of the wrapper whose int workspace is given; its page table must be in place.

        qo_indptr `[batch_size + 1]` (tokens), kv_indptr `[batch_size + 1]` (pages, or tokens of ragged keys),
        kv_len_arr `[batch_size]` (tokens), int32, on the host or the device. Returns the plan info. Keys are not
        split with disable_split_kv or a fixed_split_size. Options of plan that are no parameters here stay.
        """
        wrapper = owners.of(int_workspace_buffer)
        wrapper._check_batch(qo_indptr, kv_indptr)
        return wrapper._replan(
            qo_indptr, kv_indptr, None, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
            causal, window_left, whole=disable_split_kv or fixed_split_size > 0,
        )  # fmt: skip

    def run(self, wrapper: Any, *args: Any, **options: Any) -> Any:
        return wrapper.run(*args, **options)

    paged_run = ragged_run = run


PLANNER = PrefillPlanner()


def get_batch_prefill_module(*_: Any) -> PrefillPlanner:
    """The planner of the batch prefill wrappers, for engines that plan by themselves; any arguments."""
    return PLANNER


def get_customize_batch_prefill_module(backend: str, *args: Any, **options: Any) -> CustomAttention:
    """`gen_customize_batch_prefill_module` with these arguments, built and loaded."""
    from fi_core.jit.attention import gen_customize_batch_prefill_module

    made: CustomAttention = gen_customize_batch_prefill_module(backend, *args, **options).build_and_load()
    return made
