"""Options of batch decode: each against fp64, and errors that name the argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import _neg_view
from torch._subclasses import FakeTensorMode

from families.engine import engine
from families.harness import assert_close, rand
from families.paged import Paged, paged
from families.prefill_batch import batch as prefill_batch
from families.test_batch_decode import LSE, workspace, wrappers
from fi_core.attention.ops import decode as ops
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper as Wrapper
from fi_core.decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

# The options of plan, and those that forward replaces.
OPTIONS: list[dict[str, Any]] = [
    {"sm_scale": 0.3},
    {"logits_soft_cap": 1.5},
    {"window_left": 0},
    {"window_left": 63},
    {"window_left": 140},
    {"pos_encoding_mode": "ALIBI"},
    {"pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 500.0},
]


def label(options: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items())


def batch(device: str, **more: Any) -> Paged:
    return paged([300, 0, 1, 65, 150], heads=(6, 2), device=device, **more)


def differs(p: Paged, options: dict[str, Any]) -> bool:
    (a, a_lse), (b, b_lse) = p.expected(**options), p.expected()
    return bool((a - b).abs().max() > 0.05 or (a_lse - b_lse).nan_to_num(0).abs().max() > 0.05)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_options_of_plan_and_forward(options: dict[str, Any], q_len: int, device: str) -> None:
    p = paged([300, 5, 65, 150], heads=(6, 2), q_len=q_len, device=device)
    want, want_lse = p.expected(**options)
    assert differs(p, options)
    for wrapper in wrappers(p, **options):
        out, lse = wrapper.run(p.q, p.cache, return_lse=True)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
    for wrapper in wrappers(p):
        if engine(wrapper).backend in ("auto", "fa2") or "pos" not in label(options):
            out, lse = wrapper.forward_return_lse(p.q, p.cache, **options)
            assert_close(out, want)
            assert_close(lse, want_lse, tolerance=LSE)
            assert torch.equal(wrapper.forward(p.q, p.cache, **options), out)


def test_forward_without_options_uses_defaults(device: str) -> None:
    p = batch(device)
    want, _ = p.expected()
    for wrapper in wrappers(p, window_left=20, logits_soft_cap=2.0, sm_scale=0.7):
        assert_close(wrapper.forward(p.q, p.cache), want)
        assert engine(wrapper).scores == (-1, 0.0, None)


@pytest.mark.parametrize("scales", [{"q_scale": 0.5}, {"k_scale": 1.7}, {"v_scale": 0.4}], ids=label)
@pytest.mark.parametrize("tensor", [False, True])
def test_scales_of_run(scales: dict[str, float], tensor: bool, device: str) -> None:
    p = batch(device)
    factor = scales.get("q_scale", 1.0) * scales.get("k_scale", 1.0)
    want, want_lse = p.expected(k_scale=factor, v_scale=scales.get("v_scale", 1.0))
    given = {name: torch.tensor([x], device=device) if tensor else x for name, x in scales.items()}
    for wrapper in wrappers(p):
        out, lse = wrapper.run(p.q, p.cache, return_lse=True, **given)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        both = wrapper.run(p.q, p.cache, q_scale=given.get("q_scale"), k_scale=2.0, sinks=None)
        assert_close(both, p.expected(k_scale=2.0 * scales.get("q_scale", 1.0))[0])


def test_sinks_join_the_softmax_once(device: str) -> None:
    """Also with split-KV, and for a request without keys."""
    p = paged([2000, 0, 1, 65], heads=(6, 2), device=device)
    sinks = rand(6, dtype=torch.float32, device=device, scale=3.0)
    want, want_lse = p.expected(sinks=sinks)
    assert differs(p, {"sinks": sinks})
    for options in ({}, {"disable_split_kv": True}, {"fixed_split_size": 8}):
        for wrapper in wrappers(p, **options):
            out, lse = wrapper.run(p.q, p.cache, sinks=sinks, return_lse=True)
            assert_close(out, want)
            assert_close(lse, want_lse, tolerance=LSE)


@pytest.mark.parametrize("window_left", [-1, 50])
@pytest.mark.parametrize(
    "mode", [{"fixed_split_size": 4}, {"fixed_split_size": 16}, {"disable_split_kv": True}], ids=label
)
def test_batch_invariance(mode: dict[str, Any], window_left: int, device: str) -> None:
    """The result of a request has the same bits alone and in any batch."""
    p = paged([700, 0, 64, 1500, 3, 129, 1024], heads=(8, 2), device=device)
    for whole, *others in zip(
        wrappers(p, window_left=window_left, **mode),
        *(wrappers(p.only([b]), window_left=window_left, **mode) for b in range(7)),
        wrappers(p.only([6, 3, 2, 0, 3]), window_left=window_left, **mode),
    ):
        out, lse = whole.run(p.q, p.cache, return_lse=True)
        assert_close(out, p.expected(window_left=window_left)[0])
        for b in range(7):
            alone = others[b].run(p.only([b]).q, p.cache, return_lse=True)
            assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], lse[b])
        mixed = others[7].run(p.only([6, 3, 2, 0, 3]).q, p.cache, return_lse=True)
        assert torch.equal(mixed[0], out[[6, 3, 2, 0, 3]]) and torch.equal(mixed[1], lse[[6, 3, 2, 0, 3]])


def test_the_mode_can_change_from_plan_to_plan(device: str) -> None:
    p = batch(device)
    want, _ = p.expected()
    for wrapper in wrappers(p):
        for mode in ({"fixed_split_size": 2}, {}, {"disable_split_kv": True}, {"fixed_split_size": 1}):
            wrapper.plan(*p.plan_arguments(), **p.dtypes, **mode)  # type: ignore[arg-type]
            assert_close(wrapper.run(p.q, p.cache), want)


# Refusals


def refused(error: type[Exception], words: str, device: str = "cpu", **change: Any) -> None:
    """Calls plan or run with one argument changed."""
    p = paged([20, 9], device=device)
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    arguments = dict(zip(names, p.plan_arguments())) | p.dtypes
    calls = {name: change.pop(name) for name in list(change) if name in CALL}
    wrapper = Wrapper(workspace(device), use_tensor_cores=calls.pop("use_tensor_cores", False))

    def call() -> None:
        wrapper.plan(**(arguments | change))
        wrapper.run(**({"q": p.q, "paged_kv_cache": p.cache} | calls))

    with pytest.raises(error, match=words):
        call()


CALL = (
    "q", "paged_kv_cache", "out", "lse", "sinks", "q_scale", "kv_cache_sf", "use_tensor_cores", "enable_pdl"
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pos_encoding_mode": "alibi"}, KeyError, "pos_encoding_mode: allowed are NONE, .* got 'alibi'"),
        ({"paged_kv_cache": [1, 2]}, KeyError, "paged_kv_cache: must be a tensor or a tuple"),
        ({"paged_kv_cache": torch.ones(3, 3)}, ValueError, "paged_kv_cache: must have 4 or 5 dimensions"),
        ({"q_data_type": "bfloat16", "kv_data_type": "float16"}, ValueError, "q: q_data_type torch.bfloat16 was"),
        ({"kv_data_type": "bfloat16"}, ValueError, "kv_data_type torch.bfloat16 was planned; got torch.float16"),
        ({"q_data_type": "half-precision"}, ValueError, "q_data_type: must be the name of a torch dtype"),
        ({"q_data_type": 16}, TypeError, "q_data_type: must be a str or torch.dtype, got int"),
        ({"q": torch.ones(3, 4, 64).half()}, ValueError, r"q: shape \(2, 4, 64\) was planned"),
        ({"q": torch.ones(2, 8, 64).half()}, ValueError, r"q: shape \(2, 4, 64\) was planned"),
        ({"out": torch.ones(2, 4, 32).half()}, ValueError, "out: shape must be"),
        ({"out": torch.ones(2, 4, 64)}, ValueError, "out: dtype must be torch.float16"),
        ({"lse": torch.ones(2, 5)}, ValueError, "lse: shape must be"),
        ({"lse": torch.ones(2, 4).half()}, ValueError, "lse: dtype must be torch.float32"),
        ({"sinks": torch.ones(3)}, ValueError, "sinks must have shape"),
        ({"sinks": torch.ones(4).half()}, TypeError, "sinks must be float32"),
        ({"q_scale": "big"}, TypeError, "q_scale must be a dense tensor"),
        ({"kv_cache_sf": torch.ones(1)}, ValueError, "kv_cache_sf: paged_kv_cache of uint8, which is NVFP4"),
        ({"kv_data_type": torch.uint8}, ValueError, "kv_data_type torch.uint8 was planned; got torch.float16"),
        ({"page_size": 32}, ValueError, "paged_kv_cache: page_size 32 .* were planned"),
        ({"page_size": 0}, ValueError, "page_size: at least 1"),
        ({"num_qo_heads": 5}, ValueError, r"num_qo_heads: a positive multiple of num_kv_heads \(2\)"),
        ({"num_qo_heads": 1 << 62}, ValueError, r"num_qo_heads: a positive multiple of .*, at most 65536, is required"),
        ({"head_dim": 60}, ValueError, "Unsupported head_dim"),
        ({"indptr": torch.zeros(4, dtype=torch.int32)}, ValueError, "indptr: length 3 is required"),
        ({"indptr": torch.zeros(3)}, TypeError, "indptr must be int32; got float32"),
        ({"last_page_len": torch.ones(2, dtype=torch.int16)}, TypeError, "last_page_len must be int32"),
        ({"indices": torch.ones(9, dtype=torch.int16)}, TypeError, "page_indices must be int32; got int16"),
        ({"indices": torch.ones(2, dtype=torch.int32)}, ValueError, "indices: 3 are required, .* got 2"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, ValueError, "seq_lens: length 2 is required"),
        ({"fixed_split_size": 0}, ValueError, "fixed_split_size: pages of a chunk, or None or -1 .* got 0"),
        ({"q_len_per_req": 2}, ValueError, "q_len_per_req: .* without use_tensor_cores"),
        ({"q_len_per_req": 0, "use_tensor_cores": True}, ValueError, "q_len_per_req: at least 1"),
        ({"q_len_per_req": 10, "use_tensor_cores": True}, ValueError, "q_len_per_req: all requests .* request 1 has 9"),
        ({"q_len_per_req": 2, "use_tensor_cores": True}, ValueError, r"q: shape \(4, 4, 64\) was planned"),
        ({"rope_theta": -1.0, "pos_encoding_mode": "ROPE_LLAMA"}, ValueError, "rope_theta must be positive"),
    ],
)  # fmt: skip
def test_plan_and_run_refuse(change: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(error, words, **change)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_layout": "HDN"}, KeyError, "kv_layout: allowed are NHD, HND; got 'HDN'"),
        ({"backend": "fa4"}, ValueError, "backend: allowed are auto, fa2, .* got 'fa4'"),
        ({"backend": "prims-ts"}, NotImplementedError, "backend: 'prims-ts' names kernels of another library"),
        ({"jit_args": ["uri"]}, TypeError, "jit_args: 13 are required"),
        ({"float_workspace_buffer": torch.empty(99, dtype=torch.uint8)[1:]}, ValueError, "16-byte aligned"),
        ({"float_workspace_buffer": torch.empty(64, 64).t()}, ValueError, "float_workspace_buffer: a contiguous"),
        ({"use_cuda_graph": True}, ValueError, "paged_kv_indptr_buffer: a tensor is required with use_cuda_graph"),
    ],
)  # fmt: skip
def test_constructor_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Wrapper(**({"float_workspace_buffer": workspace("cpu")} | change))


BUFFERS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "negated": (_neg_view, "got a negative view"),
    "fake": (FakeTensorMode().from_tensor, "only torch's dispatcher can read"),
    "meta": (lambda x: x.to("meta"), "got a meta tensor"),
    "sparse": (lambda x: x.to_sparse(), "got layout torch.sparse_coo"),
    "strided": (lambda x: x[::2], "with strides"),
}


@pytest.mark.parametrize("form", BUFFERS)
def test_a_plan_can_write_the_buffers_of_a_graph(form: str) -> None:
    make, words = BUFFERS[form]
    buffers = {
        f"paged_kv_{name}_buffer": torch.zeros(9, dtype=torch.int32) for name in ("indptr", "indices", "last_page_len")
    }
    for name, buffer in buffers.items():
        with pytest.raises(ValueError, match=f"{name}: a contiguous tensor with data .* {words}"):
            Wrapper(workspace("cpu"), use_cuda_graph=True, **buffers | {name: make(buffer)})


@pytest.mark.parametrize("scale", [object, "1", [1.0, 2.0]])
def test_scales_that_do_not_multiply_are_named(scale: Any) -> None:
    p = paged([20])
    wrapper = Wrapper(workspace("cpu"))
    wrapper.plan(*p.plan_arguments())
    with pytest.raises(TypeError, match=r"[qk]_scale"):
        wrapper.run(p.q, p.cache, q_scale=torch.ones(3, 1, 5, dtype=torch.uint32), k_scale=scale)
    with pytest.raises(TypeError, match=r"[qk]_scale"):
        wrapper.run(p.q, p.cache, q_scale=scale, k_scale=torch.ones(1))


def test_run_before_plan_and_other_windows_are_refused() -> None:
    p = paged([20])
    wrapper = Wrapper(workspace("cpu"))
    with pytest.raises(RuntimeError, match="run: call plan first"):
        wrapper.run(p.q, p.cache)
    with pytest.raises(RuntimeError, match="fast_decode_plan: call plan once before"):
        fast_decode_plan(wrapper, *p.plan_arguments())
    wrapper.plan(*p.plan_arguments(), window_left=7)
    wrapper.run(p.q, p.cache, window_left=7)
    with pytest.raises(ValueError, match="window_left: 7 was planned; got 8"):
        wrapper.run(p.q, p.cache, window_left=8)
    wrapper.reset_workspace_buffer(workspace("cpu"), torch.empty(1 << 20, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="call plan first"):
        wrapper.run(p.q, p.cache)


def test_graph_mode_refuses_other_batches() -> None:
    p = paged([20, 9])
    ints = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(ValueError, match="Wrapper: indptr_buffer: length 3 is required"):
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), ints[:4], ints, ints[:2])
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), ints[:3], ints[3:6], ints[6:], "NHD", True)
    wrapper.plan(*p.plan_arguments())
    with pytest.raises(ValueError, match="batch size is fixed at 2 by use_cuda_graph; got 1"):
        wrapper.plan(*p.only([0]).plan_arguments())
    with pytest.raises(ValueError, match="indices: paged_kv_indices_buffer has room for 3; got 5"):
        wrapper.plan(*paged([40, 20]).plan_arguments())
    with pytest.raises(TypeError, match=r"buffer: a table of torch.int32 or int64 is required; got torch.int16"):
        wrapper.plan(p.indptr.short(), *p.plan_arguments()[1:])
    with pytest.raises(ValueError, match="q_len_per_req: fixed at 1 by the first plan"):
        wrapper.plan(*p.plan_arguments(), q_len_per_req=2)


def test_a_workspace_that_is_too_small_says_how_much_is_needed() -> None:
    p = paged([5000, 3000], page_size=16)
    small = Wrapper(torch.empty(64, dtype=torch.uint8))
    small.reset_workspace_buffer(torch.empty(64, dtype=torch.uint8), torch.empty(1 << 14, dtype=torch.uint8))
    need, own = small.workspace_size(*p.plan_arguments())
    with pytest.raises(ValueError, match=f"float_workspace_buffer: {need} bytes are required; got 64"):
        small.plan(*p.plan_arguments())
    small.reset_workspace_buffer(torch.empty(64, dtype=torch.uint8), torch.empty(1024, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"int_workspace_buffer: .* bytes are required; got 1024"):
        small.plan(*p.plan_arguments())
    small.reset_workspace_buffer(torch.empty(need, dtype=torch.uint8), torch.empty(own, dtype=torch.uint8))
    small.plan(*p.plan_arguments())
    assert_close(small.run(p.q, p.cache), p.expected()[0])
    longer = paged([50000, 1], page_size=16)
    assert small.workspace_size(*longer.plan_arguments()) == (need, own), "lengths do not matter"
    none = (None,) * 10  # from logits_soft_cap on
    assert small.workspace_size(*p.plan_arguments(), "NONE", -1, *none) == (need, own)
    for option in ("non_blocking", "fixed_splits"):
        with pytest.raises(TypeError, match=rf"workspace_size\(\) got an unexpected keyword argument '{option}'"):
            small.workspace_size(*p.plan_arguments(), **{option: True})
    assert small.workspace_size(*longer.plan_arguments(), "NONE", -1, *none, 1, False)[0] > need, "fixed_split_size"


@pytest.mark.usefixtures("checked")
def test_page_ids_are_checked(device: str) -> None:
    p = paged([40, 9], device=device)
    for wrapper in wrappers(p):
        wrapper.run(p.q, p.cache)
        engine(wrapper).paged_kv_indices_buf[1] = 99
        with pytest.raises(ValueError, match="the page table, must name pages of the cache, 0 to 6; got 99 at 1"):
            wrapper.run(p.q, p.cache)
        engine(wrapper).paged_kv_indices_buf[1] = -1
        with pytest.raises(ValueError, match="got -1 at 1"):
            wrapper.run(p.q, p.cache)
        engine(wrapper).paged_kv_indices_buf[1] = 0


def test_dependent_launch_changes_nothing(device: str) -> None:
    p = batch(device)
    for wrapper in wrappers(p):
        want = wrapper.run(p.q, p.cache)
        for pdl in (True, False):
            assert torch.equal(wrapper.run(p.q, p.cache, enable_pdl=pdl), want)


def test_positional_options_warn() -> None:
    p = paged([20, 9])
    wrapper = Wrapper(workspace("cpu"))
    with pytest.warns(DeprecationWarning, match="plan: pass pos_encoding_mode, window_left by keyword"):
        wrapper.plan(*p.plan_arguments(), "NONE", 5, q_data_type="float16")
    assert engine(wrapper).window_left == 5
    with pytest.raises(TypeError, match="multiple values for keyword argument 'window_left'"):
        wrapper.plan(*p.plan_arguments(), "NONE", 5, window_left=-1)
    with pytest.raises(TypeError, match="plan: at most 16 options may go by position; got 17"):
        wrapper.plan(*p.plan_arguments(), *[None] * 17)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper.begin_forward(*p.plan_arguments(), q_data_type="float16")
    with pytest.warns(DeprecationWarning, match="run: q_len_per_req belongs to plan"):
        wrapper.run(p.q, p.cache, q_len_per_req=1)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, ("float16",) * 3),
        ({"data_type": "bfloat16"}, ("float16", "bfloat16", "float16")),
        ({"data_type": torch.bfloat16, "q_data_type": None}, ("bfloat16",) * 3),
        ({"q_data_type": "bfloat16"}, ("bfloat16",) * 3),
        ({"q_data_type": torch.bfloat16, "data_type": torch.float8_e4m3fn}, ("bfloat16", "float8_e4m3fn", "bfloat16")),
        ({"q_data_type": "bfloat16", "kv_data_type": "float8_e5m2", "o_data_type": "float16"},
         ("bfloat16", "float8_e5m2", "float16")),
    ],
)  # fmt: skip
def test_data_types(given: dict[str, Any], want: tuple[str, ...]) -> None:
    p = paged([20, 9])
    wrapper = Wrapper(workspace("cpu"))
    wrapper.plan(*p.plan_arguments(), **given)
    found = engine(wrapper).dtypes
    assert found == tuple(getattr(torch, name) for name in want)


def test_values_of_another_head_dim_keep_the_planned_schedule(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The int workspace has room for partials of 900 work ranges with a head dim of 64, not with 128."""
    monkeypatch.setattr(ops, "grid_of", lambda device, choice, tiles: (64, 900 if choice else 64))
    b = prefill_batch([(1, 70)] * 100, heads=(4, 2), dims=(128, 64), device=device)
    wrapper = Wrapper(workspace(device, 32))
    engine(wrapper).int_workspace_buffer.fill_(0x55)
    wrapper.plan(*b.paged_plan()[1:])
    assert_close(wrapper.run(b.q, b.cache), b.expected()[0])
