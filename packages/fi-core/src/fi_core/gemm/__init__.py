"""Matrix products of tokens and weights: dense, batched and grouped, in 16 and 8 bits."""

from __future__ import annotations

from fi_core.gemm.block_scaled import bmm_mxfp8, mm_bf16_fp4, mm_fp4, mm_mxfp8, prepare_bf16_fp4_weights
from fi_core.gemm.dense import bmm_bf16, bmm_fp8, mm_bf16, mm_fp8, prepare_low_latency_gemm_weights, tinygemm_bf16
from fi_core.gemm.fp32_weights import mm_bf16_fp32
from fi_core.gemm.groupwise import (
    batch_deepgemm_fp8_nt_groupwise,
    fp8_blockscale_gemm_sm90,
    gemm_fp8_nt_blockscaled,
    gemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
)
from fi_core.gemm.ragged import gemm_alpha_beta, masked_bmm, ragged_bmm
from fi_core.gemm.router import (
    mm_M1_16_K6144_N256,
    mm_M1_16_K7168_N128,
    mm_M1_16_K7168_N256,
    mm_M1_16_K7168_N256_bf16,
    mm_M1_16_K7168_N384,
    mm_M1_16_K7168_N384_bf16,
    mm_M1_16_K7168_N896,
    mm_M1_16_K7168_N896_bf16,
)
from fi_core.gemm.segment import SegmentGEMMWrapper
from fi_core.gemm.weight_only import (
    mm_bf16_fp8,
    mm_bf16_fp8_workspace_bytes,
    mm_fp16_fp8,
    mm_fp16_fp8_workspace_bytes,
)

__all__ = [
    "SegmentGEMMWrapper",
    "batch_deepgemm_fp8_nt_groupwise",
    "bmm_bf16",
    "bmm_fp8",
    "bmm_mxfp8",
    "fp8_blockscale_gemm_sm90",
    "gemm_alpha_beta",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "masked_bmm",
    "mm_M1_16_K6144_N256",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_bf16",
    "mm_M1_16_K7168_N384",
    "mm_M1_16_K7168_N384_bf16",
    "mm_M1_16_K7168_N896",
    "mm_M1_16_K7168_N896_bf16",
    "mm_bf16",
    "mm_bf16_fp32",
    "mm_bf16_fp4",
    "mm_bf16_fp8",
    "mm_bf16_fp8_workspace_bytes",
    "mm_fp16_fp8",
    "mm_fp16_fp8_workspace_bytes",
    "mm_fp4",
    "mm_fp8",
    "mm_mxfp8",
    "prepare_bf16_fp4_weights",
    "prepare_low_latency_gemm_weights",
    "ragged_bmm",
    "tinygemm_bf16",
]
