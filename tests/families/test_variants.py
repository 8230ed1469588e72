"""Attention variants of users: five variants in every attention function against fp64, and errors."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from families.attention_reference import rotate
from families.harness import TOLERANCE, assert_close, rand
from families.paged import paged
from families.prefill_batch import Batch, batch, workspace
from families.variants import EXAMPLES, LOG2E, SM_SCALE, Example, Lens
from fi_core.attention import BatchAttention
from fi_core.attention.custom import CustomAttention
from fi_core.attention.wrappers import side_by_side
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache_with_jit_module
from fi_core.jit.attention import (
    gen_customize_batch_decode_module,
    gen_customize_batch_prefill_module,
    gen_customize_pod_module,
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
)
from fi_core.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from fi_core.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    get_customize_batch_prefill_module,
    single_prefill_with_kv_cache_with_jit_module,
)
from fi_core.runtime.errors import CompileError
from fi_core.utils import MaskMode

pytestmark = pytest.mark.jit

F16, HEADS, DIM = torch.float16, (4, 2), 64
LSE = (1e-4, 1e-4)
SIGMOID, MASKED, ALIBI, DUMP, SINK = EXAMPLES
by_name = pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)


def jit_args(example: Example, dtype: torch.dtype = F16) -> tuple[Any, ...]:
    return (example.name.lower(), dtype, dtype, dtype, torch.int32, DIM, DIM, *example.declared())


@functools.cache
def single(example: Example, kind: str) -> CustomAttention:
    uri, q, kv, o, _, *rest = jit_args(example)
    if kind == "decode":
        return gen_customize_single_decode_module(uri, q, kv, o, *rest).build_and_load()
    return gen_customize_single_prefill_module("fa2", uri, q, kv, o, *rest).build_and_load()


def check(
    example: Example, results: Any, rows: list[torch.Tensor], keys: Any, tensors: list[torch.Tensor], lens: Lens,
    **masks: Any,
) -> None:  # fmt: skip
    """Compares (out, lse) of all requests, and the tensors that the variant wrote, with fp64."""
    out, lse = results
    expected = [example.attention(q, k, v, tensors, lens, b, **masks) for b, (q, k, v) in enumerate(zip(rows, *keys))]
    want = torch.cat([o for o, _ in expected])
    relative, absolute = TOLERANCE[out.dtype]
    size = 1.0 if example.softmax else float(want.abs().max())  # of sums that are not means
    assert_close(out.reshape(want.shape), want, tolerance=(relative, absolute * max(1.0, size)))
    if example.softmax:
        wanted = torch.cat([x for _, x in expected if x is not None])
        assert_close(lse.reshape(wanted.shape), wanted, tolerance=LSE)
    if example is DUMP:
        products = [torch.einsum("ihd,jhd->hij", q.cpu().double(), k.cpu().double().repeat_interleave(2, 1))
                    for q, k in zip(rows, keys[0])]  # fmt: skip
        assert_close(tensors[0], torch.cat([x.flatten() for x in products]), tolerance=(1e-4, 1e-4))


@by_name
def test_single_decode(example: Example, device: str) -> None:
    """The variant runs in each chunk of split-KV."""
    lens = [(1, 700)]
    q, k, v = (rand(n, h, DIM, dtype=F16, device=device, seed=h) for n, h in ((1, 4), (700, 2), (700, 2)))
    tensors = example.make(lens, HEADS[0], device)
    results = single_decode_with_kv_cache_with_jit_module(
        single(example, "decode"), q[0], k, v, *tensors, *example.values, return_lse=True
    )
    check(example, results, [q], ([k], [v]), tensors, lens)


@by_name
def test_single_prefill(example: Example, device: str) -> None:
    """More rows than one tile and fewer than two; causal except for the variant that attends to all keys."""
    lens, causal = [(45, 130)], example is not DUMP
    q, k, v = (rand(n, h, DIM, dtype=F16, device=device, seed=n) for n, h in ((45, 4), (130, 2), (131, 2)))
    tensors = example.make(lens, HEADS[0], device)
    mode = MaskMode.CAUSAL if causal else MaskMode.NON_CAUSAL
    results = single_prefill_with_kv_cache_with_jit_module(
        single(example, "prefill"), q, k.transpose(0, 1).contiguous(), v[:130].transpose(0, 1), *tensors,
        *example.values, kv_layout="HND", mask_mode=mode.value, return_lse=True,
    )  # fmt: skip
    check(example, results, [q], ([k], [v[:130]]), tensors, lens, causal=causal)


@by_name
def test_batch_decode(example: Example, device: str) -> None:
    """Long and short requests, one without keys; the long one is split over CTAs and merged."""
    lengths = (700, 1, 0, 65)
    p = paged(lengths, heads=HEADS, dim=DIM, device=device)
    lens = [(1, n) for n in lengths]
    tensors = example.make(lens, HEADS[0], device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=jit_args(example))
    wrapper.plan(*p.plan_arguments(), **p.dtypes)
    results = wrapper.run(p.q, p.cache, *tensors, *example.values, return_lse=True)
    check(example, results, list(p.q.split(1)), (p.k, p.v), tensors, lens)
    assert wrapper.resolved_backend == ("cpu" if device == "cpu" else "fa2")


@pytest.mark.parametrize(
    ("q_type", "kv_type", "dims"),
    [
        (torch.float32, torch.float32, (96, 96)),
        (torch.float32, torch.float32, (264, 64)),
        (torch.bfloat16, torch.float8_e4m3fn, (128, 64)),
        (torch.float16, torch.float16, (320, 136)),
    ],
)
@pytest.mark.parametrize("rows", [1, 20])
def test_types_and_head_dims(q_type: Any, kv_type: Any, dims: tuple[int, int], rows: int, device: str) -> None:
    lens = [(rows, 90)]
    q = rand(rows, 4, dims[0], dtype=q_type, device=device, scale=0.5)
    k, v = (rand(90, 2, dim, dtype=kv_type, device=device, seed=dim) for dim in dims)
    tensors = SINK.make(lens, 4, device)
    declared = ("sink", q_type, kv_type, torch.float32, *dims, *SINK.declared())
    if rows == 1:
        made = gen_customize_single_decode_module(*declared).build_and_load()
        out = single_decode_with_kv_cache_with_jit_module(made, q[0], k, v, *tensors, SM_SCALE, window_left=50)[None]
    else:
        made = gen_customize_single_prefill_module("auto", *declared).build_and_load()
        out = single_prefill_with_kv_cache_with_jit_module(made, q, k, v, *tensors, SM_SCALE, window_left=50)
    assert isinstance(out, torch.Tensor)
    expected, _ = SINK.attention(q, k, v, tensors, lens, 0, window_left=50)
    assert_close(out, expected, tolerance=(1e-2, 1e-2) if q_type is not torch.float32 else (2e-5, 2e-5))


def test_rotated_keys(device: str) -> None:
    """pos_encoding_mode 1 rotates q and k before the variant transforms the scores."""
    uri, q_type, kv, o, _, *rest = jit_args(SINK)
    made = gen_customize_single_decode_module(uri, q_type, kv, o, *rest, pos_encoding_mode=1).build_and_load()
    q, k, v = (rand(n, h, DIM, dtype=F16, device=device, seed=h) for n, h in ((1, 4), (60, 2), (61, 2)))
    tensors = SINK.make([(1, 60)], 4, device)
    out = single_decode_with_kv_cache_with_jit_module(made, q[0], k, v[:60], *tensors, SM_SCALE)
    assert isinstance(out, torch.Tensor)
    turned = (
        rotate(q.cpu().double(), torch.tensor([59]), 1.0, 1e4),
        rotate(k.cpu().double(), torch.arange(60), 1.0, 1e4),
    )
    expected, _ = SINK.attention(*turned, v[:60], tensors, [(1, 60)], 0)
    assert_close(out[None], expected)


def test_several_query_tokens(device: str) -> None:
    """Speculative tokens attend to the keys up to their position; with use_cuda_graph and its buffers."""
    p = paged((200, 20), heads=HEADS, dim=DIM, q_len=3, device=device)
    lens = [(3, 200), (3, 20)]
    tensors = SINK.make(lens, 4, device)
    buffers = {f"paged_kv_{name}_buffer": torch.zeros(n, dtype=torch.int32, device=device)
               for name, n in (("indptr", 3), ("indices", 40), ("last_page_len", 2))}  # fmt: skip
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, True, **buffers, jit_args=(*jit_args(SINK), 0, False, False, False, False)
    )
    wrapper.plan(*p.plan_arguments(), **p.dtypes, q_len_per_req=3)
    results = wrapper.run(p.q, p.cache, *tensors, SM_SCALE, return_lse=True)
    check(SINK, results, list(p.q.split(3)), (p.k, p.v), tensors, lens, causal=True)
    if device == "cuda":
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(results[0])
        with torch.cuda.graph(graph):
            wrapper.run(p.q, p.cache, *tensors, SM_SCALE, out=out)
        graph.replay()
        assert torch.equal(out, results[0])


LENS = [(70, 130), (1, 65), (3, 0), (33, 33)]


def prefill(b: Batch, wrapper: type, *extra: Any, plan: dict[str, Any], backend: str = "fa2", **options: Any) -> Any:
    device, is_paged = str(b.q.device.type), wrapper is BatchPrefillWithPagedKVCacheWrapper
    w = wrapper(workspace(device), backend=backend, **options)
    w.plan(*(b.paged_plan() if is_paged else b.ragged_plan()), **b.types(), **plan)
    keys = (b.cache,) if is_paged else b.ragged()
    results = w.run(b.q, *keys, *extra, return_lse=True)
    if backend != "fa2":
        hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        assert w.resolved_backend == ("cpu" if device == "cpu" else "fa3" if hopper else "fa2")
    return results


@pytest.mark.parametrize("wrapper", [BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper],
                         ids=["paged", "ragged"])  # fmt: skip
@pytest.mark.parametrize("backend", ["fa2", "auto"])
@by_name
def test_batch_prefill(example: Example, backend: str, wrapper: type, device: str) -> None:
    b = batch(LENS, heads=HEADS, device=device)
    tensors = example.make(LENS, HEADS[0], device)
    masks = {} if example is DUMP else {"causal": False, "window_left": 20} if example is ALIBI else {"causal": True}
    if example is not DUMP:  # rows without keys, more rows than keys
        assert any(qo > kv for qo, kv in LENS)
    results = prefill(b, wrapper, *tensors, *example.values, plan=masks, backend=backend, jit_args=jit_args(example))
    check(example, results, list(b.q.split(list(b.qo_lens))), (b.k, b.v), tensors, LENS, **masks)


LONG = [(200, 700), (1, 65), (3, 0), (150, 150), (0, 9)]


@pytest.mark.parametrize("example", [SIGMOID, ALIBI, MASKED], ids=lambda e: e.name)
@pytest.mark.parametrize("masks", [{"causal": True}, {"window_left": 100}, {}], ids=lambda m: "-".join(m) or "full")
@pytest.mark.parametrize(
    ("dims", "page_size", "heads"), [((128, 128), 16, (4, 2)), ((192, 128), 5, (3, 3)), ((256, 256), 1, (6, 1))]
)
def test_tiles_of_hopper(
    example: Example, masks: dict[str, Any], dims: tuple[int, int], page_size: int, heads: tuple[int, int], device: str
) -> None:
    """Requests of several KV tiles, of which some are masked in part or as a whole."""
    b = batch(LONG, heads=heads, dims=dims, page_size=page_size, dtype=torch.bfloat16, device=device)
    tensors = example.make(LONG, heads[0], device)
    bf16 = torch.bfloat16
    declared = (f"{example.name.lower()}_{dims[0]}", bf16, bf16, bf16, torch.int32, *dims, *example.declared())
    results = prefill(
        b, BatchPrefillWithPagedKVCacheWrapper, *tensors, *example.values, plan=masks, backend="auto",
        jit_args=declared,
    )  # fmt: skip
    check(example, results, list(b.q.split(list(b.qo_lens))), (b.k, b.v), tensors, LONG, **masks)


def test_unaligned_tensors_and_planned_masks_take_the_general_kernel(device: str) -> None:
    """Which a plan does not know: "auto" serves them."""
    b = batch([(9, 40)], heads=HEADS, device=device)
    tensors = SINK.make([(9, 40)], HEADS[0], device)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=jit_args(SINK))
    w.plan(*b.paged_plan(), **b.types(), causal=True)
    want = w.run(b.q, b.cache, *tensors, SM_SCALE)
    shifted = torch.empty(b.q.numel() + 1, dtype=b.q.dtype, device=device)[1:].view(b.q.shape).copy_(b.q)
    assert_close(w.run(shifted, b.cache, *tensors, SM_SCALE), want.cpu().double())
    assert w.resolved_backend == ("cpu" if device == "cpu" else "fa2")
    w.plan(*b.paged_plan(), **b.types(), custom_mask=torch.ones(9 * 40, dtype=torch.bool, device=device))
    w.run(b.q, b.cache, *tensors, SM_SCALE)
    assert w.resolved_backend == ("cpu" if device == "cpu" else "fa2")


def mixed(b: Batch) -> tuple[Any, ...]:
    qo_indptr, kv_indptr, indices, _, *shape, page_size = b.paged_plan()
    return (qo_indptr, kv_indptr, indices, b.pool.seq_lens(), *shape, b.dims[1], page_size)


def test_mixed_batches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchAttention, POD and BatchPOD: prefill and decode compute the variant, on parts of the SMs."""
    monkeypatch.setattr(side_by_side, "_LEAST", 0.0)
    lens = [(1, 300), (1, 65), (70, 130), (33, 33)]
    b = batch(lens, heads=HEADS, device=device)
    sink = SINK.make(lens, HEADS[0], device)
    options = {"q_data_type": F16, "kv_data_type": F16}
    w = BatchAttention(device=device, jit_args=jit_args(SINK))
    w.plan(*mixed(b), causal=True, **options)
    results = w.run(b.q, b.cache, variant_args=(*sink, SM_SCALE))
    check(SINK, results, list(b.q.split(list(b.qo_lens))), (b.k, b.v), sink, lens, causal=True)
    decode, prompts = b.only(range(2)), b.only(range(2, 4))
    pod = BatchPODWithPagedKVCacheWrapper(workspace(device, 64 << 20), jit_args=jit_args(SINK))
    pod.plan(*prompts.paged_plan()[:4], *decode.paged_plan()[:4], *b.paged_plan()[4:], **options)
    halves = pod.run(
        prompts.q, b.cache, decode.q, b.cache, causal_p=True, return_lse=True, variant_args=(*sink, SM_SCALE)
    )
    for half, results in zip((prompts, decode), halves):
        rows = list(half.q.split(list(half.qo_lens)))
        check(SINK, results, rows, (half.k, half.v), sink, lens, causal=True)
    uri, q, kv, o, idx, dim, _, *lists, name, text = jit_args(SINK)
    declared = (uri, q, kv, o, idx, dim, *lists, name, name, text)
    assert [made.op.name for made in gen_customize_pod_module(*declared).made] == [
        "batch_prefill",
        "batch_decode",
    ]
    one = PODWithPagedKVCacheWrapper(workspace(device, 8 << 20), jit_args=declared)
    _, kv_indptr, indices, last, *shape = decode.paged_plan()
    one.plan(kv_indptr, indices, last, *shape[:3], shape[-1], **options)
    given = (b.q[2:72], b.k[2], b.v[2], decode.q, b.cache)
    out_p, out_d = one.run(*given, causal_p=True, variant_args=(*sink, SM_SCALE))
    for got, request in ((out_p, 2), (out_d[:1], 0), (out_d[1:], 1)):
        rows = b.q.split(list(b.qo_lens))[request]
        assert_close(got, SINK.attention(rows, b.k[request], b.v[request], sink, lens, 0, causal=True)[0])
    with pytest.raises(NotImplementedError, match=r"custom_mask_p: .*as one of its tensors"):
        one.run(*given, custom_mask_p=torch.ones(70, 130), variant_args=(*sink, SM_SCALE))


