"""How callers use batch prefill: buffers, older forms, what engines read, one-call forms, CUDA graphs, errors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import fi_core
from families.engine import engine
from families.harness import assert_close, assert_guards, guarded, rand
from families.prefill_batch import Batch, backends, batch, check, planned, workspace
from families.test_batch_prefill import masks_of, with_sinks
from fi_core.prefill import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    get_batch_prefill_module,
)
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.target import cuda_target

LSE = (2e-4, 2e-4)
LENS = [(17, 90), (0, 9), (3, 0), (70, 70), (1, 130)]
LN2 = 0.6931471805599453


def test_the_workspace_holds_all_splits_of_a_kernel_that_splits() -> None:
    b = batch([(300, 3000), (4, 4)], heads=(4, 2), dims=(128, 128))
    for made, plan in (
        (BatchPrefillWithPagedKVCacheWrapper, b.paged_plan()),
        (BatchPrefillWithRaggedKVCacheWrapper, b.ragged_plan()),
    ):
        w = made(workspace("cpu"))
        assert w.workspace_size(*plan)[0] == 0, "the CPU does not split"
        with Rehearsal(cuda_target(9, 0), 132, 227 << 10):
            floats, ints = w.workspace_size(*plan, q_data_type="bfloat16")
            longer = w.workspace_size(b.qo_indptr * 2, *plan[1:], q_data_type="bfloat16")
            assert 0 < floats < longer[0] <= 128 << 20 and 0 < ints < longer[1]
            assert w.workspace_size(*plan, disable_split_kv=True) == (0, ints)
            assert w.workspace_size(*plan, q_data_type="bfloat16", custom_mask=torch.ones(1)) == (0, ints)
    with pytest.raises(TypeError, match="head_dim_qk"):
        w.workspace_size(*plan[:4])
    with pytest.raises(TypeError, match="unexpected keyword argument 'fixed_splits'"):
        w.workspace_size(*plan, fixed_splits=4)


def test_outputs_of_the_caller(device: str) -> None:
    b = batch(LENS, dims=(128, 128), device=device)
    want, want_lse = b.expected(causal=True)
    for w in planned(b, causal=True):
        out, lse = guarded(b.q.shape, b.q.dtype, device, row_padding=8), guarded(b.q.shape[:2], torch.float32, device)
        result = w.run(b.q, b.cache, out=out, lse=lse, return_lse=True)
        assert result[0] is out and result[1] is lse
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        assert_guards(out)
        assert_guards(lse)
        assert torch.equal(w.run(b.q, b.cache), out)
        narrow = guarded(b.q.shape, b.q.dtype, device, row_padding=1)  # rows that no vector store takes
        if engine(w).backend == "fa3":
            with pytest.raises(UnsupportedError, match="requires alignment >= 16, got 2"):
                w.run(b.q, b.cache, out=narrow)
            continue
        assert w.run(b.q, b.cache, out=narrow) is narrow
        assert_close(narrow, want)
        assert_guards(narrow)


def test_bases_and_layouts_of_the_lse(device: str) -> None:
    b = batch(LENS, device=device)
    _, want = b.expected()
    for w in planned(b):
        _, natural = w.run(b.q, b.cache, return_lse=True, lse_base="ln")
        assert_close(natural, want * LN2, tolerance=LSE)
        _, turned = w.run(b.q, b.cache, return_lse=True, lse_layout="HN", lse_base="ln")
        assert turned.is_contiguous()
        assert_close(turned, want.t() * LN2, tolerance=LSE)
        given = torch.empty(want.t().shape, dtype=torch.float32, device=device)
        assert w.run(b.q, b.cache, lse=given, lse_layout="HN", return_lse=True)[1] is given
        assert_close(given, want.t(), tolerance=LSE)
        for wrong in ({"lse_base": "e"}, {"lse_layout": "heads"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                w.run(b.q, b.cache, return_lse=True, **wrong)


@pytest.mark.parametrize("tables", ["host", "device"])
@pytest.mark.parametrize("wide", [False, True])
def test_tables_on_host_or_device(tables: str, wide: bool, device: str) -> None:
    """int64 tables are converted; page ids may be more than the batch uses."""
    b = batch(LENS, device=device)
    masks = masks_of(LENS, device)
    where = "cpu" if tables == "host" else device
    qo, indptr, indices, last, *rest = b.paged_plan()
    more = torch.cat([indices, indices.new_full((256,), -1)])
    own = [x.to(where, torch.int64 if wide else torch.int32) for x in (qo, indptr, more, last)]
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    for _ in range(2):
        w.plan(*own, *rest, causal=True, **b.types())
        assert_close(w.run(b.q, b.cache), b.expected(causal=True)[0])
    w.plan(*own, *rest, custom_mask=torch.cat([m.flatten() for m in masks]), **b.types())
    assert_close(w.run(b.q, b.cache), b.expected(masks)[0])
    seq_lens = torch.tensor([60, 5, 0, 70, 100], dtype=own[0].dtype, device=where)
    w.plan(*own, *rest, causal=True, seq_lens=seq_lens, **b.types())
    shorter = Batch(b.q, b.qo_lens, b.pool, b.cache, [k[:n] for k, n in zip(b.k, seq_lens.tolist())],
                    [v[:n] for v, n in zip(b.v, seq_lens.tolist())])  # fmt: skip
    assert_close(w.run(b.q, b.cache), shorter.expected(causal=True)[0])
    masks = [m[:, :n] for m, n in zip(masks, seq_lens.tolist())]
    w.plan(*own, *rest, custom_mask=torch.cat([m.flatten() for m in masks]), seq_lens=seq_lens, **b.types())
    assert_close(w.run(b.q, b.cache), shorter.expected(masks)[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, None), (torch.float8_e4m3fn, (0.2, 0.1))])
def test_padded_rows(
    dtype: torch.dtype, tolerance: tuple[float, float] | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows of q: run zeroes them in its own output and leaves them in the caller's."""
    b = batch([(5, 20), (9, 9), (70, 70)], dims=(128, 128), dtype=dtype, device=device)
    want, before, n = b.expected(causal=True)[0], 3, b.q.shape[0]
    q = torch.full((before + n + 150, *b.q.shape[1:]), float("nan"), dtype=b.q.dtype, device=device)
    q[before : before + n] = b.q
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *size, **k: t.new_full(torch.Size(size), math.nan, **k))
    _, *tables = b.paged_plan()
    for backend in backends(device):
        buffers = graph_buffers(b, device)
        w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, use_cuda_graph=True, **buffers)
        w.plan(b.qo_indptr + before, *tables, causal=True, **b.types())
        out = w.run(q, b.cache)
        assert out.dtype == dtype
        assert_close(out[before : before + n], want, tolerance=tolerance)
        given = torch.full_like(out, float("nan"))
        w.run(q, b.cache, out=given)
        out, given = out.float(), given.float()
        assert not out[:before].any() and not out[before + n :].any()
        assert torch.equal(given[before : before + n], out[before : before + n])
        assert given[:before].isnan().all() and given[before + n :].isnan().all()


