"""Multi-head latent attention (MLA) with absorbed weights."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.attention.forms.tables_mla import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from fi_core.attention.wrappers.mla import BatchMLAPagedAttentionWrapper
from fi_core.attention.wrappers.planners import get_batch_mla_module
from fi_core.attention.wrappers.tables import MLAPlanMetadata

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "deepseek_mla_dimensions",
    "get_batch_mla_module",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]


class MLAHeadDimensions(NamedTuple):
    """The dimensions of a head: of keys without and with rotation, of values, and of the latent of all heads."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


class MLALayerDimensions(NamedTuple):
    """The dimensions of the heads of a layer, and their number."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
supported_mla_head_dimensions = [deepseek_mla_dimensions]
supported_mla_layer_dimensions = [MLALayerDimensions(deepseek_mla_dimensions, heads) for heads in (128, 64)]
