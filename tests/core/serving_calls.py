"""The calls that serving makes of each kind of model, as functions with the sizes of their descriptions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fi_core.profiles import MODELS, Model

Sizes = dict[str, Any]
Call = tuple[str, Sizes]  # a described function and its sizes


def attention(model: Model, kv: str | None, page: int) -> Iterator[Call]:
    heads = {"num_qo_heads": model.num_qo_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    heads["logits_soft_cap"] = 30.0 if model.soft_cap else None  # type: ignore[assignment]
    if model.latent:
        for batch, num_heads in itertools.product((1, 64), (16, model.num_qo_heads)):
            sizes = {"batch_size": batch, "num_heads": num_heads, "page_size": page, "kv_dtype": kv}
            yield "BatchMLAPagedAttentionWrapper", sizes
        ragged = {**heads, "head_dim_vo": model.head_dim_vo}
        yield "BatchPrefillWithRaggedKVCacheWrapper", ragged
        yield "concat_mla_k", {}
        yield "merge_state", {"head_dim": 128}
        return
    for batch in (1, 64):
        yield "BatchDecodeWithPagedKVCacheWrapper", {**heads, "batch_size": batch, "page_size": page, "kv_dtype": kv}
    for qo_len in (16, 2048):
        yield "BatchPrefillWithPagedKVCacheWrapper", {**heads, "qo_len": qo_len, "page_size": page, "kv_dtype": kv}


def products(model: Model, dtype: str) -> Iterator[Call]:
    """Quantization of tokens and products with 4-bit weights, and adapters, of few and of many tokens."""
    nvfp4 = model.weights == "nvfp4"
    for m in (1, 16, 64, 2048):
        matrix = {"m": m, "n": 4096, "k": 4096}
        if model.weights in ("nvfp4", "mxfp4"):
            yield "nvfp4_quantize" if nvfp4 else "mxfp4_quantize", {"rows": m, "columns": 4096}
            yield "mm_fp4", {**matrix, "use_nvfp4": nvfp4, "out_dtype": dtype}
        for column_major in (True, False):
            yield "SegmentGEMMWrapper", {**matrix, "num_weights": 8, "batch_size": 4, "column_major": column_major}


def other(model: Model, dtype: str) -> Iterator[Call]:
    """The calls of a step that are neither attention nor products of weights, at few and many tokens."""
    for name in ("rmsnorm", "fused_add_rmsnorm"):
        yield name, {"batch_size": 8, "hidden_size": 4096}
    yield "silu_and_mul", {"batch_size": 8, "hidden_size": 4096}
    rope = {"nnz": 8, "num_qo_heads": model.num_qo_heads, "num_kv_heads": model.num_kv_heads, "rotary_dim": 64}
    yield "apply_rope_with_cos_sin_cache_inplace", {**rope, "head_size": model.head_dim}
    yield "append_paged_kv_cache", {}
    for rows, logits in itertools.product((1, 64), ("float32", dtype)):
        for name in ("sampling_from_logits", "top_k_top_p_sampling_from_logits"):
            yield name, {"rows": rows, "vocab_size": 128256, "dtype": logits}
    layer = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}
    for tokens in (1, 2, 8, 64, 256, 2048):
        if model.experts == "bf16":
            yield "cutlass_fused_moe", {**layer, "num_tokens": tokens}
            yield "cutlass_fused_moe", {**layer, "num_tokens": tokens, "num_experts": 8, "top_k": 2}
        if model.experts == "e4m3":
            yield "trtllm_fp8_block_scale_moe", {**layer, "num_tokens": tokens, "n_group": 8, "topk_group": 4}
    if model.linear:
        heads = {"num_q_heads": 16, "num_v_heads": 32, "head_size": 128, "batch_size": 8}
        for state in ("float32", "bfloat16"):
            yield "chunk_gated_delta_rule", {**heads, "state_dtype": state, "seq_len": 1024}
            yield "gated_delta_rule_decode_pretranspose", {**heads, "state_dtype": state}
        yield "gated_delta_rule_decode", heads
        yield "gated_delta_rule_mtp", heads


# Others have the kernels of one of these.
KINDS = ["llama-8b", "llama-1b", "gemma2-9b", "gemma2-27b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3-next-80b-a3b",
         "qwen3-235b-a22b-fp8", "deepseek-v3", "kimi-k2", "llama-8b-nvfp4", "llama-8b-mxfp4"]  # fmt: skip
KV_DTYPES = (None, "float8_e4m3fn", "float8_e5m2")
SERVED = [(name, "bfloat16") for name in KINDS] + [(name, "float16") for name in KINDS if MODELS[name].serves_fp16]
PAGES = (1, 16, 64, 128)


def calls(name: str, dtype: str, kv: str | None, page: int) -> Iterator[Call]:
    """Those of a model, served with a dtype of activations, of the cache and a page size.

    What does not depend on the cache is there once: with the dtype of activations and pages of 16.
    """
    model = MODELS[name]
    if model.latent and kv == "float8_e5m2":
        return  # refused: no kernel reads it
    yield from _of(dtype, attention(model, kv, page))
    if (kv, page) == (None, 16):
        yield from _of(dtype, itertools.chain(other(model, dtype), products(model, dtype)))


def _of(dtype: str, found: Iterator[Call]) -> Iterator[Call]:
    for function, sizes in found:
        yield function, sizes if dtype == "bfloat16" or function == "mm_fp4" else {"dtype": dtype, **sizes}


def served() -> dict[tuple[str, str, str | None, int], list[Call]]:
    """All of them, by model and options."""
    options = ((name, dtype, kv, page) for (name, dtype), kv, page in itertools.product(SERVED, KV_DTYPES, PAGES))
    return {each: found for each in options if (found := list(calls(*each)))}
