"""The experts of few tokens in one launch: tiles of all sizes, experts with many rows and with none, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import rand
from families.moe_reference import block_quantized, error, experts
from fi_core.fused_moe.launches import sort_slots, sum_experts
from fi_core.fused_moe.layer import Projection
from fi_core.fused_moe.moe_experts import moe_experts
from fi_core.fused_moe.trtllm import places_of_rows
from fi_core.runtime.launch.plan import AtOnce
from fi_core.tllm_enums import ActivationType as Act

BF16 = torch.bfloat16


def run(
    x: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, first: int = 0, **options: Any
) -> torch.Tensor:
    """The sum of the experts with equal weights."""
    tables = sort_slots(AtOnce(ids.device), ids, len(w1), first)
    out = torch.full((ids.numel(), x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    width = Projection(w2).columns_of_k * (2 if w2.dtype is torch.uint8 else 1)
    activated = torch.full((ids.numel(), width), float("nan"), dtype=x.dtype, device=x.device)
    moe_experts(out, activated, x, w1, w2, tables.offsets, tables.rows, tables.counters, **options)
    total = torch.empty_like(x)
    sum_experts(AtOnce(x.device), total, out, tables, torch.ones(ids.shape, device=x.device), Projection(w2))
    return total


def weights(
    e: int, h: int, i: int, device: str, dtype: torch.dtype = BF16, gated: bool = True
) -> tuple[torch.Tensor, ...]:
    w1 = rand(e, 2 * i if gated else i, h, dtype=dtype, device=device, seed=1, scale=h**-0.5)
    return w1, rand(e, h, i, dtype=dtype, device=device, seed=2, scale=i**-0.5)


def mxfp4(e: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes, scales around 2 / k, and the values in fp64."""
    g = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (e, n, k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(116, 120, (e, n, k // 32), generator=g, dtype=torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(2).long()
    wide = values[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    wide *= (2.0 ** (scales.double() - 127)).repeat_interleave(32, 2)
    return codes.to(device), scales.to(device), wide.to(device)


def drawn_ids(tokens: int, e: int, k: int, device: str, skew: str) -> torch.Tensor:
    if skew == "one":  # all tokens meet the same experts
        return torch.arange(k, dtype=torch.int32, device=device).repeat(tokens, 1)
    scores = torch.rand(tokens, e, generator=torch.Generator().manual_seed(tokens))
    return scores.topk(k).indices.to(torch.int32).to(device)


@pytest.mark.parametrize("skew", ["even", "one"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("e", "k", "h", "i"), [(8, 2, 256, 128), (24, 4, 384, 128), (3, 1, 640, 128)])
@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (7, 8), (9, 8), (30, 16), (33, 32), (70, 64)])
def test_tiles(tokens: int, tile: int, e: int, k: int, h: int, i: int, fp8: bool, skew: str, device: str) -> None:
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), weights(e, h, i, device)
    ids, options = drawn_ids(tokens, e, k, device, skew), dict[str, Any]()
    d1, d2 = w1, w2
    if fp8:
        (w1, s1, d1), (w2, s2, d2) = block_quantized(w1), block_quantized(w2)
        options = {"up_scale": s1, "down_scale": s2}
    out = run(x, ids, w1, w2, expected_tokens=tile, **options)
    want = experts(x, ids, torch.ones(ids.shape, device=device), d1, d2)
    assert error(out, want) < (6e-2 if fp8 else 8e-3)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("tile", "fp8", "kind"), [(0, True, Act.Swiglu), (64, True, Act.Swiglu), (64, True, Act.Relu2),
                                                   (128, False, Act.Swiglu), (128, False, Act.Relu2)])  # fmt: skip
@pytest.mark.parametrize(("tokens", "few"), [(3, True), (21, False)])
def test_layouts_of_weights(
    tokens: int, few: bool, tile: int, fp8: bool, kind: Act, in_blocks: bool, device: str
) -> None:
    """Rows shuffled as for TensorRT-LLM, blocks of 128 bytes apart: the results of weights in rows, to the bit."""
    e, k, h, i, gated = 5, 2, 384, 256, kind is Act.Swiglu
    x, own = rand(tokens, h, dtype=BF16, device=device), weights(e, h, i, device, gated=gated)
    ids, options = drawn_ids(tokens, e, k, device, "even"), dict[str, Any](activation=kind)
    bias = rand(e, own[0].shape[1], dtype=BF16, device=device, seed=4)
    if fp8:
        (w1, s1, _), (w2, s2, _) = block_quantized(own[0]), block_quantized(own[1])
        own, options = (w1, w2), options | {"up_scale": s1, "down_scale": s2}
    want = run(x, ids, *own, bias=bias, **options)
    if tile:
        orders = [
            places_of_rows(w.shape[1], tile, gated and tile == 128 and not j, w.device) for j, w in enumerate(own)
        ]
        inverse = [order.long().argsort() for order in orders]
        bias = bias[:, inverse[0]].contiguous()
        own = tuple(w.view(torch.uint8)[:, at].view(w.dtype) if fp8 else w[:, at] for w, at in zip(own, inverse))
    if in_blocks:
        line = 128 // own[0].element_size()
        own = tuple(w.unflatten(2, (-1, line)).transpose(1, 2).contiguous() for w in own)
    assert torch.equal(run(x, ids, *own, bias=bias, shuffle_tile=tile, **options), want)
    tables = sort_slots(AtOnce(ids.device), ids, e, 0)
    rows = torch.empty(tokens * k, h, dtype=BF16, device=device), torch.empty(tokens * k, i, dtype=BF16, device=device)
    summed = torch.full_like(x, float("nan"))
    if few:
        moe_experts(*rows, x, *own, tables.offsets, tables.rows, tables.counters, bias=bias, sum=summed, ids=ids,
                    shuffle_tile=tile, **options)  # fmt: skip
        assert torch.equal(summed, want)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", [Act.Swiglu, Act.SwigluBias, Act.Relu2])
def test_activations(kind: Act, dtype: torch.dtype, device: str) -> None:
    """With biases; inter is a multiple of 8 only, so the last tile is partly outside of the weights."""
    e, k, h, i, tokens = 6, 2, 136, 104, 11
    gated = kind is not Act.Relu2
    x, (w1, w2) = rand(tokens, h, dtype=dtype, device=device), weights(e, h, i, device, dtype, gated)
    bias = rand(e, w1.shape[1], dtype=dtype, device=device, seed=4)
    per_expert = torch.linspace(0.5, 2.0, e, device=device)
    constants: dict[str, Any] = (
        {"alpha": per_expert, "beta": per_expert - 1, "limit": per_expert} if kind is Act.SwigluBias else {}
    )
    ids = drawn_ids(tokens, e, k, device, "even")
    out = run(x, ids, w1, w2, bias=bias, activation=kind, **constants)
    want = experts(x, ids, torch.ones(ids.shape, device=device), w1, w2, kind=kind, b1=bias, constants=constants)
    assert error(out, want) < 8e-3


@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (13, 16), (40, 32)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_mxfp4(tokens: int, tile: int, dtype: torch.dtype, device: str) -> None:
    """Rows of scales that begin at any byte, small and large scales, biases."""
    e, k, h, i = 12, 3, 352, 224
    x = rand(tokens, h, dtype=dtype, device=device)
    (w1, s1, d1), (w2, s2, d2) = (mxfp4(e, *shape, device) for shape in ((2 * i, h), (h, i)))
    bias = rand(e, 2 * i, dtype=dtype, device=device, seed=4)
    ids = drawn_ids(tokens, e, k, device, "even")
    out = run(x, ids, w1, w2, expected_tokens=tile, up_scale=s1, down_scale=s2, bias=bias)
    want = experts(x, ids, torch.ones(ids.shape, device=device), d1, d2, b1=bias)
    assert error(out, want) < 8e-3


def test_experts_of_a_rank(device: str) -> None:
    """Ranks sum to the whole; a rank without rows writes nothing."""
    e, k, h, i, tokens = 16, 3, 128, 128, 20
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), weights(e, h, i, device)
    ids = drawn_ids(tokens, 12, k, device, "even")
    parts = [run(x, ids, w1[f : f + 4], w2[f : f + 4], first=f).float() for f in range(0, e, 4)]
    want = experts(x, ids, torch.ones(ids.shape, device=device), w1, w2)
    assert error(torch.stack(parts).sum(0), want) < 8e-3
    assert parts[3].eq(0).all()