def graph_buffers(b: Batch, device: str, masks: bool = False) -> dict[str, torch.Tensor]:
    n = len(b.qo_lens)
    buffers = {
        "qo_indptr_buf": torch.zeros(n + 1, dtype=torch.int32, device=device),
        "paged_kv_indptr_buf": torch.zeros(n + 1, dtype=torch.int32, device=device),
        "paged_kv_indices_buf": torch.zeros(300, dtype=torch.int32, device=device),
        "paged_kv_last_page_len_buf": torch.zeros(n, dtype=torch.int32, device=device),
    }
    if masks:
        buffers["custom_mask_buf"] = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        buffers["mask_indptr_buf"] = torch.zeros(n + 1, dtype=torch.int32, device=device)
    return buffers


def steps(device: str) -> list[Batch]:
    """Batches of three requests with the same total of rows, over caches of one shape and address."""
    lens = [[(20, 90), (5, 5), (15, 200)], [(0, 0), (39, 300), (1, 1)], [(13, 13), (14, 14), (13, 400)]]
    batches = [batch(x, dims=(128, 128), device=device, seed=i) for i, x in enumerate(lens)]
    pages = max(b.cache[0].shape[0] for b in batches)
    shared = [torch.full((pages, *batches[0].cache[0].shape[1:]), float("nan"), dtype=torch.float16, device=device)
              for _ in range(2)]  # fmt: skip
    return [Batch(b.q, b.qo_lens, b.pool, (shared[0], shared[1]), b.k, b.v) for b in batches]


def fill(b: Batch) -> None:
    for shared, own in zip(b.cache, b.pool.cache):
        shared.fill_(float("nan"))
        shared[: own.shape[0]] = own


