"""How engines use batch decode: the attributes they read, their own planners, CUDA graphs, and no synchronisation."""

from __future__ import annotations

import functools
import random
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fi_core
from families.engine import engine
from families.harness import assert_close, rand
from families.paged import Paged, paged
from families.test_batch_decode import workspace
from fi_core import decode
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper as Wrapper
from fi_core.decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

HALF = torch.float16


def ints(n: int, device: str) -> torch.Tensor:
    return torch.full((n,), 1 << 30, dtype=torch.int32, device=device)


def graph_wrapper(batch_size: int, device: str, room: int = 200, **options: Any) -> Wrapper:
    return Wrapper(
        workspace(device), use_cuda_graph=True, paged_kv_indptr_buffer=ints(batch_size + 1, device),
        paged_kv_indices_buffer=ints(room, device), paged_kv_last_page_len_buffer=ints(batch_size, device), **options,
    )  # fmt: skip


def on_host(p: Paged) -> tuple[Any, ...]:
    """Arguments of plan with tables on the host, as in vLLM (the indices are on the device)."""
    return (p.indptr.cpu(), p.indices, p.last_page_len.cpu(), *p.plan_arguments()[3:])


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_attributes_after_plan(tensor_cores: bool, device: str) -> None:
    p = paged([40, 0, 17], heads=(4, 2), device=device)
    wrapper = Wrapper(workspace(device), "NHD", use_tensor_cores=tensor_cores)
    assert (wrapper.use_tensor_cores, wrapper.is_cuda_graph_enabled) == (tensor_cores, False)
    wrapper.plan(*p.plan_arguments(), window_left=30, sm_scale=0.2, q_data_type=HALF, block_tables=p.block_tables())
    want = {
        "_window_left": 30, "_logits_soft_cap": 0.0, "_sm_scale": 0.2, "_pos_encoding_mode": "NONE", "_rope_scale": 1.0,
        "_rope_theta": 1e4, "_cached_q_data_type": HALF, "_cached_kv_data_type": HALF, "_cached_o_data_type": HALF,
        "_batch_size": 3, "_num_qo_heads": 4, "_num_kv_heads": 2, "_max_kv_len": 40, "_q_len_per_req": 1,
        "_is_causal": False, "_fixed_batch_size": 0, "_backend": "auto", "_kv_layout": "NHD",
        "_use_tensor_cores": tensor_cores, "_use_cuda_graph": False, "device": p.q.device,
    }  # fmt: skip
    assert {name: getattr(wrapper, name) for name in want} == want
    assert all(isinstance(x, int) for x in engine(wrapper).plan_info or ["none"])
    assert wrapper.resolved_backend in ("cpu", "fa2", "fa2_tc", "fa3")
    assert engine(wrapper).int_workspace_buffer.nbytes == 8 << 20
    assert engine(wrapper).pin_memory_int_workspace_buffer.shape == engine(wrapper).int_workspace_buffer.shape
    assert engine(wrapper).pin_memory_int_workspace_buffer.device.type == "cpu"
    assert engine(wrapper).qo_indptr_buf.tolist() == [0, 1, 2, 3]
    assert torch.equal(engine(wrapper).paged_kv_indptr_buf, p.indptr)
    assert torch.equal(engine(wrapper).block_tables, p.block_tables())  # type: ignore[arg-type]
    wrapper.plan(*p.plan_arguments())
    assert (engine(wrapper).window_left, engine(wrapper).sm_scale, engine(wrapper).block_tables) == (-1, None, None)
    engine(wrapper).qo_indptr_buf = engine(wrapper).max_kv_len = 7  # as engines with planners of their own do
    assert (engine(wrapper).qo_indptr_buf, engine(wrapper).max_kv_len) == (7, 7)
    assert wrapper.end_forward() is None  # type: ignore[func-returns-value]


