"""Causal prefill whose rows also attend to a range of keys around them, as the tokens of an image do."""

from __future__ import annotations

from inspect import signature
from typing import Any

from fi_core.attention import derived
from fi_core.attention.contract import Cache, check_shape, dtype_of, encoding, type_fields
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.base import older_form
from fi_core.attention.wrappers.paged import TABLES, BatchPrefillWithPagedKVCacheWrapper
from fi_core.attention.wrappers.prefill_plan import TYPES
from fi_core.observe.checked import checked
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse, unsupported
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse
from fi_core.runtime.signature import takes

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
_MASKS = words(
    "custom_mask packed_custom_mask causal prefix_len_ptr max_item_len_ptr token_pos_in_items_ptr",
    "token_pos_in_items_len",
)
_OTHERS = words("rope_scale rope_theta seq_lens seq_lens_q block_tables uniform_q_len")  # of the paged wrapper's plan
_OF_PLAN = [name for name in signature(BatchPrefillWithPagedKVCacheWrapper.plan).parameters if name not in _OTHERS]


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

    @takes(
        derived.ranges_init,
        (*TABLES, "pos_encoding_mode", "q_data_type", "kv_data_type", "o_data_type", "head_dim_qk", "head_dim_vo"),
        BatchPrefillWithPagedKVCacheWrapper.__init__,
        BatchPrefillWithPagedKVCacheWrapper.plan,
        q_data_type="bfloat16",
        kv_data_type="bfloat16",
        head_dim_qk=128,
        head_dim_vo=128,
    )
    def __init__(self, given: dict[str, Any]) -> None:
        refuse("rotate queries and keys before", pos_encoding_mode=encoding(given["pos_encoding_mode"]))
        dims = {name: given[name] for name in ("head_dim_qk", "head_dim_vo")}
        check_shape(1, 1, 1, **dims)
        types = tuple(type_fields(*(given[name] for name in TYPES)).values())
        self._compiled = {**dims, **dict(zip(TYPES, types))}
        jit_args = variant(types, (dims["head_dim_qk"], dims["head_dim_vo"]))
        super().__init__(**{name: given[name] for name in TABLES[1:]}, jit_args=jit_args)
        self._variant_owns_mask = True  # on Hopper's kernel too, which the argument of that name excludes

    @fi_api
    @takes(derived.ranges_plan, _OF_PLAN, BatchPrefillWithPagedKVCacheWrapper.plan, q_data_type=None)
    def plan(self, given: dict[str, Any]) -> None:  # type: ignore[override]
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
        instead = "the mask is bidirectional_ranges, causal_window_left and range_window_left of run"
        if given["window_left"] != -1:
            raise unsupported("window_left", given["window_left"], instead)
        refuse(instead, **{name: given.pop(name) for name in _MASKS})
        refuse("rotate queries and keys before", pos_encoding_mode=encoding(given["pos_encoding_mode"]))
        for name, compiled in self._compiled.items():
            value = given[name]
            if value is not None and compiled != (dtype_of(value, name) if "type" in name else value):
                raise ValueError(f"{name}: {compiled} of the constructor is required; got {value}")
        super().plan(**{**given, **self._compiled})

    begin_forward = plan  # type: ignore[assignment]

    @takes(derived.ranges_workspace_size, [name for name in _OF_PLAN if name != "non_blocking"], plan)
    def workspace_size(self, given: dict[str, Any]) -> tuple[int, int]:  # type: ignore[override]
        """As `BatchPrefillWithPagedKVCacheWrapper.workspace_size`, with arguments of this `plan`."""
        return self._size(given["qo_indptr"], given)

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

    forward = fi_api(  # type: ignore[assignment]
        older_form(
            derived.ranges_forward,
            run,
            plan,
            "q paged_kv_cache bidirectional_ranges causal_window_left range_window_left q_scale k_scale v_scale",
            "enable_pdl kv_cache_sf * return_lse",
        )
    )
    run_return_lse = method_setting_lse(run)
    forward_return_lse = method_setting_lse(forward)
