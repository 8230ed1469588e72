"""Causal prefill whose rows also attend to a range of keys around them, as the tokens of an image do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import check_shape, data_types
from fi_core.attention.custom_modules import customised
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

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


def variant(types: tuple[torch.dtype, ...], dims: tuple[int, int]) -> tuple[Any, ...]:
    """The jit_args of the variant. types: of q, of keys and values, of the output; dims: of q and keys, of values."""
    import torch

    names = [str(x).removeprefix("torch.") for x in (*types, *dims)]
    return (
        f"causal_or_in_range_{'_'.join(names)}", *types, torch.int32, *dims, ["ranges", "first_rows"],
        ["int32_t", "int32_t"], ["causal_window", "range_window", "logits_soft_cap", "sm_scale"],
        ["int64_t", "int64_t", "double", "double"], "CausalOrInRange", _VARIANT,
    )  # fmt: skip


@fi_api
class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper for rows that attend to `(causal and window) or (in range and range window)`.

    The mask is computed from two integers a row, by an attention variant that is compiled at the first plan for its
    dtypes and head dims.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf: as in BatchPrefillWithPagedKVCacheWrapper.
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
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )  # fmt: skip
        self._allowed, self._variant_owns_mask = "fa2", True
        self._windows = _UNLIMITED, _UNLIMITED

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
        sm_scale: float | None = None,
        window_left: int = -1,
        range_window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the next `run` calls: `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            window_left: w >= 0 masks keys j < p - w outside the range of a row; -1: no window.
            range_window_left: the same for keys in its range.
            others: as in that function.

        Raises:
            CompileError: no compiler for the variant. Other errors are those of that function.
        """
        self._forget_plan()
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        check_shape(num_qo_heads, num_kv_heads, page_size, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo)
        types = data_types(q_data_type, kv_data_type, o_data_type, None)
        arguments = variant(types, (head_dim_qk, head_dim_vo))
        self._variant = customised("prefill", "auto", self.device, arguments, None)
        for name, window in (("window_left", window_left), ("range_window_left", range_window_left)):
            if not isinstance(window, int) or not -1 <= window < _UNLIMITED:
                raise ValueError(f"{name}: -1 to 2^40 - 1 is required; got {window!r}")
        self._windows = (
            window_left if window_left >= 0 else _UNLIMITED,
            range_window_left if range_window_left >= 0 else _UNLIMITED,
        )
        super().plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, head_dim_vo, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            q_data_type=types[0], kv_data_type=types[1], o_data_type=types[2], non_blocking=non_blocking,
        )  # fmt: skip

        self._described = {
            "qo_indptr": qo_indptr, "kv_indptr": paged_kv_indptr, "kv_indices": paged_kv_indices,
            "kv_last_page_len": paged_kv_last_page_len, "kv_layout": self._kv_layout,
            "sm_scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "covered": window_left < 0 and range_window_left < 0 and not logits_soft_cap,
        }  # fmt: skip

    begin_forward = plan  # type: ignore[assignment]

    @fi_api(trace=pattern_trace.ranges, planned=pattern_trace.PLANNED_RANGES)
    @checked
    def run(  # type: ignore[override]
        self, q: torch.Tensor, paged_kv_cache: Cache, bidirectional_ranges: torch.Tensor, **options: Any
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q, paged_kv_cache: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            bidirectional_ranges: int32 `[qo_indptr[-1], 2]`, contiguous, on the device: the first and the last key of
                the range of each row, counted in its request; (-1, -1): none.
            options: out, lse, return_lse and others of that function, which also has the result and the errors.

        Raises:
            ValueError: bidirectional_ranges.
        """
        import torch

        ranges = bidirectional_ranges
        if ranges.dtype is not torch.int32 or ranges.shape != (q.shape[0], 2) or not ranges.is_contiguous():
            raise ValueError(
                f"bidirectional_ranges: contiguous int32 of shape ({q.shape[0]}, 2) is required; got {ranges.dtype} of "
                f"shape {tuple(ranges.shape)}"
            )
        return super().run(q, paged_kv_cache, ranges, self._qo_indptr_buf, *self._windows, **options)