def test_query_offsets_of_several_tokens(device: str) -> None:
    p = paged([40, 17], q_len=3, device=device)
    wrapper = Wrapper(workspace(device), use_tensor_cores=True)
    wrapper.plan(*p.plan_arguments(), q_len_per_req=3)
    assert engine(wrapper).qo_indptr_buf.tolist() == [0, 3, 6] and engine(wrapper).is_causal


@pytest.mark.parametrize("host", [False, True])
def test_graph_mode_copies_into_the_callers_buffers(host: bool, device: str) -> None:
    wrapper = graph_wrapper(3, device)
    buffers = engine(wrapper).tables
    for seed, lengths in enumerate(([40, 0, 17], [1, 500, 3])):
        p = paged(lengths, device=device, seed=seed)
        wrapper.plan(*(on_host(p) if host else p.plan_arguments()))
        schedule = wrapper._plan.schedule.data_ptr()
        assert buffers[0] is engine(wrapper).paged_kv_indptr_buf and torch.equal(buffers[0], p.indptr)
        assert torch.equal(buffers[1][: len(p.indices)], p.indices)
        assert torch.equal(buffers[2], p.last_page_len)
        assert_close(wrapper.run(p.q, p.cache), p.expected()[0])
        wrapper.plan(*buffers, *p.plan_arguments()[3:])  # the buffers themselves
        assert_close(wrapper.run(p.q, p.cache), p.expected()[0])
        assert wrapper._plan.schedule.data_ptr() == schedule, "the addresses of the schedule stay"


def test_the_graph_class(device: str) -> None:
    p = paged([40, 9], device=device)
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(device), ints(3, device), ints(9, device), ints(2, device), "NHD"
    )
    assert wrapper.is_cuda_graph_enabled and engine(wrapper).fixed_batch_size == 2
    wrapper.plan(*p.plan_arguments())
    assert_close(wrapper.run(p.q, p.cache), p.expected()[0])


def test_sglang_pattern(device: str) -> None:
    """One regular plan, then fast_decode_plan in its place; soft cap and scales only in forward."""
    wrapper = graph_wrapper(3, device)
    p = paged([40, 5, 17], page_size=1, device=device, dtype=torch.bfloat16)
    types: dict[str, Any] = {"data_type": torch.bfloat16, "q_data_type": torch.bfloat16}
    wrapper.begin_forward(*p.plan_arguments(), **types, non_blocking=True)
    wrapper.begin_forward = functools.partial(fast_decode_plan, wrapper)  # type: ignore[method-assign]
    assert wrapper.begin_forward.func == fast_decode_plan == fi_core.fast_decode_plan == decode.fast_decode_plan
    for seed, lengths in enumerate(([1, 100, 70], [64, 2, 3])):
        p = paged(lengths, page_size=1, device=device, dtype=torch.bfloat16, seed=seed)
        engine(wrapper).paged_kv_indptr_buf.copy_(p.indptr)
        engine(wrapper).paged_kv_indices_buf[: len(p.indices)].copy_(p.indices)
        engine(wrapper).paged_kv_last_page_len_buf.fill_(1)
        wrapper.begin_forward(
            p.indptr, engine(wrapper).paged_kv_indices_buf, p.last_page_len, *p.plan_arguments()[3:], **types,
            global_override_indptr_cpu=p.indptr.cpu(),
        )  # fmt: skip
        out = wrapper.forward(p.q, p.cache, sm_scale=0.2, logits_soft_cap=3.0, k_scale=0.9, v_scale=1.1)
        assert_close(out, p.expected(sm_scale=0.2, logits_soft_cap=3.0, k_scale=0.9, v_scale=1.1)[0])
    with pytest.raises(ValueError, match="batch size is fixed at 3"):
        wrapper.begin_forward(p.indptr[:3], p.indices, p.last_page_len[:2], *p.plan_arguments()[3:], **types)


