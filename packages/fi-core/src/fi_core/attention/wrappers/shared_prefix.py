"""Attention of requests that share a prefix of dense K and V, and have own keys in pages: two parts that are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import unpack
from fi_core.attention.forms.single_prefill import single_prefill_with_kv_cache_return_lse
from fi_core.attention.merge import merge_state_in_place
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.base import AroundWrapper
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _SharedPrefix(AroundWrapper):
    """The common half: attention over the shared keys, merged into that over the unique ones."""

    def __init__(self, unique: Any) -> None:
        self._inner, self._kv_layout = unique, unique._kv_layout

    def _forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, cache: Cache, **scores: Any
    ) -> Any:
        if self._inner._plan_info is None:
            raise self._inner._no_plan("forward")
        pair = unpack(cache, self._kv_layout, "unique_kv_cache")
        out, lse = self._inner.run(q, pair, return_lse=True)
        shared = single_prefill_with_kv_cache_return_lse(q, k_shared, v_shared, kv_layout=self._kv_layout, **scores)
        merge_state_in_place(out, lse, *shared)
        return out

    def _describe(self, indptr: Any, indices: Any, last_page_len: Any, head_dim: int, **more: Any) -> None:
        """Keeps the tables of a plan for a trace."""
        self._described = {
            "kv_indptr": indptr,
            "kv_indices": indices,
            "kv_last_page_len": last_page_len,
            "sm_scale": head_dim**-0.5,
            "kv_layout": self._kv_layout,
            **more,
        }


@fi_api
class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode of requests that share a prefix. MultiLevelCascadeAttentionWrapper also takes prefixes in pages.

    Args:
        float_workspace_buffer, kv_layout: as in BatchDecodeWithPagedKVCacheWrapper.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout))

    @fi_api
    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: torch.dtype | str = "float16",
    ) -> None:
        """Plans the unique keys: `BatchDecodeWithPagedKVCacheWrapper.plan`, with data_type for q, keys and values."""
        self._inner.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
            kv_data_type=data_type,
        )
        self._describe(unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, head_dim)

    plan = begin_forward

    @fi_api(trace=pattern_trace.decode_prefix, planned=pattern_trace.PLANNED_PREFIX)
    @checked
    def run(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Cache
    ) -> torch.Tensor:
        """Attention of each row of q over the shared keys and its own.

        The errors are those of `BatchDecodeWithPagedKVCacheWrapper.run` and `single_prefill_with_kv_cache`.

        Args:
            q: `[batch_size, num_qo_heads, head_dim]`.
            k_shared, v_shared: `[shared tokens, num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, shared tokens,
                head_dim]` ("HND").
            unique_kv_cache: as paged_kv_cache in `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns:
            `[batch_size, num_qo_heads, head_dim]` in q's dtype.
        """
        return self._forward(q, k_shared, v_shared, unique_kv_cache)  # type: ignore[no-any-return]

    forward = run


@fi_api
class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Prefill of requests that share a prefix. MultiLevelCascadeAttentionWrapper also takes prefixes in pages.

    Args:
        float_workspace_buffer, kv_layout: as in BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout))

    @fi_api
    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype | str = "float16",
    ) -> None:
        """Plans the unique keys: `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            q_data_type: of q, keys and values (not an argument of FlashInfer).
            others: as in that function.
        """
        self._inner.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=q_data_type,
        )
        tables = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._describe(*tables, head_dim, qo_indptr=qo_indptr)

    plan = begin_forward

    @fi_api(trace=pattern_trace.prefill_prefix, planned=pattern_trace.PLANNED_PREFILL_PREFIX)
    @checked
    def run(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attention of each row of q over all shared keys and the own keys of its request.

        The errors are those of `BatchPrefillWithPagedKVCacheWrapper.run` and `single_prefill_with_kv_cache`.

        Args:
            q: `[qo_indptr[-1], num_qo_heads, head_dim]`.
            k_shared, v_shared: `[shared tokens, num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, shared tokens,
                head_dim]` ("HND").
            unique_kv_cache: as paged_kv_cache in `BatchPrefillWithPagedKVCacheWrapper.run`.
            causal: causal mask of the own keys.
            use_fp16_qk_reduction, rope_scale, rope_theta: without effect; no positions are encoded.
            sm_scale: softmax_scale; default `1 / sqrt(head_dim)`.

        Returns:
            `[qo_indptr[-1], num_qo_heads, head_dim]` in q's dtype.
        """
        unique = self._inner
        if unique._plan_info is not None:
            unique._change(causal=bool(causal), sm_scale=sm_scale)
        return self._forward(q, k_shared, v_shared, unique_kv_cache, sm_scale=sm_scale)  # type: ignore[no-any-return]

    forward = run
