"""Block-sparse attention: each row of blocks of queries attends to selected blocks of keys."""

from __future__ import annotations

from fi_core.attention.wrappers.block_sparse import BlockSparseAttentionWrapper
from fi_core.attention.wrappers.variable_block_sparse import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]
