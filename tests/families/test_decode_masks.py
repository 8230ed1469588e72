"""Decode with keys behind a query, keys spread over ranks, and pages by kv head, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.attention_reference import attention
from families.engine import engine
from families.harness import assert_close, rand
from families.paged import paged
from families.prefill_batch import LSE, workspace
from fi_core.cascade import merge_states
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper, trtllm_batch_decode_with_kv_cache

Q_LEN = 3


@pytest.mark.parametrize(
    "options", [{"window_right": 1}, {"window_right": -1}, {"is_causal": False}, {"is_causal": True}]
)
def test_keys_behind_a_query(options: dict[str, Any], device: str) -> None:
    p = paged([37, 3, 16, 300], q_len=Q_LEN, heads=(8, 2), device=device)
    w = BatchDecodeWithPagedKVCacheWrapper(workspace(device, 1 << 20), use_tensor_cores=True)
    right = -1 if options.get("is_causal") is False else options.get("window_right", 0)
    for window_left in (-1, 9):
        w.plan(*p.plan_arguments(), **p.dtypes, q_len_per_req=Q_LEN, window_left=window_left, **options)
        out, lse = w.run(p.q, p.cache, return_lse=True)
        want = []
        for b, (k, v) in enumerate(zip(p.k, p.v)):
            distance = torch.arange(len(k)) - torch.arange(len(k) - Q_LEN, len(k))[:, None]
            seen = (distance <= (right if right >= 0 else Q_LEN)) & ((distance >= -window_left) | (window_left < 0))
            want.append(attention(p.q[b * Q_LEN : (b + 1) * Q_LEN], k, v, custom_mask=seen))
        assert_close(out, torch.cat([x for x, _ in want]))
        assert_close(lse, torch.cat([x for _, x in want]), tolerance=LSE)
        own = engine(w).workspaces
        engine(w).cached_module.plan(  # as engines call it
            *own, engine(w).qo_indptr_buf, p.indptr, p.seq_lens(), len(p.q), 4, 8, 2, p.page_size, False, 64, 64, False,
            window_left,
        )  # fmt: skip
        assert torch.equal(w.run(p.q, p.cache), out)
    w.plan(*p.plan_arguments(), **p.dtypes, q_len_per_req=Q_LEN)
    assert_close(w.run(p.q, p.cache), p.expected()[0])
    with pytest.raises(ValueError, match="window_right"):
        w.plan(*p.plan_arguments(), **p.dtypes, window_right=-2)


def test_a_decoded_token_has_no_keys_behind_it(device: str) -> None:
    p = paged([37, 0, 16], device=device)
    w = BatchDecodeWithPagedKVCacheWrapper(workspace(device, 1 << 20))
    w.plan(*p.plan_arguments(), **p.dtypes, window_right=4, is_causal=False)
    assert_close(w.run(p.q, p.cache), p.expected()[0])


@pytest.mark.parametrize("q_len", [1, Q_LEN])
def test_context_parallel_ranks(q_len: int, device: str) -> None:
    """Two ranks hold every second key; their merged results are attention over all keys."""
    lengths, world, states = [40, 7, 33], 2, []
    q = rand(len(lengths) * q_len, 8, 64, dtype=torch.float16, device=device)
    whole = [[rand(n, 2, 64, dtype=q.dtype, device=device, seed=n + s) for s in (0, 1)] for n in lengths]
    for rank in range(world):
        own = [[x[rank::world] for x in kv] for kv in whole]
        counts = [len(k) for k, _ in own]
        p = paged(counts, heads=(8, 2), device=device)
        for b, kv in enumerate(own):
            for x, pool in zip(kv, p.cache):
                at = torch.arange(counts[b], device=device)
                pages = p.indices[int(p.indptr[b]) : int(p.indptr[b + 1])].long()
                pool[pages[at // 16], at % 16] = x
        total = torch.tensor(lengths, dtype=torch.int32, device=device)
        states.append(
            trtllm_batch_decode_with_kv_cache(
                q, p.cache, workspace(device, 8 << 20), p.block_tables(), p.seq_lens(), 64, 0.125, kv_layout="NHD",
                q_len_per_req=q_len, cp_world=world, cp_rank=rank, causal_seqlens_kv_global=total, return_lse=True,
            )
        )  # fmt: skip
    v, s = (torch.stack(parts, 1) for parts in zip(*states))
    want = [attention(q[b * q_len : (b + 1) * q_len], *kv, causal=True)[0] for b, kv in enumerate(whole)]
    assert_close(merge_states(v, s)[0], torch.cat(want), tolerance=(4e-3, 2e-3))


@pytest.mark.parametrize("q_len", [1, Q_LEN])
@pytest.mark.parametrize(
    ("kv_layout", "form"), [("HND", "tuple"), ("NHD", "tuple"), ("HND", "fused"), ("NHD", "fused")]
)
def test_pages_of_each_kv_head(kv_layout: str, form: str, q_len: int, device: str) -> None:
    p = paged([160, 90], heads=(8, 2), kv_layout=kv_layout, form=form, device=device)
    q = rand(2 * q_len, 8, 64, dtype=torch.float16, device=device)
    chosen = [[[0, 3, 7], [1, 4]], [[2, 5, 9], [0, 3]]]  # pages of each head and request, in order; all full
    lens, page = torch.tensor([48, 32], dtype=torch.int32, device=device), 16
    tables = torch.full((2, 2, 4), -1, dtype=torch.int32)
    want = torch.empty(2 * q_len, 8, 64, dtype=torch.float64)
    for head in range(2):
        for b in range(2):
            own = p.indices[int(p.indptr[b]) : int(p.indptr[b + 1])].cpu()
            tables[head, b, : len(chosen[head][b])] = own[chosen[head][b]]
            rows = slice(b * q_len, (b + 1) * q_len)
            keys = [torch.cat([x[b][i * page : (i + 1) * page, head : head + 1] for i in chosen[head][b]])
                    for x in (p.k, p.v)]  # fmt: skip
            want[rows, 4 * head : 4 * head + 4] = attention(q[rows, 4 * head : 4 * head + 4], *keys, causal=True)[0]
    arguments: dict[str, Any] = {
        "kv_layout": kv_layout, "q_len_per_req": q_len, "enable_block_sparse_attention": True, "bmm1_scale": 0.125,
    }  # fmt: skip
    for seq_lens in (lens, lens.expand(2, 2)):
        out = trtllm_batch_decode_with_kv_cache(
            q, p.cache, workspace(device, 8 << 20), tables.to(device), seq_lens, 64, **arguments
        )
        assert_close(out, want)
    with pytest.raises(ValueError, match="block_tables: "):
        trtllm_batch_decode_with_kv_cache(q, p.cache, workspace(device, 8 << 20), tables[0].to(device), lens, 64,
                                          **arguments)  # fmt: skip
    with pytest.raises(NotImplementedError, match="enable_block_sparse_attention"):
        trtllm_batch_decode_with_kv_cache(q, p.cache, workspace(device, 8 << 20), tables.to(device), lens, 64,
                                          **arguments, mask=torch.zeros(2, 1, 2, dtype=torch.uint16))  # fmt: skip


def test_ranks_are_checked() -> None:
    p = paged([40, 20], heads=(8, 2), q_len=2)
    call = (p.q, p.cache, workspace("cpu", 8 << 20), p.block_tables(), p.seq_lens(), 64)
    with pytest.raises(ValueError, match="cp_rank"):
        trtllm_batch_decode_with_kv_cache(*call, kv_layout="NHD", q_len_per_req=2, cp_world=2, cp_rank=2)
    with pytest.raises(ValueError, match="causal_seqlens_kv_global"):
        trtllm_batch_decode_with_kv_cache(*call, kv_layout="NHD", q_len_per_req=2, cp_world=2)
    with pytest.raises(NotImplementedError, match="cp_world"):
        trtllm_batch_decode_with_kv_cache(*call, kv_layout="NHD", q_len_per_req=2, cp_world=2, window_left=3)
    both: dict[str, Any] = {"enable_block_sparse_attention": True, "cp_world": 2, "kv_layout": "NHD"}
    both["causal_seqlens_kv_global"] = p.seq_lens()
    with pytest.raises(NotImplementedError, match="one of both for q_len_per_req > 1; got \\(True, 2\\)"):
        trtllm_batch_decode_with_kv_cache(*call, **both, q_len_per_req=2)
