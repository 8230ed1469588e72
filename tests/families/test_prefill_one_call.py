"""Batch prefill in one call, without a plan: block tables, ragged keys, and the layouts of FMHA v2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, rand
from families.paged import split_tables
from families.prefill_batch import batch, workspace
from families.test_batch_prefill import with_sinks
from fi_core.attention.forms.tables_prefill import attend_once
from fi_core.attention.ops import prefill as ops
from fi_core.prefill import (
    ContextTablesPlan,
    trtllm_batch_context_with_kv_cache,
    trtllm_ragged_attention_deepseek,
)

LSE = (2e-4, 2e-4)
LENS = [(17, 90), (0, 9), (3, 0), (70, 70), (1, 130)]


def test_the_first_layer_plans_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer plans unless one before it had the same tables and window; a new plan sees new lengths."""
    b, planned, own = batch(LENS, dtype=torch.bfloat16, device=device, form="fused"), [], ops.prefill_plan

    def counted(*given: Any, **named: Any) -> Any:
        planned.append(named["window_left"])
        return own(*given, **named)

    monkeypatch.setattr(ops, "prefill_plan", counted)
    lengths, starts = b.pool.seq_lens().int(), b.qo_indptr.int()

    def attend(step: Any, window_left: int = -1) -> torch.Tensor:
        out: torch.Tensor = trtllm_batch_context_with_kv_cache(
            b.q, b.cache, workspace(device), b.pool.block_tables(), lengths, 70, 130, 0.05, 1.0, len(LENS),
            starts, b.kv_indptr, window_left=window_left, kv_layout=b.pool.kv_layout, plan=step,
        )  # fmt: skip
        return out

    step = ContextTablesPlan()
    for _ in range(2):
        for window_left in (-1, 20):
            got = attend(step, window_left)
            assert_close(got, b.expected(causal=True, sm_scale=0.05, window_left=window_left)[0])
    assert planned == [-1, 20]
    assert torch.equal(attend(ContextTablesPlan()), attend(None)) and len(planned) == 4


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_block_tables(kv_layout: str, device: str) -> None:
    b = batch(LENS, dims=(128, 128), kv_layout=kv_layout, form="fused", dtype=torch.bfloat16, device=device)
    sinks = rand(4, dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "query": b.q, "kv_cache": b.cache, "workspace_buffer": workspace(device), "block_tables": b.pool.block_tables(),
        "seq_lens": b.pool.seq_lens(), "max_q_len": 70, "max_kv_len": 130, "batch_size": 5, "kv_layout": kv_layout,
        "cum_seq_lens_q": b.qo_indptr, "cum_seq_lens_kv": b.kv_indptr,
    }  # fmt: skip
    out = trtllm_batch_context_with_kv_cache(bmm1_scale=0.05, bmm2_scale=0.7, **common)
    assert_close(out, b.expected(causal=True, sm_scale=0.05, v_scale=0.7)[0])
    one, two = (torch.tensor([x], device=device) for x in (0.05, 0.7))
    lse = torch.empty(b.q.shape[:2], device=device)
    result = torch.empty_like(b.q)
    got = trtllm_batch_context_with_kv_cache(
        bmm1_scale=one, bmm2_scale=two, causal=False, window_left=30, out=result, lse=lse, return_lse=True, **common
    )
    assert got[0] is result and got[1] is lse
    want, want_lse = b.expected(sm_scale=0.05, v_scale=0.7, window_left=30)
    assert_close(result, want)
    assert_close(lse, want_lse, tolerance=LSE)
    out = trtllm_batch_context_with_kv_cache(bmm1_scale=0.05, bmm2_scale=1.0, sinks=sinks, **common)
    assert_close(out, with_sinks(b, sinks, causal=True, sm_scale=0.05)[0])
    wide = torch.nn.functional.pad(b.pool.block_tables(), (0, 5), value=-7)
    out = trtllm_batch_context_with_kv_cache(bmm1_scale=0.05, bmm2_scale=1.0, **common | {"block_tables": wide[:, :-5]})
    assert_close(out, b.expected(causal=True, sm_scale=0.05)[0])
    for change, error, words in (
        ({"kv_cache_sf": one}, ValueError, "kv_cache_sf: kv_cache of uint8"),
        ({"backend": "other"}, KeyError, "backend"),
        ({"batch_size": 4}, ValueError, r"cum_seq_lens_q: batch_size \+ 1 = 5 elements are required; got 6"),
        ({"seq_lens": b.pool.seq_lens()[1:]}, ValueError, "block_tables: one row, and one of seq_lens"),
        ({"out": torch.empty(3, device=device)}, ValueError, "out: shape"),
    ):
        with pytest.raises(error, match=words):
            trtllm_batch_context_with_kv_cache(bmm1_scale=1.0, bmm2_scale=1.0, **common | change)


