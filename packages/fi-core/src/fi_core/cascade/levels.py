"""Cascade attention: a prefill over each level of shared keys, merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import unsupported
from fi_core.cascade.merge import merge_state_in_place
from fi_core.observe.log import fi_api
from fi_core.prefill.paged import BatchPrefillWithPagedKVCacheWrapper

if TYPE_CHECKING:
    import torch

    Tables = Sequence[torch.Tensor]

_BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")


class MultiLevelCascadeAttentionWrapper:
    """Attention of requests that share prefixes: keys of a shared level are read once for all rows that share them.

    Level 0 is what most rows share, the last level what each request has for itself; each has a page table of its
    own over one cache, and groups the same rows of q in its own way (arXiv:2402.05099). float_workspace_buffer and
    kv_layout are those of BatchPrefillWithPagedKVCacheWrapper. use_cuda_graph: the batch of each level is fixed, and
    the four lists hold a buffer for each level, with the meaning and sizes of that wrapper's.

    Raises ValueError (num_levels, number of buffers) and what BatchPrefillWithPagedKVCacheWrapper raises.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Tables | None = None,
        paged_kv_indptr_buf_arr: Tables | None = None,
        paged_kv_indices_buf_arr: Tables | None = None,
        paged_kv_last_page_len_buf_arr: Tables | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels: at least 1 is required; got {num_levels}")
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
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **level)
            for level in buffers
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._batch_prefill_wrappers[0].is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replaces the workspaces, the second of each level; plan must be called before the next run."""
        self._check_levels(int_workspace_buffers=int_workspace_buffers)
        for wrapper, buffer in zip(self._batch_prefill_wrappers, int_workspace_buffers):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    @fi_api
    def plan(
        self,
        qo_indptr_arr: Tables,
        paged_kv_indptr_arr: Tables,
        paged_kv_indices_arr: Tables,
        paged_kv_last_page_len: Tables,
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
        """Says what the next runs are about. Nothing waits for the device.

        Of each level qo_indptr, paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len, as in
        `BatchPrefillWithPagedKVCacheWrapper.plan`; the last element of each qo_indptr is the number of rows of q.
        causal: within the last level; keys of the others are seen by all rows that share them.

        Raises ValueError (number of levels), NotImplementedError (position encodings and window_left with several
        levels, which do not know where in a request their keys stand) and what that function raises.
        """
        self._check_levels(
            qo_indptr_arr=qo_indptr_arr, paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr, paged_kv_last_page_len=paged_kv_last_page_len,
        )  # fmt: skip
        last = self._batch_prefill_wrappers[-1]
        if len(self._batch_prefill_wrappers) > 1:
            for name, value, plain in (
                ("pos_encoding_mode", pos_encoding_mode, "NONE"),
                ("window_left", window_left, -1),
            ):
                if value != plain:
                    raise unsupported(
                        name, value, f"a level does not know the positions of its keys in a request: pass {plain!r}"
                    )
        for wrapper, qo_indptr, indptr, indices, last_page_len in zip(
            self._batch_prefill_wrappers, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr,
            paged_kv_last_page_len,
        ):  # fmt: skip
            wrapper.plan(
                qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal and wrapper is last,
                pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale,
                window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
                q_data_type=q_data_type, kv_data_type=kv_data_type,
            )  # fmt: skip

    begin_forward = plan

    @fi_api
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of the planned batch, `[rows, num_qo_heads, head_dim]` in q's dtype, over the keys of all levels.

        q and paged_kv_cache, which all levels share, and the errors are those of
        `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        *shared, last = self._batch_prefill_wrappers
        if not shared:
            return last.run(q, paged_kv_cache)  # type: ignore[no-any-return]
        out, lse = last.run(q, paged_kv_cache, return_lse=True)
        for wrapper in shared:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out  # type: ignore[no-any-return]

    forward = run

    def _check_levels(self, **tables: Sequence[torch.Tensor]) -> None:
        levels = len(self._batch_prefill_wrappers)
        for name, given in tables.items():
            if len(given) != levels:
                raise ValueError(f"{name}: one for each of the {levels} levels is required; got {len(given)}")
