"""Adapters on experts: formats and ways to compute a layer against fp64, the bits of tokens without one, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from families.harness import rand
from families.moe_reference import activate, block_quantized, chosen, error, mxfp4_quantized
from fi_core.fused_moe import ActivationType as Act
from fi_core.fused_moe import (
    ExpertLora,
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
)
from fi_core.fused_moe.ops import moe_activation, moe_gated_gemm
from fi_core.runtime.launch import plan
from fi_core.runtime.resolve import ahead

BF16 = torch.bfloat16
LIMIT = {"16 bits": 1e-2, "fp8": 6e-2, "mxfp4": 1e-2}
LORAS, EXPERTS, TOP_K, HIDDEN, INTER = 4, 8, 2, 256, 128


def adapters(tokens: int, device: str, gated: bool = True, rank: int = 16, scaled: bool = True) -> ExpertLora:
    """Every third token has none; adapter 1 is NaN and nobody has it."""
    halves = 2 if gated else 1

    def bank(rows: int, k: int, seed: int) -> torch.Tensor:
        weights = rand(LORAS, EXPERTS, rows, k, dtype=BF16, device=device, seed=seed, scale=k**-0.5)
        weights[1] = float("nan")
        return weights

    of = torch.randint(0, LORAS, (tokens,), generator=torch.Generator().manual_seed(3))
    of[of == 1] = 2
    of[::3] = -1
    return ExpertLora(
        [bank(rank, HIDDEN, s) for s in range(halves)],
        [bank(INTER, rank, 5 + s) for s in range(halves)],
        bank(rank, INTER, 8),
        bank(HIDDEN, rank, 9),
        of.to(device),
        torch.tensor([0.5, float("nan"), 1.0, -2.0], device=device) if scaled else None,
    )


def layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    lora: Any,
    kind: Act,
    biases: tuple[Any, Any] = (0.0, 0.0),
    **constants: float,
) -> torch.Tensor:
    """In fp64, pair after pair. biases: `[experts, n]` and `[experts, hidden]`, or of all."""
    tensors = (torch.as_tensor(b, dtype=torch.float64, device=x.device) for b in biases)
    up, down = (torch.atleast_1d(b).expand(len(w1), -1) for b in tensors)
    halves = (len(lora) - 3) // 2
    a, b, (a2, b2, of, *scale) = lora[:halves], lora[halves : 2 * halves], lora[2 * halves :]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, adapter in enumerate(of.tolist()):
        factor = float(scale[0][adapter]) if scale else 1.0
        for j, e in enumerate(ids[t].tolist()):
            if not 0 <= e < len(w1):
                continue
            h = w1[e].double() @ x[t].double() + up[e]
            if adapter >= 0:
                h += factor * torch.cat([d[adapter, e].double() @ (c[adapter, e].double() @ x[t].double())
                                         for c, d in zip(a, b)])  # fmt: skip
            act = activate(h, kind, **constants)
            y = w2[e].double() @ act + down[e]
            if adapter >= 0:
                y += factor * (b2[adapter, e].double() @ (a2[adapter, e].double() @ act))
            out[t] += scales[t, j].double() * y
    return out


def weights_of(form: str, device: str, n: int) -> tuple[Any, ...]:
    """fc1 and fc2, their values, and what else the call has."""
    w1 = rand(EXPERTS, n, HIDDEN, dtype=BF16, device=device, seed=11, scale=HIDDEN**-0.5)
    w2 = rand(EXPERTS, HIDDEN, INTER, dtype=BF16, device=device, seed=12, scale=INTER**-0.5)
    if form == "16 bits":
        return w1, w2, w1, w2, {}
    if form == "fp8":
        (q1, s1, v1), (q2, s2, v2) = block_quantized(w1), block_quantized(w2)
        return q1, q2, v1, v2, {"quant_scales": [s1, s2], "use_deepseek_fp8_block_scale": True}
    (q1, s1, v1), (q2, s2, v2) = mxfp4_quantized(w1), mxfp4_quantized(w2)
    scales = [interleave_moe_scales_for_sm90_mixed_gemm(s) for s in (s1, s2)]
    q1, q2 = (interleave_moe_weights_for_sm90_mixed_gemm(q, "fp4") for q in (q1, q2))
    return q1, q2, v1, v2, {"quant_scales": scales, "use_w4_group_scaling": True}


@pytest.mark.parametrize("form", ["16 bits", "fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 9, 64, 300])
def test_adapters_of_experts(tokens: int, form: str, device: str) -> None:
    """Against fp64, and tokens without an adapter against the layer without adapters: the same bits."""
    w1, w2, v1, v2, more = weights_of(form, device, 2 * INTER)
    x = rand(tokens, HIDDEN, dtype=BF16, device=device)
    ids, scales = chosen(tokens, EXPERTS, TOP_K, device)
    ids[-1, 0] = EXPERTS + 3  # of another rank
    lora = adapters(tokens, device)
    base = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, **more)
    got = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, lora=lora, **more)
    assert torch.equal(got[::3].view(torch.int16), base[::3].view(torch.int16))
    assert error(got, layer(x, ids, scales, v1, v2, lora, Act.Swiglu)) < LIMIT[form]
    again = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, lora=lora, **more)
    assert torch.equal(got, again)
    assert tokens == 1 or not torch.equal(got, base)


@pytest.mark.parametrize("form", ["16 bits", "fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [4, 64])
def test_adapters_beside_other_options(tokens: int, form: str, device: str) -> None:
    """Biases, constants of the activation, experts of the second of two ranks, and no weights of the experts."""
    w1, w2, v1, v2, more = weights_of(form, device, 2 * INTER)
    x, (ids, _) = rand(tokens, HIDDEN, dtype=BF16, device=device), chosen(tokens, 2 * EXPERTS, TOP_K, device)
    biases = tuple(rand(EXPERTS, n, dtype=BF16, device=device, seed=n) for n in (2 * INTER, HIDDEN))
    constants = {"alpha": 1.75, "beta": 0.5, "limit": 1.5}
    for name, value in constants.items():
        more[f"swiglu_{name}"] = torch.full((EXPERTS,), value, device=device)
    lora = adapters(tokens, device)
    own: Any = {"activation_type": Act.SwigluBias, "ep_size": 2, "ep_rank": 1, **more}
    own |= dict(zip(("fc1_expert_biases", "fc2_expert_biases"), biases))
    got = cutlass_fused_moe(x, ids, None, w1, w2, BF16, lora=lora, **own)
    ones = torch.ones(tokens, TOP_K, device=device)
    want = layer(x, ids - EXPERTS, ones, v1, v2, lora, Act.SwigluBias, biases, **constants)
    assert error(got, want) < LIMIT[form]


@pytest.mark.parametrize("tokens", [4, 64])
def test_results_in_a_workspace(tokens: int, device: str) -> None:
    """Of the size for adapters, and nothing behind it is written."""
    w1, w2, *_ = weights_of("16 bits", device, 2 * INTER)
    x, (ids, scales) = rand(tokens, HIDDEN, dtype=BF16, device=device), chosen(tokens, EXPERTS, TOP_K, device)
    sizes: Any = (tokens, HIDDEN, INTER, EXPERTS, TOP_K)
    dtypes: Any = {"x_dtype": BF16, "weight_dtype": BF16}
    size = cutlass_fused_moe_workspace_size(*sizes, **dtypes, lora=True)
    assert size > cutlass_fused_moe_workspace_size(*sizes, **dtypes)
    memory = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device=device)
    lora = adapters(tokens, device)
    want = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, lora=lora)
    got = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, lora=lora, workspace_buffer=memory[:size])
    assert torch.equal(got, want)
    assert memory[size:].eq(0xFF).all()


@pytest.mark.parametrize("rank", [8, 64, 256])
def test_ranks_and_an_activation_without_a_gate(rank: int, device: str) -> None:
    tokens = 17
    w1, w2, v1, v2, _ = weights_of("16 bits", device, INTER)
    x, (ids, scales) = rand(tokens, HIDDEN, dtype=BF16, device=device), chosen(tokens, EXPERTS, TOP_K, device)
    lora = adapters(tokens, device, gated=False, rank=rank, scaled=False)
    got = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, activation_type=Act.Relu2, lora=lora)
    base = cutlass_fused_moe(x, ids, scales, w1, w2, BF16, activation_type=Act.Relu2)
    assert torch.equal(got[::3], base[::3])
    assert error(got, layer(x, ids, scales, v1, v2, lora, Act.Relu2)) < LIMIT["16 bits"]


def test_a_delta_is_added_before_the_activation(device: str) -> None:
    """The gate's first; of the CPU and of every GPU, and of the first product with its activation."""
    rows, width, k = 20, 64, 48
    offsets = torch.tensor([0, 7, 7, 20], dtype=torch.int32, device=device)
    x = rand(rows, 2 * width, dtype=BF16, device=device)
    delta = rand(rows, 2 * width, dtype=BF16, device=device, seed=1)
    out = torch.empty(rows, width, dtype=BF16, device=device)
    moe_activation(out, None, x, offsets, delta=delta)
    want = activate(x.double() + delta.double().roll(width, 1), Act.Swiglu)
    assert error(out, want) < 1e-2
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        return
    tokens = rand(rows, k, dtype=BF16, device=device, seed=2)
    w = rand(3, 2 * width, k, dtype=BF16, device=device, seed=3, scale=k**-0.5)
    moe_gated_gemm(out, None, tokens, None, w, None, offsets, delta=delta)
    of = torch.tensor([0] * 7 + [2] * 13)
    h = torch.einsum("rnk,rk->rn", w[of].double(), tokens.double()) + delta.double().roll(width, 1)
    assert error(out, activate(h, Act.Swiglu)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["16 bits", "fp8"])
