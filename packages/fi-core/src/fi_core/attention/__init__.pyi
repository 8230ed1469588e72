"""The names that fi_core.attention loads on first use. Written by tools/stubs.py; do not edit."""

from fi_core.attention.wrappers.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper",
]
