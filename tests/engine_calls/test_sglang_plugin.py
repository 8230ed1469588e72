"""fi's plugin for SGLang: it has the interfaces of the supported versions, and computes as the references do.

tools/engine_seams.py records the interfaces in sglang_seams.json.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_calls import fake_sglang
from engine_calls.fake_sglang import PLUGIN, SEAMS, batch, module, parameters, settings
from engine_calls.graphs import captured, refill
from families.attention_reference import attention
from families.harness import assert_close, rand
from fi_core.attention.ops import decode as decode_ops
from fi_core.attention.ops import prefill as prefill_ops

PAGE, PAGES, HEADS, DIM = 16, 64, (4, 2), 64
FP8 = torch.float8_e4m3fn
VERSION = next(iter(SEAMS))
RECORDED = {n: text.split(", ") if text else [] for names in SEAMS[VERSION].values() for n, text in names.items()}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_sglang.install(VERSION, monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_package_names_the_plugin() -> None:
    project = (Path(__file__).parents[2] / "packages" / "fi-core" / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."sglang\.srt\.plugins"\]\nfi = "(.+):(.+)"', project)
    assert found and callable(getattr(importlib.import_module(found[1]), found[2]))


def test_stand_ins_have_the_interfaces_of_sglang() -> None:
    for function in fake_sglang.FUNCTIONS:
        assert parameters(function) == RECORDED[function.__qualname__], function.__qualname__
    assert {mode.name for mode in fake_sglang.ForwardMode} <= set(RECORDED["ForwardMode"])
    assert {kind.name for kind in fake_sglang.AttentionType} == set(RECORDED["AttentionType"])
    for made in (fake_sglang.MoeRunnerConfig, fake_sglang.TritonMoeQuantInfo, fake_sglang.KVWriteLoc):
        assert set(made.__dataclass_fields__) <= set(RECORDED[made.__name__])
    for kind in (fake_sglang.StandardDispatchOutput, fake_sglang.StandardCombineInput):
        assert [x.rstrip("=") for x in parameters(kind)] == RECORDED[kind.__name__]
    assert set(vars(batch([(3, 3)], "EXTEND", "cpu", fake_sglang.ForwardMode))) - set(RECORDED["ForwardBatch"]) == set()


def test_methods_take_what_sglang_passes(plugin: Any) -> None:
    own = {
        name: importlib.import_module(f"{PLUGIN}.{name}") for name in ("steps", "attention", "mla", "experts", "gdn")
    }
    ours = {
        "AttentionBackend": (own["steps"].Steps, own["attention"].Backend, own["mla"].Backend),
        "DispatchMoeRunnerCore": (own["experts"].Experts,), "GDNKernelDispatcher": (own["gdn"].Dispatcher,),
        "Fp8MoEMethod": (own["experts"].Fp8Method,),
    }  # fmt: skip
    compared = 0
    for name, wanted in RECORDED.items():
        kind, _, method = name.partition(".")
        for cls in ours.get(kind, ()):
            if method in vars(cls):
                assert parameters(vars(cls)[method]) == wanted, name
                compared += 1
    assert compared == 14
    for method in ("decode", "extend", "target_verify"):  # what SGLang passes by name may stand in **kwargs
        names = RECORDED[f"FlashInferGDNKernel.{method}"]
        got = parameters(getattr(own["gdn"].Kernel, method))
        assert [x for x in got if x[0] != "*"] == [x for x in names if x[0] != "*"]
        assert {x.rstrip("=") for x in got} <= {x.rstrip("=") for x in names} | {"*output", "*inplace_update"}


def test_registration(plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registry = module("layers.attention.attention_registry").ATTENTION_BACKENDS
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.0")
    with caplog.at_level(logging.INFO, logger="sglang"):
        plugin.register()
    assert "supports SGLang 0.5.23, this is 0.4.0" in caplog.text
    assert "fi" not in registry
    monkeypatch.setattr(importlib.metadata, "version", lambda name: VERSION)
    for _ in range(2):
        plugin.register()
    assert registry["fi"] is plugin.attention


class Server:
    """Layers of a model over a pool, whose pages are shuffled, with a prefix of each request in it."""

    def __init__(
        self, plugin: Any, device: str, layers: Sequence[dict[str, Any]] = ({},), kv: torch.dtype = torch.bfloat16,
        window_pool: bool = False, **changes: Any,
    ) -> None:  # fmt: skip
        radix = module("layers.radix_attention").RadixAttention
        self.layers = [radix(HEADS[0], DIM, DIM**-0.5, HEADS[1], i, **own) for i, own in enumerate(layers)]
        self.device, sizes = device, (kv, HEADS[1], DIM)
        if window_pool:
            ids = [[i for i, x in enumerate(layers) if (x["sliding_window_size"] >= 0) is w] for w in (True, False)]
            self.pool = module("mem_cache.swa_memory_pool").SWAKVPool(
                PAGE * PAGES, PAGE * PAGES, PAGE, *sizes, *ids, device
            )
            order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2)) + 1
            slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten()
            self.pool.full_to_swa_index_mapping = torch.cat([torch.arange(PAGE), slots, torch.tensor([-1])]).to(device)
        else:
            pool = module("mem_cache.memory_pool").MHATokenToKVPool
            self.pool = pool(PAGE * PAGES, PAGE, *sizes, len(layers), device, False)
        free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)) + 1
        table = (free[:60].view(6, 10, 1) * PAGE + torch.arange(PAGE)).flatten(1)
        self.table = torch.cat([torch.zeros_like(table[:1]), table]).int().to(device)
        runner: dict[str, Any] = {
            "token_to_kv_pool": self.pool, "device": device, "page_size": PAGE, "dtype": torch.bfloat16,
            "kv_cache_dtype": kv, "req_to_token_pool": SimpleNamespace(req_to_token=self.table),
            "is_draft_worker": False, "model": torch.nn.ModuleList(self.layers),
            "model_config": SimpleNamespace(is_encoder_decoder=False),
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }  # fmt: skip
        self.backend = importlib.import_module(f"{PLUGIN}.attention").Backend(SimpleNamespace(**runner | changes))

    def prepared(self, requests: Sequence[tuple[int, int]], mode: str) -> Any:
        """The step, whose keys and values before its queries are written already."""
        step = batch(requests, mode, self.device)
        kv_lens, qo_lens = zip(*requests)

        def rows(heads: int, counts: Sequence[int], seed: int) -> list[torch.Tensor]:
            shapes = [(n, heads, DIM) for n in counts]
            return [rand(*x, dtype=torch.bfloat16, device=self.device, seed=seed + i) for i, x in enumerate(shapes)]

        self.q, self.kv = rows(HEADS[0], qo_lens, 0), [rows(HEADS[1], kv_lens, seed) for seed in (100, 200)]
        self.new = [[x[-q:] for x, (_, q) in zip(own, requests)] for own in self.kv]
        slots = [self.table[i + 1, :n].long() for i, n in enumerate(kv_lens)]
        write = module("mem_cache.memory_pool").KVWriteLoc
        for layer in self.layers:
            old = [torch.cat([x[:-q] for x, (_, q) in zip(own, requests)]) for own in self.kv]
            where = torch.cat([row[:-q] for row, (_, q) in zip(slots, requests)])
            swa = self.pool.translate_loc_from_full_to_swa(where) if hasattr(self.pool, "layers_mapping") else None
            if len(where):
                self.pool.set_kv_buffer(layer, write(where, swa), *old, layer.k_scale, layer.v_scale)
        step.out_cache_loc = torch.cat([row[-q:] for row, (_, q) in zip(slots, requests)])
        return step

    def attend(self, layer: Any, step: Any, **options: Any) -> torch.Tensor:
        k, v = (torch.cat(x) for x in self.new)
        out = self.backend.forward(torch.cat(self.q).flatten(1), k, v, layer, step, **options)
        return out.view(-1, HEADS[0], DIM)  # type: ignore[no-any-return]

    def expected(self, **options: Any) -> torch.Tensor:
        return torch.cat([attention(q, k, v, causal=True, **options)[0] for q, k, v in zip(self.q, *self.kv)])


STEPS = {
    "EXTEND": [(40, 40), (90, 25), (17, 2), (160, 33)], "DECODE": [(70, 1), (1, 1), (33, 1), (160, 1)],
    "MIXED": [(40, 40), (90, 25), (70, 1), (16, 1)], "TARGET_VERIFY": [(70, 3), (9, 3), (160, 3)],
}  # fmt: skip
DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("option", [None, "sinks", "logits_soft_cap"])
def test_attention(plugin: Any, mode: str, window: int, option: str | None, device: str) -> None:
    """Extends behind a prefix, decode, both in one step, and drafts; against fp64."""
    sinks = rand(HEADS[0], device=device, dtype=torch.bfloat16) if option == "sinks" else None
    cap = 0.5 if option == "logits_soft_cap" else 0.0
    with settings(**DRAFTS if mode == "TARGET_VERIFY" else {}):
        server = Server(plugin, device, [{"sliding_window_size": window, "logit_cap": cap}])
    step = server.prepared(STEPS[mode], mode)
    server.backend.init_forward_metadata(step)
    got = server.attend(server.layers[0], step, **({} if sinks is None else {"sinks": sinks}))
    assert_close(got, server.expected(window_left=window, sinks=sinks, logits_soft_cap=cap))


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
def test_layers_of_other_windows_in_pools_of_their_own(plugin: Any, mode: str, device: str) -> None:
    windows = [-1, 20, -1, 50]
    with settings():
        server = Server(plugin, device, [{"sliding_window_size": w} for w in windows], window_pool=True)
    step = server.prepared(STEPS[mode], mode)
    server.backend.init_forward_metadata(step)
    for layer, window in zip(server.layers, windows):
        assert_close(server.attend(layer, step), server.expected(window_left=window))


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
def test_a_step_has_one_plan_for_all_layers(plugin: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with settings():
        server = Server(plugin, "cpu", [{"sliding_window_size": -1}] * 3)
    made: list[str] = []
    for ops in (decode_ops, prefill_ops):
        name = f"{ops.__name__.rpartition('.')[2]}_plan"
        own = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *x, own=own, name=name, **y: (made.append(name), own(*x, **y)))
    for _ in range(2):
        step = server.prepared(STEPS[mode], mode)
        server.backend.init_forward_metadata(step)
        for layer in server.layers:
            assert_close(server.attend(layer, step), server.expected())
    assert made == ["prefill_plan" if mode == "EXTEND" else "decode_plan"] * 2


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
@pytest.mark.parametrize("on_host", [True, False])
def test_an_fp8_cache(plugin: Any, mode: str, on_host: bool, device: str) -> None:
    with settings():
        server = Server(plugin, device, kv=FP8)
    (layer,) = server.layers
    layer.k_scale, layer.v_scale = torch.tensor(0.5, device=device), torch.tensor(2.0, device=device)
    if on_host:
        layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    step = server.prepared(STEPS[mode], mode)
    exact = server.kv = [[(x.float() / s).to(FP8).float() * s for x in own] for own, s in zip(server.kv, (0.5, 2.0))]
    server.backend.init_forward_metadata(step)
    server.new = [[x.clone() for x in own] for own in server.new]
    got = server.attend(layer, step)
    server.kv = exact
    assert_close(got, server.expected(), tolerance=(0.03, 0.03))


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_graphs(plugin: Any, mode: str, device: str) -> None:
    """A captured step runs again with other lengths and pages, written in place; requests of padding are finite."""
    q_len = 3 if mode == "TARGET_VERIFY" else 1
    with settings(**DRAFTS if q_len > 1 else {}):
        server = Server(plugin, device, [{"sliding_window_size": w} for w in (-1, 20)], window_pool=True)
    backend, requests = server.backend, 4
    backend.init_cuda_graph_state(8, 8 * q_len)
    fixed = server.prepared([(q_len, q_len)] * requests, mode)
    q, k, v = (torch.cat(x) for x in (server.q, *server.new))
    outs: list[Any] = []

    def body() -> None:
        backend.init_forward_metadata_in_graph(fixed)
        outs[:] = [backend.forward(q.flatten(1), k.clone(), v.clone(), layer, fixed) for layer in server.layers]

    replay = captured(backend, fixed, body, device)
    for lengths in ((70, 33, 160), (20, 150, 9)):
        refill(fixed, server.prepared([(n, q_len) for n in lengths], mode))
        for x, new in ((q, server.q), (k, server.new[0]), (v, server.new[1])):
            x[: len(lengths) * q_len] = torch.cat(new)
        backend.init_forward_metadata_out_graph(fixed)
        replay()
        for out, window in zip(outs, (-1, 20)):
            got = out.view(-1, HEADS[0], DIM)
            assert bool(got.isfinite().all())
            assert_close(got[: len(lengths) * q_len], server.expected(window_left=window))


def test_what_attention_refuses(plugin: Any) -> None:
    moved: Any = SimpleNamespace(is_translating=True)
    for changes, text in (
        ({"page_size": 1}, "--page-size: a multiple of 16 is required by --attention-backend fi; got 1"),
        ({"is_draft_worker": True}, "--speculative-draft-attention-backend: another backend"),
        ({"kv_cache_dtype": torch.uint8}, "--kv-cache-dtype: torch.bfloat16 or fp8"),
        ({"kv_index_translator": moved}, "--enable-unified-memory: its absence"),
    ):
        with settings(), pytest.raises(NotImplementedError, match=re.escape(text)):
            Server(plugin, "cpu", **changes)
    with settings(**DRAFTS | {"speculative_eagle_topk": 4}), pytest.raises(NotImplementedError, match="topk: 1 is"):
        Server(plugin, "cpu")
    with settings():
        server = Server(plugin, "cpu", [{"is_cross_attention": True}])
    step = server.prepared(STEPS["EXTEND"], "EXTEND")
    server.backend.init_forward_metadata(step)
    with pytest.raises(NotImplementedError, match="attn_type"):
        server.attend(server.layers[0], step)
    with pytest.raises(NotImplementedError, match="idx_q: None is required"):
        server.attend(server.layers[0], step, idx_q=torch.zeros(1))


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {}, "gelu": {"activation": "gelu"}, "scaled": {"routed_scaling_factor": 2.5},
    "clamped": {"swiglu_limit": 0.5},
    "swiglu of gpt-oss": {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.7, "gate_up_interleaved": False},
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_experts(plugin: Any, name: str, biased: bool, device: str) -> None:
    """The runner that SGLang's method makes; rows of the linear projection come first, as it asks the loader."""
    experts = importlib.import_module(f"{PLUGIN}.experts")
    plugin.register()
    config = module("layers.moe.moe_runner.base").MoeRunnerConfig(**ACTIVATIONS[name])
    tokens, hidden, inter, count, top = 9, 128, 64, 6, 2
    x, up, down = (
        rand(*shape, dtype=torch.bfloat16, device=device, seed=i) * scale
        for i, (shape, scale) in enumerate(
            [((tokens, hidden), 1.0), ((count, 2 * inter, hidden), 0.1), ((count, hidden, inter), 0.1)]
        )
    )
    b13, b2 = (rand(count, n, dtype=torch.float32, device=device, seed=n) for n in (2 * inter, hidden))
    ids = rand(tokens, count, dtype=torch.float32, device=device, seed=9).topk(top).indices.int()
    ids[0, 1] = -1  # of another rank
    scales = rand(tokens, top, dtype=torch.float32, device=device).abs()
    triton = module("layers.moe.moe_runner.triton")
    info = triton.TritonMoeQuantInfo(up, down, *((b13, b2) if biased else ()))
    dispatched = module("layers.moe.token_dispatcher.standard").StandardDispatchOutput(x, None, (scales, ids, None))
    method = experts.Method.__new__(experts.Method)
    method.use_flashinfer_cutlass = False
    with settings(moe="fi"), _selected("fi", experts):
        assert method.load_up_proj_weight_first
        method.create_moe_runner(None, config)
        got = method.runner.run(dispatched, info).hidden_states
    want = experts_of(x, up, down, b13 if biased else None, b2 if biased else None, (scales, ids), name)
    want *= config.routed_scaling_factor or 1.0
    assert_close(got, want, tolerance=(0.02, 0.01 * float(want.abs().max())))