def test_a_graph_serves_other_adapters(form: str) -> None:
    tokens = 32
    w1, w2, v1, v2, more = weights_of(form, "cuda", 2 * INTER)
    x, (ids, scales) = rand(tokens, HIDDEN, dtype=BF16, device="cuda"), chosen(tokens, EXPERTS, TOP_K, "cuda")
    lora = adapters(tokens, "cuda")
    out = torch.empty_like(x)
    run = lambda: cutlass_fused_moe(x, ids, scales, w1, w2, BF16, output=out, lora=lora, **more)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        of = torch.randint(-1, LORAS, (tokens,), generator=torch.Generator().manual_seed(seed))
        of[of == 1] = 3
        lora[-2].copy_(of)
        graph.replay()
        assert error(out, layer(x, ids, scales, v1, v2, lora, Act.Swiglu)) < LIMIT[form]


def test_the_first_call_begins_the_kernels_of_other_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters follow the tokens, so that no number is refused, and calls of another number begin nothing again."""
    said: list[str] = []
    monkeypatch.setattr(ahead.diagnose, "once", lambda level, text: said.append(text))
    counts: list[int] = []
    monkeypatch.setattr(plan.LaunchPlan, "prepare", lambda self, learns=True: counts.append(len(self.forms[1])))
    w1, w2, *_ = weights_of("16 bits", "cpu", 2 * INTER)
    signature = inspect.signature(cutlass_fused_moe)
    for tokens in (64, 9):
        ids, scales = chosen(tokens, EXPERTS, TOP_K, "cpu")
        x, lora = rand(tokens, HIDDEN, dtype=BF16, device="cpu"), adapters(tokens, "cpu")
        call = signature.bind(x, ids, scales, w1, w2, BF16, lora=lora)
        call.apply_defaults()
        begin: Any = cutlass_fused_moe.__wrapped__.begin_other_counts  # type: ignore[attr-defined]
        begin(torch.device("cpu"), call.arguments)
    assert said == []
    assert len(counts) == len({*counts}) == len(ahead.TOKEN_COUNTS)


def test_refuses_by_name(device: str) -> None:
    w1, w2, *_ = weights_of("16 bits", device, 2 * INTER)
    x, (ids, scales) = rand(3, HIDDEN, dtype=BF16, device=device), chosen(3, EXPERTS, TOP_K, device)
    good = adapters(3, device)

    def call(lora: Any, **more: Any) -> None:
        cutlass_fused_moe(x, ids, scales, w1, w2, BF16, lora=lora, **more)

    def changed(at: int, value: torch.Tensor) -> list[torch.Tensor]:
        return [value if i == at else t for i, t in enumerate(good)]

    with pytest.raises(ValueError, match="lora must be an ExpertLora with"):
        call(adapters(3, device, gated=False))
    with pytest.raises(ValueError, match=r"fc1_a\[1\] of lora must have shape \[4, 8, rank, 256\]"):
        call(changed(1, good[1][..., :64]))
    with pytest.raises(TypeError, match="fc2_b of lora must have the dtype of input"):
        call(changed(5, good[5].half()))
    with pytest.raises(ValueError, match=r"lora_indices must have shape \[3\]"):
        call(changed(6, good[6][:2]))
    with pytest.raises(ValueError, match="fc1_a and fc1_b must both have"):
        ExpertLora(good[:2], good[2:3], *good[4:7])
