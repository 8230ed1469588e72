"""Attention: contract of calls, schedule, ops, wrappers and one-call functions. Lazy, as `fi_core` itself."""

from __future__ import annotations

import importlib
from typing import Any

from fi_core.runtime.errors import missing_attribute

# What FlashInfer exports at this path.
_HOME = {
    "BatchAttention": "fi_core.attention.wrappers.batch_attention",
    "BatchAttentionWithAttentionSinkWrapper": "fi_core.attention.wrappers.sinks",
    "BatchPrefillWithCausalBidirectionalRangesWrapper": "fi_core.attention.wrappers.bidirectional_ranges",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise missing_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
