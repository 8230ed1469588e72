"""Decode attention: one or a few query tokens of each request against its keys."""

from __future__ import annotations

from fi_core.attention.forms.single import (
    single_decode_with_kv_cache,
    single_decode_with_kv_cache_with_jit_module,
)
from fi_core.attention.forms.tables_decode import trtllm_batch_decode_with_kv_cache, xqa, xqa_batch_decode_with_kv_cache
from fi_core.attention.forms.tables_mla import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from fi_core.attention.forms.tables_plan import BlockTablesPlan
from fi_core.attention.ops import decode as ops
from fi_core.attention.wrappers.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from fi_core.attention.wrappers.planners import (
    _grouped_size_compiled_for_decode_kernels,
    fast_decode_plan,
    get_batch_decode_module,
)
from fi_core.cudnn import cudnn_batch_decode_with_kv_cache
from fi_core.page import get_seq_lens

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BlockTablesPlan",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "_grouped_size_compiled_for_decode_kernels",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "get_batch_decode_module",
    "get_seq_lens",
    "ops",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]
