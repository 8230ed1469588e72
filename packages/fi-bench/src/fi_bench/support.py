"""What FlashInfer 0.6 has per routine, backend and compute capability: data behind `list support` and skipped rows."""

from __future__ import annotations

CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1")

# routines | backends | capabilities, x being all minors of a major. A routine without a line is tried.
_TABLE = """
BatchDecodeWithPagedKVCacheWrapper | fa2 auto | 7.5 8.x 9.0 10.x 12.x
BatchDecodeWithPagedKVCacheWrapper | fa2_tc cudnn | 8.x 9.0 10.x 12.x
BatchDecodeWithPagedKVCacheWrapper | trtllm-native | 9.0 10.x 12.x
BatchDecodeWithPagedKVCacheWrapper | trtllm-gen | 10.x
BatchDecodeWithPagedKVCacheWrapper | prims-ts | 10.0 10.3
BatchPrefillWithPagedKVCacheWrapper | fa2 auto cudnn cudnn-native | 8.x 9.0 10.x 12.x
BatchPrefillWithPagedKVCacheWrapper | fa3 | 9.0
BatchPrefillWithPagedKVCacheWrapper | trtllm-fmha-v2 | 9.0 12.0
BatchPrefillWithPagedKVCacheWrapper | trtllm-gen trtllm-native | 10.x
BatchPrefillWithPagedKVCacheWrapper | prims-ts | 10.0 10.3
BatchPrefillWithRaggedKVCacheWrapper | fa2 cudnn cudnn-native | 8.x 9.0 10.0 10.3 12.x
BatchPrefillWithRaggedKVCacheWrapper | fa3 | 9.0
BatchPrefillWithRaggedKVCacheWrapper | trtllm-fmha-v2 | 9.0 12.0
BatchPrefillWithRaggedKVCacheWrapper | cutlass cute-dsl trtllm-native prims-ts | 10.0 10.3
BatchMLAPagedAttentionWrapper | fa2 | 8.x 9.0 10.x 12.x
BatchMLAPagedAttentionWrapper | fa3 | 9.0
BatchMLAPagedAttentionWrapper | cutlass trtllm-native | 10.x
BatchMLAPagedAttentionWrapper | cute-dsl auto prims-ts | 10.0 10.3
gemm_fp8_nt_groupwise group_gemm_fp8_nt_groupwise | cutlass | 10.x
bmm_fp8 | cudnn cublas | 8.9 9.0 10.x 12.x
bmm_fp8 | cutlass | 10.x 12.x
bmm_mxfp8 | cudnn | 10.0 10.3 12.x
mm_mxfp8 | cutlass cudnn | 10.0 10.3 11.0 12.x
mm_mxfp8 | cute-dsl trtllm | 10.0 10.3
tinygemm_bf16 | tinygemm | 9.0 10.0 10.3 11.0 12.x
trtllm_fp4_block_scale_moe trtllm_fp8_block_scale_moe trtllm_fp8_per_tensor_scale_moe | trtllm | 10.x
cutlass_fused_moe | cutlass | 10.x 12.x
cute_dsl_fp4_block_scale_moe | cute-dsl | 10.0 10.3
b12x_fused_moe | b12x | 12.0
unified_nvfp4_moe | unified | 10.0 10.3
rmsnorm fused_add_rmsnorm gemma_rmsnorm gemma_fused_add_rmsnorm | cute-dsl | 7.5 8.x 9.0 10.0 10.3 12.x
rmsnorm_quant fused_add_rmsnorm_quant | cute-dsl | 7.5 8.x 9.0 10.0 10.3 12.x
layernorm_quant | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
rmsnorm_fp4quant add_rmsnorm_fp4quant | cute-dsl | 10.0 10.3 12.x
mxfp8_quantize mxfp4_quantize nvfp4_quantize | cuda cute-dsl | 10.0 10.3 12.x
nvfp4_batched_quantize | cuda | 10.0 10.3 12.x
softmax sampling_from_probs sampling_from_logits | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
top_k_sampling_from_probs top_p_sampling_from_probs min_p_sampling_from_probs | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
top_k_top_p_sampling_from_probs top_k_top_p_sampling_from_logits | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
top_k_renorm_probs top_p_renorm_probs top_k_mask_logits | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
chain_speculative_sampling top_k | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
top_k_page_table_transform top_k_ragged_transform | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
apply_rope apply_rope_pos_ids apply_rope_with_cos_sin_cache | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
apply_llama31_rope apply_llama31_rope_pos_ids | cuda | 7.5 8.x 9.0 10.0 10.3 12.x
mla_rope_quantize_fp8 rope_quantize_fp8 | cuda | 8.9 9.0 10.0 10.3 12.x
rope_quantize_fp8_append_paged_kv_cache | cuda | 8.9 9.0 10.0 10.3 12.x
selective_state_update | flashinfer triton | 7.5 8.x 9.0 10.0 10.3 11.0 12.x
gated_delta_rule_decode gated_delta_rule_mtp | flashinfer | 9.0 10.0 10.3
gated_delta_rule_decode gated_delta_rule_mtp | triton | 9.0 10.0 10.3 12.x
chunk_gated_delta_rule | flashinfer fla | 9.0 10.0 10.3
recurrent_kda_prefill | flashinfer cutekda flash-kda | 12.0
"""


def _read(table: str) -> dict[str, dict[str, tuple[str, ...]]]:
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in table.strip().splitlines():
        routines, backends, words = (cell.split() for cell in line.split("|"))
        places = tuple(c for c in CAPABILITIES for w in words if c == w or (w[-1] == "x" and c[:-1] == w[:-1]))
        for routine in routines:
            found.setdefault(routine, {}).update(dict.fromkeys(backends, places))
    return found


FLASHINFER = _read(_TABLE)


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
