"""Cascade attention: one prefill per level of shared keys, merged by their lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import score_options
from fi_core.attention.merge import merge_state_in_place
from fi_core.attention.wrappers import trace
from fi_core.attention.wrappers.joined_levels import joined
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

_MOST_LEVELS = 64
_BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")


@fi_api
class MultiLevelCascadeAttentionWrapper:
    """Attention of requests that share prefixes: the keys of a shared level are read once for all rows that share them.

    Level 0 is the prefix that most rows share; the last level holds the keys that belong to one request. Each level has
    its own page table over one cache and its own grouping of the rows of q (arXiv:2402.05099).

    Args:
        num_levels: number of levels, 1 to 64.
        float_workspace_buffer, kv_layout: as in BatchPrefillWithPagedKVCacheWrapper.
        use_cuda_graph: fixes the batch of each level.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: one buffer
            per level with use_cuda_graph, with the meaning and sizes of BatchPrefillWithPagedKVCacheWrapper.

    Raises:
        ValueError: num_levels or the number of buffers; all other errors are those of
            BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if not isinstance(num_levels, int) or not 1 <= num_levels <= _MOST_LEVELS:
            raise ValueError(f"num_levels: 1 to {_MOST_LEVELS} is required; got {num_levels}")
        given = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        buffers: list[dict[str, Any]] = [{} for _ in range(num_levels)]
        for name, arrays in zip(_BUFFERS, given):
            if not use_cuda_graph:
                continue
            if arrays is None or len(arrays) != num_levels:
                got = None if arrays is None else len(arrays)
                raise ValueError(f"{name}_arr: {num_levels} buffers are required with use_cuda_graph; got {got}")
            for level, buffer in zip(buffers, arrays):
                level[name] = buffer
        self._joined = False  # whether the last wrapper has the pages of all levels
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **level)
            for level in buffers
        ]

    @property
    def _planned_levels(self) -> list[BatchPrefillWithPagedKVCacheWrapper]:
        """The wrappers that run."""
        return self._batch_prefill_wrappers[-1:] if self._joined else self._batch_prefill_wrappers

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._batch_prefill_wrappers[0].is_cuda_graph_enabled

    @fi_api
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replaces the float workspace and the int workspace of each level. Call `plan` before the next run."""
        self._check_levels(int_workspace_buffers=int_workspace_buffers)
        for wrapper, buffer in zip(self._batch_prefill_wrappers, int_workspace_buffers):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    @fi_api
    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        """Plans the next `run` calls, one prefill per level. It does not synchronise.

        With a window or a position encoding, where the position of a key in its request matters, the levels are joined
        to one page table: each request then reads all its keys itself, and plan reads the tables, which synchronises.
        Arguments that are not listed are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            qo_indptr_arr: qo_indptr of each level; the last element of each is the number of rows of q.
            paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: the page table of each level.
            num_qo_heads, num_kv_heads, head_dim, page_size: common to all levels.
            causal: applies to the last level. All rows of a group attend to all keys of the other levels.
            pos_encoding_mode, window_left: by positions in a request, whose keys are those of all levels in order.

        Raises:
            ValueError: number of levels; with a window or a position encoding, shared levels that do not end with a
                full page. All other errors are those of BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        for wrapper in self._batch_prefill_wrappers:
            wrapper._forget_plan()
        self._check_levels(
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        last = self._batch_prefill_wrappers[-1]
        tables = qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
        self._joined = bool(pos_encoding_mode != "NONE" or window_left >= 0)
        planned = [joined(*tables, page_size)] if self._joined else list(zip(*tables))
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options = score_options(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        options |= {"window_left": window_left, "q_data_type": q_data_type, "kv_data_type": kv_data_type}
        for wrapper, level in zip(self._planned_levels, planned):
            wrapper.plan(*level, *shape, causal=causal and wrapper is last, **options)

    begin_forward = plan

    @fi_api(trace=trace.cascade, planned=trace.PLANNED_CASCADE)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor:
        """Attention of the planned batch over the keys of all levels.

        The errors are those of `BatchPrefillWithPagedKVCacheWrapper.run`.

        Args:
            q: `[rows, num_qo_heads, head_dim]`.
            paged_kv_cache: the cache of all levels, as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            k_scale, v_scale, kv_cache_sf: likewise (not arguments of FlashInfer's method).

        Returns:
            `[rows, num_qo_heads, head_dim]` in q's dtype.
        """
        *shared, last = self._planned_levels
        options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_sf": kv_cache_sf}
        if not shared:
            return last.run(q, paged_kv_cache, **options)  # type: ignore[no-any-return]
        out, lse = last.run(q, paged_kv_cache, return_lse=True, **options)
        for wrapper in shared:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True, **options))
        return out  # type: ignore[no-any-return]

    forward = run

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """As in BatchPrefillWithPagedKVCacheWrapper."""
        for wrapper in self._planned_levels:
            wrapper.prewarm_paged_kv_stride_variant(variant)

    def _check_levels(self, **tables: Sequence[torch.Tensor]) -> None:
        levels = len(self._batch_prefill_wrappers)
        for name, given in tables.items():
            if len(given) != levels:
                raise ValueError(f"{name}: one for each of the {levels} levels is required; got {len(given)}")
