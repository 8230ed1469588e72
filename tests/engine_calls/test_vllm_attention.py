"""fi's plugin for vLLM attends over latent caches, and normalizes and rotates q and k, as the references do."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_calls import fake_vllm
from engine_calls import fake_vllm_models as models
from engine_calls.fake_vllm import PLUGIN, recorded
from families.harness import assert_close, rand
from families.test_mla import batch as latent_batch
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.target import Target


def module(name: str) -> Any:
    return importlib.import_module(f"{PLUGIN}.{name}")


QWEN3 = {"qwen3": "Qwen3Attention", "qwen3_moe": "Qwen3MoeAttention"}


def qwen3(path: str, device: str, head_size: int = 64, eps: Sequence[float] = (1e-5, 1e-5), **changed: Any) -> Any:
    """An attention layer of 4 and 2 heads, whose own forward is that of its base class."""
    rotary = fake_vllm.ROTARY["RotaryEmbedding"](head_size, head_size, 100, 1e4, True, torch.bfloat16)
    rotary.cos_sin_cache = rotary.cos_sin_cache.to(device)
    weights = [rand(head_size, dtype=torch.bfloat16, device=device, seed=i) for i in range(2)]
    layer = getattr(sys.modules[f"vllm.model_executor.models.{path}"], QWEN3[path])(rotary, (4, 2), weights, list(eps))
    for name, value in changed.items():
        setattr(rotary, name, value)
    return layer


@pytest.mark.parametrize("path", QWEN3)
def test_norms_and_rotation_in_one_pass(
    plugin: Any, path: str, device: str, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    assert tuple(recorded(version)[f"{QWEN3[path]}.forward()"]) == module("qk_norm").FORWARD
    layer, positions = qwen3(path, device), torch.tensor([3, 99, 0], device=device)
    rows = rand(3, 8 * 64, dtype=torch.bfloat16, device=device)
    want = models.Qwen3Attention.forward(layer, positions, rows.clone())
    monkeypatch.setattr(models.RMSNorm, "forward", None)  # is not called
    assert_close(layer(positions, rows.clone()), want.double(), tolerance=(0.03, 0.03))


UNFIT = {
    "left to the compiler": {"is_enabled": False}, "other head sizes": {"head_size": 96},
    "few rotated channels": {"rotary_dim": 24}, "two eps": {"eps": (1e-5, 1e-6)},
}  # fmt: skip


@pytest.mark.parametrize("changed", UNFIT.values(), ids=UNFIT)
def test_norms_that_stay_vllms(plugin: Any, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = qwen3("qwen3", "cpu", **changed)
    positions, rows = torch.tensor([3, 99, 0]), rand(3, 8 * layer.head_dim, dtype=torch.bfloat16, device="cpu")
    monkeypatch.setattr(module("qk_norm"), "apply_rope_with_cos_sin_cache_inplace", None)
    monkeypatch.setattr(layer.rotary_emb, "forward", lambda positions, q, k: (q, k))
    layer(positions, rows)


def test_a_changed_forward_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    found = fake_vllm.install(version, monkeypatch)
    layer = sys.modules["vllm.model_executor.models.qwen3"].Qwen3Attention
    monkeypatch.setattr(layer, "forward", lambda self, positions, hidden_states: "another")
    with caplog.at_level(logging.INFO, "vllm"):
        found.register()
    assert layer.forward(None, None, None) == "another"
    (said,) = [r.message for r in caplog.records]
    assert said.startswith("fi does not replace vllm.model_executor.models.qwen3.Qwen3Attention.forward: ")


def latent(device: str, kv: str, heads: int, requests: int, prompts: Any = None) -> tuple[Any, Any]:
    """The builder and the layer of a model with latent attention. prompts: the backend of its prefill."""
    mla = module("mla")
    impl = mla.Impl(heads, 576, 192**-0.5, 1, None, None, kv, None, "decoder", None, kv_lora_rank=512)
    layers = SimpleNamespace(static_forward_context={"layer": SimpleNamespace(impl=impl, prefill_backend=prompts)})
    vllm_config = SimpleNamespace(
        compilation_config=layers, cache_config=SimpleNamespace(cache_dtype=kv),
        model_config=SimpleNamespace(dtype=torch.bfloat16), scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )  # fmt: skip
    spec = SimpleNamespace(block_size=16)
    return mla.Builder(spec, ["layer"], vllm_config, torch.device(device)), impl


def decode_step(pages: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, tokens: int) -> Any:
    """A step of requests with so many query tokens each."""
    requests = len(lengths)
    return SimpleNamespace(
        num_reqs=requests, num_actual_tokens=requests * tokens, max_query_len=tokens, max_seq_len=int(lengths.max()),
        query_start_loc=starts, seq_lens=lengths, block_table_tensor=pages, slot_mapping=lengths, causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_latent_attention(plugin: Any, heads: int, tokens: int, kv: str, device: str) -> None:
    """Requests of equal query lengths, of which the last has none and pads a graph."""
    fp8 = torch.float8_e4m3fn if kv == "fp8" else None
    lengths = [70, 5, 33]
    b = latent_batch(lengths, tokens, heads, 16, causal=True, kv_dtype=fp8, device=device)
    builder, impl = latent(device, kv, heads, 4)
    pages = torch.zeros(4, 6, dtype=torch.int32, device=device)
    for row, (_, found, _) in zip(pages, b.requests()):
        row[: len(found)] = found
    lens = torch.tensor([*lengths, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, tokens, 2 * tokens, 3 * tokens, 3 * tokens], dtype=torch.int32, device=device)
    q = torch.cat([b.q, b.q.new_full((tokens, heads, 576), 3.0)])
    metadata = builder.build(0, decode_step(pages, lens, starts, tokens))
    layer = SimpleNamespace(_k_scale_float=0.5)
    parts = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), q[..., 512:]  # as a product by heads leaves it
    merged = impl.forward_mqa(q, b.cache, metadata, layer)
    got, lse = impl.forward_mqa(parts, b.cache, metadata, layer)
    assert lse is None and torch.equal(got, merged[0]) and got.is_contiguous()
    want = b.expected(torch.tensor(0.5) if fp8 else None)
    assert_close(got[: 3 * tokens], want[0], tolerance=(0.03, 0.03))
    assert not got[3 * tokens :].any(), "rows of padding"
    impl.need_to_return_lse_for_decode = True  # context parallel ranks merge by it
    _, lse = impl.forward_mqa(parts, b.cache, metadata, layer)
    assert_close(lse[: 3 * tokens], want[1] * torch.tensor(2.0).log(), tolerance=(0.01, 0.01))


def test_a_latent_decode_step_is_described_as_by_vllm(
    plugin: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one token of each request do without vLLM's slices; all others go its way."""
    builder, _ = latent("cpu", "auto", 16, 4)
    of_vllm: list[Any] = []
    monkeypatch.setattr(models.MLACommonMetadataBuilder, "build", lambda self, prefix, step, fast: of_vllm.append(step))
    lengths = torch.tensor([70, 5, 33, 0], dtype=torch.int32)
    step = decode_step(torch.arange(24, dtype=torch.int32).view(4, 6), lengths, builder.requests, 1)
    for requests in (4, 3):
        step.num_reqs = step.num_actual_tokens = requests
        step.seq_lens, step.block_table_tensor = lengths[:requests], step.block_table_tensor[:requests]
        found = builder.build(0, step)
        counts = found.num_reqs, found.num_actual_tokens, found.num_decodes, found.num_decode_tokens
        assert set(counts) == {requests} and found.num_prefills == 0 and found.prefill is None
        assert [x.tolist() for x in found.decode.indptr] == [[*range(requests + 1)], [*range(0, 6 * requests + 1, 6)]]
        assert found.decode.block_table is step.block_table_tensor and found.decode.seq_lens is step.seq_lens
    assert not of_vllm
    unset = set(recorded(version)["MLACommonMetadata"]) - {field.name for field in fields(models.MLACommonMetadata)}
    assert unset <= {"head_dim", "causal"}, "have values that fit"
    for changed in (
        {"max_query_len": 2}, {"num_actual_tokens": 4}, {"causal": False}, {"seq_lens": lengths},
        {"block_table_tensor": torch.zeros(4, 6)},
    ):  # fmt: skip
        builder.build(0, SimpleNamespace(**{**vars(step), **changed}))
    builder.is_alone = False
    builder.build(0, step)
    assert len(of_vllm) == 6