@pytest.mark.parametrize("masked", [False, True])
def test_graph_buffers_hold_each_plan(masked: bool, device: str) -> None:
    """One wrapper with fixed addresses; on a GPU captured once and replayed with other contents."""
    batches = steps(device)
    for backend in ("auto",) if device == "cpu" else ("fa2", "fa3"):
        if masked and backend == "fa3":
            continue
        buffers = graph_buffers(batches[0], device, masked)
        w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, backend=backend, **buffers)
        q, out = torch.empty_like(batches[0].q), torch.empty_like(batches[0].q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
        graph: Any = None
        for b in batches:
            masks = masks_of([(n, len(k)) for n, k in zip(b.qo_lens, b.k)], device) if masked else None
            options = {"custom_mask": torch.cat([m.flatten() for m in masks])} if masks else {"causal": True}
            w.plan(*(x.cpu() if torch.is_tensor(x) else x for x in b.paged_plan()), **options, **b.types())
            assert engine(w).qo_indptr_buf is buffers["qo_indptr_buf"]
            fill(b)
            q.copy_(b.q)
            if device == "cpu":
                w.run(q, b.cache, out=out, lse=lse)
            else:
                if graph is None:
                    w.run(q, b.cache, out=out, lse=lse)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        w.run(q, b.cache, out=out, lse=lse)
                out.fill_(float("nan"))
                graph.replay()
                graph.replay()
            want, want_lse = b.expected(masks) if masks else b.expected(causal=True)
            assert_close(out, want)
            assert_close(lse, want_lse, tolerance=LSE)


def test_a_graph_fixes_the_batch(device: str) -> None:
    b = steps(device)[0]
    for change, words in (
        ({"paged_kv_indices_buf": None}, "paged_kv_indices_buf: a tensor is required"),
        ({"paged_kv_last_page_len_buf": torch.zeros(2, dtype=torch.int32)}, "paged_kv_last_page_len_buf: length 3"),
    ):
        buffers: dict[str, Any] = graph_buffers(b, device) | change  # type: ignore[operator]
        with pytest.raises(ValueError, match=words):
            BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, **buffers)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, **graph_buffers(b, device))
    assert w.is_cuda_graph_enabled and engine(w).fixed_batch_size == 3

    def host(b: Batch) -> list[Any]:
        return [x.cpu() if torch.is_tensor(x) else x for x in b.paged_plan()]

    w.plan(*host(b), **b.types())
    with pytest.raises(ValueError, match="batch size is fixed at 3"):
        w.plan(*host(b.only([0, 1])), **b.types())
    with pytest.raises(ValueError, match="at most 40 rows"):
        w.plan(*host(b.only([0, 0, 2])), **b.types())
    with pytest.raises(ValueError, match="custom_mask: with use_cuda_graph"):
        w.plan(*host(b), custom_mask=torch.ones(3, dtype=torch.bool), **b.types())
    qo, indptr, _, *rest = host(b)
    with pytest.raises(ValueError, match="paged_kv_indices_buf: the buffer has room for 300"):
        w.plan(qo, indptr, torch.zeros(301, dtype=torch.int32), *rest, **b.types())


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_older_forms(dims: tuple[int, int], device: str) -> None:
    """forward has its own options: causal, window and soft cap belong to the run, not to the plan."""
    b = batch(LENS, dims=dims, device=device)
    keys = b.ragged()
    for w in planned(b):
        assert_close(w.forward(b.q, b.cache, causal=True), b.expected(causal=True)[0])
        assert engine(w).causal is True
        out, lse = w.forward_return_lse(b.q, b.cache, window_left=20, logits_soft_cap=3.0, sm_scale=0.2)
        want, want_lse = b.expected(window_left=20, logits_soft_cap=3.0, sm_scale=0.2)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        assert_close(w.run(b.q, b.cache, window_left=20), want)
        with pytest.raises(ValueError, match="window_left: 20 was planned; got 3"):
            w.run(b.q, b.cache, window_left=3)
        alibi = {"causal": True, "pos_encoding_mode": "ALIBI"}
        if engine(w).backend == "fa3":
            with pytest.raises(UnsupportedError, match="requires pos_encoding == NONE, got ALIBI"):
                w.forward(b.q, b.cache, **alibi)
        else:
            assert_close(w.forward(b.q, b.cache, **alibi), b.expected(**alibi)[0])
        w.begin_forward(*b.paged_plan(), **b.types())
        w.end_forward()
    for w in planned(b, BatchPrefillWithRaggedKVCacheWrapper):
        w.begin_forward(*b.ragged_plan(), **b.types())
        assert_close(w.forward(b.q, *keys, causal=True, window_left=7), b.expected(causal=True, window_left=7)[0])
        out, lse = w.forward_return_lse(b.q, *keys, causal=False, logits_soft_cap=2.0)
        want, want_lse = b.expected(logits_soft_cap=2.0)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)


