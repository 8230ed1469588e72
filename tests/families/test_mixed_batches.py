"""Wrappers for prompts and decode requests of one step, and for shared prefixes, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import assert_close, rand
from families.paged import paged
from families.prefill_batch import LSE, Batch, batch, workspace
from fi_core.attention import BatchAttention
from fi_core.attention.wrappers import side_by_side
from fi_core.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from fi_core.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper

DECODE_FIRST = [(1, 37), (1, 0), (1, 100), (5, 37), (0, 3), (70, 70), (1, 40)]
BATCHES = {
    "decode first": DECODE_FIRST,
    "decode last": [(20, 60), (3, 3), (1, 37), (1, 90)],
    "only decode": [(1, 20), (1, 33)],
    "only prompts": [(20, 20), (16, 40)],
    "decode inside": [(4, 20), (1, 33), (7, 7)],
    "no rows": [(0, 3), (0, 0)],
}


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides the SMs whatever the work is."""
    monkeypatch.setattr(side_by_side, "_LEAST", 0.0)


def test_a_failed_prefill_waits_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may free what decode, on a stream of its own, still reads."""
    seen: list[str] = []

    class Recorder:
        cuda_stream = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def record(self, stream: Recorder) -> None:
            seen.append(f"{self.name} after {stream.name}")

        def wait_event(self, event: Recorder) -> None:
            seen.append(f"{self.name} waits for {event.name}")

    def prefill() -> None:
        raise ValueError("prefill")

    monkeypatch.setattr(side_by_side, "_side", lambda *_: tuple(map(Recorder, ("side", "fork", "join"))))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Recorder("current"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    with pytest.raises(ValueError, match="prefill"):
        side_by_side.side_by_side(4, torch.device("cuda"), prefill, lambda: seen.append("decode"))
    assert seen == ["fork after current", "side waits for fork", "decode", "join after side", "current waits for join"]


def attention_plan(b: Batch) -> tuple[Any, ...]:
    qo_indptr, kv_indptr, indices, _, *shape, page_size = b.paged_plan()
    return (qo_indptr, kv_indptr, indices, b.pool.seq_lens(), *shape, b.dims[1], page_size)


@pytest.mark.parametrize("name", BATCHES)
def test_batch_attention(name: str, device: str, divided: None) -> None:
    b = batch(BATCHES[name], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, device=device)
    w = BatchAttention(device=device)
    for options in ({"causal": True}, {"causal": False, "sm_scale": 0.2, "logits_soft_cap": 6.0}):
        w.plan(*attention_plan(b), **options)
        out, lse = w.run(b.q, b.cache)
        want, want_lse = b.expected(**options)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        into, lse_into = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
        again = w.run(b.q, b.cache, into, lse_into, v_scale=2.0)
        assert again[0] is into and again[1] is lse_into
        assert_close(into, 2 * want)


def test_batch_attention_takes_host_tables_and_layouts(device: str, divided: None) -> None:
    b = batch(DECODE_FIRST, heads=(8, 2), dims=(64, 64), device=device, kv_layout="HND", page_size=8)
    w = BatchAttention("HND", device)
    tables = [x.cpu() if isinstance(x, torch.Tensor) and i != 2 else x for i, x in enumerate(attention_plan(b))]
    w.plan(*tables, causal=True, logits_soft_cap=3.0, q_data_type="float16", kv_data_type="float16")
    out, _ = w.run(b.q, b.cache, logits_soft_cap=5.0)
    assert_close(out, b.expected(causal=True, logits_soft_cap=5.0)[0])
    out, _ = w.run(b.q, b.cache)
    assert_close(out, b.expected(causal=True, logits_soft_cap=3.0)[0])


def test_batch_attention_of_fp8_keys(device: str, divided: None) -> None:
    b = batch(DECODE_FIRST, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn,
              device=device)  # fmt: skip
    w = BatchAttention(device=device)
    w.plan(*attention_plan(b), causal=True, kv_data_type=torch.float8_e4m3fn)
    out, _ = w.run(b.q, b.cache, k_scale=0.5, v_scale=2.0)
    assert_close(out, b.expected(causal=True, k_scale=0.5, v_scale=2.0)[0])


def test_batch_attention_names_wrong_arguments(device: str) -> None:
    b = batch(DECODE_FIRST, dims=(64, 64), device=device)
    w, types = BatchAttention(device=device), {"q_data_type": b.q.dtype, "kv_data_type": b.q.dtype}
    plan = attention_plan(b)
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(b.q, b.cache)
    for at, wrong, match in ((3, b.pool.seq_lens()[:-1], "kv_len_arr"), (6, 264, "head_dim"), (4, 3, "num_qo_heads"),
                             (2, b.pool.indices[:2], "indices")):  # fmt: skip
        w.plan(*plan, **types)
        w.run(b.q, b.cache)
        with pytest.raises(ValueError, match=match):
            w.plan(*plan[:at], wrong, *plan[at + 1 :], **types)
        with pytest.raises(RuntimeError, match="the last plan failed"):
            w.run(b.q, b.cache)
    with pytest.raises(NotImplementedError, match="use_profiler"):
        w.plan(*plan, **types, use_profiler=True)
    w.plan(*plan, **types)
    with pytest.raises(ValueError, match="logits_soft_cap"):
        w.run(b.q, b.cache, logits_soft_cap=1.0)
    with pytest.raises(ValueError, match="q: "):
        w.run(b.q[:-1], b.cache)
    with pytest.raises(ValueError, match="out"):
        w.run(b.q, b.cache, out=torch.empty_like(b.q)[:-1])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pod(kv_layout: str, device: str, divided: None) -> None:
    p = paged([37, 0, 100, 5], heads=(8, 2), dim=128, kv_layout=kv_layout, device=device)
    heads, tokens = (8, 2), 90
    q, k, v = (rand(n, h, 128, dtype=p.q.dtype, device=device, seed=9 + i)
               for i, (n, h) in enumerate([(60, heads[0]), (tokens, heads[1]), (tokens, heads[1])]))  # fmt: skip
    w = PODWithPagedKVCacheWrapper(workspace(device, 1 << 20), kv_layout)
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(q, k, v, p.q, p.cache)
    w.plan(*p.plan_arguments(), window_left=20, **p.dtypes)
    want = p.expected(window_left=20)[0]
    mask = torch.rand(60, tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    for options, reference in (({}, {}), ({"causal_p": True, "sm_scale_p": 0.3, "window_left_p": 30},
                                          {"causal": True, "sm_scale": 0.3, "window_left": 30}),
                               ({"custom_mask_p": mask.to(device)}, {"custom_mask": mask}),
                               ({"kv_layout_p": "HND"}, {})):  # fmt: skip
        keys = [x.transpose(0, 1) if "kv_layout_p" in options else x for x in (k, v)]
        out_p, out_d = w.run(q, *keys, p.q, p.cache, **options)
        assert_close(out_p, attention(q, k, v, **reference)[0])
        assert_close(out_d, want)
    with pytest.raises(NotImplementedError, match="custom_mask_d"):
        w.run(q, k, v, p.q, p.cache, custom_mask_d=mask)
    with pytest.raises(TypeError, match=r"Wrapper: jit_args: .*missing 12 required"):
        PODWithPagedKVCacheWrapper(workspace(device), jit_args=("x",))


def test_batch_pod(device: str, divided: None) -> None:
    b = batch(DECODE_FIRST, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, device=device)
    decode, prompts = b.only(range(3)), b.only(range(3, 7))
    w = BatchPODWithPagedKVCacheWrapper(workspace(device, 64 << 20))
    assert fi_core.BatchPODWithPagedKVCacheWrapper is BatchPODWithPagedKVCacheWrapper
    tables = prompts.paged_plan()[:4], decode.paged_plan()[:4]
    rest = b.paged_plan()[4:]
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(prompts.q, b.cache, decode.q, b.cache)
    w.plan(*tables[0], *tables[1], *rest, q_data_type=b.q.dtype, kv_data_type=b.q.dtype)
    for causal in (True, False):
        out_p, out_d = w.run(prompts.q, b.cache, decode.q, b.cache, causal_p=causal)
        assert_close(out_p, prompts.expected(causal=causal)[0])
        assert_close(out_d, decode.expected()[0])
    (out_p, lse_p), (out_d, lse_d) = w.run(prompts.q, b.cache, decode.q, b.cache, return_lse=True)
    assert_close(lse_p, prompts.expected()[1], tolerance=LSE)
    assert_close(lse_d, decode.expected()[1], tolerance=LSE)
    masks = [rand(len(q), len(k), dtype=torch.float32, device="cpu") > 0
             for q, k in zip(prompts.q.split(list(prompts.qo_lens)), prompts.k)]  # fmt: skip
    flat = torch.cat([mask.flatten() for mask in masks]).to(device)
    masked, _ = w.run(prompts.q, b.cache, decode.q, b.cache, custom_mask_p=flat)
    assert_close(masked, prompts.expected(masks)[0])
    if device == "cpu":  # elsewhere tables on the device do not tell the number of elements
        with pytest.raises(ValueError, match="custom_mask"):
            w.run(prompts.q, b.cache, decode.q, b.cache, custom_mask_p=flat[:1])
    assert_close(w.run(prompts.q, b.cache, decode.q, b.cache, causal_p=True)[0], prompts.expected(causal=True)[0])
    for wrong, match in ((tables[0][0].cpu(), "qo_indptr_d"), (torch.tensor([0, 1, 2, 4]), "qo_indptr_d")):
        with pytest.raises(ValueError, match=match):
            w.plan(*tables[0], wrong, *tables[1][1:], *rest)
        with pytest.raises(RuntimeError, match="the last plan failed"):
            w.run(prompts.q, b.cache, decode.q, b.cache)
    with pytest.raises(ValueError, match="kv_indices"):
        w.plan(*(x.cpu() for x in tables[0][:2]), tables[0][2][:1], tables[0][3], *tables[1], *rest)


@pytest.mark.gpu
def test_mixed_batches_in_a_cuda_graph(device: str, divided: None) -> None:
    """The fork and the join of streams are captured; a replay computes the batch of the buffers."""
    if device == "cpu":
        pytest.skip("a CUDA graph")
    b = batch(DECODE_FIRST, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, device=device)
    w = BatchAttention(device=device)
    w.plan(*attention_plan(b), causal=True)
    w.run(b.q, b.cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = w.run(b.q, b.cache)
    out.fill_(float("nan"))
    graph.replay()
    assert_close(out, b.expected(causal=True)[0])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_shared_prefix(kv_layout: str, device: str) -> None:
    lens = [(3, 20), (1, 5), (8, 8), (2, 0)]
    b = batch(lens, heads=(8, 2), dims=(64, 64), kv_layout=kv_layout, device=device)
    shared = [rand(70, 2, 64, dtype=b.q.dtype, device=device, seed=s) for s in (5, 6)]
    given = [x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in shared]

    def expected(one: Batch, **options: Any) -> torch.Tensor:
        rows = one.q.split(list(one.qo_lens))
        keys = [[torch.cat([s, x[i]]) for s, x in zip(shared, (one.k, one.v))] for i in range(len(rows))]
        return torch.cat([attention(q, *kv, **options)[0] for q, kv in zip(rows, keys)])

    w = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), kv_layout)
    with pytest.raises(RuntimeError, match="call plan first"):
        w.forward(b.q, *given, b.cache)
    w.begin_forward(*b.paged_plan())
    visible = b.only([0, 1, 2])
    for options in ({"causal": True}, {"sm_scale": 0.4}):
        out = w.forward(b.q, *given, b.cache, **options)
        assert_close(out[:12], expected(visible, **options))
        assert_close(out[12:], expected(b.only([3]), sm_scale=options.get("sm_scale")))
    single = paged([20, 0, 33], heads=(8, 2), kv_layout=kv_layout, device=device)
    decode = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device, 1 << 16), kv_layout)
    decode.begin_forward(*single.plan_arguments())
    want = [attention(single.q[i : i + 1], *(torch.cat([s, x[i]]) for s, x in zip(shared, (single.k, single.v))))[0]
            for i in range(3)]  # fmt: skip
    assert_close(decode.forward(single.q, *given, single.cache), torch.cat(want))
    decode.end_forward()
    with pytest.raises(ValueError, match="indptr"):
        decode.begin_forward(single.indptr[:-1], *single.plan_arguments()[1:])
    with pytest.raises(RuntimeError, match="the last plan failed"):
        decode.forward(single.q, *given, single.cache)


@pytest.mark.jit
@pytest.mark.parametrize("windows", [(-1, -1), (12, 30), (0, 0)])
def test_bidirectional_ranges(windows: tuple[int, int], device: str) -> None:
    b = batch([(40, 60), (16, 16), (0, 5), (1, 20)], heads=(4, 2), dims=(64, 64), device=device)
    spans = [[(25, 34), (40, 55)], [(0, 7), (9, 15)], [], []]  # keys of each request that see each other
    ranges, masks = [], []
    for (qo_len, kv_len), own in zip(((40, 60), (16, 16), (0, 5), (1, 20)), spans):
        position = torch.arange(kv_len - qo_len, kv_len)[:, None]
        distance = position - torch.arange(kv_len)
        mask = (distance >= 0) & ((distance <= windows[0]) if windows[0] >= 0 else True)
        span = torch.full((qo_len, 2), -1, dtype=torch.int32)
        for first, last in own:
            inside = ((position >= first) & (position <= last))[:, 0]
            span[inside] = torch.tensor([first, last], dtype=torch.int32)
            keys = (torch.arange(kv_len) >= first) & (torch.arange(kv_len) <= last)
            near = (distance < windows[1]) if windows[1] > 0 else torch.ones_like(mask)
            mask |= inside[:, None] & keys & near
        ranges.append(span)
        masks.append(mask)
    w = fi_core.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(device), q_data_type=b.q.dtype, kv_data_type=b.q.dtype, head_dim_qk=64, head_dim_vo=64
    )
    assert w.workspace_size(*b.paged_plan())[1] > 0
    w.plan(*b.paged_plan(), logits_soft_cap=4.0)
    every = torch.cat(ranges).to(device)
    out, lse = w.forward_return_lse(b.q, b.cache, every, *windows)
    want, want_lse = b.expected(masks, logits_soft_cap=4.0)
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=LSE)
    with pytest.raises(ValueError, match="one row per query token"):
        w.run(b.q, b.cache, every[:-1])
    with pytest.raises(ValueError, match=r"q_data_type: torch\.float16 of the constructor is required"):
        w.plan(*b.paged_plan(), q_data_type="bfloat16")
    with pytest.raises(NotImplementedError, match="causal: not supported"):
        w.plan(*b.paged_plan(), causal=True)
    for window in (0, 3):
        with pytest.raises(NotImplementedError, match=f"window_left: not supported, .*; got {window}$"):
            w.plan(*b.paged_plan(), window_left=window)
