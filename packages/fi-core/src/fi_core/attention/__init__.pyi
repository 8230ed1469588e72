"""The names that fi_core.attention loads on first use. Written by tools/stubs.py; do not edit."""

from fi_core.attention.wrappers.batch_attention import BatchAttention
from fi_core.attention.wrappers.bidirectional_ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from fi_core.attention.wrappers.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]
