"""Causal prefill whose rows also attend to a range of keys around them, as the tokens of an image do."""

from __future__ import annotations

from typing import Any

from fi_core.attention.contract import Cache, check_shape, dtype_of, encoding, type_fields
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse, unsupported
from fi_core.runtime.lazy import torch

_VARIANT = r"""
struct CausalOrInRange : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ CausalOrInRange(const Params& params, uint32_t batch_idx, uint8_t*) {
    qo_len = params.get_qo_len(batch_idx);
    window_left = kv_len = params.get_kv_len(batch_idx);
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float cap = params.logits_soft_cap, scale = params.sm_scale;
    return cap > 0.f ? cap * math::tanh(logits * scale / cap) / scale : float(logits);
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (qo_idx >= qo_len) return false;
    const int64_t distance = int64_t(kv_len) - qo_len + qo_idx - kv_idx;
    const int32_t* range = params.ranges + 2 * (int64_t(params.first_rows[batch_idx]) + qo_idx);
    const bool causal = distance >= 0 && distance <= params.causal_window;
    const int64_t key = kv_idx;
    return causal || (key >= range[0] && key <= range[1] && distance <= params.range_window);
  })
};
"""
_UNLIMITED = 1 << 40  # a window
_COMPILED = ("head_dim_qk", "head_dim_vo", "q_data_type", "kv_data_type", "o_data_type")


def variant(types: tuple[torch.dtype, ...], dims: tuple[int, int]) -> tuple[Any, ...]:
    """The jit_args of the variant. types: of q, of keys and values, of the output; dims: of q and keys, of values."""
    names = [str(x).removeprefix("torch.") for x in (*types, *dims)]
    tensors = ["ranges", "first_rows"], ["int32_t", "int32_t"]
    scalars = (
        ["causal_window", "range_window", "logits_soft_cap", "sm_scale"],
        ["int64_t", "int64_t", "double", "double"],
    )
    uri = f"causal_or_in_range_{'_'.join(names)}"
    return uri, *types, torch.int32, *dims, *tensors, *scalars, "CausalOrInRange", _VARIANT


@fi_api
class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper for rows that attend to `(causal and window) or (in range and range window)`.

    The mask is computed from two integers a row, by an attention variant that is compiled here.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf: as in BatchPrefillWithPagedKVCacheWrapper.
        pos_encoding_mode: must be "NONE".
        q_data_type, kv_data_type, o_data_type: dtypes of all plans; the last defaults to q_data_type.
        head_dim_qk, head_dim_vo: head dims of all plans.

    Raises:
        NotImplementedError: pos_encoding_mode.
        CompileError: no compiler for the variant. Other errors are those of BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: torch.dtype | str = "bfloat16",
        kv_data_type: torch.dtype | str = "bfloat16",
        o_data_type: torch.dtype | str | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        refuse("rotate queries and keys before", pos_encoding_mode=encoding(pos_encoding_mode))
        check_shape(1, 1, 1, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo)
        types = tuple(type_fields(q_data_type, kv_data_type, o_data_type).values())
        self._compiled = dict(zip(_COMPILED, (head_dim_qk, head_dim_vo, *types)))
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        jit_args = variant(types, (head_dim_qk, head_dim_vo))
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, jit_args=jit_args)
        self._variant_owns_mask = True  # on Hopper's kernel too, which the argument of that name excludes

    @fi_api
    def plan(  # type: ignore[override]
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans the next `run` calls: `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type: None, or those of the constructor.
            custom_mask, packed_custom_mask, causal, window_left, prefix_len_ptr, token_pos_in_items_ptr,
                token_pos_in_items_len, max_item_len_ptr, pos_encoding_mode: must have their defaults.
            others: as in that function.

        Raises:
            ValueError: a head dim or dtype that was not compiled. Other errors are those of that function.
            NotImplementedError: another mask or an encoding.
        """
        self._forget_plan()
        masks: dict[str, Any] = {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask, "causal": causal}
        masks |= {"prefix_len_ptr": prefix_len_ptr, "max_item_len_ptr": max_item_len_ptr}
        masks |= {"token_pos_in_items_ptr": token_pos_in_items_ptr, "token_pos_in_items_len": token_pos_in_items_len}
        instead = "the mask is bidirectional_ranges, causal_window_left and range_window_left of run"
        if window_left != -1:
            raise unsupported("window_left", window_left, instead)
        refuse(instead, **masks)
        refuse("rotate queries and keys before", pos_encoding_mode=encoding(pos_encoding_mode))
        given: dict[str, Any] = dict(zip(_COMPILED, (head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type)))
        for name, value in given.items():
            if value is not None and self._compiled[name] != (dtype_of(value, name) if "type" in name else value):
                raise ValueError(f"{name}: {self._compiled[name]} of the constructor is required; got {value}")
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, **self._compiled}
        options |= {"max_token_per_sequence": max_token_per_sequence, "max_sequence_kv": max_sequence_kv}
        options |= {"fixed_split_size": fixed_split_size, "disable_split_kv": disable_split_kv}
        super().plan(*tables, num_qo_heads, num_kv_heads, page_size=page_size, non_blocking=non_blocking, **options)

    begin_forward = plan  # type: ignore[assignment]

    @fi_api(trace=pattern_trace.ranges, planned=pattern_trace.PLANNED_RANGES)
    @checked
    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q, paged_kv_cache: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            bidirectional_ranges: int32 `[total_q, 2]`, contiguous, on the query device: the first and the last key of
                the range of each row, counted in its request; (-1, -1): none.
            causal_window_left: w >= 0 masks keys j < p - w outside the range of a row; below 0: no window.
            range_window_left: w > 0 masks keys j <= p - w in the range of a row, one key more than causal_window_left
                does; 0 and below: no window.
            others: as in that function, which also has the result and the errors.

        Raises:
            ValueError: bidirectional_ranges or a window.
        """
        ranges = bidirectional_ranges
        if ranges.dtype is not torch.int32 or ranges.ndim != 2 or ranges.shape[1] != 2 or not ranges.is_contiguous():
            raise ValueError(
                f"bidirectional_ranges: contiguous int32 of shape [total_q, 2] is required; got {ranges.dtype} of "
                f"shape {tuple(ranges.shape)}"
            )
        if len(ranges) != len(q) or ranges.device != q.device:
            raise ValueError(
                f"bidirectional_ranges: one row per query token ({len(q)}) on the query device {q.device} is required; "
                f"got {len(ranges)} on {ranges.device}"
            )
        for name, window in (("causal_window_left", causal_window_left), ("range_window_left", range_window_left)):
            if not isinstance(window, int) or window >= _UNLIMITED:
                raise ValueError(f"{name}: an integer below 2^40 is required; got {window!r}")
        causal_window = causal_window_left if causal_window_left >= 0 else _UNLIMITED
        range_window = range_window_left - 1 if range_window_left > 0 else _UNLIMITED
        args = (ranges, self._qo_indptr_buf, causal_window, range_window)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        options: dict[str, Any] = {"enable_pdl": enable_pdl, "kv_cache_sf": kv_cache_sf}
        return super().run(q, paged_kv_cache, *args, out=out, lse=lse, return_lse=return_lse, **scales, **options)

    @fi_api
    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """`run` into new results."""
        ranges, scales = (bidirectional_ranges, causal_window_left, range_window_left), (q_scale, k_scale, v_scale)
        return self.run(q, paged_kv_cache, *ranges, *scales, None, None, return_lse, enable_pdl, kv_cache_sf)
