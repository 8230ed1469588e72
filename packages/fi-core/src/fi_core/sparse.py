"""Block-sparse attention: each row of blocks of queries attends to selected blocks of keys."""

from __future__ import annotations

from fi_core.attention.wrappers.block_sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]
