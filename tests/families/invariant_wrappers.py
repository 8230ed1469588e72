"""Requests for the judge of batch invariance: wrappers that combine others, and attention of single requests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

import fi_core
from families.invariance import Requests
from families.invariant_requests import (
    DIM,
    HEADS,
    KV_HEADS,
    Tensors,
    attended,
    cut_attention,
    joined,
    last_pages,
    masked,
    normal,
    offsets,
    paged,
    ran,
    split,
    workspace,
)
from fi_core import cascade, sparse

SHAPE = HEADS, KV_HEADS, DIM
BF16 = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def tables_of(requests: Sequence[Tensors], rng: Random, device: str) -> tuple[int, tuple[torch.Tensor, ...], Any]:
    """Page size; query offsets, page offsets, page ids and last lengths; the cache."""
    page_size, (k, v), tables = paged([(r["k"], r["v"]) for r in requests], rng, device)
    qo, pages = offsets([len(r["q"]) for r in requests], device), offsets([len(t) for t in tables], device)
    return page_size, (qo, pages, joined(tables, device), last_pages(requests, page_size, device)), (k, v)


def queries(requests: Sequence[Tensors]) -> torch.Tensor:
    return torch.cat([r["q"] for r in requests])


def single(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    """Each request alone, prompts of any length by one function."""
    found = []
    for r in requests:
        options = {"custom_mask": r["mask"]} if "mask" in r else {"causal": True}
        call = functools.partial(fi_core.single_prefill_with_kv_cache, r["q"], r["k"], r["v"], **options)
        found.append(list(call(return_lse=True)))
    return found


def single_decode(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    call = functools.partial(fi_core.single_decode_with_kv_cache, return_lse=True)
    return [[x[None] for x in call(r["q"][0], r["k"], r["v"])] for r in requests]


def mixed(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    page_size, (qo, pages, ids, _), cache = tables_of(requests, rng, device)
    lengths = torch.tensor([len(r["k"]) for r in requests], dtype=torch.int32, device=device)
    wrapper = fi_core.BatchAttention(device=device)
    wrapper.plan(qo, pages, ids, lengths, HEADS, KV_HEADS, DIM, DIM, page_size, causal=True)
    out, lse = ran(rng, device, lambda: wrapper.run(queries(requests), cache))
    return [list(own) for own in zip(split(out, requests), split(lse, requests))]


def prompt_beside(rng: Random, device: str) -> Tensors:
    """A prompt that runs beside requests and belongs to none."""
    return attended(rng, device, 300)


def pod(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    page_size, (_, pages, ids, last), cache = tables_of(requests, rng, device)
    wrapper, prompt = fi_core.PODWithPagedKVCacheWrapper(workspace(device)), prompt_beside(rng, device)
    wrapper.plan(pages, ids, last, *SHAPE, page_size, **BF16)
    q = queries(requests)
    _, out = ran(rng, device, lambda: wrapper.run(prompt["q"], prompt["k"], prompt["v"], q, cache, causal_p=True))
    return [[own] for own in out.split(1)]


def pod_prompt(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    """The same of prompts, each beside drawn decode requests."""
    found = []
    for r in requests:
        others = [attended(rng, device, 1) for _ in range(rng.randint(1, 3))]
        page_size, (_, pages, ids, last), cache = tables_of(others, rng, device)
        wrapper = fi_core.PODWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(pages, ids, last, *SHAPE, page_size, **BF16)
        found.append([wrapper.run(r["q"], r["k"], r["v"], queries(others), cache, causal_p=True)[0]])
    return found


def batch_pod(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    others = [attended(rng, device, 1) for _ in range(rng.randint(1, 3))]
    page_size, of_prompts, cache = tables_of(requests, rng, device)
    size_d = 0
    while size_d != page_size:
        size_d, of_decode, cache_d = tables_of(others, rng, device)
    wrapper = fi_core.BatchPODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*of_prompts, *of_decode, *SHAPE, page_size, **BF16)
    q, q_d = queries(requests), queries(others)
    (out, _) = ran(rng, device, lambda: wrapper.run(q, cache, q_d, cache_d, causal_p=True))
    return [[own] for own in split(out, requests)]


@functools.cache
def shared_keys(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a prefix that all requests share."""
    rng = Random(5)
    return normal(rng, device, 700, KV_HEADS, DIM), normal(rng, device, 700, KV_HEADS, DIM)


