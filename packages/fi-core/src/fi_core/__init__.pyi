"""The names that fi_core loads on first use. Written by tools/stubs.py; do not edit."""

from fi_core import activation as activation
from fi_core import ahead as ahead
from fi_core import aot as aot
from fi_core import api_logging as api_logging
from fi_core import attention as attention
from fi_core import attn_scores as attn_scores
from fi_core import autotuner as autotuner
from fi_core import cascade as cascade
from fi_core import cli as cli
from fi_core import collect_env as collect_env
from fi_core import comm as comm
from fi_core import compat as compat
from fi_core import compilation_context as compilation_context
from fi_core import concat_ops as concat_ops
from fi_core import cudnn as cudnn
from fi_core import decode as decode
from fi_core import deep_gemm as deep_gemm
from fi_core import dsa_indexer as dsa_indexer
from fi_core import errors as errors
from fi_core import flash_mla as flash_mla
from fi_core import fp4_quantization as fp4_quantization
from fi_core import fp8_quantization as fp8_quantization
from fi_core import fused_moe as fused_moe
from fi_core import gdn_decode as gdn_decode
from fi_core import gdn_kernels as gdn_kernels
from fi_core import gdn_prefill as gdn_prefill
from fi_core import gemm as gemm
from fi_core import green_ctx as green_ctx
from fi_core import grouped_mm as grouped_mm
from fi_core import indexer as indexer
from fi_core import integrations as integrations
from fi_core import jit as jit
from fi_core import linear_attention as linear_attention
from fi_core import logits_processor as logits_processor
from fi_core import lora as lora
from fi_core import mamba as mamba
from fi_core import mhc as mhc
from fi_core import mla as mla
from fi_core import norm as norm
from fi_core import observe as observe
from fi_core import page as page
from fi_core import pod as pod
from fi_core import prefill as prefill
from fi_core import profiles as profiles
from fi_core import quantization as quantization
from fi_core import registry as registry
from fi_core import rope as rope
from fi_core import runtime as runtime
from fi_core import sampling as sampling
from fi_core import sparse as sparse
from fi_core import testing as testing
from fi_core import tllm_enums as tllm_enums
from fi_core import topk as topk
from fi_core import topk_varlen as topk_varlen
from fi_core import trace_apply as trace_apply
from fi_core import trace_templates as trace_templates
from fi_core import triton as triton
from fi_core import utils as utils
from fi_core import verify as verify
from fi_core.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from fi_core.ahead import prepare
from fi_core.attn_scores import (
    compute_paged_mqa_logits_schedule,
    fp8_paged_mqa_logits,
    min_block_table_width,
    padded_seq_len,
)
from fi_core.autotuner import MeasurementPolicy, autotune, autotune_v2, autotune_v2_reload
from fi_core.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from fi_core.concat_ops import concat_mla_k
from fi_core.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    cudnn_batch_decode_with_kv_cache,
    fast_decode_plan,
    single_decode_with_kv_cache,
    xqa,
)
from fi_core.fused_moe import (
    ActivationType,
    CuteDslBf16MoEWrapper,
    RoutingMethodType,
    cute_dsl_fused_moe_bf16,
    cutlass_fused_moe,
    reorder_rows_for_gated_act_gemm,
    trtllm_bf16_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp4_block_scale_moe,
    trtllm_fp4_block_scale_routed_moe,
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from fi_core.gdn_prefill import chunk_gated_delta_rule
from fi_core.gemm import (
    SegmentGEMMWrapper,
    bmm_bf16,
    bmm_fp8,
    bmm_mxfp8,
    mm_bf16,
    mm_bf16_fp4,
    mm_fp4,
    mm_fp8,
    mm_mxfp8,
    prepare_bf16_fp4_weights,
    prepare_low_latency_gemm_weights,
    tinygemm_bf16,
)
from fi_core.grouped_mm import grouped_mm_bf16, grouped_mm_fp4, grouped_mm_fp8, grouped_mm_mxfp8
from fi_core.mla import BatchMLAPagedAttentionWrapper
from fi_core.norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_fp8_block_quant,
    fused_add_rmsnorm_quant,
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
    fused_rmsnorm_silu,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    layernorm_quant,
    rmsnorm,
    rmsnorm_quant,
)
from fi_core.observe.trace import fi_trace
from fi_core.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_append_paged_mla_kv_cache,
)
from fi_core.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from fi_core.prefill import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_fmha_v2_prefill,
)
from fi_core.quantization import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    SfLayout,
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    fp4_quantize,
    get_shuffle_block_size,
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp4_quantize,
    mxfp8_dequantize_host,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    nvfp4_batched_quantize,
    nvfp4_block_scale_interleave,
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize,
    packbits,
    per_token_group_quant_8bit,
    resolve_nvfp4_4over6,
    scaled_fp4_grouped_quantize,
    segment_packbits,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
    silu_and_mul_nvfp4_quantize,
)
from fi_core.registry import loaded_kernels, supports
from fi_core.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    fused_qk_rmsnorm_rope,
)
from fi_core.runtime.invariance import batch_invariant
from fi_core.sampling import (
    cake_top_k_top_p_sampling_from_probs,
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sample_from_logits,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_prob,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_prob,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from fi_core.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from fi_core.topk import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform
from fi_core.topk_varlen import top_k_varlen

__all__ = [
    "ActivationType",
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "CuteDslBf16MoEWrapper",
    "MeasurementPolicy",
    "MultiLevelCascadeAttentionWrapper",
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "PODWithPagedKVCacheWrapper",
    "RoutingMethodType",
    "SegmentGEMMWrapper",
    "SfLayout",
    "TopKTieBreak",
    "VariableBlockSparseAttentionWrapper",
    "__git_commit__",
    "__git_version__",
    "__version__",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
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
    "autotune",
    "autotune_v2",
    "autotune_v2_reload",
    "batch_invariant",
    "block_scale_interleave",
    "bmm_bf16",
    "bmm_fp8",
    "bmm_mxfp8",
    "cake_top_k_top_p_sampling_from_probs",
    "chain_speculative_sampling",
    "chunk_gated_delta_rule",
    "compute_paged_mqa_logits_schedule",
    "concat_mla_k",
    "cudnn_batch_decode_with_kv_cache",
    "cute_dsl_fused_moe_bf16",
    "cutlass_fused_moe",
    "e2m1_and_ufp8sf_scale_to_float",
    "fast_decode_plan",
    "fi_trace",
    "fp4_quantize",
    "fp8_paged_mqa_logits",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "get_shuffle_block_size",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "grouped_mm_bf16",
    "grouped_mm_fp4",
    "grouped_mm_fp8",
    "grouped_mm_mxfp8",
    "layernorm",
    "layernorm_quant",
    "loaded_kernels",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_block_table_width",
    "min_p_sampling_from_probs",
    "mm_bf16",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_fp8",
    "mm_mxfp8",
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
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
    "packbits",
    "padded_seq_len",
    "per_token_group_quant_8bit",
    "prepare",
    "prepare_bf16_fp4_weights",
    "prepare_low_latency_gemm_weights",
    "reorder_rows_for_gated_act_gemm",
    "resolve_nvfp4_4over6",
    "rmsnorm",
    "rmsnorm_quant",
    "sample_from_logits",
    "sampling_from_logits",
    "sampling_from_probs",
    "scaled_fp4_grouped_quantize",
    "segment_packbits",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul",
    "silu_and_mul_nvfp4_quantize",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "softmax",
    "supports",
    "tinygemm_bf16",
    "top_k",
    "top_k_mask_logits",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_k_varlen",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fmha_v2_prefill",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "xqa",
]

__git_commit__: str
__git_version__: str
__version__: str