@pytest.mark.parametrize(
    ("page_size", "dims", "q_type", "kv_type"),
    [
        (16, (128, 128), torch.bfloat16, torch.bfloat16),
        (1, (192, 128), torch.float16, torch.float16),
        (4, (128, 128), torch.bfloat16, torch.float8_e4m3fn),
        (16, (64, 64), torch.float8_e4m3fn, torch.float8_e4m3fn),
        (1, (128, 128), torch.float8_e4m3fn, torch.float8_e4m3fn),
        (8, (80, 80), torch.float16, torch.float16),
    ],
)
def test_keys_and_values_with_page_tables_of_their_own(
    page_size: int, dims: tuple[int, int], q_type: torch.dtype, kv_type: torch.dtype, device: str
) -> None:
    b = batch(LENS, dims=dims, page_size=page_size, kv_layout="HND", dtype=q_type, kv_dtype=kv_type, device=device)
    cache, tables = split_tables(b.cache, b.pool.block_tables())
    out = trtllm_batch_context_with_kv_cache(
        b.q, cache, workspace(device), tables, b.pool.seq_lens(), 70, 130, 0.05, 1.0, 5, b.qo_indptr, b.kv_indptr,
        out_dtype=torch.bfloat16 if q_type.itemsize == 1 else None, uses_shared_paged_kv_idx=False,
    )  # fmt: skip
    tolerance = (0.05, 0.03) if q_type.itemsize == 1 else None
    assert_close(out, b.expected(causal=True, sm_scale=0.05)[0], **({"tolerance": tolerance} if tolerance else {}))


