"""Products of low-rank adapters: which weights a token meets, ranks, layouts, equal bits, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import assert_close, assert_guards, rand, strided
from fi_core import lora
from fi_core.lora.ops import lora_delta, lora_sum

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = (2e-2, 2e-2)


def indices(tokens: int, loras: int, device: str, dtype: torch.dtype = torch.int64, seed: int = 0) -> torch.Tensor:
    """Every fifth token has no adapter, and no token has adapter 1."""
    found = torch.randint(0, loras, (tokens,), generator=torch.Generator().manual_seed(seed))
    found[found == 1] = 0
    found[::5] = -1
    return found.to(dtype).to(device)


def bank(loras: int, rows: int, k: int, device: str, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Adapter 1 is NaN: nobody may read it."""
    weights = rand(loras, 1, rows, k, dtype=dtype, device=device, seed=seed, scale=k**-0.5)
    weights[1] = float("nan")
    return weights


def linear(y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, scale: float, of: torch.Tensor) -> torch.Tensor:
    out, first = y.double().cpu(), 0
    for own_a, own_b in zip(a, b):
        n = own_b.shape[2]
        for t, adapter in enumerate(of.tolist()):
            if adapter >= 0:
                h = own_a[adapter, 0].double().cpu() @ x[t].double().cpu()
                out[t, first : first + n] += scale * (own_b[adapter, 0].double().cpu() @ h)
        first += n
    return out


@pytest.mark.parametrize("rank", [8, 16, 24, 64, 256])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, BF16), (F16, F16), (BF16, F32)])
def test_linear_adds_what_fp64_adds(rank: int, dtype: torch.dtype, out: torch.dtype, device: str) -> None:
    """Strided rows in poison; slices of several widths, more than one launch takes; tokens of -1 keep their bits."""
    tokens, loras, k, widths = 37, 4, 136, (24, 8, 40, 16)
    x = strided(rand(tokens, k, dtype=dtype, device=device))
    y = strided(rand(tokens, sum(widths), dtype=out, device=device, seed=1))
    a = [bank(loras, rank, k, device, dtype, seed=s) for s in range(4)]
    b = [bank(loras, n, rank, device, dtype, seed=7 + s) for s, n in enumerate(widths)]
    of, before = indices(tokens, loras, device, torch.int32), y.clone()
    lora.add_lora_linear(y, x, a, b, 0.5, widths, lora_indices=of)
    assert_close(y, linear(before, x, a, b, 0.5, of), tolerance=TOLERANCE)
    assert torch.equal(y[::5], before[::5])
    assert_guards(y)


def test_a_token_has_the_same_bits_alone_and_in_any_batch(device: str) -> None:
    """Many tokens of one adapter, over several windows of 256, one after another and mixed."""
    tokens, k, n = 700, 264, 40
    x, a, b = rand(tokens, k, dtype=BF16, device=device), bank(4, 16, k, device), bank(4, n, 16, device, seed=1)
    of = indices(tokens, 4, device)
    y = torch.zeros(tokens, n, dtype=BF16, device=device)
    lora.add_lora_linear(y, x, (a,), (b,), 1.0, (n,), lora_indices=of)
    again = torch.zeros_like(y)
    lora.add_lora_linear(again, x, (a,), (b,), 1.0, (n,), lora_indices=of)
    assert torch.equal(y, again)
    order = of.argsort(stable=True)
    mixed = torch.zeros_like(y)
    lora.add_lora_linear(mixed, x[order], (a,), (b,), 1.0, (n,), lora_indices=of[order])
    assert torch.equal(mixed, y[order])
    for t in (0, 1, 255, 256, 699):
        one = torch.zeros(1, n, dtype=BF16, device=device)
        lora.add_lora_linear(one, x[t : t + 1], (a,), (b,), 1.0, (n,), lora_indices=of[t : t + 1])
        assert torch.equal(one[0], y[t])
    assert_close(y, linear(torch.zeros_like(y), x, (a,), (b,), 1.0, of), tolerance=TOLERANCE)


