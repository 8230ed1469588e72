"""Decode over block tables: trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache and xqa against fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import assert_close, assert_guards, guarded, rand
from families.paged import Paged, paged, split_tables
from families.prefill_batch import batch
from fi_core.decode import trtllm_batch_decode_with_kv_cache, xqa, xqa_batch_decode_with_kv_cache
from fi_core.prefill import trtllm_batch_context_with_kv_cache

LENGTHS = (300, 1, 0, 65, 1000, 16)
FUNCTIONS = [trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache]


def workspace(device: str, megabytes: int = 8) -> torch.Tensor:
    return torch.full((megabytes << 20,), 0xFF, dtype=torch.uint8, device=device)


def scale_of(p: Paged) -> float:
    return float(p.q.shape[2] ** -0.5)


def arguments(p: Paged, **more: Any) -> dict[str, Any]:
    return {
        "query": p.q, "kv_cache": p.cache, "workspace_buffer": workspace(str(p.q.device)),
        "block_tables": p.block_tables(), "seq_lens": p.seq_lens(), "max_seq_len": 1 << 20, "bmm1_scale": scale_of(p),
        "kv_layout": p.kv_layout, "q_len_per_req": p.q_len,
    } | more  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["tuple", "fused"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_plain(function: Any, kv_layout: str, form: str, page_size: int, device: str) -> None:
    p = paged(LENGTHS, heads=(6, 2), kv_layout=kv_layout, form=form, page_size=page_size, device=device)
    assert_close(function(**arguments(p)), p.expected()[0])


def test_default_layouts_differ(device: str) -> None:
    for function, layout in zip(FUNCTIONS, ("HND", "NHD")):
        p = paged(LENGTHS, kv_layout=layout, page_size=4, device=device)
        given = arguments(p)
        del given["kv_layout"]
        assert_close(function(**given), p.expected()[0])


@pytest.mark.parametrize("q_len", [1, 4])
def test_soft_cap(q_len: int, device: str) -> None:
    """Of decode, of decode with several tokens a request, and of prefill over the same pages."""
    p = paged(tuple(max(n, q_len) for n in LENGTHS), heads=(6, 2), kv_layout="HND", q_len=q_len, device=device)
    given, want = arguments(p, logits_soft_cap=0.5), p.expected(logits_soft_cap=0.5)[0]
    assert_close(trtllm_batch_decode_with_kv_cache(**given), want)
    starts = torch.arange(len(p.lengths) + 1, dtype=torch.int32, device=device) * q_len
    more = {"max_q_len": q_len, "cum_seq_lens_q": starts}
    assert_close(trtllm_batch_decode_with_kv_cache(**given | more | {"q_len_per_req": None}), want)
    del given["q_len_per_req"], given["max_seq_len"]
    shape = {"max_kv_len": 1000, "bmm2_scale": 1.0, "batch_size": len(p.lengths), "cum_seq_lens_kv": starts}
    assert_close(trtllm_batch_context_with_kv_cache(**given, **more, **shape), want)


@pytest.mark.parametrize("tensor", [False, True])
def test_scales_are_all_there_is(tensor: bool, device: str) -> None:
    """The scales are the only factors, without 1 / sqrt(head_dim); numbers or device tensors."""
    p = paged(LENGTHS, dim=64, kv_dtype=torch.float8_e4m3fn, device=device)
    assert_close(trtllm_batch_decode_with_kv_cache(**arguments(p, bmm1_scale=1.0)), p.expected(sm_scale=1.0)[0])
    one, two = (torch.tensor([x], device=device) if tensor else x for x in (0.07, 1.9))
    want, want_lse = p.expected(sm_scale=0.07, v_scale=1.9)
    out, lse = trtllm_batch_decode_with_kv_cache(**arguments(p, bmm1_scale=one, bmm2_scale=two, return_lse=True))
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=(1e-4, 1e-4))
    if isinstance(one, torch.Tensor):
        log2 = one * math.log2(math.e)
        other = trtllm_batch_decode_with_kv_cache(**arguments(p, bmm1_scale=9.0, bmm1_scale_log2=log2, bmm2_scale=two))
        assert_close(other, want)
    for function in FUNCTIONS:  # the caller has divided bmm2_scale by o_scale
        assert torch.equal(function(**arguments(p, bmm1_scale=one, bmm2_scale=two, o_scale=3.0)), out)


@pytest.mark.parametrize("window_left", [0, 40])
def test_window_and_sinks(window_left: int, device: str) -> None:
    p = paged(LENGTHS, heads=(6, 2), device=device)
    sinks = rand(6, dtype=torch.float32, device=device, scale=3.0)
    want, _ = p.expected(window_left=window_left, sinks=sinks)
    for function in FUNCTIONS:
        assert_close(function(**arguments(p, window_left=window_left, sinks=sinks)), want)


@pytest.mark.parametrize("q_len", [2, 4, 33])
def test_several_query_tokens_are_causal(q_len: int, device: str) -> None:
    p = paged([q_len, 64, 65, 300], heads=(8, 2), q_len=q_len, device=device)
    for function in FUNCTIONS:
        assert_close(function(**arguments(p)), p.expected()[0])


@pytest.mark.parametrize(
    ("page_size", "dim", "q_type", "kv_type", "lengths"),
    [
        (16, 128, torch.bfloat16, torch.bfloat16, (300, 20, 65)),  # small batches
        (16, 128, torch.bfloat16, torch.bfloat16, (300, 20, 65) * 50),
        (1, 64, torch.float16, torch.float8_e4m3fn, (300, 20, 65)),
        (1, 64, torch.float16, torch.float16, (300, 20, 65) * 50),
        (4, 40, torch.float32, torch.float32, (300, 20, 65)),
    ],
)
def test_keys_and_values_with_page_tables_of_their_own(
    page_size: int, dim: int, q_type: torch.dtype, kv_type: torch.dtype, lengths: tuple[int, ...], device: str
) -> None:
    p = paged(
        lengths, heads=(8, 2), dim=dim, page_size=page_size, kv_layout="HND", dtype=q_type, kv_dtype=kv_type,
        device=device,
    )  # fmt: skip
    cache, tables = split_tables(p.cache, p.block_tables())
    want = p.expected()[0]
    # Two tables of each request, and all tables of K before those of V.
    for table in (tables, tables.transpose(0, 1).contiguous().transpose(0, 1)):
        given = arguments(p, kv_cache=cache, block_tables=table, uses_shared_paged_kv_idx=False)
        assert_close(trtllm_batch_decode_with_kv_cache(**given), want)
    same = p.block_tables()[:, None].expand(-1, 2, -1)
    given = arguments(p, block_tables=same, uses_shared_paged_kv_idx=False)
    assert_close(trtllm_batch_decode_with_kv_cache(**given), want)


def tree(batch_size: int, q_len: int, most: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random draft trees, where a token attends to itself and some before it: as booleans, and packed for `most`."""
    generator = torch.Generator().manual_seed(q_len)
    seen = torch.rand(batch_size, q_len, q_len, generator=generator) < 0.5
    seen = seen.tril() | torch.eye(q_len, dtype=torch.bool)
    words = -(-max(q_len, most) // 32) * 2
    bits = torch.zeros(batch_size, q_len, words * 16, dtype=torch.int64)
    bits[..., :q_len] = seen.long()
    packed = (bits.view(batch_size, q_len, words, 16) << torch.arange(16)).sum(-1)
    return seen, packed.to(torch.int32).to(torch.uint16)


@pytest.mark.parametrize("q_len", [3, 16, 40])
def test_draft_trees(q_len: int, device: str) -> None:
    p = paged([q_len, 64, 65, 300], heads=(8, 2), q_len=q_len, device=device)
    seen, packed = tree(4, q_len)
    want = []
    for b, (k, v) in enumerate(zip(p.k, p.v)):
        mask = torch.ones(q_len, len(k), dtype=torch.bool)
        mask[:, len(k) - q_len :] = seen[b]
        want.append(attention(p.q[b * q_len : (b + 1) * q_len], k, v, custom_mask=mask)[0])
    assert (torch.cat(want) - p.expected()[0]).abs().max() > 0.05
    for function in FUNCTIONS:
        assert_close(function(**arguments(p, mask=packed.to(device))), torch.cat(want))


@pytest.mark.parametrize("most", [5, 40])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_draft_trees_of_several_lengths(most: int, kv_dtype: torch.dtype, device: str) -> None:
    """Mask rows cover the query tokens of their own request; all tokens attend to the keys before."""
    lens = [(3, 300), (1, 64), (0, 17), (most, most), (2, 130)]
    b = batch(lens, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device)
    masks, packed = [], []
    for qo, kv in lens:
        seen, bits = tree(1, qo, most)
        masks.append(torch.cat([torch.ones(qo, kv - qo, dtype=torch.bool), seen[0]], 1))
        packed.append(bits[0].int())
    mask = torch.cat(packed).to(torch.uint16).to(device)
    sinks = rand(8, dtype=torch.float32, device=device)
    given: dict[str, Any] = {
        "query": b.q, "kv_cache": b.cache, "workspace_buffer": workspace(device), "seq_lens": b.pool.seq_lens(),
        "block_tables": b.pool.block_tables(), "max_seq_len": 300, "kv_layout": "NHD", "bmm1_scale": 0.1,
        "sinks": sinks, "mask": mask,
    }  # fmt: skip
    want = b.expected(masks, sm_scale=0.1, sinks=sinks)[0]
    assert (want - b.expected(causal=True, sm_scale=0.1, sinks=sinks)[0]).abs().max() > 0.05
    starts = b.qo_indptr.to(torch.uint32)
    assert_close(xqa_batch_decode_with_kv_cache(**given, q_len_per_req=most, q_cu_seq_lens=starts), want)
    assert_close(xqa_batch_decode_with_kv_cache(**given, q_cu_seq_lens=starts), want)
    ragged = {"q_len_per_req": None, "cum_seq_lens_q": starts}
    out = trtllm_batch_decode_with_kv_cache(**given, **ragged, max_q_len=most)
    assert isinstance(out, torch.Tensor)
    assert_close(out, want)
    output = torch.empty_like(b.q)
    xqa(
        b.q, *b.cache, given["block_tables"], given["seq_lens"], output, workspace(device), None, 2, 16,
        sinks.view(2, 4), 0.1 * 128**0.5, q_seq_len=most, mask=mask, q_cu_seq_lens=starts,
    )  # fmt: skip
    assert torch.equal(output, out)
    unknown, lse = trtllm_batch_decode_with_kv_cache(**given, **ragged, return_lse=True)
    assert_close(unknown, want)
    again, same_lse = trtllm_batch_decode_with_kv_cache(**given, **ragged, max_q_len=most, return_lse=True)
    assert torch.equal(again, out)
    assert_close(same_lse, lse.double(), tolerance=(1e-3, 1e-3))
    with pytest.raises(ValueError, match=r"mask: uint16 \[tokens, ceil\(max_q_len / 32\) \* 2\] is required"):
        trtllm_batch_decode_with_kv_cache(**given, **ragged, max_q_len=70)
    narrow = given | {"mask": mask[:, :1].contiguous(), "sinks": None}
    few = trtllm_batch_decode_with_kv_cache(**narrow, **ragged)
    assert bool(few[-2 - most : -2].any()) == (most <= 16), "rows beyond the bits of the mask see nothing"


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("tensor", [False, True])
def test_xqa(q_len: int, tensor: bool, device: str) -> None:
    p = paged([64, 7, 300], heads=(8, 2), dim=128, q_len=q_len, kv_dtype=torch.float8_e4m3fn, device=device)
    sinks = rand(2, 4, dtype=torch.float32, device=device, scale=2.0)
    shape = (3, 1, 8, 128) if q_len == 1 else (3, 1, q_len, 8, 128)
    output = guarded(shape, torch.float16, device)
    q_scale, kv_scale = (torch.tensor([x], device=device) if tensor else x for x in (0.5, 1.3))
    assert isinstance(p.cache, tuple)
    result = xqa(
        p.q.view(shape), *p.cache, p.block_tables(), p.seq_lens().view(3, 1).to(torch.uint32), output,
        workspace(device), None, 2, 16, sinks, q_scale, kv_scale, 50, rcp_out_scale=0.5, q_seq_len=q_len,
    )  # fmt: skip
    assert result is None
    want, _ = p.expected(k_scale=0.5 * 1.3, v_scale=1.3 * 0.5, window_left=49, sinks=sinks.view(-1))
    assert_close(output.view(-1, 8, 128), want)
    assert_guards(output)
    assert fi_core.xqa is xqa


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_an_output_of_8_bits(kv_dtype: torch.dtype | None, device: str) -> None:
    """The output is rounded to e4m3, and saturates; the query has 16 bits."""
    e4m3 = torch.float8_e4m3fn
    p = paged([64, 7, 300], heads=(8, 2), dim=128, q_len=2, kv_dtype=kv_dtype, device=device)
    given = arguments(p, out=torch.empty(p.q.shape, dtype=e4m3, device=device), bmm2_scale=2.0)
    out = xqa_batch_decode_with_kv_cache(**given)
    assert out.dtype is e4m3
    assert_close(out.float(), p.expected(v_scale=2.0)[0], tolerance=(0.07, 0.01))
    large = xqa_batch_decode_with_kv_cache(**{**given, "bmm2_scale": 1e6})
    assert float(large.float().abs().max()) == 448.0


def test_keys_that_are_values_too(device: str) -> None:
    p = paged([70, 16], kv_layout="HND", form="fused", device=device)
    assert isinstance(p.cache, torch.Tensor)
    same = Paged(**{**vars(p), "v": p.k, "cache": p.cache[:, :1]})
    assert_close(trtllm_batch_decode_with_kv_cache(**arguments(same)), same.expected()[0])


def test_tables_and_lengths_as_engines_have_them(device: str) -> None:
    """A block table that is a slice of a wider one with invalid other entries; lengths of any integer dtype."""
    p = paged(LENGTHS, device=device)
    table = p.block_tables()
    wide = torch.full((len(LENGTHS), 300), 1 << 30, dtype=torch.int32, device=device)
    wide[:, : table.shape[1]] = table
    want = p.expected()[0]
    for dtype in (torch.int32, torch.uint32, torch.int64):
        given = arguments(p, block_tables=wide[:, : table.shape[1]], seq_lens=p.seq_lens().to(dtype))
        assert_close(trtllm_batch_decode_with_kv_cache(**given), want)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float8_e4m3fn)])
