"""fi: kernels for LLM serving. Names are loaded on first use; importing this package loads nothing else."""

from __future__ import annotations

import importlib
import sys as _sys

from fi_core.compat import hook as _hook

if not getattr(_sys, "_is_gil_enabled", lambda: True)():  # no test has run without it
    raise ImportError(
        f"fi_core: Python with the GIL is required; got {_sys.version.split()[0]} without it: set PYTHON_GIL=1"
    )

TYPE_CHECKING = False  # as in typing, which alone would take longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

with open(__file__.rpartition("/")[0] + "/VERSION") as _file:
    __version__ = _file.read().strip()

# Where each public name lives; tools/stubs.py writes __init__.pyi from it.
_MODULES: dict[str, tuple[str, ...]] = {
    "autotuner": ("MeasurementPolicy", "autotune", "autotune_v2", "autotune_v2_reload"),
    "observe.trace": ("fi_trace",),
    "registry": ("loaded_kernels", "supports"),
    "attn_scores": (
        "compute_paged_mqa_logits_schedule",
        "fp8_paged_mqa_logits",
        "min_block_table_width",
        "padded_seq_len",
    ),
    "ahead": ("prepare",),
    "runtime.invariance": ("batch_invariant",),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "cudnn_batch_decode_with_kv_cache",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
        "xqa",
    ),
    "prefill": (
        "BatchAttention",
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchPrefillWithCausalBidirectionalRangesWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
        "trtllm_fmha_v2_prefill",
    ),
    "quantization": (
        "NVFP44Over6Config",
        "NVFP44Over6ErrMode",
        "SfLayout",
        "block_scale_interleave",
        "e2m1_and_ufp8sf_scale_to_float",
        "fp4_quantize",
        "get_shuffle_block_size",
        "get_shuffle_matrix_a_row_indices",
        "get_shuffle_matrix_sf_a_row_indices",
        "mxfp4_dequantize",
        "mxfp4_dequantize_host",
        "mxfp4_quantize",
        "mxfp8_dequantize_host",
        "mxfp8_grouped_quantize",
        "mxfp8_quantize",
        "nvfp4_batched_quantize",
        "nvfp4_block_scale_interleave",
        "nvfp4_kv_dequantize",
        "nvfp4_kv_dequantize_paged",
        "nvfp4_kv_quantize",
        "nvfp4_quantize",
        "packbits",
        "per_token_group_quant_8bit",
        "resolve_nvfp4_4over6",
        "scaled_fp4_grouped_quantize",
        "segment_packbits",
        "shuffle_matrix_a",
        "shuffle_matrix_sf_a",
        "silu_and_mul_nvfp4_quantize",
    ),
    "topk": ("TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform"),
    "topk_varlen": ("top_k_varlen",),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "concat_ops": ("concat_mla_k",),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "nvfp4_quantize_append_paged_mla_kv_cache",
    ),
    "norm": (
        "fused_add_rmsnorm",
        "fused_add_rmsnorm_fp8_block_quant",
        "fused_add_rmsnorm_quant",
        "fused_dit_gate_residual_layernorm_gamma_beta",
        "fused_dit_gate_residual_layernorm_scale_shift",
        "fused_dit_residual_layernorm_scale_shift",
        "fused_rmsnorm_silu",
        "gemma_fused_add_rmsnorm",
        "gemma_rmsnorm",
        "layernorm",
        "layernorm_quant",
        "rmsnorm",
        "rmsnorm_quant",
    ),
    "sampling": (
        "cake_top_k_top_p_sampling_from_probs",
        "chain_speculative_sampling",
        "min_p_sampling_from_probs",
        "sample_from_logits",
        "sampling_from_logits",
        "sampling_from_probs",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_prob",
        "top_k_renorm_probs",
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_prob",
        "top_p_renorm_probs",
        "top_p_sampling_from_probs",
    ),
    "gemm": (
        "SegmentGEMMWrapper",
        "bmm_bf16",
        "bmm_fp8",
        "bmm_mxfp8",
        "mm_bf16",
        "mm_bf16_fp4",
        "mm_fp4",
        "mm_fp8",
        "mm_mxfp8",
        "prepare_bf16_fp4_weights",
        "prepare_low_latency_gemm_weights",
        "tinygemm_bf16",
    ),
    "fused_moe": (
        "ActivationType",
        "CuteDslBf16MoEWrapper",
        "RoutingMethodType",
        "cute_dsl_fused_moe_bf16",
        "cutlass_fused_moe",
        "reorder_rows_for_gated_act_gemm",
        "trtllm_bf16_moe",
        "trtllm_bf16_routed_moe",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_block_scale_routed_moe",
        "trtllm_fp8_per_tensor_scale_moe",
        "trtllm_fp8_per_tensor_scale_routed_moe",
    ),
    "comm": (),
    "logits_processor": (),
    "green_ctx": (),
    "grouped_mm": ("grouped_mm_bf16", "grouped_mm_fp4", "grouped_mm_fp8", "grouped_mm_mxfp8"),
    "gdn_prefill": ("chunk_gated_delta_rule",),
    "gdn_decode": (),
    "mamba": (),
    "mhc": (),
    "lora": (),
    "activation": ("gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"),
    "rope": (
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
        "fused_qk_rmsnorm_rope",
    ),
}
_hook.install()
_HOME = {name: f"fi_core.{module}" for module, names in _MODULES.items() for name in names}
_REVISION = ("__git_commit__", "__git_version__")  # FlashInfer's names of the commit of a build
__all__ = [*_REVISION, "__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import torch  # noqa: F401  (ops register with it as their family loads)

        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _REVISION:
        from fi_core.runtime.revision import commit

        return commit()
    try:
        return importlib.import_module(f"fi_core.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"fi_core.{name}":
            raise
        import pkgutil

        from fi_core.compat import lacking
        from fi_core.runtime.errors import missing_attribute

        stand_in = lacking.find("", name)
        if stand_in is not None:
            return stand_in
        modules = [module.name for module in pkgutil.iter_modules(__path__)]
        raise missing_attribute("fi_core", name, [*__all__, *modules]) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