@pytest.mark.parametrize("middle", [BF16, F32])
def test_shrink_and_expand_are_the_two_halves(middle: torch.dtype, device: str) -> None:
    tokens, k, n, rank = 21, 136, 72, 16
    x, a, b = rand(tokens, k, dtype=BF16, device=device), bank(3, rank, k, device), bank(3, n, rank, device, seed=1)
    of = indices(tokens, 3, device)
    h = torch.full((tokens, rank), float("nan"), dtype=middle, device=device)
    lora.bgmv_shrink(x, a[:, 0], h, of, 0.5)
    y = strided(rand(tokens, n + 16, dtype=BF16, device=device, seed=2))
    before = y.clone()
    lora.bgmv_expand_slice(h, b, y, of, 8, n)
    want = before.double()
    want[:, 8 : 8 + n] = linear(before[:, 8 : 8 + n], x, (a,), (b,), 0.5, of).to(device)
    assert_close(y, want, tolerance=TOLERANCE)
    assert torch.equal(y[:, :8], before[:, :8])
    assert torch.equal(y[:, 8 + n :], before[:, 8 + n :])
    lora.bgmv_expand(h, b, y, of, add_inputs=False)
    assert_close(y[:, :n], linear(torch.zeros_like(y[:, :n]), x, (a,), (b,), 0.5, of), tolerance=TOLERANCE)
    assert not y[::5, :n].any()
    assert torch.equal(y[:, 8 + n :], before[:, 8 + n :])


