"""Errors of the batch prefill wrappers and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.engine import engine
from families.harness import assert_close
from families.prefill_batch import batch, workspace
from families.test_batch_prefill_calls import LENS
from fi_core.attention.ops import prefill as ops
from fi_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.spec.target import cuda_target


def test_errors_of_the_constructor(device: str) -> None:
    w = workspace(device)
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        for options, error, words in (
            ({"kv_layout": "HDN"}, KeyError, "kv_layout"),
            ({"backend": "fa4"}, ValueError, "backend: allowed are auto, fa2, fa3"),
            ({"backend": "cute-dsl"}, NotImplementedError, "names kernels of another library"),
            ({"jit_args": ["x"]}, TypeError, "jit_args: 13 are required"),
            ({"variant_owns_mask": True}, ValueError, "variant_owns_mask"),
            ({"use_cuda_graph": True}, ValueError, "qo_indptr_buf: a tensor is required"),
        ):
            with pytest.raises(error, match=words):
                wrapper(w, **options)
        with pytest.raises(ValueError, match="float_workspace_buffer: must be 16-byte aligned"):
            wrapper(w[1:])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pos_encoding_mode": "ROPE"}, KeyError, "pos_encoding_mode: allowed are NONE"),
        ({"q_data_type": 16}, TypeError, "q_data_type"),
        ({"o_data_type": torch.int8}, TypeError, "o_data_type: a float dtype is required; got torch.int8"),
        ({"num_qo_heads": 5}, ValueError, r"num_qo_heads: a positive multiple of num_kv_heads \(2\)"),
        ({"head_dim_qk": 65}, ValueError, "Unsupported head_dim"),
        ({"page_size": 0}, ValueError, "page_size: at least 1"),
        ({"paged_kv_indptr": torch.zeros(3, dtype=torch.int32)}, ValueError, "kv_indptr: length 6"),
        ({"paged_kv_last_page_len": torch.zeros(4, dtype=torch.int32)}, ValueError, "paged_kv_last_page_len: length 5"),
        (
            {"paged_kv_indices": torch.zeros(9, dtype=torch.int32)},
            ValueError,
            "paged_kv_indices: 21 are required, .* 9",
        ),
        ({"seq_lens": torch.zeros(4, dtype=torch.int32)}, ValueError, "seq_lens: length 5"),
        ({"custom_mask": torch.ones(7)}, ValueError, "custom_mask: a boolean tensor"),
        ({"custom_mask": torch.ones(7, dtype=torch.bool)}, ValueError, "custom_mask: 6560 elements are required"),
        ({"prefix_len_ptr": torch.zeros(5, dtype=torch.int32)}, ValueError, "token_pos_in_items_ptr"),
        (
            {"token_pos_in_items_ptr": torch.zeros(5, dtype=torch.uint16), "token_pos_in_items_len": 1},
            ValueError,
            "prefix_len_ptr: a tensor is required",
        ),
        ({"qo_indptr": torch.zeros(6)}, TypeError, "qo_indptr must be int32"),
    ],
)
def test_errors_of_plan(change: dict[str, Any], error: type[Exception], words: str, device: str) -> None:
    b = batch(LENS, device=device)
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads",
             "num_kv_heads", "head_dim_qk", "page_size")  # fmt: skip
    arguments = {n: x.cpu() if torch.is_tensor(x) else x for n, x in zip(names, b.paged_plan())}
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(error, match=words):
        w.plan(**arguments | b.types() | change)


def test_errors_of_run(device: str) -> None:
    b = batch(LENS, device=device)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(b.q, b.cache)
    qo, *rest = b.paged_plan()
    w.plan(qo.cpu(), *rest, **b.types())
    k, v = b.cache
    for q, cache, options, error, words in (
        (b.q[:-1], b.cache, {}, ValueError, r"q: shape \(91, 4, 64\) was planned"),
        (b.q.bfloat16(), b.cache, {}, ValueError, "q: q_data_type torch.float16 was planned"),
        (b.q, (k.bfloat16(), v.bfloat16()), {}, ValueError, "kv_data_type torch.float16 was planned"),
        (b.q, [k, v], {}, KeyError, "tuple"),
        (b.q, (k[:, :8], v[:, :8]), {}, ValueError, "page_size 16 and 2 kv heads were planned"),
        (b.q, (k, v[..., :32]), {}, ValueError, "v: head_dim_vo 64 was planned"),
        (b.q, b.cache, {"out": torch.empty_like(b.q[1:])}, ValueError, "out: shape"),
        (b.q, b.cache, {"out": torch.empty_like(b.q, dtype=torch.float32)}, ValueError, "out: dtype"),
        (b.q, b.cache, {"lse": torch.empty(3, device=device)}, ValueError, "lse: shape"),
        (b.q, b.cache, {"kv_cache_sf": 1}, ValueError, "kv_cache_sf: .* of uint8, which is NVFP4"),
        (b.q, b.cache, {"sinks": torch.zeros(3, device=device)}, ValueError, r"sinks must have shape .*got \[3\]"),
    ):
        with pytest.raises(error, match=words):
            w.run(q, cache, **options)
    with pytest.raises(TypeError, match="scale_q, scale_k and scale_v"):
        w.run(b.q, b.cache, 1, 1, 1, 1)
    r = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    qo, kv, *rest = b.ragged_plan()
    r.plan(qo.cpu(), kv.cpu(), *rest, **b.types())
    keys = b.ragged()
    with pytest.raises(ValueError, match="k: 2 heads and 299 tokens were planned"):
        r.run(b.q, keys[0][:200], keys[1][:200])
    with pytest.raises(NotImplementedError, match=r"o_scale: .* multiply v_scale .* got 2\.0"):
        r.run(b.q, *keys, o_scale=2.0)
    r.plan(qo, kv, *rest, v_indptr=kv, o_indptr=qo, **b.types())
    r.plan(qo.cpu(), kv.cpu(), *rest, v_indptr=kv.cpu().clone(), **b.types())
    for name, offsets in (("v_indptr", kv + 1), ("o_indptr", kv), ("v_indptr", kv[1:])):
        with pytest.raises(
            NotImplementedError, match=f"{name}: .* pass None or {'kv' if name[0] == 'v' else 'qo'}_indptr"
        ):
            r.plan(qo, kv, *rest, **{name: offsets})


@pytest.mark.usefixtures("checked")
def test_page_ids_are_checked(device: str) -> None:
    b = batch(LENS, device=device)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    w.plan(*b.paged_plan(), **b.types())
    assert_close(w.run(b.q, b.cache), b.expected()[0])
    engine(w).paged_kv_indices_buf[1] = 1000
    with pytest.raises(ValueError, match=r"the page table, must name pages of the cache, 0 to \d+; got 1000 at 1"):
        w.run(b.q, b.cache)


@pytest.mark.usefixtures("checked")
def test_offsets_are_checked(device: str) -> None:
    b = batch(LENS, device=device)
    w = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    w.plan(*b.ragged_plan(), **b.types())
    keys = b.ragged()
    assert_close(w.run(b.q, *keys), b.expected()[0])
    qo_indptr, kv_indptr, *rest = b.ragged_plan()
    kv_indptr[2:4] = torch.tensor([5, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_indptr must not decrease and must start at 0 or more; got 5 at 2"):
        w.plan(qo_indptr, kv_indptr, *rest, **b.types())
    with pytest.raises(RuntimeError, match="the last plan failed"):
        w.run(b.q, *keys)


def test_schedule_too_small(device: str) -> None:
    b = batch([(500, 500)], heads=(8, 1), device=device)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    w.reset_workspace_buffer(workspace(device), torch.empty(64, dtype=torch.uint8, device=device))
    qo, *rest = b.paged_plan()
    with pytest.raises(ValueError, match=r"int_workspace_buffer: \d+ bytes are required; got 64"):
        w.plan(qo.cpu(), *rest, **b.types())


@pytest.mark.gpu
def test_fa3_refuses_with_reasons() -> None:
    b = batch(LENS, dims=(80, 80), device="cuda")
    w = BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"), backend="fa3")
    with pytest.raises(UnsupportedError, match="head_dim"):
        w.plan(*b.paged_plan(), **b.types())


@pytest.mark.parametrize(
    ("facts", "implementation", "why"),
    [
        ({}, "wgmma_sm90", ""),
        ({"mask": "custom"}, "mma_sm80", "requires mask == plain, got custom"),
        ({"scaled": True}, "mma_sm80", "requires no scales by head or on the device, or fp8 keys"),
        ({"alignment": 8}, "mma_sm80", "requires alignment >= 16, got 8"),
        ({"group_size": 256}, "mma_sm80", "requires group_size <= 128, got 256"),
        ({"page_size": 1}, "wgmma_sm90", ""),
        ({"q": "e5m2", "kv": "e5m2", "out": "e4m3", "head_dim_qk": 256, "head_dim_vo": 256}, "wgmma_sm90", ""),
        ({"kv": "e4m3", "head_dim_qk": 64, "head_dim_vo": 64, "out": "f16", "scaled": True}, "wgmma_sm90", ""),
        ({"kv": "e4m3", "head_dim_qk": 256, "head_dim_vo": 256}, "wgmma_sm90", ""),
        ({"page_size": 0}, "wgmma_sm90", ""),  # ragged
        ({"head_dim_qk": 192, "head_dim_vo": 128}, "wgmma_sm90", ""),
        ({"head_dim_qk": 192, "head_dim_vo": 192}, "mma_sm80", "requires head_dim_vo == head_dim_qk, or 128 for 192"),
        ({"kv": "e4m3"}, "wgmma_sm90", ""),
        ({"kv": "f16"}, "mma_sm80", "requires kv of q's dtype, or fp8 with a 16-bit q"),
        ({"kv": "e2m1"}, "mma_sm80", "requires kv in f16, bf16, e4m3, e5m2, got e2m1"),
    ],
)
def test_auto_has_a_reason_against_the_hopper_kernel(facts: dict[str, Any], implementation: str, why: str) -> None:
    choice = choose(Request.of(ops.BATCH_PREFILL, cuda_target(9, 0), facts))
    assert choice.implementation == implementation
    assert why in "; ".join(dict(choice.reasons).get("wgmma_sm90", ("",)))
