"""Attention modules with a user's variant, at FlashInfer's import path; defined in fi_core.attention.custom_modules."""

from __future__ import annotations

from fi_core.attention.custom_modules import (
    gen_customize_batch_attention_module,
    gen_customize_batch_decode_module,
    gen_customize_batch_pod_module,
    gen_customize_batch_prefill_module,
    gen_customize_pod_module,
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
)

__all__ = [
    "gen_customize_batch_attention_module",
    "gen_customize_batch_decode_module",
    "gen_customize_batch_pod_module",
    "gen_customize_batch_prefill_module",
    "gen_customize_pod_module",
    "gen_customize_single_decode_module",
    "gen_customize_single_prefill_module",
]
