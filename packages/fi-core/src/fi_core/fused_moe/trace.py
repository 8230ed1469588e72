"""Descriptions of routing and of mixtures of experts, with fp64 references."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fi_core.observe.describe import with_sizes
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import (
    Const,
    Scalar,
    Tensor,
    TraceTemplate,
    Var,
    Work,
    axes_of,
    samples,
    sized,
    tensors,
    words,
)

_BLOCK = 128  # of fp8 values that share a scale
_DEEPSEEK = 2  # RoutingMethodType.DeepSeekV3


# Trace files hold the source of a reference, so each reference is whole in itself.
def _routing(scores, bias, n_group, topk_group, topk, factor):  # type: ignore[no-untyped-def]
    """DeepSeek-V3's rule: weights and expert numbers."""
    import torch

    own = scores.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sigmoid()
    choice = own + bias.double()
    if n_group > 1:
        groups = choice.unflatten(1, (n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = best.sort(descending=True, stable=True).indices[:, :topk_group]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.where(mask[..., None], -torch.inf).flatten(1)
    ids = choice.sort(descending=True, stable=True).indices[:, :topk]
    weights = own.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor, ids


def _topk_reference(scores, bias, n_group, topk_group, top_k, routed_scaling_factor):  # type: ignore[no-untyped-def]
    return _routing(scores, bias, n_group, topk_group, top_k, routed_scaling_factor)


def _experts(x, ids, weights, up, down, rounded=lambda x: x):  # type: ignore[no-untyped-def]
    """A loop over the experts; the first half of `up` is the linear projection, the second the gate."""
    import torch

    x, out = rounded(x.double()), x.new_zeros(x.shape, dtype=torch.float64)
    for e in range(up.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        linear, gate = (x[token] @ up[e].double().T).chunk(2, -1)
        y = rounded(torch.nn.functional.silu(gate) * linear) @ down[e].double().T
        out.index_add_(0, token, y * weights[token, slot, None].double())
    return out


def _dequantized(weight, scale):  # type: ignore[no-untyped-def]
    """e4m3 times scales of 128 x 128."""
    return weight.double() * scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)


def _to_e4m3_and_back(x):  # type: ignore[no-untyped-def]
    """As fp8 kernels take activations: each 128 values of a row with a scale."""
    import torch

    blocks = x.unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def _plain_reference(  # type: ignore[no-untyped-def]
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights
):
    return _experts(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights)


def _blocks_reference(  # type: ignore[no-untyped-def]
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, fc1_scales, fc2_scales
):
    up, down = _dequantized(fc1_expert_weights, fc1_scales), _dequantized(fc2_expert_weights, fc2_scales)
    return _experts(input, token_selected_experts, token_final_scales, up, down, _to_e4m3_and_back)


def _routed_blocks_reference(  # type: ignore[no-untyped-def]
    routing_logits,
    routing_bias,
    hidden_states,
    gemm1_weights,
    gemm1_weights_scale,
    gemm2_weights,
    gemm2_weights_scale,
    top_k,
    n_group,
    topk_group,
    routed_scaling_factor,
):
    weights, ids = _routing(routing_logits, routing_bias, n_group, topk_group, top_k, routed_scaling_factor)
    up, down = _dequantized(gemm1_weights, gemm1_weights_scale), _dequantized(gemm2_weights, gemm2_weights_scale)
    return _experts(hidden_states, ids, weights, up, down, _to_e4m3_and_back)


@sized(dtype="float32", num_tokens=7, num_experts=64, top_k=6, n_group=4, topk_group=2)
def _make_topk(draw: Draw, s: Any) -> dict[str, Any]:
    scores = draw.normal((s.num_tokens, s.num_experts), s.dtype)
    return {
        "scores": draw.rows(scores),
        "bias": draw.normal((s.num_experts,), s.dtype, 0.1),
        **s.named("n_group", "topk_group"),
        "topk": s.top_k,
        "routed_scaling_factor": 2.5,
        "topk_values": draw.poison(draw.normal((s.num_tokens, s.top_k), "float32")),
        "topk_indices": draw.integers(0, 1, (s.num_tokens, s.top_k)),
    }


def _make_layer(draw: Draw, s: Any, dtype: str, blocks: bool) -> tuple[Any, ...]:
    """Tokens, the weights of each expert, and their scales."""
    x, experts = draw.rows(draw.normal((s.num_tokens, s.hidden_size), dtype)), s.num_experts
    shapes = (experts, 2 * s.intermediate_size, s.hidden_size), (experts, s.hidden_size, s.intermediate_size)
    if not blocks:
        return (x, *(draw.normal(shape, dtype, shape[2] ** -0.5) for shape in shapes), ())
    grids = [(e, rows // _BLOCK, k // _BLOCK) for e, rows, k in shapes]
    scales = [draw.normal(grid, "float32").abs() * (k**-0.5 / 64) for grid, (_, _, k) in zip(grids, shapes)]
    scales[1] *= 0.1  # small outputs, so that the tolerance covers values that round to the other side
    return (x, *(draw.normal(shape, "float8_e4m3fn", 64.0) for shape in shapes), scales)


@sized(dtype="bfloat16", num_tokens=9, num_experts=8, top_k=3, hidden_size=128, intermediate_size=128, blocks=False)
def _make_cutlass(draw: Draw, s: Any) -> dict[str, Any]:
    x, up, down, scales = _make_layer(draw, s, s.dtype, s.blocks)
    weights, ids = draw.normal((s.num_tokens, s.num_experts), "float32").softmax(-1).topk(s.top_k)
    ids = ids.int()
    if draw.nasty and ids.numel():
        ids[-1, -1] = -1  # the expert of another rank
    found = {"input": x, "token_selected_experts": ids, "token_final_scales": weights, "fc1_expert_weights": up}
    found |= {"fc2_expert_weights": down, "output_dtype": x.dtype, "quant_scales": list(scales)}
    return {**found, "use_deepseek_fp8_block_scale": True} if s.blocks else found


_make_blocks = with_sizes(_make_cutlass, ("blocks",), blocks=True)
_make_plain = with_sizes(_make_cutlass, ("blocks",), intermediate_size=64)


@sized(num_tokens=9, num_experts=16, top_k=3, n_group=4, topk_group=2, hidden_size=128, intermediate_size=128)
def _make_trtllm(draw: Draw, s: Any) -> dict[str, Any]:
    x, up, down, scales = _make_layer(draw, s, "bfloat16", True)
    routing = {"routing_logits": draw.normal((s.num_tokens, s.num_experts), "float32")}
    routing["routing_bias"] = draw.normal((s.num_experts,), "float32", 0.1)
    tokens = {"hidden_states": x, "hidden_states_scale": None}
    weights = {"gemm1_weights": up, "gemm1_weights_scale": scales[0]}
    weights |= {"gemm2_weights": down, "gemm2_weights_scale": scales[1]}
    sizes = s.named("num_experts", "top_k", "n_group", "topk_group", "intermediate_size")
    options = {"routed_scaling_factor": 1.0, "routing_method_type": _DEEPSEEK, "local_expert_offset": 0}
    return {**routing, **tokens, **weights, **sizes, **options, "local_num_experts": s.num_experts}


def _topk_work(arguments: Mapping[str, Any]) -> Work:
    return Work(0, nbytes(*arguments.values()))


def _layer_work(arguments: Mapping[str, Any]) -> Work:
    """Each token meets top_k experts; the weights of the experts that are met are read once, of even routing."""
    found = dict(arguments)
    x = found["input" if "input" in found else "hidden_states"]
    names = ("fc1_expert_weights", "fc2_expert_weights") if "input" in found else ("gemm1_weights", "gemm2_weights")
    weights = [found[name] for name in names]
    scales = (*found.get("quant_scales", ()), found.get("gemm1_weights_scale"), found.get("gemm2_weights_scale"))
    top_k = found["top_k"] if "top_k" in found else found["token_selected_experts"].shape[1]
    experts, rows = weights[0].shape[0], x.shape[0] * top_k
    hit = math.ceil(experts * (1 - (1 - 1 / experts) ** rows))
    routing = [found.get(name) for name in ("routing_logits", "token_selected_experts", "token_final_scales")]
    read = hit * (nbytes(*weights, *scales) // experts)
    unit = "matmul_fp8" if weights[0].element_size() == 1 else "matmul"
    return Work(2 * rows * sum(w[0].numel() for w in weights), read + 2 * nbytes(x) + nbytes(*routing), unit)


_ROUTER: dict[str, Var | Const] = {"num_tokens": Var(), "num_experts": Const(abbrev="e"), "top_k": Const(abbrev="k")}
_AXES = {"num_experts": "e", "top_k": "k", "hidden_size": "h", "intermediate_size": "i", "up_rows": ""}
_AXES |= dict.fromkeys(("up_blocks", "hidden_blocks", "intermediate_blocks"), "")
_CUTLASS = {
    **tensors(input="num_tokens hidden_size"),
    **tensors(token_selected_experts="num_tokens top_k", token_final_scales="num_tokens top_k"),
    **tensors(fc1_expert_weights="num_experts up_rows hidden_size"),
    **tensors(fc2_expert_weights="num_experts hidden_size intermediate_size"),
}
_SCALES = {"param": "quant_scales"}
_CUTLASS_BLOCKS = {
    **_CUTLASS,
    **tensors({**_SCALES, "tuple_idx": 0}, fc1_scales="num_experts up_blocks hidden_blocks"),
    **tensors({**_SCALES, "tuple_idx": 1}, fc2_scales="num_experts hidden_blocks intermediate_blocks"),
}
_NUMBERS = {name: Scalar("int32") for name in ("top_k", "n_group", "topk_group")}
_TRTLLM: dict[str, Tensor | Scalar] = {
    **tensors(routing_logits="num_tokens num_experts", routing_bias="num_experts"),
    **tensors(hidden_states="num_tokens hidden_size", gemm1_weights="num_experts up_rows hidden_size"),
    **tensors(gemm1_weights_scale="num_experts up_blocks hidden_blocks"),
    **tensors(gemm2_weights="num_experts hidden_size intermediate_size"),
    **tensors(gemm2_weights_scale="num_experts hidden_blocks intermediate_blocks"),
    **_NUMBERS,
    "routed_scaling_factor": Scalar(),
}
_OF_EXPERTS = words(
    "fc1_expert_biases fc2_expert_biases input_sf swiglu_alpha swiglu_beta swiglu_limit ep_size use_w4_group_scaling",
    "use_mxfp8_act_scaling min_latency_mode use_packed_weights activation_type use_wfp4afp8_humming",
    "clamped_relu2_limit situ_beta situ_linear_beta lora",
)
_OF_RUN = ("moe_sort", "moe_finalize")  # launched by every layer; the others by its size
# Outputs of 16-bit layers are N(0, 1) at most; those of fp8 also differ where a value rounds to the other side.
_ROUNDED = {"bfloat16": (4e-2, 4e-2), "float16": (2e-2, 2e-2)}

FUSED_TOPK = TraceTemplate(
    "moe_routing",
    name_prefix="fused_topk_deepseek",
    axes=_ROUTER,
    inputs={
        **tensors(scores="num_tokens num_experts", bias="num_experts"),
        **_NUMBERS,
        "top_k": Scalar("int32", param="topk"),
        "routed_scaling_factor": Scalar(),
    },
    outputs={
        **tensors({"param": "topk_values", "dtype": "float32"}, topk_values="num_tokens top_k"),
        **tensors({"param": "topk_indices", "dtype": "int32"}, topk_indices="num_tokens top_k"),
    },
    reference=(_routing, _topk_reference),
    op="moe_route",
    make=_make_topk,
    samples=samples({"dtype": ("float32",), "num_experts, top_k, n_group, topk_group": ((64, 6, 4, 2), (48, 8, 1, 1))}),
    work=_topk_work,
    description="Experts of each token by DeepSeek-V3's rule.",
)

CUTLASS = TraceTemplate(
    "moe",
    name_prefix="moe",
    axes=axes_of(_CUTLASS, **_AXES),
    inputs=_CUTLASS,
    outputs=tensors({"dtype_from_scalar": "output_dtype"}, output="num_tokens hidden_size"),
    reference=(_experts, _plain_reference),
    op=_OF_RUN,
    make=_make_plain,
    samples=samples({"dtype": ("bfloat16", "float16"), "num_tokens": (1, 9)}),
    work=_layer_work,
    tolerance=_ROUNDED,
    others=_OF_EXPERTS,
    description="A mixture of experts with SwiGLU, whose experts are chosen, in 16 bits.",
)

CUTLASS_BLOCKS = TraceTemplate(
    "moe",
    name_prefix="moe_fp8_block_scale",
    axes=axes_of(_CUTLASS_BLOCKS, **_AXES),
    inputs=_CUTLASS_BLOCKS,
    outputs=CUTLASS.outputs,
    reference=(_experts, _dequantized, _to_e4m3_and_back, _blocks_reference),
    tags=("weights:fp8_block_scale",),
    op=_OF_RUN,
    make=_make_blocks,
    samples=samples({"dtype": ("bfloat16",), "num_tokens": (1, 9)}),
    work=_layer_work,
    tolerance=_ROUNDED,
    others=_OF_EXPERTS,
    description="A mixture of experts with SwiGLU, whose experts are chosen; e4m3 weights with scales of 128 x 128.",
)

TRTLLM_BLOCKS = TraceTemplate(
    "moe",
    name_prefix="moe_fp8_block_scale_ds_routing",
    axes={**_ROUTER, **axes_of(_TRTLLM, **_AXES)},
    inputs=_TRTLLM,
    outputs=tensors({"dtype": "bfloat16"}, output="num_tokens hidden_size"),
    reference=(_routing, _experts, _dequantized, _to_e4m3_and_back, _routed_blocks_reference),
    op=("moe_route", *_OF_RUN),
    make=_make_trtllm,
    samples=samples({"num_tokens": (1, 9)}),
    work=_layer_work,
    tolerance=_ROUNDED,
    others=words(
        "hidden_states_scale use_shuffled_weight weight_layout num_fused_shared_experts activation_type",
        "fp8_quantization_type gemm1_alpha gemm1_beta gemm1_clamp_limit gemm1_bias gemm2_bias local_expert_offset",
    ),
    description="Routing by DeepSeek-V3's rule and its mixture of experts; e4m3 weights with scales of 128 x 128.",
)


def cutlass(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of the format; None for others."""
    if arguments.get("use_deepseek_fp8_block_scale"):
        return CUTLASS_BLOCKS
    return None if arguments.get("quant_scales") else CUTLASS


cutlass.templates = (CUTLASS, CUTLASS_BLOCKS)  # type: ignore[attr-defined]


def trtllm_blocks(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of DeepSeek-V3's routing; None for another, and where the weighted sum is left to the caller."""
    covered = arguments.get("routing_method_type", 0) == _DEEPSEEK and arguments.get("do_finalize", True)
    return TRTLLM_BLOCKS if covered else None


trtllm_blocks.templates = (TRTLLM_BLOCKS,)  # type: ignore[attr-defined]