@pytest.mark.parametrize("weight", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize(("tokens", "k"), [(0, 4), (1, 1), (1, 8), (5, 3), (8, 8), (16, 4), (64, 1)])
def test_sums_of_few_slots(tokens: int, k: int, weight: str, device: str) -> None:
    """One launch sorts slots and sums experts, as separate kernels do; the first expert is that of a rank."""
    e, h, i, first = 16, 256, 128, 4
    x, bias = (rand(n, h, dtype=BF16, device=device, seed=n) for n in (tokens, e))
    ids = drawn_ids(tokens, e + 8, k, device, "even")
    if k > 2 and tokens:
        ids[0, 1] = ids[0, 0]  # a token may name an expert twice
    scales = torch.rand(tokens, k, generator=torch.Generator().manual_seed(k)).to(device)
    w1, w2 = weights(e, h, i, device)
    options = dict[str, Any]()
    if weight == "fp8":
        (w1, s1, d1), (w2, s2, d2) = (block_quantized(w) for w in (w1, w2))
        options = {"up_scale": s1, "down_scale": s2}
    elif weight == "mxfp4":
        (w1, s1, d1), (w2, s2, d2) = (mxfp4(e, *shape, device) for shape in ((2 * i, h), (h, i)))
        options = {"up_scale": s1, "down_scale": s2}
    else:
        d1, d2 = w1, w2
    tables = sort_slots(AtOnce(ids.device), ids, e, first)
    out, activated = (torch.full((ids.numel(), n), float("nan"), dtype=BF16, device=device) for n in (h, i))
    total = torch.full_like(x, float("nan"))
    moe_experts(out, activated, x, w1, w2, tables.offsets, tables.rows, tables.counters, sum=total,
                ids=ids, weights=scales, down_bias=bias, first_expert=first, **options)  # fmt: skip
    want = experts(x, ids, scales, d1, d2, first=first, b2=bias)
    assert error(total, want) < (6e-2 if weight == "fp8" else 8e-3)
    apart = torch.empty_like(x)
    sum_experts(AtOnce(x.device), apart, out, tables, scales, Projection(w2, bias=bias))
    assert torch.equal(total, apart)


def test_sums_without_local_experts_are_zeros(device: str) -> None:
    e, h, i = 4, 128, 128
    x, (w1, w2) = rand(3, h, dtype=BF16, device=device), weights(e, h, i, device)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32, device=device)
    tables = sort_slots(AtOnce(ids.device), ids, e, 8)
    out, activated = (torch.empty((6, n), dtype=BF16, device=device) for n in (h, i))
    total = torch.full_like(x, float("nan"))
    moe_experts(out, activated, x, w1, w2, tables.offsets, tables.rows, tables.counters, sum=total, ids=ids,
                first_expert=8)  # fmt: skip
    assert total.eq(0).all()


