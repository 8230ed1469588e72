"""Cases of mixtures of experts: layers whose experts the caller has chosen, and the router alone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work
from fi_bench.cases import moe_layer

if TYPE_CHECKING:
    import torch


def _make_routing(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    shape = (p.num_tokens, p.top_k)
    return Inputs(
        moe_layer.router(p, device, generator),
        topk_values=torch.empty(shape, device=device),
        topk_indices=torch.empty(shape, dtype=torch.int32, device=device),
    )


def _routing_outputs(x: Inputs, values: torch.Tensor, ids: torch.Tensor) -> Outputs:
    """Scores of the chosen experts in falling order, and errors of their weights: experts with equal scores are both
    right."""
    import torch

    ids = ids.long().clamp(0, x.scores.shape[1] - 1)
    score = x.scores.double().sigmoid()
    own = score.gather(1, ids)
    weights = own / own.sum(-1, keepdim=True) * x.routed_scaling_factor
    chosen = torch.sort((score + x.bias.double()).gather(1, ids), descending=True).values
    distinct = (torch.diff(ids.sort(-1).values) > 0).all(-1)
    return {"scores": chosen, "weight_errors": values.double() - weights, "distinct": distinct}


def _routing_reference(x: Inputs) -> Outputs:
    import torch

    ids, weights = moe_layer.route(x, torch.float64)
    return _routing_outputs(x, weights, ids)


def _call_routing(f: Callable[..., Any], x: Inputs) -> Any:
    f(x.scores, x.bias, x.n_group, x.topk_group, x.topk, x.routed_scaling_factor, x.topk_values, x.topk_indices)
    return x.topk_values, x.topk_indices


def _torch_routing(x: Inputs) -> Any:
    import torch

    ids, weights = moe_layer.route(x, torch.float32)
    return weights, ids


def _routing_work(p: Namespace, x: Inputs) -> Work:
    return Work(0, sum(x[name].nbytes for name in ("scores", "bias", "topk_values", "topk_indices")))


def _make_cutlass(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    weights, ids = torch.topk(moe_layer.logits(p, device, generator).softmax(-1), p.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    kind = p.cutlass_variant
    layer = moe_layer.layer(p, kind, device, generator, tokens_kind="fp8" if kind == "fp8" else "base")
    x = Inputs(layer, ids=ids.int(), weights=weights, ep_size=p.ep_size, ep_rank=p.ep_rank)
    x["constants"] = moe_layer.constants(p, device)
    return Inputs(x, quant_scales=_quant_scales(x))


def _quant_scales(x: Inputs) -> list[torch.Tensor]:
    """The scales as `cutlass_fused_moe` takes them; activations of NVFP4 weights stay in 16 bits."""
    import torch

    if x.kind not in ("fp8", "nvfp4"):
        return list(x.scales)
    one = torch.ones(1, device=x.up.device)
    up, down = x.scales
    if x.kind == "fp8":
        return [up * x.input_scale, one / moe_layer.ACTIVATED_SCALE, down * moe_layer.ACTIVATED_SCALE, x.input_scale]
    from fi_core.quantization import block_scale_interleave

    first, second = (block_scale_interleave(s.view(torch.uint8)).view(torch.int32) for s in (up, down))
    alpha = one.expand(len(up)) / moe_layer.RMS
    return [one, first, alpha, one, second, alpha]


def _call_cutlass(f: Callable[..., Any], x: Inputs) -> Any:
    up, down = (w.view(w.dtype if x.kind != "nvfp4" else _long()) for w in (x.up, x.down))
    returned = f(
        x.input,
        x.ids,
        x.weights,
        up,
        down,
        x.output.dtype,
        x.quant_scales,
        ep_size=x.ep_size,
        ep_rank=x.ep_rank,
        output=x.output,
        use_deepseek_fp8_block_scale=x.kind == "fp8_block_scale",
        use_w4_group_scaling=x.kind == "mxfp4",
        **dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), x.constants)),
    )
    return returned[0] if isinstance(returned, (list, tuple)) else returned  # FlashInfer returns a list


def _long() -> torch.dtype:
    import torch

    return torch.long


def _unsupported_cutlass(backend: str, p: Namespace) -> str | None:
    if p.cutlass_variant == "mxfp4" and backend.startswith("flashinfer"):
        return "flashinfer takes mxfp4 weights in an order of its own"
    if p.quantized_input:
        return "the case has no --quantized_input: --cutlass_variant fp8 takes e4m3 tokens, the others 16 bits"
    if p.local_expert_offset or p.local_num_experts:
        return (
            "cutlass_fused_moe takes --ep_size and --ep_rank instead of --local_expert_offset and --local_num_experts"
        )
    return moe_layer.unsupported_layer(p, p.cutlass_variant, ("Swiglu", "SwigluBias"))


CASES = (
    Case(
        routine="cutlass_fused_moe",
        function="fused_moe.cutlass_fused_moe",
        make=_make_cutlass,
        call=_call_cutlass,
        outputs=lambda x, returned: {"output": returned},
        reference=moe_layer.reference,
        work=moe_layer.work,
        torch=moe_layer.torch_layer,
        labels=("cutlass",),
        op="moe_finalize",
        also=(*moe_layer.OPS, "moe_mixed_gemm"),
        poison=("output",),
        tolerance=moe_layer.TOLERANCE,
        unsupported=_unsupported_cutlass,
    ),
    Case(
        routine="fused_topk_deepseek",
        function="fused_moe.fused_topk_deepseek",
        make=_make_routing,
        call=_call_routing,
        outputs=lambda x, returned: _routing_outputs(x, *returned),
        reference=_routing_reference,
        work=_routing_work,
        torch=_torch_routing,
        op="moe_route",
        poison=("topk_values", "topk_indices"),
        tolerance={"scores": Tolerance(1e-5, 1e-5), "weight_errors": Tolerance(0.0, 1e-5)},
        unsupported=moe_layer.unsupported_routing,
    ),
)
