"""Attention by cuDNN: against fp64 if its Python frontend is installed, else the error of each function."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.cudnn_frontend import INSTALLED, finite
from families.harness import assert_close, assert_guards, guarded, strided
from families.paged import Paged, offsets, paged
from families.prefill_batch import Batch, batch
from fi_core.attention.cudnn.graph import PlannedBatch, finish_lse
from fi_core.cudnn import cudnn_batch_prefill_with_kv_cache
from fi_core.runtime.errors import LibraryError, UnsupportedError

LSE = (1e-3, 1e-3)


def result(call: Callable[..., Any], device: str, *args: Any, **given: Any) -> Any:
    """The result of the call; None if it raises the expected error without the frontend or without a GPU."""
    if INSTALLED and device == "cuda":
        return call(*args, **given)
    if INSTALLED:
        with pytest.raises(ValueError, match="q: a CUDA device is required by cuDNN; got cpu"):
            call(*args, **given)
    else:
        with pytest.raises(LibraryError, match="pip install nvidia-cudnn-frontend"):
            call(*args, **given)
    return None


def room(device: str) -> torch.Tensor:
    return torch.empty(64 << 20 if device == "cuda" else 16, dtype=torch.uint8, device=device)


def decode_arguments(p: Paged, **more: Any) -> dict[str, Any]:
    k, v = finite(p.cache)
    return {
        "q": p.q, "k_cache": k, "v_cache": v, "scale": p.q.shape[2] ** -0.5, "max_sequence_kv": 512,
        "workspace_buffer": room(str(p.q.device.type)), "block_tables": p.block_tables().clamp(min=0),
        "actual_seq_lens_kv": p.seq_lens().view(-1, 1, 1, 1), "q_len_per_req": p.q_len,
    } | more  # fmt: skip


LENGTHS = [300, 16, 65, 1, 512]


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "dtype"),
    [
        ((8, 2), 128, 16, torch.bfloat16),
        ((8, 2), 128, 16, torch.float16),
        ((4, 4), 64, 64, torch.float16),
        ((7, 1), 256, 16, torch.bfloat16),
        ((8, 1), 128, 1, torch.bfloat16),
    ],
)
def test_decode(heads: tuple[int, int], dim: int, page_size: int, dtype: torch.dtype, device: str) -> None:
    p = paged(LENGTHS, heads=heads, dim=dim, dtype=dtype, kv_layout="HND", page_size=page_size, device=device)
    got = result(fi_core.cudnn_batch_decode_with_kv_cache, device, **decode_arguments(p, return_lse=True))
    if got is not None:
        want, want_lse = p.expected()
        assert_close(got[0], want)
        assert_close(got[1], want_lse, tolerance=LSE)


@pytest.mark.parametrize(
    ("q_len", "form", "options"),
    [(1, "strided", {}), (1, "tuple", {"window_left": 20}), (3, "tuple", {}), (3, "strided", {"window_left": 20})],
)
def test_decode_options(q_len: int, form: str, options: dict[str, Any], device: str) -> None:
    p = paged([300, 16, 65], heads=(8, 2), dim=128, q_len=q_len, form=form, kv_layout="HND", device=device)
    got = result(fi_core.cudnn_batch_decode_with_kv_cache, device, **decode_arguments(p, **options))
    if got is not None:
        assert_close(got, p.expected(**options)[0])


def test_decode_of_other_batches_by_one_graph(device: str) -> None:
    """A cached graph computes with the arguments of each call."""
    for seed in range(3):
        p = paged([300 - seed, 16, 65 + seed], dim=128, kv_layout="HND", seed=seed, device=device)
        given = decode_arguments(p, scale=0.05 * (seed + 1), block_tables=torch.zeros(3, 32, dtype=torch.int32))
        given["block_tables"] = given["block_tables"].to(device)
        table = p.block_tables().clamp(min=0)
        given["block_tables"][:, : table.shape[1]] = table
        got = result(fi_core.cudnn_batch_decode_with_kv_cache, device, **given)
        if got is not None:
            assert_close(got, p.expected(sm_scale=0.05 * (seed + 1))[0])


def test_decode_writes_where_it_is_told(device: str) -> None:
    p = paged([40, 9], heads=(8, 2), dim=128, kv_layout="HND", device=device)
    out = guarded(p.q.shape, p.q.dtype, device)
    lse = guarded(p.q.shape[:2], torch.float32, device)
    q = strided(p.q)
    starts = offsets([q.stride(0)] * 2, device)
    given = decode_arguments(p, q=q, out=out, lse=lse, return_lse=True, batch_offsets_q=starts)
    given["batch_offsets_o"] = offsets([out.stride(0)] * 2, device)
    got = result(fi_core.cudnn_batch_decode_with_kv_cache, device, **given)
    if got is not None:
        assert got[0] is out and got[1] is lse
        assert_close(out, p.expected()[0])
        assert_close(lse, p.expected()[1], tolerance=LSE)
        assert_guards(out)
        assert_guards(lse)


def test_decode_in_a_graph(device: str) -> None:
    p = paged(LENGTHS, heads=(8, 2), dim=128, kv_layout="HND", device=device)
    given = decode_arguments(p, is_cuda_graph_compatible=True)
    out = result(fi_core.cudnn_batch_decode_with_kv_cache, device, **given)
    if out is None:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fi_core.cudnn_batch_decode_with_kv_cache(**given, out=out)
    p.q.mul_(-0.5)
    given["actual_seq_lens_kv"].fill_(10)
    graph.replay()
    short = [x[:10] for x in p.k], [x[:10] for x in p.v]
    for b in (0, 1, 2, 4):
        q = p.q[b : b + 1].double().cpu()
        k, v = (x[b].double().cpu().repeat_interleave(4, 1) for x in short)
        s = (torch.einsum("qhd,khd->hk", q, k) * 128**-0.5).softmax(-1)
        assert_close(out[b], torch.einsum("hk,khd->hd", s, v))


LENS = [(70, 70), (1, 130), (17, 40), (64, 64)]


def prefill_arguments(b: Batch, **more: Any) -> dict[str, Any]:
    lens_q = torch.tensor(b.qo_lens, dtype=torch.int32, device=b.q.device).view(-1, 1, 1, 1)
    return {
        "workspace_buffer": room(str(b.q.device.type)), "scale": 0.1, "max_token_per_sequence": max(b.qo_lens),
        "max_sequence_kv": 256, "actual_seq_lens_q": lens_q, "return_lse": False, "causal": True,
        "actual_seq_lens_kv": b.pool.seq_lens().view(-1, 1, 1, 1),
    } | more  # fmt: skip


def unpad(lse: torch.Tensor, lens: Any) -> torch.Tensor:
    return torch.cat([x[:n] for x, n in zip(lse, lens)])


@pytest.mark.parametrize(
    ("keys", "dims", "causal"),
    [
        ("pages of 16", (128, 128), True),
        ("pages of 16", (64, 64), False),
        ("pages of 64", (256, 256), True),
        ("pages of 1", (128, 128), True),
        ("ragged", (128, 128), True),
        ("ragged", (192, 128), True),
        ("ragged", (64, 64), False),
    ],
)
def test_prefill(keys: str, dims: tuple[int, int], causal: bool, device: str) -> None:
    pages = {"page_size": int(keys.rpartition(" ")[2])} if keys != "ragged" else {}
    b = batch(LENS, heads=(8, 2), dims=dims, dtype=torch.bfloat16, kv_layout="HND", device=device, **pages)
    given = prefill_arguments(b, causal=causal, return_lse=True, v_scale=0.5)
    if keys == "ragged":
        k, v = finite(b.ragged())
    else:
        (k, v), given["block_tables"] = finite(b.cache), b.pool.block_tables().clamp(min=0)
    got = result(cudnn_batch_prefill_with_kv_cache, device, b.q, k, v, **given)
    if got is not None:
        want, want_lse = b.expected(causal=causal, sm_scale=0.1, v_scale=0.5)
        assert_close(got[0], want)
        assert_close(unpad(got[1], b.qo_lens), want_lse, tolerance=LSE)


def test_prefill_of_a_fused_qkv(device: str) -> None:
    """The call of engines' vision encoders: offsets in elements, no mask, rows between the requests."""
    lens, heads, dim = [40, 25], 4, 64
    b = batch([(n, n) for n in lens], heads=(heads, heads), dims=(dim, dim), dtype=torch.bfloat16, device=device)
    tokens, first = 80, [0, 45]
    fused = torch.zeros(tokens, 3, heads, dim, dtype=torch.bfloat16, device=device)
    for n, at, q, k, v in zip(lens, first, b.q.split(lens), b.k, b.v):
        fused[at : at + n] = torch.stack((q, k, v), 1)
    q, k, v = fused.unbind(1)
    out = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16, device=device)
    starts = torch.tensor([*first, 70], dtype=torch.int32, device=device)
    given = prefill_arguments(b, causal=False, scale=dim**-0.5, out=out, q_scale=None, o_data_type=torch.bfloat16)
    given |= {f"batch_offsets_{name}": starts * q.stride(0) for name in "qkv"}
    given["batch_offsets_o"] = starts * out.stride(0)
    got = result(cudnn_batch_prefill_with_kv_cache, device, q, k, v, **given)
    if got is not None:
        assert got[0] is out and got[1] is None
        want = b.expected()[0].split(lens)
        for n, at, expected in zip(lens, first, want):
            assert_close(out[at : at + n], expected)
        assert not out[40:45].any() and not out[70:].any(), "rows of no request are not written"