def test_many_slots_are_not_summed() -> None:
    e, h, i = 4, 128, 128
    x, (w1, w2) = rand(33, h, dtype=BF16, device="cpu"), weights(e, h, i, "cpu")
    ids = torch.zeros((33, 2), dtype=torch.int32)
    tables = sort_slots(AtOnce(ids.device), ids, e, 0)
    out, activated = (torch.empty((66, n), dtype=BF16) for n in (h, i))
    with pytest.raises(ValueError, match="ids must have at most 64 elements"):
        moe_experts(out, activated, x, w1, w2, tables.offsets, tables.rows, tables.counters, sum=torch.empty_like(x),
                    ids=ids)  # fmt: skip


@pytest.mark.gpu
def test_rows_are_the_same_in_any_batch() -> None:
    """Of 30 runs with other tokens beside it, also of other experts with more tiles."""
    e, k, h, i = 32, 4, 512, 256
    (w1, s1, _), (w2, s2, _) = (block_quantized(w) for w in weights(e, h, i, "cuda"))
    x = rand(64, h, dtype=BF16, device="cuda")
    ids = drawn_ids(64, e, k, "cuda", "even")
    alone = run(x[:1], ids[:1], w1, w2, up_scale=s1, down_scale=s2)
    for tokens in range(2, 62, 2):
        assert torch.equal(run(x[:tokens], ids[:tokens], w1, w2, up_scale=s1, down_scale=s2)[:1], alone)


@pytest.mark.gpu
def test_graph_replay_with_changing_routing() -> None:
    e, k, h, i, tokens = 64, 4, 256, 128, 16
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device="cuda"), weights(e, h, i, "cuda")
    ids = drawn_ids(tokens, e, k, "cuda", "even")
    scales = torch.ones(ids.shape, device="cuda")

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        """By way of sorted rows, and summed in the launch."""
        tables = sort_slots(AtOnce(ids.device), ids, e, 0)
        rows, activated = (torch.empty((ids.numel(), n), dtype=BF16, device="cuda") for n in (h, i))
        total = torch.empty_like(x)
        moe_experts(rows, activated, x, w1, w2, tables.offsets, tables.rows, tables.counters, sum=total, ids=ids)
        return run(x, ids, w1, w2), total

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, total = both()
    for n in range(200):
        ids.copy_(drawn_ids(tokens, e, k, "cuda", "even").roll(n, 0).add(n).remainder(e))
        graph.replay()
        assert torch.equal(out, total)
        if n % 20 == 0:
            assert error(out, experts(x, ids, scales, w1, w2)) < 8e-3
