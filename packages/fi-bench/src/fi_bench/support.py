"""What FlashInfer 0.6 has per routine, backend and compute capability: data behind `list support` and skipped rows."""

from __future__ import annotations

# Those that its benchmark knows; a routine that is not listed below is tried.
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1")
Capabilities = tuple[str, ...]


def _on(words: str) -> Capabilities:
    """`8.x 9.0`: capabilities, with x for all minors of a major."""
    return tuple(c for c in CAPABILITIES for w in words.split() if c == w or (w.endswith(".x") and c[:-1] == w[:-1]))


_ALL = _on("7.5 8.x 9.0 10.0 10.3 12.x")
_FROM_8 = _on("8.x 9.0 10.x 12.x")
_FROM_9 = _on("9.0 10.x 12.x")
_10 = _on("10.0 10.3")
_10_12 = _on("10.0 10.3 12.x")

_NORMS = (
    "rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm", "rmsnorm_quant",
    "fused_add_rmsnorm_quant",
)  # fmt: skip
_SAMPLING = (
    "softmax", "sampling_from_probs", "sampling_from_logits", "top_k_sampling_from_probs", "top_p_sampling_from_probs",
    "top_k_top_p_sampling_from_probs", "top_k_top_p_sampling_from_logits", "min_p_sampling_from_probs",
    "top_k_renorm_probs", "top_p_renorm_probs", "top_k_mask_logits", "chain_speculative_sampling", "top_k",
    "top_k_page_table_transform", "top_k_ragged_transform",
)  # fmt: skip
_ROPE = (
    "apply_rope", "apply_rope_pos_ids", "apply_llama31_rope", "apply_llama31_rope_pos_ids",
    "apply_rope_with_cos_sin_cache",
)  # fmt: skip
_ROPE_QUANTIZE = ("mla_rope_quantize_fp8", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache")

FLASHINFER: dict[str, dict[str, Capabilities]] = {
    "BatchDecodeWithPagedKVCacheWrapper": {
        "fa2": (*_on("7.5"), *_FROM_8), "auto": (*_on("7.5"), *_FROM_8), "fa2_tc": _FROM_8, "cudnn": _FROM_8,
        "trtllm-native": _FROM_9, "trtllm-gen": _on("10.x"), "prims-ts": _10,
    },
    "BatchPrefillWithPagedKVCacheWrapper": {
        "fa2": _FROM_8, "auto": _FROM_8, "cudnn": _FROM_8, "cudnn-native": _FROM_8, "fa3": _on("9.0"),
        "trtllm-fmha-v2": _on("9.0 12.0"), "trtllm-gen": _on("10.x"), "trtllm-native": _on("10.x"), "prims-ts": _10,
    },
    "BatchPrefillWithRaggedKVCacheWrapper": {
        **dict.fromkeys(("fa2", "cudnn", "cudnn-native"), _on("8.x 9.0 10.0 10.3 12.x")), "fa3": _on("9.0"),
        "trtllm-fmha-v2": _on("9.0 12.0"), **dict.fromkeys(("cutlass", "cute-dsl", "trtllm-native", "prims-ts"), _10),
    },
    "BatchMLAPagedAttentionWrapper": {
        "fa2": _FROM_8, "fa3": _on("9.0"), "cutlass": _on("10.x"), "trtllm-native": _on("10.x"),
        **dict.fromkeys(("cute-dsl", "auto", "prims-ts"), _10),
    },
    **dict.fromkeys(("gemm_fp8_nt_groupwise", "group_gemm_fp8_nt_groupwise"), {"cutlass": _on("10.x")}),
    "bmm_fp8": {**dict.fromkeys(("cudnn", "cublas"), _on("8.9 9.0 10.x 12.x")), "cutlass": _on("10.x 12.x")},
    "bmm_mxfp8": {"cudnn": _10_12},
    "mm_mxfp8": {
        **dict.fromkeys(("cutlass", "cudnn"), _on("10.0 10.3 11.0 12.x")), **dict.fromkeys(("cute-dsl", "trtllm"), _10),
    },
    "tinygemm_bf16": {"tinygemm": _on("9.0 10.0 10.3 11.0 12.x")},
    **dict.fromkeys(
        ("trtllm_fp4_block_scale_moe", "trtllm_fp8_block_scale_moe", "trtllm_fp8_per_tensor_scale_moe"),
        {"trtllm": _on("10.x")},
    ),
    "cutlass_fused_moe": {"cutlass": _on("10.x 12.x")},
    "cute_dsl_fp4_block_scale_moe": {"cute-dsl": _10},
    "b12x_fused_moe": {"b12x": _on("12.0")},
    "unified_nvfp4_moe": {"unified": _10},
    **dict.fromkeys(_NORMS, {"cute-dsl": _ALL}),
    "layernorm_quant": {"cuda": _ALL},
    **dict.fromkeys(("rmsnorm_fp4quant", "add_rmsnorm_fp4quant"), {"cute-dsl": _10_12}),
    **dict.fromkeys(("mxfp8_quantize", "mxfp4_quantize", "nvfp4_quantize"), {"cuda": _10_12, "cute-dsl": _10_12}),
    "nvfp4_batched_quantize": {"cuda": _10_12},
    **dict.fromkeys(_SAMPLING, {"cuda": _ALL}),
    **dict.fromkeys(_ROPE, {"cuda": _ALL}),
    **dict.fromkeys(_ROPE_QUANTIZE, {"cuda": _on("8.9 9.0 10.0 10.3 12.x")}),
    "selective_state_update": dict.fromkeys(("flashinfer", "triton"), _on("7.5 8.x 9.0 10.0 10.3 11.0 12.x")),
    **dict.fromkeys(
        ("gated_delta_rule_decode", "gated_delta_rule_mtp"), {"flashinfer": _on("9.0 10.0 10.3"), "triton": _FROM_9}
    ),
    "chunk_gated_delta_rule": dict.fromkeys(("flashinfer", "fla"), _on("9.0 10.0 10.3")),
    "recurrent_kda_prefill": dict.fromkeys(("flashinfer", "cutekda", "flash-kda"), _on("12.0")),
}  # fmt: skip


def refusal(routine: str, backend: str, capability: str) -> str | None:
    """Why FlashInfer's backend cannot run the routine on this capability; None if it can, or if that is not known."""
    known = FLASHINFER.get(routine)
    if known is None:
        return None
    if backend not in known:
        return f"FlashInfer has no backend {backend!r} for {routine}; it has {', '.join(known)}"
    if capability not in known[backend]:
        return f"FlashInfer has {backend} for compute capability {', '.join(known[backend])}"
    return None