def test_the_first_latent_layer_of_a_step_plans_it(plugin: Any) -> None:
    """And again if it runs again, as vLLM does to warm up before it captures a graph: each graph has the plan."""
    b = latent_batch([70, 5], 1, 16, 16, causal=True)
    layer, (first, second) = SimpleNamespace(_k_scale_float=1.0), (latent("cpu", "auto", 16, 2)[1] for _ in range(2))
    with Rehearsal(Target("cuda", "90a"), 132, 227 * 1024) as rehearsal:
        builder, _ = latent("cpu", "auto", 16, 2)
        begin = len(rehearsal.calls)
        pages = torch.zeros(2, 6, dtype=torch.int32)
        metadata = builder.build(0, decode_step(pages, b.kv_len, b.qo_indptr, 1))
        for impl in (first, second, first, second):
            impl.forward_mqa(b.q, b.cache, metadata, layer)
    ran = [choice.spec.op.name for choice, _ in rehearsal.calls[begin:]]
    assert ran == 2 * ["mla_plan", "batch_mla", "batch_mla"]


def test_prompts_of_latent_attention(plugin: Any, version: str, device: str) -> None:
    """New tokens of two requests, and a chunk of those before them, which only the second one has."""
    path, _, name = models.PROMPTS[0].rpartition(".")
    heads, news, olds, scale = 4, (5, 33), (0, 40), 192**-0.5
    prompts = getattr(importlib.import_module(path), name)(heads, scale, 512, 128, 64, 128, None)
    starts, before = (torch.tensor([0, x[0], sum(x)], dtype=torch.int32, device=device) for x in (news, olds))
    q, k, old_k = (rand(n, heads, 192, dtype=torch.bfloat16, device=device, seed=i) for i, n in enumerate((38, 38, 40)))
    v, old_v = (rand(n, heads, 256, dtype=torch.bfloat16, device=device, seed=5)[..., 128:] for n in (38, 40))
    chunk = SimpleNamespace(query_start_loc=starts, cu_seq_lens=before, max_query_len=33)
    prompts.prepare_metadata(
        SimpleNamespace(query_start_loc=starts, max_query_len=33, chunked_context=SimpleNamespace(cu_seq_lens=[before]))
    )
    of_chunk: dict[str, Any] = {"chunk_idx": 0} if version == "0.24.0" else {"chunk": chunk}
    taken = inspect.signature(prompts.run_prefill_context_chunk).parameters
    assert {*recorded(version)["MLAPrefillBackend.run_prefill_context_chunk"]} - {"self"} <= {
        x for name in taken for x in (name, f"{name}=")
    }
    new, new_lse = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True, out=None, output_scale=None)
    old, old_lse = prompts.run_prefill_context_chunk(q=q, k=old_k, v=old_v, **of_chunk)
    alone = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=False)
    assert torch.equal(alone, new) and new_lse.shape == old_lse.shape == (heads, 38) and new_lse.is_contiguous()
    for begin, end, causal, keys, values, got, lse in (
        (0, 5, True, k[:5], v[:5], new, new_lse), (5, 38, True, k[5:], v[5:], new, new_lse),
        (5, 38, False, old_k, old_v, old, old_lse),
    ):  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys.double()) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.double())
        assert_close(got[begin:end], want, tolerance=(0.02, 0.02))
        assert_close(lse[:, begin:end], scores.logsumexp(-1), tolerance=(0.01, 0.01))
    with pytest.raises(NotImplementedError, match="output_scale: None is required"):
        prompts.run_prefill_new_tokens(q, k, v, False, output_scale=q)


