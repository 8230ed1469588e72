"""Experts in the formats of the MoE cases: weights and tokens, routing, the layer in fp64 and in torch, its work."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs, Outputs, Tolerance, Work, dtype_of

if TYPE_CHECKING:
    import torch

_BLOCK = 128  # fp8 values that share a scale
_GROUPS = {"mxfp4": 32, "nvfp4": 16, "mxfp8": 32}  # values that share a scale
_MULTIPLES = {"fp8_block_scale": _BLOCK, "mxfp4": 32, "nvfp4": 64, "fp8": 16}  # of hidden_size and intermediate_size
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
RMS = 2.93  # of random e2m1 codes; NVFP4 values are divided by it, as by a global scale
TOKEN_SCALE, ACTIVATED_SCALE = 1 / 64, 0.05  # of e4m3 with one scale: tokens, and activated values
METHODS = {"renormalize": 1, "deepseek_v3": 2, "llama4": 3, "renormalize_naive": 4, "topk": 5}  # RoutingMethodType
# Launched by every layer, by its size.
OPS = ("moe_sort", "moe_gather", "moe_gated_gemm", "moe_activation", "gemm", "moe_experts", "moe_few_tokens")
# Outputs have a deviation of 0.2 to 0.6, in fp8 of a tenth of that, times --routed_scaling_factor.
TOLERANCE = {"output": Tolerance(2e-2, 3e-2)}


def normal(shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
    """Normal in fp32; matrices one after another, since all experts of a layer in fp32 take much memory."""
    import torch

    out = torch.empty(shape, dtype=dtype, device=device)
    for matrix in out if out.ndim == 3 else (out,):
        matrix.copy_(torch.randn(matrix.shape, device=device, generator=generator) * scale)
    return out


def logits(p: Namespace, device: Any, generator: Any) -> torch.Tensor:
    """Normal, plus the logarithm of the popularity of each expert: rank ** -routing_skew, in random order."""
    import torch

    ranks = torch.randperm(p.num_experts, device=device, generator=generator) + 1
    noise = torch.randn(p.num_tokens, p.num_experts, device=device, generator=generator)
    found: torch.Tensor = noise - p.routing_skew * ranks.float().log()
    return found


# Values and scales


def quantized(kind: str, shape: tuple[int, ...], spread: float, dtype: torch.dtype, device: Any, generator: Any) -> Any:
    """Random values of a format with this deviation, and their scales; None where the format has none."""
    import torch

    if kind in ("mxfp4", "nvfp4"):
        packed = (*shape[:-1], shape[-1] // 2)
        codes = torch.randint(0, 256, packed, dtype=torch.uint8, device=device, generator=generator)
        grid = (*shape[:-1], shape[-1] // _GROUPS[kind])
        if kind == "nvfp4":
            scale = (torch.rand(grid, device=device, generator=generator) + 0.5) * spread
            return codes, scale.to(torch.float8_e4m3fn)
        exponent = 127 + round(math.log2(spread / RMS))
        span = exponent - 1, exponent + 2
        return codes, torch.randint(*span, grid, dtype=torch.uint8, device=device, generator=generator)
    if kind == "base":
        return normal(shape, spread, dtype, device, generator), None
    values = normal(shape, 64.0, torch.float8_e4m3fn, device, generator)
    if kind == "mxfp8":
        exponent = 127 + round(math.log2(spread / 64))
        grid = (*shape[:-1], shape[-1] // _GROUPS[kind])
        return values, torch.full(grid, exponent, dtype=torch.uint8, device=device)
    if kind == "fp8":
        return values, (torch.rand(shape[0], device=device, generator=generator) + 0.5) * spread / 64
    grid = (shape[0], shape[1] // _BLOCK, shape[2] // _BLOCK)
    return values, (torch.rand(grid, device=device, generator=generator) + 0.5) * spread / 64


def dequantized(kind: str, values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Values of a format times their scales."""
    import torch

    if scale is None:
        return values.to(dtype)
    if kind in ("mxfp4", "nvfp4"):
        codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).long()
        values = torch.tensor(_E2M1, dtype=dtype, device=values.device)[codes]
    values = values.to(dtype)
    if kind == "fp8":
        return values * scale.to(dtype).view(-1, *[1] * (values.ndim - scale.ndim)) if scale.ndim else values * scale
    if kind == "fp8_block_scale":
        return values * scale.to(dtype).repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)
    factor = scale.to(dtype) / RMS if kind == "nvfp4" else torch.exp2(scale.float() - 127).to(dtype)
    return values * factor.repeat_interleave(_GROUPS[kind], -1)


