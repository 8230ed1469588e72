"""Mixtures of experts: routing, sorting, the experts in every format, slices of ranks, graphs, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import moe_reference as reference
from families.harness import rand
from families.moe_reference import block_quantized, chosen, error, experts, route, tensor_quantized
from fi_core.fused_moe import ActivationType as Act
from fi_core.fused_moe import RoutingMethodType as Route
from fi_core.fused_moe import (
    cutlass_fused_moe,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    is_gated_activation,
)
from fi_core.fused_moe.activations import activation_of
from fi_core.fused_moe.launches import sort_slots
from fi_core.fused_moe.ops import moe_gated_gemm, moe_route, moe_sort
from fi_core.quantization import block_scale_interleave
from fi_core.runtime.launch.plan import AtOnce

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Relative error against fp64: rounding of activations to 16 bits twice, or to e4m3 twice.
LIMIT = {"16 bits": 8e-3, "fp8": 6e-2}


def layer(
    e: int, h: int, i: int, device: str, dtype: torch.dtype = BF16, gated: bool = True
) -> tuple[torch.Tensor, ...]:
    n = 2 * i if gated else i
    w1 = rand(e, n, h, dtype=dtype, device=device, seed=1, scale=h**-0.5)
    return w1, rand(e, h, i, dtype=dtype, device=device, seed=2, scale=i**-0.5)


def weights_of(w: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, ...]:
    """The weights as they are or as e4m3, the scales of blocks, and the values."""
    return block_quantized(w) if fp8 else (w, torch.empty(0), w)


def routed(logits: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(logits), k), -9, dtype=torch.int32, device=logits.device)
    weights = torch.full((len(logits), k), float("nan"), device=logits.device)
    moe_route(ids, weights, logits, **options)
    return ids, weights


@pytest.mark.parametrize("method", [m for m in Route if m is not Route.Unspecified])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"), [(5, 8, 2), (33, 128, 8), (7, 384, 8), (3, 60, 4), (2, 512, 16)]
)
def test_routing(method: int, tokens: int, num_experts: int, k: int, device: str) -> None:
    """Each formula, with and without normalisation; equal logits are in it."""
    k = 1 if method == Route.Llama4 else k
    logits = (rand(tokens, num_experts, dtype=torch.float32, device=device, scale=2.0) * 4).round() / 4
    bias = rand(num_experts, dtype=torch.float32, device=device, seed=3)
    for normalize in (True, False):
        options: dict[str, Any] = {"method": method, "scale": 2.5, "normalize": normalize}
        groups: dict[str, Any] = {"n_group": 4, "topk_group": 2} if method == Route.DeepSeekV3 and k <= 8 else {}
        ids, weights = routed(logits, k, bias=bias, **groups, **options)
        want_ids, want = route(logits, k=k, bias=bias, **groups, **options)
        assert torch.equal(ids.long(), want_ids)
        torch.testing.assert_close(weights.double(), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_experts", "n_group", "topk_group", "k"),
    [(500, 5, 2, 8), (510, 17, 4, 8), (96, 32, 3, 9), (256, 8, 1, 32), (21, 3, 2, 3)],
)
@pytest.mark.parametrize("padding", [0, 1])
def test_groups_of_any_size(num_experts: int, n_group: int, topk_group: int, k: int, padding: int, device: str) -> None:
    """Groups that do not fill their lanes, single experts, all experts of a group; rows at odd addresses; ties."""
    logits = torch.zeros(37, num_experts + padding, device=device)
    logits[:, :num_experts] = (rand(37, num_experts, dtype=torch.float32, device=device, scale=2.0) * 4).round() / 4
    bias = (rand(num_experts, dtype=torch.float32, device=device, seed=3) * 8).round() / 8
    options: dict[str, Any] = {
        "method": Route.DeepSeekV3, "bias": bias, "n_group": n_group, "topk_group": topk_group, "scale": 2.5,
    }  # fmt: skip
    ids, weights = routed(logits[:, :num_experts], k, **options)
    want_ids, want = route(logits[:, :num_experts], k=k, **options)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_routing_of_special_logits(dtype: torch.dtype, device: str) -> None:
    """NaN counts as -inf; a row of nothing else has the first experts and weights of 0."""
    nan, inf = float("nan"), float("inf")
    rows = [[1, nan, 3, nan, 0, 0, 0, 0], [nan] * 8, [-inf] * 8, [0.0, -0.0, 0.0, -0.0, 0, 0, 0, 0]]
    logits = torch.tensor(rows, dtype=dtype, device=device)
    replay = torch.full((6, 2), -1, dtype=torch.int16, device=device)
    ids, weights = routed(logits, 2, method=Route.Renormalize, replay=replay)
    assert ids.tolist() == [[2, 0], [0, 1], [0, 1], [0, 1]]
    assert not weights.isnan().any()
    assert weights[1].tolist() == [0, 0]
    assert replay[:4].tolist() == ids.tolist()
    assert replay[4:].eq(-1).all()


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"), [(0, 8, 2), (1, 8, 8), (77, 256, 8), (1000, 384, 6), (9000, 17, 1)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorting(tokens: int, num_experts: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Against a stable sort: offsets, tokens, positions, experts with rows; invalid experts have no row."""
    ids = (
        torch.randint(-2, num_experts + 3, (tokens, k), generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    )
    first, local = num_experts // 4, num_experts // 2
    tables = sort_slots(AtOnce(ids.device), ids, local, first)
    own = ids.flatten().long() - first
    valid = (own >= 0) & (own < local)
    count = int(valid.sum())
    order = torch.where(valid, own, local).sort(stable=True).indices[:count]
    sizes = torch.bincount(own[valid], minlength=local)
    assert tables.offsets.tolist() == [0, *sizes.cumsum(0).tolist()]
    assert torch.equal(tables.rows[:count].long(), order // k)
    assert tables.rows[count:].eq(-1).all()
    positions = torch.full_like(own, -1)
    positions[order] = torch.arange(count, device=ids.device)
    assert torch.equal(tables.positions.flatten().long(), positions)
    hit = sizes.nonzero().flatten().tolist()
    assert tables.active.tolist() == [len(hit), *hit, *[-1] * (local - len(hit))]


SHAPES = [(8, 2, 256, 128), (32, 4, 384, 256), (5, 1, 128, 384)]  # experts, top_k, hidden, inter


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("e", "k", "h", "i"), SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 300])
def test_16_bits(tokens: int, e: int, k: int, h: int, i: int, dtype: torch.dtype, device: str) -> None:
    x, (w1, w2) = rand(tokens, h, dtype=dtype, device=device), layer(e, h, i, device, dtype)
    ids, scales = chosen(tokens, e, k, device)
    out = torch.empty_like(x)
    assert cutlass_fused_moe(x, ids, scales, w1, w2, dtype, None, output=out) is out
    assert error(out, experts(x, ids, scales, w1, w2)) < LIMIT["16 bits"]


