"""The keys that DeepSeek sparse attention reads: exact top-k of an indexer's logits."""

from __future__ import annotations

from fi_core.indexer import fp8_indexer_topk, fp8_paged_indexer_topk

__all__ = ["fp8_indexer_topk", "fp8_paged_indexer_topk"]