OWNS_MASK = Example(
    "OwnsMask",
    """
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t bit = qo_idx * kv_len + kv_idx;
    const uint8_t* bits = params.maybe_custom_mask + params.maybe_mask_indptr[batch_idx];
    return !((bits[bit / 8] >> (bit % 8)) & 1);
  })
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + params.maybe_alibi_slopes[qo_head_idx] * float(kv_idx) * math::ptx_rcp(float(params.sm_scale));
  })
};
""",
    {"maybe_custom_mask": "uint8_t", "maybe_mask_indptr": "int32_t", "maybe_alibi_slopes": "float"},
    {"sm_scale": "double"},
    (),
    lambda lens, heads, device: [],
    lambda x, t, b: x,
)


def test_the_wrapper_passes_known_arguments(device: str) -> None:
    """The planned mask and ALiBi's slopes are not passed, and a scalar of the plan may be left out; the mask is the
    variant's alone, which turns it around here."""
    b = batch([(9, 40), (30, 33)], heads=HEADS, device=device)
    masks = [rand(q, k, dtype=torch.float32, device="cpu", seed=q) > 0 for q, k in ((9, 40), (30, 33))]
    flat = torch.cat([m.flatten() for m in masks]).to(device)
    out, _ = prefill(
        b, BatchPrefillWithPagedKVCacheWrapper, plan={"custom_mask": flat, "sm_scale": SM_SCALE},
        jit_args=jit_args(OWNS_MASK), variant_owns_mask=True,
    )  # fmt: skip
    from fi_core.utils import get_alibi_slopes

    for rows, k, v, mask, got in zip(b.q.split([9, 30]), b.k, b.v, masks, out.split([9, 30])):
        q, k, v = rows.cpu().double(), *(x.cpu().double().repeat_interleave(2, 1) for x in (k, v))
        s = torch.einsum("ihd,jhd->hij", q, k) * SM_SCALE
        s = s + get_alibi_slopes(4).double()[:, None, None] * torch.arange(k.shape[0])
        assert_close(got, torch.einsum("hij,jhd->ihd", s.masked_fill(mask, -torch.inf).softmax(-1), v))


