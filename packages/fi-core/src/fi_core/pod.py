"""POD attention: prefill and decode of one step, at the same time on different SMs."""

from __future__ import annotations

from fi_core.attention.wrappers.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
