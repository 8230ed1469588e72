"""Serving profiles: models by name, and the requests that an engine's step makes of each, for every option of serving.

This one table decides the kernels that `fi-core prebuild --model` and `prepare` compile, and that the binary packages
ship beside the grids of the ops.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fi_core.runtime import files
from fi_core.runtime.dispatch import AUTO
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Op

_NORMALIZED = ("qwen3", "qwen3_moe")  # types of models with norms of heads
EXPERTS = ("", "bf16", "f16", "e4m3", "mxfp4")
LATENT = (512, 64)  # values of a latent row, and its rotary part, that the MLA kernels take


@dataclass(frozen=True)
class Model:
    """What decides the kernels of a decoder's step.

    Args:
        num_qo_heads, num_kv_heads, head_dim: of a layer; head_dim of queries and keys.
        soft_cap: whether scores are capped.
        dtype: short name of the dtype of activations.
        head_dim_vo: of values; 0: head_dim.
        latent: whether attention is over a latent cache (MLA).
        experts: format of the weights of experts, one of EXPERTS; "": it has none.
        activation: of the experts.
        weights: format of other weights that fi multiplies: "e4m3" (blocks of 128 x 128), "nvfp4" or "mxfp4"; "": 16
            bits.
        linear: whether it has layers of linear attention (gated delta rule).
        qk_norm: whether heads of queries and keys are normalized before they are rotated.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    soft_cap: bool = False
    dtype: str = "bf16"
    head_dim_vo: int = 0
    latent: bool = False
    experts: str = ""
    activation: str = "Swiglu"
    weights: str = ""
    linear: bool = False
    qk_norm: bool = False

    @property
    def serves_fp16(self) -> bool:
        """Whether packages hold its kernels for fp16 activations too."""
        return not (self.experts or self.latent or self.linear or self.weights == "e4m3")

    @classmethod
    def of_config(cls, config: Any) -> Model:
        """The model of a transformers configuration, an object or a dict.

        Raises:
            ValueError: it lacks the number of heads, or has a layer or a format that no profile describes.
        """

        def get(name: str) -> Any:
            """A setting of the text model, whose configuration may be within that of several."""
            places = (_setting(config, "text_config"), config)
            return next((found for place in places if (found := _setting(place, name)) is not None), None)

        heads, hidden = get("num_attention_heads"), get("hidden_size")
        latent = get("kv_lora_rank")
        if latent and (latent, get("qk_rope_head_dim")) != LATENT:
            raise ValueError(
                f"model: kv_lora_rank and qk_rope_head_dim of {LATENT} are required; got "
                f"{(latent, get('qk_rope_head_dim'))}"
            )
        if get("mamba_d_state") or get("ssm_state_size"):
            raise ValueError("model: Mamba layers are in no profile: name the ops, as in --ops selective_state_update")
        nope = (get("qk_nope_head_dim") or 0) + LATENT[1] if latent else None
        head_dim = nope or get("head_dim") or (hidden // heads if heads and hidden else None)
        if not heads or not head_dim:
            raise ValueError("model: num_attention_heads, and head_dim or hidden_size, are required of a configuration")
        dtype = short_dtype(get("dtype") or get("torch_dtype") or "bfloat16", "dtype")
        has_experts = bool(get("num_experts") or get("num_local_experts") or get("n_routed_experts"))
        quantized = _weights(get("quantization_config"), has_experts)
        if get("linear_num_key_heads") and get("linear_key_head_dim") != 128:
            raise ValueError(f"model: a linear_key_head_dim of 128 is required; got {get('linear_key_head_dim')}")
        return cls(
            heads,
            get("num_key_value_heads") or heads,
            head_dim,
            bool(get("attn_logit_softcapping")),
            dtype,
            head_dim_vo=get("v_head_dim") or 0 if latent else 0,
            latent=bool(latent),
            experts=(quantized or dtype) if has_experts else "",
            activation="SwigluBias" if get("swiglu_limit") else "Swiglu",
            weights=quantized if quantized != "mxfp4" or not has_experts else "",
            linear=bool(get("linear_num_key_heads")),
            qk_norm=get("model_type") in _NORMALIZED,
        )


MODELS = {
    "llama-1b": Model(32, 8, 64),
    "llama-3b": Model(24, 8, 128),
    "llama-8b": Model(32, 8, 128),
    "llama-8b-nvfp4": Model(32, 8, 128, weights="nvfp4"),
    "llama-8b-mxfp4": Model(32, 8, 128, weights="mxfp4"),
    "llama-70b": Model(64, 8, 128),
    "mistral-7b": Model(32, 8, 128),
    "qwen3-0.6b": Model(16, 8, 128, qk_norm=True),
    "qwen3-8b": Model(32, 8, 128, qk_norm=True),
    "qwen3-32b": Model(64, 8, 128, qk_norm=True),
    "gemma2-2b": Model(8, 4, 256, soft_cap=True),
    "gemma2-9b": Model(16, 8, 256, soft_cap=True),
    "gemma2-27b": Model(32, 16, 128, soft_cap=True),
    "gemma3-4b": Model(8, 4, 256),
    "gemma3-27b": Model(32, 16, 128),
    "gpt-oss-20b": Model(64, 8, 64, experts="mxfp4", activation="SwigluBias"),
    "gpt-oss-120b": Model(64, 8, 64, experts="mxfp4", activation="SwigluBias"),
    "mixtral-8x7b": Model(32, 8, 128, experts="bf16"),
    "qwen3-30b-a3b": Model(32, 4, 128, experts="bf16", qk_norm=True),
    "qwen3-235b-a22b-fp8": Model(64, 4, 128, experts="e4m3", weights="e4m3", qk_norm=True),
    "qwen3-next-80b-a3b": Model(16, 2, 256, experts="bf16", linear=True),
    "deepseek-v3": Model(128, 128, 192, head_dim_vo=128, latent=True, experts="e4m3", weights="e4m3"),
    "kimi-k2": Model(64, 64, 192, head_dim_vo=128, latent=True, experts="e4m3", weights="e4m3"),
}


class Options(NamedTuple):
    """How an engine serves a model.

    Args:
        dtype: of activations; None: the model's.
        kv_dtype: of the KV cache; None: that of activations.
        page_size: tokens of a page.
        tp: ranks that share the heads of a layer.
        spec_tokens: drafted tokens that a step verifies; 0: none.
        lora: whether requests have adapters.
        logits_dtype: of logits that are sampled; None: that of activations, and fp32, to which engines convert them.
        backend: of the attention wrappers.
        products: whether fi multiplies few tokens by bf16 weights, as in vLLM with FI_VLLM_LAYERS=1.
    """

    dtype: Any = None
    kv_dtype: Any = None
    page_size: int = 16
    tp: int = 1
    spec_tokens: int = 0
    lora: bool = False
    logits_dtype: Any = None
    backend: str = AUTO
    products: bool = False


DEFAULT = Options()


class Call(NamedTuple):
    """A request of a step, for all that its layer makes of the op, unless it is alone. optional: another request does
    the same where no kernel serves this one.
    """

    family: str
    op: str
    values: dict[str, Any]
    optional: bool = False
    alone: bool = False
    backend: str = AUTO

    def of_layer(self, op: Op) -> Iterator[dict[str, Any]]:
        """The values of the requests for which it stands; op: its op."""
        return iter([self.values]) if self.alone else op.calls_of_layer(self.values)


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _weights(config: Any, has_experts: bool) -> str:
    """The format of quantized weights: "", "e4m3", "mxfp4" or "nvfp4". Raises ValueError for experts of another."""
    if config is None:
        return ""
    method, algorithm = str(_setting(config, "quant_method")), str(_setting(config, "quant_algo"))
    if method in ("mxfp4", "gpt_oss_mxfp4"):  # the latter in vLLM
        return "mxfp4"
    if method == "fp8" and _setting(config, "weight_block_size"):
        return "e4m3"
    if "NVFP4" in algorithm and not has_experts:
        return "nvfp4"
    if has_experts:
        raise ValueError(
            f"model: experts in fp8 blocks or mxfp4, or of 16 bits, are required; got {method} {algorithm}"
        )
    return ""


def short_dtype(value: Any, name: str) -> str:
    """The short name of a dtype: of torch, or a name such as "bfloat16" or "bf16"."""
    word = str(value).removeprefix("torch.") if type(value).__name__ in ("dtype", "str") else ""
    found = next((d.short for d in DTYPES.values() if word in (d.short, d.torch)), None)
    if found is None:
        raise ValueError(f"{name}: a dtype such as bfloat16, float16 or float8_e4m3fn is required; got {value!r}")
    return found


def model_of(model: Any) -> Model:
    """A Model by its name in MODELS, by a folder with transformers' config.json, or by a configuration.

    Raises:
        ValueError: there is none of that name, or the configuration does not tell.
    """
    if isinstance(model, Model):
        return model
    if not isinstance(model, (str, Path)):
        return Model.of_config(model)
    if str(model) in MODELS:
        return MODELS[str(model)]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return Model.of_config(json.loads(files.content(path)))
    import difflib

    close = difflib.get_close_matches(str(model), MODELS, 3, 0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"names are {', '.join(MODELS)}"
    raise ValueError(f"model: a name, or a folder with config.json, is required; got {str(model)!r}; {hint}")


def calls(model: Model, options: Options = DEFAULT) -> Iterator[Call]:
    """The requests of a step: norms, activation, rope, cache, attention, sampling, experts, linear attention.

    Raises:
        ValueError: an option.
    """
    if options.dtype is not None:
        dtype = short_dtype(options.dtype, "dtype")
        model = replace(model, dtype=dtype, experts=dtype if model.experts in ("bf16", "f16") else model.experts)
    if options.tp < 1 or model.num_qo_heads % options.tp:
        raise ValueError(f"tp: a divisor of the {model.num_qo_heads} heads is required; got {options.tp}")
    one = {"dtype": model.dtype}
    # Those that compile longest come first: NVRTC 13.0, one core, bf16 and head dim 128: sample 2.0 s, batch_prefill
    # 1.8, batch_decode 1.3.
    logits = (
        [model.dtype, "f32"] if options.logits_dtype is None else [short_dtype(options.logits_dtype, "logits_dtype")]
    )
    for dtype in dict.fromkeys(logits):
        yield Call("sampling", "sample", {"dtype": dtype, "draws": True})
    if model.experts:
        yield from _expert_calls(model)
    yield from _latent_calls(model, options) if model.latent else _attention_calls(model, options)
    yield Call("norm", "rmsnorm", {**one, "out": model.dtype})
    yield Call("rope", "rope", one)
    if model.qk_norm:  # in the same pass
        for append in (False, True):  # into a cache of the activations' dtype
            yield Call("rope", "rope", {**one, "norm": True, "append": append})
    yield Call("activation", "act_and_mul", one)
    yield Call("page", "append_paged_kv_cache", {})
    yield Call("page", "get_batch_indices_positions", {})
    if model.linear:
        yield Call("linear_attention", "chunk_gated_delta_rule", one)
        for state in ("f32", "bf16"):
            yield Call("linear_attention", "recurrent_gated_delta_rule", {**one, "state": state})
        yield Call("linear_attention", "recurrent_gated_delta_rule", {**one, "state": "f32", "contiguous": "v"})
    if model.weights:
        yield from _product_calls(model)
    if options.products and model.dtype == "bf16":
        yield Call("gemm", "gemm", {"a": "bf16", "b": "bf16", "out": "bf16"})
    if options.lora:
        groups = {"a": model.dtype, "b": model.dtype, "out": model.dtype, "tiles": "groups"}
        yield Call("gemm", "gemm", groups)
        yield Call("gemm", "gemm", {**groups, "b_major": "n"})
    if options.spec_tokens:
        yield Call("sampling", "chain_speculative", {})
    if options.tp > 1:
        forms = ("one_shot", "two_shot") if options.tp > 2 else ("one_shot",)  # by the size of the message
        for output, form in itertools.product(("sum", "norm"), forms):
            yield Call("comm", "all_reduce", {**one, "output": output, "form": form})


def _cache_dtype(model: Model, options: Options) -> str:
    return model.dtype if options.kv_dtype is None else short_dtype(options.kv_dtype, "kv_dtype")


def _attention_calls(model: Model, options: Options) -> Iterator[Call]:
    heads = model.num_qo_heads // options.tp
    values = {
        "q": model.dtype,
        "kv": _cache_dtype(model, options),
        "out": model.dtype,
        "head_dim_qk": model.head_dim,
        "head_dim_vo": model.head_dim_vo or model.head_dim,
        "group_size": max(1, heads // max(1, model.num_kv_heads // options.tp)),
        "page_size": options.page_size,
        "soft_cap": model.soft_cap,
    }
    for op in ("batch_prefill", "batch_decode"):
        yield Call("attention", op, values, backend=options.backend)
    yield Call("attention", "prefill_plan", {})
    yield Call("attention", "decode_plan", {})


def _latent_calls(model: Model, options: Options) -> Iterator[Call]:
    """Decode over the latent cache, and prefill of the prompt with its keys and values written out."""
    for rows in ("narrow", "wide"):
        values = {"q": model.dtype, "kv": _cache_dtype(model, options), "rows": rows}
        yield Call("attention", "batch_mla", values, backend=options.backend)
    prefill = {
        "q": model.dtype,
        "kv": model.dtype,
        "out": model.dtype,
        "head_dim_qk": model.head_dim,
        "head_dim_vo": model.head_dim_vo or model.head_dim,
        "group_size": 1,
        "page_size": 0,
    }
    yield Call("attention", "batch_prefill", prefill, backend=options.backend)
    yield Call("attention", "mla_plan", {})
    yield Call("attention", "prefill_plan", {})
    yield Call("attention", "merge_state", {"dtype": model.dtype})
    yield Call("concat_ops", "concat_mla_k", {})


def _expert_calls(model: Model) -> Iterator[Call]:
    """A layer of experts at any number of tokens: by which of its ops a call is computed depends on that number."""
    x, weight = model.dtype, "u8" if model.experts == "mxfp4" else model.experts
    for logits in dict.fromkeys((model.dtype, "f32")):
        yield Call("fused_moe", "moe_route", {"logits": logits})
    yield Call("fused_moe", "moe_sort", {})
    yield Call("fused_moe", "moe_finalize", {"y": x, "out": x})
    kind = {"x": x, "weight": weight, "activation": model.activation}
    yield Call("fused_moe", "moe_experts", kind, optional=True)
    if weight == "u8":
        yield Call("fused_moe", "moe_mixed_gemm", {"x": x, "format": "Mxfp4"})
    else:
        scales = "blocks" if weight == "e4m3" else "rows"
        yield Call("gemm", "gemm", {"a": weight, "b": weight, "out": x, "tiles": "groups", "scales": scales})
        yield Call("fused_moe", "moe_few_tokens", kind, optional=True)
        yield Call("fused_moe", "moe_gated_gemm", {"x": weight, "activation": model.activation}, optional=True)
        yield Call("fused_moe", "moe_gather", {"x": x, "quantizes": weight == "e4m3"})
    out = "e4m3" if weight == "e4m3" else x
    yield Call("fused_moe", "moe_activation", {"x": x, "out": out, "activation": model.activation})


def _product_calls(model: Model) -> Iterator[Call]:
    """Products with quantized weights outside of experts, of few and of many tokens."""
    if model.weights != "e4m3":
        block, scale = (16, "e4m3") if model.weights == "nvfp4" else (32, "ue8m0")
        yield Call("gemm", "gemm_few_bits", {"out": model.dtype, "block": block}, optional=True)
        yield Call("quantization", "block_dequantize", {"input": "e2m1", "out": "bf16", "scale": scale})
        # bf16 holds dequantized fp4 exactly.
        yield Call("gemm", "gemm", {"a": "bf16", "b": "bf16", "out": model.dtype}, alone=True)
        yield Call("quantization", "block_quantize", {"dtype": model.dtype, "block": block, "scale": scale})
        return
    yield Call("gemm", "gemm", {"a": "e4m3", "b": "e4m3", "out": model.dtype, "scales": "blocks"})
    values = {"dtype": model.dtype, "out": "e4m3", "block": 128, "scale": "f32"}
    yield Call("quantization", "block_quantize", values)


KV_DTYPES = (None, "e4m3", "e5m2")  # of the caches whose kernels packages ship


@functools.cache
def shipped() -> dict[str, tuple[Call, ...]]:
    """The requests of every model, by op, with each KV dtype, adapters, drafted tokens, on one rank and on eight.

    Dense models of 16-bit or fp4 weights are also served in fp16.
    """
    found: dict[str, dict[str, Call]] = {}
    for model, kv, tp in itertools.product(dict.fromkeys(MODELS.values()), KV_DTYPES, (1, 8)):
        if model.latent and kv == "e5m2":
            continue  # no kernel reads it
        for dtype in (model.dtype, "f16") if model.serves_fp16 else (model.dtype,):
            for call in calls(model, Options(dtype, kv, tp=tp, spec_tokens=1, lora=True, products=True)):
                found.setdefault(call.op, {})[json.dumps(call, sort_keys=True)] = call
    return {op: tuple(of_op.values()) for op, of_op in found.items()}