@pytest.mark.usefixtures("checked")
def test_block_tables_are_checked(device: str) -> None:
    b = batch(LENS, kv_layout="HND", device=device)
    tables = b.pool.block_tables()

    def call() -> Any:
        return trtllm_batch_context_with_kv_cache(
            b.q, b.cache, workspace(device), tables, b.pool.seq_lens(), 70, 130, 0.1, 1.0, 5, b.qo_indptr, b.kv_indptr
        )

    assert_close(call(), b.expected(causal=True, sm_scale=0.1)[0])
    tables[0, 2] = 1000
    with pytest.raises(ValueError, match="the page table, must name pages of the cache, 0 to"):
        call()
    k, v = b.ragged()
    rows, keys = b.q.shape[0], k.shape[0]
    for qo, kv, words in (
        (b.qo_indptr + 1, b.kv_indptr, f"query must have the rows .*; got {rows} rows"),
        (b.qo_indptr, b.kv_indptr + 9, f"key must have the tokens .*; got {keys} tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            trtllm_ragged_attention_deepseek(
                b.q, k, v, workspace(device), b.pool.seq_lens(), 70, 130, 0.1, 1.0, 1.0, 5, -1, qo, kv, None, True,
                False,
            )  # fmt: skip


def test_contiguous_keys_in_one_call(device: str) -> None:
    b = batch(LENS, heads=(4, 4), dims=(192, 128), dtype=torch.bfloat16, device=device)
    k, v = b.ragged()
    out, lse = trtllm_ragged_attention_deepseek(
        query=b.q, key=k, value=v, workspace_buffer=workspace(device), seq_lens=b.pool.seq_lens(), max_q_len=70,
        max_kv_len=130, bmm1_scale=0.1, bmm2_scale=1.0, o_sf_scale=1.0, batch_size=5, window_left=-1,
        cum_seq_lens_q=b.qo_indptr, cum_seq_lens_kv=b.kv_indptr, enable_pdl=False, is_causal=True, return_lse=True,
    )  # fmt: skip
    want, want_lse = b.expected(causal=True, sm_scale=0.1)
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=LSE)
    with pytest.raises(NotImplementedError, match="sage_attn_sfs: not supported"):
        trtllm_ragged_attention_deepseek(
            b.q, k, v, workspace(device), b.pool.seq_lens(), 70, 130, 0.1, 1.0, 1.0, 5, -1, b.qo_indptr, b.kv_indptr,
            None, True, False, sage_attn_sfs=(torch.ones(3), None, None, None),
        )  # fmt: skip
    by_position = trtllm_ragged_attention_deepseek(  # with FlashInfer's defaults, in its order
        b.q, k, v, workspace(device), b.pool.seq_lens(), 70, 130, 0.1, 1.0, 1.0, 5, -1, b.qo_indptr, b.kv_indptr,
        None, True, False, None, None, None, None, (None,) * 4, (0,) * 4, "trtllm-gen", None, None, True, None, None,
    )  # fmt: skip
    assert torch.equal(by_position, out)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_layouts_of_fmha(kv_layout: str, device: str) -> None:
    b = batch([(17, 17), (0, 0), (70, 70)], heads=(4, 4), dims=(64, 64), kv_layout=kv_layout, device=device)
    k, v = b.ragged()
    k, v = k[: b.q.shape[0]], v[: b.q.shape[0]]  # without the rows of no request
    paged = f"Q_PAGED_KV_{kv_layout}"
    forms = {
        "PACKED_QKV": torch.stack([b.q, k, v], 1),
        "CONTIGUOUS_Q_KV": (b.q, torch.stack([k, v], 1)),
        "SEPARATE_Q_K_V": (b.q, k, v),
        paged: (b.q, b.cache),
    }
    for layout, qkv in forms.items():
        common: dict[str, Any] = {
            "input_layout": layout, "workspace_buffer": workspace(device), "seq_lens": b.pool.seq_lens(),
            "max_q_len": 70, "max_kv_len": 70, "bmm1_scale": 0.1, "bmm2_scale": 0.5, "batch_size": 3,
            "cum_seq_lens_q": b.qo_indptr, "cum_seq_lens_kv": b.kv_indptr,
            "block_tables": b.pool.block_tables() if layout == paged else None,
        }  # fmt: skip
        for mode, options in (
            ("causal", {"causal": True}),
            ("padding", {}),
            ("sliding_window", {"causal": True, "window_left": 9}),
        ):
            window = options.get("window_left", -1)
            out = fi_core.trtllm_fmha_v2_prefill(qkv, mask_mode=mode, window_left=window, **common)
            assert_close(out, b.expected(sm_scale=0.1, v_scale=0.5, **options)[0])
        capped = fi_core.trtllm_fmha_v2_prefill(qkv, logits_soft_cap_scale=2.0, **common)
        assert_close(capped, b.expected(sm_scale=0.1, v_scale=0.5, causal=True, logits_soft_cap=2.0)[0])
        for encoding in ("NONE", "ROPE_LLAMA", "ALIBI"):
            out = fi_core.trtllm_fmha_v2_prefill(qkv, pos_encoding_mode=encoding, **common)
            assert_close(out, b.expected(sm_scale=0.1, v_scale=0.5, causal=True, pos_encoding_mode=encoding)[0])
        out, stats = fi_core.trtllm_fmha_v2_prefill(qkv, mask_mode="CAUSAL", save_softmax_stats=True, **common)
        want, lse = b.expected(sm_scale=0.1, v_scale=0.5, causal=True)
        assert_close(out, want)
        assert_close((stats[..., 0] + stats[..., 1].log()) / math.log(2.0), lse, tolerance=LSE)
        alibi = fi_core.trtllm_fmha_v2_prefill(qkv, pos_encoding_mode="alibi", **common)
        assert_close(alibi, b.expected(sm_scale=0.1, v_scale=0.5, causal=True, pos_encoding_mode="ALIBI")[0])
        for change, words in (
            ({"mask_mode": "local"}, "mask_mode: allowed are causal, sliding_window, chunked, padding; got 'local'"),
            ({"mask_mode": "chunked"}, "chunked_attention_size: a positive number is required"),
            ({"chunked_attention_size": 16}, "chunked_attention_size: .* got 16 with 'causal'"),
            ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode: allowed are None, NONE, ROPE_LLAMA, ALIBI; got 'ROPE'"),
            ({"input_layout": "QKV"}, "input_layout"),
            ({"block_tables": None if layout == paged else b.pool.block_tables()}, "block_tables"),
        ):
            with pytest.raises(ValueError, match=words):
                fi_core.trtllm_fmha_v2_prefill(qkv, **common | change)


