"""Values that a call would drop or round without a word: each is refused by the name of its argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, rand
from families.paged import Paged, paged
from families.prefill_batch import batch, workspace
from fi_core.indexer import fp8_indexer_topk, fp8_paged_indexer_topk

I32, BF16, F16 = torch.int32, torch.bfloat16, torch.float16
SIZES = ((1, 40), (1, 17))


def _pod(layout: str = "NHD", **options: Any) -> tuple[Callable[..., Any], Paged]:
    p = paged([40, 17], heads=(4, 2), kv_layout=layout)
    w = fi_core.PODWithPagedKVCacheWrapper(workspace("cpu"), layout)
    w.plan(*p.plan_arguments(), **p.dtypes, **options)
    q, k, v = (rand(n, heads, 64, dtype=p.q.dtype, device="cpu") for n, heads in ((5, 4), (9, 2), (9, 2)))
    return lambda **more: w.run(q, k, v, p.q, p.cache, **more)[1], p


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window_left_d": 7}, "window_left_d: 20 was planned; got 7"),
        ({"sm_scale_d": 0.3}, r"sm_scale_d: 0\.1 was planned; got 0\.3"),
        ({"kv_layout_d": "HND"}, "kv_layout_d: 'NHD' was planned; got 'HND'"),
        ({"pos_encoding_mode_d": "ALIBI"}, "pos_encoding_mode_d: 'NONE' was planned; got 'ALIBI'"),
        ({"rope_scale_d": 2.0}, r"rope_scale_d: 1\.0 was planned"),
        ({"rope_theta_d": 5e5}, r"rope_theta_d: 10000\.0 was planned"),
        ({}, None),
        ({"window_left_d": 20, "sm_scale_d": 0.1, "kv_layout_d": "NHD", "causal_d": True, "rope_theta_d": 1e4}, None),
    ],
)
def test_options_of_decode_in_pod_are_those_of_the_plan(options: dict[str, Any], name: str | None) -> None:
    run, p = _pod(window_left=20, sm_scale=0.1)
    if name is not None:
        with pytest.raises(ValueError, match=name):
            run(**options)
        return
    assert_close(run(**options), p.expected(window_left=20, sm_scale=0.1)[0])


def _indexer() -> dict[str, Any]:
    keys = rand(30, 32, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
    q = rand(3, 8, 32, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
    bounds = {"cu_seq_len_k_start": torch.zeros(3, dtype=I32), "cu_seq_len_k_end": torch.full((3,), 30, dtype=I32)}
    return {"q": q, "kv": (keys, torch.ones(30)), "weights": torch.ones(3, 8), "top_k": 4, **bounds}


def _paged_indexer() -> dict[str, Any]:
    q = rand(2, 1, 8, 32, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
    return {
        "q": q, "kv_cache": torch.zeros(4, 16, 1, 36, dtype=torch.uint8), "weights": torch.ones(2, 8), "top_k": 4,
        "context_lens": torch.full((2,), 20, dtype=I32), "block_table": torch.tensor([[0, 1], [2, 3]], dtype=I32),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "make", "name"),
    [
        *((fp8_indexer_topk, _indexer, name) for name in ("weights", "cu_seq_len_k_start", "cu_seq_len_k_end")),
        *((fp8_paged_indexer_topk, _paged_indexer, name) for name in ("weights", "context_lens", "block_table")),
    ],
)
@pytest.mark.parametrize("more", [1, -1])
def test_rows_of_an_indexer_are_those_of_q(function: Any, make: Callable[[], Any], name: str, more: int) -> None:
    given = make()
    assert function(**given).shape == (len(given["q"]), 4)
    x = given[name]
    with pytest.raises(ValueError, match=f"{name} must have {len(x)} rows, by q "):
        function(**{**given, name: torch.cat((x, x[:1])) if more > 0 else x[:-1]})


def _one_calls() -> dict[str, Callable[..., Any]]:
    b = batch(SIZES, kv_layout="NHD")
    k, v = b.ragged()
    room = workspace("cpu", 8 << 20)
    tables = {"query": b.q, "kv_cache": b.cache, "workspace_buffer": room, "block_tables": b.pool.block_tables(),
              "seq_lens": b.pool.seq_lens(), "kv_layout": "NHD"}  # fmt: skip
    context = {"max_q_len": 1, "max_kv_len": 40, "batch_size": 2, "cum_seq_lens_q": b.qo_indptr,
               "cum_seq_lens_kv": b.kv_indptr}  # fmt: skip
    ragged = {"query": b.q, "key": k, "value": v, "workspace_buffer": room, "seq_lens": b.pool.seq_lens(),
              "o_sf_scale": 1.0, "window_left": -1, "enable_pdl": None, "is_causal": True,
              "return_lse": False}  # fmt: skip
    fmha = {"qkv": (b.q, b.cache), "input_layout": "Q_PAGED_KV_NHD", "workspace_buffer": room,
            "seq_lens": b.pool.seq_lens(), "block_tables": b.pool.block_tables()}  # fmt: skip
    decode, prefill, scales = fi_core.decode, fi_core.prefill, {"bmm1_scale": 0.1, "bmm2_scale": 1.0}
    return {
        function.__name__: lambda function=function, given=given, **more: function(**{**given, **scales, **more})
        for function, given in (
            (decode.trtllm_batch_decode_with_kv_cache, {**tables, "max_seq_len": 40}),
            (decode.xqa_batch_decode_with_kv_cache, {**tables, "max_seq_len": 40}),
            (prefill.trtllm_batch_context_with_kv_cache, {**tables, **context}),
            (prefill.trtllm_ragged_attention_deepseek, {**ragged, **context}),
            (fi_core.trtllm_fmha_v2_prefill, {**fmha, **context}),
        )
    }


ONE_CALLS = _one_calls()


@pytest.mark.parametrize("scale", ["bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize("name", ONE_CALLS)
def test_a_scale_of_one_call_has_no_default(name: str, scale: str) -> None:
    """None would be 1, not `1 / sqrt(head_dim)` as in the wrappers."""
    assert ONE_CALLS[name]().shape == (2, 4, 64)
    with pytest.raises(TypeError, match=f"{scale}: a number or a fp32 tensor of one element is required; got None"):
        ONE_CALLS[name](**{scale: None})


@pytest.mark.parametrize("name", [name for name in ONE_CALLS if "xqa" not in name and "ragged" not in name])
def test_a_given_output_has_the_dtype_that_is_asked_for(name: str) -> None:
    out = torch.empty(2, 4, 64, dtype=F16)
    with pytest.raises(ValueError, match=r"out: dtype must be torch.bfloat16, got torch.float16"):
        ONE_CALLS[name](out=out, out_dtype=BF16)
    assert ONE_CALLS[name](out=out, out_dtype=F16) is out


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: w[0].plan(torch.tensor([0, 1.5]), torch.tensor([0]), 4, 4, 4, 4, 1, 1, 64), TypeError, "indptr: in"),
        (lambda w: w[0].plan(torch.tensor([0, 1]), torch.tensor([0.5]), 4, 4, 4, 4, 1, 1, 64), TypeError, "indices: i"),
        (lambda w: w[1].plan(torch.ones(1, 1, 1) > 0, torch.tensor([[3.5]]), torch.tensor([[3]]), 1, 1, 64), TypeError,
         "block_row_sz: integers are required; got torch.float32"),
        (lambda w: w[1].plan(torch.ones(1, 1, 1) > 0, torch.tensor([[3]]), torch.tensor([[3.5]]), 1, 1, 64), TypeError,
         "block_col_sz: integers are required; got torch.float32"),
        (lambda w: fi_core.top_k_varlen(torch.ones(2, 8), torch.tensor([3.5, 2.0]), 2), TypeError, "seq_lens must be"),
        (lambda w: fi_core.apply_rope_pos_ids(*torch.ones(2, 3, 1, 64), torch.arange(3), rotary_dim=-2), ValueError,
         "rotary_dim must be even and between 2 and head_dim = 64; got -2"),
        (lambda w: fi_core.fused_dit_residual_layernorm_scale_shift(*torch.ones(3, 1, 2, 64).half(), epsilon=-1.0),
         ValueError, "epsilon must be 0 or more; got -1.0"),
    ],
)  # fmt: skip
def test_a_number_is_not_rounded_or_replaced(call: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    wrappers = fi_core.BlockSparseAttentionWrapper, fi_core.VariableBlockSparseAttentionWrapper
    with pytest.raises(error, match=words):
        call([wrapper(workspace("cpu")) for wrapper in wrappers])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_buffers_of_graphs_are_int32(dtype: torch.dtype) -> None:
    """Kernels of a replay read them; a plan fits tables to them, not them to tables."""
    size = torch.zeros(3, dtype=I32)
    one, wrong = size[:2], torch.zeros(9, dtype=dtype)
    room, words = workspace("cpu"), f": int32 is required, which graphs read; got {dtype}"
    with pytest.raises(TypeError, match="paged_kv_indices_buffer" + words):
        fi_core.BatchDecodeWithPagedKVCacheWrapper(
            room, use_cuda_graph=True, paged_kv_indptr_buffer=size, paged_kv_indices_buffer=wrong,
            paged_kv_last_page_len_buffer=one,
        )  # fmt: skip
    with pytest.raises(TypeError, match="paged_kv_indices_buf" + words):
        fi_core.BatchPrefillWithPagedKVCacheWrapper(room, "NHD", True, size, size.clone(), wrong, one)
    with pytest.raises(TypeError, match="kv_indptr" + words):
        fi_core.BatchMLAPagedAttentionWrapper(room, True, size, wrong[:3], wrong.int(), one)


@pytest.mark.parametrize("wrapper", ["decode", "prefill"])
def test_page_ids_are_a_list(wrapper: str) -> None:
    """The plan says so, not a later run, which knows the table by no name."""
    b = batch(SIZES)
    p = b.pool
    for indices in (p.indices[None], torch.stack((p.indices, p.indices), 1)[:, 0]):
        of_decode = (p.indptr, indices, *p.plan_arguments()[2:])
        of_prefill = (*b.paged_plan()[:2], indices, *b.paged_plan()[3:])
        given, kind = (
            (of_decode, fi_core.BatchDecodeWithPagedKVCacheWrapper)
            if wrapper == "decode"
            else (of_prefill, fi_core.BatchPrefillWithPagedKVCacheWrapper)
        )
        with pytest.raises(ValueError, match="indices: one contiguous dimension is required; got shape"):
            kind(workspace("cpu")).plan(*given, **p.dtypes)
