"""Every routine name, by family and in the order of the help: data only, so that listing needs no torch."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fi_bench import flags
from fi_bench.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from fi_core.observe.trace import Described


@dataclass(frozen=True)
class Family:
    """Routines that share a parser. `default_backends` are those of FlashInfer's benchmark, for a GPU."""

    name: str
    flags: tuple[flags.Flag, ...]
    routines: tuple[str, ...]
    default_backends: tuple[str, ...] = ("cuda",)


_ROPE_PLAIN = ("apply_rope", "apply_rope_pos_ids", "apply_llama31_rope", "apply_llama31_rope_pos_ids")
_ROPE_INPLACE = tuple(f"{name}_inplace" for name in (*_ROPE_PLAIN, "apply_rope_with_cos_sin_cache"))

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "attention",
            flags.ATTENTION,
            (
                "BatchDecodeWithPagedKVCacheWrapper",
                "BatchPrefillWithPagedKVCacheWrapper",
                "BatchPrefillWithRaggedKVCacheWrapper",
                "BatchMLAPagedAttentionWrapper",
                "trtllm_batch_decode_with_kv_cache_mla",
                "single_decode_with_kv_cache",
                "single_prefill_with_kv_cache",
                "single_prefill_with_kv_cache_return_lse",
            ),
            ("fa2",),
        ),
        Family(
            "gemm",
            flags.GEMM,
            (
                "gemm_fp8_nt_groupwise",
                "group_gemm_fp8_nt_groupwise",
                "bmm_fp8",
                "mm_fp8",
                "bmm_mxfp8",
                "mm_fp4",
                "mm_bf16_fp4",
                "mm_bf16_fp8",
                "mm_bf16_fp32",
                "mm_mxfp8",
                "mm_bf16",
                "bmm_bf16",
                "tinygemm_bf16",
                "grouped_mm_bf16",
            ),
            ("cudnn",),
        ),
        Family(
            "moe",
            flags.MOE,
            (
                "trtllm_fp4_block_scale_moe",
                "trtllm_fp8_block_scale_moe",
                "trtllm_fp8_per_tensor_scale_moe",
                "cutlass_fused_moe",
                "cute_dsl_fp4_block_scale_moe",
                "b12x_fused_moe",
                "unified_nvfp4_moe",
                "bgmv_moe",
            ),
        ),
        Family("moe_routing", flags.MOE_ROUTING, ("fused_topk_deepseek",)),
        Family("moe_comm", flags.MOE_COMM, ("moe_a2a_dispatch_combine",)),
        Family("allreduce_comm", flags.ALLREDUCE, ("allreduce_fusion",)),
        Family("mixed_comm", flags.MIXED_COMM, ("mixed_comm",)),
        Family(
            "norm",
            flags.NORM,
            (
                "rmsnorm",
                "fused_add_rmsnorm",
                "gemma_rmsnorm",
                "gemma_fused_add_rmsnorm",
                "layernorm",
                "rmsnorm_quant",
                "fused_add_rmsnorm_quant",
                "fused_add_rmsnorm_fp8_block_quant",
                "layernorm_quant",
                "rmsnorm_fp4quant",
                "add_rmsnorm_fp4quant",
                "fused_rmsnorm_silu",
                "fused_dit_layernorm",
                "fused_qk_rmsnorm_rope",
            ),
        ),
        Family("activation", flags.ACTIVATION, ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")),
        Family(
            "quantization",
            flags.QUANTIZATION,
            (
                "mxfp8_quantize",
                "mxfp4_quantize",
                "nvfp4_quantize",
                "nvfp4_batched_quantize",
                "mxfp4_dequantize",
                "block_scale_interleave",
                "packbits",
                "segment_packbits",
            ),
        ),
        Family(
            "sampling",
            flags.SAMPLING,
            (
                "softmax",
                "sampling_from_probs",
                "sampling_from_logits",
                "top_k_sampling_from_probs",
                "top_p_sampling_from_probs",
                "top_k_top_p_sampling_from_probs",
                "top_k_top_p_sampling_from_logits",
                "min_p_sampling_from_probs",
                "top_k_renorm_probs",
                "top_p_renorm_probs",
                "top_k_mask_logits",
                "chain_speculative_sampling",
            ),
        ),
        Family("topk", flags.TOPK, ("top_k", "top_k_page_table_transform", "top_k_ragged_transform")),
        Family(
            "rope",
            flags.ROPE,
            (
                *_ROPE_PLAIN,
                "apply_rope_with_cos_sin_cache",
                *_ROPE_INPLACE,
                "mla_rope_quantize_fp8",
                "rope_quantize_fp8",
                "rope_quantize_fp8_append_paged_kv_cache",
            ),
        ),
        Family(
            "page",
            flags.PAGE,
            (
                "append_paged_kv_cache",
                "append_paged_mla_kv_cache",
                "concat_mla_k",
                "get_batch_indices_positions",
                "get_seq_lens",
                "nvfp4_quantize_append_paged_kv_cache",
                "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
            ),
        ),
        Family("cascade", flags.CASCADE, ("merge_state", "merge_state_in_place", "merge_states")),
        Family("mhc", flags.MHC, ("mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm")),
        Family("mamba", flags.MAMBA, ("selective_state_update",), ("flashinfer",)),
        Family("mamba_prefill", flags.SSD, ("ssd_combined_fwd",)),
        Family("mamba_ring", flags.RING, ("checkpointing_ssu", "replayssm_materialize")),
        Family("lora", flags.LORA, ("add_lora_linear", "bgmv_shrink", "bgmv_expand")),
        Family(
            "indexer",
            flags.INDEXER,
            ("fp8_mqa_logits", "fp8_paged_mqa_logits", "fp8_indexer_topk", "fp8_paged_indexer_topk"),
        ),
        Family(
            "flash_mla",
            flags.FLASH_MLA,
            ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "append_sparse_mla_kv_cache"),
        ),
        Family("causal_conv1d", flags.CONV, ("causal_conv1d_fn", "causal_conv1d_update")),
        Family(
            "gdn",
            flags.GDN,
            ("gated_delta_rule_decode", "gated_delta_rule_mtp", "chunk_gated_delta_rule"),
            ("flashinfer",),
        ),
        Family("kda", flags.KDA, ("recurrent_kda_prefill",), ("flashinfer",)),
        Family(
            "sparse_attention",
            flags.SPARSE,
            ("MSAProxyScore", "MSASparseAttention", "MSASparseDecode", "MSAPipeline"),
            ("cudsl",),
        ),
        Family("topk_varlen", flags.TOPK_VARLEN, ("top_k_varlen",)),
    )
}
FAMILY_OF = {routine: family.name for family in FAMILIES.values() for routine in family.routines}


