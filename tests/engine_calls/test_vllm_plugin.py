"""fi's plugin for vLLM: it has the interfaces of the supported versions, and attends as the reference does.

vLLM itself is not installed; tools/engine_seams.py records its interfaces in vllm_seams.json.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_calls import fake_vllm
from engine_calls.fake_vllm import FP8, PLUGIN, SEAMS, recorded
from families.attention_reference import attention
from families.harness import assert_close, rand
from fi_core.runtime import invariance
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.target import Target

BLOCK, BLOCKS, HEADS, DIM = 16, 64, (4, 2), 64
VERSIONS = list(SEAMS)


@pytest.fixture
def plugin(version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the plugin over a vLLM of the version."""
    fake_vllm.install(version, monkeypatch)
    return importlib.import_module(f"{PLUGIN}.attention")


def test_the_package_names_the_plugin() -> None:
    """The installed package is tested by tests/packaging."""
    project = (Path(__file__).parents[2] / "packages" / "fi-core" / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."vllm\.general_plugins"\]\nfi = "(.+):(.+)"', project)
    assert found and callable(getattr(importlib.import_module(found[1]), found[2]))


def test_stand_ins_have_the_interfaces_of_vllm(version: str) -> None:
    seams = recorded(version)
    for function in fake_vllm.FUNCTIONS:
        assert fake_vllm.parameters(function) == seams[function.__qualname__]
    assert {member.name for member in fake_vllm.AttentionCGSupport} <= set(seams["AttentionCGSupport"])
    layouts = seams.get("KVCacheLayout", [member.name for member in fake_vllm.KVCacheLayout])
    assert {member.name for member in fake_vllm.KVCacheLayout} <= set(layouts)
    assert set(vars(batch([(1, 1)], "cpu").step)) <= set(seams["CommonAttentionMetadata"])


def test_methods_take_what_vllm_passes(plugin: Any, version: str) -> None:
    """Each method that vLLM calls has its parameters, by position and by name; more of ours are optional."""
    ours = {"AttentionBackend": plugin.Backend, "AttentionMetadataBuilder": plugin.Builder}
    ours |= dict.fromkeys(("AttentionImpl", "AttentionImplBase", "FlashInferImpl"), plugin.Impl)
    compared = 0
    for name, wanted in recorded(version).items():
        owner, _, method = name.partition(".")
        if owner in ours and method in vars(ours[owner]):
            function = inspect.unwrap(getattr(vars(ours[owner])[method], "__func__", vars(ours[owner])[method]))
            got = fake_vllm.parameters(function)
            assert [x.rstrip("=") for x in got[: len(wanted)]] == [x.rstrip("=") for x in wanted], name
            assert all(x.endswith("=") for x in got[len(wanted) :]), name
            assert all(mine.endswith("=") for mine, theirs in zip(got, wanted) if theirs.endswith("=")), name
            compared += 1
    assert compared >= 10


class Batch(SimpleNamespace):
    step: Any
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    slots: torch.Tensor