def _rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Activated values as the kernels of a format round them before the second product."""
    import torch

    e4m3 = torch.float8_e4m3fn
    if kind == "fp8":
        return (x.float() / ACTIVATED_SCALE).clamp(-448, 448).to(e4m3).to(x.dtype) * ACTIVATED_SCALE
    if kind != "fp8_block_scale":
        return x
    wide = x.unflatten(-1, (-1, _BLOCK)).float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    rounded: torch.Tensor = ((wide / scale).to(e4m3).float() * scale).flatten(-2).to(x.dtype)
    return rounded


# Routing


def router(p: Namespace, device: Any, generator: Any) -> dict[str, Any]:
    """Arguments of the router. Logits stay in fp32: in 16 bits, experts tie."""
    import torch

    noise = torch.randn(p.num_experts, device=device, generator=generator)
    return {
        "scores": logits(p, device, generator),
        "bias": noise * 0.1,
        "n_group": p.n_group or 1,
        "topk_group": p.topk_group or 1,
        "topk": p.top_k,
        "routed_scaling_factor": p.routed_scaling_factor,
    }


def route(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert numbers, and weights in dtype, by the rule of `x.method`; DeepSeek-V3's if it is not given."""
    import torch

    method, scores = x.get("method", "deepseek_v3"), x.scores.to(dtype)
    if method != "deepseek_v3":
        own, ids = scores.topk(x.topk, -1)
        if method == "renormalize_naive":
            own = scores.softmax(-1).gather(1, ids)
            return ids, own / own.sum(-1, keepdim=True)
        rules = {"renormalize": lambda own: own.softmax(-1), "llama4": torch.sigmoid, "topk": lambda own: own}
        return ids, rules[method](own)
    score = x.scores.float().sigmoid().to(dtype)
    choice = score if x.bias is None else score + x.bias.to(dtype)
    if x.n_group > 1:
        groups = choice.unflatten(1, (x.n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(x.topk_group, -1).indices, True)
        choice = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = choice.topk(x.topk, -1).indices
    weights = score.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * x.routed_scaling_factor


def chosen(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.ids, x.weights.to(dtype)) if "ids" in x else route(x, dtype)


# Layers


def local_experts(p: Namespace) -> tuple[int, int]:
    """The first expert of this rank and their number: --local_expert_offset and --local_num_experts, or --ep_*."""
    count = p.local_num_experts or p.num_experts // p.ep_size
    return p.local_expert_offset or p.ep_rank * count, count


def layer(p: Namespace, kind: str, device: Any, generator: Any, tokens_kind: str = "base") -> dict[str, Any]:
    """Tokens and the experts of this rank, each as values and scales of its format."""
    import torch

    dtype, (first, local) = dtype_of(p.input_dtype), local_experts(p)
    hidden, inter = p.hidden_size, p.intermediate_size
    up, up_scale = quantized(kind, (local, 2 * inter, hidden), hidden**-0.5, dtype, device, generator)
    down, down_scale = quantized(kind, (local, hidden, inter), inter**-0.5, dtype, device, generator)
    if kind.startswith("fp8"):
        down_scale *= 0.1  # small outputs, so that the tolerance covers values that round to the other side
    shape = (p.num_tokens, hidden)
    if tokens_kind == "fp8":  # one scale, which is the same in all runs
        tokens = normal(shape, 1 / TOKEN_SCALE, torch.float8_e4m3fn, device, generator)
        scale = torch.tensor(TOKEN_SCALE, device=device)
    else:
        tokens, scale = quantized(tokens_kind, shape, 1.0, dtype, device, generator)
    return {
        "input": tokens,
        "input_scale": scale,
        "input_kind": tokens_kind,
        "up": up,
        "down": down,
        "scales": [] if up_scale is None else [up_scale, down_scale],
        "kind": kind,
        "first": first,
        "output": torch.empty(shape, dtype=dtype, device=device),
    }


def constants(p: Namespace, device: Any) -> tuple[torch.Tensor, ...]:
    """alpha, beta and limit of SwigluBias for each expert of this rank, as gpt-oss has them; none of Swiglu."""
    import torch

    values = (1.702, 1.0, 7.0) if p.activation_type.lower() == "swiglubias" else ()
    return tuple(torch.full((local_experts(p)[1],), value, device=device) for value in values)


def _activated(h: torch.Tensor, x: Inputs) -> torch.Tensor:
    """Of the linear projections, then the gates. The constants are the same for all experts."""
    import torch

    linear, gate = h.chunk(2, -1)
    if not x.get("constants"):
        return torch.nn.functional.silu(gate) * linear
    alpha, beta, limit = (values[0].to(h.dtype) for values in x.constants)
    gate, linear = gate.minimum(limit), linear.minimum(limit).maximum(-limit)
    activated: torch.Tensor = gate * (alpha * gate).sigmoid() * (linear + beta)
    return activated


def _tokens(x: Inputs, dtype: torch.dtype) -> torch.Tensor:
    if x.kind == "fp8_block_scale":
        return _rounded(x.input, x.kind).to(dtype)
    return dequantized(x.input_kind, x.input, x.input_scale, dtype)


def reference(x: Inputs) -> Outputs:
    """A loop over the experts in fp64, with activations rounded as the format rounds them."""
    import torch

    ids, weights = chosen(x, torch.float64)
    tokens, on_input = _tokens(x, torch.float64), x.get("on_input", False)
    out = torch.zeros_like(tokens)
    for e in range(x.up.shape[0]):
        token, slot = (ids == e + x.first).nonzero(as_tuple=True)
        if token.numel():
            up, down = (
                dequantized(x.kind, w[e], None if s is None else s[e], torch.float64)
                for w, s in zip((x.up, x.down), x.scales or (None, None), strict=True)
            )
            share = weights[token, slot, None]
            h = _rounded(_activated((tokens[token] * share if on_input else tokens[token]) @ up.T, x), x.kind)
            out.index_add_(0, token, h @ down.T if on_input else h @ down.T * share)
    return {"output": out}


def torch_layer(x: Inputs) -> torch.Tensor:
    """Weights dequantized to 16 bits, slots sorted by expert, torch's grouped product; nothing waits for the device."""
    import torch
    from torch.nn.functional import grouped_mm

    dtype, on_input = x.output.dtype, x.get("on_input", False)
    ids, weights = chosen(x, torch.float32)
    local = ids.long().flatten() - x.first
    experts = x.up.shape[0]
    local = torch.where((local >= 0) & (local < experts), local, experts)
    order = local.argsort(stable=True)
    ends = torch.searchsorted(local[order], torch.arange(experts, device=order.device), right=True, out_int32=True)
    up, down = (
        dequantized(x.kind, w, s, torch.float32 if s is not None else dtype).to(dtype)
        for w, s in zip((x.up, x.down), x.scales or (None, None), strict=True)
    )
    rows = _tokens(x, torch.float32 if x.input_scale is not None else dtype).to(dtype)[order // ids.shape[1]]
    if on_input:
        rows = (rows.float() * weights.flatten()[order, None]).to(dtype)
    h = _rounded(_activated(grouped_mm(rows, up.mT, offs=ends), x), x.kind)
    y = torch.empty_like(rows)
    y[order] = grouped_mm(h, down.mT, offs=ends)
    y = y.masked_fill((local == experts)[:, None], 0).view(*ids.shape, -1)
    return torch.einsum("tkh,tk->th", y.float(), torch.ones_like(weights) if on_input else weights).to(dtype)


def work(p: Namespace, x: Inputs) -> Work:
    """Each hit expert's weights are read once; other ranks' experts cost nothing."""
    import torch

    ids = chosen(x, torch.float32)[0].long() - x.first
    local = ids[(ids >= 0) & (ids < x.up.shape[0])]
    rows, hit = local.numel(), local.unique().numel()
    weights = sum(w[0].nbytes for w in (x.up, x.down, *x.scales))
    routing = x.scores.nbytes if "scores" in x else x.ids.nbytes + x.weights.nbytes
    flops = 6 * rows * p.hidden_size * p.intermediate_size
    unit = "matmul_fp8" if x.kind in ("fp8_block_scale", "fp8") else "matmul"
    return Work(flops, hit * weights + x.input.nbytes + x.output.nbytes + routing, unit)


def unsupported_routing(_: str, p: Namespace) -> str | None:
    groups, kept = p.n_group or 1, p.topk_group or 1
    if p.num_experts % groups or not kept <= groups:
        return f"--n_group must divide --num_experts and be at least --topk_group, got {groups} and {kept}"
    if p.top_k > p.num_experts // groups * kept:
        return f"--top_k must be at most {p.num_experts // groups * kept}, the experts that stay, got {p.top_k}"
    return None


def unsupported_layer(p: Namespace, kind: str, activations: tuple[str, ...] = ("Swiglu",)) -> str | None:
    multiple = _MULTIPLES.get(kind, 8)
    if p.hidden_size % multiple or p.intermediate_size % multiple:
        return (
            f"--hidden_size and --intermediate_size must be multiples of {multiple}, got {p.hidden_size} and "
            f"{p.intermediate_size}"
        )
    if p.num_experts % p.ep_size or p.ep_rank >= p.ep_size:
        return f"--ep_size must divide --num_experts and exceed --ep_rank, got {p.ep_size} and {p.ep_rank}"
    if sum(local_experts(p)) > p.num_experts:
        return f"--local_expert_offset and --local_num_experts must be at most --num_experts, got {local_experts(p)}"
    if p.top_k > p.num_experts:
        return f"--top_k must be at most --num_experts, got {p.top_k}"
    if p.tp_size != 1:
        return "the case has no --tp_size: give the rank's --intermediate_size"
    if p.activation_type.lower() not in map(str.lower, activations):
        return f"--activation_type must be {' or '.join(activations)}, got {p.activation_type}"
    if p.input_dtype not in ("bfloat16", "float16"):
        return f"--input_dtype must be bfloat16 or float16, got {p.input_dtype}"
    return None