@pytest.mark.parametrize("lens", [[(5, 9), (0, 7), (3, 3)], [(5, 9), (2, 0), (3, 3)], [(9, 4), (6, 6)]])
def test_prefill_of_empty_requests(lens: list[tuple[int, int]], device: str) -> None:
    """No rows, no keys, or more rows than keys: a row without keys gives 0."""
    b = batch(lens, heads=(8, 2), dims=(128, 128), kv_layout="HND", device=device)
    given = prefill_arguments(b, block_tables=b.pool.block_tables().clamp(min=0), return_lse=True)
    got = result(cudnn_batch_prefill_with_kv_cache, device, b.q, *finite(b.cache), **given)
    if got is not None:
        want, want_lse = b.expected(causal=True, sm_scale=0.1)
        assert_close(got[0], want)
        assert_close(unpad(got[1], b.qo_lens), want_lse, tolerance=LSE)


DECODE, PAGED, RAGGED = (
    fi_core.BatchDecodeWithPagedKVCacheWrapper,
    fi_core.BatchPrefillWithPagedKVCacheWrapper,
    fi_core.BatchPrefillWithRaggedKVCacheWrapper,
)


def wrapper(kind: Any, device: str, kv_layout: str = "NHD", **options: Any) -> Any:
    """The wrapper with backend "cudnn"; None if it raises the expected error."""
    if INSTALLED and device == "cuda":
        return kind(room(device), kv_layout, backend="cudnn", **options)
    error: type[Exception] = ValueError if INSTALLED else LibraryError
    with pytest.raises(error, match="requires a CUDA device" if INSTALLED else "pip install nvidia-cudnn-frontend"):
        kind(room(device), kv_layout, backend="cudnn", **options)
    return None