def test_separate_pages_of_keys_and_values(device: str) -> None:
    """[batch, 2, pages]: those of V are counted from k_cache, as SGLang's halves of one pool need it."""
    b = batch([(17, 17), (70, 70)], heads=(4, 4), dims=(64, 64), kv_layout="HND", device=device)
    pool = torch.stack(b.cache) if isinstance(b.cache, tuple) else b.cache.transpose(0, 1).contiguous()
    pages = b.pool.block_tables()
    common: dict[str, Any] = {
        "input_layout": "Q_PAGED_KV_HND", "workspace_buffer": workspace(device), "seq_lens": b.pool.seq_lens(),
        "max_q_len": 70, "max_kv_len": 70, "bmm1_scale": 0.1, "bmm2_scale": 0.5, "batch_size": 2,
        "cum_seq_lens_q": b.qo_indptr, "cum_seq_lens_kv": b.kv_indptr,
    }  # fmt: skip
    both = torch.stack([pages, pages + pool.shape[1]], dim=1)
    out = fi_core.trtllm_fmha_v2_prefill((b.q, (pool[0], pool[1])), block_tables=both, **common)
    assert_close(out, b.expected(sm_scale=0.1, v_scale=0.5, causal=True)[0])
    with pytest.raises(ValueError, match=r"block_tables: \[batch_size, 2, max_pages\] is required; got shape"):
        fi_core.trtllm_fmha_v2_prefill((b.q, (pool[0], pool[1])), block_tables=both[:, :1], **common)
    if device == "cpu":  # where tables are checked
        wrong = torch.stack([pages, pages], dim=1)
        with pytest.raises(ValueError, match="a page of V must be its page of K"):
            fi_core.trtllm_fmha_v2_prefill((b.q, (pool[0], pool[1])), block_tables=wrong, **common)


