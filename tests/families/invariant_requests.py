"""Requests of several tokens for the judge of batch invariance: attention over pages, MLA, recurrences, segments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

import fi_core
from families.invariance import Requests, captured
from fi_core import mamba
from fi_core.attention.forms.tables_decode import trtllm_batch_decode_with_kv_cache
from fi_core.attention.forms.tables_prefill import trtllm_batch_context_with_kv_cache
from fi_core.gdn_prefill import chunk_gated_delta_rule
from fi_core.mla import trtllm_batch_decode_with_kv_cache_mla

HEADS, KV_HEADS, DIM = 8, 2, 64
LENGTHS = (1, 3, 64, 65, 200, 700, 1024, 1500, 2600)  # chunks of KV have 512 tokens

Tensors = dict[str, torch.Tensor]


def normal(rng: Random, device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def workspace(device: str) -> torch.Tensor:
    return torch.empty(64 << 20, dtype=torch.uint8, device=device)


def ran(rng: Random, device: str, call: Callable[[], Any]) -> Any:
    """What a call returns, on a GPU as often from a CUDA graph as eager."""
    return call() if device == "cpu" or rng.random() < 0.5 else captured(call)


def attended(
    rng: Random,
    device: str,
    most_queries: int,
    dims: tuple[int, int] = (DIM, DIM),
    kv: torch.dtype = torch.bfloat16,
    q: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Queries of the last tokens of a request, and all its keys. Some queries are sharp: their maxima move late."""
    kv_len = rng.choice(LENGTHS)
    rows = rng.randint(1, min(kv_len, most_queries))
    k, v = (normal(rng, device, kv_len, KV_HEADS, dim).to(kv) for dim in dims)
    sharp = torch.tensor([rng.choice((0.3, 1.0, 6.0)) for _ in range(rows)], device=device, dtype=torch.bfloat16)
    return {"q": (normal(rng, device, rows, HEADS, dims[0]) * sharp[:, None, None]).to(q), "k": k, "v": v}


def masked(rng: Random, device: str, most_queries: int) -> Tensors:
    """The same with a mask that hides a quarter of the keys up to each row's own."""
    request = attended(rng, device, most_queries)
    rows, keys = len(request["q"]), len(request["k"])
    own = torch.arange(keys) - (keys - rows + torch.arange(rows))[:, None]
    hidden = torch.rand(rows, keys, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) < 0.25
    return {**request, "mask": ((own == 0) | (own < 0) & ~hidden).to(device)}