@pytest.mark.parametrize(
    ("q_len", "kv_layout", "options"), [(1, "NHD", {"sm_scale": 0.3}), (1, "HND", {"window_left": 20}), (3, "NHD", {})]
)
def test_decode_wrapper(q_len: int, kv_layout: str, options: dict[str, Any], device: str) -> None:
    w = wrapper(DECODE, device, kv_layout)
    for seed, lengths in enumerate(([300, 16, 65], [17, 400, 3])):
        p = paged(lengths, heads=(8, 2), dim=128, q_len=q_len, kv_layout=kv_layout, seed=seed, device=device)
        if w is None:
            continue
        w.plan(*p.plan_arguments(), **p.dtypes, q_len_per_req=q_len, **options)
        assert w.resolved_backend == "cudnn"
        want, want_lse = p.expected(**options)
        out, lse = w.run(p.q, finite(p.cache), return_lse=True)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        scaled = w.run(p.q, finite(p.cache), k_scale=2.0, v_scale=torch.tensor([0.5], device=device))
        assert_close(scaled, p.expected(**options, k_scale=2.0, v_scale=0.5)[0])


@pytest.mark.parametrize("kind", [PAGED, RAGGED])
@pytest.mark.parametrize(
    ("kv_layout", "dims", "options"),
    [
        ("NHD", (128, 128), {"causal": True}),
        ("HND", (128, 128), {"causal": True, "window_left": 20}),
        ("NHD", (64, 64), {"window_left": 20}),
        ("HND", (192, 128), {"causal": True}),
    ],
)
def test_prefill_wrappers(
    kv_layout: str, dims: tuple[int, int], options: dict[str, Any], kind: Any, device: str
) -> None:
    w = wrapper(kind, device, kv_layout)
    for seed, lens in enumerate(([(70, 70), (1, 130), (17, 40)], [(5, 90), (64, 64), (33, 250)])):
        b = batch(lens, heads=(8, 2), dims=dims, dtype=torch.bfloat16, kv_layout=kv_layout, seed=seed, device=device)
        if w is None:
            continue
        w.plan(*(b.paged_plan() if kind is PAGED else b.ragged_plan()), **b.types(), **options)
        assert w.resolved_backend == "cudnn"
        keys = finite((b.cache,) if kind is PAGED else b.ragged(kv_layout))
        want, want_lse = b.expected(**options)
        out, lse = w.run(b.q, *keys, return_lse=True)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)


