"""The flags of every routine family, as data; the parsers are built from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fi_bench.sweep import batch, choices, finite, integers, reals

DTYPES = ("bfloat16", "float16", "float32", "float64", "fp8_e4m3", "fp8_e5m2", "nvfp4")


@dataclass(frozen=True)
class Flag:
    """One option. kind "switch" stores True; everything else converts each word with `type`."""

    name: str
    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    required: bool = False
    kind: str = "value"  # value | switch | off (stores False under `dest`) | words | axis (words that sweep) | count
    short: str | None = None
    metavar: str | None = None
    dest: str | None = None
    least: int | None = None  # of every value
    most: int | None = None


def number(name: str, default: int | None, help: str, required: bool = False, least: int = 1) -> Flag:
    return Flag(name, help, integers, default, required, metavar="N", least=least)


def real(name: str, default: float | None, help: str) -> Flag:
    return Flag(name, help, reals, default, metavar="X")


def choice(name: str, allowed: tuple[str, ...], default: str | None, help: str, **renamed: str) -> Flag:
    return Flag(name, help, choices(*allowed, renamed=renamed), default, metavar="{" + ",".join(allowed) + "}")


def dtype(name: str, default: str | None, help: str = "data type") -> Flag:
    return choice(name, DTYPES, default, help)


def switch(name: str, help: str) -> Flag:
    return Flag(name, help, default=False, kind="switch")


def _count(text: str) -> Any:
    return text if text == "auto" else int(text)


GENERAL = (
    Flag("routine", "what to time; `fi-bench list routines` shows all", str, short="R", metavar="NAME"),
    Flag("backends", "implementations to time, one row each", str, kind="words", metavar="NAME"),
    Flag(
        "num_iters", "samples, or `auto` to stop when the median is known to 0.5 %%", _count, 30, short="n", metavar="N"
    ),
    Flag("dry_run_iters", "warm-up calls; on a GPU also until its clock is steady", int, 5, short="d", metavar="N"),
    switch("no_cuda_graph", "launch each call instead of replaying a CUDA graph"),
    switch("use_cuda_events", "time with CUDA events (around a graph, or each call) instead of CUPTI"),
    switch("use_cupti", "deprecated: CUPTI is the default"),
    switch("refcheck", "compare outputs with an fp64 reference before timing"),
    switch("allow_output_mismatch", "report a mismatch and go on"),
    Flag("random_seed", "seed of the inputs", int, 42, metavar="N"),
    Flag("verbose", "-v settings and lengths, -vv shapes and statistics", kind="count", default=0, short="v"),
    Flag(
        "output_path", "results: X.csv (with all samples in X.jsonl) or X.jsonl; rows are appended", str, metavar="FILE"
    ),
    Flag("testlist", "file with one set of flags per line", str, metavar="FILE"),
    Flag("case_tag", "free text kept with the rows", str, metavar="TEXT"),
    switch("generate_repro_command", "print and keep the command that repeats each case"),
    Flag("repro_command", "set by --generate_repro_command", str, "", metavar="TEXT"),
    Flag("autotune_cache", "accepted for compatibility; fi-core chooses by the shape", str, metavar="FILE"),
    switch("enable_pdl", "programmatic dependent launch, for routines that support it"),
    Flag(
        "device",
        "where to run: auto = cpu if `cpu` is among the backends or there is no GPU",
        choices("auto", "cpu", "cuda"),
        "auto",
        metavar="{auto,cpu,cuda}",
    ),
    Flag(
        "cache",
        "state of the L2 (last-level) cache before a call: auto = cold on a GPU, warm on a CPU",
        choices("auto", "cold", "warm"),
        "auto",
        metavar="{auto,cold,warm}",
    ),
    Flag(
        "flush",
        "how CUPTI and plain events make the cache cold",
        choices("write", "read"),
        "write",
        metavar="{write,read}",
    ),
    Flag(
        "regime",
        "GPU load between samples: burst = rests of four samples, sustained = none and a longer warm-up; "
        "auto = sustained for calls of a millisecond and more",
        choices("auto", "burst", "sustained"),
        "auto",
        metavar="{auto,burst,sustained}",
    ),
    Flag("trials", "repeat everything in this many processes, one after another, for `compare`", int, 1, metavar="N"),
    switch("isolate", "run each case and backend in its own process, so that a crash costs one row"),
    Flag("timeout", "seconds for one isolated case and backend; implies --isolate", finite, metavar="S"),
    switch("resume", "skip the rows that --output_path already holds"),
    switch("fail_fast", "stop at the first failure"),
    switch("zip", "advance all swept flags together instead of taking their product"),
    Flag("draw", "time only N points of each --case_tag, drawn at random by --random_seed", int, metavar="N"),
    Flag("preset", "cases by name, as `fi-bench list presets` shows them", str, metavar="NAME"),
    Flag(
        "format",
        "what to print at the end, after the [PERF] lines",
        choices("plain", "table", "markdown", "csv", "json"),
        "plain",
        metavar="{plain,table,markdown,csv,json}",
    ),
)

NORM_SHAPE = (
    number("batch_size", None, "rows", required=True),
    number("hidden_size", None, "length of a row", required=True),
)
HEADS = (number("num_qo_heads", None, "query heads", True), number("num_kv_heads", None, "key and value heads", True))

ATTENTION = (
    number("page_size", 0, "tokens per page, for paged routines", least=0),
    number("batch_size", 1, "requests"),
    number("s_qo", 1, "query length"),
    number("s_kv", None, "key and value length; required unless --case is given"),
    Flag(
        "case",
        "batches of unlike requests instead of the three above: mix=8192,32*1@8192 is a prefill of 8192 tokens and "
        "32 decodes at 8192; several are a sweep",
        batch,
        kind="axis",
        metavar="BATCH",
    ),
    *HEADS,
    number("head_dim_qk", None, "head dimension of q and k; 128 if left out"),
    number("head_dim_vo", None, "head dimension of v and the output; that of q if left out"),
    number("head_dim_ckv", None, "MLA: latent dimension"),
    number("head_dim_kpe", None, "MLA: rope dimension"),
    dtype("q_dtype", "bfloat16"),
    dtype("kv_dtype", "bfloat16"),
    dtype("out_dtype", None, "output data type; q's if left out"),
    switch("causal", "lower right triangular mask"),
    choice("spec_dec_mask", ("causal", "full"), "causal", "mask of speculative decode"),
    switch("random_actual_seq_len", "lengths uniform in [1, max] per request"),
    choice("kv_layout", ("NHD", "HND"), "NHD", "axis order of k and v"),
    Flag("window_left", "sliding window; -1 is off", integers, -1, metavar="N"),
    real("logits_soft_cap", 0.0, "soft cap of the logits; 0 is off"),
    switch("autotune", "accepted for compatibility; fi-core chooses by the shape"),
    number("sparse_mla_top_k", 2048, "sparse MLA: cache slots of each query token; rows of 656 bytes with fp8_e4m3"),
    choice("mla_is_var_seq", ("true", "false", "auto"), None, "backends of FlashInfer only"),
    choice("mla_cute_dsl_impl", ("auto", "modular", "monolithic"), None, "backends of FlashInfer only"),
)
GEMM = (
    number("m", None, "rows of a", True),
    number("n", None, "columns of b", True),
    number("k", None, "inner dimension", True),
    number("batch_size", 1, "matrices"),
    number("group_size", 1, "groups"),
    switch("random_groups", "numbers of rows of groups are drawn at random, with a mean of --m"),
    switch("rowwise", "mm_fp8: a scale for each row of both operands, instead of one"),
    number("tile_size", 128, "scale tile"),
    choice("scale_major_mode", ("MN", "K"), "MN", "layout of the scales"),
    dtype("input_dtype", "fp8_e4m3"),
    dtype("mat2_dtype", "fp8_e4m3"),
    dtype("out_dtype", "bfloat16"),
    choice(
        "accumulation",
        ("default", "fast", "fp32"),
        "default",
        "sums of fp8 products with one scale, for fi-core and cublas: fast in the tensor cores over all of k, or fp32; "
        "default is fp32 for fi-core and fast for cublas",
    ),
    Flag("mma_sm", "SMs of one MMA", integers, 1, metavar="{1,2}", least=1, most=2),
    switch("use_128x4_sf_layout", "swizzled scale layout"),
    switch("use_nvfp4", "nvfp4 instead of mxfp4"),
    switch("bias", "add a bias"),
    switch("autotune", "accepted for compatibility; fi-core chooses by the shape"),
)
ROUTING_SKEW = real("routing_skew", 0.0, "the n-th most popular expert has n ** -X of the first's tokens; 0 is even")
MOE = (
    number("num_tokens", None, "tokens", True),
    number("hidden_size", None, "model dimension", True),
    number("intermediate_size", None, "expert dimension", True),
    number("num_experts", None, "experts", True),
    number("top_k", None, "experts per token", True),
    dtype("input_dtype", "bfloat16"),
    dtype("weight_dtype", "bfloat16"),
    number("n_group", None, "expert groups"),
    number("topk_group", None, "groups per token"),
    real("routed_scaling_factor", 2.5, "factor of the routed output"),
    number("local_expert_offset", 0, "first expert of this rank", least=0),
    number("local_num_experts", None, "experts of this rank"),
    choice(
        "routing_method",
        ("renormalize", "deepseek_v3", "llama4", "renormalize_naive", "topk"),
        "deepseek_v3",
        "how experts are chosen",
    ),
    switch("use_shuffled_weight", "shuffled weights"),
    number("weight_layout", 0, "0, 1 or 2", least=0),
    switch("use_routing_bias", "bias in the routing"),
    switch("use_routing_scales_on_input", "scale before the experts"),
    Flag("activation_type", "activation", str, "Swiglu", metavar="NAME"),
    choice("fp4_mode", ("nvfp4", "mxfp4_mxfp8", "mxfp4_bf16"), "nvfp4", "fp4 format"),
    choice(
        "cutlass_variant",
        ("base", "fp8", "nvfp4", "fp8_block_scale", "mxfp4"),
        "base",
        "weights of cutlass_fused_moe",
    ),
    ROUTING_SKEW,
    switch("quantized_input", "input already quantised"),
    number("tp_size", 1, "tensor parallel size"),
    number("tp_rank", 0, "tensor parallel rank", least=0),
    number("ep_size", 1, "expert parallel size"),
    number("ep_rank", 0, "expert parallel rank", least=0),
    switch("autotune", "accepted for compatibility"),
    switch("use_functional_api", "functional API"),
    choice("b12x_quant_mode", DTYPES, "nvfp4", "quantisation"),
    number("rank", 32, "LoRA rank"),
    number("num_loras", 8, "LoRA adapters"),
    number("num_slices", 1, "LoRA slices"),
)
MOE_ROUTING = (
    number("num_tokens", None, "tokens", True),
    number("num_experts", None, "experts", True),
    number("top_k", None, "experts per token", True),
    number("n_group", None, "expert groups"),
    number("topk_group", None, "groups per token"),
    real("routed_scaling_factor", 2.5, "factor of the routed output"),
    ROUTING_SKEW,
)
RANKS = number("ranks", 2, "processes of this host that take part, on GPUs one for each")
MOE_COMM = (
    RANKS,
    *(flag for flag in MOE if flag.name != "intermediate_size"),
    number("intermediate_size", None, "expert dimension, for --real_math"),
    choice("quant_dtype", ("fp8", "nvfp4", "fp8_block_scale"), None, "quantisation of the sent tokens"),
    switch("real_math", "run the experts too"),
    number("max_num_tokens", None, "capacity"),
    switch("validate", "the same as --refcheck"),
    switch("nvtx", "accepted for compatibility: every case has an NVTX range"),
    switch("per_phase_timing", "time the phases"),
    switch("use_lora", "with LoRA"),
)
ALLREDUCE = (
    RANKS,
    number("num_tokens", 64, "tokens"),
    number("hidden_size", 4096, "model dimension"),
    dtype("input_dtype", "bfloat16"),
    choice("ar_backend", ("auto", "trtllm", "mnnvl"), "auto", "transport"),
    choice("pattern", ("allreduce", "ar_residual_rmsnorm", "ar_residual_rmsnorm_dynamic_fp8"), "allreduce", "fusion"),
    switch("validate", "the same as --refcheck"),
)
MIXED_COMM = (
    Flag("local_bs_list", "batch sizes", int, kind="words", required=True, metavar="N"),
    number("hidden_size", None, "model dimension", True),
    dtype("dtype", "bfloat16"),
    number("local_tp_size", None, "tensor parallel size in the node", True),
    number("local_dp_size", None, "data parallel size in the node", True),
    number("inter_tp_size", 1, "tensor parallel size between nodes"),
    number("inter_dp_size", 1, "data parallel size between nodes"),
    number("node_id", 0, "this node", least=0),
    Flag("dist_init_method", "rendezvous", str, "tcp://localhost:29501", metavar="URL"),
)
NORM = (
    *NORM_SHAPE,
    number("num_heads", None, "given: input [batch, heads, hidden]"),
    dtype("input_dtype", "bfloat16"),
    real("eps", 1e-6, "epsilon"),
    real("scale", 1.0, "scale of quantised outputs"),
    choice("out_dtype", ("fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4"), "fp8_e4m3", "quantised output"),
    switch("use_global_scale", "fp4: global scale"),
    switch("is_sf_swizzled_layout", "fp4: swizzled scales"),
    switch("output_both_sf_layouts", "fp4: both scale layouts"),
    Flag("dit_mode", "fused_dit_layernorm: variant", str, metavar="NAME"),
    number("ppf", 5, "fused_qk_rmsnorm_rope: frames"),
    number("pph", 12, "fused_qk_rmsnorm_rope: rows"),
    number("ppw", 32, "fused_qk_rmsnorm_rope: columns"),
)
ACTIVATION = (*NORM_SHAPE, dtype("input_dtype", "bfloat16"))
QUANTIZATION = (
    number("m", None, "rows (packbits: segments)", True),
    number("k", None, "length of a row", True),
    dtype("input_dtype", "bfloat16"),
    Flag("is_sf_swizzled_layout", "swizzled scales (default)", kind="switch", default=True),
    Flag("no_sf_swizzled_layout", "linear scales", kind="off", default=True, dest="is_sf_swizzled_layout"),
    number("alignment", 32, "alignment of a row"),
    number("batch_size", None, "nvfp4_batched_quantize: batches"),
    real("global_scale", 1.0, "global scale"),
    choice("sf_layout", ("128x4", "8x4", "linear"), "128x4", "layout of the scales"),
    switch("do_shuffle", "shuffle the rows"),
    number("sf_vec_size", 16, "elements per scale"),
    switch("per_token_activation", "a scale per token"),
    choice("bitorder", ("big", "little"), "big", "packbits: which bit the first element becomes"),
)
SAMPLING = (
    number("batch_size", None, "rows", True),
    number("vocab_size", None, "length of a row"),
    dtype("input_dtype", "float32"),
    number("top_k", 50, "k"),
    real("top_p", 0.9, "p"),
    real("min_p", 0.1, "min p"),
    real("temperature", 1.0, "temperature"),
    real("logits_std", 1.0, "standard deviation of the logits"),
    choice("filter_apply_order", ("top_k_first", "joint"), "top_k_first", "order of the filters"),
    number("num_speculate_tokens", 5, "draft tokens"),
)
TOPK = (
    number("batch_size", None, "rows; of the page table, for the transforms", True),
    number("vocab_size", None, "top_k: length of a row"),
    dtype("input_dtype", "float32"),
    number("top_k", 50, "k"),
    switch("sorted", "top_k: values in descending order"),
    number("max_len", 4096, "transforms: longest row"),
    number("num_rows", None, "transforms: rows of scores; the batch if left out"),
    number("page_size", 1, "top_k_page_table_transform: tokens per page"),
)
TOPK_VARLEN = (
    number("batch_size", None, "rows", True),
    number("max_seq_len", None, "longest row", True),
    number("top_k", 512, "k"),
)
ROPE = (
    number("batch_size", None, "requests", True),
    number("seq_len", None, "tokens per request", True),
    *HEADS,
    number("head_dim", None, "head dimension", True),
    number("rotary_dim", None, "rotated dimensions; all if left out"),
    number("no_rope_dim", 0, "dimensions that are not rotated (quantised routines)", least=0),
    dtype("input_dtype", "float16"),
    dtype("quant_dtype", "fp8_e4m3"),
    real("rope_scale", 1.0, "frequency divisor"),
    real("rope_theta", 10000.0, "base"),
    switch("interleave", "rotate adjacent elements (GPT-J style) instead of halves (NeoX style)"),
    number("page_size", 16, "tokens per page"),
    choice("kv_layout", ("NHD", "HND"), "NHD", "order of heads and tokens in a page"),
    real("low_freq_factor", 1.0, "llama 3.1"),
    real("high_freq_factor", 4.0, "llama 3.1"),
    number("old_context_len", 8192, "llama 3.1"),
)
PAGE = (
    number("batch_size", None, "requests", True),
    number("s_qo", 1, "tokens appended per request"),
    number("s_kv", 1024, "length of each request after the append"),
    number("num_kv_heads", 8, "key and value heads"),
    number("head_dim", 128, "head dimension"),
    number("head_dim_ckv", 512, "MLA: latent dimension"),
    number("head_dim_kpe", 64, "MLA: rope dimension"),
    number("page_size", 16, "tokens per page"),
    choice("kv_layout", ("NHD", "HND"), "NHD", "order of heads and tokens in a page"),
    dtype("kv_dtype", "bfloat16"),
)
CASCADE = (
    number("batch_size", None, "rows", True),
    number("num_qo_heads", 32, "heads"),
    number("head_dim", 128, "head dimension"),
    number("num_states", 2, "merge_states: states per row"),
    dtype("input_dtype", "bfloat16"),
)
MHC = (
    number("num_tokens", None, "tokens", True),
    number("hidden_size", None, "columns of a residual stream", True),
    number("sinkhorn_repeat", 20, "iterations of Sinkhorn-Knopp"),
    dtype("input_dtype", "bfloat16"),
)
MAMBA = (
    number("batch_size", None, "requests", True),
    number("nheads", None, "heads", True),
    number("dim", None, "head dimension", True),
    number("dstate", None, "state dimension", True),
    number("ngroups", 8, "groups"),
    number("cache_steps", 0, "cached steps", least=0),
    dtype("input_dtype", "bfloat16"),
    dtype("state_dtype", "bfloat16"),
    dtype("weight_dtype", "float32"),
    switch("has_z", "gate z"),
    switch("dt_softplus", "softplus of dt"),
    switch("varlen", "packed requests"),
    Flag("algorithm", "algorithm", str, "auto", metavar="NAME"),
)
_STATES = (
    number("nheads", None, "heads", True),
    number("dim", 64, "head dimension"),
    number("dstate", 128, "state dimension"),
    number("ngroups", 8, "groups"),
    dtype("input_dtype", "bfloat16"),
    dtype("state_dtype", "float32"),
)
SSD = (
    number("batch_size", 1, "sequences"),
    number("seq_len", None, "tokens of a sequence", True),
    *_STATES,
    switch("has_z", "gate z"),
    switch("dt_softplus", "softplus of dt"),
)
RING = (
    number("batch_size", None, "requests", True),
    number("seq_len", 4, "new tokens of a request"),
    number("ring", 12, "rows of a ring: the tokens that are replayed and the new ones"),
    *_STATES,
)
LORA = (
    number("num_tokens", None, "tokens", True),
    number("num_loras", 8, "adapters"),
    number("rank", 16, "of the adapters"),
    number("in_features", None, "columns of the input", True),
    number("out_features", None, "columns of the output", True),
    dtype("input_dtype", "bfloat16"),
)
INDEXER = (
    number("batch_size", 1, "requests"),
    number("next_n", 1, "rows of a request"),
    number("kv_len", 4096, "keys of a request"),
    number("page_size", 64, "tokens of a page"),
    number("num_rows", 1, "rows over one array of keys"),
    number("num_keys", 4096, "keys of the array"),
    number("heads", 64, "heads of the indexer"),
    number("dim", 128, "of a head"),
    number("top_k", 2048, "keys that are chosen"),
)
FLASH_MLA = (
    number("batch_size", 1, "requests"),
    number("qo_len", 1, "query tokens of a request"),
    number("kv_len", 4096, "tokens of a request"),
    number("page_size", 64, "tokens of a page"),
    number("num_rows", 16, "query tokens over one array of keys"),
    number("num_keys", 4096, "keys of the array"),
    number("num_heads", 64, "query heads"),
    number("top_k", 2048, "keys that are listed"),
    number("extra", 0, "keys of a second cache that are listed", least=0),
    choice("form", ("bf16", "rows", "packed"), "bf16", "of the cache: 16 bits, 656 or 584 bytes a token"),
    number("num_tokens", 64, "tokens that are appended"),
)
CONV = (
    number("batch_size", None, "sequences", True),
    number("seq_len", 1, "tokens of a sequence"),
    number("dim", None, "channels", True),
    number("width", 4, "inputs of an output"),
    dtype("input_dtype", "bfloat16"),
)
GDN = (
    number("batch_size", None, "requests", True),
    number("num_q_heads", 16, "query heads"),
    number("num_k_heads", 16, "key heads"),
    number("num_v_heads", 32, "value heads"),
    number("head_size", 128, "head dimension"),
    dtype("input_dtype", "bfloat16"),
    choice("state_dtype", ("float32", "bfloat16"), "float32", "state data type"),
    choice("state_layout", ("pretranspose", "nontranspose"), "pretranspose", "[B, HV, V, K] or [B, HV, K, V]"),
    choice("pool_mode", ("single", "split"), "single", "state pool"),
    number("seq_len", None, "tokens of multi-token decode"),
    number("s_qo", 2048, "prefill length"),
    switch("update_state", "write the state back"),
    switch("cache_intermediate_states", "keep the states in between"),
    switch("no_qk_l2norm", "no normalisation of q and k"),
)
KDA = (
    number("batch_size", None, "requests", True),
    number("s_qo", None, "prefill length", True),
    number("num_q_heads", 16, "heads"),
    number("head_size", 128, "head dimension"),
    dtype("input_dtype", "bfloat16"),
    dtype("state_dtype", "bfloat16"),
    switch("packed", "packed requests"),
    choice("offsets_dtype", ("int32", "int64"), "int32", "type of the offsets"),
    switch("has_initial_state", "start from a state"),
    real("lower_bound", -5.0, "lower bound of the gate, in [-5, 0)"),
)
SPARSE = (
    number("batch_size", 1, "requests"),
    number("s_qo", 4096, "query length"),
    number("s_kv", 4096, "key and value length"),
    number("num_qo_heads", 64, "query heads"),
    number("num_kv_heads", 4, "key and value heads"),
    number("head_dim", 128, "head dimension"),
    number("topk", 16, "blocks per query"),
    number("max_k_tiles", None, "key tiles"),
    Flag("causal", "causal mask (default)", kind="switch", default=True),
    Flag("no_causal", "no mask", kind="off", default=True, dest="causal"),
    dtype("q_dtype", "bfloat16"),
    dtype("kv_dtype", "bfloat16"),
    choice("kv_layout", ("flat", "paged", "packed"), "flat", "layout of k and v"),
)