def batch(requests: Sequence[tuple[int, int]], device: str, padding: int = 0, dim: int = DIM) -> Batch:
    """Requests of (kv_len, qo_len) in shuffled blocks; padding: requests without tokens, as in a padded graph."""
    requests = [*requests, *[(0, 0)] * padding]
    free = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1
    tables = torch.zeros(len(requests), 12, dtype=torch.int32)
    slots, first = [], 0
    for row, (kv_len, _) in zip(tables, requests):
        used = -(-kv_len // BLOCK)
        row[:used] = free[first : first + used]
        token, first = torch.arange(kv_len), first + used
        slots.append(row[token // BLOCK].long() * BLOCK + token % BLOCK)
    starts = torch.tensor([0, *(n for _, n in requests)], dtype=torch.int32).cumsum(0).int()

    def rows(heads: int, counts: Iterable[int], seed: int) -> list[torch.Tensor]:
        return [rand(n, heads, dim, dtype=torch.bfloat16, device=device, seed=seed + i) for i, n in enumerate(counts)]

    kv_lens, qo_lens = zip(*requests)
    q, k, v = rows(HEADS[0], qo_lens, 0), rows(HEADS[1], kv_lens, 100), rows(HEADS[1], kv_lens, 200)
    step = SimpleNamespace(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts, num_reqs=len(requests), causal=True,
        seq_lens=torch.tensor([n for n, _ in requests], dtype=torch.int32, device=device),
        num_actual_tokens=int(starts[-1]), max_query_len=max(n for _, n in requests), max_seq_len=192,
        block_table_tensor=tables.to(device), slot_mapping=torch.cat(slots).to(device),
    )  # fmt: skip
    return Batch(step=step, queries=q, keys=k, values=v, slots=torch.cat(slots).to(device))


def engine(
    plugin: Any,
    device: str,
    drafts: int = 0,
    kv: str = "auto",
    windows: Sequence[int | None] = (None,),
    dim: int = DIM,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """The builder of a group of layers, and the layers."""
    shape: tuple[Any, ...] = HEADS[0], dim, dim**-0.5, HEADS[1]
    impls = [plugin.Impl(*shape, sliding_window=w, kv_cache_dtype=kv, **options) for w in windows]
    for impl in impls:
        impl.process_weights_after_loading(torch.bfloat16)
    model = SimpleNamespace(dtype=torch.bfloat16, get_num_attention_heads=lambda parallel: HEADS[0])
    names = [f"layer{i}" for i in range(len(impls))]
    config = SimpleNamespace(
        model_config=model, parallel_config=None, cache_config=SimpleNamespace(cache_dtype=kv),
        num_speculative_tokens=drafts, layers=dict(zip(names, impls)),
    )  # fmt: skip
    stored = torch.uint8 if kv != "auto" else torch.bfloat16
    spec = SimpleNamespace(num_kv_heads=HEADS[1], head_size=dim, block_size=BLOCK, dtype=stored)
    return plugin.Builder(spec, names, config, torch.device(device)), impls


LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0), _k_scale_float=0.5, _v_scale_float=2.0)


def cache_of(plugin: Any, version: str, device: str, kv: str, dim: int) -> torch.Tensor:
    """An empty cache in the form that the version gives to a layer, with NaN wherever nothing is written."""
    dtype = torch.uint8 if kv != "auto" else torch.bfloat16
    if version.startswith("0.24"):
        shape = plugin.Backend.get_kv_cache_shape(BLOCKS, BLOCK, HEADS[1], dim, kv)
        order = plugin.Backend.get_kv_cache_stride_order()
        cache = torch.empty([shape[i] for i in order], dtype=dtype, device=device)
        cache = cache.permute([order.index(i) for i in range(len(order))])
    else:
        cache = torch.empty(BLOCKS, HEADS[1], BLOCK, 2 * dim, dtype=dtype, device=device)
    return cache.fill_(0xFF if dtype == torch.uint8 else float("nan"))


def attend(impl: Any, builder: Any, b: Batch, cache: torch.Tensor) -> torch.Tensor:
    """The layer's output for a batch, with rows of 7 where padding tokens follow."""
    impl.do_kv_cache_update(LAYER, torch.cat(b.keys), torch.cat(b.values), cache, b.slots)
    metadata = builder.build(0, b.step)
    query = torch.cat(b.queries)
    query = torch.cat([query, query.new_full((3, *query.shape[1:]), float("nan"))])
    out = torch.full_like(query, 7.0)
    assert impl.forward(LAYER, query, torch.empty(0), torch.empty(0), cache, metadata, out) is out
    assert bool((out[-3:] == 7).all()), "rows of padding are not written"
    return out[:-3]


def expected(b: Batch, **options: Any) -> torch.Tensor:
    rows = zip(b.queries, b.keys, b.values)
    return torch.cat([attention(q, k, v, causal=True, **options)[0] for q, k, v in rows])


MIXED = [(70, 1), (1, 1), (33, 1), (40, 40), (90, 25), (17, 2)]


@pytest.mark.parametrize("requests", [MIXED[:3], MIXED[3:], MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 20], ids=str)
@pytest.mark.parametrize("option", [None, "sinks", "logits_soft_cap"])
def test_attention(
    plugin: Any, version: str, requests: list[tuple[int, int]], window: int | None, option: str | None, device: str
) -> None:
    values = {"sinks": rand(HEADS[0], device=device, dtype=torch.bfloat16), "logits_soft_cap": 0.5}
    b, options = batch(requests, device), {option: values[option]} if option else {}
    builder, (impl,) = engine(plugin, device, windows=[window], **options)
    got = attend(impl, builder, b, cache_of(plugin, version, device, "auto", DIM))
    assert_close(got, expected(b, window_left=(window or 0) - 1, **options))


class Attended:
    """vLLM's attention layer around fi's: keys are written first, where the step has slots for them."""

    calculate_kv_scales = False

    def __init__(self, impl: Any, cache: torch.Tensor, slots: torch.Tensor | None) -> None:
        self.impl, self.cache, self.slots = impl, cache, slots

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.slots is not None:
            keys, values = (x.view(-1, HEADS[1], DIM) for x in (k, v))
            self.impl.do_kv_cache_update(LAYER, keys, values, self.cache, self.slots)
        else:
            self.impl.forward(LAYER, q, k, v, self.cache, None, torch.empty_like(q))
        return q


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_norms_rotation_and_the_cache_in_one_pass(
    version: str, kv: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Queries, and what lies in the cache, are those of separate passes; an fp8 cache has them."""
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    fake_vllm.install(version, monkeypatch).register()
    plugin = importlib.import_module(f"{PLUGIN}.attention")
    rotary = fake_vllm.ROTARY["RotaryEmbedding"](DIM, DIM, 100, 1e4, True, torch.bfloat16)
    rotary.cos_sin_cache = rotary.cos_sin_cache.to(device)
    weights = [rand(DIM, dtype=torch.bfloat16, device=device, seed=i) for i in range(2)]
    layer = sys.modules["vllm.model_executor.models.qwen3"].Qwen3Attention(rotary, HEADS, weights, [1e-5, 1e-5])
    rows = rand(7, sum(HEADS) * DIM + HEADS[1] * DIM, dtype=torch.bfloat16, device=device)
    positions, slots = torch.arange(7, device=device), torch.tensor([40, 3, -1, 17, 900], device=device)
    (impl, plain), found = engine(plugin, device, kv=kv, windows=[None, None])[1], []
    calls: list[Any] = []
    own = plugin.reshape_and_cache_flash
    monkeypatch.setattr(plugin, "reshape_and_cache_flash", lambda *given: (calls.append(given), own(*given)))
    for fis, appends in ((impl, kv == "auto"), (plain, False)):
        assert impl.appends == (kv == "auto")
        fis.appends = appends
        cache = cache_of(plugin, version, device, kv, DIM)
        layer.attn = Attended(fis, cache, slots)
        query = layer(positions, rows.clone())[: len(slots)]  # rows behind the slots pad a graph
        written = cache.view(torch.uint8)
        found.append((query, written.clone()))
    assert len(calls) == (1 if kv == "auto" else 2)
    for one, two in zip(*found):
        assert torch.equal(one, two)
    layer.attn = Attended(impl, cache, None)  # vLLM measures the memory of a step
    layer(positions, rows.clone())
    assert impl.rotation is None


def test_batch_invariance_computes_all_tokens_as_prefill(
    version: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, device: str
) -> None:
    """With vLLM's switch a request has the same bits alone, among others, and in a prompt of two chunks."""
    package = fake_vllm.install(version, monkeypatch)
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True, raising=False)
    sampler = importlib.import_module(f"{PLUGIN}.sampler")
    assert sampler.is_used()
    was = invariance.word.value
    request.addfinalizer(lambda: setattr(invariance.word, "value", was))
    package.register()
    assert invariance.word.value == was + 1
    assert not sampler.is_used(), "rows without seeds stay vLLM's"
    plugin = importlib.import_module(f"{PLUGIN}.attention")
    assert plugin.Backend.supports_batch_invariance()
    assert vars(plugin.Builder)["_cudagraph_support"] is fake_vllm.AttentionCGSupport.NEVER
    b = batch([(70, 1), (40, 9), (90, 25)], device)
    builder, (impl,) = engine(plugin, device)
    cache = cache_of(plugin, version, device, "auto", DIM)
    together = attend(impl, builder, b, cache)
    assert_close(together, expected(b))
    for i, (first, count) in enumerate(((0, 1), (1, 9), (10, 25))):
        for begin, end in ((0, count), (0, count - 1), (count - 1, count)):
            if begin == end:
                continue
            query = b.queries[i][begin:end]
            step = SimpleNamespace(**vars(b.step))
            starts = torch.tensor([0, end - begin], dtype=torch.int32)
            step.query_start_loc, step.query_start_loc_cpu, step.num_reqs = starts.to(device), starts, 1
            step.seq_lens = b.step.seq_lens[i : i + 1] - (count - end)
            step.num_actual_tokens = step.max_query_len = end - begin
            step.block_table_tensor = b.step.block_table_tensor[i : i + 1]
            metadata = builder.build(0, step)
            assert metadata.num_decodes == 0
            out = torch.empty_like(query)
            impl.forward(LAYER, query, torch.empty(0), torch.empty(0), cache, metadata, out)
            assert torch.equal(out, together[first + begin : first + end])


def test_layers_of_other_windows_share_a_step(plugin: Any, version: str, device: str) -> None:
    b, windows = batch(MIXED, device), [None, 20, None, 50]
    builder, impls = engine(plugin, device, windows=windows)
    for impl, window in zip(impls, windows):
        cache = cache_of(plugin, version, device, "auto", DIM)
        assert_close(attend(impl, builder, b, cache), expected(b, window_left=(window or 0) - 1))


def test_an_fp8_cache(plugin: Any, version: str, device: str) -> None:
    b = batch(MIXED, device)
    builder, (impl,) = engine(plugin, device, kv="fp8")
    got = attend(impl, builder, b, cache_of(plugin, version, device, "fp8", DIM))
    b.keys = [(k.float() / 0.5).to(FP8).float() * 0.5 for k in b.keys]
    b.values = [(v.float() / 2).to(FP8).float() * 2 for v in b.values]
    assert_close(got, expected(b), tolerance=(0.03, 0.03))


@pytest.mark.parametrize("q_len", [1, 3])
def test_padded_requests_of_a_graph_change_no_other(plugin: Any, version: str, q_len: int, device: str) -> None:
    """A graph of eight requests runs five: the others have length 0 and block 0, and their rows are finite."""
    requests = [(70, q_len), (5, q_len), (33, q_len), (64, q_len), (100, q_len)]
    builder, (impl,) = engine(plugin, device, drafts=q_len - 1)
    plain, padded = batch(requests, device), batch(requests, device, padding=3)
    want = attend(impl, builder, plain, cache_of(plugin, version, device, "auto", DIM))
    step = padded.step
    step.num_actual_tokens = 8 * q_len
    padded.queries.append(rand(3 * q_len, HEADS[0], DIM, dtype=torch.bfloat16, device=device))
    got = attend(impl, builder, padded, cache_of(plugin, version, device, "auto", DIM))
    assert_close(got[: 5 * q_len], want.double(), tolerance=(0.01, 0.01))
    assert bool(got.isfinite().all())


def test_short_queries_of_several_lengths(plugin: Any, version: str, device: str) -> None:
    """With drafts decode takes the requests of the first one's query length, prefill the rest."""
    b = batch([(70, 3), (9, 3), (33, 2), (40, 1), (90, 25)], device)
    builder, (impl,) = engine(plugin, device, drafts=2)
    assert builder.build(0, b.step).num_decodes == 2
    assert_close(attend(impl, builder, b, cache_of(plugin, version, device, "auto", DIM)), expected(b))


@pytest.mark.parametrize("q_len", [1, 3])
def test_rows_of_padding_behind_requests(plugin: Any, version: str, q_len: int, device: str) -> None:
    """Twice the rows of the requests are no longer queries of each."""
    b = batch([(70, q_len), (33, q_len)], device)
    builder, (impl,) = engine(plugin, device, drafts=q_len - 1)
    b.step.num_actual_tokens, rows = 4 * q_len, b.queries[0].new_zeros(2 * q_len, HEADS[0], DIM)
    want, b.queries = expected(b), [*b.queries, rows]
    assert_close(attend(impl, builder, b, cache_of(plugin, version, device, "auto", DIM))[: 2 * q_len], want)


def test_building_does_not_wait_for_the_device(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b = batch(MIXED, "cpu")
    builder, _ = engine(plugin, "cpu")
    b.step.query_start_loc = b.step.query_start_loc.clone()
    on_device = {x.data_ptr() for x in (b.step.seq_lens, b.step.block_table_tensor, b.step.query_start_loc)}
    for name in ("cpu", "item", "tolist", "numpy", "__int__", "__bool__", "__index__"):
        read = getattr(torch.Tensor, name)

        def checked(x: torch.Tensor, *given: Any, read: Any = read, name: str = name) -> Any:
            assert x.untyped_storage().data_ptr() not in on_device, f"{name} of a tensor on the device"
            return read(x, *given)

        monkeypatch.setattr(torch.Tensor, name, checked)
    assert builder.build(0, b.step).num_decodes == 3


class Recorder(TorchDispatchMode):
    """The names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(op))
        return op(*args, **(kwargs or {}))


def test_the_first_layer_plans_a_step_of_decode(plugin: Any, version: str, device: str) -> None:
    """Building runs nothing. The first layer of each window plans, and whenever it runs again: warm-up and capture of
    a graph may have the same metadata, and a graph that is replayed must have the launch.
    """
    windows = [None, 20, None, 20]
    b, (builder, impls) = batch(MIXED[:3], device), engine(plugin, device, windows=windows)
    cache, query = cache_of(plugin, version, device, "auto", DIM), torch.cat(b.queries)
    with Recorder() as built:
        metadata = builder.build(0, b.step)
    assert built.ran == []
    for _ in range(2):
        for impl, plans in zip(impls, (True, True, False, False)):
            with Recorder() as layer:
                impl.forward(LAYER, query, None, None, cache, metadata, query.clone())
            ran = [name for name in layer.ran if name.startswith("fi_core")]
            assert ran == ["fi_core.decode_plan.default"] * plans + ["fi_core.batch_decode.default"]


def test_the_first_layer_plans_the_prompts_of_a_step(plugin: Any, version: str, device: str) -> None:
    b, (builder, impls) = batch(MIXED[3:5], device), engine(plugin, device, windows=[None, 20, None])
    cache, query, ran = cache_of(plugin, version, device, "auto", DIM), torch.cat(b.queries), []
    metadata = builder.build(0, b.step)
    for impl in impls:
        with Recorder() as layer:
            impl.forward(LAYER, query, None, None, cache, metadata, query.clone())
        ran.append([name.split(".")[1] for name in layer.ran if name.startswith("fi_core")])
    assert ran == [["prefill_plan", "batch_prefill"]] * 2 + [["batch_prefill"]]


@pytest.mark.parametrize("target", ["80", "90a"])
@pytest.mark.parametrize(("kv", "cap"), [("auto", None), ("auto", 30.0), ("fp8", None)], ids=str)
def test_each_head_size_has_kernels(plugin: Any, version: str, target: str, kv: str, cap: float | None) -> None:
    for dim in plugin.Backend.get_supported_head_sizes():
        b, cache = batch(MIXED, "cpu", dim=dim), cache_of(plugin, version, "cpu", kv, dim)
        with Rehearsal(Target("cuda", target), 132, 227 * 1024) as rehearsal:
            builder, (impl,) = engine(plugin, "cpu", kv=kv, dim=dim, logits_soft_cap=cap)
            at_start = len(rehearsal.calls)
            metadata = builder.build(0, b.step)
            impl.forward(LAYER, torch.cat(b.queries), None, None, cache, metadata, torch.cat(b.queries))
        choices = [choice for choice, _ in rehearsal.calls]
        ran = choices[at_start:]
        assert [x.spec.op.name for x in ran] == ["decode_plan", "batch_decode", "prefill_plan", "batch_prefill"]
        assert {str(x.spec) for x in ran} <= {str(x.spec) for x in choices[:at_start]}, "compiled while serving"


def test_the_memory_of_a_step_is_measured_without_metadata(plugin: Any) -> None:
    _, (impl,) = engine(plugin, "cpu")
    out = torch.ones(2, 4, DIM)
    assert not impl.forward(LAYER, out, out, out, torch.empty(0), None, out).any()


def test_what_no_kernel_does_is_refused(plugin: Any) -> None:
    with pytest.raises(NotImplementedError, match="alibi_slopes: None is required"):
        plugin.Impl(4, 64, 1.0, 2, [0.5])
    builder, (impl,) = engine(plugin, "cpu")
    b = batch(MIXED, "cpu")
    b.step.causal = False
    with pytest.raises(NotImplementedError, match="causal: True is required"):
        builder.build(0, b.step)
    out = torch.ones(2, 4, DIM)
    with pytest.raises(NotImplementedError, match="output_scale: None is required"):
        impl.forward(LAYER, out, out, out, torch.empty(0), None, out, torch.ones(1))


def test_registration(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = fake_vllm.install(version, monkeypatch)
    plugin.register()
    plugin.register()  # vLLM may call it again
    custom = fake_vllm.AttentionBackendEnum.CUSTOM
    module, _, name = custom.get_path().rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == custom.name


def test_an_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not even the registry is imported: its place may have changed."""
    plugin = fake_vllm.install("0.99.1", monkeypatch)
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.registry")
    with caplog.at_level(logging.INFO, "vllm"):
        plugin.register()
    assert [record.message for record in caplog.records] == [
        "fi is not registered: it supports vLLM 0.24 and 0.33, this is 0.99.1"
    ]
    assert not fake_vllm.AttentionBackendEnum.CUSTOM.is_overridden()


def test_the_backend_of_another_plugin_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plugin = fake_vllm.install(VERSIONS[0], monkeypatch)
    fake_vllm.register_backend(fake_vllm.AttentionBackendEnum.CUSTOM, "other.Backend")
    with caplog.at_level(logging.INFO, "vllm"):
        plugin.register()
    assert fake_vllm.AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    assert [record.message for record in caplog.records] == [
        "fi is not registered: other.Backend is the CUSTOM attention backend"
    ]
