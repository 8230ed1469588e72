"""Presets by name: the measured cases of each kernel family, and the shapes of served models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fi_bench import shapes
from fi_bench.errors import UsageError, did_you_mean

TREES = "trees"  # the default of `compare-trees`
_GB = 1e9
_VARIED = (
    "2733,2608,1654,3265,4932,4860,5828,7528,1034,7892,4374,5875,5925,6744,7239,7641,6745,3469,6459,706,7655,2600,"
    "2136,2223,7769,2898,1702,538,2894,6217,6922,6037,2164,5073,4852,7878,2047,1872,7600,2497,6995,100,2009,7346,756,"
    "798,660,3220,7055,424,7457,8130,3338,2746,4736,545,6688,715,2293,152,2724,6655,3532,2931"
)  # 64 draws from [1, 8192]


class Preset(NamedTuple):
    """Test lines under a name."""

    about: str
    lines: Callable[[], Iterator[str]]


def _decode(tag: str, flags: str, heads: str = "32/8", page: int = 16, dim: int = 128) -> str:
    qo, kv = heads.split("/")
    return (
        f"--case_tag {tag} --routine BatchDecodeWithPagedKVCacheWrapper --backends auto {flags} --num_qo_heads {qo} "
        f"--num_kv_heads {kv} --head_dim_qk {dim} --head_dim_vo {dim} --page_size {page}"
    )


def _prefill(tag: str, flags: str, heads: str = "32/8", dims: str = "128/128", ragged: bool = False) -> str:
    (qo, kv), (dim_qk, dim_vo) = heads.split("/"), dims.split("/")
    keys = "" if ragged else " --page_size 16"
    return (
        f"--case_tag {tag} --routine BatchPrefillWith{'Ragged' if ragged else 'Paged'}KVCacheWrapper --backends auto "
        f"{flags} --num_qo_heads {qo} --num_kv_heads {kv} --head_dim_qk {dim_qk} --head_dim_vo {dim_vo}{keys} --causal"
    )


def decode() -> Iterator[str]:
    yield _decode("D1", "--batch_size 16 --s_kv 1024")
    yield _decode("D2", "--batch_size 64 --s_kv 1024")
    yield _decode("D3", "--batch_size 1 --s_kv 8192")
    yield _decode("D4", "--batch_size 16 --s_kv 8192")
    yield _decode("D5", "--batch_size 128 --s_kv 8192", "64/8")
    yield _decode("D6", "--batch_size 64 --s_kv 8192", "32/32")
    yield _decode("D7", "--case " + ",".join(f"1@{n}" for n in _VARIED.split(",")))
    yield _decode("D8", "--batch_size 2 --s_kv 131072")
    yield _decode("D9", "--batch_size 64 --s_kv 8192 --kv_dtype fp8_e4m3")


def decode_more() -> Iterator[str]:
    for page in (1, 4, 8, 64):
        yield _decode(f"page{page}", "--batch_size 16 --s_kv 8192", page=page)
    yield _decode("hnd", "--batch_size 16 --s_kv 8192 --kv_layout HND")
    yield _decode("b4", "--batch_size 4 --s_kv 4096")
    yield _decode("b1_1k", "--batch_size 1 --s_kv 1024")
    yield _decode("b1_1k_mqa", "--batch_size 1 --s_kv 1024", "8/1")
    yield _decode("b1_1k_fp8", "--batch_size 1 --s_kv 1024 --kv_dtype fp8_e4m3")
    yield _decode("b256_512", "--batch_size 256 --s_kv 512")
    yield _decode("mqa", "--batch_size 64 --s_kv 8192", "8/1")
    yield _decode("b64_1k_fp8", "--batch_size 64 --s_kv 1024 --kv_dtype fp8_e4m3")
    yield _decode("b1_32k_fp8", "--batch_size 1 --s_kv 32768 --kv_dtype fp8_e4m3")
    yield _decode("spec4", "--batch_size 16 --s_qo 4 --s_kv 8192")
    yield _decode("d64", "--batch_size 32 --s_kv 8192", dim=64)
    yield _decode("d256", "--batch_size 16 --s_kv 8192", dim=256)


def _decode_grid(least_gb: float, most_gb: float) -> Callable[[], Iterator[str]]:
    """Batch sizes, lengths, heads, data types and page sizes whose caches take a number of GB."""

    def lines() -> Iterator[str]:
        axes = (
            (512, 1024, 4096, 8192, 32768, 131072),
            ("32/8", "64/8", "32/32", "28/4", "8/1"),
            ("bfloat16", "fp8_e4m3"),
            (1, 16, 64),
        )
        for kv_len, heads, dtype, page in itertools.product(*axes):
            token = 2 * int(heads.partition("/")[2]) * 128 * (2 if dtype == "bfloat16" else 1)
            batches = [b for b in (1, 4, 16, 64, 128, 256) if least_gb < b * kv_len * token / _GB <= most_gb]
            if batches:
                several = ",".join(map(str, batches))
                yield _decode("grid", f"--batch_size {several} --s_kv {kv_len} --kv_dtype {dtype}", heads, page)

    return lines


def prefill() -> Iterator[str]:
    yield _prefill("P1", "--batch_size 16 --s_qo 1024 --s_kv 1024")
    yield _prefill("P2", "--batch_size 4 --s_qo 4096 --s_kv 4096")
    yield _prefill("P3", "--batch_size 1 --s_qo 16384 --s_kv 16384")
    yield _prefill("P4", "--batch_size 1 --s_qo 512 --s_kv 512")
    yield _prefill("P5", "--batch_size 8 --s_qo 512 --s_kv 8192")
    yield _prefill("R1", "--batch_size 1 --s_qo 16384 --s_kv 16384", ragged=True)
    yield _prefill("R2", "--batch_size 4 --s_qo 4096 --s_kv 4096", "128/128", "192/128", ragged=True)


def prefill_more() -> Iterator[str]:
    fp8 = "--q_dtype fp8_e4m3 --kv_dtype fp8_e4m3 --out_dtype bfloat16"
    one = "--batch_size 1 --s_qo {n} --s_kv {n}"
    short = "--batch_size 128 --s_qo 1024 --s_kv 1024 --random_actual_seq_len"
    yield _prefill("short", short, ragged=True)
    yield _prefill("H1", one.format(n=8192), "16/8", "256/256")
    yield _prefill("H2", one.format(n=8192), "16/8", "256/256", ragged=True)
    yield _prefill("F1", f"{one.format(n=8192)} {fp8}")
    yield _prefill("F2", f"{one.format(n=16384)} {fp8}")
    yield _prefill("F3", f"{one.format(n=16384)} {fp8}", ragged=True)
    yield _prefill("F4", f"--batch_size 16 --s_qo 1024 --s_kv 1024 {fp8}")
    yield _prefill("M1", f"{one.format(n=16384)} --kv_dtype fp8_e4m3")


_SAMPLING = (
    "softmax",
    "sampling_from_logits",
    "sampling_from_probs",
    "top_k_sampling_from_probs",
    "top_p_sampling_from_probs",
    "min_p_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
    "top_k_mask_logits",
)
_DRAWN = (
    "softmax",
    "sampling_from_logits",
    "sampling_from_probs",
    "top_p_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
)


def sampling() -> Iterator[str]:
    """A vocabulary of 128256; logits of standard deviation 1, and 5 for peaked rows."""
    for routine in _SAMPLING:
        rows = "64,1,256" if routine in _DRAWN else "64,1"
        yield f"--routine {routine} --backends auto --batch_size {rows} --vocab_size 128256 --min_p 0.05"
    for routine in _DRAWN:
        yield f"--routine {routine} --backends auto --batch_size 64 --vocab_size 128256 --logits_std 5"


def topk() -> Iterator[str]:
    rows = "--backends auto --batch_size 1,16,64,256 --top_k 64,256,2048 --input_dtype float32,bfloat16"
    lengths = "32768,131072,262144"
    yield f"--routine top_k {rows} --vocab_size {lengths}"
    yield f"--routine top_k {rows} --vocab_size {lengths} --sorted"
    yield f"--routine top_k_ragged_transform {rows} --max_len {lengths}"


def elementwise() -> Iterator[str]:
    for routine in ("rmsnorm", "fused_add_rmsnorm"):
        yield f"--routine {routine} --backends auto --batch_size 1,32,512 --hidden_size 4096"
        yield f"--routine {routine} --backends auto --batch_size 16384 --hidden_size 8192"
    yield "--routine rmsnorm --backends auto --batch_size 16384 --num_heads 32 --hidden_size 128"
    for routine in ("silu_and_mul", "gelu_tanh_and_mul"):
        yield f"--routine {routine} --backends auto --batch_size 32,16384 --hidden_size 14336"
    for routine in ("apply_rope_pos_ids", "apply_llama31_rope_pos_ids", "apply_rope_with_cos_sin_cache"):
        yield (
            f"--routine {routine}_inplace --backends auto --batch_size 1 --seq_len 64,16384,65536 --num_qo_heads 32 "
            "--num_kv_heads 8 --head_dim 128 --input_dtype bfloat16"
        )
    tokens = "64,16384,65536"
    yield f"--routine append_paged_kv_cache --backends auto --zip --batch_size 1 --s_qo {tokens} --s_kv {tokens}"
    yield "--routine merge_state --backends auto --batch_size 16384"


def gemm_grid() -> Iterator[str]:
    """Projections of models by 1 to 8192 rows, eight in each octave; groups of up to 512. The tag names the form."""
    rows = sorted({round(2 ** (i / 8)) for i in range(13 * 8 + 1)})
    all_rows, rows_of_group = (",".join(str(m) for m in rows if m <= most) for most in (8192, 512))
    for n, k in shapes.projections():

        def line(tag: str, routine: str, more: str = f"--m {all_rows}", product: str = f"--n {n} --k {k}") -> str:
            return f"--case_tag {tag} --routine {routine} --backends auto {product} {more}"

        yield line("bf16", "mm_bf16")
        yield line("fp8_weights", "mm_bf16_fp8")
        if n % 16 == 0 and k % 16 == 0:
            yield line("one_scale", "mm_fp8", f"--m {all_rows} --accumulation fp32")  # of peers too
            yield line("rows", "mm_fp8", f"--m {all_rows} --rowwise")
        blocks = n % 128 == 0 and k % 128 == 0
        if blocks:
            yield line("blocks", "gemm_fp8_nt_groupwise")
        if n * k <= 1 << 24:
            groups = f"--m {rows_of_group} --group_size 4,16,64"
            for sizes, more in (("equal", groups), ("random", f"{groups} --random_groups")):
                yield line(f"bf16_groups_{sizes}", "grouped_mm_bf16", more)
                if blocks:
                    yield line(f"blocks_groups_{sizes}", "group_gemm_fp8_nt_groupwise", more)


def gemm_named() -> Iterator[str]:
    """Products that a release may not slow down: tiles with few rows, block scales on eight ranks, fp8 weights."""
    square = "--backends auto --m 129,257,385,513,769 --n 4096,8192 --k 4096,8192"
    yield f"--case_tag few_rows_more --routine mm_bf16 {square}"
    yield f"--case_tag few_rows_more --routine mm_fp8 {square}"
    tokens = "--backends auto --m 1,2,4,8,16,32,64"
    for n, k in shapes.EIGHT_RANKS:
        if n % 128 == 0 and k % 128 == 0:
            yield f"--case_tag eight_ranks --routine gemm_fp8_nt_groupwise {tokens} --n {n} --k {k}"
        yield f"--case_tag eight_ranks_bf16 --routine mm_bf16 {tokens} --n {n} --k {k}"
    yield "--case_tag router_fp32_weights --routine mm_bf16_fp32 --backends auto torch --m 1,4,16 --n 256,384 --k 7168"
    yield "--case_tag few_tokens_fp8_weights --routine mm_bf16_fp8 --backends auto --m 1,16 --n 28672,57344 --k 8192"


_CPU_HEADS = "--num_qo_heads 32 --num_kv_heads 8"
_CPU_DIMS = f"{_CPU_HEADS} --head_dim_qk 128 --head_dim_vo 128"
_CPU_MLA = "--page_size 64 --num_qo_heads 16 --num_kv_heads 16 --head_dim_ckv 512 --head_dim_kpe 64"
_CPU_ROWS, _CPU_VOCAB = "--batch_size 1,3,8,17,64,200", "--vocab_size 5000,32000,128256"
_CPU_FLOATS = "--input_dtype float32,bfloat16,float16"
_CPU_ROPE = f"--batch_size 1 --seq_len 1,17,128,1024 {_CPU_HEADS} --input_dtype bfloat16"
_CPU_EXPERTS = "--num_tokens 1,16,64 --hidden_size 512,1024 --intermediate_size 256,512 --num_experts 16 --top_k 2,4"
_CPU_STATES = "--nheads 16,64 --dim 64 --dstate 128"
_CPU_INDEXER = "--heads 16,64 --top_k 512"
# What torch has too, by sizes that two cores compute in up to 0.1 s. A routine that needs several ranks has no row.
_CPU_GRID = (
    ("rmsnorm gemma_rmsnorm", f"{_CPU_ROWS} --hidden_size 128,1024,2880,4096,7168 {_CPU_FLOATS}"),
    ("fused_add_rmsnorm gemma_fused_add_rmsnorm", f"{_CPU_ROWS} --hidden_size 1024,2880,4096,7168 {_CPU_FLOATS}"),
    ("rmsnorm_quant fused_add_rmsnorm_quant", f"{_CPU_ROWS} --hidden_size 1024,2880,4096,7168"),
    ("layernorm layernorm_quant fused_rmsnorm_silu", f"{_CPU_ROWS} --hidden_size 1024,2880,4096,7168"),
    ("fused_add_rmsnorm_fp8_block_quant", f"{_CPU_ROWS} --hidden_size 1024,4096,7168"),
    ("fused_qk_rmsnorm_rope", "--batch_size 1 --hidden_size 512,1024 --num_heads 4"),
    ("silu_and_mul gelu_and_mul gelu_tanh_and_mul", f"{_CPU_ROWS} --hidden_size 2880,11008,14336 {_CPU_FLOATS}"),
    (" ".join(_SAMPLING), f"--batch_size 1,3,8,17,32,64 {_CPU_VOCAB}"),
    ("chain_speculative_sampling", "--batch_size 1,8 --vocab_size 5000,32000"),
    ("top_k", f"{_CPU_ROWS} {_CPU_VOCAB} --top_k 10,50,1000 --input_dtype float32,bfloat16"),
    ("top_k_page_table_transform top_k_ragged_transform", "--batch_size 1,8,32 --max_len 1000,4096 --top_k 64,512"),
    ("top_k_varlen", "--batch_size 1,8,32 --max_seq_len 1000,4096 --top_k 64,512"),
    ("mm_bf16", "--n 1024,4096,6144 --k 2048,4096,5120 --m 1,2,4,7,16,33,64,128,192,256"),
    ("tinygemm_bf16", "--n 256,1024 --k 1024,4096 --m 1,4,8,16"),
    ("bmm_bf16", "--batch_size 8,32 --m 1,7,64 --n 128,512 --k 128,512"),
    ("grouped_mm_bf16", "--m 1,16,100 --n 1024 --k 1024,2048 --group_size 4,16"),
    ("mm_fp8 mm_mxfp8 mm_fp4 mm_bf16_fp4 mm_bf16_fp8 mm_bf16_fp32", "--m 1,16,100 --n 1024,4096 --k 1024,4096"),
    ("gemm_fp8_nt_groupwise", "--m 1,16,100 --n 1024,4096 --k 1024,4096"),
    ("bmm_fp8 bmm_mxfp8", "--batch_size 4,16 --m 1,16,64 --n 256,1024 --k 256,1024"),
    ("group_gemm_fp8_nt_groupwise", "--m 16,64 --n 1024 --k 1024 --group_size 4 --scale_major_mode K"),
    ("cutlass_fused_moe", _CPU_EXPERTS),
    ("trtllm_fp8_block_scale_moe", f"{_CPU_EXPERTS} --n_group 4 --topk_group 2"),
    ("trtllm_fp4_block_scale_moe", f"{_CPU_EXPERTS} --routing_method renormalize"),
    (
        "trtllm_fp8_per_tensor_scale_moe",
        f"{_CPU_EXPERTS.replace('2,4', '1')} --routing_method llama4 --use_routing_scales_on_input",
    ),
    ("bgmv_moe", f"{_CPU_EXPERTS} --rank 16"),
    ("fused_topk_deepseek", "--num_tokens 1,16,200 --num_experts 64,256 --top_k 8 --n_group 8 --topk_group 4"),
    ("mxfp8_quantize mxfp4_quantize nvfp4_quantize mxfp4_dequantize", "--m 1,32,200 --k 2048,4096,7168"),
    ("block_scale_interleave packbits segment_packbits", "--m 1,32,200 --k 2048,4096,7168"),
    ("nvfp4_batched_quantize", "--batch_size 4 --m 1,32 --k 2048,4096"),
    ("apply_rope apply_rope_inplace apply_rope_pos_ids apply_rope_pos_ids_inplace", f"{_CPU_ROPE} --head_dim 64,128"),
    (
        "apply_llama31_rope apply_llama31_rope_inplace apply_llama31_rope_pos_ids apply_llama31_rope_pos_ids_inplace",
        f"{_CPU_ROPE} --head_dim 64,128",
    ),
    ("apply_rope_with_cos_sin_cache apply_rope_with_cos_sin_cache_inplace", f"{_CPU_ROPE} --head_dim 64,128"),
    (
        "mla_rope_quantize_fp8",
        "--batch_size 1 --seq_len 1,17,128 --num_qo_heads 16 --num_kv_heads 1 --head_dim 64 --no_rope_dim 512 "
        "--input_dtype bfloat16",
    ),
    (
        "rope_quantize_fp8 rope_quantize_fp8_append_paged_kv_cache",
        f"{_CPU_ROPE} --head_dim 128 --rotary_dim 64 --no_rope_dim 64",
    ),
    ("append_paged_kv_cache append_paged_mla_kv_cache", "--batch_size 1,32 --s_qo 1,64 --s_kv 256,1024"),
    ("concat_mla_k get_batch_indices_positions get_seq_lens", "--batch_size 1,32 --s_qo 1,64 --s_kv 256,1024"),
    (
        "nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "--batch_size 1,32 --s_qo 1,64 --s_kv 256",
    ),
    ("merge_state merge_state_in_place merge_states", "--batch_size 1,17,256,2048"),
    ("mhc_post mhc_pre_big_fuse mhc_pre_big_fuse_with_prenorm", "--num_tokens 1,16,128 --hidden_size 2048,7168"),
    ("selective_state_update", f"--batch_size 1,8 {_CPU_STATES} --input_dtype bfloat16"),
    ("ssd_combined_fwd", f"--seq_len 64,256 {_CPU_STATES} --input_dtype bfloat16"),
    ("checkpointing_ssu", f"--batch_size 1,8 --seq_len 4 {_CPU_STATES} --input_dtype bfloat16"),
    ("replayssm_materialize", f"--batch_size 1,8 {_CPU_STATES} --input_dtype bfloat16"),
    (
        "add_lora_linear bgmv_shrink bgmv_expand",
        "--num_tokens 1,16,64 --rank 16 --in_features 1024,4096 --out_features 1024,4096",
    ),
    ("fp8_mqa_logits fp8_indexer_topk", f"--num_rows 1,16,64 --num_keys 1000,4096 {_CPU_INDEXER}"),
    ("fp8_paged_mqa_logits fp8_paged_indexer_topk", f"--batch_size 1,8 --kv_len 1024,4096 {_CPU_INDEXER}"),
    ("flash_mla_sparse_fwd", "--num_rows 1,8 --num_keys 4096 --num_heads 16,64 --top_k 512"),
    ("flash_mla_with_kvcache", "--batch_size 1,8 --kv_len 2048 --num_heads 16,64 --top_k 512 --form bf16,rows,packed"),
    ("append_sparse_mla_kv_cache", "--num_tokens 1,64,1024"),
    ("causal_conv1d_fn", "--batch_size 1,4 --seq_len 16,256 --dim 1024,2048 --input_dtype float32,bfloat16"),
    ("causal_conv1d_update", "--batch_size 1,8,64 --dim 2048,8192 --input_dtype float32,bfloat16"),
    ("gated_delta_rule_decode", "--batch_size 1,8"),
    ("gated_delta_rule_mtp", "--batch_size 1,8 --seq_len 4"),
    ("chunk_gated_delta_rule recurrent_kda_prefill", "--batch_size 1 --s_qo 64,256"),
    ("single_decode_with_kv_cache", f"--s_kv 100,1000,8000 {_CPU_DIMS}"),
    (
        "single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse",
        f"--zip --s_qo 17,128,1024,200 --s_kv 17,1000,1024,200 {_CPU_DIMS} --causal",
    ),
    ("BatchDecodeWithPagedKVCacheWrapper", f"--page_size 16 {_CPU_DIMS} --batch_size 1,8,32 --s_kv 128,1024"),
    (
        "BatchPrefillWithPagedKVCacheWrapper",
        f"--page_size 16 {_CPU_DIMS} --batch_size 1,4 --s_qo 16,200 --s_kv 256,1024 --causal",
    ),
    (
        "BatchPrefillWithRaggedKVCacheWrapper",
        f"{_CPU_DIMS} --batch_size 1,4 --s_qo 16,200 --s_kv 256,1024 --causal",
    ),
    (
        "BatchMLAPagedAttentionWrapper trtllm_batch_decode_with_kv_cache_mla",
        f"{_CPU_MLA} --batch_size 1,8 --s_kv 256,2048",
    ),
)


def cpu_grid() -> Iterator[str]:
    """Every routine that torch computes too, beside torch."""
    for routines, flags in _CPU_GRID:
        for routine in routines.split():
            yield f"--case_tag {routine} --routine {routine} --backends auto torch {flags}"


def trees() -> Iterator[str]:
    """What must not become slower: attention, sampling and elementwise kernels."""
    yield from decode()
    yield from prefill()
    for routine in _SAMPLING:
        yield f"--routine {routine} --backends auto --batch_size 64,1 --vocab_size 128256"
    yield "--routine top_k --backends auto --batch_size 16 --vocab_size 131072 --top_k 256"
    yield from elementwise()


def tiny() -> Iterator[str]:
    """A case of each family that a CPU does in milliseconds: to try a command."""
    yield "--case_tag norm --routine rmsnorm --backends auto --batch_size 8 --hidden_size 256"
    yield "--case_tag activation --routine silu_and_mul --backends auto --batch_size 8 --hidden_size 256"
    yield _decode("decode", "--batch_size 2 --s_kv 32", "4/2", dim=64)
    yield _prefill("prefill", "--batch_size 2 --s_qo 8 --s_kv 32", "4/2", "64/64")
    rows = "--backends auto --batch_size 2 --vocab_size 1000"
    yield f"--case_tag sampling --routine top_k_top_p_sampling_from_logits {rows}"
    yield f"--case_tag topk --routine top_k {rows} --top_k 10"


PRESETS = {
    "decode": Preset("batch decode, D1-D9", decode),
    "decode-more": Preset("batch decode: page sizes, layouts, head dims, fp8, four query tokens", decode_more),
    "decode-grid": Preset("batch decode: all shapes whose caches take up to 8 GB; use with --draw", _decode_grid(0, 8)),
    "decode-grid-large": Preset("batch decode: all shapes whose caches take 8 to 60 GB", _decode_grid(8, 60)),
    "prefill": Preset("batch prefill, P1-P5 paged, R1 and R2 ragged", prefill),
    "prefill-more": Preset("batch prefill: many short requests, head dim 256, fp8", prefill_more),
    "gemm-grid": Preset("products of models' projections by 1 to 8192 rows, and groups; use with --draw", gemm_grid),
    "gemm-named": Preset("products that may not become slower: few rows in the last tile, eight ranks", gemm_named),
    "sampling": Preset("sampling, softmax and renormalisation", sampling),
    "topk": Preset("top-k of 1 to 256 rows", topk),
    "elementwise": Preset("norm, activation, rope, page append, merge of attention states", elementwise),
    "cpu-grid": Preset("what torch has too, in sizes for a CPU, beside torch; use with --draw --device cpu", cpu_grid),
    TREES: Preset("decode, prefill, sampling, elementwise: what `compare-trees` measures", trees),
    "tiny": Preset("one small case per family, also for a CPU", tiny),
}


def names() -> list[str]:
    return [*PRESETS, *shapes.names()]


def about(name: str) -> str:
    if name in PRESETS:
        return PRESETS[name].about
    return shapes.PHASES[name.rsplit("-", 1)[1]]


def preset_lines(name: str, routine: str | None = None) -> list[list[str]]:
    """The test lines of a preset, or those of one routine."""
    if name not in names():
        raise UsageError(
            f"unknown preset {name!r}{did_you_mean(name, names()) or '; `fi-bench list presets` shows all'}"
        )
    lines = PRESETS[name].lines() if name in PRESETS else shapes.lines(name)
    typed = [line.split() for line in lines]
    found = [line for line in typed if routine in (None, routine_of(line))]
    if not found:
        has = ", ".join(sorted({routine_of(line) for line in typed}))
        raise UsageError(f"--preset {name} has no line for routine {routine!r}; it has {has}")
    return found


def routine_of(line: list[str]) -> str:
    return line[line.index("--routine") + 1]
