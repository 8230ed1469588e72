"""The layouts in which a function of FlashInfer may be called, and what becomes of each: honoured, or refused.

`tests/families/test_layouts.py` calls every row with every backend name of the function.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple


class Row(NamedTuple):
    """One layout of an argument of a function."""

    function: str  # below fi_core
    layout: str
    refusal: str = ""  # words of the error, which say what to pass instead; "": it is honoured
    backends: tuple[str, ...] = ()  # the backend names of which it is true; (): all of the function
    shuffled: bool = False  # it is also true of backend "trtllm", with weights that `shuffle_matrix_a` made


_QUANTIZERS = ("cuda", "cute-dsl")
_FP4 = ("auto", "cudnn", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x", "cake")
_MXFP8 = ("auto", "cutlass", "cute-dsl", "cutedsl_low_latency", "cudnn", "b12x")
TABLE: dict[str, tuple[Row, ...]] = {
    "Matrix products": (
        Row("mm_bf16", "b: a transposed view `[k, n]` of weights `[n, k]`"),
        Row("mm_bf16", "b: contiguous `[k, n]`"),
        Row("bmm_bf16", "B: a transposed view `[batch, k, n]`"),
        Row("bmm_bf16", "B: contiguous `[batch, k, n]`"),
        Row("bmm_fp8", "B: a transposed view `[batch, k, n]`"),
        Row("bmm_fp8", "B: contiguous `[batch, k, n]`"),
        Row("mm_fp8", "b: `[n, k]`"),
        Row("mm_fp8", "b: `[k / 128, n, 128]`, from `prepare_low_latency_gemm_weights`"),
        Row("mm_fp4", "scales: matrices in the 128x4 layout", backends=_FP4),
        Row("mm_fp4", "scales: in the 128x4 layout; weights: shuffled, of which both come", backends=("trtllm",)),
        Row("mm_fp4", "a_descale: in the 8x4 layout, with use_8x4_sf_layout", shuffled=True, backends=_FP4),
        Row("mm_fp4", "scales: rows of a shape that no tiles have", backends=_FP4),
        Row("mm_fp4", "scales: rows of a shape that tiles have too are read as tiles", backends=_FP4),
        Row("mm_fp4", "b_descale: `[n, k / block]`, not transposed", "b_descale must be contiguous in the order of b"),
        Row("mm_fp4", "weights: shuffled, n no multiple of 128", "n a multiple of 128", backends=("trtllm",)),
        Row("mm_mxfp8", "scales: flat in the 128x4 layout", backends=_MXFP8),
        Row("mm_mxfp8", "scales: flat in the 128x4 layout; weights: shuffled, and their scales", backends=("trtllm",)),
        Row("mm_mxfp8", "a_descale: flat in the 8x4 layout, with use_8x4_sf_layout", shuffled=True, backends=_MXFP8),
        Row("mm_mxfp8", "scales: rows of a shape that no tiles have", backends=_MXFP8),
        Row("mm_mxfp8", "scales: a matrix whose shape rows and tiles have", "pass it flat in that", backends=_MXFP8),
        Row("mm_mxfp8", "scales: a matrix", "must be flat in a swizzled layout", backends=("trtllm",)),
        Row("mm_mxfp8", "scales: flat rows", "must have shape [20, 4], or [128, 4] in layout", backends=_MXFP8),
        Row("bmm_mxfp8", "scales: flat, all rows of the batch as one matrix in the 128x4 layout"),
        Row("bmm_mxfp8", "scales: `[batch, rows, columns]`, tiles of each matrix"),
        Row("bmm_mxfp8", "scales: rows of a shape that no tiles have"),
        Row("bmm_mxfp8", "scales: flat, of a length that fits both ways to pad", "must have shape [2, 128, 4]"),
        Row("grouped_mm_fp4", "scales: matrices in the 128x4 layout"),
        Row("grouped_mm_fp4", "scales: rows of a shape that no tiles have"),
        Row("grouped_mm_mxfp8", "scales: matrices in the 128x4 layout, where rows have that shape too"),
        Row("grouped_mm_mxfp8", "scales: rows, with sf_layout"),
        Row("grouped_mm_mxfp8", "scales: rows, without", "`block_scale_interleave` makes that of rows"),
        Row("mm_bf16_fp4", "b_descale: a matrix in the 128x4 layout"),
        Row("mm_bf16_fp4", "b_descale: rows of a shape that no tiles have"),
        Row("gemm.gemm_fp8_nt_groupwise", 'scales: `[rows, k / 128]`, scale_major_mode "K"'),
        Row("gemm.gemm_fp8_nt_groupwise", 'scales: `[k / 128, rows]`, scale_major_mode "MN"'),
        Row("gemm.gemm_fp8_nt_groupwise", "scales: `[k / 128, rows]`, no scale_major_mode", backends=("trtllm",)),
        Row("gemm.gemm_fp8_nt_groupwise", "scales: no scale_major_mode", 'must be "K" or "MN"',
            backends=("cutlass", "cutile", "auto")),
        Row("gemm.group_gemm_fp8_nt_groupwise", 'scales: `[rows, k / 128]`, scale_major_mode "K"'),
        Row("gemm.group_gemm_fp8_nt_groupwise", 'scales: `[k / 128, rows]`, scale_major_mode "MN"'),
        Row("SegmentGEMMWrapper", "weights: `[.., d_out, d_in]`, weight_column_major"),
        Row("SegmentGEMMWrapper", "weights: `[.., d_in, d_out]`, not weight_column_major"),
    ),
    "Quantizers": (
        *(Row("nvfp4_quantize", f"sfLayout: {name}", backends=_QUANTIZERS)
          for name in ("layout_128x4", "layout_8x4", "layout_linear")),
        Row("nvfp4_quantize", "rows: shuffled, do_shuffle", backends=_QUANTIZERS),
        *(Row("mxfp4_quantize", f"sfLayout: {name}", backends=_QUANTIZERS)
          for name in ("layout_128x4", "layout_8x4", "layout_linear")),
        *(Row("mxfp8_quantize", f"sf_swizzle_layout: {name}", backends=_QUANTIZERS)
          for name in ("layout_128x4", "layout_8x4", "layout_linear")),
        *(Row("fp4_quantize", f"flags: {name}", backends=_QUANTIZERS)
          for name in ("is_sf_swizzled_layout", "is_sf_8x4_layout", "neither")),
        Row("fp4_quantize", "input: a transposed view `[k, m]`, as the results are then", backends=_QUANTIZERS),
    ),
    "Mixtures of experts": (
        Row("fused_moe.trtllm_bf16_moe", "weights: MajorK, rows in order"),
        Row("fused_moe.trtllm_bf16_moe", "weights: MajorK, rows shuffled"),
        Row("fused_moe.trtllm_bf16_moe", "weights: BlockMajorK, rows shuffled"),
        Row("fused_moe.trtllm_bf16_moe", "weights: MajorMn", "use MajorK or BlockMajorK"),
        Row("fused_moe.trtllm_fp8_block_scale_moe", "weights: MajorK, rows in order"),
        Row("fused_moe.trtllm_fp8_block_scale_moe", "weights: BlockMajorK, rows shuffled"),
        Row("fused_moe.trtllm_fp8_block_scale_moe", "weights: MajorMn", "use MajorK or BlockMajorK"),
        Row("fused_moe.trtllm_fp8_block_scale_moe", "hidden_states_scale: `[tokens, hidden / 128]`",
            "hidden_states_scale must have shape [2, 37]"),
        *(Row("fused_moe.trtllm_fp4_block_scale_moe", f"weights: {name}, rows shuffled; scales: 128x4, rows shuffled")
          for name in ("NVFP4", "MXFP4")),
        Row("fused_moe.trtllm_fp4_block_scale_moe", "weights: NVFP4 in blocks `[experts, k / b, n, b / 2]`",
            "gemm1_weights must have shape [experts, n, k / 2]"),
        Row("fused_moe.trtllm_fp4_block_scale_moe", "hidden_states_scale: `[tokens, hidden / 16]` of NVFP4"),
        Row("fused_moe.trtllm_fp4_block_scale_moe", "hidden_states_scale: `[tokens, hidden / 32]` of MXFP8"),
        Row("fused_moe.trtllm_fp4_block_scale_moe",
            "hidden_states_scale: `[tokens, hidden / 16]`, hidden_states_scale_layout: layout_linear"),
        Row("fused_moe.trtllm_fp4_block_scale_moe",
            "hidden_states_scale: in the 128x4 layout, hidden_states_scale_layout: layout_128x4",
            "hidden_states_scale_layout must be layout_linear"),
        Row("fused_moe.trtllm_fp4_block_scale_moe", "hidden_states_scale: in the 128x4 layout, not told",
            "hidden_states_scale must have shape [37, 16] in layout_linear"),
        Row("fused_moe.trtllm_fp4_block_scale_moe", "scales: flat, of a size that blocks of 16 and of 32 have",
            "gemm1_weights_scale must have shape [experts, n, k / block]"),
        Row("cute_dsl_fused_moe_bf16", "w1_weight: 32 linear rows, then the 32 of their gates"),
        Row("fused_moe.trtllm_fp8_per_tensor_scale_moe", "weights: MajorK, rows shuffled"),
        Row("fused_moe.trtllm_fp8_per_tensor_scale_moe", "weights: BlockMajorK, rows shuffled",
            "gemm1_weights must have shape [experts, n, k]"),
    ),
    "Caches and page tables": (
        *(Row("append_paged_kv_cache", f"cache: {form}, {layout}")
          for form in ("a tuple", "one tensor", "one strided tensor") for layout in ("NHD", "HND")),
        *(Row("BatchDecodeWithPagedKVCacheWrapper", f"cache: {form}, {layout}", backends=("auto", "fa2"))
          for form in ("a tuple", "one tensor") for layout in ("NHD", "HND")),
        Row("BatchDecodeWithPagedKVCacheWrapper", "cache: another kv_layout", "allowed are NHD, HND",
            backends=("auto",)),
        *(Row("append_paged_kv_cache", f"kv_indices: {text}", words)
          for text, words in (("int64, and kv_indptr", ""), ("longer than kv_indptr tells", ""),
                              ("outside of the cache", "must name pages of the cache"))),
        *(Row("BatchDecodeWithPagedKVCacheWrapper", f"kv_indices: {text}", backends=("auto", "fa2"))
          for text in ("int64, and kv_indptr", "longer than kv_indptr tells")),
        *(Row("BatchDecodeWithPagedKVCacheWrapper", f"kv_cache_sf: {form}, {layout}", backends=("auto", "fa2"))
          for form in ("tuples", "one tensor") for layout in ("NHD", "HND")),
        *(Row(function, f"cache and kv_cache_sf: {form}, {layout}") for form in ("tuples", "one tensor each")
          for layout in ("NHD", "HND")
          for function in ("nvfp4_quantize_append_paged_kv_cache", "nvfp4_kv_dequantize_paged")),
        Row("nvfp4_kv_dequantize_paged", "block_tables: int64"),
        *(Row("nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", f"slot_mapping: {text}")
          for text in ("a slot of each row", "longer than the rows", "shorter than the rows, whose rest is left out")),
        Row("append_paged_mla_kv_cache", "caches: views of one tensor"),
        Row("append_paged_mla_kv_cache", "caches: tensors of their own"),
        *(Row("mla.BatchMLAPagedAttentionWrapper", text, backends=("auto", "fa2"))
          for text in ("caches: views of one tensor", "caches: tensors of their own",
                       "kv_indices: longer than kv_indptr tells")),
        Row("mla.trtllm_batch_decode_with_kv_cache_mla", "cache: `[pages, page_size, 576]`", backends=("auto",)),
        Row("mla.trtllm_batch_decode_with_kv_cache_mla", "cache: `[pages, 1, page_size, 576]`", backends=("auto",)),
        Row("mla.trtllm_batch_decode_with_kv_cache_mla", "block_tables: wider, with -1 behind the pages",
            backends=("auto",)),
        Row("mla.trtllm_batch_decode_with_kv_cache_mla", "block_tables: int64", "must be int32", backends=("auto",)),
        Row("mla.trtllm_batch_decode_with_kv_cache_mla", "block_tables: `[batch, 2, pages]`",
            "[batch_size, max_pages]", backends=("auto",)),
        *(Row("flash_mla.flash_mla_with_kvcache", f"k_cache: {text}", words)
          for text, words in (("16-bit rows", ""), ("rows of 656 bytes", ""),
                              ("rows of 656 bytes, pages a multiple of a row apart", ""),
                              ("rows of 656 bytes, pages apart by other sizes",
                               "pages at a multiple of the distance of tokens"),
                              ("packed pages, 584 bytes a token", ""),
                              ("packed pages, 584 bytes a token, pages apart", ""))),
        Row("flash_mla.flash_mla_with_kvcache", "indices: int64, 16-bit rows", "torch.int32"),
    ),
    "Sampling": (
        Row("sampling_from_probs", "indices: the row of probs of each sample"),
        Row("sampling_from_probs", "indices: int64"),
        Row("sampling_from_probs", "probs: rows of a wider tensor"),
        *(Row(function, text) for function in ("top_k_renorm_probs", "top_p_renorm_probs")
          for text in ("probs: contiguous rows", "probs: rows of a wider tensor", "threshold: a tensor of the rows")),
        *(Row(function, text, words) for function in ("top_k_renorm_probs", "top_p_renorm_probs")
          for text, words in (("probs: a transposed view", "innermost stride must be 1"),
                              ("threshold: a tensor of another length", "one element for each of the 3 rows"))),
        Row("top_k_page_table_transform", "row_to_batch: the row of the page table of each row"),
        Row("top_k_page_table_transform", "row_starts and page_table_row_starts"),
        Row("top_k_page_table_transform", "row_starts alone, of pages of several tokens",
            "page_table_row_starts is required with row_starts"),
        Row("top_k_ragged_transform", "row_starts"),
    ),
}  # fmt: skip


def backends(row: Row) -> tuple[str, ...]:
    """The backend names with which a row is called; one empty name where the function has none."""
    if row.backends:
        return (*row.backends, *(("trtllm",) if row.shuffled else ()))
    module, _, name = f"fi_core.{row.function}".rpartition(".")
    home = vars(importlib.import_module("fi_core"))["_HOME"].get(name, module) if module == "fi_core" else module
    query = getattr(vars(importlib.import_module(home))[name], "is_backend_supported", None)  # without torch
    return tuple(query.__self__.backends) or ("",) if query else ("",)