def test_experts_of_pairs_slots_and_sorted_rows(device: str) -> None:
    """Three ways to say which expert a pair has give the same bits; pairs of experts elsewhere get -0, or nothing."""
    tokens, k, experts, loras, rank, n = 40, 64, 6, 3, 16, 24
    x = rand(tokens, k, dtype=BF16, device=device)
    a = rand(loras, experts, rank, k, dtype=BF16, device=device, scale=0.1)
    b = rand(loras, experts, n, rank, dtype=BF16, device=device, seed=1, scale=0.2)
    ids = torch.randint(-1, experts + 2, (tokens, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    ids, of = ids.to(device), indices(tokens, loras, device).clamp(max=0)
    slots = torch.full((tokens * 3, n), 7.0, dtype=F32, device=device)
    lora_delta(slots, x, of, a=a, b=b, experts=ids, fill=True)
    for pair in range(tokens * 3):
        expert, adapter = int(ids.flatten()[pair]), int(of[pair // 3])
        if not 0 <= expert < experts or adapter < 0:
            assert not slots[pair].any()
            assert bool(slots[pair].signbit().all())  # what changes no bit of a sum
        else:
            h = (a[adapter, expert].double() @ x[pair // 3].double()).bfloat16().double()
            assert_close(slots[pair], b[adapter, expert].double() @ h, tolerance=TOLERANCE)
    order = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten().argsort(stable=True)
    here = int(((ids >= 0) & (ids < experts)).sum())
    pairs = torch.full_like(slots, 7.0)
    lora_delta(pairs, x, of, a=a, b=b, tokens=order // 3, experts=ids.flatten()[order].long(), fill=True)
    assert torch.equal(pairs, slots[order])
    counts = torch.bincount(ids.flatten()[order[:here]].long(), minlength=experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    rows = (order // 3).int()
    rows[here:] = -1
    sorted_rows = torch.full_like(slots, 7.0)
    lora_delta(sorted_rows, x, of, a=a, b=b, tokens=rows, offsets=offsets, fill=True)
    assert torch.equal(sorted_rows[:here], pairs[:here])
    assert bool((sorted_rows[here:] == 7).all())


def test_sums_of_pairs_in_any_order(device: str) -> None:
    tokens, pairs, width = 9, 600, 1036
    x = rand(pairs, width, dtype=F32, device=device)
    of = torch.tensor([0, 1, -1, 2, 0, 0, -1, 3, 1], device=device)
    who = torch.randint(0, tokens, (pairs,), generator=torch.Generator().manual_seed(0)).to(device)
    weights = rand(pairs, dtype=F32, device=device, seed=3)
    out = rand(tokens, width, dtype=F32, device=device, seed=4)
    want = out.double().index_add(0, who, x.double() * weights.double()[:, None])
    want[of < 0] = out.double()[of < 0]
    lora_sum(out, x, of, tokens=who, weights=weights)
    assert_close(out, want, tolerance=(1e-4, 1e-4))


@pytest.mark.gpu
def test_a_graph_serves_other_adapters() -> None:
    tokens, k, n = 64, 256, 64
    x, a, b = rand(tokens, k, dtype=BF16, device="cuda"), bank(4, 16, k, "cuda"), bank(4, n, 16, "cuda", seed=1)
    of, y = indices(tokens, 4, "cuda"), torch.zeros(tokens, n, dtype=BF16, device="cuda")
    lora.add_lora_linear(y, x, (a,), (b,), 1.0, (n,), lora_indices=of)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora.add_lora_linear(y, x, (a,), (b,), 1.0, (n,), lora_indices=of)
    for seed in (1, 2, 3):
        of.copy_(indices(tokens, 4, "cuda", seed=seed))
        y.zero_()
        graph.replay()
        assert_close(y, linear(torch.zeros_like(y), x, (a,), (b,), 1.0, of), tolerance=TOLERANCE)


def test_no_tokens(device: str) -> None:
    y, x = torch.empty(0, 16, dtype=BF16, device=device), torch.empty(0, 64, dtype=BF16, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    lora.add_lora_linear(y, x, (bank(2, 8, 64, device),), (bank(2, 16, 8, device),), 1.0, (16,), lora_indices=none)


def test_refuses_by_name(device: str) -> None:
    x, y = rand(4, 64, dtype=BF16, device=device), torch.zeros(4, 16, dtype=BF16, device=device)
    a, b, of = bank(2, 8, 64, device), bank(2, 16, 8, device), torch.tensor([0, 0, -1, 0], device=device)

    def call(x: torch.Tensor = x, y: torch.Tensor = y, a: Any = (a,), b: Any = (b,), of: torch.Tensor = of) -> None:
        lora.add_lora_linear(y, x, a, b, 1.0, (16,), lora_indices=of)

    for wrong, error, text in (
        ({"a": (a[..., :32],)}, ValueError, "lora_a_weights"),
        ({"a": ()}, ValueError, "lora_a_stacked"),
        ({"a": (a[0, 0],)}, ValueError, "lora_a_stacked"),
        ({"b": (b[:, :, :8],)}, ValueError, "lora_b_stacked"),
        ({"b": (b.half(),)}, TypeError, "lora_b_weights"),
        ({"x": x.float()}, TypeError, "x must have the dtype"),
        ({"y": y[:, :8]}, ValueError, "y must have 16 columns"),
        ({"of": of.float()}, TypeError, "lora_indices"),
        ({"of": of[:3]}, ValueError, "lora_indices"),
        ({"a": (a[:, :, :4],), "b": (b[..., :4],)}, ValueError, "rank of 8 to 256"),
    ):
        with pytest.raises(error, match=text):
            call(**wrong)
    with pytest.raises(ValueError, match="slice_size"):
        lora.bgmv_expand_slice(x[:, :8], b, y, of, 0, 8)
    with pytest.raises(ValueError, match="slice_offset 8"):
        lora.bgmv_expand_slice(x[:, :8], b, y, of, 8, 16)
    if device == "cpu":
        with pytest.raises(ValueError, match="lora_indices must be below 2"):
            call(of=torch.tensor([0, 0, 2, 0]))