@functools.cache
def description(routine: str) -> Described | None:
    """A described function or wrapper of fi_core, or None."""
    from fi_core.registry import described

    return described(routine)


def sizes(found: Described) -> dict[str, Any]:
    """The sizes that the description makes inputs from, with their usual values."""
    assert found.template.make is not None
    parameters = inspect.signature(found.template.make).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _flag(name: str, usual: Any) -> flags.Flag:
    help = f"{name} of the description"
    if isinstance(usual, bool):
        return flags.switch(name, help)
    if isinstance(usual, int):
        return flags.number(name, usual, help, least=0)
    if isinstance(usual, float):
        return flags.real(name, usual, help)
    return flags.dtype(name, usual) if name.endswith("dtype") else flags.Flag(name, help, default=usual)


def family_of(routine: str) -> Family:
    """The family of a routine; a described function has its own, whose flags are the sizes of its description."""
    if routine in FAMILY_OF:
        return FAMILIES[FAMILY_OF[routine]]
    found = description(routine)
    if found is None:
        hint = did_you_mean(routine, FAMILY_OF) or "; `fi-bench list routines` shows all"
        raise UsageError(f"unknown routine {routine!r}{hint}")
    own = tuple(_flag(name, usual) for name, usual in sizes(found).items())
    return Family(found.function.__module__.removeprefix("fi_core."), own, (routine,))