@pytest.mark.parametrize("name", ["alibi_slopes", "sliding_window", "logits_soft_cap"])
def test_what_no_latent_kernel_does_is_refused(plugin: Any, name: str) -> None:
    values = {"alibi_slopes": [1.0], "sliding_window": 8, "logits_soft_cap": 1.0}
    given = [values[x] if x == name else None for x in ("alibi_slopes", "sliding_window", "logits_soft_cap")]
    with pytest.raises(NotImplementedError, match=f"{name}: None is required"):
        module("mla").Impl(4, 576, 1.0, 1, *given[:2], "auto", given[2], "decoder", None)


@pytest.mark.parametrize("latent", [None, False, True])
def test_the_backend_of_a_model(plugin: Any, latent: bool | None) -> None:
    """CUSTOM is latent attention for models that have it."""
    if latent is not None:
        vars(models.CONFIG).update(model_config=SimpleNamespace(use_mla=latent))
    path, _, name = fake_vllm.AttentionBackendEnum.CUSTOM.get_path().rpartition(".")
    found = getattr(importlib.import_module(path), name)
    assert found is module("mla" if latent else "attention").Backend
    assert found.get_name() == "CUSTOM" and found.get_impl_cls() and found.get_builder_cls()
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = importlib.import_module(path).Other


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_no_latent_kernel_compiles_while_serving(plugin: Any, heads: int, kv: str) -> None:
    """What decode runs for few and many requests, and prompts, was loaded when the engine made its builder."""
    fp8 = torch.float8_e4m3fn if kv == "fp8" else None
    prompts = module("mla_prompts").Prompts(heads, 192**-0.5, 512, 128, 64, 128, None)
    with Rehearsal(Target("cuda", "90a"), 132, 227 * 1024) as rehearsal:
        builder, impl = latent("cpu", kv, heads, 64, prompts)
        at_start = len(rehearsal.calls)
        for requests in (1, 64):
            b = latent_batch([5] * requests, 1, heads, 16, causal=True, kv_dtype=fp8)
            pages, lens = b.kv_indices.view(-1, 1), b.kv_len
            metadata = builder.build(0, decode_step(pages, lens, b.qo_indptr, 1))
            impl.forward_mqa(b.q, b.cache, metadata, SimpleNamespace(_k_scale_float=0.5))
        starts = torch.tensor([0, 5, 40], dtype=torch.int32)
        prompts.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=35))
        k, v = (torch.zeros(40, heads, dim, dtype=torch.bfloat16) for dim in (192, 128))
        for with_lse in (False, True):
            prompts.run_prefill_new_tokens(k, k, v, with_lse)
    specs = [str(choice.spec) for choice, _ in rehearsal.calls]
    assert len(specs) == at_start + 8 and set(specs[at_start:]) <= set(specs[:at_start])
