"""Modules of FlashInfer that have another name here."""

# Modules of FlashInfer that hold generators of modules, one or a few families each.
_GENERATORS = (
    "activation",
    "cascade",
    "comm",
    "dsv3_optimizations",
    "fp4_kv_dequantization",
    "fp4_kv_quantization",
    "fp4_quantization",
    "fp8_quantization",
    "fused_moe",
    "gemm",
    "gemm.core",
    "gemm.fp8_blockscale",
    "hash_topk",
    "mla",
    "moe_utils",
    "norm",
    "page",
    "quantization",
    "rope",
    "sampling",
    "tinygemm2",
    "topk",
)
# Modules of FlashInfer that hold the descriptions of a family.
_TEMPLATES = (
    "activation",
    "attention",
    "cascade",
    "comm",
    "gdn",
    "gemm",
    "mamba",
    "moe",
    "norm",
    "page",
    "quantize",
    "rope",
    "sampling",
    "topk",
)
RENAMED = {
    "attn_scores.attn_scores": "attn_scores",
    "autotuner.autotuner": "compat.autotuner",
    "fi_trace": "observe.trace",
    "jit.attention.modules": "jit.attention",
    "trace": "observe.trace",
    "trace.templates": "trace_templates",
    **{f"trace.templates.{family}": "trace_templates" for family in _TEMPLATES},
    **{f"jit.{module}": "jit.ops" for module in _GENERATORS},
}