def test_a_planned_mask_applies_in_addition_to_the_variant(device: str) -> None:
    """One that does not declare it: the kernel applies both."""
    b = batch([(9, 40)], heads=HEADS, device=device)
    mask = rand(9, 40, dtype=torch.float32, device="cpu") > 0
    tensors = SINK.make([(9, 40)], HEADS[0], device)
    out, lse = prefill(
        b, BatchPrefillWithRaggedKVCacheWrapper, *tensors, SM_SCALE, plan={"custom_mask": mask.flatten()},
        jit_args=jit_args(SINK),
    )  # fmt: skip
    q, k, v = b.q.cpu().double(), *(x.cpu().double().repeat_interleave(2, 1) for x in (b.k[0], b.v[0]))
    s = (torch.einsum("ihd,jhd->hij", q, k) * SM_SCALE).masked_fill(~mask, -torch.inf)
    s = torch.cat([s, tensors[0].cpu().double()[:, None, None].expand(-1, 9, 1)], -1)
    assert_close(out, torch.einsum("hij,jhd->ihd", s.softmax(-1)[..., :40], v))
    assert_close(lse, s.logsumexp(-1).t() * LOG2E, tolerance=LSE)


def test_output_scales_apply_after_the_variant(device: str) -> None:
    p = paged((30,), heads=HEADS, dim=DIM, device=device)
    tensors = SINK.make([(1, 30)], HEADS[0], device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=jit_args(SINK), use_tensor_cores=True)
    wrapper.plan(*p.plan_arguments(), **p.dtypes, sm_scale=SM_SCALE)
    plain, twice = wrapper.run(p.q, p.cache, *tensors), wrapper.run(p.q, p.cache, *tensors, v_scale=2.0)
    assert torch.equal(plain * 2, twice)
    with pytest.raises(NotImplementedError, match=r"^k_scale: declare it"):
        wrapper.run(p.q, p.cache, *tensors, k_scale=0.5)


