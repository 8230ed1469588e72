"""Mixtures of experts in fp64: activations, routing, the layer as a loop over experts, formats of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, silu

from fi_core.tllm_enums import ActivationType as Act
from fi_core.tllm_enums import RoutingMethodType as Route
from fi_core.tllm_enums import is_gated_activation

E4M3 = torch.float8_e4m3fn


def activate(
    h: torch.Tensor, kind: int, alpha: float = 1.0, beta: float = 0.0, limit: float = float("inf")
) -> torch.Tensor:
    """Of rows `[.., 2 width]` (linear projection, gate), or `[.., width]`."""
    if is_gated_activation(kind):
        u, g = h.chunk(2, -1)
        if kind == Act.Swiglu:
            return silu(g) * u
        if kind == Act.Geglu:
            return gelu(g) * u
        if kind == Act.GegluTanh:
            return gelu(g, approximate="tanh") * u
        if kind == Act.SwigluBias:
            g = g.clamp(max=limit)
            return g * torch.sigmoid(alpha * g) * (u.clamp(-limit, limit) + beta)
        if kind == Act.SwigluStep:
            return silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0)
        if kind == Act.Situ and beta == 0.0:
            alpha, beta = 25.0, 4.0
        return beta * torch.tanh(g / beta) * torch.sigmoid(g) * alpha * torch.tanh(u / alpha)
    plain: dict[Act, Callable[[torch.Tensor], torch.Tensor]] = {
        Act.Gelu: gelu, Act.Relu: torch.relu, Act.Silu: silu, Act.Identity: lambda x: x
    }  # fmt: skip
    if kind in plain:
        return plain[Act(kind)](h)
    r = torch.relu(h)
    return r.square() if kind == Act.Relu2 else (limit * torch.tanh(r / limit)).square()


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    first: int = 0,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    kind: int = Act.Swiglu,
    constants: dict[str, torch.Tensor] | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """The layer in fp64."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64, device=x.device)
    for e in range(w1.shape[0]):
        token, slot = (ids == e + first).nonzero(as_tuple=True)
        if not len(token):
            continue
        h = x[token].double() @ w1[e].double().T
        if b1 is not None:
            h = h + b1[e].double()
        own = {name: float(value[e]) for name, value in (constants or {}).items()}
        if limit is not None:
            own["limit"] = limit
        y = activate(h, kind, **own) @ w2[e].double().T
        if b2 is not None:
            y = y + b2[e].double()
        out.index_add_(0, token, y * scales[token, slot, None].double())
    return out