def test_fast_plan_in_eager_mode_takes_the_tensors_as_they_are(device: str) -> None:
    wrapper = Wrapper(workspace(device))
    p = paged([40, 5], device=device)
    wrapper.plan(*p.plan_arguments())
    p = paged([1, 100, 70], device=device, seed=1)
    fast_decode_plan(wrapper, *p.plan_arguments(), data_type=HALF)
    assert engine(wrapper).paged_kv_indptr_buf is p.indptr
    assert_close(wrapper.run(p.q, p.cache), p.expected()[0])
    with pytest.raises(RuntimeError, match="Error in standard plan: num_qo_heads: a positive multiple"):
        fast_decode_plan(wrapper, *p.plan_arguments()[:3], 5, 2, 64, 16)


def test_vllm_pattern(device: str) -> None:
    """Tables on the host, options asserted before run, results into a slice of a larger output."""
    wrapper = Wrapper(workspace(device), "HND", use_tensor_cores=True, backend="auto")
    for seed, lengths in enumerate(([33, 1, 200], [16, 7])):
        p = paged(lengths, heads=(8, 2), kv_layout="HND", form="fused", device=device, seed=seed)
        wrapper.plan(
            *on_host(p), pos_encoding_mode="NONE", sm_scale=0.3, window_left=-1, logits_soft_cap=0.0,
            q_data_type=HALF, kv_data_type=HALF, o_data_type=HALF, fixed_split_size=-1, disable_split_kv=False,
        )  # fmt: skip
        assert engine(wrapper).plan_info[3] == decode.ops.BALANCED, "-1 is not a fixed size"
        assert engine(wrapper).scores == (-1, 0.0, 0.3)
        output = torch.zeros(10, 8, 64, dtype=HALF, device=device)
        wrapper.run(p.q, p.cache, k_scale=1.0, v_scale=1.0, out=output[: len(lengths)])
        assert_close(output[: len(lengths)], p.expected(sm_scale=0.3)[0])
        assert not output[len(lengths) :].any()


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_planners_that_engines_call_themselves(tensor_cores: bool, older: bool, device: str) -> None:
    wrapper = graph_wrapper(3, device, use_tensor_cores=tensor_cores)
    p = paged([40, 5, 17], device=device)
    wrapper.plan(*p.plan_arguments())
    p = paged([1, 1100, 70], device=device, seed=1)
    engine(wrapper).paged_kv_indptr_buf.copy_(p.indptr)
    engine(wrapper).paged_kv_indices_buf[: len(p.indices)].copy_(p.indices)
    engine(wrapper).paged_kv_last_page_len_buf.copy_(p.last_page_len)
    own = engine(wrapper).workspaces
    module: Any = engine(wrapper).cached_module
    if tensor_cores:
        lengths = torch.tensor(p.lengths, dtype=torch.int32)
        more = () if older else (-1, False, 0, 0)
        qo_indptr = engine(wrapper).qo_indptr_buf.cpu()
        sizes = 3, 3, 4, 2, 16, True, 64, 64, False, -1
        engine(wrapper).plan_info = module.plan(*own, qo_indptr, p.indptr.cpu(), lengths, *sizes, *more)
    else:
        if older:
            module = decode.get_batch_decode_module(HALF, HALF, HALF, torch.int32, 64, 64, 0, False, False)
        empty = torch.empty(0, dtype=HALF)
        engine(wrapper).plan_info = module.plan(*own, p.indptr.cpu(), 3, 4, 2, 16, True, -1, 0.0, 64, 64, empty, empty)
    assert_close(wrapper.run(p.q, p.cache), p.expected()[0])
    with pytest.raises(ValueError, match="int_workspace_buffer: the one of a wrapper is required"):
        decode.get_batch_decode_module().plan(
            own[0], torch.empty(64), own[2], p.indptr, 3, 4, 2, 16, True, -1, 0.0, 64, 64
        )