@pytest.mark.parametrize(("e", "k", "h", "i"), SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 9, 64, 300])
def test_fp8_blocks(tokens: int, e: int, k: int, h: int, i: int, device: str) -> None:
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    if tokens:
        x[-1] = 0  # the scale of zeros
    (q1, s1, d1), (q2, s2, d2) = block_quantized(w1), block_quantized(w2)
    ids, scales = chosen(tokens, e, k, device)
    out = cutlass_fused_moe(x, ids, scales, q1, q2, BF16, [s1, s2], use_deepseek_fp8_block_scale=True)
    assert error(out, experts(x, ids, scales, d1, d2)) < LIMIT["fp8"]
    if tokens:
        assert out[-1].eq(0).all()


@pytest.mark.parametrize(("h", "i"), [(512, 128), (640, 384)])
@pytest.mark.parametrize("sizes", [(300, 0, 1, 127), (0, 0, 128, 129), (0, 0, 0, 0)])
def test_first_product_with_its_activation(sizes: tuple[int, ...], h: int, i: int, device: str) -> None:
    """Against fp64: values, scales, and rows of no expert, which stay as they are."""
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    rows, end = int(offsets[-1]) + 5, int(offsets[-1])
    x = rand(rows, h, dtype=torch.float32, device=device, seed=3).to(E4M3)
    x_scale = 0.5 + rand(rows, h // 128, dtype=torch.float32, device=device, seed=4).abs()
    w, w_scale, values = block_quantized(layer(len(sizes), h, i, device)[0])
    out = torch.full((rows, i), 7.0, device=device).to(E4M3)
    scale = torch.full((rows, i // 128), float("nan"), device=device)
    moe_gated_gemm(out, scale, x, x_scale, w, w_scale, offsets)
    wide = x.double() * x_scale.double().repeat_interleave(128, 1)
    of_row = torch.repeat_interleave(torch.arange(len(sizes), device=device), offsets.diff())
    u, g = (torch.einsum("rk,rnk->rn", wide[:end], part[of_row]) for part in values.split(i, 1))
    want = torch.nn.functional.silu(g) * u
    got = out[:end].double() * scale[:end].double().repeat_interleave(128, 1)
    assert error(got, want) < 0.03
    amax = want.view(end, i // 128, 128).abs().amax(-1)
    torch.testing.assert_close(scale[:end].double() * 448, amax, rtol=2e-3, atol=1e-6)
    assert out[end:].float().eq(7).all() and scale[end:].isnan().all()


# (features, columns) of a weight, and a tile of the kernel: those of 128 and of 64 rows, with whole and partial tiles.
GATED_16_BITS = [((384, 512), 0), ((360, 328), 0), ((360, 328), 1), ((384, 512), 2), ((200, 72), 3), ((384, 512), 4),
                 ((200, 72), 5)]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", [a for a in Act if a.name != "InvalidType" and is_gated_activation(a)])
@pytest.mark.parametrize(("shape", "tile"), GATED_16_BITS)
def test_first_product_of_16_bits(
    shape: tuple[int, int], tile: int, kind: Act, dtype: torch.dtype, device: str
) -> None:
    """With biases in the weights' dtype or fp32, and constants of each expert."""
    sizes, (i, h) = (70, 0, 1, 130), shape
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    end = int(offsets[-1])
    x = rand(end + 5, h, dtype=dtype, device=device)
    w = layer(len(sizes), h, i, device, dtype)[0]
    bias = rand(len(sizes), 2 * i, dtype=torch.float32 if tile % 2 else dtype, device=device, seed=5)
    constants = {"alpha": 1.5, "beta": 0.5, "limit": 1.0} if kind == Act.SwigluBias else {}
    of = {name: torch.full((len(sizes),), value, device=device) for name, value in constants.items()}
    fixed = {Act.SwigluStep: {"limit_value": 7.0}, Act.Situ: {"alpha_value": 25.0, "beta_value": 4.0}}.get(kind, {})
    out = torch.full((end + 5, i), 7.0, device=device, dtype=dtype)
    moe_gated_gemm(out, None, x, None, w, None, offsets, bias, **of, activation=kind, tactic=tile, **fixed)
    for e in range(len(sizes)):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        want = reference.activate(x[rows].double() @ w[e].double().T + bias[e].double(), kind, **constants)
        assert error(out[rows], want) < (3e-3 if dtype is BF16 else 5e-4)
    assert out[end:].eq(7).all()


@pytest.mark.parametrize("kind", [Act.Swiglu, Act.SwigluBias])
def test_16_bits_of_many_rows(kind: Act, device: str) -> None:
    """So many that the first product has the activation, with biases."""
    tokens, e, k, h, i = 300, 4, 2, 320, 264
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    b1, b2 = rand(e, 2 * i, dtype=BF16, device=device, seed=5), rand(e, h, dtype=BF16, device=device, seed=6)
    ids, weights = chosen(tokens, e, k, device)
    constants = {name: torch.rand(e, device=device) + 0.5 for name in ("alpha", "beta", "limit")}
    if kind == Act.Swiglu:
        constants = {}
    out = cutlass_fused_moe(
        x, ids, weights, w1, w2, BF16, None, fc1_expert_biases=b1, fc2_expert_biases=b2,
        **{f"swiglu_{name}": value for name, value in constants.items()},
    )  # fmt: skip
    want = experts(x, ids, weights, w1, w2, b1=b1, b2=b2, kind=kind, constants=constants)
    assert error(out, want) < LIMIT["16 bits"]


@pytest.mark.parametrize(("e", "k", "tokens"), [(4, 2, 300), (3, 1, 600)])
def test_fp8_blocks_of_many_rows(e: int, k: int, tokens: int, device: str) -> None:
    """So many that the first product has the activation; some experts have less than a tile, and some several."""
    x, (w1, w2) = rand(tokens, 512, dtype=BF16, device=device), layer(e, 512, 256, device)
    ids, weights = chosen(tokens, e, k, device)
    (q1, s1, v1), (q2, s2, v2) = block_quantized(w1), block_quantized(w2)
    out = cutlass_fused_moe(x, ids, weights, q1, q2, BF16, [s1, s2], use_deepseek_fp8_block_scale=True)
    assert error(out, experts(x, ids, weights, v1, v2)) < LIMIT["fp8"]


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_fp8_tensors(tokens: int, device: str) -> None:
    e, k, h, i = 8, 2, 256, 128
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    (q1, s1, d1), (q2, s2, d2) = tensor_quantized(w1), tensor_quantized(w2)
    qx, sx, dx = (t[0] for t in tensor_quantized(x[None]))
    ids, scales = chosen(tokens, e, k, device)
    quant = torch.tensor(30.0, device=device)
    out = cutlass_fused_moe(qx, ids, scales, q1, q2, BF16, [s1 * sx, quant, s2 / quant, sx])
    assert error(out, experts(dx, ids, scales, d1, d2)) < LIMIT["fp8"]


MIXED = [(8, 2, 256, 128, 1), (8, 2, 256, 128, 50), (4, 4, 384, 256, 200), (4, 1, 128, 384, 9)]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("e", "k", "h", "i", "tokens"), [*MIXED, (6, 3, 96, 160, 33)])
def test_mxfp4_weights(e: int, k: int, h: int, i: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    x, (w1, w2) = rand(tokens, h, dtype=dtype, device=device), layer(e, h, i, device)
    (q1, s1, d1), (q2, s2, d2) = (reference.mxfp4_quantized(w) for w in (w1, w2))
    q1, q2 = (interleave_moe_weights_for_sm90_mixed_gemm(q, "fp4") for q in (q1, q2))
    s1, s2 = (interleave_moe_scales_for_sm90_mixed_gemm(s) for s in (s1, s2))
    ids, scales = chosen(tokens, e, k, device)
    out = cutlass_fused_moe(x, ids, scales, q1, q2, dtype, [s1, s2], use_w4_group_scaling=True)
    assert error(out, experts(x, ids, scales, d1, d2)) < LIMIT["16 bits"]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("e", "k", "h", "i", "tokens"), MIXED)
def test_int4_weights(e: int, k: int, h: int, i: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    """With factors of the inputs of both projections, and of the outputs."""
    x, (w1, w2) = rand(tokens, h, dtype=dtype, device=device), layer(e, h, i, device)
    (q1, s1, d1), (q2, s2, d2) = (reference.int4_quantized(w) for w in (w1, w2))
    f1, f2 = (torch.linspace(0.5, 1.5, n, device=device).to(dtype) for n in (h, i))
    a1, a2 = torch.linspace(0.5, 1.5, e, device=device), torch.linspace(2, 1, e, device=device)
    ids, scales = chosen(tokens, e, k, device)
    empty = torch.empty(0, device=device)
    out = cutlass_fused_moe(
        x, ids, scales, q1, q2, dtype, [s1, s2, f1, f2, empty, empty, a1, a2],
        use_w4_group_scaling=True, use_packed_weights=True,
    )  # fmt: skip
    d1, d2 = d1 * f1.double() * a1.double()[:, None, None], d2 * f2.double() * a2.double()[:, None, None]
    assert error(out, experts(x, ids, scales, d1, d2)) < 2 * LIMIT["16 bits"]


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize(("e", "k", "h", "i", "tokens"), MIXED)
def test_nvfp4_weights(e: int, k: int, h: int, i: int, tokens: int, swizzled: bool, device: str) -> None:
    """16-bit input, and fp4 input with its scales in either layout."""
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    g1, g2, a1, a2 = 700.0, 900.0, 300.0, 50.0
    (q1, s1, d1), (q2, s2, d2) = reference.nvfp4_quantized(w1, g1), reference.nvfp4_quantized(w2, g2)
    s1, s2 = (block_scale_interleave(s) for s in (s1, s2))
    one = torch.ones(e, device=device)
    scales = [one[:1] * a1, s1.view(torch.int32), one / (a1 * g1), one[:1] * a2, s2.view(torch.int32), one / (a2 * g2)]
    ids, weights = chosen(tokens, e, k, device)
    longs = q1.view(torch.long), q2.view(torch.long)
    out = cutlass_fused_moe(x, ids, weights, *longs, BF16, scales)
    assert error(out, experts(x, ids, weights, d1, d2)) < LIMIT["16 bits"]
    qx, sx, dx = reference.nvfp4_quantized(x, a1)
    sf = block_scale_interleave(sx) if swizzled else sx
    out = cutlass_fused_moe(qx, ids, weights, *longs, BF16, scales, input_sf=sf, swizzled_input_sf=swizzled)
    assert error(out, experts(dx, ids, weights, d1, d2)) < LIMIT["16 bits"]


def test_profile_ids_may_be_a_list() -> None:
    """It has no effect, and is no part of the key of a plan."""
    x, (w1, w2) = rand(3, 64, dtype=BF16, device="cpu"), layer(4, 64, 64, "cpu")
    given = (x, *chosen(3, 4, 2, "cpu"), w1, w2, BF16)
    for _ in range(2):
        assert torch.equal(cutlass_fused_moe(*given, profile_ids=[3, 5]), cutlass_fused_moe(*given))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("e", "k", "h", "i", "tokens"), MIXED)
def test_mxfp8_input(e: int, k: int, h: int, i: int, tokens: int, bits: int, device: str) -> None:
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    quantized = reference.mxfp4_quantized if bits == 4 else reference.mxfp8_quantized
    (q1, s1, d1), (q2, s2, d2), (qx, sx, dx) = quantized(w1), quantized(w2), reference.mxfp8_quantized(x)
    s1, s2, sx = (block_scale_interleave(s) for s in (s1, s2, sx))
    one = torch.ones(e, device=device)
    ids, weights = chosen(tokens, e, k, device)
    scales = [s1.view(torch.int32), one, s2.view(torch.int32), one]
    out = cutlass_fused_moe(qx, ids, weights, q1, q2, BF16, scales, input_sf=sx, use_mxfp8_act_scaling=True)
    assert error(out, experts(dx, ids, weights, d1, d2)) < LIMIT["16 bits"]


@pytest.mark.parametrize("kind", [a for a in Act if a is not Act.InvalidType])
def test_activations_and_biases(kind: Act, device: str) -> None:
    """Of 16-bit weights, whose inter is no multiple of a vector; biases of both projections."""
    e, k, h, i, tokens = 8, 2, 128, 104, 21
    gated = is_gated_activation(kind)
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device, gated=gated)
    b1 = rand(e, w1.shape[1], dtype=BF16, device=device, seed=4)
    b2 = rand(e, h, dtype=torch.float32, device=device, seed=5)
    ids, scales = chosen(tokens, e, k, device)
    per_expert = torch.linspace(0.5, 2.0, e, device=device)
    constants = {"alpha": per_expert, "beta": per_expert - 1, "limit": per_expert} if kind is Act.SwigluBias else {}
    options: dict[str, Any] = {f"swiglu_{name}": value for name, value in constants.items()}
    limit = 1.5 if kind is Act.ClampedRelu2 else None
    out = cutlass_fused_moe(
        x, ids, scales, w1, w2, BF16, None, b1, b2, activation_type=kind, clamped_relu2_limit=limit, **options
    )
    want = experts(x, ids, scales, w1, w2, b1=b1, b2=b2, kind=kind, constants=constants, limit=limit)
    assert error(out, want) < LIMIT["16 bits"]


def test_ranks_sum_to_the_layer(device: str) -> None:
    """Expert-parallel and tensor-parallel slices, the second bias on the first tensor-parallel rank."""
    e, k, h, i, tokens = 16, 4, 128, 256, 50
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    b1, b2 = rand(e, 2 * i, dtype=BF16, device=device), rand(e, h, dtype=BF16, device=device, seed=6)
    ids, scales = chosen(tokens, e, k, device)
    total = torch.zeros(tokens, h, dtype=torch.float64, device=device)
    for ep in range(4):
        own = slice(4 * ep, 4 * ep + 4)
        for tp in range(2):
            part = slice(128 * tp, 128 * tp + 128)
            up = torch.cat([w1[own, :i][:, part], w1[own, i:][:, part]], 1)
            bias = torch.cat([b1[own, :i][:, part], b1[own, i:][:, part]], 1)
            total += cutlass_fused_moe(
                x, ids, scales, up, w2[own][..., part].contiguous(), torch.float32, None, bias, b2[own].contiguous(),
                tp_size=2, tp_rank=tp, ep_size=4, ep_rank=ep,
            )  # fmt: skip
    assert error(total, experts(x, ids, scales, w1, w2, b1=b1, b2=b2)) < LIMIT["16 bits"]


def test_unusual_routings(device: str) -> None:
    """All tokens to one expert; experts of nobody; invalid experts add nothing, even where weights are NaN."""
    e, h, i, tokens = 8, 128, 128, 70
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    ids = torch.full((tokens, 2), 3, dtype=torch.int32, device=device)
    ids[:, 1] = -1
    ids[5] = torch.tensor([e, 2**31 - 1])
    scales = rand(tokens, 2, dtype=torch.float32, device=device).abs()
    scales[:, 1] = float("nan")
    out = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, [])
    assert out[5].eq(0).all()
    assert error(out, experts(x, ids, scales, w1, w2)) < LIMIT["16 bits"]


@pytest.mark.parametrize("tokens", [3, 130])
def test_results_do_not_depend_on_the_run_or_the_order_of_slots(tokens: int, device: str) -> None:
    e, k, h, i = 16, 4, 256, 128
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    ids, scales = chosen(tokens, e, k, device)
    first = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, None)
    for _ in range(3):
        assert torch.equal(cutlass_fused_moe(x, ids, scales, w1, w2, BF16, None), first)
    last = cutlass_fused_moe(x.flip(0), ids.flip(0), scales.flip(0), w1, w2, BF16, None).flip(0)
    assert torch.equal(last, first)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_graph_with_changing_routing(tokens: int, fp8: bool) -> None:
    e, k, h, i = 32, 4, 256, 256
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device="cuda"), layer(e, h, i, "cuda")
    (q1, s1, d1), (q2, s2, d2) = (weights_of(w, fp8) for w in (w1, w2))
    ids, scales = chosen(tokens, e, k, "cuda")
    out = torch.empty_like(x)

    def run() -> None:
        cutlass_fused_moe(
            x, ids, scales, q1, q2, BF16, [s1, s2] if fp8 else [], output=out, use_deepseek_fp8_block_scale=fp8
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(1, 201):
        new_ids, new_scales = chosen(tokens, e, 1 if seed % 5 == 0 else k, "cuda", seed)
        if seed % 5 == 0:
            new_ids, new_scales = new_ids[:1].expand(tokens, k), new_scales.expand(tokens, k)
        ids.copy_(new_ids), scales.copy_(new_scales)
        out.fill_(float("nan"))
        graph.replay()
        if seed % 20 == 0:
            assert error(out, experts(x, ids, scales, d1, d2)) < LIMIT["fp8" if fp8 else "16 bits"]
        assert not out.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("e", "local", "k", "h", "i", "tokens"),
    [(8, 8, 2, 4096, 1792, 1000), (128, 128, 8, 2048, 768, 2), (128, 128, 8, 2048, 768, 1000),
     (256, 32, 8, 7168, 256, 64), (384, 48, 8, 1024, 512, 8192), (512, 512, 10, 512, 128, 33)],
)  # fmt: skip
def test_shapes_of_models(e: int, local: int, k: int, h: int, i: int, tokens: int, fp8: bool) -> None:
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device="cuda"), layer(local, h, i, "cuda")
    (q1, s1, d1), (q2, s2, d2) = (weights_of(w, fp8) for w in (w1, w2))
    ids, scales = chosen(tokens, e, k, "cuda")
    rank = e // local - 1
    out = cutlass_fused_moe(
        x, ids, scales, q1, q2, BF16, [s1, s2] if fp8 else [], ep_size=e // local, ep_rank=rank,
        use_deepseek_fp8_block_scale=fp8,
    )  # fmt: skip
    want = experts(x, ids, scales, d1, d2, first=rank * local)
    assert error(out, want) < LIMIT["fp8" if fp8 else "16 bits"]