@pytest.mark.parametrize("size", [16, 48, 400])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_chunks_of_fmha(dims: tuple[int, int], size: int, device: str) -> None:
    """A row attends to the keys of its own chunk up to its position; chunks begin at the first key of the request."""
    lens = [(17, 17), (40, 90), (0, 9), (1, 48), (1, 49), (70, 300), (5, 2), (3, 0)]
    b = batch(lens, heads=(8, 2), dims=dims, device=device)
    masks = []
    for qo, kv in lens:
        key, position = torch.arange(kv)[None], torch.arange(qo)[:, None] + kv - qo
        masks.append((key <= position) & (key // size == position.div(size, rounding_mode="floor")))
    common: dict[str, Any] = {
        "workspace_buffer": workspace(device), "seq_lens": b.pool.seq_lens(), "max_q_len": 70, "max_kv_len": 300,
        "bmm1_scale": 0.1, "bmm2_scale": 0.5, "batch_size": len(lens), "cum_seq_lens_q": b.qo_indptr,
        "cum_seq_lens_kv": b.kv_indptr, "mask_mode": "chunked", "chunked_attention_size": size,
    }  # fmt: skip
    options: dict[str, Any]
    for options in ({}, {"window_left": 20}, {"pos_encoding_mode": "ROPE_LLAMA"}, {"pos_encoding_mode": "ALIBI"}):
        want, _ = b.expected(masks, sm_scale=0.1, v_scale=0.5, **options)
        for layout, qkv, tables in (
            ("SEPARATE_Q_K_V", (b.q, *b.ragged()), None),
            ("Q_PAGED_KV_NHD", (b.q, b.cache), b.pool.block_tables()),
        ):
            out = fi_core.trtllm_fmha_v2_prefill(qkv, layout, block_tables=tables, **common, **options)
            assert_close(out, want)
    with pytest.raises(ValueError, match=r"chunked_attention_size: a multiple of the page size \(16\) is required"):
        fi_core.trtllm_fmha_v2_prefill(
            (b.q, b.cache),
            "Q_PAGED_KV_NHD",
            block_tables=b.pool.block_tables(),
            **common | {"chunked_attention_size": 40},
        )


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_left": 50, "logits_soft_cap": 5.0}])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_one_request_needs_no_tables(
    dims: tuple[int, int], options: dict[str, Any], kv_layout: str, device: str
) -> None:
    """The path by which single_prefill_with_kv_cache runs many rows on Hopper."""
    b = batch([(300, 333)], heads=(8, 2), dims=dims, device=device)
    k, v = (x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in (b.k[0], b.v[0]))
    want, want_lse = b.expected(**options)
    single = fi_core.single_prefill_with_kv_cache_return_lse(b.q, k, v, kv_layout=kv_layout, **options)
    out, lse = torch.empty_like(single[0]), torch.empty_like(single[1])
    scale = dims[0] ** -0.5
    given = {name.removeprefix("logits_"): value for name, value in options.items()}
    attend_once(out, lse, b.q, k, v, int(kv_layout == "HND"), 1, pages_per_request=333, sm_scale=scale, **given)
    for got, got_lse in (single, (out, lse)):
        assert_close(got, want)
        assert_close(got_lse, want_lse, tolerance=LSE)


def test_trace() -> None:
    b = batch([(17, 40), (9, 9)], kv_layout="HND")
    given: dict[str, Any] = {
        "query": b.q, "kv_cache": b.cache, "workspace_buffer": workspace("cpu"), "batch_size": 2, "bmm1_scale": 0.1,
        "block_tables": b.pool.block_tables(), "seq_lens": b.pool.seq_lens(), "max_q_len": 17, "max_kv_len": 40,
        "bmm2_scale": 2.0, "cum_seq_lens_q": b.qo_indptr, "cum_seq_lens_kv": b.kv_indptr, "window_left": 5,
    }  # fmt: skip
    definition = trtllm_batch_context_with_kv_cache.fi_trace(**given)  # type: ignore[attr-defined]
    assert definition["name"] == "gqa_paged_prefill_tables_h4_kv2_d64_ps16"
    space: dict[str, Any] = {}
    exec(definition["reference"], space)
    clean = tuple(x.nan_to_num(0) for x in b.cache)
    options = {"cum_seq_lens_q": b.qo_indptr, "window_left": 5}
    want = space["_tables_reference"](b.q, *clean, given["block_tables"], given["seq_lens"], 0.1, 2.0, **options)
    assert_close(trtllm_batch_context_with_kv_cache(**given), want)  # type: ignore[arg-type]
