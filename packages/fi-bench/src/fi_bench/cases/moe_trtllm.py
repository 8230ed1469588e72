"""Cases of mixtures of experts that route inside and take prepared weights: the functions named after TensorRT-LLM."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Tolerance
from fi_bench.cases import moe_layer

if TYPE_CHECKING:
    import torch

_FP4 = {"nvfp4": ("nvfp4", "nvfp4"), "mxfp4_mxfp8": ("mxfp4", "mxfp8"), "mxfp4_bf16": ("mxfp4", "base")}
_BLOCK_MAJOR = 2  # WeightLayout.BlockMajorK
_FP8_TILE, _TILE = 64, 128  # rows that a shuffle stays within


def _formats(p: Namespace) -> tuple[str, str]:
    """The formats of weights and of tokens."""
    fp4 = _FP4[p.fp4_mode]
    return {"trtllm_fp4_block_scale_moe": fp4, "trtllm_fp8_per_tensor_scale_moe": ("fp8", "fp8")}.get(
        p.routine, ("fp8_block_scale", "base")
    )


def _each(w: torch.Tensor, prepare: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`prepare` of the bytes of each expert's matrix."""
    import torch

    return torch.stack([prepare(matrix) for matrix in w.view(torch.uint8)]).view(w.dtype)


def _shuffled(w: torch.Tensor, gated: bool, tile: int = _TILE) -> torch.Tensor:
    from fi_core.fused_moe import reorder_rows_for_gated_act_gemm
    from fi_core.quantization import shuffle_matrix_a

    return _each(w, lambda m: shuffle_matrix_a(reorder_rows_for_gated_act_gemm(m) if gated else m, tile))


def _shuffled_scales(s: torch.Tensor, gated: bool, group: int) -> torch.Tensor:
    from fi_core.fused_moe import reorder_rows_for_gated_act_gemm
    from fi_core.quantization import shuffle_matrix_sf_a

    return _each(s, lambda m: shuffle_matrix_sf_a(reorder_rows_for_gated_act_gemm(m) if gated else m, _TILE, group))


def _make(p: Namespace, device: Any, generator: Any) -> Inputs:
    kind, tokens_kind = _formats(p)
    routed = moe_layer.router(p, device, generator)
    layer = moe_layer.layer(p, kind, device, generator, tokens_kind)
    x = Inputs(routed, **layer, method=p.routing_method, on_input=p.use_routing_scales_on_input)
    x.update(num_experts=p.num_experts, intermediate_size=p.intermediate_size)
    if not p.use_routing_bias:
        x["bias"] = None
    if p.routing_method != "deepseek_v3":
        x.update(n_group=1, topk_group=1)
    prepare = {"trtllm_fp4_block_scale_moe": _prepare_fp4, "trtllm_fp8_per_tensor_scale_moe": _prepare_tensors}
    x.update(prepare.get(p.routine, _prepare_blocks)(p, x))
    return x


def _prepare_blocks(p: Namespace, x: Inputs) -> dict[str, Any]:
    from fi_core.fused_moe import convert_to_block_layout

    weights = [x.up, x.down]
    if p.use_shuffled_weight:
        weights = [_shuffled(w, False, _FP8_TILE) for w in weights]
    if p.weight_layout == _BLOCK_MAJOR:
        weights = [_each(w, lambda m: convert_to_block_layout(m, 128)) for w in weights]
    own = {} if weights[0] is x.up else {"sent_up": weights[0], "sent_down": weights[1]}
    return {**own, "options": {"use_shuffled_weight": p.use_shuffled_weight, "weight_layout": p.weight_layout}}


def _prepare_tensors(p: Namespace, x: Inputs) -> dict[str, Any]:
    gate, down = x.scales[0] * x.input_scale, x.scales[1] * moe_layer.ACTIVATED_SCALE
    factors = [gate / moe_layer.ACTIVATED_SCALE, gate, down]
    return {"sent_up": _shuffled(x.up, True), "sent_down": _shuffled(x.down, False), "factors": factors}


def _prepare_fp4(p: Namespace, x: Inputs) -> dict[str, Any]:
    import torch

    group = 16 if x.kind == "nvfp4" else 32
    scales = [_shuffled_scales(s, gated, group) for s, gated in zip(x.scales, (True, False), strict=True)]
    one = torch.ones(len(x.up), device=x.up.device)
    of_weights, of_tokens = (1 / moe_layer.RMS if kind == "nvfp4" else 1.0 for kind in (x.kind, x.input_kind))
    factors = [one * of_weights * of_tokens] * 2 + [one * of_weights]
    sent = {"sent_up": _shuffled(x.up, True), "sent_down": _shuffled(x.down, False)}
    return {**sent, "sent_scales": scales, "factors": factors}


