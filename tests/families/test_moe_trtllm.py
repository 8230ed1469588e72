"""Mixtures of experts in the layouts of TensorRT-LLM: prepared weights, routing inside, chosen experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import moe_reference as reference
from families.harness import rand
from families.moe_reference import chosen, error, experts, route
from families.test_moe import LIMIT, layer
from fi_core import fused_moe
from fi_core.fused_moe import (
    ActivationType,
    Fp8QuantizationType,
    RoutingMethodType,
    WeightLayout,
    convert_to_block_layout,
    fused_topk_deepseek,
    reorder_rows_for_gated_act_gemm,
)
from fi_core.quantization import SfLayout, shuffle_matrix_a, shuffle_matrix_sf_a

moe: Any = fused_moe  # calls are written with tuples of arguments
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
E, K, H, INTER, TOKENS = 16, 4, 256, 384, 37  # experts, top_k, hidden, inter


def each(f: Any, w: torch.Tensor) -> torch.Tensor:
    """f of each expert's matrix."""
    raw = w.view(torch.uint8) if w.element_size() == 1 else w
    return torch.stack([f(x) for x in raw]).view(w.dtype)


def shuffled(w: torch.Tensor, gated: bool, tile: int = 128) -> torch.Tensor:
    return each(lambda x: shuffle_matrix_a(reorder_rows_for_gated_act_gemm(x) if gated else x, tile), w)


def inputs(device: str) -> tuple[torch.Tensor, ...]:
    logits = rand(TOKENS, E, dtype=torch.float32, device=device, seed=8)
    bias = rand(E, dtype=torch.float32, device=device, seed=9)
    return logits, bias, rand(TOKENS, H, dtype=BF16, device=device), *layer(E, H, INTER, device)


def sizes(offset: int = 0, local: int = E) -> Any:
    """num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset, local_num_experts."""
    return E, K, None, None, INTER, offset, local