def experts_of(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, b13: Any, b2: Any, chosen: Any, name: str
) -> torch.Tensor:
    """In fp64, by ids of which -1 is none."""
    scales, ids = (part.cpu() for part in chosen)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        e = int(ids[t, j])
        if e < 0:
            continue
        both = up[e].cpu().double() @ x[t].cpu().double() + (0 if b13 is None else b13[e].cpu().double())
        linear, gate = both.chunk(2)
        if name == "swiglu of gpt-oss":
            gate, linear = gate.clamp(max=0.7), linear.clamp(-0.7, 0.7)
            h = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
        else:
            gate = torch.nn.functional.gelu(gate) if name == "gelu" else torch.nn.functional.silu(gate)
            h = gate.clamp(max=0.5) * linear.clamp(-0.5, 0.5) if name == "clamped" else gate * linear
        out = down[e].cpu().double() @ h + (0 if b2 is None else b2[e].cpu().double())
        want[t] += out * scales[t, j].double()
    return want


def fp8_method(experts: Any, **changed: Any) -> Any:
    """The method of a checkpoint of fp8, as SGLang makes it on a GPU."""
    method = experts.Fp8Method.__new__(experts.Fp8Method)
    of_checkpoint = {
        "block_quant": True, "weight_block_size": [128, 128], "use_mxfp8": False, "is_fp4_expert": False,
        "quant_config": SimpleNamespace(is_checkpoint_fp8_serialized=True),
    }  # fmt: skip
    vars(method).update(of_checkpoint | changed)
    return method


