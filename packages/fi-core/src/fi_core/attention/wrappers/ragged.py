"""Batch prefill over ragged keys and values: plan once per step, run once per layer."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from typing import Any

from fi_core.attention import derived
from fi_core.attention.schedule import PrefillPlan
from fi_core.attention.wrappers import trace
from fi_core.attention.wrappers.base import older_form
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import unsupported
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse, method_with_lse
from fi_core.runtime.signature import takes

_OF_INIT = words(
    "self float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf=paged_kv_indptr_buf",
    "custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask",
)
_OF_PLAN = words(
    "self qo_indptr kv_indptr=paged_kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask",
    "packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale",
    "rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr",
    "token_pos_in_items_len max_item_len_ptr fixed_split_size disable_split_kv seq_lens seq_lens_q",
    "max_token_per_sequence max_sequence_kv v_indptr o_indptr uniform_q_len",
)
_plan_pages = unwrap(BatchPrefillWithPagedKVCacheWrapper.plan)  # whose errors would name pages
_NOT_OF_SIZE = ("non_blocking", "v_indptr", "o_indptr")


@fi_api
class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill attention of a batch over ragged K and V: `plan` once per step, `run` once per layer.

    The keys and values of the requests are concatenated. `last_choice` and `resolved_backend` tell which implementation
    was planned and ran, as in BatchPrefillWithPagedKVCacheWrapper.

    Args:
        float_workspace_buffer: as in BatchPrefillWithPagedKVCacheWrapper.
        kv_layout: "NHD" (`[kv_tokens, num_kv_heads, head_dim]`) or "HND" (`[num_kv_heads, kv_tokens, head_dim]`).
        use_cuda_graph: as in BatchPrefillWithPagedKVCacheWrapper.
        qo_indptr_buf, kv_indptr_buf: int32 `[batch_size + 1]`, with use_cuda_graph.
        custom_mask_buf, mask_indptr_buf, backend, jit_args, jit_kwargs, variant_owns_mask: as in
            BatchPrefillWithPagedKVCacheWrapper.

    Raises:
        ValueError: buffers; all other errors are those of BatchPrefillWithPagedKVCacheWrapper.
    """

    _is_paged = False
    _buffers: Mapping[str, str] = {"qo_indptr": "qo_indptr_buf", "indptr": "kv_indptr_buf"}

    @takes(derived.ragged_init, _OF_INIT, BatchPrefillWithPagedKVCacheWrapper.__init__)
    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(**given)

    @fi_api
    @takes(derived.ragged_plan, _OF_PLAN, BatchPrefillWithPagedKVCacheWrapper.plan)
    def plan(  # type: ignore[override]
        self, given: dict[str, Any], v_indptr: torch.Tensor | None = None, o_indptr: torch.Tensor | None = None
    ) -> None:
        """Plans the next `run` calls: computes the work tiles of the batch on the device. It does not synchronise.

        Arguments that are not listed have the meaning and the errors of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        NOTE: their order differs.

        Args:
            qo_indptr: int32 `[batch_size + 1]`, on the host or on the device; request b has rows `q[qo_indptr[b] :
                qo_indptr[b + 1]]`.
            kv_indptr: int32 `[batch_size + 1]`, likewise; request b has the tokens kv_indptr[b] to kv_indptr[b + 1] of
                k and v.
            seq_lens: without effect; kv_indptr determines the lengths.
            v_indptr, o_indptr: None, or the values of kv_indptr and of qo_indptr (on the device those very tensors),
                because v and out have the offsets of k and q.

        Raises:
            NotImplementedError: another v_indptr or o_indptr.
        """
        self._forget_plan()
        _require_same("v_indptr", v_indptr, "kv_indptr", given["paged_kv_indptr"])
        _require_same("o_indptr", o_indptr, "qo_indptr", given["qo_indptr"])
        pages = {"paged_kv_indices": None, "paged_kv_last_page_len": None, "page_size": 1, "seq_lens": None}
        _plan_pages(self, **{**given, **pages})

    begin_forward = plan  # type: ignore[assignment]

    @takes(
        derived.ragged_workspace_size,
        [name for name in _OF_PLAN if name not in _NOT_OF_SIZE],
        BatchPrefillWithPagedKVCacheWrapper.plan,
    )
    def workspace_size(self, given: dict[str, Any]) -> tuple[int, int]:  # type: ignore[override]
        """As `BatchPrefillWithPagedKVCacheWrapper.workspace_size`, with arguments of this `plan`."""
        return self._size(given["qo_indptr"], given)

    def _out_dtype(self, plan: PrefillPlan) -> Any:
        """The dtype of the output: the planned one; instead of an fp8 dtype that of q, or bf16 if q is fp8 as well."""
        for planned in (plan.o_dtype, plan.q_dtype):
            if planned is not None and planned.itemsize > 1:
                return planned
        return torch.bfloat16

    @method_with_lse
    @fi_api(trace=trace.ragged_prefill, planned=trace.PLANNED_RAGGED)
    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the planned batch: `softmax(mask(q k^T * sm_scale)) v` for each request and head
        (arXiv:2501.01005).

        Arguments that are not listed, and other errors, are those of `BatchPrefillWithPagedKVCacheWrapper.run`. The
        attribute `_sinks` of the wrapper, if set, holds the sinks (fp32 `[num_qo_heads]`). `last_choice` tells which
        implementation ran.

        Args:
            q: `[qo_indptr[-1], num_qo_heads, head_dim_qk]`.
            k, v: `[kv_indptr[-1], num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, kv_indptr[-1], head_dim]`
                ("HND"), or longer; any strides with a contiguous last dimension.
            o_scale: None or 1.
            kv_cache_sf: of NVFP4 k and v a tuple of their scales, likewise with head_dim / 16.

        Returns:
            out `[qo_indptr[-1], num_qo_heads, head_dim_vo]`, or (out, lse). out has the planned dtype; instead of an
            fp8 dtype that of q, or bf16.

        Raises:
            NotImplementedError: another o_scale.
        """
        if o_scale is not None and not (isinstance(o_scale, (int, float)) and o_scale == 1.0):
            raise unsupported("o_scale", o_scale, "multiply v_scale by what the output is to be scaled by")
        if self._call is None:
            self._ready()
        if getattr(k, "ndim", 3) != 3 or getattr(v, "ndim", 3) != 3:
            raise ValueError(f"k and v must have 3 dimensions; got {getattr(k, 'ndim', k)} and {getattr(v, 'ndim', v)}")
        scales, results, form = (q_scale, k_scale, v_scale), (out, lse, return_lse), (lse_base, lse_layout)
        return self._attend(q, k, v, args, scales, results, form, enable_pdl, self._sinks, kv_cache_sf)

    forward = fi_api(  # type: ignore[assignment]
        older_form(
            derived.ragged_forward,
            run,
            plan,
            "q k v causal pos_encoding_mode use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale",
            "rope_theta * return_lse",
        )
    )
    run_return_lse = method_setting_lse(run)
    forward_return_lse = method_setting_lse(forward)


def _require_same(name: str, given: torch.Tensor | None, of: str, own: torch.Tensor) -> None:
    """Raises NotImplementedError for offsets that differ from those of the plan.

    Device tensors must be the same tensor: comparing their values would synchronise.
    """
    if given is None or given is own:
        return
    if not hasattr(given, "data_ptr"):
        raise TypeError(f"{name} must be a torch.Tensor or None; got a {type(given).__name__}")
    if given.device.type != own.device.type or given.shape != own.shape:
        same = False
    elif own.device.type == "cpu":
        same = bool((given == own).all())
    else:
        same = given.data_ptr() == own.data_ptr()
    if not same:
        raise unsupported(name, given, f"v and out stand as k and q do: pass None or {of}")