def test_a_chunk_and_its_prefix_merge(device: str) -> None:
    """As in SGLang: the ragged wrapper attends to new tokens, the paged one to cached ones, and merge_state merges."""
    both = batch([(30, 100), (7, 7 + 50)], device=device)
    new = Batch(both.q, both.qo_lens, both.pool, both.cache, [k[-n:] for k, n in zip(both.k, both.qo_lens)],
                [v[-n:] for v, n in zip(both.v, both.qo_lens)])  # fmt: skip
    old_lens = torch.tensor([70, 50], dtype=torch.int32, device=device)
    for ragged, paged in zip(planned(new, BatchPrefillWithRaggedKVCacheWrapper), planned(both, seq_lens=old_lens)):
        a = ragged.forward_return_lse(both.q, *new.ragged(), causal=True)
        b = paged.forward_return_lse(both.q, both.cache, causal=False)
        out, lse = fi_core.merge_state(*a, *b)
        want, want_lse = both.expected(causal=True)
        assert_close(out, want, tolerance=(3e-3, 2e-3))
        assert_close(lse, want_lse, tolerance=LSE)


def test_attributes_that_engines_read(device: str) -> None:
    b = batch(LENS, dims=(128, 128), device=device)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="auto")
    w.plan(
        qo_indptr=b.qo_indptr.cpu(), paged_kv_indptr=b.pool.indptr.cpu(), paged_kv_indices=b.pool.indices,
        paged_kv_last_page_len=b.pool.last_page_len.cpu(), num_qo_heads=4, num_kv_heads=2, head_dim_qk=128,
        page_size=16, causal=True, sm_scale=0.1, window_left=-1, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=torch.float16, fixed_split_size=-1, disable_split_kv=False,
    )  # fmt: skip
    assert (engine(w).causal, *engine(w).scores) == (True, -1, 0.0, 0.1)
    assert (engine(w).batch_size, engine(w).num_qo_heads, engine(w).num_kv_heads) == (5, 4, 2)
    assert engine(w).kv_lens_buffer.tolist() == [90, 9, 0, 70, 130]
    assert (engine(w).max_q_len, engine(w).max_kv_len, engine(w).qo_indptr_last) == (70, 130, 91)
    assert engine(w).custom_mask_buf is None and engine(w).block_tables is None
    assert engine(w).dtypes == (torch.float16,) * 3
    assert w.resolved_backend in ("cpu", "fa2", "fa3")
    assert w.workspace_size(*b.paged_plan())[1] > 0
    w.prewarm_paged_kv_stride_variant()
    want = b.expected(causal=True, sm_scale=0.1)[0]
    assert_close(w.run(b.q, b.cache), want)
    info = engine(w).cached_module.plan(
        *engine(w).workspaces, b.qo_indptr.cpu(),
        b.pool.indptr.cpu(), torch.tensor([90, 9, 0, 70, 130], dtype=torch.int32), 91, 5, 4, 2, 16, False, 128, 128,
        True, -1, -1, False, 0, 0,
    )  # fmt: skip
    assert all(isinstance(x, int) for x in info) and engine(w).plan_info == info
    assert_close(w.run(b.q, b.cache), want)
    assert get_batch_prefill_module("fa2", torch.float16) is engine(w).cached_module
    engine(w).max_kv_len = 77  # engines that plan by themselves assign what plan used to
    assert engine(w).max_kv_len == 77
    w.reset_workspace_buffer(workspace(device), torch.empty(1 << 16, dtype=torch.uint8, device=device))
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(b.q, b.cache)
    w.plan(*b.paged_plan(), **b.types())
    assert_close(w.run(b.q, b.cache), b.expected()[0])


