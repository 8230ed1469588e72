"""BatchMLAPagedAttentionWrapper and the block-table forms against fp64: lengths, heads, pages, drafts, fp8, sparse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fi_core
from families.engine import engine
from families.harness import assert_close, rand
from fi_core.mla import BatchMLAPagedAttentionWrapper as Wrapper
from fi_core.mla import (
    MLAPlanMetadata,
    get_batch_mla_module,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)

SCALE = 192**-0.5
DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
LENGTHS = (0, 1, 63, 64, 65, 300)
LSE = (1e-3, 1e-3)
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float16: (3e-3, 3e-3), torch.bfloat16: (2e-2, 2e-2)}


@dataclass
class Batch:
    """Requests over shuffled pages; the cache is NaN (or large, fp8) wherever no token lies."""

    q: torch.Tensor  # [tokens, heads, 512 + kpe]
    cache: torch.Tensor  # [pages, page_size, 512 + kpe]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len: torch.Tensor
    causal: bool

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def plan_arguments(self) -> tuple[Any, ...]:
        width = self.q.shape[2] - 512
        return (
            self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len, self.heads, 512, width, self.cache.shape[1],
            self.causal, SCALE, self.q.dtype, self.cache.dtype,
        )  # fmt: skip

    def run_arguments(self) -> tuple[torch.Tensor, ...]:
        """Slices of one tensor each, whose rows are not contiguous."""
        return self.q[..., :512], self.q[..., 512:], self.cache[..., :512], self.cache[..., 512:]

    def requests(self) -> list[tuple[slice, torch.Tensor, int]]:
        """(rows of q, page ids, tokens) of each request."""
        rows, pages = self.qo_indptr.tolist(), self.kv_indptr.tolist()
        bounds = zip(itertools.pairwise(rows), itertools.pairwise(pages), self.kv_len.tolist())
        return [(slice(*r), self.kv_indices[p[0] : p[1]].long(), n) for r, p, n in bounds]

    def expected(self, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse in base 2) in fp64; scales: `[pages, page_size, 512 + kpe]` of the cache."""
        cache = self.cache.double() * (1.0 if scales is None else scales.double())
        out = torch.zeros(*self.q.shape[:2], 512, dtype=torch.float64, device=self.q.device)
        lse = torch.full(self.q.shape[:2], -math.inf, dtype=torch.float64, device=self.q.device)
        for rows, pages, n in self.requests():
            keys = cache[pages].flatten(0, 1)[:n]
            x = torch.einsum("qhd,kd->qhk", self.q[rows].double(), keys) * SCALE
            if self.causal:
                token = torch.arange(x.shape[0], device=x.device)[:, None, None]
                x = x.masked_fill(torch.arange(n, device=x.device) > n - x.shape[0] + token, -math.inf)
            if n:
                seen = (x > -math.inf).any(-1, keepdim=True)
                weights = torch.where(seen, x, 0.0).softmax(-1) * seen
                out[rows] = torch.einsum("qhk,kd->qhd", weights, keys[:, :512])
                lse[rows] = x.logsumexp(-1) / math.log(2)
        return out, lse


def batch(
    lengths: Sequence[int],
    qo_len: int | Sequence[int] = 1,
    heads: int = 16,
    page_size: int = 64,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    kpe: int = 64,
    device: str = "cpu",
) -> Batch:
    counts = [-(-n // page_size) for n in lengths]
    rows = [qo_len] * len(lengths) if isinstance(qo_len, int) else list(qo_len)
    total = sum(counts)
    indices = torch.randperm(total + 2, generator=torch.Generator().manual_seed(total))[:total].int()
    fill = 448.0 if kv_dtype is FP8 else math.nan
    cache = torch.full((total + 2, page_size, 512 + kpe), fill, dtype=torch.float32)
    starts = [0, *itertools.accumulate(counts)]
    for b, n in enumerate(lengths):
        for token in range(0, n, page_size):
            page = indices[starts[b] + token // page_size]
            here = min(page_size, n - token)
            cache[page, :here] = torch.randn(here, 512 + kpe, generator=torch.Generator().manual_seed(token + b))
    q = rand(sum(rows), heads, 512 + kpe, dtype=dtype, device="cpu")
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, *itertools.accumulate(rows)], starts)]
    lens = torch.tensor(list(lengths), dtype=torch.int32)
    tensors = (q, cache.to(kv_dtype or dtype), *tables, indices, lens)
    return Batch(*(x.to(device) for x in tensors), causal)


