"""fi's plugin for vLLM computes experts and gated delta nets as the references do."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_calls import fake_vllm
from engine_calls import fake_vllm_models as models
from engine_calls.fake_vllm import PLUGIN, recorded
from families import linear_attention_reference as linear
from families import moe_reference as moe
from families.harness import assert_close, rand
from fi_core.ahead import specs_of_model
from fi_core.quantization import mxfp4_dequantize_host
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.target import Target
from fi_core.tllm_enums import ActivationType

EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 256, 128
Activation = models.MoEActivation


def module(name: str) -> Any:
    return importlib.import_module(f"{PLUGIN}.{name}")


def test_methods_take_what_vllm_passes(plugin: Any, version: str) -> None:
    """Each method that vLLM calls has its parameters; those that it passes by name may stand in any order."""
    mla, gdn, experts = module("mla"), module("gdn"), module("moe")
    ours = {
        "FusedMoEExperts": experts.Experts, "FusedMoEExpertsModular": experts.Experts,
        "GptOssMxfp4MoEMethod": experts.Mxfp4, "UnquantizedFusedMoEMethod": experts.Unquantized,
        "Fp8Config": experts.Fp8, "Mxfp4Config": experts.GptOss, "FlashAttnMLAImpl": mla.Impl,
        "QwenGatedDeltaNetAttention": gdn.Layer,
    }  # fmt: skip
    compared = 0
    for name, wanted in recorded(version).items():
        owner, _, method = name.partition(".")
        own = vars(ours[owner]).get(method) if owner in ours else None
        function = inspect.unwrap(getattr(own, "__func__", getattr(own, "fget", own)))
        if not callable(function) or name in ("FusedMoEExperts.__init__", "QwenGatedDeltaNetAttention.__init__"):
            continue
        got = inspect.signature(function).parameters
        assert [p for p in got if got[p].kind.name.startswith("POS")] == [
            x.rstrip("=") for x in wanted if x[0] != "*"
        ], name
        compared += 1
    assert compared >= 14
    chunks = inspect.signature(gdn.Chunks.forward_fi).parameters
    assert {x.rstrip("=") for x in recorded(version)["ChunkGatedDeltaRule.forward_cuda"]} <= set(chunks)
    build = recorded(version)["MLACommonMetadataBuilder._build_decode"]
    taken = inspect.signature(vars(mla.Builder)["_build_decode"]).parameters
    assert {name for name in taken if name != "others"} <= set(build)
    assert set(models.MODULES[f"{models.MOE}.oracle.fp8"]["Fp8MoeBackend"].__members__) <= set(
        recorded(version)["Fp8MoeBackend"]
    )
    for enum in ("Mxfp4MoeBackend", "UnquantizedMoeBackend"):
        path = f"{models.MOE}.oracle.{'mxfp4' if enum[0] == 'M' else 'unquantized'}"
        assert set(models.MODULES[path][enum].__members__) <= set(recorded(version)[enum])
    assert set(Activation.__members__) <= set(recorded(version)["MoEActivation"])


class Layer(SimpleNamespace):
    """Weights of experts as a checkpoint has them: the gates first, or for gpt-oss gate and linear rows in turn."""

    def _expert_routing_tables(self) -> None:
        return None


def config(activation: Any = Activation.SILU, device: str = "cpu", **changed: Any) -> Any:
    values = {
        "moe_backend": "auto", "activation": activation, "is_lora_enabled": False, "has_bias": False,
        "hidden_dim": HIDDEN, "intermediate_size_per_partition": WIDTH, "num_local_experts": EXPERTS, "device": device,
        "moe_parallel_config": SimpleNamespace(tp_size=1, tp_rank=0),
        "is_act_and_mul": activation is not Activation.RELU2_NO_MUL,
    }  # fmt: skip
    return SimpleNamespace(**values | changed)


def parameters(**values: torch.Tensor) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(value, requires_grad=False) for name, value in values.items()}


def weights(rows: int, columns: int, device: str, seed: int) -> torch.Tensor:
    return rand(EXPERTS, rows, columns, dtype=torch.bfloat16, device=device, seed=seed, scale=columns**-0.5)


def swapped(x: torch.Tensor) -> torch.Tensor:
    """The linear rows first, as the reference wants them."""
    return x.roll(x.shape[1] // 2, 1)


def bf16_layer(device: str, activation: Any, **changed: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    rows = WIDTH if activation is Activation.RELU2_NO_MUL else 2 * WIDTH
    w1, w2 = weights(rows, HIDDEN, device, 1), weights(HIDDEN, WIDTH, device, 2)
    layer = Layer(**parameters(w13_weight=w1, w2_weight=w2), limit=None)
    method = sys.modules[f"{models.MOE}.unquantized_fused_moe_method"].UnquantizedFusedMoEMethod(
        config(activation, device, **changed)
    )
    return method, layer, swapped(w1) if rows > WIDTH else w1, w2


def routed(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rand(tokens, HIDDEN, dtype=torch.bfloat16, device=device), *moe.chosen(tokens, EXPERTS, TOP_K, device)


def apply(method: Any, layer: Any, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, **changed: Any) -> Any:
    """What vLLM's kernel calls."""
    experts, out = method.moe_kernel, torch.empty_like(x)
    shapes = experts.workspace_shapes(len(x), 2 * WIDTH, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, method.moe.activation)
    assert shapes[2] == x.shape
    values = dict.fromkeys(
        ("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
    ) | {
        "output": out, "hidden_states": x, "w1": layer.w13_weight, "w2": layer.w2_weight, "topk_weights": scales,
        "topk_ids": ids, "activation": method.moe.activation, "global_num_experts": EXPERTS,
        "apply_router_weight_on_input": False,
    }  # fmt: skip
    assert experts.apply(**values | changed) is None
    return out


KINDS = {
    Activation.SILU: ActivationType.Swiglu, Activation.GELU: ActivationType.Geglu,
    Activation.GELU_TANH: ActivationType.GegluTanh, Activation.RELU2_NO_MUL: ActivationType.Relu2,
}  # fmt: skip


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_of_16_bits(plugin: Any, activation: Any, tokens: int, device: str) -> None:
    method, layer, w1, w2 = bf16_layer(device, activation)
    method.process_weights_after_loading(layer)
    x, ids, scales = routed(tokens, device)
    want = moe.experts(x, ids, scales, w1, w2, kind=KINDS[activation])
    assert_close(apply(method, layer, x, ids, scales), want, tolerance=(0.02, 0.02))
    ones = torch.ones_like(scales)
    once = apply(method, layer, x, ids, scales, apply_router_weight_on_input=True)
    assert_close(once, moe.experts(x, ids, ones, w1, w2, kind=KINDS[activation]), tolerance=(0.02, 0.02))


def test_a_limit_of_swiglu(plugin: Any, device: str) -> None:
    method, layer, w1, w2 = bf16_layer(device, Activation.SILU)
    layer.limit = 0.25
    method.process_weights_after_loading(layer)
    x, ids, scales = routed(9, device)
    want = moe.experts(x, ids, scales, w1, w2, kind=ActivationType.SwigluBias, limit=0.25)
    assert_close(apply(method, layer, x, ids, scales), want, tolerance=(0.02, 0.02))


def test_experts_of_a_rank(plugin: Any, device: str) -> None:
    """Ranks have the experts 1 and 3, and 0 and 2; what they compute adds up to the layer."""
    x, ids, scales = routed(9, device)
    total, full = torch.zeros(9, HIDDEN, dtype=torch.float64, device=device), None
    for own in ([1, 3], [0, 2]):
        method, layer, w1, w2 = bf16_layer(device, Activation.SILU, num_local_experts=2)
        full = moe.experts(x, ids, scales, w1, w2)
        for name in ("w13_weight", "w2_weight"):
            models.replace_parameter(layer, name, getattr(layer, name).data[own])
        method.process_weights_after_loading(layer)
        places = torch.full((EXPERTS,), -1, dtype=torch.int32, device=device)
        places[own] = torch.arange(2, dtype=torch.int32, device=device)
        total += apply(method, layer, x, ids, scales, expert_map=places).double()
    assert full is not None
    assert_close(total, full, tolerance=(0.02, 0.02))


def fp8_layer(w1: torch.Tensor, s1: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, device: str) -> tuple[Any, Any]:
    values = parameters(w13_weight=w1, w13_weight_scale_inv=s1, w2_weight=w2, w2_weight_scale_inv=s2)
    layer = Layer(**values, moe_config=config(device=device))
    return models.QUANTIZATION["fp8"]([128, 128]).get_quant_method(layer, ""), layer


def fp8_weights(device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return [moe.block_quantized(weights(*shape, device, i)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_experts_in_fp8_blocks(plugin: Any, tokens: int, device: str) -> None:
    (q1, s1, w1), (q2, s2, w2) = fp8_weights(device)
    method, layer = fp8_layer(q1, s1, q2, s2, device)
    method.process_weights_after_loading(layer)
    assert method.moe_kernel.expects_unquantized_inputs
    x, ids, scales = routed(tokens, device)
    want = moe.experts(x, ids, scales, swapped(w1), w2)
    assert moe.error(apply(method, layer, x, ids, scales), want) < 0.06


def test_experts_of_gpt_oss(plugin: Any, device: str) -> None:
    """mxfp4 weights with biases; gate and linear rows alternate."""
    generator = torch.Generator().manual_seed(1)

    def stored(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        w = torch.randint(256, (EXPERTS, rows, columns // 2), generator=generator, dtype=torch.uint8)
        s = torch.randint(119, 124, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
        values = [mxfp4_dequantize_host(a, b.reshape(-1)) for a, b in zip(w, s)]
        return w.to(device), s.to(device), torch.stack(values).double().to(device)

    (w1, s1, v1), (w2, s2, v2) = stored(2 * WIDTH, HIDDEN), stored(HIDDEN, WIDTH)
    b1, b2 = (rand(EXPERTS, n, dtype=torch.bfloat16, device=device, seed=n) for n in (2 * WIDTH, HIDDEN))
    values = parameters(w13_weight=w1, w13_weight_scale=s1, w13_bias=b1, w2_weight=w2, w2_weight_scale=s2, w2_bias=b2)
    layer = Layer(**values, moe_config=config(Activation.SWIGLUOAI, device, has_bias=True))
    method = models.QUANTIZATION["gpt_oss_mxfp4"]().get_quant_method(layer, "")
    assert method.maybe_roundup_sizes(2880, 720, torch.bfloat16, None) == (2880, 768)
    method.process_weights_after_loading(layer)
    x, ids, scales = routed(9, device)
    constants = {n: torch.full((EXPERTS,), v) for n, v in (("alpha", 1.702), ("beta", 1.0), ("limit", 7.0))}

    def ordered(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:, 1::2], rows[:, ::2]], 1)

    want = moe.experts(
        x, ids, scales, ordered(v1), v2, b1=ordered(b1), b2=b2, kind=ActivationType.SwigluBias, constants=constants
    )
    assert_close(apply(method, layer, x, ids, scales), want, tolerance=(0.03, 0.03))


REFUSED = {
    "a backend of the user": ({"moe_backend": "triton"}, "--moe-backend triton is chosen"),
    "LoRA": ({"is_lora_enabled": True}, "kernel does not support LoRA"),
    "biases": ({"has_bias": True}, "biases, which are for mxfp4 weights alone"),
    "sizes": ({"hidden_dim": 250}, "sizes (250, 128) that are no multiples of 8"),
    "gpt-oss in bf16": ({"activation": Activation.SWIGLUOAI}, "which is for mxfp4 weights alone"),
    "an activation": ({"activation": Activation.SWIGLUSTEP}, "kernel does not support activation"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "reason"), REFUSED.values(), ids=REFUSED)
def test_experts_that_stay_vllms(
    plugin: Any, changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why, once."""
    with caplog.at_level(logging.INFO, "vllm"):
        for _ in range(2):
            method = bf16_layer("cpu", **{"activation": Activation.SILU, **changed})[0]
            assert method.unquantized_backend == "TRITON"
            assert method.experts_cls is models.FusedMoEExpertsModular
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("vLLM's own kernels compute the experts: ") and reason in said


def test_other_quantization_stays_vllms(plugin: Any) -> None:
    layer = SimpleNamespace(moe_config=config())
    for blocks in (None, [64, 128]):
        assert models.QUANTIZATION["fp8"](blocks).get_quant_method(layer, "").fp8_backend == "TRITON"
    layer = SimpleNamespace(moe_config=config(hidden_dim=192))
    assert models.QUANTIZATION["fp8"]([128, 128]).get_quant_method(layer, "").fp8_backend == "TRITON"
    chosen = SimpleNamespace(moe_config=config(Activation.SWIGLUOAI, has_bias=True, moe_backend="marlin"))
    method = models.QUANTIZATION["gpt_oss_mxfp4"]().get_quant_method(chosen, "")
    assert type(method) is models.GptOssMxfp4MoEMethod


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("into", [False, True])
def test_chunks_of_a_gated_delta_net(plugin: Any, dtype: torch.dtype, into: bool, device: str) -> None:
    rule = sys.modules[f"{models.LAYERS}.mamba.gdn.qwen_gdn_linear_attn"].ChunkGatedDeltaRule()
    lengths, heads, dim = (70, 3), 4, 64
    tokens = sum(lengths)
    q, k = (rand(1, tokens, 2, dim, dtype=torch.bfloat16, device=device, seed=i) for i in range(2))
    v = rand(1, tokens, heads, dim, dtype=torch.bfloat16, device=device, seed=2)
    g, beta = (rand(1, tokens, heads, dtype=torch.float32, device=device, seed=i) for i in (3, 4))
    g, beta = -g.abs(), beta.sigmoid()
    states = rand(2, heads, dim, dim, dtype=dtype, device=device)
    starts = torch.tensor([0, 70, 73], dtype=torch.int32, device=device)
    out = torch.full((tokens + 2, heads, dim), 7.0, dtype=torch.bfloat16, device=device)
    got, final = rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=states, output_final_state=True, cu_seqlens=starts,
        chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=out if into else None,
    )  # fmt: skip
    assert got.shape == (1, tokens, heads, dim)
    if into:
        assert got.data_ptr() == out.data_ptr() and bool((out[tokens:] == 7).all())
    for i, rows in enumerate((slice(0, 70), slice(70, 73))):
        want, after = linear.gated_delta_rule(
            q[0, rows], k[0, rows], v[0, rows], g[0, rows].exp(), beta[0, rows], states[i], dim**-0.5, True, 1 << 20
        )
        assert_close(got[0, rows], want, tolerance=(0.02, 0.02))
        assert_close(final[i], after[-1], tolerance=(0.02, 0.02))


def test_a_named_prefill_backend_stays(plugin: Any) -> None:
    vars(models.CONFIG).update(additional_config={"gdn_prefill_backend": "triton"})
    assert sys.modules[f"{models.LAYERS}.mamba.gdn.qwen_gdn_linear_attn"].ChunkGatedDeltaRule()() == "vLLM's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_of_a_gated_delta_net(plugin: Any, dtype: torch.dtype, device: str) -> None:
    """Tokens of five requests; the last row pads a graph."""
    layer = sys.modules[f"{models.LAYERS}.mamba.gdn.qwen_gdn_linear_attn"].QwenGatedDeltaNetAttention((2, 4), (64, 64))
    slots = torch.tensor([3, 1, 6, 2, 5, 0], dtype=torch.int32, device=device)
    channels = (2 + 2 + 4) * 64
    states = rand(8, 4, 64, 64, dtype=dtype, device=device)
    layer.kv_cache = torch.zeros(8, 3, channels, device=device), states.clone()
    layer.A_log, layer.dt_bias = (rand(4, dtype=torch.float32, device=device, seed=i) for i in range(2))
    mixed = rand(7, channels, dtype=torch.bfloat16, device=device)
    a, b = (rand(7, 8, dtype=torch.bfloat16, device=device, seed=i)[:, :4] for i in (2, 3))
    out = torch.full((7, 4, 64), 7.0, dtype=torch.bfloat16, device=device)
    metadata = SimpleNamespace(num_actual_tokens=6, non_spec_state_indices_tensor=slots)
    layer.decode(mixed_qkv=mixed, b=b, a=a, core_attn_out=out, attn_metadata=metadata)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in (2 * mixed).split((128, 128, 256), 1))
    alpha, beta = linear.gates(a, b, layer.A_log, layer.dt_bias)
    for i, slot in enumerate(slots[:5].tolist()):
        rows = slice(i, i + 1)
        want, after = linear.gated_delta_rule(
            q[rows], k[rows], v[rows], alpha[rows], beta[rows], states[slot], 0.125, True
        )
        assert_close(out[rows], want, tolerance=(0.02, 0.02))
        assert_close(layer.kv_cache[1][slot], after[-1], tolerance=(0.02, 0.02))
    assert bool(out[:6].isfinite().all()) and bool((out[6] == 7).all())
    assert bool((layer.kv_cache[1][[4, 7]] == states[[4, 7]]).all()), "slots of no request"


SAMPLERS = ("vllm.v1.sample.ops.topk_topp_sampler", "vllm.v1.worker.gpu.sample.sampler")


@pytest.mark.parametrize("path", SAMPLERS)
def test_sampling(plugin: Any, path: str, version: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of both of vLLM's samplers are within k and p; what is left out does not filter."""
    sampler, seams = sys.modules[path], recorded(version)
    for name, wanted in module("sampler").PARAMETERS.items():
        assert tuple(x.rstrip("=") for x in seams[name]) == wanted
        assert tuple(inspect.signature(getattr(sampler, name)).parameters) == wanted
    logits = rand(400, 50, dtype=torch.float32, device=device)
    rank = logits.argsort(1, descending=True).argsort(1)
    k = torch.tensor([1, 3] * 200, dtype=torch.int32, device=device)
    p = torch.tensor([1.0, 1e-6] * 200, device=device)
    cases = {"k": (k, None), "p": (None, p), "both": (k, p)}
    drawn = {
        name: rank.gather(1, sampler.flashinfer_sample(logits, *x).long()[:, None])[:, 0] for name, x in cases.items()
    }
    assert not drawn["k"][::2].any() and set(drawn["k"][1::2].tolist()) == {0, 1, 2}
    assert len(drawn["p"][::2].unique()) > 10 and not drawn["p"][1::2].any()
    assert not drawn["both"].any()
    assert sampler.flashinfer_sampler_supported()
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_USE_FLASHINFER_SAMPLER", False)
    assert not sampler.flashinfer_sampler_supported()


def test_a_changed_sampler_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    found = fake_vllm.install(version, monkeypatch)
    monkeypatch.setattr(sys.modules[SAMPLERS[0]], "flashinfer_sample", lambda logits, k: "another")
    with caplog.at_level(logging.INFO, "vllm"):
        found.register()
    assert sys.modules[SAMPLERS[0]].flashinfer_sample(None, None) == "another"
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"fi does not replace {SAMPLERS[0]}.flashinfer_sample: ")


OF_MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": HIDDEN}


def of_engine(**changed: Any) -> Any:
    """A configuration of vLLM."""
    values = {
        "model_config": SimpleNamespace(dtype=torch.bfloat16), "speculative_config": None, "lora_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto", block_size=16),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
    }  # fmt: skip
    return SimpleNamespace(**values | changed)


def test_how_an_engine_serves(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = module("prepare").options
    assert options(of_engine()) == {
        "dtype": torch.bfloat16, "kv_dtype": None, "page_size": 16, "tp": 1, "spec_tokens": 0, "lora": False,
        "products": True,
    }  # fmt: skip
    changed = of_engine(
        cache_config=SimpleNamespace(cache_dtype="fp8_e5m2", block_size=64), lora_config=object(),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )  # fmt: skip
    assert options(changed) == {
        "dtype": torch.bfloat16, "kv_dtype": "float8_e5m2", "page_size": 64, "tp": 2, "spec_tokens": 3, "lora": True,
        "products": True,
    }  # fmt: skip
    monkeypatch.setenv("FI_VLLM_LAYERS", "0")
    assert not options(changed)["products"], "layers stay the engine's"


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_no_kernel_of_experts_compiles_while_serving(plugin: Any, kind: str) -> None:
    """All that a layer runs for any number of tokens is among what begins to compile with its first layer."""
    target = Target("cuda", "90a")
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]} if kind == "fp8" else None
    described = OF_MODEL | {"num_experts": EXPERTS, "quantization_config": quantized}
    prepared = {str(spec) for spec in specs_of_model(described, target, **module("prepare").options(of_engine()))}
    if kind == "fp8":
        (w1, s1, _), (w2, s2, _) = fp8_weights("cpu")
        method, layer = fp8_layer(w1, s1, w2, s2, "cpu")
    else:
        method, layer, *_ = bf16_layer("cpu", Activation.SILU)
    method.process_weights_after_loading(layer)
    for tokens in (1, 2, 5, 20, 64, 200, 1000):
        with Rehearsal(target, 132, 227 * 1024) as rehearsal:
            apply(method, layer, *routed(tokens, "cpu"))
        ran = {str(choice.spec) for choice, _ in rehearsal.calls if choice.spec.op.name != "moe_layer"}
        assert ran and ran <= prepared, tokens  # moe_layer is no kernel: it chooses those of the layer


def test_no_kernel_of_a_gated_delta_net_compiles_while_serving(plugin: Any) -> None:
    target, gdn = Target("cuda", "90a"), sys.modules[f"{models.LAYERS}.mamba.gdn.qwen_gdn_linear_attn"]
    described = OF_MODEL | {"linear_num_key_heads": 2, "linear_key_head_dim": 128}
    prepared = {str(spec) for spec in specs_of_model(described, target, **module("prepare").options(of_engine()))}
    q, k, v = (rand(1, 70, 2, 128, dtype=torch.bfloat16, device="cpu", seed=i) for i in range(3))
    gates, starts = torch.ones(1, 70, 2), torch.tensor([0, 70], dtype=torch.int32)
    layer = gdn.QwenGatedDeltaNetAttention((2, 2), (128, 128))
    layer.A_log, layer.dt_bias = torch.zeros(2), torch.zeros(2)
    mixed, a = rand(3, 6 * 128, dtype=torch.bfloat16, device="cpu"), torch.zeros(3, 2, dtype=torch.bfloat16)
    slots = SimpleNamespace(num_actual_tokens=3, non_spec_state_indices_tensor=torch.arange(3, dtype=torch.int32))
    for dtype in (torch.bfloat16, torch.float32):
        states = torch.zeros(4, 2, 128, 128, dtype=dtype)
        layer.kv_cache = torch.zeros(4, 3, 6 * 128), states
        with Rehearsal(target, 132, 227 * 1024) as rehearsal:
            gdn.ChunkGatedDeltaRule()(q, k, v, gates, gates, states[:1], True, starts)
            layer.decode(
                mixed_qkv=mixed, b=a, a=a, core_attn_out=torch.zeros(3, 2, 128).bfloat16(), attn_metadata=slots
            )
        ran = {str(choice.spec) for choice, _ in rehearsal.calls}
        assert len(ran) == 2 and ran <= prepared, dtype
