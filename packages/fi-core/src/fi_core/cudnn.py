"""Attention by cuDNN's own kernels, where its Python frontend is installed."""

from __future__ import annotations

from fi_core.attention.cudnn.batch import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]