def workspace(device: str, megabytes: int = 40) -> torch.Tensor:
    """A workspace of NaN: its content must not matter."""
    return torch.full((megabytes << 18,), math.nan, device=device)


def backends(device: str) -> tuple[str, ...]:
    return ("auto", "fa2", "fa3") if device == "cuda" else ("auto",)


def check(b: Batch, scales: torch.Tensor | None = None, **options: Any) -> None:
    """Values of an e4m3 cache times their scales may be rounded to bf16 before the products."""
    lse_tolerance = LSE if scales is None else (2e-2, 2e-2)
    want, want_lse = b.expected(scales)
    for backend in backends(b.q.device.type):
        wrapper = Wrapper(workspace(b.q.device.type), backend=backend)
        wrapper.plan(*b.plan_arguments())
        out, lse = wrapper.run(*b.run_arguments(), return_lse=True, **options)
        assert out.dtype == b.q.dtype and lse.dtype == torch.float32
        assert_close(out, want, tolerance=TOLERANCE[out.dtype])
        assert_close(lse, want_lse, tolerance=lse_tolerance)
        assert torch.equal(wrapper.run(*b.run_arguments(), **options), out)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 48, 64, 96, 128])
def test_heads_and_pages(heads: int, page_size: int, device: str) -> None:
    check(batch(LENGTHS, heads=heads, page_size=page_size, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kpe", [0, 64])
def test_types_and_rope_width(kpe: int, dtype: torch.dtype, device: str) -> None:
    check(batch((4095, 0, 65), dtype=dtype, kpe=kpe, page_size=32, device=device))


@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("qo_len", [2, 3, 4, (5, 1, 0, 17, 2, 1)])
def test_drafts_are_causal(qo_len: Any, heads: int, device: str) -> None:
    check(batch((17, 1, 63, 64, 65, 300), qo_len, heads, causal=True, device=device))
    check(batch((2, 1, 63, 64, 65, 300), qo_len, heads, 16, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_split_kv(heads: int) -> None:
    """One long request on all SMs, equal requests, and requests of very different lengths."""
    for lengths in ((100_000,), (777,) * 157, (1024,) * 64, (60_000, 3, 50, 0, 700)):
        check(batch(lengths, heads=heads, device="cuda"))


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("qo_len", "heads"), [(1, 16), (1, 128), (3, 96)])
def test_fp8_cache(qo_len: int, heads: int, by_group: bool, device: str) -> None:
    b = batch(LENGTHS, qo_len, heads, causal=qo_len > 1, kv_dtype=FP8, device=device)
    scales = torch.empty(b.cache.shape, device=device)
    options: dict[str, Any]
    if by_group:
        array = torch.rand(*b.cache.shape[:2], 4, generator=torch.Generator().manual_seed(1)) * 2 + 1e-3
        scales[..., :512] = array.to(device).repeat_interleave(128, -1)
        scales[..., 512:] = 0.75
        options = {"ckv_scale_arr": array.to(device), "kpe_scale": 0.75}
    else:
        scales[..., :512], scales[..., 512:] = 0.3, 1.7
        options = {"ckv_scale": 0.3, "kpe_scale": 1.7}
    check(b, scales, **options)


def test_lse_base_and_buffers(device: str) -> None:
    b, wrapper = batch((65, 0, 7), device=device), Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments())
    want, want_lse = wrapper.run(*b.run_arguments(), return_lse=True)
    out, lse = torch.empty_like(want), torch.empty_like(want_lse)
    found = wrapper.run(*b.run_arguments(), out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)
    assert found[0] is out and found[1] is lse and torch.equal(out, want)
    assert_close(lse, want_lse.double() * math.log(2), tolerance=(1e-6, 1e-6))


def test_tables_on_the_host_or_the_device(device: str) -> None:
    b = batch(LENGTHS, device=device)
    wrapper = Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments())
    want = wrapper.run(*b.run_arguments())
    wrapper.plan(*(x.cpu().long() if isinstance(x, torch.Tensor) else x for x in b.plan_arguments()))
    assert torch.equal(wrapper.run(*b.run_arguments()), want)


def graph_wrapper(b: Batch, capacity: int) -> Wrapper:
    device, size = b.q.device, b.kv_len.numel()
    sizes = (size + 1, size + 4, capacity, size)  # offsets may have room for more requests
    tables = [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes]
    return Wrapper(workspace(device.type), True, *tables)


def test_tables_in_one_object_or_dense(device: str) -> None:
    b = batch((65, 0, 300), 3, page_size=32, causal=True, device=device)
    names = ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type",
             "kv_data_type")  # fmt: skip
    options = dict(zip(names, b.plan_arguments()[4:]))
    lists, dense = b.plan_arguments()[:4], (b.qo_indptr, block_tables(b), b.kv_len)
    wrapper, want = Wrapper(workspace(device)), b.expected()
    for tables in (
        {"metadata": MLAPlanMetadata.csr(*lists)},
        {"metadata": MLAPlanMetadata.dense(*dense, max_q_len=3)},
        {"metadata": MLAPlanMetadata.dual(*lists, **dict(zip(DENSE, dense)))},
        dict(zip(DENSE, dense)),
    ):
        wrapper.plan(**tables, **options, lse_mode="base2", output_dtype=b.q.dtype, use_sinks=False)
        out, lse = wrapper.run(query=b.q, kv_cache=b.cache, return_lse=True)
        assert_close(out, want[0], tolerance=TOLERANCE[b.q.dtype])
        assert_close(lse, want[1], tolerance=LSE)
    nope, pe, ckv, kpe = b.run_arguments()
    assert torch.equal(wrapper.run(query=(nope, pe), kv_cache=(ckv, kpe)), out)
    wrapper.plan(**tables, **options, use_sinks=True)
    with pytest.raises(ValueError, match="sinks: a tensor is required"):
        wrapper.run(query=b.q, kv_cache=b.cache)
    with pytest.raises(ValueError, match=r"block_tables: .batch_size, max_pages. with the 3 requests"):
        wrapper.plan(**{**tables, "block_tables": dense[1][:2]}, **options)