def test_fp8_experts(plugin: Any, device: str) -> None:
    """From SGLang's method to its result, with the scales of a checkpoint: fp32, of 128 x 128 weights."""
    experts = importlib.import_module(f"{PLUGIN}.experts")
    plugin.register()
    tokens, hidden, inter, count, top = 9, 256, 128, 6, 2
    x = rand(tokens, hidden, dtype=torch.bfloat16, device=device, seed=1)
    shapes = {"w13": (count, 2 * inter, hidden), "w2": (count, hidden, inter)}
    layer, real = SimpleNamespace(w13_input_scale=None, w2_input_scale=None), {}
    for seed, (name, shape) in enumerate(shapes.items()):
        weight = rand(*shape, dtype=torch.float32, device=device, seed=seed).mul(64).to(FP8)
        blocks = rand(shape[0], *(n // 128 for n in shape[1:]), dtype=torch.float32, device=device, seed=9)
        scale = (blocks.abs() + 0.5) / 640
        real[name] = weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        vars(layer).update({f"{name}_weight": weight, f"{name}_weight_scale_inv": scale})
    ids = rand(tokens, count, dtype=torch.float32, device=device, seed=9).topk(top).indices.int()
    scales = rand(tokens, top, dtype=torch.float32, device=device).abs()
    dispatched = module("layers.moe.token_dispatcher.standard").StandardDispatchOutput(x, None, (scales, ids, None))
    method = fp8_method(experts)
    with settings(moe="fi"), _selected("fi", experts):
        assert method.load_up_proj_weight_first
        method.create_moe_runner(None, module("layers.moe.moe_runner.base").MoeRunnerConfig())
        got = method.apply(layer, dispatched).hidden_states
    want = experts_of(x, real["w13"], real["w2"], None, None, (scales, ids), "silu")
    error = (got.cpu().double() - want).norm() / want.norm()
    assert error < 0.05, f"{error:.3f}"  # of activations in e4m3, twice


def _selected(name: str, experts: Any) -> Any:
    """SGLang reads the option when it starts."""
    patch = pytest.MonkeyPatch.context()
    value = SimpleNamespace(value=name)

    class Selected:
        def __enter__(self) -> None:
            patch.__enter__().setattr(experts, "get_moe_runner_backend", lambda: value)

        def __exit__(self, *error: Any) -> None:
            patch.__exit__(*error)

    return Selected()


def test_what_experts_refuse(plugin: Any) -> None:
    experts = importlib.import_module(f"{PLUGIN}.experts")
    made = module("layers.moe.moe_runner.base").MoeRunnerConfig
    for options, text in (
        ({"activation": "relu2"}, "activation: silu or gelu"), ({"no_combine": True}, "no_combine: False"),
        ({"gemm1_alpha": 1.7}, "gate_up_interleaved: halves"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=text):
            experts.Experts(made(**options))
    with _selected("fi", experts):
        with pytest.raises(NotImplementedError, match="quantization: experts of 16-bit or fp8 weights"):
            experts.check_runner(None, SimpleNamespace(value="deep_gemm"), None)
        with pytest.raises(NotImplementedError, match="--enable-lora"):
            experts.check_runner(None, SimpleNamespace(value="fi"), None, True)
        for changed, text in (
            ({"weight_block_size": None}, r"weight_block_size: \[128, 128\]"), ({"use_mxfp8": True}, "quantization:"),
            ({"is_fp4_expert": True}, "quantization:"),
            ({"quant_config": SimpleNamespace(is_checkpoint_fp8_serialized=False)}, "quantization:"),
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match=text):
                fp8_method(experts, **changed).create_moe_runner(None, made())
    with _selected("triton", experts):
        experts.check_runner(None, SimpleNamespace(value="deep_gemm"), None, True)