def test_requests_may_differ_in_query_tokens(
    dtypes: tuple[torch.dtype, torch.dtype], kv_layout: str, device: str
) -> None:
    """Verification of drafts of several lengths: each token attends to the keys up to its own position."""
    lens = [(3, 300), (1, 64), (0, 17), (5, 5), (2, 130)]
    b = batch(lens, heads=(8, 2), dims=(128, 128), dtype=dtypes[0], kv_dtype=dtypes[1], kv_layout=kv_layout,
              device=device)  # fmt: skip
    given: dict[str, Any] = {
        "query": b.q, "kv_cache": b.cache, "workspace_buffer": workspace(device), "seq_lens": b.pool.seq_lens(),
        "block_tables": b.pool.block_tables(), "max_seq_len": 300, "kv_layout": kv_layout, "q_len_per_req": None,
        "bmm1_scale": 0.1, "bmm2_scale": 0.5,
    }  # fmt: skip
    want, want_lse = b.expected(causal=True, sm_scale=0.1, v_scale=0.5)
    out, lse = trtllm_batch_decode_with_kv_cache(**given, cum_seq_lens_q=b.qo_indptr, max_q_len=5, return_lse=True)
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=(3e-4, 3e-4))
    scale = torch.tensor([0.1 / math.log(2)], device=device)
    more: dict[str, Any] = {"window_left": 20, "sinks": rand(8, dtype=torch.float32, device=device)}
    got = trtllm_batch_decode_with_kv_cache(**given, cum_seq_lens_q=b.qo_indptr, bmm1_scale_log2=scale, **more)
    assert isinstance(got, torch.Tensor)
    assert_close(got, b.expected(causal=True, sm_scale=0.1, v_scale=0.5, **more)[0])
    buffer = torch.empty_like(b.q)
    assert xqa_batch_decode_with_kv_cache(**given, q_cu_seq_lens=b.qo_indptr, out=buffer) is buffer
    assert_close(buffer, want)
    for shape in (b.q.shape, (1, 1, *b.q.shape)):
        output = guarded(shape, b.q.dtype, device)
        xqa(
            b.q.view(shape), *b.cache, b.pool.block_tables(), b.pool.seq_lens().view(-1, 1), output, workspace(device),
            None, 2, 16, more["sinks"].view(2, 4), 0.1 * 128**0.5 / 0.5, 0.5, 21, kv_layout,
            q_cu_seq_lens=b.qo_indptr,
        )  # fmt: skip
        assert_close(output.view(b.q.shape), b.expected(causal=True, sm_scale=0.1, v_scale=0.5, **more)[0])
        assert_guards(output)