def test_a_graph_wrapper_keeps_its_buffers(device: str) -> None:
    """plan copies into the buffers; an engine's planner plans new lengths from host tables."""
    first, then = batch((65, 200), device=device), batch((300, 1), device=device)
    wrapper = graph_wrapper(first, 16)
    buffers = engine(wrapper).kv_indices_buf
    for b in (first, then):
        wrapper.plan(*b.plan_arguments())
        assert engine(wrapper).kv_indices_buf is buffers
        assert_close(wrapper.run(*b.run_arguments()), b.expected()[0], tolerance=TOLERANCE[b.q.dtype])
    buffers[: first.kv_indices.numel()] = first.kv_indices
    module = get_batch_mla_module("fa3", *[first.q.dtype] * 3, torch.int32, 512, 64, False)
    for plan in (engine(wrapper).cached_module.plan, module.plan.default):
        plan(
            *engine(wrapper).workspaces,
            first.qo_indptr.cpu(), first.kv_indptr.cpu(), first.kv_len.cpu(), 16, 512, False,
        )  # fmt: skip
        assert_close(wrapper.run(*first.run_arguments()), first.expected()[0], tolerance=TOLERANCE[first.q.dtype])
    with pytest.raises(ValueError, match="kv_indices: the buffer has room for 16"):
        wrapper.plan(*batch((5000, 1), device=device).plan_arguments())
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(*first.run_arguments())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_replayed_graph_computes_the_new_batch(heads: int) -> None:
    first, then = (batch(n, heads=heads, device="cuda") for n in ((65, 2000), (3000, 1)))
    wrapper = graph_wrapper(first, 64)
    pool = torch.zeros(64, 64, 576, dtype=first.cache.dtype, device="cuda")
    q = first.q.clone()
    out = torch.empty_like(q[..., :512])
    wrapper.plan(*first.plan_arguments())
    arguments = q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:]
    wrapper.run(*arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(*arguments, out=out)
    for b in (then, first):
        pool[: b.cache.shape[0]].copy_(b.cache)
        q.copy_(b.q)
        wrapper.plan(*b.plan_arguments())
        graph.replay()
        assert_close(out, b.expected()[0], tolerance=TOLERANCE[q.dtype])


def block_tables(b: Batch) -> torch.Tensor:
    requests = b.requests()
    table = torch.zeros(len(requests), max(len(pages) for _, pages, _ in requests) + 1, dtype=torch.int32)
    for row, (_, pages, _) in zip(table, requests):
        row[: len(pages)] = pages.int()
    return table.to(b.q.device)


@pytest.mark.parametrize("q_len", [1, 3])
def test_block_tables(q_len: int, device: str) -> None:
    b = batch((65, 3, 300), q_len, page_size=32, causal=q_len > 1, device=device)
    q, table = b.q.view(3, q_len, 16, 576), block_tables(b)
    arguments = (q, b.cache.unsqueeze(1), workspace(device), 128, 512, 64, table, b.kv_len, 300)
    want, want_lse = b.expected()
    options = {"bmm1_scale": SCALE, "bmm2_scale": 0.5}
    out, lse = trtllm_batch_decode_with_kv_cache_mla(*arguments, **options, return_lse=True, return_lse_base="basee")
    assert out.shape == (3, q_len, 16, 512)
    assert_close(out.flatten(0, 1), 0.5 * want, tolerance=TOLERANCE[q.dtype])
    assert_close(lse, want_lse * math.log(2), tolerance=LSE)
    compact = trtllm_batch_decode_with_kv_cache_mla(b.q, *arguments[1:], **options, cum_seq_lens_q=b.qo_indptr)
    assert torch.equal(compact.view(out.shape), out)
    assert torch.equal(xqa_batch_decode_with_kv_cache_mla(*arguments, **options), out)


def rows_of_656_bytes(pages: int, page_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes `[pages, page_size, 656]`, their values `[pages, page_size, 576]` in fp64) of DeepSeek V3.2's cache."""
    generator = torch.Generator().manual_seed(pages)
    latent = torch.randn(pages, page_size, 4, 128, generator=generator)
    latent[:, :, 1] *= 2.0**-8  # subnormal in e4m3
    scales = torch.exp2(torch.randint(-3, 3, (pages, page_size, 4, 1), generator=generator)) * 1.37
    scales[0, 0], scales[1, 5, 2], scales[1, 63, 0] = 3e-7, 300.0, 128.0
    ropes = torch.randn(pages, page_size, 64, generator=generator).bfloat16()
    codes = (latent / scales).clamp(-448, 448).to(FP8)
    values = torch.cat([(codes.double() * scales.double()).flatten(2), ropes.double()], -1)
    parts = (codes.flatten(2).view(torch.uint8), scales.flatten(2).view(torch.uint8), ropes.view(torch.uint8))
    return torch.cat(parts, -1).to(device), values.to(device)


def sparse_cache(kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache of 9 pages of 64 tokens, its values in fp64)."""
    if kind == "656 bytes":
        return rows_of_656_bytes(9, 64, device)
    cache = rand(9, 64, 576, dtype=torch.bfloat16, device=device)
    if kind == "e4m3":
        cache = cache.to(FP8)
    return cache, cache.double()


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "656 bytes"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_sparse_tables(heads: int, kind: str, device: str) -> None:
    """Each query token attends to its slots; -1 is none, and a slot may be listed twice."""
    tokens, top_k, slots = 4, 200, 64 * 9
    cache, values = sparse_cache(kind, device)
    q = rand(2, 2, heads, 576, dtype=torch.bfloat16, device=device, seed=1)
    indices = torch.randint(0, slots, (tokens, top_k), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    indices[0, 3:60], indices[1, :], indices[2, 130:] = -1, -1, -1
    indices[3, 5] = indices[3, 6]
    for backend in backends(device):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            q, cache, workspace(device), 128, 512, 64, indices.view(2, 2, top_k).to(device), None, slots, top_k,
            bmm1_scale=SCALE, return_lse=True, backend=backend,
        )  # fmt: skip
        rows = values.view(slots, 576)
        for i, (x, y) in enumerate(zip(q.flatten(0, 1).double(), out.flatten(0, 1))):
            keys = rows[indices[i][indices[i] >= 0].long().to(device)]
            s = x @ keys.T * SCALE
            want = s.softmax(-1) @ keys[:, :512] if len(keys) else torch.zeros_like(y, dtype=torch.float64)
            assert_close(y, want, tolerance=TOLERANCE[y.dtype])
            assert_close(lse[i], s.logsumexp(-1) / math.log(2), tolerance=LSE)


@pytest.mark.parametrize("heads", [16, 128])
def test_rows_of_656_bytes_in_pages(heads: int, device: str) -> None:
    """Several query tokens over block tables, bytes as uint8 or e4m3, with an axis of one head."""
    b = batch((65, 3, 300), 2, heads, causal=True, device=device)
    cache, values = rows_of_656_bytes(b.cache.shape[0], 64, device)
    expected = Batch(b.q, values, b.qo_indptr, b.kv_indptr, b.kv_indices, b.kv_len, causal=True).expected()[0]
    q, table = b.q.view(3, 2, heads, 576), block_tables(b)
    for x in (cache, cache.view(FP8).unsqueeze(1)):
        out = trtllm_batch_decode_with_kv_cache_mla(
            q, x, workspace(device), 128, 512, 64, table, b.kv_len, 300, bmm1_scale=SCALE
        )
        assert_close(out.flatten(0, 1), expected, tolerance=TOLERANCE[q.dtype])


@pytest.mark.parametrize("lengths", [(65, 0, 3000), (300,)])
@pytest.mark.parametrize("heads", [16, 128])
def test_sinks(heads: int, lengths: tuple[int, ...], device: str) -> None:
    """A sink takes a part of the softmax, of whole requests and of split ones; without keys it takes all."""
    b = batch(lengths, heads=heads, device=device)
    sinks = torch.linspace(-30, 30, heads, device=device)
    want, lse = b.expected()
    total = torch.logaddexp(lse * math.log(2), sinks.double())
    want = want * torch.exp(lse * math.log(2) - total)[..., None]
    for backend in backends(device):
        wrapper = Wrapper(workspace(device), backend=backend)
        wrapper.plan(*b.plan_arguments())
        out, lse = wrapper.run(*b.run_arguments(), return_lse=True, return_lse_base_on_e=True, sinks=sinks)
        assert_close(out, want, tolerance=TOLERANCE[out.dtype])
        assert_close(lse, total, tolerance=LSE)


@pytest.mark.parametrize("heads", [16, 128])
def test_scales_on_the_device(heads: int, device: str) -> None:
    b = batch((65, 3, 3000), heads=heads, device=device)
    q, arguments = b.q[:, None], (b.cache, workspace(device), 128, 512, 64, block_tables(b), b.kv_len, 3000)
    scales = torch.tensor([SCALE, -0.5], device=device)
    out = trtllm_batch_decode_with_kv_cache_mla(q, *arguments, bmm1_scale=scales[:1], bmm2_scale=scales[1])
    assert_close(out[:, 0], -0.5 * b.expected()[0], tolerance=TOLERANCE[q.dtype])
    with pytest.raises(ValueError, match="bmm2_scale: a number or a fp32 tensor of one element"):
        trtllm_batch_decode_with_kv_cache_mla(q, *arguments, bmm1_scale=SCALE, bmm2_scale=scales)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("q_len", [1, 3])
def test_ranks_share_a_context(q_len: int, heads: int, device: str) -> None:
    """Token j of rank r is token j * ranks + r: the states of all ranks merge to the whole."""
    ranks, b = 3, batch((300, 2, 5), q_len, heads, 1, causal=q_len > 1, device=device)
    want, want_lse = b.expected()
    q, outs, lses = b.q.view(3, q_len, heads, 576), [], []
    for rank in range(ranks):
        own = [pages[rank::ranks] for _, pages, _ in b.requests()]
        table = torch.zeros(3, 128, dtype=torch.int32, device=device)
        for row, pages in zip(table, own):
            row[: len(pages)] = pages.int()
        lens = torch.tensor([len(pages) for pages in own], dtype=torch.int32, device=device)
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            q, b.cache, workspace(device), 128, 512, 64, table, lens, 300, bmm1_scale=SCALE, return_lse=True,
            enable_dcp=True, cp_world=ranks, cp_rank=rank, causal_seqlens_kv_global=b.kv_len,
        )  # fmt: skip
        outs.append(out.flatten(0, 1).double())
        lses.append(lse.double())
    weights = torch.stack(lses).mul(math.log(2)).softmax(0).nan_to_num()
    assert_close((torch.stack(outs) * weights[..., None]).sum(0), want, tolerance=TOLERANCE[q.dtype])
    assert_close(torch.logsumexp(torch.stack(lses) * math.log(2), 0) / math.log(2), want_lse, tolerance=LSE)
    arguments = (q, b.cache, workspace(device), 128, 512, 64, table, lens, 300)
    for options, words in (
        ({"cp_world": 2}, "cp_world: 1 is required"),
        ({"enable_dcp": True, "cp_world": 2, "cp_rank": 2, "causal_seqlens_kv_global": lens}, "cp_rank must be in"),
        ({"enable_dcp": True, "sparse_mla_top_k": 128}, "enable_dcp: False is required"),
        ({"backend": "cute_dsl"}, "backend: allowed are auto, .* cute-dsl; got 'cute_dsl'"),
    ):
        with pytest.raises(ValueError, match=words):
            trtllm_batch_decode_with_kv_cache_mla(*arguments, **options)


@pytest.mark.parametrize("kind", [torch.bfloat16, FP8])
@pytest.mark.parametrize("heads", [16, 128])
def test_results_do_not_depend_on_the_batch(heads: int, kind: torch.dtype, device: str) -> None:
    """With disable_split_kv a request has the same bits alone and among others."""
    b = batch((700, 5000, 64, 1, 0, 130), heads=heads, kv_dtype=kind, device=device)
    options = {"ckv_scale": 0.5, "kpe_scale": 1.5} if kind is FP8 else {}
    wrapper = Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments(), disable_split_kv=True)
    together, lse = wrapper.run(*b.run_arguments(), return_lse=True, **options)
    for i, (rows, pages, n) in enumerate(b.requests()):
        indptr = [torch.tensor([0, x], dtype=torch.int32, device=device) for x in (1, len(pages))]
        alone = Batch(b.q[rows], b.cache, *indptr, pages.int(), b.kv_len[i : i + 1], causal=False)
        wrapper.plan(*alone.plan_arguments(), disable_split_kv=True)
        out, own_lse = wrapper.run(*alone.run_arguments(), return_lse=True, **options)
        assert torch.equal(out, together[rows]) and torch.equal(own_lse, lse[rows]), n


@pytest.mark.parametrize("kind", [torch.bfloat16, FP8])
@pytest.mark.parametrize("heads", [16, 128])
def test_fixed_splits_against_fp64(heads: int, kind: torch.dtype, device: str) -> None:
    """Chunks of 512 tokens, of requests that end at, before and behind their ends."""
    b = batch((1, 511, 512, 513, 0, 1300), 3, heads, kv_dtype=kind, causal=True, device=device)
    options, scales = ({"ckv_scale": 0.5, "kpe_scale": 0.5}, 0.5) if kind is FP8 else ({}, 1.0)
    with fi_core.batch_invariant():
        check(b, torch.full_like(b.cache, scales, dtype=torch.float32) if kind is FP8 else None, **options)