def test_arguments_are_checked(device: str) -> None:
    lens = [(1, 40)]
    q, k = rand(4, DIM, dtype=F16, device=device), rand(40, 2, DIM, dtype=F16, device=device)
    bits, begin = MASKED.make(lens, 4, device)
    call = functools.partial(single_decode_with_kv_cache_with_jit_module, single(MASKED, "decode"), q, k, k)
    for extra, error, says in (
        ((bits, begin), ValueError, r"^sm_scale: the scalar \(double\) is missing; .*mask_bits, mask_begin, sm_scale"),
        ((bits, SM_SCALE), ValueError, r"^mask_begin: the tensor \(int32_t\*\) is missing"),
        ((None, begin, SM_SCALE), ValueError, r"^mask_bits: the tensor \(uint8_t\*\) is missing"),
        (
            (bits, begin.float(), SM_SCALE),
            TypeError,
            "^mask_begin: declared int32_t.*int32 is required; got torch.float32",
        ),
        ((bits, begin.repeat(2)[::2], SM_SCALE), ValueError, "mask_begin: .*contiguous"),
        ((bits, begin.to("meta"), SM_SCALE), TypeError, "^mask_begin: a dense tensor with data.*got a meta tensor"),
        ((bits, begin, "0.1"), TypeError, "^sm_scale: declared double, so a number is required; got str"),
        ((bits, begin, SM_SCALE, 1), TypeError, "mask_bits, mask_begin, sm_scale are taken; got 4"),
    ):
        with pytest.raises(error, match=says):
            call(*extra)
    if device == "cuda":
        with pytest.raises(ValueError, match=r"mask_bits: a tensor on cuda:0.*got cpu"):
            call(bits.cpu(), begin, SM_SCALE)
    with pytest.raises(ValueError, match=r"dtype_q: masked was made for torch.float16; got torch.bfloat16"):
        single_decode_with_kv_cache_with_jit_module(single(MASKED, "decode"), q.bfloat16(), k, k, bits, begin, 1.0)
    with pytest.raises(TypeError, match=r"jit_module: what build_and_load"):
        single_decode_with_kv_cache_with_jit_module("no module", q, k, k)