def shared_prefix_decode(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    page_size, (_, pages, ids, last), cache = tables_of(requests, rng, device)
    wrapper = cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(pages, ids, last, *SHAPE, page_size, data_type=torch.bfloat16)
    out = wrapper.forward(queries(requests), *shared_keys(device), cache)
    return [[own] for own in out.split(1)]


def shared_prefix_prefill(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    page_size, tables, cache = tables_of(requests, rng, device)
    wrapper = cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(*tables, *SHAPE, page_size, q_data_type=torch.bfloat16)
    out = wrapper.forward(queries(requests), *shared_keys(device), cache, causal=True)
    return [[own] for own in split(out, requests)]


def levels(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    """Two levels: the shared prefix for all rows, then the keys of each request."""
    prefix = dict(zip("kv", shared_keys(device)))
    page_size, (k, v), tables = paged([(r["k"], r["v"]) for r in (prefix, *requests)], rng, device)
    rows = [len(r["q"]) for r in requests]

    def of_level(groups: list[int], own: list[list[int]], members: Sequence[Tensors]) -> tuple[torch.Tensor, ...]:
        pages = offsets([len(t) for t in own], device)
        return offsets(groups, device), pages, joined(own, device), last_pages(members, page_size, device)

    first, last = of_level([sum(rows)], tables[:1], [prefix]), of_level(rows, tables[1:], requests)
    wrapper = fi_core.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    wrapper.plan(*([a, b] for a, b in zip(first, last)), *SHAPE, page_size, causal=True, q_data_type=torch.bfloat16)
    out = ran(rng, device, lambda: wrapper.run(queries(requests), (k, v)))
    return [[own] for own in split(out, requests)]


def blocks(rng: Random, device: str) -> Tensors:
    """A row of blocks: 16 query tokens, and which of 12 blocks of 16 keys they attend to."""
    chosen = torch.tensor(sorted(rng.sample(range(12), rng.randint(1, 12))))
    return {"q": normal(rng, device, 16, HEADS, DIM), "chosen": chosen}


def block_sparse(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    wrapper = sparse.BlockSparseAttentionWrapper(workspace(device))
    indptr = offsets([len(r["chosen"]) for r in requests], device)
    ids = torch.cat([r["chosen"] for r in requests]).int().to(device)
    wrapper.plan(indptr, ids, 16 * len(requests), 192, 16, 16, *SHAPE, o_data_type=torch.bfloat16, **BF16)
    k, v = (x[:192] for x in shared_keys(device))
    out, lse = ran(rng, device, lambda: wrapper.run(queries(requests), k, v, return_lse=True))
    return [list(own) for own in zip(split(out, requests), split(lse, requests))]


def variable_blocks(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    wrapper = sparse.VariableBlockSparseAttentionWrapper(workspace(device))
    mask = torch.zeros(KV_HEADS, len(requests), 12, dtype=torch.bool)
    for i, r in enumerate(requests):
        mask[:, i, r["chosen"]] = True
    sizes = (torch.full((KV_HEADS, n), 16, dtype=torch.int32, device=device) for n in (len(requests), 12))
    wrapper.plan(mask.to(device), *sizes, *SHAPE, **BF16)
    k, v = (x[:192].transpose(0, 1).contiguous() for x in shared_keys(device))
    q = queries(requests).transpose(0, 1).contiguous()
    out = ran(rng, device, lambda: wrapper.run(q, k, v))
    return [[own] for own in split(out.transpose(0, 1), requests)]


def ranged(rng: Random, device: str) -> Tensors:
    """The same as `attended`, with a range of keys for each row."""
    request = attended(rng, device, 300)
    keys, rows = len(request["k"]), len(request["q"])
    begin = rng.randrange(keys)
    ranges = torch.tensor([[begin, rng.randrange(begin, keys)] for _ in range(rows)], dtype=torch.int32)
    return {**request, "ranges": ranges.clamp(max=keys - rows).to(device)}


def bidirectional(requests: Sequence[Tensors], rng: Random, device: str) -> list[list[torch.Tensor]]:
    page_size, tables, cache = tables_of(requests, rng, device)
    wrapper = fi_core.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(device), head_dim_qk=DIM, head_dim_vo=DIM
    )
    wrapper.plan(*tables, *SHAPE, page_size)
    ranges = torch.cat([r["ranges"] for r in requests])
    out = wrapper.run(queries(requests), cache, ranges)
    return [[own] for own in split(out, requests)]


def cut_ranges(request: Tensors, rng: Random) -> list[Tensors]:
    at = rng.randrange(len(request["q"]) + 1)
    keys, rows = len(request["k"]), len(request["q"])
    return [
        {**{n: request[n][a:b] for n in ("q", "ranges")}, **{n: request[n][: keys - rows + b] for n in "kv"}}
        for a, b in ((0, at), (at, rows))
        if b > a
    ]


def prompts(rng: Random, device: str) -> Tensors:
    return attended(rng, device, rng.choice((1, 300)))


def one_query(rng: Random, device: str) -> Tensors:
    return attended(rng, device, 1)


WRAPPERS = [
    Requests("single_prefill_with_kv_cache", prompts, single, cut_attention),
    Requests("single_prefill_with_kv_cache, mask", functools.partial(masked, most_queries=300), single, cut_attention),
    Requests("single_decode_with_kv_cache", one_query, single_decode),
    Requests("BatchAttention", prompts, mixed, cut_attention),
    Requests("PODWithPagedKVCacheWrapper", one_query, pod),
    Requests("PODWithPagedKVCacheWrapper, prompt", prompts, pod_prompt, cut_attention),
    Requests("BatchPODWithPagedKVCacheWrapper", prompts, batch_pod, cut_attention),
    Requests("BatchDecodeWithSharedPrefixPagedKVCacheWrapper", one_query, shared_prefix_decode),
    Requests("BatchPrefillWithSharedPrefixPagedKVCacheWrapper", prompts, shared_prefix_prefill, cut_attention),
    Requests("MultiLevelCascadeAttentionWrapper", prompts, levels, cut_attention),
    Requests("BlockSparseAttentionWrapper", blocks, block_sparse),
    Requests("VariableBlockSparseAttentionWrapper", blocks, variable_blocks),
    Requests("BatchPrefillWithCausalBidirectionalRangesWrapper", ranged, bidirectional, cut_ranges),
]
