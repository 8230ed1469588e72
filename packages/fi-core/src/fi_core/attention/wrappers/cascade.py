"""Attention of requests that share keys: a prefill of each level of a cascade, or of a prefix, merged by their lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from fi_core.attention import derived
from fi_core.attention.contract import Cache, unpack
from fi_core.attention.forms.single import single_prefill_with_kv_cache_return_lse
from fi_core.attention.merge import merge_state_in_place
from fi_core.attention.wrappers import pattern_trace, trace
from fi_core.attention.wrappers.base import AroundWrapper
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.checked import checked
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.lazy import torch
from fi_core.runtime.signature import takes
from fi_core.utils import int32_index

Tables: TypeAlias = "Sequence[torch.Tensor]"
_MOST_LEVELS = 64
_OF_PLAN = words(
    "self qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len num_qo_heads num_kv_heads",
    "head_dim=head_dim_qk page_size causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left",
    "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type",
)
_OF_DECODE = words(
    "self unique_kv_indptr=indptr unique_kv_indices=indices unique_kv_last_page_len=last_page_len num_qo_heads",
    "num_kv_heads head_dim page_size data_type",
)
_OF_PREFILL = words(
    "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads",
    "head_dim=head_dim_qk page_size q_data_type",
)
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
    def _last(self) -> BatchPrefillWithPagedKVCacheWrapper:
        return self._batch_prefill_wrappers[-1]

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
    @takes(derived.cascade_plan, _OF_PLAN, BatchPrefillWithPagedKVCacheWrapper.plan)
    def plan(
        self,
        given: dict[str, Any],
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
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
        tables = qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
        self._joined = bool(given["pos_encoding_mode"] != "NONE" or given["window_left"] >= 0)
        planned = [_joined(*tables, given["page_size"])] if self._joined else list(zip(*tables))
        causal = given.pop("causal")
        for wrapper, level in zip(self._planned_levels, planned):
            wrapper.plan(*level, causal=causal and wrapper is self._last, **given)

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


def _joined(
    qo_indptrs: Tables, indptrs: Tables, indices: Tables, last_page_lens: Tables, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qo_indptr, indptr, indices and last_page_len of the requests of the last level, with the pages of all levels.

    It reads the tables on the host, which synchronises.

    Raises:
        ValueError: a request of the last level that lies in no group of another one, or a shared level whose last page
            is not full, so that no page table has its keys.
    """
    offsets, pages, lasts = ([x.cpu().long() for x in tables] for tables in (qo_indptrs, indptrs, last_page_lens))
    begin, end = offsets[-1][:-1], offsets[-1][1:]
    first_pages, counts, entries = [], [], 0
    for level, (rows, own, last, listed) in enumerate(zip(offsets, pages, lasts, indices)):
        if len(rows) != len(own) or len(last) != len(rows) - 1:
            raise ValueError(
                f"paged_kv_indptr_arr[{level}]: length {len(rows)} is required, that of qo_indptr_arr[{level}], and "
                f"one less of paged_kv_last_page_len; got {len(own)} and {len(last)}"
            )
        group = torch.searchsorted(rows, begin, right=True).sub(1).clamp(0, max(len(rows) - 2, 0))
        if ((rows[group + 1] < end) & (begin < end)).any():
            raise ValueError(f"qo_indptr_arr[{level}]: groups of whole requests of the last level are required")
        if level < len(offsets) - 1 and ((last != page_size) & (own.diff() > 0)).any():
            raise ValueError(
                f"paged_kv_last_page_len[{level}]: {page_size}, full pages, are required of shared levels with a "
                "position encoding or a window; got another length"
            )
        first_pages.append(own[group] + entries)
        counts.append(own.diff()[group])
        entries += listed.numel()
    lengths = torch.stack(counts, 1).flatten()
    places = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    order = torch.repeat_interleave(torch.stack(first_pages, 1).flatten() - places[:-1], lengths)
    order += torch.arange(len(order))
    listed = torch.cat([x.flatten() for x in indices])
    # A request without pages of its own ends with a full page.
    last = lasts[-1].where(counts[-1] > 0, page_size)
    return qo_indptrs[-1], int32_index(places[:: len(counts)]), listed[order.to(listed.device)], int32_index(last)


class _SharedPrefix(AroundWrapper):
    """The common half: attention over the shared keys, merged into that over the unique ones."""

    def __init__(self, unique: Any) -> None:
        self._inner, self._kv_layout = unique, unique._kv_layout

    def _forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, cache: Cache, **scores: Any
    ) -> Any:
        self._inner._require_plan("forward")
        pair = unpack(cache, self._kv_layout)
        out, lse = self._inner.run(q, pair, return_lse=True)
        shared = single_prefill_with_kv_cache_return_lse(q, k_shared, v_shared, kv_layout=self._kv_layout, **scores)
        merge_state_in_place(out, lse, *shared)
        return out


@fi_api
class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode of requests that share a prefix. MultiLevelCascadeAttentionWrapper also takes prefixes in pages.

    Args:
        float_workspace_buffer, kv_layout: as in BatchDecodeWithPagedKVCacheWrapper.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout))

    @fi_api
    @takes(derived.decode_prefix_plan, _OF_DECODE, BatchDecodeWithPagedKVCacheWrapper.plan, data_type="float16")
    def begin_forward(self, given: dict[str, Any]) -> None:
        """Plans the unique keys: `BatchDecodeWithPagedKVCacheWrapper.plan`, with data_type for q, keys and values."""
        self._inner.plan(**given, q_data_type=None)

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
    @takes(derived.prefill_prefix_plan, _OF_PREFILL, BatchPrefillWithPagedKVCacheWrapper.plan)
    def begin_forward(self, given: dict[str, Any]) -> None:
        """Plans the unique keys: `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            q_data_type: of q, keys and values (not an argument of FlashInfer).
            others: as in that function.
        """
        self._inner.plan(**given)

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
            k_shared, v_shared, unique_kv_cache: as in `BatchDecodeWithSharedPrefixPagedKVCacheWrapper.run`.
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