def test_names_that_engines_import() -> None:
    from fi_core.decode import _grouped_size_compiled_for_decode_kernels, get_seq_lens
    from fi_core.utils import FP4Tensor, _get_range_buf, get_trtllm_gen_multi_ctas_kv_counter_bytes

    assert _grouped_size_compiled_for_decode_kernels(28, 4) and not _grouped_size_compiled_for_decode_kernels(28, 8)
    assert get_seq_lens is fi_core.get_seq_lens is fi_core.prefill.get_seq_lens and FP4Tensor and _get_range_buf
    assert get_trtllm_gen_multi_ctas_kv_counter_bytes(256, 32, 132) == 0
    assert fi_core.top_k_renorm_prob is fi_core.top_k_renorm_probs
    assert fi_core.top_p_renorm_prob is fi_core.top_p_renorm_probs


def test_wrappers_may_share_a_float_workspace(device: str) -> None:
    """Runs alternate between wrappers that were planned before."""
    shared = workspace(device)
    batches = [paged([1000, 3], heads=(8, 2), device=device, seed=s) for s in range(3)]
    wrappers = [Wrapper(shared) for _ in batches]
    for wrapper, p in zip(wrappers, batches):
        wrapper.plan(*p.plan_arguments())
    for wrapper, p in zip(wrappers * 2, batches * 2):
        assert_close(wrapper.run(p.q, p.cache), p.expected()[0])


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_runs_compile_to_one_graph(device: str) -> None:
    p = paged([300, 70], device=device)
    wrapper, space = Wrapper(workspace(device)), torch.empty(8 << 20, dtype=torch.uint8, device=device)
    wrapper.plan(*p.plan_arguments())
    tables, lengths = p.block_tables(), p.seq_lens()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = wrapper.run(q, (k, v), return_lse=True)
        other = decode.trtllm_batch_decode_with_kv_cache(q, (k, v), space, tables, lengths, 300, 0.125, kv_layout="NHD")
        assert isinstance(other, torch.Tensor)
        return out * lse[..., None] + other

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(compiled(p.q, *p.cache), step(p.q, *p.cache).double())