def test_a_plan_must_fit_the_declaration() -> None:
    p = paged((5,), heads=HEADS, dim=DIM)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), jit_args=jit_args(SINK))
    with pytest.raises(ValueError, match=r"dtype_o: sink was made for torch.float16; got torch.float32"):
        wrapper.plan(*p.plan_arguments(), **p.dtypes, o_data_type=torch.float32)


def test_a_module_may_be_built_ahead() -> None:
    made = get_customize_batch_prefill_module("fa2", *jit_args(SINK))
    assert made.uri == "sink" and made.op.name == "batch_prefill"


NO_HOOK = """
struct Sink : AttentionVariantBase {
  template <typename Params>
  __device__ __host__ Sink(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) { sm_scale_log2 = 1.f; }
  float compute_score(float score) const { return 2.f * score; }
  float apply(float score) const { if (score > 0.f) { return compute_score(score); } return 0.f; }
  float sm_scale_log2;
};
"""


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({0: "a/b"}, ValueError, "^uri: "),
        ({4: torch.int64}, ValueError, "^idtype: torch.int32"),
        ({7: ["sink", "more"]}, ValueError, "^additional_tensor_dtypes: one for each of additional_tensor_names"),
        ({8: ["vec3"]}, ValueError, "^additional_tensor_dtypes: sink must be one of float, .*got 'vec3'"),
        ({9: ["sink"]}, ValueError, "sink is declared twice"),
        ({9: ["kv_len"]}, ValueError, "^additional_scalar_names: .*got 'kv_len'"),
        ({12: "struct Sink { MainloopParams p; };"}, NotImplementedError, "^variant_decl: MainloopParams .*fa2"),
        ({12: NO_HOOK}, ValueError, r"^variant_decl: a hook such as REGISTER_\w+ is required; got apply\(\)"),
    ],
)  # fmt: skip
def test_declarations_are_checked(change: dict[int, Any], error: type[Exception], says: str) -> None:
    arguments = list(jit_args(SINK))
    for at, value in change.items():
        arguments[at] = value
    with pytest.raises(error, match=says):
        gen_customize_batch_decode_module(*arguments)


