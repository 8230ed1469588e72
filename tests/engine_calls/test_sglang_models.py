"""fi's plugin for SGLang computes latent attention and gated delta nets as the references do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_calls import fake_sglang
from engine_calls.fake_sglang import PLUGIN, SEAMS, batch, module, settings
from engine_calls.graphs import captured, refill
from families import linear_attention_reference as linear
from families.attention_reference import attention
from families.harness import assert_close, rand
from fi_core.attention.ops import mla as mla_ops

PAGE, HEADS, LATENT, ROW = 16, 4, 512, 576
SCALE = 192**-0.5
FP8 = torch.float8_e4m3fn
DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_sglang.install(next(iter(SEAMS)), monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Server:
    """Layers of a DeepSeek model over a pool of latent rows, whose pages are shuffled."""

    def __init__(self, plugin: Any, device: str, kv: torch.dtype = torch.bfloat16, **changes: Any) -> None:
        radix = module("layers.radix_attention").RadixAttention
        dims = changes.pop("dims", (192, 128))
        self.device, kinds = device, ((ROW, 1, LATENT), (dims[0], HEADS, dims[1]))
        self.layers = [
            radix(HEADS, dim, SCALE, kv_heads, i, v_head_dim=v_dim) for i in range(2) for dim, kv_heads, v_dim in kinds
        ]
        pool = module("mem_cache.memory_pool").MLATokenToKVPool
        self.pool = pool(PAGE * 64, PAGE, kv, LATENT, ROW - LATENT, 2, device, False)
        free = torch.randperm(64, generator=torch.Generator().manual_seed(1)) + 1
        table = (free[:60].view(6, 10, 1) * PAGE + torch.arange(PAGE)).flatten(1)
        self.table = torch.cat([torch.zeros_like(table[:1]), table]).int().to(device)
        runner: dict[str, Any] = {
            "token_to_kv_pool": self.pool, "device": device, "page_size": PAGE, "dtype": torch.bfloat16,
            "kv_cache_dtype": kv, "req_to_token_pool": SimpleNamespace(req_to_token=self.table),
            "use_mla_backend": True, "is_draft_worker": False, "model": torch.nn.ModuleList(self.layers),
            "model_config": SimpleNamespace(is_encoder_decoder=False),
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }  # fmt: skip
        self.backend = plugin.attention(SimpleNamespace(**runner | changes))

    def prepared(self, requests: Sequence[tuple[int, int]], mode: str) -> Any:
        """The step of requests of (kv_len, qo_len), whose rows before its queries are written already."""
        step = batch(requests, mode, self.device)
        step.attn_attend_prefix_cache = step.mha_return_lse = None
        self.q = [self.rand(q, HEADS, ROW, seed=i) for i, (_, q) in enumerate(requests)]
        self.rows = [self.rand(n, 1, ROW, seed=100 + i) for i, (n, _) in enumerate(requests)]
        slots = [self.table[i + 1, :n].long() for i, (n, _) in enumerate(requests)]
        write = module("mem_cache.memory_pool").KVWriteLoc
        for x, where, (_, q) in zip(self.rows, slots, requests):
            for layer in self.layers[::2] if len(x) > q else ():
                self.pool.set_kv_buffer(layer, write(where[:-q]), x[:-q], x[:-q, :, :LATENT])
        step.out_cache_loc = torch.cat([where[-q:] for where, (_, q) in zip(slots, requests)])
        self.new = torch.cat([x[-q:] for x, (_, q) in zip(self.rows, requests)])
        return step

    def rand(self, *shape: int, seed: int) -> torch.Tensor:
        return rand(*shape, dtype=torch.bfloat16, device=self.device, seed=seed)

    def attend(self, layer: Any, step: Any, **options: Any) -> Any:
        out = self.backend.forward(
            torch.cat(self.q).flatten(1), self.new.clone(), self.new[..., :LATENT], layer, step, **options
        )
        return out.view(-1, HEADS, LATENT)

    def expected(self) -> torch.Tensor:
        return torch.cat(
            [attention(q, x, x[..., :LATENT], causal=True, sm_scale=SCALE)[0] for q, x in zip(self.q, self.rows)]
        )


STEPS = {
    "EXTEND": [(40, 40), (90, 25), (17, 2)], "DECODE": [(70, 1), (1, 1), (33, 1), (160, 1)],
    "MIXED": [(40, 40), (70, 1), (16, 1)], "TARGET_VERIFY": [(70, 3), (9, 3), (160, 3)],
}  # fmt: skip


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_latent_attention(plugin: Any, mode: str, kv: torch.dtype, device: str) -> None:
    """Decode, drafts and absorbed prompts behind a prefix, in each layer; against fp64."""
    with settings(**DRAFTS if mode == "TARGET_VERIFY" else {}):
        server = Server(plugin, device, kv)
    step = server.prepared(STEPS[mode], mode)
    server.backend.init_forward_metadata(step)
    server.rows = [x.to(kv).to(x.dtype) for x in server.rows]
    for layer in server.layers[::2]:
        assert_close(server.attend(layer, step), server.expected())


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
def test_a_step_has_one_plan_for_all_layers(plugin: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with settings():
        server = Server(plugin, "cpu")
    step, made, own = server.prepared(STEPS[mode], mode), [], mla_ops.mla_plan
    monkeypatch.setattr(mla_ops, "mla_plan", lambda *x, **y: (made.append(1), own(*x, **y)))
    server.backend.init_forward_metadata(step)
    for layer in server.layers[::2]:
        server.attend(layer, step)
    assert made == [1]


@pytest.mark.parametrize("prefix", [0, 37])
def test_prompts_over_expanded_keys(plugin: Any, prefix: int, device: str) -> None:
    """New tokens attend to each other, then to the prefix in chunks; SGLang merges the parts by their sums."""
    with settings():
        server = Server(plugin, device)
    assert module("models.deepseek_common.attention_backend_handler")
    news, olds = (30, 9, 1), (prefix, 0, 3 if prefix else 0)
    step = server.prepared([(new + old, new) for new, old in zip(news, olds)], "EXTEND")
    server.backend.init_forward_metadata(step)
    layer = server.layers[1]
    q = [server.rand(n, HEADS, 192, seed=i) for i, n in enumerate(news)]
    k = [server.rand(a + b, HEADS, 192, seed=10 + i) for i, (a, b) in enumerate(zip(news, olds))]
    v = [server.rand(a + b, HEADS, 128, seed=20 + i) for i, (a, b) in enumerate(zip(news, olds))]

    def run(keys: list[torch.Tensor], values: list[torch.Tensor]) -> Any:
        return server.backend.forward(torch.cat(q), torch.cat(keys), torch.cat(values), layer, step, False)

    step.mha_return_lse, step.attn_attend_prefix_cache = prefix > 0, False
    got = run(*([x[old:] for x, old in zip(own, olds)] for own in (k, v)))
    if prefix:
        chunks = [(0, 16), (16, 37)]
        lengths = torch.tensor([[min(max(old - a, 0), b - a) for old in olds] for a, b in chunks])
        step.prefix_chunk_cu_seq_lens = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int().to(device)
        step.prefix_chunk_max_seq_lens, step.attn_attend_prefix_cache = lengths.amax(1).tolist(), True
        out, lse = (x.double() for x in got)
        for step.prefix_chunk_idx, (a, b) in enumerate(chunks):
            part = run(*([x[: old or 0][a:b] for x, old in zip(own, olds)] for own in (k, v)))
            assert part[1].dtype == torch.float32
            both = torch.stack([lse, part[1].double()])
            weights = both.softmax(0)
            out, lse = out * weights[0, ..., None] + part[0].double() * weights[1, ..., None], both.logsumexp(0)
        got = out.bfloat16().flatten(1)
    want = [attention(x, y, z, causal=True, sm_scale=SCALE)[0] for x, y, z in zip(q, k, v)]
    assert_close(got.view(-1, HEADS, 128), torch.cat(want), tolerance=(0.02, 0.02))


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_graphs_of_latent_attention(plugin: Any, mode: str, device: str) -> None:
    """A captured step runs again with other lengths and pages, written in place; requests of padding are finite."""
    q_len = 3 if mode == "TARGET_VERIFY" else 1
    with settings(**DRAFTS if q_len > 1 else {}):
        server = Server(plugin, device)
    backend, requests = server.backend, 4
    backend.init_cuda_graph_state(8, 8 * q_len)
    fixed = server.prepared([(q_len, q_len)] * requests, mode)
    q, new, outs = torch.cat(server.q), server.new.clone(), []

    def body() -> None:
        backend.init_forward_metadata_in_graph(fixed)
        outs[:] = [backend.forward(q, new, new[..., :LATENT], layer, fixed) for layer in server.layers[::2]]

    replay = captured(backend, fixed, body, device)
    for lengths in ((70, 33, 160), (20, 150, 9)):
        refill(fixed, server.prepared([(n, q_len) for n in lengths], mode))
        q[: len(server.new)], new[: len(server.new)] = torch.cat(server.q), server.new
        backend.init_forward_metadata_out_graph(fixed)
        replay()
        for out in outs:
            got = out.view(-1, HEADS, LATENT)
            assert bool(got.isfinite().all())
            assert_close(got[: len(server.new)], server.expected())


def test_what_latent_attention_refuses(plugin: Any) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dims": (256, 256)}, "the model: head dims of 512 + 64, and of 128 + 64 and 128 in prompts"),
        ({"kv": torch.float8_e5m2}, "--kv-cache-dtype: torch.bfloat16 or fp8_e4m3"),
        ({"page_size": 1}, "--page-size: a multiple of 16"),
    )
    for changes, text in cases:
        with settings(), pytest.raises(NotImplementedError, match=re.escape(text)):
            Server(plugin, "cpu", **changes)
    with settings():
        server = Server(plugin, "cpu")
    step = server.prepared(STEPS["DECODE"], "DECODE")
    server.backend.init_forward_metadata(step)
    with pytest.raises(NotImplementedError, match="attn_sink: None is required"):
        server.attend(server.layers[0], step, attn_sink=torch.zeros(HEADS))
    with pytest.raises(NotImplementedError, match="save_kv_cache: False"):
        server.backend.forward(*(torch.zeros(4, HEADS, n) for n in (192, 192, 128)), server.layers[1], step)


K_HEADS, V_HEADS, DIM = 2, 4, 64


def dispatcher(decode: str = "fi", prefill: str = "fi", verify: str | None = None) -> Any:
    """As SGLang makes it from its options."""
    backends = module("layers.attention.linear.utils").LinearAttnKernelBackend
    options = {f"linear_attn_{n}_backend": x for n, x in (("decode", decode), ("prefill", prefill), ("verify", verify))}
    with settings(**options):
        made = importlib.import_module(f"{PLUGIN}.gdn").Dispatcher
        return made(backends(decode), backends(prefill), backends(verify or "triton"))


class DeltaNet:
    """What a layer passes for `tokens` tokens, and a pool of states."""

    def __init__(self, tokens: int, dtype: torch.dtype, device: str) -> None:
        shapes = (K_HEADS, K_HEADS, V_HEADS)
        self.q, self.k, self.v = (
            rand(1, tokens, n, DIM, dtype=torch.bfloat16, device=device, seed=i) for i, n in enumerate(shapes)
        )
        self.a, self.b = (rand(tokens, V_HEADS, dtype=torch.bfloat16, device=device, seed=i) for i in (3, 4))
        self.A_log, self.dt_bias = (rand(V_HEADS, dtype=torch.float32, device=device, seed=i) for i in (5, 6))
        self.pool = rand(8, V_HEADS, DIM, DIM, dtype=dtype, device=device)
        self.alpha, self.beta = linear.gates(self.a, self.b, self.A_log, self.dt_bias)

    def expected(self, rows: slice, state: torch.Tensor, every: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        own = (x[0, rows] for x in (self.q, self.k, self.v))
        return linear.gated_delta_rule(*own, self.alpha[rows], self.beta[rows], state, DIM**-0.5, True, every)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_of_a_gated_delta_net(plugin: Any, dtype: torch.dtype, device: str) -> None:
    """Tokens of four requests; the last row pads a graph."""
    net, slots = DeltaNet(5, dtype, device), torch.tensor([3, 1, 6, 2, -1], dtype=torch.int32, device=device)
    before, chosen = net.pool.clone(), dispatcher()
    assert not chosen.supports_packed_decode  # SGLang's own form
    got = chosen.decode(
        net.q, net.k, net.v, net.a, net.b, A_log=net.A_log, dt_bias=net.dt_bias, ssm_states=net.pool,
        cache_indices=slots, query_start_loc=torch.arange(6, dtype=torch.int32, device=device),
    )  # fmt: skip
    assert got.shape == (1, 5, V_HEADS, DIM)
    for i, slot in enumerate(slots[:4].tolist()):
        want, after = net.expected(slice(i, i + 1), before[slot])
        assert_close(got[0, i : i + 1], want, tolerance=(0.02, 0.02))
        assert_close(net.pool[slot], after[-1], tolerance=(0.02, 0.02))
    others = [0, 4, 5, 7]
    assert bool((net.pool[others] == before[others]).all()), "slots of no request"


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_of_a_gated_delta_net(plugin: Any, dtype: torch.dtype, keeps: bool, device: str) -> None:
    """From states of a pool; the states that the prefix cache keeps are those after each 64 tokens."""
    lengths, slots = (150, 3), torch.tensor([5, 2], dtype=torch.int32, device=device)
    net = DeltaNet(sum(lengths), dtype, device)
    before, out = net.pool.clone(), torch.full_like(net.v, 7.0)
    more = {
        "state_checkpoint_cu_starts": torch.tensor([0, 2, 2], device=device), "num_state_checkpoints": 2,
        "state_checkpoint_every_n_tokens": 64, "output": out,
    }  # fmt: skip
    got, state, kept = dispatcher().extend(
        net.q, net.k, net.v, net.alpha.log()[None], net.beta[None], ssm_states=net.pool, cache_indices=slots,
        query_start_loc=torch.tensor([0, 150, 153], dtype=torch.int32, device=device), layer_id=0,
        **more if keeps else {},
    )  # fmt: skip
    assert state is None and got.shape == net.v.shape and (got.data_ptr() == out.data_ptr()) is keeps
    for slot, rows in zip(slots.tolist(), (slice(0, 150), slice(150, 153))):
        want, after = net.expected(rows, before[slot], 64)
        assert_close(got[0, rows], want, tolerance=(0.02, 0.02))
        assert_close(net.pool[slot], after[-1], tolerance=(0.02, 0.02))
        if keeps and rows.start == 0:
            assert_close(kept[0], after[1:3], tolerance=(0.02, 0.02))
    others = [0, 1, 3, 4, 6, 7]
    assert bool((net.pool[others] == before[others]).all()), "slots of no request"


def test_drafts_of_a_gated_delta_net(plugin: Any, device: str) -> None:
    """Two requests of three drafts: the states after each are kept, those of the pool stay."""
    net, slots = DeltaNet(6, torch.float32, device), torch.tensor([4, 1], dtype=torch.int32, device=device)
    before, kept = net.pool.clone(), torch.zeros(3, 3, V_HEADS, DIM, DIM, device=device)
    got = dispatcher(verify="fi").target_verify(
        net.A_log, net.dt_bias, net.q, net.k, net.v, net.a, net.b, ssm_states=net.pool, cache_indices=slots,
        query_start_loc=torch.tensor([0, 3, 6], dtype=torch.int32, device=device), intermediate_states_buffer=kept,
        intermediate_state_indices=torch.arange(3, device=device), cache_steps=3, retrieve_parent_token=None,
    )  # fmt: skip
    for i, slot in enumerate(slots.tolist()):
        rows = slice(3 * i, 3 * i + 3)
        want, after = net.expected(rows, before[slot])
        assert_close(got[0, rows], want, tolerance=(0.02, 0.02))
        assert_close(kept[i], after[1:], tolerance=(0.02, 0.02))
    assert bool((net.pool == before).all())


def test_options_choose_the_kernels_of_a_gated_delta_net(plugin: Any) -> None:
    own = importlib.import_module(f"{PLUGIN}.gdn").Kernel
    for options, wanted in (
        (("fi", "triton"), (True, False, False)), (("triton", "fi"), (False, True, False)),
        (("fi", "fi", "fi"), (True, True, True)),
    ):  # fmt: skip
        made = dispatcher(*options)
        assert tuple(type(getattr(made, f"{n}_kernel")) is own for n in ("decode", "extend", "verify")) == wanted
        assert made.supports_packed_decode is (options[0] != "fi")
    with pytest.raises(ValueError, match="Unsupported"):
        dispatcher("another")
    kernel = own()
    with pytest.raises(NotImplementedError, match="--enable-mis: its absence"):
        kernel.extend(*[None] * 5, ssm_states=None, cache_indices=None, query_start_loc=None, inplace_update=False)
    with pytest.raises(NotImplementedError, match="SGLANG_ENABLE_PP_SPEC: its absence"):
        kernel.target_verify(*[None] * 7, ssm_states=0, cache_indices=0, query_start_loc=0, stable_rows=True)