def _routing(x: Inputs) -> tuple[Any, ...]:
    """From num_experts to routed_scaling_factor."""
    return (
        x.num_experts,
        x.topk,
        x.n_group,
        x.topk_group,
        x.intermediate_size,
        x.first,
        x.up.shape[0],
        x.routed_scaling_factor if x.method == "deepseek_v3" else None,
    )


def _call_blocks(f: Callable[..., Any], x: Inputs) -> Any:
    up, down = x.get("sent_up", x.up), x.get("sent_down", x.down)
    return f(
        x.scores,
        x.bias,
        x.input,
        None,
        up,
        x.scales[0],
        down,
        x.scales[1],
        *_routing(x),
        routing_method_type=moe_layer.METHODS[x.method],
        output=x.output,
        **x.options,
    )


def _call_tensors(f: Callable[..., Any], x: Inputs) -> Any:
    first, gate, last = x.factors
    return f(
        x.scores,
        x.bias,
        x.input,
        x.sent_up,
        first,
        gate,
        x.sent_down,
        last,
        *_routing(x),
        x.on_input,
        routing_method_type=moe_layer.METHODS[x.method],
        output=x.output,
    )


def _call_fp4(f: Callable[..., Any], x: Inputs) -> Any:
    first, gate, last = x.factors
    bias, constants = None, (None, None, None)
    up = x.sent_up, x.sent_scales[0], bias, *constants
    down = x.sent_down, x.sent_scales[1], bias
    returned = f(
        x.scores,
        x.bias,
        x.input,
        x.input_scale,
        *up,
        *down,
        first,
        gate,
        last,
        *_routing(x),
        routing_method_type=moe_layer.METHODS[x.method],
        output=x.output,
    )
    return returned[0]


def _unsupported(_: str, p: Namespace) -> str | None:
    if p.input_dtype != "bfloat16":
        return f"--input_dtype must be bfloat16, got {p.input_dtype}"
    if p.routing_method == "llama4" and p.top_k != 1:
        return f"--routing_method llama4 takes --top_k 1, got {p.top_k}"
    if p.use_routing_bias and p.routing_method != "deepseek_v3":
        return f"--use_routing_bias is for --routing_method deepseek_v3, got {p.routing_method}"
    if p.routine == "trtllm_fp8_block_scale_moe":
        if p.weight_layout not in (0, _BLOCK_MAJOR):
            return f"--weight_layout must be 0 (MajorK) or 2 (BlockMajorK), got {p.weight_layout}"
    elif p.weight_layout or (p.use_shuffled_weight and p.routine != "trtllm_fp4_block_scale_moe"):
        return f"{p.routine} takes shuffled weights in --weight_layout 0 only"
    if p.use_routing_scales_on_input and p.routine != "trtllm_fp8_per_tensor_scale_moe":
        return f"--use_routing_scales_on_input is for trtllm_fp8_per_tensor_scale_moe, not for {p.routine}"
    if p.quantized_input and p.routine == "trtllm_fp8_block_scale_moe":
        return "the case has no --quantized_input: bf16 tokens are quantised inside the call"
    refused = moe_layer.unsupported_layer(p, _formats(p)[0])
    return refused or (moe_layer.unsupported_routing("", p) if p.routing_method == "deepseek_v3" else None)


def _case(
    routine: str, call: Callable[..., Any], *also: str, tolerance: Mapping[str, Tolerance] = moe_layer.TOLERANCE
) -> Case:
    return Case(
        routine=routine,
        function=f"fused_moe.{routine}",
        make=_make,
        call=call,
        outputs=lambda x, returned: {"output": returned},
        reference=moe_layer.reference,
        work=moe_layer.work,
        torch=moe_layer.torch_layer,
        labels=("trtllm",),
        op="moe_finalize",
        also=(*moe_layer.OPS, "moe_route", *also),
        poison=("output",),
        tolerance=tolerance,
        unsupported=_unsupported,
    )


CASES = (
    _case("trtllm_fp8_block_scale_moe", _call_blocks),
    _case("trtllm_fp8_per_tensor_scale_moe", _call_tensors),
    # Measured: rel_l2 0.004, the largest of 2,304 errors 0.020 to 0.036.
    _case("trtllm_fp4_block_scale_moe", _call_fp4, "moe_mixed_gemm", tolerance={"output": Tolerance(0.02, 0.06)}),
)