def test_wrapper_in_a_graph(device: str) -> None:
    """A captured run computes the batch that was planned last."""
    lens, others = [(70, 70), (1, 130), (17, 40)], [(5, 90), (64, 64), (19, 120)]
    b, c = (batch(x, heads=(8, 2), dims=(128, 128), seed=seed, device=device) for seed, x in enumerate((lens, others)))
    buffers: dict[str, Any] = {
        "qo_indptr_buf": b.qo_indptr.clone(), "paged_kv_indptr_buf": b.pool.indptr.clone(),
        "paged_kv_indices_buf": torch.zeros(99, dtype=torch.int32, device=device),
        "paged_kv_last_page_len_buf": b.pool.last_page_len.clone(),
    }  # fmt: skip
    w = wrapper(PAGED, device, use_cuda_graph=True, **buffers)
    if w is None:
        return
    most = {"max_token_per_sequence": 70, "max_sequence_kv": 130, "causal": True}
    k, v = (torch.zeros(64, *x.shape[1:], dtype=x.dtype, device=device) for x in b.cache)
    q = torch.zeros(88, 8, 128, dtype=torch.float16, device=device)

    def fill(x: Batch) -> None:
        w.plan(*x.paged_plan(), **x.types(), **most)
        for pool, cache in zip((k, v), finite(x.cache)):
            pool[: len(cache)] = cache
        q[: len(x.q)] = x.q

    fill(b)
    assert_close(w.run(q, (k, v)), b.expected(causal=True)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w.run(q, (k, v))
    for x in (b, c, b):
        fill(x)
        graph.replay()
        assert_close(out[: len(x.q)], x.expected(causal=True)[0])
    with pytest.raises(ValueError, match="max_sequence_kv: fixed at"):
        w.plan(*b.paged_plan(), **b.types(), **most | {"max_sequence_kv": 9999})


@pytest.mark.parametrize(
    "options",
    [{"logits_soft_cap": 3.0}, {"pos_encoding_mode": "ALIBI"}, {"o_data_type": torch.float32}],
    ids=["soft cap", "alibi", "fp32 output"],
)
def test_wrappers_refuse_unsupported_options(options: dict[str, Any], device: str) -> None:
    b = batch([(3, 20), (2, 9)], heads=(8, 2), dims=(128, 128), device=device)
    p = paged([20, 9], heads=(8, 2), dim=128, device=device)
    for kind in (DECODE, PAGED, RAGGED):
        w = wrapper(kind, device)
        if w is not None:
            arguments = p.plan_arguments() if kind is DECODE else b.paged_plan() if kind is PAGED else b.ragged_plan()
            with pytest.raises(UnsupportedError, match="cudnn: requires"):
                w.plan(*arguments, q_data_type=torch.float16, **options)


def test_the_lse_of_requests_without_keys(device: str) -> None:
    """The wrapper sets lse of requests without keys, which cuDNN does not; some requests have no rows."""
    b = PlannedBatch(False)
    lens_q, lens_kv = ([2, 0, 3, 1, 0], [5, 0, 0, 4, 0])
    rows = offsets(lens_q, device)
    q, kv = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lens_q, lens_kv))
    b.plan(q, kv, (3, 5), offsets(lens_kv, device), None, 1, rows)
    empty = b.without_keys(8)  # two more rows than requests have
    assert empty[:6].tolist() == [False, False, True, True, True, False]
    for sinks in (None, torch.tensor([0.5, -1.0, 2.0], device=device)):
        lse = torch.full((6, 3), 7.0, device=device)
        finish_lse(lse, empty[:6], sinks)
        alone = [-math.inf] * 3 if sinks is None else (sinks / math.log(2)).tolist()
        assert lse[[0, 1, 5]].eq(7.0).all()
        torch.testing.assert_close(lse[2:5].cpu(), torch.tensor([alone] * 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_offsets_units": "bytes"}, "batch_offsets_units: elements or tokens is required; got 'bytes'"),
        ({"lse_base": "e"}, 'lse_base: "log2" or "ln" is required; got \'e\''),
        ({"actual_seq_lens_kv": None}, "actual_seq_lens_kv: the lengths of the requests are required where there are"),
    ],
)
def test_units_of_prefill(change: dict[str, Any], message: str) -> None:
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    lens = torch.tensor([4])
    given = {"actual_seq_lens_q": lens, "actual_seq_lens_kv": lens} | change
    with pytest.raises(ValueError, match=message):
        cudnn_batch_prefill_with_kv_cache(
            q, q, q, 0.1, q, max_token_per_sequence=4, max_sequence_kv=4, causal=False, return_lse=False, **given
        )


