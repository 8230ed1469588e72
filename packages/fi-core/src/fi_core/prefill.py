"""Prefill and append attention: the query tokens of requests against all their keys."""

from __future__ import annotations

from fi_core.attention.custom_modules import get_customize_batch_prefill_module
from fi_core.attention.forms.fmha import trtllm_fmha_v2_prefill
from fi_core.attention.forms.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    single_prefill_with_kv_cache_with_jit_module,
)
from fi_core.attention.forms.tables_plan import ContextTablesPlan
from fi_core.attention.forms.tables_prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from fi_core.attention.ops import prefill as ops
from fi_core.attention.wrappers.batch_attention import BatchAttention
from fi_core.attention.wrappers.bidirectional_ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.attention.wrappers.planners import get_batch_prefill_module
from fi_core.attention.wrappers.ragged import BatchPrefillWithRaggedKVCacheWrapper
from fi_core.attention.wrappers.sinks import BatchAttentionWithAttentionSinkWrapper
from fi_core.cudnn import cudnn_batch_prefill_with_kv_cache
from fi_core.page import get_seq_lens

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "ContextTablesPlan",
    "cudnn_batch_prefill_with_kv_cache",
    "get_batch_prefill_module",
    "get_customize_batch_prefill_module",
    "get_seq_lens",
    "ops",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]
