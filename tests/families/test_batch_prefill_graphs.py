"""Batch prefill in CUDA graphs and in other batches: one capture serves many batches, with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from families.harness import assert_close
from families.prefill_batch import Batch, batch, planned, workspace
from families.test_batch_prefill_calls import graph_buffers
from fi_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from fi_core.runtime.errors import UnsupportedError

E4M3 = torch.float8_e4m3fn
LSE = (2e-4, 2e-4)
ROWS, PAGES = 160, 120  # of the graph: query tokens and pages that no batch exceeds


def captured(run: Callable[[], Any]) -> Any:
    """The result of a replay, after one run that compiles."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    graph.replay()
    return results


KINDS = {
    "f16-64": {"dims": (64, 64)},
    "bf16-128": {"dims": (128, 128), "dtype": torch.bfloat16},
    "f16-192": {"dims": (192, 128)},
    "f16-80": {"dims": (80, 80)},
    "f16 over e4m3": {"dims": (128, 128), "kv_dtype": E4M3},
    "e4m3": {"dims": (128, 128), "dtype": E4M3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", [BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper])
def test_a_request_has_the_same_bits_however_it_runs(kind: str, wrapper: Any, device: str) -> None:
    """Alone or in any batch, eager or captured, without split-KV."""
    is_paged = wrapper is BatchPrefillWithPagedKVCacheWrapper
    b = batch([(150, 450), (1, 77), (70, 70), (128, 700)], heads=(8, 2), device=device, **KINDS[kind])
    options = {"causal": True, "window_left": 300}
    plan = {**options, "disable_split_kv": True}

    def run(w: Any, part: Batch) -> Any:
        keys = (part.cache,) if is_paged else part.ragged()
        return lambda: w.run(part.q, *keys, return_lse=True)

    for w in planned(b, wrapper, **plan):
        whole = run(w, b)()
        assert_close(whole[1], b.expected(**options)[1], tolerance=(1e-3, 1e-3))
        out, lse = (x.split(list(b.qo_lens)) for x in whole)
        for requests in ([3], [1], [2, 0], [1, 2, 3, 0, 1]):
            part = b.only(requests)
            tables = part.paged_plan() if is_paged else part.ragged_plan()
            w.plan(*tables, **plan, **part.types())
            call = run(w, part)
            for results in (call(), captured(call)) if device == "cuda" else (call(),):
                got, got_lse = (x.split(list(part.qo_lens)) for x in results)
                for i, request in enumerate(requests):
                    assert torch.equal(got[i].float(), out[request].float()) and torch.equal(got_lse[i], lse[request])


def lengths(seed: int, count: int) -> Sequence[tuple[int, int]]:
    """Requests with no, one or many rows, and with no, fewer or more keys than rows."""
    chance = random.Random(seed)
    rows = [chance.choice((0, 1, chance.randrange(ROWS // count))) for _ in range(count)]
    return [(n, chance.choice((0, n, n + chance.randrange(300), chance.randrange(n + 1)))) for n in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("plan_too", [False, True])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_one_capture_serves_a_hundred_batches(backend: str, plan_too: bool) -> None:
    """Captures run, or plan and run; replays change only tables, queries and the cache."""
    make: dict[str, Any] = {"heads": (8, 2), "dims": (128, 128), "dtype": torch.bfloat16, "device": "cuda"}
    first = batch([(ROWS // 4, 300)] * 4, **make)  # as many rows as there may be
    buffers = graph_buffers(first, "cuda")
    w = BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"), use_cuda_graph=True, backend=backend, **buffers)
    pool = torch.full((2, PAGES, 16, 2, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    q = torch.empty(ROWS, 8, 128, dtype=torch.bfloat16, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(ROWS, 8, device="cuda")
    options: dict[str, Any] = {"causal": True, **first.types()}
    shape = (8, 2, 128, 16)

    def fill(b: Batch) -> None:
        q.fill_(float("nan"))[: b.q.shape[0]] = b.q
        pool.fill_(float("nan"))
        for part, own in zip(pool, b.cache):
            part[: own.shape[0]] = own

    def run() -> None:
        if plan_too:
            w.plan(*buffers.values(), *shape, **options)
        w.run(q, (pool[0], pool[1]), out=out, lse=lse)

    try:
        w.plan(*first.paged_plan(), **options)
    except UnsupportedError:
        pytest.skip(f"{backend} does not run on this device")
    fill(first)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(100):
        b = batch(lengths(seed, 4), seed=seed, **make)
        fill(b)
        tables = b.paged_plan()[:4]
        if plan_too:
            for buffer, table in zip(buffers.values(), tables):
                buffer[: len(table)].copy_(table)
        else:
            w.plan(*(table.cpu() if seed % 2 else table for table in tables), *shape, **options)
        out.fill_(float("nan"))
        graph.replay()
        want, want_lse = b.expected(causal=True)
        assert_close(out[: b.q.shape[0]], want)
        assert_close(lse[: b.q.shape[0]], want_lse, tolerance=LSE)