def packed(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return ids.int() << 16 | weights.bfloat16().view(torch.int16).int() & 0xFFFF


@pytest.mark.parametrize("layout", [WeightLayout.MajorK, WeightLayout.BlockMajorK])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_bf16(is_shuffled: bool, layout: int, device: str) -> None:
    """DeepSeekV3 routing with groups, and the experts of two ranks."""
    logits, bias, x, w1, w2 = inputs(device)
    q1, q2 = (shuffled(w1, True), shuffled(w2, False)) if is_shuffled else (w1, w2)
    if layout == WeightLayout.BlockMajorK:
        q1, q2 = (each(lambda w: convert_to_block_layout(w, 64), q) for q in (q1, q2))
    ids, weights = route(logits, RoutingMethodType.DeepSeekV3, K, bias, 4, 2, 2.5)
    total = torch.zeros(TOKENS, H, dtype=torch.float64, device=device)
    for offset in (0, E // 2):
        own = slice(offset, offset + E // 2)
        options: dict[str, Any] = {"use_shuffled_weight": is_shuffled, "weight_layout": layout}
        total += moe.trtllm_bf16_moe(
            logits,
            bias,
            x,
            q1[own],
            q2[own],
            E,
            K,
            4,
            2,
            INTER,
            offset,
            E // 2,
            2.5,
            RoutingMethodType.DeepSeekV3,
            **options,
        )
    want = experts(x, ids, weights, w1, w2)
    assert error(total, want) < LIMIT["16 bits"]
    out = torch.empty_like(x)
    sent = packed(ids, weights)
    assert moe.trtllm_bf16_routed_moe(sent, x, q1, q2, *sizes(), output=out, **options) is out
    assert error(out, want) < LIMIT["16 bits"]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_fp8_blocks(is_shuffled: bool, device: str) -> None:
    logits, _, x, w1, w2 = inputs(device)
    (q1, s1, d1), (q2, s2, d2) = (reference.block_quantized(w) for w in (w1, w2))
    if is_shuffled:
        q1, q2 = (each(lambda w: convert_to_block_layout(w, 128), shuffled(q, False, 64)) for q in (q1, q2))
    sx = x.float().view(TOKENS, -1, 128).abs().amax(-1) / 448
    qx = (x.float().view(TOKENS, -1, 128) / sx[..., None]).view(x.shape).to(E4M3)
    dx = (qx.double().view(TOKENS, -1, 128) * sx[..., None].double()).view(x.shape)
    ids, weights = route(logits, RoutingMethodType.Renormalize, K)
    arguments: Any = qx, sx.t().contiguous(), q1, s1, q2, s2
    options: dict[str, Any] = {"use_shuffled_weight": is_shuffled, "weight_layout": 2 * is_shuffled}
    replay = torch.zeros(TOKENS, K, dtype=torch.int16, device=device)
    out: Any = moe.trtllm_fp8_block_scale_moe(
        logits, None, *arguments, *sizes(), None, RoutingMethodType.Renormalize, routing_replay_out=replay, **options
    )
    want = experts(dx, ids, weights, d1, d2)
    assert error(out, want) < LIMIT["fp8"]
    assert torch.equal(replay.long(), ids)
    routed = moe.trtllm_fp8_block_scale_routed_moe(
        (ids.int(), weights.float()), None, *arguments, *sizes(), None, **options
    )
    assert torch.equal(routed, out)
    for tokens, scale, required in ((x, arguments[1], "None with torch.bfloat16"), (qx, None, "given with")):
        with pytest.raises(ValueError, match=f"hidden_states_scale must be {required}"):
            moe.trtllm_fp8_block_scale_moe(logits, None, tokens, scale, *arguments[2:], *sizes(), None, **options)


@pytest.mark.parametrize("tokens", [3, 200])
def test_fused_shared_experts(tokens: int, device: str) -> None:
    """Each token has the two experts behind the routed ones, with weight 1, though routed weights are scaled."""
    w1, w2 = layer(E + 2, H, INTER, device)
    (q1, s1, d1), (q2, s2, d2) = (reference.block_quantized(w) for w in (w1, w2))
    x, logits = (rand(tokens, n, dtype=BF16, device=device, seed=n) for n in (H, E))
    bias = rand(E, dtype=torch.float32, device=device, seed=9)
    given = x, None, q1, s1, q2, s2, E, K, 4, 2, INTER, 0, E, 2.5, RoutingMethodType.DeepSeekV3
    options: dict[str, Any] = {"num_fused_shared_experts": 2}
    replay = torch.zeros(tokens, K, dtype=torch.int16, device=device)
    out = moe.trtllm_fp8_block_scale_moe(logits, bias, *given, **options, routing_replay_out=replay)
    ids, weights = route(logits, RoutingMethodType.DeepSeekV3, K, bias, 4, 2, 2.5)
    shared = torch.tensor([E, E + 1], device=device).expand(tokens, 2)
    ids, weights = torch.cat((ids, shared), 1), torch.cat((weights, torch.ones_like(weights[:, :2])), 1)
    assert error(out, experts(x, ids, weights, d1, d2)) < LIMIT["fp8"]
    assert torch.equal(replay.long(), ids[:, :K])
    chosen_by_caller = ids.int(), weights.float()
    routed = moe.trtllm_fp8_block_scale_routed_moe(chosen_by_caller, None, *given[:-1], **options)
    assert error(routed, out.double()) < 1e-2
    with pytest.raises(ValueError, match="num_fused_shared_experts must be 0 where 8 of 16 experts are here"):
        moe.trtllm_fp8_block_scale_moe(logits, bias, *given[:12], E // 2, *given[13:], **options)


@pytest.mark.parametrize("do_finalize", [False, True])
def test_partial_results(do_finalize: bool, device: str) -> None:
    """Rows, weights and positions that a caller sums itself: biases are in the rows, columns in order."""
    logits, _, x, w1, w2 = inputs(device)
    (q1, s1, d1), (q2, s2, d2) = (reference.block_quantized(w) for w in (w1, w2))
    q1, q2 = (shuffled(q, False, 64) for q in (q1, q2))
    b1, b2 = (
        rand(E, 2 * INTER, dtype=torch.float32, device=device),
        rand(E, H, dtype=torch.float32, device=device, seed=5),
    )
    sent = [each(lambda b: shuffle_matrix_a(b[:, None], 64)[:, 0], b) for b in (b1, b2)]
    ids, weights = route(logits, RoutingMethodType.Renormalize, K)
    own = slice(4, 12)
    out: Any = moe.trtllm_fp8_block_scale_moe(
        logits, None, x, None, q1[own], s1[own], q2[own], s2[own], *sizes(4, 8), None, RoutingMethodType.Renormalize,
        True, do_finalize=do_finalize, gemm1_bias=sent[0][own], gemm2_bias=sent[1][own],
    )  # fmt: skip
    if not do_finalize:
        rows, found, positions = out
        assert found.dtype is BF16
        positions = positions.view(TOKENS, K).long()
        here = (ids >= 4) & (ids < 12)
        assert torch.equal(positions >= 0, here)
        out = (rows.double()[positions] * (found.double() * here)[..., None]).sum(1)
    want = experts(x, ids, weights, d1[own], d2[own], first=4, b1=b1[own], b2=b2[own])
    assert error(out, want) < LIMIT["fp8"]


@pytest.mark.parametrize("on_input", [False, True])
def test_fp8_tensors(on_input: bool, device: str) -> None:
    """Llama 4 multiplies the input of its only expert by the routing weight."""
    logits, _, x, w1, w2 = inputs(device)
    method, k = (RoutingMethodType.Llama4, 1) if on_input else (RoutingMethodType.TopKSigmoid, K)
    (q1, s1, d1), (q2, s2, d2) = (reference.tensor_quantized(w) for w in (w1, w2))
    qx, sx, dx = (t[0] for t in reference.tensor_quantized(x[None]))
    ids, weights = route(logits, method, k)
    scale_of_activated = 0.05
    gate = s1 * sx
    arguments: Any = (
        qx,
        shuffled(q1, True),
        gate / scale_of_activated,
        gate,
        shuffled(q2, False),
        s2 * scale_of_activated,
    )
    rest: Any = E, k, None, None, INTER, 0, E, None, on_input
    out: Any = moe.trtllm_fp8_per_tensor_scale_moe(logits, None, *arguments, *rest, method)
    if on_input:
        want = experts(dx * weights, ids, torch.ones_like(weights), d1, d2)
    else:
        want = experts(dx, ids, weights, d1, d2)
    assert error(out, want) < LIMIT["fp8"]
    routed = moe.trtllm_fp8_per_tensor_scale_routed_moe((ids.int(), weights.float()), None, *arguments, *rest)
    assert torch.equal(routed, out)


def test_mxfp8(device: str) -> None:
    logits, _, x, w1, w2 = inputs(device)
    (q1, s1, d1), (q2, s2, d2), (qx, sx, dx) = (reference.mxfp8_quantized(w) for w in (w1, w2, x))
    q1, q2 = shuffled(q1, True), shuffled(q2, False)
    s1 = torch.stack([shuffle_matrix_sf_a(reorder_rows_for_gated_act_gemm(s), 128, 32) for s in s1])
    s2 = torch.stack([shuffle_matrix_sf_a(s, 128, 32) for s in s2])
    out: Any = moe.trtllm_fp8_block_scale_moe(
        logits, None, qx, sx, q1, s1, q2, s2, *sizes(), None, RoutingMethodType.Default, True,
        fp8_quantization_type=Fp8QuantizationType.MxFp8,
    )  # fmt: skip
    assert error(out, experts(dx, *route(logits, RoutingMethodType.Default, K), d1, d2)) < LIMIT["16 bits"]


@pytest.mark.parametrize("input_format", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("weights_format", ["mxfp4", "nvfp4"])
def test_fp4(weights_format: str, input_format: str, device: str) -> None:
    """Biases, constants of SwigluBias, factors of outputs, shuffled and swizzled."""
    logits, _, x, w1, w2 = inputs(device)
    block = 32 if weights_format == "mxfp4" else 16
    g1, g2, ga = (1.0, 1.0, 1.0) if block == 32 else (700.0, 900.0, 50.0)
    gx = 300.0 if input_format == "nvfp4" else 1.0
    quantized = reference.mxfp4_quantized if block == 32 else None
    (q1, s1, d1), (q2, s2, d2) = (
        quantized(w) if quantized else reference.nvfp4_quantized(w, g) for w, g in ((w1, g1), (w2, g2))
    )
    sx, qx, dx = None, x, x
    if input_format != "bf16":
        qx, sx, dx = reference.mxfp8_quantized(x) if input_format == "mxfp8" else reference.nvfp4_quantized(x, gx)
    b1, b2 = (
        rand(E, 2 * INTER, dtype=torch.float32, device=device),
        rand(E, H, dtype=torch.float32, device=device, seed=5),
    )
    sent1 = each(lambda b: shuffle_matrix_a(reorder_rows_for_gated_act_gemm(b[:, None]), 128)[:, 0], b1)
    sent2 = each(lambda b: shuffle_matrix_a(b[:, None], 128)[:, 0], b2)
    s1 = torch.stack([shuffle_matrix_sf_a(reorder_rows_for_gated_act_gemm(s), 128, block) for s in s1])
    s2 = torch.stack([shuffle_matrix_sf_a(s, 128, block) for s in s2])
    one = torch.ones(E, device=device)
    constants = {"alpha": one * 1.702, "beta": one, "limit": one * 7}
    gate, last = one / (g1 * gx), one / (g2 * ga)
    arguments: Any = (
        qx, sx, shuffled(q1, True), s1, sent1, *constants.values(), shuffled(q2, False), s2, sent2, gate * ga, gate,
        last,
    )  # fmt: skip
    (out,) = moe.trtllm_fp4_block_scale_moe(
        logits, None, *arguments, *sizes(), None, RoutingMethodType.RenormalizeNaive
    )
    ids, weights = route(logits, RoutingMethodType.RenormalizeNaive, K)
    kind = ActivationType.SwigluBias
    want = experts(dx, ids, weights, d1, d2, b1=b1, b2=b2, kind=kind, constants=constants)
    assert error(out, want) < LIMIT["16 bits"]
    (routed,) = moe.trtllm_fp4_block_scale_routed_moe(packed(ids, weights), None, *arguments, *sizes(), None)
    assert error(routed, want) < LIMIT["16 bits"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_topk_deepseek(dtype: torch.dtype, device: str) -> None:
    scores = rand(19, 256, dtype=dtype, device=device, scale=3.0)
    bias = rand(256, dtype=dtype, device=device, seed=2)
    values = torch.empty(19, 8, dtype=dtype, device=device)
    indices = torch.empty(19, 8, dtype=torch.int32, device=device)
    fused_topk_deepseek(scores, bias, 8, 4, 8, 2.5, values, indices)
    ids, weights = route(scores, RoutingMethodType.DeepSeekV3, 8, bias, 8, 4, 2.5)
    assert torch.equal(indices.long(), ids)
    torch.testing.assert_close(values, weights.to(dtype))
    with pytest.raises(ValueError, match="n_group must be"):
        fused_topk_deepseek(scores, bias, 7, 4, 8, 2.5, values, indices)
    with pytest.raises(ValueError, match="topk_values must have shape"):
        fused_topk_deepseek(scores, bias, 8, 4, 8, 2.5, values[:3], indices)


@pytest.mark.parametrize("names", [("limit",), ("alpha", "beta", "limit")])
def test_constants_of_swiglu(names: tuple[str, ...], device: str) -> None:
    """By position, as engines pass them: each turns Swiglu into SwigluBias, alone or with the others."""
    logits, _, x, w1, w2 = inputs(device)
    one = torch.ones(E, device=device)
    all_of = {"alpha": one * 1.702, "beta": one, "limit": torch.rand(E, device=device) + 0.5}
    constants = {name: all_of[name] for name in names}
    given = [constants.get(name) for name in all_of]
    ids, weights = route(logits, RoutingMethodType.Renormalize, K)
    want = experts(x, ids, weights, w1, w2, kind=ActivationType.SwigluBias, constants=constants)
    head: Any = None, RoutingMethodType.Renormalize, False, WeightLayout.MajorK, True, True
    swiglu, out = ActivationType.Swiglu, torch.empty_like(x)
    assert moe.trtllm_bf16_moe(logits, None, x, w1, w2, *sizes(), *head, 8192, swiglu, True, None, *given, out) is out
    assert error(out, want) < LIMIT["16 bits"]
    routed = moe.trtllm_bf16_routed_moe(
        (ids.int(), weights.float()), x, w1, w2, *sizes(), *head, None, 8192, swiglu, None, *given
    )
    assert error(routed, want) < LIMIT["16 bits"]


def test_fp8_tensors_with_a_limit(device: str) -> None:
    """The limit holds for gate and projection as they are, whatever their scales."""
    logits, _, x, w1, w2 = inputs(device)
    (q1, s1, d1), (q2, s2, d2) = (reference.tensor_quantized(w) for w in (w1, w2))
    qx, sx, dx = (t[0] for t in reference.tensor_quantized(x[None]))
    limit = torch.rand(E, device=device) * 0.2 + 0.1
    gate, of_activated = s1 * sx, 0.001
    out: Any = moe.trtllm_fp8_per_tensor_scale_moe(
        logits, None, qx, shuffled(q1, True), gate / of_activated, gate, shuffled(q2, False), s2 * of_activated,
        E, K, None, None, INTER, 0, E, None, False, RoutingMethodType.Renormalize, gemm1_clamp_limit=limit,
    )  # fmt: skip
    ids, weights = route(logits, RoutingMethodType.Renormalize, K)
    want = experts(dx, ids, weights, d1, d2, kind=ActivationType.SwigluBias, constants={"limit": limit})
    assert error(out, want) < LIMIT["fp8"]
    assert error(experts(dx, ids, weights, d1, d2), want) > 2 * LIMIT["fp8"]  # the limit counts


def test_fp4_shared_experts(device: str) -> None:
    """The last two of E experts are shared: each token has them with weight 1."""
    logits, _, x, w1, w2 = inputs(device)
    (q1, s1, d1), (q2, s2, d2) = (reference.mxfp4_quantized(w) for w in (w1, w2))
    s1 = torch.stack([shuffle_matrix_sf_a(reorder_rows_for_gated_act_gemm(s), 128, 32) for s in s1])
    s2 = torch.stack([shuffle_matrix_sf_a(s, 128, 32) for s in s2])
    layer_of: Any = shuffled(q1, True), s1, None, None, None, None, shuffled(q2, False), s2, None, None, None, None
    count: Any = E - 2, K, None, None, INTER, 0, E - 2, None
    method = RoutingMethodType.Renormalize
    options = {"hidden_states_scale_layout": SfLayout.layout_linear, "valid_hidden_size": H}
    (out,) = moe.trtllm_fp4_block_scale_moe(
        logits[:, :-2], None, x, None, *layer_of, *count, method, num_fused_shared_experts=2, **options
    )
    ids, weights = route(logits[:, :-2], method, K)
    shared = torch.tensor([E - 2, E - 1], device=device).expand(TOKENS, 2)
    ids, weights = torch.cat([ids, shared], 1), torch.nn.functional.pad(weights, (0, 2), value=1.0)
    assert error(out, experts(x, ids, weights, d1, d2)) < LIMIT["16 bits"]
    (routed,) = moe.trtllm_fp4_block_scale_routed_moe(
        (ids.int(), weights.float()), None, x, None, *layer_of, *count, num_fused_shared_experts=2, **options
    )
    assert torch.equal(routed, out)
    with pytest.raises(ValueError, match="hidden_states_scale_layout must be layout_linear"):
        moe.trtllm_fp4_block_scale_moe(
            logits, None, x, None, *layer_of, *sizes(), None, hidden_states_scale_layout=SfLayout.layout_128x4
        )
    with pytest.raises(ValueError, match="hidden_states_scale must be None with torch"):
        moe.trtllm_fp4_block_scale_moe(logits, None, x, s1, *layer_of, *sizes(), None)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, device: str) -> None:
    logits, _, x, w1, w2 = inputs(device)
    logits, x = logits[:tokens], x[:tokens]
    out: Any = moe.trtllm_bf16_moe(logits, None, x, w1, w2, *sizes(), None, 1, False, WeightLayout.MajorK)
    assert out.shape == (tokens, H)
    assert error(out, experts(x, *route(logits, 1, K), w1, w2)) < LIMIT["16 bits"]


def test_refusals(device: str) -> None:
    logits, _, x, w1, w2 = inputs(device)
    options: dict[str, Any] = {"use_shuffled_weight": False, "weight_layout": WeightLayout.MajorK}
    ids, weights = chosen(TOKENS, E, K, device)
    with pytest.raises(ValueError, match="gemm1_weights must be of 8 experts"):
        moe.trtllm_bf16_moe(logits, None, x, w1, w2, *sizes(0, 8), None, **options)
    with pytest.raises(ValueError, match=r"local_expert_offset must be in 0\.\.0 with 16 of 16 experts here; got 8"):
        moe.trtllm_bf16_moe(logits, None, x, w1, w2, *sizes(8), None, **options)
    with pytest.raises(ValueError, match="routing_logits must have shape"):
        moe.trtllm_bf16_moe(logits[:, :3], None, x, w1, w2, *sizes(), None, **options)
    with pytest.raises(ValueError, match=r"gemm1_weights must have shape .* BlockMajorK"):
        moe.trtllm_bf16_moe(logits, None, x, w1, w2, *sizes())
    with pytest.raises(ValueError, match="topk_ids must be int32"):
        moe.trtllm_bf16_routed_moe(ids.long(), x, w1, w2, *sizes(), **options)
    replay = torch.empty(TOKENS, K, dtype=torch.int16, device=device)
    with pytest.raises(NotImplementedError, match=r"routing_replay_out: not supported, .*topk_ids are the.*; got"):
        moe.trtllm_bf16_routed_moe((ids, weights), x, w1, w2, *sizes(), **options, routing_replay_out=replay)
    with pytest.raises(ValueError, match="gemm1_lora_delta must be contiguous, of shape"):
        moe.trtllm_bf16_routed_moe((ids, weights), x, w1, w2, *sizes(), **options, gemm1_lora_delta=x)
    with pytest.raises(TypeError, match="gemm1_weights must be float8_e4m3fn"):
        moe.trtllm_fp8_block_scale_moe(logits, None, x, None, w1, weights, w2, weights, *sizes(), None)
