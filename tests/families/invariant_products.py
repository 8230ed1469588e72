"""Requests for the judge of batch invariance: tokens of quantized products and of experts, in batches of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

import fi_core
from families.invariance import Requests
from families.invariant_requests import Tensors, cut_rows, normal, offsets, split
from fi_core import fp4_quantization as fp4
from fi_core import fp8_quantization as fp8
from fi_core import fused_moe, gemm

N, K = 512, 1152  # k of more than one pass through the rings of all kernels
COUNTS = (1, 2, 7, 17, 40, 66, 130, 300)  # kernels for few tokens have up to 64, others tiles of 64 to 256


def tokens(rng: Random, device: str) -> Tensors:
    return {"x": normal(rng, device, rng.choice(COUNTS), K)}


@functools.cache
def weights(device: str, *shape: int) -> torch.Tensor:
    return normal(Random(3), device, *shape) * 0.1


def products(multiply: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    def call(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
        return [[own] for own in split(multiply(torch.cat([r["x"] for r in requests]), device), requests, "x")]

    return call


def blocks_of_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and the scales of 128 x 128."""
    tiles = w.float().unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    scale = tiles.abs().amax((-3, -1)) / 448
    return (tiles / scale[..., None, :, None]).flatten(-4, -3).flatten(-2).to(torch.float8_e4m3fn), scale


def rows_of_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and the scales of 1 x 128."""
    parts = x.float().unflatten(-1, (-1, 128))
    scale = parts.abs().amax(-1).clamp(min=1e-6) / 448
    return (parts / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale


def groupwise(x: torch.Tensor, device: str) -> torch.Tensor:
    (a, a_scale), (b, b_scale) = rows_of_tokens(x), blocks_of_weights(weights(device, N, K))
    return gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", out_dtype=torch.bfloat16)


def quantized_here(x: torch.Tensor, device: str) -> torch.Tensor:
    w, scale = blocks_of_weights(weights(device, N, K))
    return gemm.fp8_blockscale_gemm_sm90(x, w, weight_scale=scale)


def one_scale(x: torch.Tensor, device: str) -> torch.Tensor:
    a, b = (y.to(torch.float8_e4m3fn) for y in (x, weights(device, N, K)))
    one = torch.ones((), device=device)
    return gemm.bmm_fp8(a[None], b.T[None], one, one, torch.bfloat16)[0]


def mxfp8(x: torch.Tensor, device: str) -> torch.Tensor:
    a, a_scale = fp8.mxfp8_quantize(x)
    b, b_scale = fp8.mxfp8_quantize(weights(device, N, K))
    return gemm.mm_mxfp8(a, b.T, a_scale, b_scale, out_dtype=torch.bfloat16)


def nvfp4(x: torch.Tensor, device: str) -> torch.Tensor:
    one = torch.ones(1, device=device)
    a, a_scale = fp4.nvfp4_quantize(x, one)
    b, b_scale = fp4.nvfp4_quantize(weights(device, N, K), one)
    return gemm.mm_fp4(a, b.T, a_scale, b_scale.T, one, torch.bfloat16)


GROUPS = 3


def in_groups(requests: Sequence[Tensors], rng: Random) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Rows of all requests as the first group, and those of drawn others behind them."""
    x = torch.cat([r["x"] for r in requests])
    others = [normal(rng, str(x.device), rng.choice(COUNTS), K) for _ in range(GROUPS - 1)]
    return torch.cat([x, *others]), offsets([len(x), *map(len, others)], str(x.device)), [len(r["x"]) for r in requests]


def grouped(multiply: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]) -> Any:
    def call(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
        x, indptr, counts = in_groups(requests, rng)
        return [[own] for own in multiply(x, indptr, device)[: sum(counts)].split(counts)]

    return call


def groups_groupwise(x: torch.Tensor, indptr: torch.Tensor, device: str) -> torch.Tensor:
    (a, a_scale), (b, b_scale) = rows_of_tokens(x), blocks_of_weights(weights(device, GROUPS, N, K))
    return gemm.group_gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indptr, scale_major_mode="K")


def groups_bf16(x: torch.Tensor, indptr: torch.Tensor, device: str) -> torch.Tensor:
    return fi_core.grouped_mm.grouped_mm_bf16(x, weights(device, GROUPS, N, K), indptr)


HIDDEN, WIDTH, EXPERTS, TOP_K = 256, 256, 8, 2


def routed(rng: Random, device: str) -> Tensors:
    count = rng.choice((1, 3, 20, 300))
    ids = torch.tensor([rng.sample(range(EXPERTS), TOP_K) for _ in range(count)], dtype=torch.int32, device=device)
    scales = torch.tensor([[rng.random() for _ in range(TOP_K)] for _ in range(count)], device=device)
    return {"x": normal(rng, device, count, HIDDEN), "ids": ids, "scales": scales}


def experts(requests: Sequence[Tensors], rng: Random, device: str, blocks: bool = False) -> list[list[torch.Tensor]]:
    """Of few tokens a layer takes the stream of weights, of many products by groups."""
    x, ids, scales = (torch.cat([r[name] for r in requests]) for name in ("x", "ids", "scales"))
    up, down = weights(device, EXPERTS, 2 * WIDTH, HIDDEN), weights(device, EXPERTS, HIDDEN, WIDTH)
    options: dict[str, Any] = {"quant_scales": []}
    if blocks:
        (up, up_scale), (down, down_scale) = blocks_of_weights(up), blocks_of_weights(down)
        options = {"quant_scales": [up_scale, down_scale], "use_deepseek_fp8_block_scale": True}
    out = fused_moe.cutlass_fused_moe(x, ids, scales, up, down, torch.bfloat16, **options)
    return [[own] for own in split(out, requests, "x")]


def cut_routed(request: Tensors, rng: Random) -> list[Tensors]:
    at = rng.randrange(len(request["x"]) + 1)
    return [{n: y[a:b] for n, y in request.items()} for a, b in ((0, at), (at, len(request["x"]))) if b > a]


PRODUCTS = [
    Requests("mm_bf16, many tokens", tokens, products(lambda x, d: fi_core.mm_bf16(x, weights(d, N, K).T)), cut_rows),
    Requests("bmm_fp8, many tokens", tokens, products(one_scale), cut_rows),
    Requests("gemm_fp8_nt_groupwise", tokens, products(groupwise), cut_rows),
    Requests("fp8_blockscale_gemm_sm90", tokens, products(quantized_here), cut_rows),
    Requests("mm_mxfp8", tokens, products(mxfp8), cut_rows),
    Requests("mm_fp4", tokens, products(nvfp4), cut_rows),
    Requests("group_gemm_fp8_nt_groupwise", tokens, grouped(groups_groupwise), cut_rows),
    Requests("grouped_mm_bf16", tokens, grouped(groups_bf16), cut_rows),
    Requests("cutlass_fused_moe, many tokens", routed, experts, cut_routed),
    Requests("cutlass_fused_moe, e4m3", routed, functools.partial(experts, blocks=True), cut_routed),
]