def test_threads_have_their_own_wrappers(device: str) -> None:
    p = paged([300, 70], device=device)
    want, failures = p.expected()[0], []

    def work() -> None:
        try:
            wrapper = Wrapper(workspace(device))
            for _ in range(5):
                wrapper.plan(*p.plan_arguments())
                assert_close(wrapper.run(p.q, p.cache), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# On the card


def random_lengths(batch_size: int, most: int, seed: int) -> Sequence[int]:
    chance = random.Random(seed)
    return [chance.choice((0, 1, chance.randrange(most), chance.randrange(64))) for _ in range(batch_size)]


@pytest.mark.gpu
@pytest.mark.parametrize("plan_too", [False, True])
@pytest.mark.parametrize("q_len", [1, 2])
def test_one_capture_serves_a_hundred_batches(plan_too: bool, q_len: int) -> None:
    """Captures run, or plan and run; replays change only the tables."""
    batch_size, room, dim = 7, 7 * 70, 128
    wrapper = graph_wrapper(batch_size, "cuda", room, use_tensor_cores=q_len > 1)
    pool = rand(600, 2, 16, 2, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.empty(batch_size * q_len, 8, dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    options: dict[str, Any] = {"q_data_type": torch.bfloat16, "q_len_per_req": q_len}
    tables = engine(wrapper).tables

    def plan(tables: Sequence[torch.Tensor]) -> None:
        wrapper.plan(*tables, 8, 2, dim, 16, **options)

    def batch(seed: int) -> Paged:
        lengths = [n + q_len for n in random_lengths(batch_size, 1000, seed)]
        p = paged(lengths, heads=(8, 2), dim=dim, dtype=torch.bfloat16, device="cuda", seed=seed, q_len=q_len)
        used = p.indices.long()
        assert isinstance(p.cache, tuple)
        for part in range(2):
            pool[used, part] = p.cache[part][used]
        return p

    first = batch(0)
    plan((first.indptr, first.indices, first.last_page_len))
    q.copy_(first.q)
    wrapper.run(q, pool, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan_too:
            plan(tables)
        wrapper.run(q, pool, out=out)
    for seed in range(100):
        p = batch(seed)
        q.copy_(p.q)
        if plan_too:
            for buffer, table in zip(tables, (p.indptr, p.indices, p.last_page_len)):
                buffer[: len(table)].copy_(table)
        else:
            plan(on_host(p)[:3] if seed % 2 else (p.indptr, p.indices, p.last_page_len))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, p.expected()[0])


@pytest.mark.gpu
def test_graph_and_eager_give_the_same_bits() -> None:
    p = paged([700, 0, 64, 1500], heads=(8, 2), dim=128, device="cuda")
    wrapper = graph_wrapper(4, "cuda", 400)
    wrapper.plan(*p.plan_arguments(), fixed_split_size=8)
    eager = wrapper.run(p.q, p.cache)
    out = torch.empty_like(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(p.q, p.cache, out=out)
    graph.replay()
    assert torch.equal(out, eager)


@pytest.mark.gpu
def test_streams_may_share_a_float_workspace() -> None:
    shared = workspace("cuda")
    batches = [paged([5000, 3, 900], heads=(8, 2), dim=128, device="cuda", seed=s) for s in range(2)]
    streams = [torch.cuda.Stream() for _ in batches]
    wrappers = [Wrapper(shared) for _ in batches]
    outs: list[list[torch.Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for wrapper, p, stream, out in zip(wrappers, batches, streams, outs):
            with torch.cuda.stream(stream):
                wrapper.plan(*p.plan_arguments())
                out.append(wrapper.run(p.q, p.cache))
    torch.cuda.synchronize()
    for p, out in zip(batches, outs):
        want, _ = p.expected()
        assert_close(out[0], want)
        assert all(torch.equal(x, out[0]) for x in out)


@pytest.mark.gpu
@pytest.mark.parametrize("host", [False, True])
def test_nothing_synchronises(host: bool) -> None:
    p = paged([500, 0, 3], device="cuda")
    arguments = on_host(p) if host else p.plan_arguments()
    eager, captured = Wrapper(workspace("cuda")), graph_wrapper(3, "cuda")
    sinks = torch.ones(4, device="cuda")
    tables, lengths = p.block_tables(), p.seq_lens()
    space = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")

    def everything() -> None:
        for wrapper in (eager, captured):
            wrapper.plan(*arguments)
            wrapper.run(p.q, p.cache, return_lse=True)
            wrapper.forward(p.q, p.cache, window_left=7, logits_soft_cap=2.0, k_scale=0.5)
            fast_decode_plan(wrapper, *p.plan_arguments())
            wrapper.run(p.q, p.cache, k_scale=sinks[:1], sinks=sinks)
        fi_core.single_decode_with_kv_cache(p.q[0], p.k[0], p.v[0], return_lse=True)
        decode.trtllm_batch_decode_with_kv_cache(
            p.q, p.cache, space, tables, lengths, 500, 0.1, sinks[:1], kv_layout="NHD", sinks=sinks
        )

    everything()  # compiles
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cache_in_one_tensor_may_move(device: str) -> None:
    """A run reads its halves where they are then."""
    first, second = (paged((30, 5), form="fused", device=device, seed=seed) for seed in (0, 5))
    assert isinstance(first.cache, torch.Tensor) and isinstance(second.cache, torch.Tensor)
    w = Wrapper(workspace(device))
    w.plan(*first.plan_arguments(), **first.dtypes)
    cache = first.cache.clone()
    for _ in range(2):
        assert_close(w.run(first.q, cache), first.expected()[0])
    cache.zero_()
    assert not w.run(first.q, cache).any(), "values are read in each run"
    cache.data = second.cache
    w.plan(*second.plan_arguments(), **second.dtypes)
    assert_close(w.run(second.q, cache), second.expected()[0])