def test_outputs(device: str) -> None:
    p = paged(LENGTHS, device=device)
    want, want_lse = p.expected()
    out, lse = guarded(p.q.shape, torch.bfloat16, device), guarded(p.q.shape[:2], torch.float32, device)
    given = trtllm_batch_decode_with_kv_cache(**arguments(p, out=out, lse=lse, return_lse=True))
    assert given[0] is out and given[1] is lse
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=(1e-4, 1e-4))
    assert_guards(out)
    for dtype in (torch.bfloat16, "bfloat16"):
        assert trtllm_batch_decode_with_kv_cache(**arguments(p, out_dtype=dtype)).dtype == torch.bfloat16  # type: ignore[union-attr]


def test_engine_keywords(device: str) -> None:
    """Accepts the keywords of vLLM and SGLang."""
    p = paged(LENGTHS, kv_layout="HND", device=device)
    out = torch.empty_like(p.q)
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    nothing = dict.fromkeys(("sinks", "o_sf_scale", "cum_seq_lens_q", "kv_cache_sf", "lse"))
    trtllm_batch_decode_with_kv_cache(
        **arguments(p, window_left=-1, out=out, backend="auto", max_q_len=None, return_lse=False, out_dtype=None,
                    skip_softmax_threshold_scale_factor=None, multi_ctas_kv_counter_buffer=counters, **nothing)
    )  # fmt: skip
    assert_close(out, p.expected()[0])
    out.zero_()
    xqa_batch_decode_with_kv_cache(**arguments(p, window_left=-1, out=out, sinks=None, mask=None, q_cu_seq_lens=None))
    assert_close(out, p.expected()[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_request_has_the_same_bits_in_any_batch(function: Any, device: str) -> None:
    """Without split-KV a request has the same bits alone and in any batch."""
    p = paged([3000, 1, 700, 65, 0], heads=(8, 2), device=device)

    def run(part: Paged) -> Any:
        return function(**arguments(part, disable_split_kv=True))

    whole = run(p)
    assert_close(whole, p.expected()[0])
    for requests in ([0], [3], [2, 0, 4, 2], [4, 3, 2, 1, 0] * 20):
        assert torch.equal(run(p.only(requests)), whole[requests])
    out = torch.empty_like(p.q).unsqueeze(1)
    xqa(
        p.q.unsqueeze(1), *p.cache, p.block_tables(), p.seq_lens(), out, workspace(device), None, 2, 16,
        disable_split_kv=True,
    )  # fmt: skip
    assert_close(out.squeeze(1), p.expected()[0])


def test_requests_of_several_tokens_have_the_same_bits_in_any_batch(device: str) -> None:
    """For any number of requests: with more than one wave another kernel would run."""
    b = batch([(8, 900), (5, 70), (8, 333)], heads=(8, 2), dims=(128, 128), device=device)
    starts, tables, lens = b.qo_indptr.tolist(), b.pool.block_tables(), b.pool.seq_lens()

    def run(requests: list[int]) -> torch.Tensor:
        rows = [b.q[starts[i] : starts[i + 1]] for i in requests]
        ends = torch.tensor([0, *(len(x) for x in rows)]).cumsum(0).int()
        out = trtllm_batch_decode_with_kv_cache(
            torch.cat(rows), b.cache, workspace(device), tables[requests], lens[requests], 1000, 0.1, kv_layout="NHD",
            q_len_per_req=None, cum_seq_lens_q=ends.to(device), max_q_len=8, disable_split_kv=True,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    whole = run([0, 1, 2])
    assert_close(whole, b.expected(causal=True, sm_scale=0.1)[0])
    alone = [run([i]) for i in range(3)]
    assert torch.equal(torch.cat(alone), whole)
    assert torch.equal(run([2, 1, 0] * 20), torch.cat([alone[2], alone[1], alone[0]] * 20))


def test_a_small_workspace_does_for_any_length(device: str) -> None:
    p = paged([5000], heads=(8, 1), dim=128, device=device)
    given = arguments(p, workspace_buffer=workspace(device, 5))
    assert_close(trtllm_batch_decode_with_kv_cache(**given), p.expected()[0])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"backend": "fa2"}, KeyError, "backend: allowed are auto, trtllm-gen, xqa; got 'fa2'"),
        ({"kv_layout": "DHN"}, KeyError, "kv_layout"),
        ({"out_dtype": torch.float32}, ValueError, "out_dtype: the query's .* got torch.float32"),
        ({"o_sf_scale": 1.0}, NotImplementedError, "o_sf_scale"),
        ({"uses_shared_paged_kv_idx": False}, ValueError, r"block_tables: .*\[batch_size, 2, max_pages\] with uses_sh"),
        (
            {"uses_shared_paged_kv_idx": False, "enable_block_sparse_attention": True},
            NotImplementedError,
            "uses_shared_paged_kv_idx: .* one table",
        ),
        ({"enable_block_sparse_attention": True}, ValueError, "block_tables: .num_kv_heads = 2, batch_size, max_pages"),
        ({"kv_cache_sf": torch.zeros(3)}, ValueError, "kv_cache_sf: kv_cache of uint8, which is NVFP4, is required"),
        ({"out_dtype": "nvfp4"}, NotImplementedError, "out_dtype: not supported, NVFP4 output .*; got 'nvfp4'"),
        ({"o_sf_vec_size": 16}, NotImplementedError, "o_sf_vec_size: .* 16-bit out_dtype; got 16"),
        ({"out": torch.zeros(2, 4, 64)}, ValueError, "out_dtype"),
        ({"out": torch.zeros(2, 4, 32).half()}, ValueError, "out: shape must be"),
        ({"lse": torch.zeros(2, 3)}, ValueError, "lse: shape must be"),
        ({"block_tables": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_tables: .batch_size, max_pages."),
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "block_tables must be int32"),
        ({"block_tables": torch.zeros(3, 3, dtype=torch.int32)}, ValueError, "query: batch_size . q_len_per_req rows"),
        ({"seq_lens": torch.zeros(2)}, TypeError, "seq_lens must be int32 or uint32 or int64"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, "one of seq_lens .3."),
        ({"q_len_per_req": 2}, ValueError, "got 2 rows for q_len_per_req = 2"),
        ({"workspace_buffer": torch.zeros(100, dtype=torch.uint8)}, ValueError, "workspace_buffer: too small for 2"),
        ({"query": torch.zeros(2, 5, 64).half()}, ValueError, "query: a multiple of the cache's 2 heads"),
        ({"sinks": torch.zeros(2)}, ValueError, "sinks must have shape"),
        ({"mask": torch.zeros(2, 1, 4, dtype=torch.uint16)}, ValueError, "mask must have shape"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trtllm_batch_decode_with_kv_cache(**arguments(paged([20, 9]), **change))


@pytest.mark.usefixtures("checked")
def test_page_ids_are_checked(device: str) -> None:
    p = paged([40, 9], device=device)
    table = p.block_tables()
    trtllm_batch_decode_with_kv_cache(**arguments(p, block_tables=table))  # unused entries are -1
    table[1, 0] = 7
    with pytest.raises(ValueError, match="must name pages of the cache, 0 to 6; got 7 at 4, of request 1"):
        trtllm_batch_decode_with_kv_cache(**arguments(p, block_tables=table))


def test_xqa_refusals() -> None:
    p = paged([20, 9])
    assert isinstance(p.cache, tuple)
    q, out = p.q.view(2, 1, 4, 64), torch.empty(2, 1, 4, 64).half()

    def call(**change: Any) -> None:
        given: dict[str, Any] = {"num_kv_heads": 2, "page_size": 16, "output": out} | change
        xqa(q, *p.cache, p.block_tables(), p.seq_lens(), workspace_buffer=workspace("cpu"), semaphores=None, **given)

    call()
    assert_close(out.view(2, 4, 64), p.expected()[0])
    with pytest.raises(ValueError, match="k_cache: pages of page_size = 32"):
        call(page_size=32)
    with pytest.raises(ValueError, match="output: shape must be"):
        call(output=out[:1])
    with pytest.raises(ValueError, match="block_tables: one row, and one of seq_lens, for each of the 3 requests"):
        call(q_cu_seq_lens=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="block_tables: one row, and one of seq_lens, for each of the 3 requests"):
        call(q_cu_seq_lens=torch.zeros(4, dtype=torch.int32), q_seq_len=2)


def test_trace() -> None:
    p = paged([20, 9], kv_layout="HND")
    given = arguments(p)
    definition = trtllm_batch_decode_with_kv_cache.fi_trace(**given)  # type: ignore[attr-defined]
    assert definition["name"] == "gqa_paged_decode_tables_h4_kv2_d64_ps16"
    space: dict[str, Any] = {}
    exec(definition["reference"], space)
    got = trtllm_batch_decode_with_kv_cache(**given, window_left=5, bmm2_scale=2.0)
    assert isinstance(p.cache, tuple) and isinstance(got, torch.Tensor)
    clean = tuple(x.nan_to_num(0) for x in p.cache)
    want = space["_tables_reference"](
        p.q, *clean, given["block_tables"], given["seq_lens"], scale_of(p), 2.0, window_left=5
    )
    assert_close(got, want)
