"""A session of every attention wrapper on the CPU: what the tests of replay and of traces run and look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from families.harness import rand
from families.nvfp4_cache import batch as nvfp4_batch
from families.paged import paged
from families.prefill_batch import batch, workspace
from fi_core.attention import BatchAttention, BatchPrefillWithCausalBidirectionalRangesWrapper
from fi_core.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from fi_core.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from fi_core.mla import BatchMLAPagedAttentionWrapper
from fi_core.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from fi_core.prefill import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from fi_core.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

WRAPPERS: tuple[Any, ...] = (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    BatchAttentionWithAttentionSinkWrapper,
    MultiLevelCascadeAttentionWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchAttention,
    BatchPODWithPagedKVCacheWrapper,
    PODWithPagedKVCacheWrapper,
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
)


class Run(NamedTuple):
    """One `run` of a planned wrapper. The arguments are used up: outputs among them are written."""

    name: str
    wrapper: Any
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        return self.wrapper.run(**self.arguments)


def decode(form: str = "tuple", **options: Any) -> Iterator[Run]:
    """Steps of a decode loop, planned again in between; requests of no token among them."""
    p = paged([37, 0, 16, 5], form=form, **options)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 1 << 16), p.kv_layout)
    wrapper.plan(*p.plan_arguments(), **p.dtypes)
    yield Run("decode", wrapper, {"q": p.q, "paged_kv_cache": p.cache})
    out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2])
    written = {"out": out, "lse": lse, "return_lse": True}
    yield Run("decode into", wrapper, {"q": p.q, "paged_kv_cache": p.cache, **written})
    longer = paged([38, 1, 17, 6], form=form, **options, seed=3)
    wrapper.plan(*longer.plan_arguments(), **p.dtypes, window_left=7, logits_soft_cap=5.0, sm_scale=0.3)
    sinks = rand(4, dtype=torch.float32, device="cpu")
    call = {"q": longer.q, "paged_kv_cache": longer.cache, "return_lse": True}
    yield Run("decode options", wrapper, {**call, "sinks": sinks, "q_scale": 0.5, "v_scale": 2.0})


def decode_several() -> Iterator[Run]:
    p = paged([37, 3, 16], q_len=3)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 1 << 16), use_tensor_cores=True)
    wrapper.plan(*p.plan_arguments(), **p.dtypes, q_len_per_req=3, seq_lens=p.seq_lens())
    yield Run("decode several", wrapper, {"q": p.q, "paged_kv_cache": p.cache})


def decode_graph() -> Iterator[Run]:
    """The table lies in buffers that the caller fills, as an engine does between the replays of a CUDA graph."""
    batches = paged([20, 33]), paged([21, 34], seed=5)
    indptr, last = (torch.zeros(size, dtype=torch.int32) for size in (3, 2))
    indices = torch.zeros(16, dtype=torch.int32)
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 1 << 16), indptr, indices, last)
    first = batches[0]
    wrapper.plan(*first.plan_arguments(), **first.dtypes)
    yield Run("graph decode", wrapper, {"q": first.q, "paged_kv_cache": first.cache})
    p = batches[1]
    for name in ("indptr", "indices", "last_page_len"):
        table = getattr(p, name)
        getattr(wrapper, f"_paged_kv_{name}_buf")[: len(table)] = table
    rest = (*p.heads, p.q.shape[2], p.page_size)
    fast_decode_plan(wrapper, indptr, indices, last, *rest, q_data_type=p.q.dtype, kv_data_type=p.q.dtype)
    yield Run("fast plan", wrapper, {"q": p.q, "paged_kv_cache": p.cache})


LENS = [(5, 37), (0, 3), (16, 16), (1, 40), (4, 0)]


def prefill_paged(form: str = "tuple", **options: Any) -> Iterator[Run]:
    b = batch(LENS, form=form, **options)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), b.pool.kv_layout)
    wrapper.plan(*b.paged_plan(), **b.types())
    yield Run("paged", wrapper, {"q": b.q, "paged_kv_cache": b.cache})
    wrapper.plan(*b.paged_plan(), **b.types(), causal=True, window_left=9, logits_soft_cap=3.0)
    out = torch.empty(b.q.shape, dtype=b.q.dtype)
    sinks = rand(4, dtype=torch.float32, device="cpu")
    yield Run("paged causal", wrapper, {"q": b.q, "paged_kv_cache": b.cache, "out": out, "return_lse": True})
    yield Run("paged sinks", wrapper, {"q": b.q, "paged_kv_cache": b.cache, "sinks": sinks, "k_scale": 0.5})


def prefill_ragged(kv_layout: str = "NHD") -> Iterator[Run]:
    b = batch(LENS, dims=(64, 32), dtype=torch.bfloat16)
    k, v = b.ragged(kv_layout)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), kv_layout)
    wrapper.plan(*b.ragged_plan(), **b.types(), causal=True, sm_scale=0.2)
    yield Run("ragged", wrapper, {"q": b.q, "k": k, "v": v})
    wrapper.plan(*b.ragged_plan(), **b.types(), o_data_type=torch.float32)
    yield Run("ragged fp32", wrapper, {"q": b.q, "k": k, "v": v, "return_lse": True, "v_scale": 0.5})


def prefill_sinks() -> Iterator[Run]:
    b = batch(LENS)
    types = {"q_data_type": b.q.dtype, "kv_data_type": b.q.dtype}
    wrapper = BatchAttentionWithAttentionSinkWrapper(
        workspace("cpu"), window_left=20, head_dim_qk=64, head_dim_vo=64, **types
    )
    wrapper.plan(*b.paged_plan(), **b.types(), causal=True, window_left=20)
    sink = rand(4, dtype=torch.float32, device="cpu")
    yield Run("sinks", wrapper, {"q": b.q, "paged_kv_cache": b.cache, "sink": sink, "sm_scale": 0.25})


def cascade() -> Iterator[Run]:
    """Three requests that share 32 tokens, two of which share 16 more."""
    p, page = paged([80, 64, 48, 7], heads=(4, 2)), 16
    pages = p.indices
    int32 = {"dtype": torch.int32}

    def table(*counts: int) -> torch.Tensor:
        return torch.tensor([0, *counts], **int32).cumsum(0, dtype=torch.int32)

    q = rand(9, 4, 64, dtype=torch.float16, device="cpu")
    levels = (
        [table(9), table(6, 3), table(4, 2, 3)],
        [table(2), table(1, 1), table(2, 3, 1)],
        [pages[:2], pages[2:4], pages[4:10]],
        [torch.tensor([page], **int32), torch.tensor([page, 3], **int32), torch.tensor([9, page, 7], **int32)],
    )
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace("cpu"))
    wrapper.plan(*levels, 4, 2, 64, page, causal=True, q_data_type=q.dtype)
    cache = tuple(x.nan_to_num(0.5) for x in p.cache)
    yield Run("cascade", wrapper, {"q": q, "paged_kv_cache": cache})
    single = MultiLevelCascadeAttentionWrapper(1, workspace("cpu"))
    single.plan(*([table[-1]] for table in levels), 4, 2, 64, page, q_data_type=q.dtype, sm_scale=0.5)
    yield Run("cascade of one level", single, {"q": q, "paged_kv_cache": cache})


def mla() -> Iterator[Run]:
    """Requests of one query token and of three, and of no key; causal, then not."""
    lens, half = torch.tensor([37, 0, 20], dtype=torch.int32), torch.bfloat16
    kv_indptr, kv_indices = (
        torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        torch.tensor([4, 0, 2, 5, 1], dtype=torch.int32),
    )
    qo_indptr = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    q, cache = rand(4, 16, 576, dtype=half, device="cpu"), rand(6, 16, 576, dtype=half, device="cpu", seed=1)
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu", 1 << 20))
    tables = qo_indptr, kv_indptr, kv_indices, lens
    wrapper.plan(*tables, 16, 512, 64, 16, True, 0.07, half, half)
    parts = {"q_nope": q[..., :512], "q_pe": q[..., 512:]}
    yield Run("mla", wrapper, {**parts, "ckv_cache": cache[..., :512], "kpe_cache": cache[..., 512:]})
    wrapper.plan(*tables, 16, 512, 64, 16, False, 0.1, half, half)
    halves = {"ckv_cache": cache[..., :512], "kpe_cache": cache[..., 512:]}
    yield Run("mla of all keys", wrapper, {**parts, **halves, "out": torch.empty(4, 16, 512, dtype=half)})


def mixed() -> Iterator[Run]:
    """Decode requests, then prompts: by BatchAttention, and by both POD wrappers."""
    b = batch([(1, 37), (1, 16), (5, 37), (16, 16)])
    q, cache, heads, types = b.q, b.cache, (*b.heads, 64), {"q_data_type": b.q.dtype, "kv_data_type": b.q.dtype}
    both = BatchAttention(device="cpu")
    both.plan(b.qo_indptr, b.pool.indptr, b.pool.indices, b.pool.seq_lens(), *heads, 64, 16, causal=True, **types)
    yield Run("mixed", both, {"q": q, "kv_cache": cache})
    decode_half, prompts = b.only([0, 1]), b.only([2, 3])
    pods = BatchPODWithPagedKVCacheWrapper(workspace("cpu", 1 << 16))
    pods.plan(*prompts.paged_plan()[:4], *decode_half.paged_plan()[:4], *heads, 16, **types)
    halves = {"q_p": prompts.q, "paged_kv_cache_p": cache, "q_d": decode_half.q, "paged_kv_cache_d": cache}
    yield Run("batch pod", pods, {**halves, "causal_p": True, "return_lse": True})
    pod = PODWithPagedKVCacheWrapper(workspace("cpu", 1 << 16))
    pod.plan(*decode_half.paged_plan()[1:4], *heads, 16, **types)
    prompt = {"q_p": prompts.q[:5], "k_p": b.k[2], "v_p": b.v[2], "causal_p": True}
    yield Run("pod", pod, {**prompt, "q_d": decode_half.q, "paged_kv_cache_d": cache})


def sparse() -> Iterator[Run]:
    q, k, v = (rand(n, h, 64, dtype=torch.float16, device="cpu", seed=n) for n, h in ((40, 4), (48, 2), (48, 2)))
    indptr, indices = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 3], [0, 2, 1]))
    blocks = BlockSparseAttentionWrapper(workspace("cpu"))
    blocks.plan(indptr, indices, 40, 48, 16, 16, 4, 2, 64)
    yield Run("blocks", blocks, {"q": q, "k": k, "v": v, "return_lse": True})
    mask = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [0, 0]]], dtype=torch.bool)
    rows, columns = torch.tensor([[30, 10], [8, 32]]), torch.tensor([[16, 32], [32, 16]])
    sizes = VariableBlockSparseAttentionWrapper(workspace("cpu"))
    sizes.plan(mask, rows, columns, 4, 2, 64)
    yield Run("blocks of sizes", sizes, {"q": q.transpose(0, 1), "k": k.transpose(0, 1), "v": v.transpose(0, 1)})


def shared_prefix() -> Iterator[Run]:
    k, v = (rand(30, 2, 64, dtype=torch.float16, device="cpu", seed=s) for s in (1, 2))
    shared = {"k_shared": k, "v_shared": v}
    b, p = batch([(3, 20), (8, 8)]), paged([20, 3])
    prompts = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    prompts.begin_forward(*b.paged_plan())
    yield Run("shared prefix of prompts", prompts, {"q": b.q, **shared, "unique_kv_cache": b.cache, "causal": True})
    decoded = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu", 1 << 16))
    decoded.begin_forward(*p.plan_arguments())
    yield Run("shared prefix", decoded, {"q": p.q, **shared, "unique_kv_cache": p.cache})


def ranges() -> Iterator[Run]:
    b = batch([(6, 20), (8, 8)])
    spans = torch.tensor([[-1, -1]] * 3 + [[17, 19]] * 3 + [[0, 3]] * 4 + [[-1, -1]] * 4, dtype=torch.int32)
    types = {"q_data_type": b.q.dtype, "kv_data_type": b.q.dtype}
    dims = {"head_dim_qk": b.dims[0], "head_dim_vo": b.dims[1]}
    w = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace("cpu"), **types, **dims)
    w.plan(*b.paged_plan())
    given = {"q": b.q, "paged_kv_cache": b.cache, "bidirectional_ranges": spans, "causal_window_left": 9}
    yield Run("ranges", w, given)


def nvfp4(layout: str = "NHD") -> Iterator[Run]:
    """Keys and values of four bits, which no trace describes."""
    x = nvfp4_batch([37, 5, 16], layout=layout)
    types = {"q_data_type": x.q.dtype, "kv_data_type": torch.uint8}
    step = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 1 << 16), layout)
    step.plan(x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, **types)
    yield Run("decode nvfp4", step, {"q": x.q, "paged_kv_cache": x.cache, "kv_cache_sf": x.scales, "k_scale": 0.5})
    x = nvfp4_batch([37, 5, 16], [9, 5, 1], layout=layout)
    paged_form = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), layout)
    paged_form.plan(x.qo_indptr, x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, causal=True, **types)
    yield Run("paged nvfp4", paged_form, {"q": x.q, "paged_kv_cache": x.cache, "kv_cache_sf": x.scales})
    ragged_form = BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), layout)
    ragged_form.plan(x.qo_indptr, x.offsets(x.lengths), 8, 2, 128, **types)
    k, v = x.ragged
    yield Run("ragged nvfp4", ragged_form, {"q": x.q, "k": k, "v": v, "kv_cache_sf": x.ragged_scales})


# Wrappers that run others, which have the traces, and what has no trace.
COMPOSED: dict[str, Callable[[], Iterator[Run]]] = {
    "nvfp4": nvfp4,
    "nvfp4 HND": lambda: nvfp4("HND"),
    "mixed": mixed,
    "sparse": sparse,
    "shared prefix": shared_prefix,
}
COMPILED: dict[str, Callable[[], Iterator[Run]]] = {"ranges": ranges}  # of a variant, so its kernel is never prebuilt
SESSIONS: dict[str, Callable[[], Iterator[Run]]] = {
    "decode": decode,
    "decode HND": lambda: decode("fused", kv_layout="HND", dtype=torch.bfloat16),
    "decode several": decode_several,
    "decode graph": decode_graph,
    "paged": prefill_paged,
    "paged HND": lambda: prefill_paged("strided", kv_layout="HND"),
    "ragged": prefill_ragged,
    "ragged HND": lambda: prefill_ragged("HND"),
    "sinks": prefill_sinks,
    "cascade": cascade,
    "mla": mla,
}


def main(compiled: bool) -> None:
    """Runs COMPILED or all other sessions, these in the forms that change a plan too; prints the number of runs."""
    count = 0
    for session in COMPILED.values() if compiled else (*SESSIONS.values(), *COMPOSED.values()):
        for run in session():
            run()
            count += 1
    for session in () if compiled else (decode, prefill_paged):
        run = next(session())  # the others would plan another batch
        run.wrapper.forward(**run.arguments, sm_scale=0.7, window_left=4)
        run.wrapper.run_return_lse(**run.arguments)
        buffers = workspace("cpu"), torch.empty(8 << 20, dtype=torch.uint8)
        run.wrapper.reset_workspace_buffer(*buffers)
        count += 2
    print(count)
