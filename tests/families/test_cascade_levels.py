"""Cascade attention over levels of shared keys against attention over all keys of a row, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import assert_close
from families.paged import offsets
from families.prefill_batch import Batch, batch, workspace
from fi_core.cascade import MultiLevelCascadeAttentionWrapper as Wrapper

# Query rows of each request, and the keys of each level with the requests that share them.
ROWS = [3, 1, 40, 0, 7]
LEVELS = [[(range(5), 200)], [(range(2), 33), (range(2, 5), 0)], [([i], n) for i, n in enumerate([3, 20, 70, 5, 7])]]


def levels(device: str, dims: int, dtype: torch.dtype, kv_dtype: torch.dtype, seed: int = 0) -> list[Batch]:
    """A batch for each level over one pool, with the same rows of q."""
    everything = [(sum(ROWS[i] for i in who), kv) for level in LEVELS for who, kv in level]
    whole = batch(everything, heads=(8, 2), dims=(dims, dims), dtype=dtype, kv_dtype=kv_dtype, seed=seed, device=device)
    found, first = [], 0
    for level in LEVELS:
        found.append(whole.only(range(first, first + len(level))))
        first += len(level)
    q = found[-1].q
    return [Batch(q, b.qo_lens, b.pool, b.cache, b.k, b.v) for b in found]


def expected(found: list[Batch], causal: bool, **options: Any) -> torch.Tensor:
    """Each row attends to the keys of all levels, one level after another."""
    outs = []
    for i, q in enumerate(found[-1].q.split(ROWS)):
        groups = [next(g for g, (who, _) in enumerate(level) if i in who) for level in LEVELS]
        k, v = (torch.cat([getattr(b, name)[g] for b, g in zip(found, groups)]) for name in ("k", "v"))
        outs.append(attention(q, k, v, causal=causal, **options)[0])
    return torch.cat(outs)


def plan(w: Wrapper, found: list[Batch], **options: Any) -> None:
    tables = zip(*(b.paged_plan()[:4] for b in found))
    w.plan(*(list(arrays) for arrays in tables), *found[0].paged_plan()[4:], **options)


TYPES = {"f16-64": (64, torch.float16, None), "bf16-128": (128, torch.bfloat16, None),
         "f16 over e4m3": (128, torch.float16, torch.float8_e4m3fn)}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_levels(kind: str, causal: bool, device: str) -> None:
    dims, dtype, kv_dtype = TYPES[kind]
    w = Wrapper(3, workspace(device))
    assert fi_core.MultiLevelCascadeAttentionWrapper is Wrapper and len(w._batch_prefill_wrappers) == 3
    found = levels(device, dims, dtype, kv_dtype or dtype)
    q, cache = found[0].q, found[0].cache
    for options in ({}, {"sm_scale": 0.2, "logits_soft_cap": 4.0}):
        plan(w, found, causal=causal, q_data_type=dtype, kv_data_type=kv_dtype, **options)
        out = w.run(q, cache)
        assert out.dtype is dtype
        assert_close(out, expected(found, causal, **options), tolerance=(1.5e-2, 4e-3))
        assert torch.equal(w.forward(q, cache), out)


@pytest.mark.parametrize("options", [
    {"window_left": 40}, {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e3}, {"pos_encoding_mode": "ALIBI"},
    {"window_left": 130, "causal": True, "pos_encoding_mode": "ROPE_LLAMA", "logits_soft_cap": 3.0},
])  # fmt: skip
def test_positions_across_levels(options: dict[str, Any], device: str) -> None:
    """Keys of all levels have their positions in the request; shared levels fill their pages."""
    everything = [(20, 64), (9, 32), (11, 0), (3, 3), (6, 20), (11, 7), (0, 5)]
    whole = batch(everything, heads=(8, 2), dims=(64, 64), device=device)
    found = [whole.only(requests) for requests in ([0], [1, 2], [3, 4, 5, 6])]
    q, groups = whole.q[:20], ([0, 0, 0, 0], [0, 0, 1, 1])
    w = Wrapper(3, workspace(device))
    plan(w, found, **options)
    want = []
    for i, rows in enumerate(q.split([3, 6, 11, 0])):
        parts = [(found[0], groups[0][i]), (found[1], groups[1][i]), (found[2], i)]
        k, v = (torch.cat([getattr(b, name)[at] for b, at in parts]) for name in ("k", "v"))
        want.append(attention(rows, k, v, **options)[0])
    # The logits of ALiBi are those of a call: rows count from 0 in their request.
    assert_close(w.run(q, whole.cache), torch.cat(want), tolerance=(5e-3, 3e-3))
    plan(w, found)
    assert not torch.equal(w.run(q, whole.cache), w.run(q.flip(0), whole.cache)), "levels on their own again"
    tables = [list(arrays) for arrays in zip(*(b.paged_plan()[:4] for b in found))]
    tables[0][1] = torch.tensor([0, 5, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"qo_indptr_arr\[1\]: groups of whole requests"):
        w.plan(*tables, *found[0].paged_plan()[4:], **options)


def test_one_level_is_prefill(device: str) -> None:
    b = batch([(17, 90), (3, 0), (70, 70)], device=device)
    w = Wrapper(1, workspace(device))
    w.begin_forward(*([x] for x in b.paged_plan()[:4]), *b.paged_plan()[4:], True, "NONE", False, 0.3, 20)
    assert_close(w.run(b.q, b.cache), b.expected(causal=True, sm_scale=0.3, window_left=20)[0])


def test_graph_buffers(device: str) -> None:
    """A captured run computes the batch that was planned last."""
    found = levels(device, 128, torch.float16, torch.float16)
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    tables = zip(names, zip(*(b.paged_plan()[:4] for b in found)))
    buffers: dict[str, Any] = {f"{name}_buf_arr": [x.clone() for x in arrays] for name, arrays in tables}
    w = Wrapper(3, workspace(device), "NHD", True, **buffers)
    assert w.is_cuda_graph_enabled
    q, cache = found[0].q, found[0].cache
    run: Any = lambda: w.run(q, cache)  # noqa: E731
    plan(w, found, causal=True)
    out = run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        run = graph.replay
    for drop in (0, 2, 1):
        fewer = [b if i != 1 else batch_without_keys(b, drop) for i, b in enumerate(found)]
        plan(w, fewer, causal=True)
        out = run() if device == "cpu" else (run(), out)[1]
        assert_close(out, expected(fewer, True), tolerance=(1.5e-2, 4e-3))


def batch_without_keys(b: Batch, drop: int) -> Batch:
    """Removes the last `drop` pages of the first request."""
    size = b.pool.page_size
    counts = [-(-len(k) // size) for k in b.k]
    kept = counts[0] - drop
    n = min(len(b.k[0]), kept * size)
    pool = vars(b.pool) | {
        "indptr": offsets([kept, *counts[1:]], b.q.device),
        "indices": torch.cat([b.pool.indices[:kept], b.pool.indices[counts[0] :]]),
        "last_page_len": torch.cat([b.pool.last_page_len[:1].new_tensor([(n - 1) % size + 1 if n else 0]),
                                    b.pool.last_page_len[1:]]),
    }  # fmt: skip
    return Batch(b.q, b.qo_lens, type(b.pool)(**pool), b.cache, [b.k[0][:n], *b.k[1:]], [b.v[0][:n], *b.v[1:]])


def test_refusals() -> None:
    found = levels("cpu", 64, torch.float16, torch.float16)
    w = Wrapper(3, workspace("cpu"))
    plan(w, found)
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len\[0\]: 16, full pages, are required"):
        plan(w, found, window_left=5)
    with pytest.raises(RuntimeError, match="the last plan failed"):
        w.run(found[0].q, found[0].cache)
    with pytest.raises(ValueError, match="qo_indptr_arr: one for each of the 3 levels is required; got 2"):
        plan(w, found[:2])
    with pytest.raises(ValueError, match="int_workspace_buffers: one for each of the 3 levels"):
        w.reset_workspace_buffer(workspace("cpu"), [workspace("cpu")])
    w.reset_workspace_buffer(workspace("cpu"), [workspace("cpu", 1 << 12) for _ in range(3)])
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(found[0].q, found[0].cache)
    with pytest.raises(ValueError, match="num_levels: 1 to 64 is required"):
        Wrapper(0, workspace("cpu"))
    with pytest.raises(ValueError, match="qo_indptr_buf_arr: 2 buffers are required with use_cuda_graph; got None"):
        Wrapper(2, workspace("cpu"), use_cuda_graph=True)


@pytest.mark.parametrize("at", range(4))
def test_a_member_that_is_no_tensor_is_named_where_levels_are_joined(at: int) -> None:
    one = torch.ones(1, dtype=torch.int32)
    tables: list[list[Any]] = [[x] for x in (torch.arange(2, dtype=torch.int32), torch.arange(2), one - 1, one)]
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    tables[at] = [-1]
    with pytest.raises(TypeError, match=rf"{names[at]}\[0\] must be a torch.Tensor; got a int"):
        Wrapper(1, workspace("cpu")).plan(*tables, 1, 1, 64, 4, window_left=1)