def test_lengths_of_prefill_from_offsets(device: str) -> None:
    """Offsets in tokens alone describe the batch; lse may be natural."""
    b = batch([(5, 9), (7, 7)], heads=(4, 4), dims=(128, 128), dtype=torch.bfloat16, device=device)
    k, v = b.ragged()
    got = result(
        cudnn_batch_prefill_with_kv_cache, device, b.q, k, v, 128**-0.5,
        room(device), max_token_per_sequence=7, max_sequence_kv=9,
        causal=True, return_lse=True, batch_offsets_q=b.qo_indptr, batch_offsets_o=b.qo_indptr,
        batch_offsets_k=b.kv_indptr, batch_offsets_v=b.kv_indptr, batch_offsets_units="tokens", lse_base="ln",
    )  # fmt: skip
    if got is not None:
        want, lse = b.expected(causal=True)
        assert_close(got[0], want)
        assert_close(torch.cat([got[1][0, :5], got[1][1, :7]]) / math.log(2.0), lse, tolerance=LSE)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    p = paged([20, 9], kv_layout="HND")
    given = decode_arguments(p)
    b = batch([(3, 20), (2, 9)], kv_layout="HND")
    k, v = b.ragged()
    decode, prefill = fi_core.cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
    with pytest.raises(NotImplementedError, match="batch_offsets_k: not supported, block_tables says"):
        decode(**given, batch_offsets_k=torch.zeros(3))
    with pytest.raises(ValueError, match="block_tables and actual_seq_lens_kv: both are required"):
        decode(**given | {"block_tables": None})
    with pytest.raises(NotImplementedError, match="batch_offsets_stats: not supported, lse is padded"):
        prefill(b.q, k, v, **prefill_arguments(b), batch_offsets_stats=torch.zeros(3))
    with pytest.raises(ValueError, match='backend: None or "cudnn" is required'):
        prefill(b.q, k, v, **prefill_arguments(b), backend="fa2")
    monkeypatch.setitem(sys.modules, "cudnn", None)  # as if it were not installed
    fi_core.attention.cudnn.graph.frontend.cache_clear()
    for call in (lambda: decode(**given), lambda: prefill(b.q, k, v, **prefill_arguments(b))):
        with pytest.raises(LibraryError, match="pip install nvidia-cudnn-frontend"):
            call()
    fi_core.attention.cudnn.graph.frontend.cache_clear()


def test_unsupported_shapes_raise_with_the_message_of_cudnn(device: str) -> None:
    p = paged([20, 9], kv_layout="HND", device=device)
    given = decode_arguments(p)
    given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    if INSTALLED and device == "cuda":
        with pytest.raises(UnsupportedError, match=r"k: float16 or bfloat16 is required; got .*float8_e4m3fn"):
            fi_core.cudnn_batch_decode_with_kv_cache(**given)
    else:
        result(fi_core.cudnn_batch_decode_with_kv_cache, device, **given)