def offsets(lengths: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def paged(
    caches: Sequence[Sequence[torch.Tensor]], rng: Random, device: str
) -> tuple[int, list[torch.Tensor], list[list[int]]]:
    """Page size, pools with garbage in every other token, and the page ids of each request. caches: of each request."""
    page_size = rng.choice((1, 8, 16, 64))
    pages = [-(-len(own[0]) // page_size) for own in caches]
    ids = list(range(sum(pages) + 3))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in pages]
    pools = []
    for which, like in enumerate(caches[0]):
        pool = torch.full((sum(pages) + 3, page_size, *like.shape[1:]), 7.0, device=device).to(like.dtype)
        for own, table in zip(caches, tables):
            flat = own[which].new_full((len(table) * page_size, *like.shape[1:]), 7.0)
            flat[: len(own[which])] = own[which]
            pool[table] = flat.view(len(table), page_size, *like.shape[1:])
        pools.append(pool)
    return page_size, pools, tables


def split(x: torch.Tensor, requests: Sequence[Tensors], name: str = "q") -> list[torch.Tensor]:
    return list(x.split([len(r[name]) for r in requests]))


def last_pages(requests: Sequence[Tensors], page_size: int, device: str, name: str = "k") -> torch.Tensor:
    return torch.tensor([(len(r[name]) - 1) % page_size + 1 for r in requests], dtype=torch.int32, device=device)


def decode(
    requests: Sequence[Tensors], rng: Random, device: str, tensor_cores: bool = True, **options: Any
) -> list[list[torch.Tensor]]:
    page_size, (k, v), tables = paged([(r["k"], r["v"]) for r in requests], rng, device)
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=tensor_cores)
    wrapper.plan(
        offsets([len(t) for t in tables], device), joined(tables, device),
        last_pages(requests, page_size, device), HEADS, KV_HEADS, DIM, page_size, q_data_type=torch.bfloat16,
        kv_data_type=k.dtype, **options,
    )  # fmt: skip
    q = torch.cat([r["q"] for r in requests])
    out, lse = ran(rng, device, lambda: wrapper.run(q, (k, v), return_lse=True))
    return [list(own) for own in zip(out.split(1), lse.split(1))]


def prefill(
    requests: Sequence[Tensors], rng: Random, device: str, backend: str = "auto", **options: Any
) -> list[list[torch.Tensor]]:
    page_size, (k, v), tables = paged([(r["k"], r["v"]) for r in requests], rng, device)
    wrapper = fi_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
    q = torch.cat([r["q"] for r in requests])
    mask = torch.cat([r["mask"].flatten() for r in requests]) if "mask" in requests[0] else None
    wrapper.plan(
        offsets([len(r["q"]) for r in requests], device), offsets([len(t) for t in tables], device),
        joined(tables, device), last_pages(requests, page_size, device), HEADS, KV_HEADS, q.shape[2], page_size,
        v.shape[3], mask, causal=mask is None, q_data_type=q.dtype, kv_data_type=k.dtype,
        o_data_type=torch.bfloat16, **options,
    )  # fmt: skip
    out, lse = ran(rng, device, lambda: wrapper.run(q, (k, v), return_lse=True))
    return [list(own) for own in zip(split(out, requests), split(lse, requests))]


def ragged(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    wrapper = fi_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    qo_indptr, kv_indptr = (offsets([len(r[name]) for r in requests], device) for name in "qk")
    wrapper.plan(qo_indptr, kv_indptr, HEADS, KV_HEADS, DIM, causal=True, q_data_type="bfloat16")
    q, k, v = (torch.cat([r[name] for r in requests]) for name in "qkv")
    out, lse = ran(rng, device, lambda: wrapper.run(q, k, v, return_lse=True))
    return [list(own) for own in zip(split(out, requests), split(lse, requests))]


def joined(tables: Sequence[Sequence[int]], device: str) -> torch.Tensor:
    return torch.tensor([page for table in tables for page in table], dtype=torch.int32, device=device)


def tables_of(tables: Sequence[Sequence[int]], device: str) -> torch.Tensor:
    width = max(map(len, tables))
    return torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32, device=device)


def tables_decode(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    _, (k, v), tables = paged([(r["k"], r["v"]) for r in requests], rng, device)
    lengths = [len(r["k"]) for r in requests]
    out = trtllm_batch_decode_with_kv_cache(
        torch.cat([r["q"] for r in requests]), (k, v), workspace(device), tables_of(tables, device),
        torch.tensor(lengths, dtype=torch.int32, device=device), max(lengths), bmm1_scale=DIM**-0.5, kv_layout="NHD",
        max_q_len=max(len(r["q"]) for r in requests), cum_seq_lens_q=offsets([len(r["q"]) for r in requests], device),
    )  # fmt: skip
    return [[own] for own in split(out, requests)]


def tables_prefill(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    _, (k, v), tables = paged([(r["k"], r["v"]) for r in requests], rng, device)
    lengths, rows = ([len(r[name]) for r in requests] for name in ("k", "q"))
    out = trtllm_batch_context_with_kv_cache(
        torch.cat([r["q"] for r in requests]), (k, v), workspace(device), tables_of(tables, device),
        torch.tensor(lengths, dtype=torch.int32, device=device), max(rows), max(lengths), DIM**-0.5, 1.0, len(requests),
        offsets(rows, device), offsets(lengths, device), kv_layout="NHD",
    )  # fmt: skip
    return [[own] for own in split(out, requests)]


def latent(rng: Random, device: str, heads: int = 16, most_queries: int = 5) -> Tensors:
    kv_len = rng.choice(LENGTHS)
    rows = rng.randint(1, min(kv_len, most_queries))
    return {"q": normal(rng, device, rows, heads, 512), "q_pe": normal(rng, device, rows, heads, 64),
            "ckv": normal(rng, device, kv_len, 512), "kpe": normal(rng, device, kv_len, 64)}  # fmt: skip


def mla(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    page_size, (ckv, kpe), tables = paged([(r["ckv"], r["kpe"]) for r in requests], rng, device)
    wrapper = fi_core.mla.BatchMLAPagedAttentionWrapper(workspace(device))
    wrapper.plan(
        offsets([len(r["q"]) for r in requests], device), offsets([len(t) for t in tables], device),
        joined(tables, device),
        torch.tensor([len(r["ckv"]) for r in requests], dtype=torch.int32, device=device),
        requests[0]["q"].shape[1], 512, 64, page_size, True, 0.07, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    q, q_pe = (torch.cat([r[name] for r in requests]) for name in ("q", "q_pe"))
    out, lse = ran(rng, device, lambda: wrapper.run(q, q_pe, ckv, kpe, return_lse=True))
    return [list(own) for own in zip(split(out, requests), split(lse, requests))]


def tables_mla(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    caches = [(torch.cat([r["ckv"], r["kpe"]], -1),) for r in requests]
    _, (cache,), tables = paged(caches, rng, device)
    lengths = torch.tensor([len(r["ckv"]) for r in requests], dtype=torch.int32, device=device)
    out, lse = trtllm_batch_decode_with_kv_cache_mla(
        torch.cat([torch.cat([r["q"], r["q_pe"]], -1) for r in requests]), cache, workspace(device), 128, 512, 64,
        tables_of(tables, device), lengths, int(lengths.max()), bmm1_scale=0.07, return_lse=True,
        cum_seq_lens_q=offsets([len(r["q"]) for r in requests], device),
    )  # fmt: skip
    return [list(own) for own in zip(split(out, requests), split(lse, requests))]


def recurrent(rng: Random, device: str) -> Tensors:
    tokens, heads = rng.choice((1, 63, 64, 130, 200)), 2
    q, k, v = (normal(rng, device, tokens, heads, 64) * 0.3 for _ in range(3))
    g, beta = (normal(rng, device, tokens, heads, dtype=torch.float32).sigmoid() for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "state": normal(rng, device, heads, 64, 64, dtype=torch.float32),
    }


def delta_rule(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    q, k, v, g, beta = (torch.cat([r[name] for r in requests]) for name in ("q", "k", "v", "g", "beta"))
    out, state = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=torch.stack([r["state"] for r in requests]), output_final_state=True,
        cu_seqlens=offsets([len(r["q"]) for r in requests], device), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return [list(own) for own in zip(split(out, requests), state)]


def spaces(rng: Random, device: str) -> Tensors:
    tokens, heads = rng.choice((1, 63, 64, 130, 200)), 4
    b, c = (normal(rng, device, tokens, 1, 64) * 0.3 for _ in range(2))
    dt = normal(rng, device, tokens, heads, dtype=torch.float32).sigmoid()
    state = normal(rng, device, heads, 64, 64, dtype=torch.float32)
    return {"x": normal(rng, device, tokens, heads, 64), "dt": dt, "B": b, "C": c, "state": state}


def state_spaces(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    x, dt, b, c = (torch.cat([r[name] for r in requests])[None] for name in ("x", "dt", "B", "C"))
    a = -torch.arange(1, x.shape[2] + 1, device=device).float() / 3
    out, state = mamba.ssd_combined_fwd(
        x, dt, a, b, c, initial_states=torch.stack([r["state"] for r in requests]),
        cu_seqlens=offsets([len(r["x"]) for r in requests], device),
    )  # fmt: skip
    assert state is not None
    return [list(own) for own in zip(split(out[0], requests, "x"), state)]


def convolved(rng: Random, device: str) -> Tensors:
    return {"x": normal(rng, device, rng.choice((1, 2, 7, 70)), 64), "state": normal(rng, device, 64, 3)}


def convolution(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    weight = torch.linspace(-1, 1, 64 * 4, device=device).view(64, 4).bfloat16()
    states = torch.stack([r["state"] for r in requests])
    has = torch.ones(len(requests), dtype=torch.bool, device=device)
    out = mamba.causal_conv1d_fn(
        torch.cat([r["x"] for r in requests]).T, weight, None, states,
        offsets([len(r["x"]) for r in requests], device), has_initial_state=has,
    )  # fmt: skip
    return [list(own) for own in zip(split(out.T, requests, "x"), states)]


def indexed(rng: Random, device: str) -> Tensors:
    """Two rows of an indexer, and the keys of their request."""
    keys = rng.choice((2, 70, 200, 700))
    e4m3, q, k = torch.float8_e4m3fn, normal(rng, device, 2, 64, 128), normal(rng, device, keys, 128)
    weights, scales = (normal(rng, device, *shape, dtype=torch.float32) for shape in ((2, 64), (keys,)))
    return {"q": q.to(e4m3), "k": k.to(e4m3), "weights": weights, "scales": scales.abs()}


def indexer_logits(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    """Pages hold their values, then their scales."""
    page_size, lengths = rng.choice((16, 48, 64)), [len(r["k"]) for r in requests]
    pages = [-(-n // page_size) for n in lengths]
    ids = rng.sample(range(sum(pages) + 3), sum(pages))
    cache = torch.zeros(sum(pages) + 3, page_size * 132, dtype=torch.uint8, device=device)
    tables = []
    for r, n, count in zip(requests, lengths, pages):
        tables.append([ids.pop() for _ in range(count)])
        for i, page in enumerate(tables[-1]):
            own = slice(i * page_size, min((i + 1) * page_size, n))
            values, scales = (r[name][own].contiguous().view(torch.uint8).flatten() for name in ("k", "scales"))
            cache[page, : len(values)] = values
            cache[page, page_size * 128 : page_size * 128 + len(scales)] = scales
    q, weights = torch.stack([r["q"] for r in requests]), torch.cat([r["weights"] for r in requests])
    context = torch.tensor(lengths, dtype=torch.int32, device=device)
    logits = fi_core.deep_gemm.fp8_paged_mqa_logits(
        q, cache.view(-1, page_size, 1, 132), weights, context, tables_of(tables, device), None, max(lengths)
    )
    return [[logits[2 * i + t, : n - 1 + t] for t in range(2)] for i, n in enumerate(lengths)]


def segment(rng: Random, device: str) -> Tensors:
    return {"x": normal(rng, device, rng.choice((1, 2, 9, 17, 66, 130)), 256)}


def segments(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    weights = torch.linspace(-1, 1, 256 * 512, device=device).sin().view(1, 512, 256).bfloat16()
    out = fi_core.SegmentGEMMWrapper(workspace(device)).run(
        torch.cat([r["x"] for r in requests]), weights, len(requests), True,
        seg_lens=torch.tensor([len(r["x"]) for r in requests], device=device),
        weight_indices=torch.zeros(len(requests), dtype=torch.int64, device=device),
    )  # fmt: skip
    return [[own] for own in split(out, requests, "x")]


def cut_queries(request: Tensors, rng: Random, names: tuple[str, ...], keys: tuple[str, ...]) -> list[Tensors]:
    """The chunks in which a prompt is computed: each attends to the keys up to its own."""
    rows, kv_len = len(request[names[0]]), len(request[keys[0]])
    at = sorted({0, rows, *(rng.randint(0, rows) for _ in range(3))})
    return [
        {**{n: request[n][a:b] for n in names}, **{n: request[n][: kv_len - rows + b] for n in keys}}
        for a, b in itertools.pairwise(at)
    ]  # fmt: skip


def cut_attention(request: Tensors, rng: Random) -> list[Tensors]:
    if "mask" not in request:
        return cut_queries(request, rng, ("q",), ("k", "v"))
    chunks = cut_queries(request, rng, ("q", "mask"), ("k", "v"))
    return [{**chunk, "mask": chunk["mask"][:, : len(chunk["k"])]} for chunk in chunks]


def cut_latent(request: Tensors, rng: Random) -> list[Tensors]:
    return cut_queries(request, rng, ("q", "q_pe"), ("ckv", "kpe"))


def cut_rows(request: Tensors, rng: Random) -> list[Tensors]:
    at = sorted({0, len(request["x"]), *(rng.randint(0, len(request["x"])) for _ in range(3))})
    return [{"x": request["x"][a:b]} for a, b in itertools.pairwise(at)]


E4M3 = torch.float8_e4m3fn
# fa2: the kernel of mma.sync, which all targets have; masks and encodings of positions take it anyway.
PREFILLS: list[tuple[str, Callable[..., Tensors], dict[str, Any]]] = [
    ("window", attended, {"window_left": 90}),
    ("soft cap", attended, {"logits_soft_cap": 20.0}),
    ("fa2", attended, {"backend": "fa2"}),
    ("fa2, window", attended, {"backend": "fa2", "window_left": 90}),
    ("mask", masked, {}),
    ("mask and window", masked, {"window_left": 90}),
    ("rotation", attended, {"pos_encoding_mode": "ROPE_LLAMA"}),
    ("heads of 128", functools.partial(attended, dims=(128, 128)), {}),
    ("heads of 192 and 128", functools.partial(attended, dims=(192, 128)), {}),
    ("heads of 256, fa2", functools.partial(attended, dims=(256, 256)), {"backend": "fa2"}),
    ("keys of e4m3", functools.partial(attended, kv=E4M3), {}),
    ("e4m3", functools.partial(attended, kv=E4M3, q=E4M3), {}),
]
DECODES: list[tuple[str, Callable[..., Tensors], dict[str, Any]]] = [
    ("window", attended, {"window_left": 90}),
    ("CUDA cores", attended, {"tensor_cores": False}),
    ("keys of e4m3", functools.partial(attended, kv=E4M3), {}),
    ("ALiBi", attended, {"pos_encoding_mode": "ALIBI"}),
]
REQUESTS = [
    Requests("BatchDecodeWithPagedKVCacheWrapper", lambda rng, device: attended(rng, device, 1), decode),
    *(
        Requests(
            f"BatchDecodeWithPagedKVCacheWrapper, {name}",
            functools.partial(draw, most_queries=1),
            functools.partial(decode, **options),
        )
        for name, draw, options in DECODES
    ),
    Requests(
        "BatchPrefillWithPagedKVCacheWrapper", lambda rng, device: attended(rng, device, 300), prefill, cut_attention
    ),
    *(
        Requests(
            f"BatchPrefillWithPagedKVCacheWrapper, {name}",
            functools.partial(draw, most_queries=300),
            functools.partial(prefill, **options),
            cut_attention,
        )
        for name, draw, options in PREFILLS
    ),
    Requests(
        "BatchPrefillWithRaggedKVCacheWrapper", lambda rng, device: attended(rng, device, 300), ragged, cut_attention
    ),
    Requests(
        "trtllm_batch_decode_with_kv_cache", lambda rng, device: attended(rng, device, 4), tables_decode, cut_attention
    ),
    Requests(
        "trtllm_batch_context_with_kv_cache",
        lambda rng, device: attended(rng, device, 300),
        tables_prefill,
        cut_attention,
    ),
    Requests("BatchMLAPagedAttentionWrapper", latent, mla, cut_latent),
    Requests("BatchMLAPagedAttentionWrapper, 40 heads", functools.partial(latent, heads=40), mla, cut_latent),
    Requests("trtllm_batch_decode_with_kv_cache_mla", latent, tables_mla, cut_latent),
    Requests("chunk_gated_delta_rule", recurrent, delta_rule, names=("q", "k", "v", "g", "beta")),
    Requests("ssd_combined_fwd", spaces, state_spaces, names=("x", "dt", "B", "C")),
    Requests("causal_conv1d_fn", convolved, convolution, names=("x",), step=1),
    Requests("fp8_paged_mqa_logits", indexed, indexer_logits),
    Requests("SegmentGEMMWrapper", segment, segments, cut_rows),
]
