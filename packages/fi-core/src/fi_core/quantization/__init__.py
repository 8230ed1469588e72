"""Quantization with block scales to e2m1 and 8 bits, the layouts of the scales, and boolean masks as bits."""

from __future__ import annotations

from fi_core.quantization.four_over_six import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    nvfp4_e4m3_max,
    resolve_nvfp4_4over6,
)
from fi_core.quantization.fp4_quantization import (
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
    nvfp4_batched_quantize,
    nvfp4_block_scale_interleave,
    nvfp4_quantize,
    scaled_fp4_grouped_quantize,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
    silu_and_mul_nvfp4_quantize,
)
from fi_core.quantization.fp8_quantization import (
    mxfp8_dequantize_host,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    per_token_group_quant_8bit,
)
from fi_core.quantization.kv_cache import nvfp4_kv_dequantize, nvfp4_kv_dequantize_paged, nvfp4_kv_quantize
from fi_core.quantization.packbits import packbits, packbits_segments, segment_packbits

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "nvfp4_e4m3_max",
    "resolve_nvfp4_4over6",
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
    "packbits_segments",
    "per_token_group_quant_8bit",
    "scaled_fp4_grouped_quantize",
    "segment_packbits",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
]