def test_refusals(device: str) -> None:
    e, k, h, i, tokens = 4, 2, 128, 128, 3
    x, (w1, w2) = rand(tokens, h, dtype=BF16, device=device), layer(e, h, i, device)
    ids, scales = chosen(tokens, e, k, device)

    def refuses(error_type: type[Exception], match: str, *arguments: Any, **options: Any) -> None:
        given: list[Any] = [x, ids, scales, w1, w2, BF16, None]
        given[: len(arguments)] = [g if a is None else a for a, g in zip(arguments, given)]
        with pytest.raises(error_type, match=match):
            cutlass_fused_moe(*given, **options)

    refuses(ValueError, "fc1_expert_weights must have 128 columns", None, None, None, w1[..., :64])
    refuses(ValueError, "fc2_expert_weights must be of 4 experts", None, None, None, None, w2[:3])
    refuses(ValueError, "token_selected_experts must have shape", None, ids[:1])
    refuses(ValueError, "token_final_scales must have the shape", None, None, scales[:, :1])
    refuses(ValueError, "output must be", output=x.float())
    refuses(ValueError, "ep_rank must be in", ep_size=2, ep_rank=2)
    refuses(ValueError, "activation_type must be", activation_type=11)
    refuses(ValueError, "clamped_relu2_limit must be positive", activation_type=Act.ClampedRelu2)
    refuses(ValueError, "quant_scales must have 2 tensors", use_deepseek_fp8_block_scale=True)
    refuses(TypeError, "fc1_expert_weights must have the dtype of input", x.half())
    refuses(NotImplementedError, "min_latency_mode", min_latency_mode=True)
    with pytest.raises(ValueError, match="top_k must be in"):
        routed(rand(2, 4, dtype=torch.float32, device=device), 5)
    with pytest.raises(ValueError, match="n_group must be in"):
        routed(rand(2, 6, dtype=torch.float32, device=device), 2, n_group=4)
    wrong = torch.empty(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="rows must have shape"):
        moe_sort(wrong, wrong.clone(), wrong.new_empty(tokens, k), wrong.clone(), ids)


@pytest.mark.parametrize("name", ["situ_beta", "situ_linear_beta"])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_constants_of_situ(name: str, value: float) -> None:
    """Situ divides by them: 0 is not taken for "the default"."""
    with pytest.raises(ValueError, match=f"^{name} must"):
        activation_of(Act.Situ, **{name: value})
