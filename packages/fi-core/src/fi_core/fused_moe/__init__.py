"""Mixture of experts: routing, the experts of a layer, and the layouts in which expert weights are stored."""

from __future__ import annotations

from fi_core.fused_moe.backend_configs import (
    CutlassBf16Config,
    CutlassFp8BlockConfig,
    CutlassFp8PerTensorConfig,
    CutlassHummingConfig,
    CutlassW4A8Config,
    CutlassW4A16Config,
)
from fi_core.fused_moe.configs import (
    GELU,
    ActivationConfig,
    ExecutionConfig,
    ExpertConfig,
    GeGLU,
    GeGLUTanh,
    Identity,
    MoEFinalizeConfig,
    QuantConfig,
    ReLU,
    ReLU2,
    RoutingConfig,
    SiLU,
    SiTU,
    SwiGLU,
    SwiGLUStep,
)
from fi_core.fused_moe.configured_layer import (
    BackendOptions,
    MoEActivationPack,
    MoEConfig,
    MoELayer,
    MoEWeightPack,
)
from fi_core.fused_moe.core import (
    convert_to_block_layout,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
    reorder_rows_for_gated_act_gemm,
)
from fi_core.fused_moe.cutlass import cutlass_fused_moe
from fi_core.fused_moe.expert_lora import ExpertLora
from fi_core.fused_moe.interleaved import CuteDslBf16MoEWrapper, cute_dsl_fused_moe_bf16
from fi_core.fused_moe.moe_lora_delta import bgmv_moe_gemm1_lora_delta, bgmv_moe_gemm2_lora_delta
from fi_core.fused_moe.one_call import (
    alloc_scratchpad,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
)
from fi_core.fused_moe.pair_lora import (
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_shrink,
    fill_w_ptr,
    has_bgmv_moe,
    prepare_bgmv_moe,
)
from fi_core.fused_moe.routing import fused_topk_deepseek, hash_topk
from fi_core.fused_moe.trtllm_bf16 import trtllm_bf16_moe, trtllm_bf16_routed_moe
from fi_core.fused_moe.trtllm_fp4 import trtllm_fp4_block_scale_moe, trtllm_fp4_block_scale_routed_moe
from fi_core.fused_moe.trtllm_fp8 import (
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from fi_core.fused_moe.workspace import cutlass_fused_moe_workspace_size
from fi_core.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    GatedActType,
    QuantFormat,
    RoutingInputMode,
    RoutingMethodType,
    WeightLayout,
    is_gated_activation,
)

__all__ = [
    "CuteDslBf16MoEWrapper",
    "cute_dsl_fused_moe_bf16",
    "ActivationConfig",
    "ExecutionConfig",
    "ExpertConfig",
    "ExpertLora",
    "GELU",
    "GeGLU",
    "GeGLUTanh",
    "Identity",
    "MoEFinalizeConfig",
    "QuantConfig",
    "ReLU",
    "ReLU2",
    "RoutingConfig",
    "SiLU",
    "SiTU",
    "SwiGLU",
    "SwiGLUStep",
    "CutlassBf16Config",
    "CutlassFp8BlockConfig",
    "CutlassFp8PerTensorConfig",
    "CutlassHummingConfig",
    "CutlassW4A8Config",
    "CutlassW4A16Config",
    "BackendOptions",
    "MoEActivationPack",
    "MoEConfig",
    "MoELayer",
    "MoEWeightPack",
    "RoutingInputMode",
    "ActivationType",
    "Fp8QuantizationType",
    "GatedActType",
    "QuantFormat",
    "RoutingMethodType",
    "WeightLayout",
    "alloc_scratchpad",
    "bgmv_moe",
    "bgmv_moe_expand",
    "bgmv_moe_gemm1_lora_delta",
    "bgmv_moe_gemm2_lora_delta",
    "bgmv_moe_shrink",
    "convert_to_block_layout",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "fill_w_ptr",
    "fused_topk_deepseek",
    "get_scratchpad_size_bytes",
    "has_bgmv_moe",
    "has_monomoe",
    "hash_topk",
    "interleave_for_tma_wgmma_up",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "is_gated_activation",
    "mono_moe",
    "prepare_bgmv_moe",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
    "reorder_rows_for_gated_act_gemm",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
]
