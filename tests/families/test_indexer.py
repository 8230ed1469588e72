"""The choice of an indexer's keys against its logits: the same bits in pieces, alone and in a batch; refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fi_core import indexer
from fi_core.deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits
from fi_core.dsa_indexer import fp8_indexer_topk, fp8_paged_indexer_topk

PAGE, HEADS, DIM = 16, 8, 32


def e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def paged(
    batch: int, next_n: int, pages: int, device: str, heads: int = HEADS, dim: int = DIM
) -> dict[str, torch.Tensor]:
    """Requests of several lengths; many keys are equal, so that logits tie at the last place."""
    generator = torch.Generator().manual_seed(batch)
    count = batch * pages
    values = e4m3(5, PAGE * dim)[torch.arange(count) % 5].view(torch.uint8)
    cache = torch.cat([values, torch.ones(count, PAGE).view(torch.uint8)], 1)
    lengths = torch.randint(0, pages * PAGE + 1, (batch,), generator=generator)
    given = {
        "q": e4m3(batch, next_n, heads, dim, seed=1),
        "kv_cache": cache.view(count, PAGE, 1, dim + 4),
        "weights": torch.randn(batch * next_n, heads, generator=generator),
        "context_lens": lengths.int(),
        "block_table": torch.randperm(count, generator=generator).int().view(batch, pages),
    }
    return {name: x.to(device) for name, x in given.items()}


def largest(row: torch.Tensor, k: int, tie_break: int) -> torch.Tensor:
    """Indices of the k largest, rising: of equal ones the first, or with tie_break 2 the last."""
    if tie_break == 2:
        return (len(row) - 1 - row.flip(0).argsort(descending=True, stable=True)[:k]).sort().values
    return row.argsort(descending=True, stable=True)[:k].sort().values


@pytest.mark.parametrize("tie_break", [1, 2])
@pytest.mark.parametrize(("next_n", "form"), [(1, (8, 32)), (3, (8, 32)), (2, (64, 128)), (4, (32, 128))])
def test_requests_get_the_largest_logits_exactly(
    next_n: int, form: tuple[int, int], tie_break: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the logits of `fp8_paged_mqa_logits`, for all requests at once, a few at a time, and each alone."""
    x, top_k = paged(5, next_n, 6, device, *form), 24
    logits = fp8_paged_mqa_logits(**x, schedule_meta=None, max_context_len=6 * PAGE)
    whole, scores = fp8_paged_indexer_topk(**x, top_k=top_k, tie_break=tie_break, return_scores=True)
    slots = fp8_paged_indexer_topk(**x, top_k=top_k, tie_break=tie_break, output="slot")
    for row in range(5 * next_n):
        b, t = divmod(row, next_n)
        seen = max(0, int(x["context_lens"][b]) - next_n + t + 1)
        want = largest(logits[row, :seen], top_k, tie_break)
        n = len(want)
        assert whole[row].tolist() == [*want.tolist(), *[-1] * (top_k - n)]
        assert torch.equal(scores[row, :n], logits[row, want]) and (scores[row, n:] == -math.inf).all()
        own = x["block_table"][b, want // PAGE] * PAGE + want % PAGE
        assert slots[row].tolist() == [*own.tolist(), *[-1] * (top_k - n)]
    monkeypatch.setattr(indexer, "_LOGITS_BYTES", 2 * next_n * 6 * PAGE * 4)  # of two requests
    given = torch.empty_like(whole), torch.empty_like(scores)
    again = fp8_paged_indexer_topk(
        **x, top_k=top_k, tie_break=tie_break, indices=given[0], scores=given[1], return_scores=True
    )
    assert again[0] is given[0] and torch.equal(given[0], whole) and torch.equal(given[1], scores)
    alone = {name: v[2:3] for name, v in x.items() if name not in ("weights", "kv_cache")}
    alone |= {"kv_cache": x["kv_cache"], "weights": x["weights"][2 * next_n : 3 * next_n]}
    found = fp8_paged_indexer_topk(**alone, top_k=top_k, tie_break=tie_break)
    assert torch.equal(found, whole[2 * next_n : 3 * next_n])


@pytest.mark.parametrize("relative", [False, True])
def test_prompts_get_the_largest_logits_exactly(relative: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of one array of keys, an empty one and one beyond its end among them; a NaN is chosen last."""
    keys = e4m3(7, DIM)[torch.arange(90) % 7].to(device)
    scales = torch.ones(90, device=device)
    scales[11] = math.nan
    q, weights = e4m3(6, HEADS, DIM, seed=1).to(device), torch.randn(6, HEADS, device=device)
    start = torch.tensor([0, 0, 10, 40, 50, 10], dtype=torch.int32, device=device)
    end = torch.tensor([90, 5, 70, 40, 95, 12], dtype=torch.int32, device=device)
    arguments = q, (keys, scales), weights, start, end
    logits = fp8_mqa_logits(*arguments).nan_to_num(-math.inf, math.inf, -math.inf)
    whole = fp8_indexer_topk(*arguments, 20, relative=relative)
    for row, (a, b) in enumerate(zip(start.tolist(), end.tolist())):
        want = largest(logits[row, a : min(b, 90)], 20, 1) + (0 if relative else a)
        assert whole[row].tolist() == [*want.tolist(), *[-1] * (20 - len(want))]
    assert 11 - 10 * relative in whole[5].tolist() and 11 not in whole[0].tolist()
    monkeypatch.setattr(indexer, "_LOGITS_BYTES", 2 * 90 * 4)  # of two rows
    assert torch.equal(fp8_indexer_topk(*arguments, 20, relative=relative), whole)


def test_nothing_is_chosen_where_there_is_nothing(device: str) -> None:
    """No rows, no requests, no keys, and requests without tokens."""
    q, none = e4m3(3, HEADS, DIM).to(device), torch.zeros(3, dtype=torch.int32, device=device)
    weights = torch.ones(3, HEADS, device=device)
    keys = q.new_empty(0, DIM), weights.new_empty(0)
    assert (fp8_indexer_topk(q, keys, weights, none, none, 4) == -1).all()
    assert fp8_indexer_topk(q[:0], keys, weights[:0], none[:0], none[:0], 4).shape == (0, 4)
    x = paged(3, 1, 2, device) | {"context_lens": none}
    found, scores = fp8_paged_indexer_topk(**x, top_k=4, output="slot", return_scores=True)
    assert (found == -1).all() and (scores == -math.inf).all()
    empty = {n: v if n == "kv_cache" else v[:0] for n, v in x.items()}
    assert fp8_paged_indexer_topk(**empty, top_k=4).shape == (0, 4)


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
@pytest.mark.parametrize("next_n", [1, 4])
def test_a_request_without_keys_sees_none(next_n: int, length: int, device: str) -> None:
    """Also where the length less its drafted tokens has no 32 bits."""
    x = paged(2, next_n, 3, device)
    x["context_lens"][0] = length
    logits = fp8_paged_mqa_logits(**x, schedule_meta=None, max_context_len=3 * PAGE, clean_logits=True)
    assert (logits[:next_n] == -math.inf).all()
    chosen = fp8_paged_indexer_topk(**x, top_k=24)
    assert (chosen[:next_n] == -1).all()


@pytest.mark.gpu
def test_a_graph_chooses_for_other_lengths() -> None:
    x = paged(4, 2, 6, "cuda", 64, 128)
    graph = torch.cuda.CUDAGraph()
    fp8_paged_indexer_topk(**x, top_k=24, output="slot")
    with torch.cuda.graph(graph):
        found = fp8_paged_indexer_topk(**x, top_k=24, output="slot")
    for lengths in ([5, 0, 96, 40], [96, 96, 1, 17]):
        x["context_lens"].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(found, fp8_paged_indexer_topk(**x, top_k=24, output="slot"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k must be 1 or more"),
        ({"output": "page"}, "output must be 'position' or 'slot'"),
        ({"block_table": None}, "block_table must be a tensor"),
        ({"indices": torch.zeros(2, 8)}, "indices: dtype must be torch.int32"),
        ({"scores": torch.zeros(2, 9)}, r"scores: shape must be \(2, 8\)"),
        ({"context_lens": torch.zeros(2)}, "context_lens"),
        ({"tie_break": 3}, "tie_break"),
    ],
)
def test_refusals_name_the_argument(change: dict[str, Any], message: str) -> None:
    x: dict[str, Any] = {**paged(2, 1, 3, "cpu"), "top_k": 8}
    with pytest.raises((ValueError, TypeError), match=message):
        fp8_paged_indexer_topk(**x | change)