def route(
    logits: torch.Tensor,
    method: int,
    k: int,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts and their weights; ties to the lower number, NaN as -inf."""
    logits = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    sigmoid = torch.sigmoid(logits.float()).double()
    biased = method in (Route.DeepSeekV3, Route.MiniMax2)
    score = sigmoid if biased or method in (Route.SigmoidRenorm, Route.Sigmoid) else logits
    if biased and bias is not None:
        score = score + bias.double()
    if method == Route.DeepSeekV3 and n_group > 1:
        groups = score.view(len(score), n_group, -1)
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = best.sort(descending=True, stable=True).indices[:, :topk_group]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        score = groups.where(mask[..., None], -torch.inf).flatten(1)
    ids = score.sort(descending=True, stable=True).indices[:, :k]
    own = logits.gather(1, ids)
    weights = sigmoid.gather(1, ids)
    if method in (Route.Default, Route.RenormalizeNaive):
        weights = logits.softmax(-1).gather(1, ids)
    elif method == Route.Renormalize:
        weights = own.softmax(-1)
    elif method == Route.TopK:
        weights = own
    if biased or method == Route.RenormalizeNaive or (method == Route.SigmoidRenorm and normalize):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale if biased else weights


def chosen(tokens: int, num_experts: int, k: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, and weights that add up to 1."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.randn(tokens, num_experts, generator=generator).softmax(-1).topk(k)
    return top.indices.int().to(device), (top.values / top.values.sum(-1, keepdim=True)).to(device)


def block_quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 with scales of 128 x 128, the scales, and the values in fp64."""
    experts_, rows, columns = w.shape
    blocks = w.float().view(experts_, rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((2, 4)).clamp(min=1e-10) / 448
    q = (blocks / scale[:, :, None, :, None]).view(w.shape).to(E4M3)
    wide = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return q, scale, q.double() * wide


def tensor_quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 with a scale for each matrix, the scales, and the values in fp64."""
    scale = w.float().flatten(1).abs().amax(1) / 448
    q = (w.float() / scale.view(-1, *[1] * (w.ndim - 1))).to(E4M3)
    return q, scale, q.double() * scale.double().view(-1, *[1] * (w.ndim - 1))


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((out.double() - want).norm() / want.norm().clamp(min=1e-30))


def through_e4m3(x: torch.Tensor, block: int = 0, powers: bool = False) -> torch.Tensor:
    """Rows, or blocks of columns, rounded to e4m3 and back; scales `amax / 448`, or the next power of two."""
    parts = x.unflatten(-1, (-1, block or x.shape[-1]))
    scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    scale = torch.exp2(scale.log2().ceil()) if powers else scale
    return ((parts / scale).float().to(E4M3).double() * scale).flatten(-2)


# The error of a layer whose activations become e4m3 before each product. The linear projection, the gate and the
# activated value are rounded to bf16 before, by up to r = 3 * 2^-9. A part r / step of values crosses a midpoint of
# e4m3, and moves by a step, up to 2^-3: the root of their mean square is that of r * step. The result is bf16 too.
E4M3_LIMIT = (3 * 2.0**-9 * 2.0**-3) ** 0.5 + 2.0**-8

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _blocks(w: torch.Tensor, size: int) -> torch.Tensor:
    return w.double().view(*w.shape[:-1], -1, size)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """`[.., k]` codes of 4 bits, two a byte, the first in the lower half."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _fp4(blocks: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes of blocks divided by their scales, and their values times the scales."""
    table = _E2M1.to(blocks.device)
    x = blocks / scales[..., None].clamp(min=1e-30)
    codes = (x.abs()[..., None] - table).abs().argmin(-1)
    values = table[codes] * x.sign() * scales[..., None]
    return _pack((codes + 8 * (x < 0)).view(shape)), values.view(shape)


def mxfp4_quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed e2m1, ue8m0 scales of 32, and the values."""
    blocks = _blocks(w, 32)
    exponent = torch.log2(blocks.abs().amax(-1).clamp(min=1e-30) / 6).ceil()
    packed, values = _fp4(blocks, 2**exponent, w.shape)
    return packed, (exponent + 127).to(torch.uint8), values


def nvfp4_quantized(w: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed e2m1, e4m3 scales of 16 as bytes, and the values (times 1, not times global_scale)."""
    blocks = _blocks(w, 16) * global_scale
    scales = (blocks.abs().amax(-1) / 6).float().to(E4M3)
    packed, values = _fp4(blocks, scales.double(), w.shape)
    return packed, scales.view(torch.uint8), values / global_scale


def mxfp8_quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3, ue8m0 scales of 32, and the values."""
    blocks = _blocks(w, 32)
    exponent = torch.log2(blocks.abs().amax(-1).clamp(min=1e-30) / 448).ceil()
    q = (blocks / 2 ** exponent[..., None]).float().to(E4M3)
    return q.view(w.shape), (exponent + 127).to(torch.uint8), (q.double() * 2 ** exponent[..., None]).view(w.shape)


def int4_quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed signed 4-bit integers, bf16 scales of 128, and the values."""
    blocks = _blocks(w, 128)
    scales = (blocks.abs().amax(-1) / 7).bfloat16()
    q = (blocks / scales.double()[..., None]).round().clamp(-8, 7)
    return _pack((q.long() & 15).view(w.shape)), scales, (q * scales.double()[..., None]).view(w.shape)
