"""Cases of mixtures of experts: routing, and whole layers in 16 bits, fp8 with scales of 128 x 128, and mxfp4."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work, dtype_of

if TYPE_CHECKING:
    import torch

_BLOCK = 128  # of fp8 values that share a scale
_GROUP = 32  # of mxfp4 values that share a scale
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
_RMS = 2.93  # of random e2m1 codes
_DEEPSEEK = 2  # RoutingMethodType.DeepSeekV3


def _normal(shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
    """Normal in fp32; matrices one after another, since all experts of a layer in fp32 take much memory."""
    import torch

    out = torch.empty(shape, dtype=dtype, device=device)
    for matrix in out if out.ndim == 3 else (out,):
        matrix.copy_(torch.randn(matrix.shape, device=device, generator=generator) * scale)
    return out


def _logits(p: Namespace, device: Any, generator: Any) -> torch.Tensor:
    """Normal, plus the logarithm of the popularity of each expert: rank ** -routing_skew, in random order."""
    import torch

    ranks = torch.randperm(p.num_experts, device=device, generator=generator) + 1
    noise = torch.randn(p.num_tokens, p.num_experts, device=device, generator=generator)
    logits: torch.Tensor = noise - p.routing_skew * ranks.float().log()
    return logits


# Weights of the experts of this rank


def _weight(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, device: Any, generator: Any) -> tuple[Any, Any]:
    """A weight with which products of normal inputs are normal, and its scales."""
    import torch

    experts, rows, k = shape
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=device, generator=generator)
        exponent = 127 + round(math.log2(k**-0.5 / _RMS))
        grid = (experts, rows, k // _GROUP)
        return codes, torch.randint(exponent - 1, exponent + 2, grid, dtype=torch.uint8, device=device,
                                    generator=generator)  # fmt: skip
    if kind == "fp8_block_scale":
        grid = (experts, rows // _BLOCK, k // _BLOCK)
        scale = (torch.rand(grid, device=device, generator=generator) + 0.5) * k**-0.5 / 64
        return _normal(shape, 64.0, torch.float8_e4m3fn, device, generator), scale
    return _normal(shape, k**-0.5, dtype, device, generator), None


def _dequantized(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A weight times its scales."""
    import torch

    if scale is None:
        return weight.to(dtype)
    if weight.dtype is torch.uint8:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
        values = torch.tensor(_E2M1, dtype=dtype, device=weight.device)[codes]
        return values * torch.exp2(scale.float() - 127).to(dtype).repeat_interleave(_GROUP, -1)
    wide = scale.to(dtype).repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)
    return weight.to(dtype) * wide


