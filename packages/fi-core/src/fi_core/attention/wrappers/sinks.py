"""Batch prefill with attention sinks: the paged wrapper with its data types and window fixed by the constructor."""

from __future__ import annotations

from typing import Any

from fi_core.attention import derived
from fi_core.attention.wrappers.paged import TABLES, BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import WrongBackendError
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse
from fi_core.runtime.signature import takes

_OF_PAGED = (*TABLES, "custom_mask_buf", "mask_indptr_buf", "backend")
_IGNORED = words("pos_encoding_mode use_fp16_qk_reduction q_data_type kv_data_type head_dim_qk head_dim_vo")


@fi_api
class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper with a learned logit per head in its run (sinks, arXiv:2309.17453; gpt-oss).

    Arguments that are not listed are those of BatchPrefillWithPagedKVCacheWrapper.

    Args:
        backend: "auto", "fa2" or "fa3".
        pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk, head_dim_vo: for
            compatibility; `plan` is given the values that apply.
        window_left: must equal that of `plan`.

    Raises:
        ValueError: backend; it is an AssertionError too, as FlashInfer's.
    """

    @takes(
        derived.sinks_init,
        (*_OF_PAGED, *_IGNORED, "window_left"),
        BatchPrefillWithPagedKVCacheWrapper.__init__,
        BatchPrefillWithPagedKVCacheWrapper.plan,
        q_data_type=None,
        kv_data_type=None,
        head_dim_qk=128,
        head_dim_vo=128,
    )
    def __init__(self, given: dict[str, Any], window_left: int = -1) -> None:
        if given["backend"] not in ("auto", "fa2", "fa3"):
            raise WrongBackendError(f"backend: auto, fa2 or fa3 is required; got {given['backend']!r}")
        super().__init__(**{name: given[name] for name in _OF_PAGED[1:]})
        self._made_for_window = window_left

    @fi_api
    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sink: torch.Tensor | None = None,
        sm_scale: float | None = None,
        **options: Any,
    ) -> Any:
        """Attention with `exp(sink[h])` added to row_sum; lse includes it.

        Args:
            q, paged_kv_cache: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            sink: fp32 `[num_qo_heads]`, a logit in base e, which sm_scale does not multiply.
            sm_scale: default that of the plan.
            options: other options of `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns:
            out or (out, lse), as in that function.

        Raises:
            ValueError: window_left of the plan differs from that of the wrapper. All other errors are those of that
                function.
        """
        if self._plan_info is not None and self._window_left != self._made_for_window:
            raise ValueError(f"window_left: the wrapper was made for {self._made_for_window}; got {self._window_left}")
        planned = self._sm_scale
        if sm_scale is not None:
            self._sm_scale = sm_scale
        try:
            return super().run(q, paged_kv_cache, sinks=sink, **options)
        finally:
            self._sm_scale = planned

    run_return_lse = method_setting_lse(run)
