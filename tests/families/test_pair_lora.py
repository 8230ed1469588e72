"""Adapters of experts by FlashInfer's names: tables of addresses, pairs in any order, the delta of the trtllm forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import test_moe_trtllm as trtllm
from families.harness import assert_close, rand
from families.moe_reference import activate, chosen, error
from fi_core import fused_moe as moe
from fi_core.tllm_enums import ActivationType, WeightLayout

BF16 = torch.bfloat16
TOKENS, EXPERTS, LORAS, TOP_K, HIDDEN, INTER, RANK = 30, 6, 3, 2, 64, 40, 16


def bank(rows: int, k: int, device: str, seed: int, experts: int = EXPERTS) -> torch.Tensor:
    return rand(LORAS, experts, rows, k, dtype=BF16, device=device, seed=seed, scale=k**-0.5)


def adapters(tokens: int, device: str) -> torch.Tensor:
    of = torch.randint(0, LORAS, (tokens,), generator=torch.Generator().manual_seed(5))
    of[::4] = -1
    return of.to(device)


def products(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, experts: Any, of: Any) -> torch.Tensor:
    """In fp64, of rows with an expert and an adapter each."""
    out = torch.zeros(len(x), b.shape[2], dtype=torch.float64, device=x.device)
    for i, (expert, adapter) in enumerate(zip(experts.tolist(), of.tolist())):
        if adapter >= 0:
            out[i] = b[adapter, expert].double() @ (a[adapter, expert].double() @ x[i].double())
    return out


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("widths", [(40,), (40, 40), (24, 40)])
def test_pairs_in_any_order(widths: tuple[int, ...], index: torch.dtype, device: str) -> None:
    """Of experts in random order: sums of tokens, what is added to y, and pairs without an adapter."""
    x, of = rand(TOKENS, HIDDEN, dtype=BF16, device=device), adapters(TOKENS, device)
    order = torch.randperm(TOKENS * TOP_K, generator=torch.Generator().manual_seed(1))
    ids, weights = chosen(TOKENS, EXPERTS, TOP_K, device)
    order = order.to(device)
    tokens, experts = (order // TOP_K).to(index), ids.flatten()[order].to(index)
    weights = weights.flatten()[order].contiguous()
    a = [bank(RANK, HIDDEN, device, s) for s in range(len(widths))]
    b = [bank(n, RANK, device, 5 + s) for s, n in enumerate(widths)]
    pairs = torch.cat([products(x[tokens.long()], c, d, experts, of[tokens.long()]) for c, d in zip(a, b)], 1)
    want = torch.zeros(TOKENS, sum(widths), dtype=torch.float64, device=device)
    want.index_add_(0, tokens.long(), pairs * weights.double()[:, None])
    got = moe.bgmv_moe(x, a, b, tokens, experts, of.to(index), weights, EXPERTS)
    assert got.dtype is BF16
    assert_close(got, want, tolerance=(3e-2, 2e-2))
    plan = moe.prepare_bgmv_moe(x, a, b, tokens, experts, of.to(index), weights, EXPERTS)
    first = plan.run().clone()
    assert torch.equal(first, plan.run())
    x.mul_(2)
    assert_close(plan.run(), 2 * want, tolerance=(3e-2, 4e-2))


def test_memory_and_columns_of_the_caller(device: str) -> None:
    x, of = rand(TOKENS, HIDDEN, dtype=torch.float16, device=device), adapters(TOKENS, device)
    ids, weights = chosen(TOKENS, EXPERTS, TOP_K, device)
    tokens = torch.arange(TOKENS, device=device).repeat_interleave(TOP_K)
    a, b = bank(RANK, HIDDEN, device, 1).half(), bank(INTER, RANK, device, 2).half()
    arguments: Any = (x, [a], [b], tokens, ids.flatten(), of, weights.flatten().contiguous(), EXPERTS)
    want = moe.bgmv_moe(*arguments)
    wide = moe.bgmv_moe(*arguments, output_dim=INTER + 24)
    assert wide.shape == (TOKENS, INTER + 24)
    assert torch.equal(wide[:, :INTER], want)
    assert not wide[:, INTER:].any()
    with pytest.raises(ValueError, match=f"output_dim must be at least {INTER}, .* got {INTER - 1}"):
        moe.bgmv_moe(*arguments, output_dim=INTER - 1)
    shrunk = torch.full((1, len(tokens), RANK), 7.0, dtype=x.dtype, device=device)
    sums = torch.full((TOKENS, INTER), 7.0, device=device)
    plan = moe.prepare_bgmv_moe(*arguments, shrink_out=shrunk, y_accum=sums)
    assert plan.run() is sums
    assert torch.equal(sums.half(), want)
    for name, wrong in (("shrink_out", shrunk.float()), ("y_accum", sums[:, 8:])):
        with pytest.raises(ValueError, match=f"{name} must be torch"):
            moe.prepare_bgmv_moe(*arguments, **{name: wrong})


def test_shrink_adds_and_expand_without_sums_stores(device: str) -> None:
    x, of = rand(TOKENS, HIDDEN, dtype=BF16, device=device), adapters(TOKENS, device)
    ids, weights = chosen(TOKENS, EXPERTS, TOP_K, device)
    tokens, experts = torch.arange(TOKENS, device=device).repeat_interleave(TOP_K), ids.flatten().long()
    a, b = bank(RANK, HIDDEN, device, 1), bank(INTER, RANK, device, 2)
    table = torch.zeros(2, EXPERTS, dtype=torch.int64, device=device)
    strides = moe.fill_w_ptr(table, a, EXPERTS, 0), moe.fill_w_ptr(table, b, EXPERTS, 1)
    h = torch.ones(1, len(tokens), RANK, dtype=BF16, device=device)
    moe.bgmv_moe_shrink(h, x, table[:1], tokens, experts, of, strides[0])
    eye = torch.eye(RANK, dtype=BF16, device=device).expand(LORAS, EXPERTS, RANK, RANK)
    own = of[tokens]
    assert_close(h[0], 1 + products(x[tokens], a, eye, experts, own), tolerance=(2e-2, 2e-2))
    y = torch.full((len(tokens), INTER + 8), 7.0, device=device)
    start = torch.tensor([8], device=device)
    arguments = (tokens, experts, weights.flatten(), of, start, [INTER], strides[1])
    moe.bgmv_moe_expand(y, h, table[1], *arguments, finalize=False)
    assert bool((y[own < 0] == 7).all())
    assert bool((y[:, :8] == 7).all())
    want = torch.stack([b[adapter, e].double() @ row for adapter, e, row in zip(own, experts, h[0].double())])
    assert_close(y[own >= 0, 8:], want[own >= 0], tolerance=(2e-2, 2e-2))
    per_pair = torch.zeros_like(h)
    moe.bgmv_moe_shrink(per_pair, x[tokens], table[0], tokens, experts, of, strides[0], per_pair_input=True)
    assert torch.equal(per_pair[0, own < 0], torch.zeros_like(per_pair[0, own < 0]))
    assert_close(per_pair[0], products(x[tokens], a, eye, experts, own), tolerance=(2e-2, 2e-2))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_layer_with_both_deltas(tokens: int, shuffled: bool, shared: bool, device: str) -> None:
    """The delta of the first product goes into the layer, that of the second is added to its output."""
    e, k, h, i = trtllm.E, trtllm.K, trtllm.H, trtllm.INTER
    _, _, x, w1, w2 = trtllm.inputs(device)
    tokens = min(tokens, len(x))
    x, of, (ids, weights) = x[:tokens], adapters(tokens, device), chosen(tokens, e, k, device)
    p1, p2 = (trtllm.shuffled(w1, True), trtllm.shuffled(w2, False)) if shuffled else (w1, w2)
    options: dict[str, Any] = {"use_shuffled_weight": shuffled, "weight_layout": WeightLayout.MajorK}
    a = [bank(RANK, h, device, 1, e)] * 2 if shared else [bank(RANK, h, device, s, e) for s in (1, 2)]
    b = [bank(i, RANK, device, s, e) for s in (3, 4)]  # gate, up
    a2, b2 = bank(RANK, i, device, 5, e), bank(h, RANK, device, 6, e)
    tables, strides = {}, {}
    fused = torch.cat(b, 2)
    for name, own in (("a", a[:1] if shared else a), ("b", [fused] if shared else b), ("a2", [a2]), ("b2", [b2])):
        tables[name] = torch.zeros(len(own), e, dtype=torch.int64, device=device)
        for s, w in enumerate(own):
            strides[name] = moe.fill_w_ptr(tables[name], w, e, s)
    first = [tables[n][0] if shared else tables[n] for n in ("a", "b")]
    delta = moe.bgmv_moe_gemm1_lora_delta(
        x, first[0], strides["a"], first[1], strides["b"], ids, of, RANK, i, scale=0.5
    )
    assert not delta[of < 0].any()
    base: Any = moe.trtllm_bf16_routed_moe((ids, weights), x, p1, p2, *trtllm.sizes(), **options)
    out, positions, activated = moe.trtllm_bf16_routed_moe(
        (ids, weights), x, p1, p2, *trtllm.sizes(), **options, gemm1_lora_delta=delta
    )
    assert torch.equal(out[of < 0], base[of < 0])
    second = moe.bgmv_moe_gemm2_lora_delta(
        activated,
        positions,
        tables["a2"],
        strides["a2"],
        tables["b2"],
        strides["b2"],
        ids,
        weights,
        of,
        RANK,
        h,
        scale=2.0,
    )
    assert not second[of < 0].any()
    want = torch.zeros(tokens, h, dtype=torch.float64, device=device)
    for t, adapter in enumerate(of.tolist()):
        for j, expert in enumerate(ids[t].tolist()):
            up = w1[expert].double() @ x[t].double()
            if adapter >= 0:
                gate, linear = (0.5 * d[adapter, expert].double() @ (c[adapter, expert].double() @ x[t].double())
                                for c, d in zip(a, b))  # fmt: skip
                up += torch.cat([linear, gate])
            act = activate(up, ActivationType.Swiglu)
            y = w2[expert].double() @ act
            if adapter >= 0:
                y += 2.0 * (b2[adapter, expert].double() @ (a2[adapter, expert].double() @ act))
            want[t] += weights[t, j].double() * y
    assert error(out.float() + second.float(), want) < 1.5e-2
    rows, _, places, again = moe.trtllm_bf16_routed_moe(
        (ids, weights), x, p1, p2, *trtllm.sizes(), **options, gemm1_lora_delta=delta, do_finalize=False
    )
    assert torch.equal(places, positions)
    total = (rows[places.long()].view(tokens, k, h).float() * weights[..., None]).sum(1)
    assert error(total, out.double()) < 1e-2
    assert again.shape == activated.shape


def test_refuses_by_name(device: str) -> None:
    x, of = rand(4, HIDDEN, dtype=BF16, device=device), adapters(4, device)
    a, b = bank(RANK, HIDDEN, device, 1), bank(INTER, RANK, device, 2)
    ids, pairs = torch.zeros(4, 1, dtype=torch.int32, device=device), torch.arange(4, device=device)
    weights = torch.ones(4, device=device)
    table = torch.zeros(1, EXPERTS, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="weights must have rows one behind the other"):
        moe.fill_w_ptr(table, a[..., :32], EXPERTS, 0)
    with pytest.raises(ValueError, match=r"w_ptr must have shape \[slices, 9\]"):
        moe.fill_w_ptr(table, a, 9, 0)
    with pytest.raises(TypeError, match="w_ptr must be int64"):
        moe.fill_w_ptr(table.int(), a, EXPERTS, 0)
    with pytest.raises(ValueError, match="lora_a_weights and lora_b_weights must have as many"):
        moe.bgmv_moe(x, [a], [b, b], pairs, ids[:, 0], of, weights, EXPERTS)
    with pytest.raises(TypeError, match="lora_a_weights must have the dtype of x"):
        moe.bgmv_moe(x, [a.half()], [b], pairs, ids[:, 0], of, weights, EXPERTS)
    with pytest.raises(ValueError, match="expert_ids must have shape"):
        moe.bgmv_moe(x, [a], [b], pairs, ids[:2, 0], of, weights, EXPERTS)
    with pytest.raises(ValueError, match="backend must be 'cake'"):
        moe.prepare_bgmv_moe(x, [a], [b], pairs, ids[:, 0], of, weights, EXPERTS, backend="other")
    with pytest.raises(ValueError, match="w_ptr_a must have 2 slices"):
        moe.bgmv_moe_gemm1_lora_delta(x, table, 1, table, 1, ids, of, RANK, INTER)
    with pytest.raises(ValueError, match="y must be float32"):
        moe.bgmv_moe_expand(x, x[None, :, :RANK], table, pairs, ids[:, 0], weights, of, pairs[:1], [INTER], 1)
    with pytest.raises(TypeError, match=r"topk_weights must be torch\.float32; got torch\.int64"):
        moe.bgmv_moe(x, [a], [b], pairs, ids[:, 0], of, pairs, EXPERTS)


@pytest.mark.parametrize("first", [-8, 8, 1 << 40])
def test_a_slice_outside_of_the_output_is_refused(first: int) -> None:
    """Nothing is written behind or before y, summed or not."""
    b = bank(INTER, RANK, "cpu", 2)
    table, pairs = torch.zeros(1, EXPERTS, dtype=torch.int64), torch.arange(4)
    stride = moe.fill_w_ptr(table, b, EXPERTS, 0)
    x, y = rand(1, 4, RANK, dtype=BF16, device="cpu"), torch.zeros(4, INTER)
    fixed = (table, pairs, torch.zeros_like(pairs), torch.ones(4), torch.zeros_like(pairs))
    for finalize in (True, False):
        with pytest.raises(ValueError, match=rf"slice_start_loc must be in 0\.\.0 for the {INTER} .* got {first}"):
            moe.bgmv_moe_expand(y, x, *fixed, torch.tensor([first]), [INTER], stride, finalize=finalize)
    assert not y.any()