def _rounded(x: torch.Tensor, blocks: bool) -> torch.Tensor:
    """x, or x as fp8 kernels take it: each 128 values of a row with a scale."""
    import torch

    if not blocks:
        return x
    wide = x.unflatten(-1, (-1, _BLOCK)).float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    rounded: torch.Tensor = ((wide / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
    return rounded


# Routing


def _route(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's rule: expert numbers, and weights in dtype."""
    import torch

    score = x.scores.float().sigmoid().to(dtype)
    choice = score + x.bias.to(dtype)
    if x.n_group > 1:
        groups = choice.unflatten(1, (x.n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(x.topk_group, -1).indices, True)
        choice = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = choice.topk(x.topk, -1).indices
    weights = score.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * x.routed_scaling_factor


def _router(p: Namespace, device: Any, generator: Any) -> dict[str, Any]:
    """Arguments of the router. Logits stay in fp32: in 16 bits, experts tie."""
    import torch

    noise = torch.randn(p.num_experts, device=device, generator=generator)
    return {
        "scores": _logits(p, device, generator),
        "bias": noise * 0.1,
        "n_group": p.n_group or 1,
        "topk_group": p.topk_group or 1,
        "topk": p.top_k,
        "routed_scaling_factor": p.routed_scaling_factor,
    }


def _make_routing(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    shape = (p.num_tokens, p.top_k)
    return Inputs(
        _router(p, device, generator),
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

    ids, weights = _route(x, torch.float64)
    return _routing_outputs(x, weights, ids)


def _call_routing(f: Callable[..., Any], x: Inputs) -> Any:
    f(x.scores, x.bias, x.n_group, x.topk_group, x.topk, x.routed_scaling_factor, x.topk_values, x.topk_indices)
    return x.topk_values, x.topk_indices


def _torch_routing(x: Inputs) -> Any:
    import torch

    ids, weights = _route(x, torch.float32)
    return weights, ids


def _routing_work(p: Namespace, x: Inputs) -> Work:
    return Work(0, sum(x[name].nbytes for name in ("scores", "bias", "topk_values", "topk_indices")))


# Layers


def _layer(p: Namespace, kind: str, device: Any, generator: Any) -> dict[str, Any]:
    """Tokens, the experts of this rank, and how peers read them."""
    import torch

    dtype, local = dtype_of(p.input_dtype), p.num_experts // p.ep_size
    hidden, inter = p.hidden_size, p.intermediate_size
    up, up_scale = _weight(kind, (local, 2 * inter, hidden), dtype, device, generator)
    down, down_scale = _weight(kind, (local, hidden, inter), dtype, device, generator)
    if kind == "fp8_block_scale":
        down_scale *= 0.2  # small outputs, so that the tolerance covers values that round to the other side
    return {
        "input": _normal((p.num_tokens, hidden), 1.0, dtype, device, generator),
        "up": up,
        "down": down,
        "scales": [] if up_scale is None else [up_scale, down_scale],
        "kind": kind,
        "first": p.ep_rank * local,
        "output": torch.empty((p.num_tokens, hidden), dtype=dtype, device=device),
    }


def _make_cutlass(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    weights, ids = torch.topk(_logits(p, device, generator).softmax(-1), p.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    layer = _layer(p, p.cutlass_variant, device, generator)
    return Inputs(layer, ids=ids.int(), weights=weights, ep_size=p.ep_size, ep_rank=p.ep_rank)


def _make_trtllm(p: Namespace, device: Any, generator: Any) -> Inputs:
    routed = _router(p, device, generator)
    sizes = {"num_experts": p.num_experts, "intermediate_size": p.intermediate_size}
    return Inputs({**routed, **_layer(p, "fp8_block_scale", device, generator), **sizes})


def _chosen(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.ids, x.weights.to(dtype)) if "ids" in x else _route(x, dtype)


def _activated(h: torch.Tensor) -> torch.Tensor:
    """Of the linear projections, then the gates."""
    import torch

    linear, gate = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * linear


def _reference(x: Inputs) -> Outputs:
    """A loop over the experts in fp64, with activations rounded as the format rounds them."""
    import torch

    blocks = x.kind == "fp8_block_scale"
    ids, weights = _chosen(x, torch.float64)
    tokens = _rounded(x.input, blocks).double()
    out = torch.zeros_like(tokens)
    for e in range(x.up.shape[0]):
        token, slot = (ids == e + x.first).nonzero(as_tuple=True)
        if token.numel():
            up, down = (
                _dequantized(w[e], s[e] if s is not None else None, torch.float64)
                for w, s in zip((x.up, x.down), x.scales or (None, None), strict=True)
            )
            h = _rounded(_activated(tokens[token] @ up.T), blocks)
            out.index_add_(0, token, h @ down.T * weights[token, slot, None])
    return {"output": out}


def _torch_layer(x: Inputs) -> torch.Tensor:
    """Weights dequantized to 16 bits, slots sorted by expert, torch's grouped product; nothing waits for the device."""
    import torch
    from torch.nn.functional import grouped_mm

    blocks, dtype = x.kind == "fp8_block_scale", x.input.dtype
    ids, weights = _chosen(x, torch.float32)
    local = ids.long().flatten() - x.first
    experts = x.up.shape[0]
    local = torch.where((local >= 0) & (local < experts), local, experts)
    order = local.argsort(stable=True)
    ends = torch.searchsorted(local[order], torch.arange(experts, device=order.device), right=True, out_int32=True)
    up, down = (_dequantized(w, s, dtype) for w, s in zip((x.up, x.down), x.scales or (None, None), strict=True))
    rows = _rounded(x.input, blocks)[order // ids.shape[1]]
    h = _rounded(_activated(grouped_mm(rows, up.mT, offs=ends)), blocks)
    y = torch.empty_like(rows)
    y[order] = grouped_mm(h, down.mT, offs=ends)
    y = y.masked_fill((local == experts)[:, None], 0).view(*ids.shape, -1)
    return torch.einsum("tkh,tk->th", y.float(), weights).to(dtype)


def _work(p: Namespace, x: Inputs) -> Work:
    """Each hit expert's weights are read once; other ranks' experts cost nothing."""
    import torch

    ids = _chosen(x, torch.float32)[0].long() - x.first
    local = ids[(ids >= 0) & (ids < x.up.shape[0])]
    rows, hit = local.numel(), local.unique().numel()
    weights = sum(w[0].nbytes for w in (x.up, x.down, *x.scales))
    routing = x.scores.nbytes if "scores" in x else x.ids.nbytes + x.weights.nbytes
    flops = 6 * rows * p.hidden_size * p.intermediate_size
    unit = "matmul_fp8" if x.kind == "fp8_block_scale" else "matmul"
    return Work(flops, hit * weights + x.input.nbytes + x.output.nbytes + routing, unit)


def _call_cutlass(f: Callable[..., Any], x: Inputs) -> Any:
    returned = f(
        x.input, x.ids, x.weights, x.up, x.down, x.input.dtype, x.scales, ep_size=x.ep_size, ep_rank=x.ep_rank,
        output=x.output, use_deepseek_fp8_block_scale=x.kind == "fp8_block_scale",
        use_w4_group_scaling=x.kind == "mxfp4",
    )  # fmt: skip
    return returned[0] if isinstance(returned, (list, tuple)) else returned  # FlashInfer returns a list


def _call_trtllm(f: Callable[..., Any], x: Inputs) -> Any:
    return f(
        x.scores, x.bias, x.input, None, x.up, *x.scales[:1], x.down, *x.scales[1:], num_experts=x.num_experts,
        top_k=x.topk, n_group=x.n_group, topk_group=x.topk_group, intermediate_size=x.intermediate_size,
        local_expert_offset=x.first, local_num_experts=x.up.shape[0], routed_scaling_factor=x.routed_scaling_factor,
        routing_method_type=_DEEPSEEK, output=x.output,
    )  # fmt: skip


def _unsupported_routing(_: str, p: Namespace) -> str | None:
    groups, kept = p.n_group or 1, p.topk_group or 1
    if p.num_experts % groups or not kept <= groups:
        return f"--n_group must divide --num_experts and be at least --topk_group, got {groups} and {kept}"
    if p.top_k > p.num_experts // groups * kept:
        return f"--top_k must be at most {p.num_experts // groups * kept}, the experts that stay, got {p.top_k}"
    return None


def _unsupported_layer(p: Namespace, kind: str) -> str | None:
    multiple = {"fp8_block_scale": _BLOCK, "mxfp4": _GROUP}.get(kind, 8)
    if p.hidden_size % multiple or p.intermediate_size % multiple:
        return (
            f"--hidden_size and --intermediate_size must be multiples of {multiple}, got {p.hidden_size} and "
            f"{p.intermediate_size}"
        )
    if p.num_experts % p.ep_size or p.ep_rank >= p.ep_size:
        return f"--ep_size must divide --num_experts and exceed --ep_rank, got {p.ep_size} and {p.ep_rank}"
    if p.top_k > p.num_experts:
        return f"--top_k must be at most --num_experts, got {p.top_k}"
    if p.tp_size != 1:
        return "the case has no --tp_size: give the rank's --intermediate_size"
    if p.activation_type.lower() != "swiglu":
        return f"the case has --activation_type Swiglu only, got {p.activation_type}"
    if p.input_dtype not in ("bfloat16", "float16"):
        return f"--input_dtype must be bfloat16 or float16, got {p.input_dtype}"
    return None


def _unsupported_cutlass(backend: str, p: Namespace) -> str | None:
    if p.cutlass_variant in ("fp8", "nvfp4"):
        return f"the case has --cutlass_variant base, fp8_block_scale and mxfp4, got {p.cutlass_variant}"
    if p.cutlass_variant == "mxfp4" and backend.startswith(("flashinfer", "cutlass")):
        return "flashinfer takes mxfp4 weights in an order of its own"
    return _unsupported_layer(p, p.cutlass_variant)


def _unsupported_trtllm(_: str, p: Namespace) -> str | None:
    if p.routing_method != "deepseek_v3" or p.use_shuffled_weight or p.weight_layout:
        return "the case has --routing_method deepseek_v3 and weights as rows only"
    if p.input_dtype != "bfloat16":
        return f"--input_dtype must be bfloat16, got {p.input_dtype}"
    return _unsupported_layer(p, "fp8_block_scale") or _unsupported_routing("", p)


# Launched by every layer, by its size.
_ROWS = ("moe_sort", "moe_gather", "moe_gated_gemm", "moe_activation", "gemm", "moe_experts", "moe_few_tokens")
# Outputs have a deviation of 0.2 to 0.6, in fp8 of a fifth of that, times --routed_scaling_factor.
_TOLERANCE = {"output": Tolerance(2e-2, 3e-2)}


def _case(routine: str, also: tuple[str, ...], **fields: Any) -> Case:
    return Case(
        routine=routine, function=f"fused_moe.{routine}", outputs=lambda x, returned: {"output": returned},
        reference=_reference, work=_work, torch=_torch_layer, op="moe_finalize", also=(*_ROWS, *also),
        poison=("output",), tolerance=_TOLERANCE, **fields,
    )  # fmt: skip


CASES = (
    _case(
        "cutlass_fused_moe", ("moe_mixed_gemm",), make=_make_cutlass, call=_call_cutlass,
        unsupported=_unsupported_cutlass,
    ),
    _case(
        "trtllm_fp8_block_scale_moe", ("moe_route",), make=_make_trtllm, call=_call_trtllm,
        unsupported=_unsupported_trtllm,
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
        unsupported=_unsupported_routing,
    ),
)  # fmt: skip