def test_a_struct_may_leave_all_hooks_out() -> None:
    """It is plain attention, with the scale that its constructor computes, here by a function of its own."""
    plain = NO_HOOK.replace("apply", "scale").replace("= 1.f", "= scale(params.sm_scale)")
    made = gen_customize_batch_decode_module(*jit_args(SINK)[:12], plain).made
    assert made.variant.declaration == plain


def test_unsupported_modules_raise_with_advice() -> None:
    with pytest.raises(NotImplementedError, match=r'^backend: .*pass backend="fa2"'):
        gen_customize_batch_prefill_module("cudnn", *jit_args(SINK))
    with pytest.raises(ValueError, match=r"^backend: fa3 requires q, k, v and output of one 16-bit dtype"):
        gen_customize_batch_prefill_module("fa3", *jit_args(SINK, torch.float32))
    with pytest.raises(NotImplementedError, match=r"^fp8_enabled: "):
        gen_customize_batch_prefill_module("fa2", *jit_args(SINK), fp8_enabled=True)
    with pytest.raises(TypeError, match=r"Wrapper: jit_args: 13 are required, uri, dtype_q, .*got 2"):
        BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), jit_args=["sink", F16])
    with pytest.raises(TypeError, match=r"Wrapper: jit_args, jit_kwargs: .*use_window"):
        BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), jit_args=jit_args(SINK), jit_kwargs={"use_window": 1})


def test_compile_errors_point_into_the_users_text(device: str) -> None:
    """The file is called variant_decl, and its lines are counted from the beginning of the text."""
    wrong = "struct Wrong : AttentionVariantBase {\n  static constexpr bool use_softmax = false;\n  floot scale;\n};\n"
    module = gen_customize_single_decode_module("wrong", F16, F16, F16, 64, 64, [], [], [], [], "Wrong", wrong)
    with pytest.raises(CompileError, match=r"failed: variant_decl[(:]3\b.*floot"):
        module.made.bind(torch.device(device, 0) if device == "cuda" else torch.device(device))


def test_the_example(device: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "custom_attention.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if device == "cuda" or not torch.cuda.is_available():
        assert f"on {device}: largest error of 54 tokens 0.00" in done.stdout