def test_the_planner_that_an_engine_brings(device: str) -> None:
    """With use_cuda_graph an engine writes the tables and assigns the attributes of a plan, output dtype None."""
    first, then = (
        batch(x, heads=(8, 2), dims=(64, 64), seed=i, device=device) for i, x in enumerate((LENS, LENS[::-1]))
    )
    tables = (first.qo_indptr, first.pool.indptr, torch.zeros(99, dtype=torch.int32), first.pool.last_page_len)
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers: dict[str, Any] = {name: x.clone().to(device) for name, x in zip(names, tables)}
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, backend="fa2", **buffers)
    w.plan(*first.paged_plan(), **first.types(), causal=True)
    rows = sum(then.qo_lens)
    for name, value in (("_qo_indptr_last", rows), ("_max_q_len", 70), ("_max_kv_len", 130), ("_batch_size", 5),
                        ("_cached_q_data_type", torch.float16), ("_cached_kv_data_type", torch.float16),
                        ("_cached_o_data_type", None), ("_block_tables", None), ("_prefix_len_ptr", None)):  # fmt: skip
        setattr(w, name, value)
    for name, table in zip(names, (then.qo_indptr, then.pool.indptr, then.pool.indices, then.pool.last_page_len)):
        buffers[name][: len(table)].copy_(table)
    kv_lens = torch.tensor(then.pool.lengths, dtype=torch.int32)
    engine(w).plan_info = engine(w).cached_module.plan(
        *engine(w).workspaces, then.qo_indptr.cpu(), then.pool.indptr.cpu(), kv_lens, engine(w).max_total_num_rows,
        5, 8, 2, 16, True, 64, 64, True, -1, -1, False, 0,
    )  # fmt: skip
    out, lse = w.run(then.q, then.cache, return_lse=True)
    want, want_lse = then.expected(causal=True)
    assert out.dtype == torch.float16
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=LSE)
    given = torch.empty_like(out)
    assert w.run(then.q, then.cache, out=given) is given
    assert_close(given, want)


def test_sink_wrapper(device: str) -> None:
    b = batch(LENS, dims=(64, 64), dtype=torch.bfloat16, device=device)
    sink = rand(4, dtype=torch.float32, device=device)
    w = BatchAttentionWithAttentionSinkWrapper(
        workspace(device), "NHD", backend="auto", q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        head_dim_qk=64, head_dim_vo=64, window_left=20,
    )  # fmt: skip
    w.plan(*b.paged_plan(), causal=True, window_left=20, **b.types())
    want, want_lse = with_sinks(b, sink, causal=True, window_left=20, sm_scale=0.2)
    out, lse = w.run_return_lse(b.q, b.cache, sink, 0.2)
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=LSE)
    w.plan(*b.paged_plan(), causal=True, **b.types())
    with pytest.raises(ValueError, match="window_left: the wrapper was made for 20; got -1"):
        w.run(b.q, b.cache, sink, 0.2)
    with pytest.raises(AssertionError, match="backend"):
        BatchAttentionWithAttentionSinkWrapper(workspace(device), backend="cudnn")
    assert fi_core.attention.BatchAttentionWithAttentionSinkWrapper is BatchAttentionWithAttentionSinkWrapper


@pytest.mark.gpu
def test_no_call_synchronises() -> None:
    b = batch(LENS, dims=(128, 128), device="cuda")
    masks = torch.cat([m.flatten() for m in masks_of(LENS, "cuda")])
    for tables in ("cpu", "cuda"):
        w = BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
        arguments = [x.to(tables) if torch.is_tensor(x) else x for x in b.paged_plan()]
        for options in ({"causal": True}, {"custom_mask": masks}):
            w.plan(*arguments, **options, **b.types())
            w.run(b.q, b.cache, return_lse=True)
            torch.cuda.synchronize()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
                try:
                    w.plan(*arguments, **options, **b.types())
                    w.run(b.q, b.cache, return_lse=True)
                finally:
                    torch.cuda.set_sync_debug_mode("default")


def test_ragged_sinks(device: str) -> None:
    b = batch(LENS, device=device)
    sinks = rand(4, dtype=torch.float32, device=device)
    for w in planned(b, BatchPrefillWithRaggedKVCacheWrapper, causal=True):
        engine(w).sinks = sinks
        assert_close(w.run(b.q, *b.ragged()), with_sinks(b, sinks, causal=True)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_ragged_output_is_never_fp8(dtype: torch.dtype, device: str) -> None:
    """An 8-bit o_data_type, the default of an fp8 q, means q's dtype, or bf16."""
    b = batch(LENS, dtype=dtype, device=device)
    for w in planned(b, BatchPrefillWithRaggedKVCacheWrapper, o_data_type=torch.float8_e4m3fn):
        assert w.run(b.q, *b.ragged()).dtype == (dtype if dtype.itemsize == 2 else torch.bfloat16)


def test_head_major_ragged_keys(device: str) -> None:
    check(batch(LENS, dims=(64, 64), kv_layout="HND", device=device), causal=True)
