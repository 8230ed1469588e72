"""Decode attention: one or a few query tokens of each request against its keys."""

from __future__ import annotations

from fi_core.decode import ops  # declares the ops of the family
from fi_core.decode.single import single_decode_with_kv_cache

__all__ = ["ops", "single_decode_with_kv_cache"]
