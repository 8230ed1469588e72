"""Prefill and append attention: the query tokens of requests against all their keys."""

from __future__ import annotations

from fi_core.cudnn import cudnn_batch_prefill_with_kv_cache
from fi_core.page import get_seq_lens
from fi_core.prefill import ops  # declares the ops of the family
from fi_core.prefill.engine import get_batch_prefill_module, get_customize_batch_prefill_module
from fi_core.prefill.fmha import trtllm_fmha_v2_prefill
from fi_core.prefill.once import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from fi_core.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.prefill.ragged import BatchPrefillWithRaggedKVCacheWrapper
from fi_core.prefill.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    single_prefill_with_kv_cache_with_jit_module,
)
from fi_core.prefill.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
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
