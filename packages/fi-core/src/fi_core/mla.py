"""Multi-head latent attention (MLA) with absorbed weights."""

from __future__ import annotations

from fi_core.attention.forms.tables_mla import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from fi_core.attention.wrappers.mla import BatchMLAPagedAttentionWrapper, get_batch_mla_module

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "get_batch_mla_module",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
