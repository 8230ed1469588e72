"""fi's norms, activation and rotary embeddings in vLLM compute as vLLM's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from engine_calls import fake_vllm
from engine_calls.fake_vllm import PLUGIN, recorded
from engine_calls.fake_vllm_models import ACTIVATED, MONITORS
from families.harness import assert_close, rand
from fi_core import ahead


@pytest.fixture
def layers(version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The layers of a vLLM of the version, after registration with FI_VLLM_LAYERS=1."""
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    plugin = fake_vllm.install(version, monkeypatch)
    plugin.register()
    plugin.register()
    return sys.modules[f"{PLUGIN}.layers"]


def test_layers_are_replaced_on_request_only(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FI_VLLM_LAYERS", raising=False)
    fake_vllm.install(version, monkeypatch).register()
    assert not fake_vllm.CustomOp.replaced
    assert list(sys.modules["vllm.ir"].ops.rms_norm.impls) == ["native"]


def test_late_compiles_are_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of vLLM's warm-up on, whose own monitor still begins."""
    told: list[bool] = []
    monkeypatch.setattr(ahead, "serving", lambda: told.append(True))
    fake_vllm.install(version, monkeypatch).register()
    monitor = next(sys.modules[name] for name in MONITORS if hasattr(sys.modules.get(name), "activate"))
    options = {name.lstrip("*").rstrip("="): "error" for name in recorded(version)["activate"]}
    assert not told
    monitor.activate(**options)  # type: ignore[attr-defined]
    assert told == [True] and ACTIVATED.pop() == options


def test_norms(layers: Any, version: str, device: str) -> None:
    """As the engine calls them: rows of a projection that holds q, k and v, heads of them, and in place."""
    ops = sys.modules["vllm.ir"].ops
    own, add = ops.rms_norm.impls["fi"], ops.fused_add_rms_norm.impls["fi"]
    for seam, impl in (("rms_norm", own), ("fused_add_rms_norm", add)):
        assert fake_vllm.parameters(impl.impl_fn) == recorded(version)[seam]
    rows = rand(5, 4 * 64 + 128, dtype=torch.bfloat16, device=device)
    heads, weight = rows[:, : 4 * 64].unflatten(1, (4, 64)), rand(64, dtype=torch.bfloat16, device=device)
    for x, w in ((heads, weight), (rows, rand(384, dtype=torch.bfloat16, device=device))):
        assert own.supports_args(x, w, 1e-6)
        assert_close(own.impl_fn(x, w, 1e-6), ops.rms_norm.native(x.double(), w.double(), 1e-6))
    x, residual, w = (rand(5, 64, dtype=torch.bfloat16, device=device, seed=i) for i in range(3))
    want = ops.fused_add_rms_norm.native(x.double(), residual.double(), w[0].double(), 1e-6)
    assert add.inplace and add.supports_args(x, residual, w[0], 1e-6)
    got = add.impl_fn(x, residual, w[0], 1e-6)
    assert got[0] is x and got[1] is residual
    for have, wanted in zip(got, want):
        assert_close(have, wanted)
    assert not own.supports_args(rows, None, 1e-6), "without a weight"
    assert not own.supports_args(heads, weight.float(), 1e-6), "a weight of another dtype"
    assert not own.supports_args(heads, weight, 1e-6, 32), "a part of the channels"


def test_layers_that_vllm_makes(layers: Any, version: str, device: str) -> None:
    activation = sys.modules["vllm.model_executor.layers.activation"].SiluAndMul()
    x = rand(5, 128, dtype=torch.bfloat16, device=device)
    assert activation.name == "silu_and_mul"
    assert_close(activation.forward_cuda(x), fake_vllm.SiluAndMul.forward_cuda(activation, x.double()))
    assert fake_vllm.parameters(type(activation).forward_cuda) == recorded(version)["SiluAndMul.forward_cuda"]


@pytest.mark.parametrize("shape", [(5, 128), (5, 3, 64)])
@pytest.mark.parametrize("changed", [None, "weight", "strides"])
def test_norms_of_gemma(layers: Any, version: str, shape: tuple[int, ...], changed: str | None, device: str) -> None:
    """By fi's kernels, in place with a residual; what they do not take stays vLLM's."""
    norm = sys.modules["vllm.model_executor.layers.layernorm"].GemmaRMSNorm(shape[-1], 1e-5)
    assert fake_vllm.parameters(type(norm).forward_cuda) == recorded(version)["GemmaRMSNorm.forward_cuda"]
    dtype = torch.float32 if changed == "weight" else torch.bfloat16
    norm.weight = rand(shape[-1], dtype=dtype, device=device, seed=3)
    x, residual = (rand(*shape[:-1], 2 * shape[-1], dtype=torch.bfloat16, device=device, seed=i) for i in range(2))
    x, residual = (t[..., ::2] if changed == "strides" else t[..., : shape[-1]] for t in (x, residual))
    own = fake_vllm.GemmaRMSNorm.forward_cuda
    alone, (want, total) = own(norm, x.double()), own(norm, x.double(), residual.double())
    assert_close(norm.forward_cuda(x), alone)
    got, sums = norm.forward_cuda(x, residual)
    assert_close(got, want)
    assert_close(sums, total)
    assert (got is x and sums is residual) is (changed is None and len(shape) == 2)


@pytest.mark.parametrize("name", fake_vllm.ROTARY)
@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embeddings(layers: Any, version: str, name: str, neox: bool, device: str) -> None:
    """In place; a part of the channels; a layer that shares the keys of another passes none."""
    layer = fake_vllm.ROTARY[name](64, 32, 100, 1e4, neox, torch.bfloat16)
    layer.cos_sin_cache = layer.cos_sin_cache.to(device)
    assert layer.name == "rotary_embedding" and layer.cos_sin_cache.dtype == torch.float32
    positions = torch.tensor([3, 99, 0, 7], device=device)
    q, k = (rand(4, n * 64, dtype=torch.bfloat16, device=device, seed=n) for n in (4, 2))
    alone, want = q.clone(), fake_vllm.RotaryEmbedding.forward_cuda(layer, positions, q.double(), k.double())
    assert layer.forward_cuda(positions, q, k) == (q, k)
    assert_close(q, want[0])
    assert_close(k, want[1])
    assert layer.forward_cuda(positions, alone) == (alone, None)
    assert_close(alone, want[0])
    assert fake_vllm.parameters(type(layer).forward_cuda) == recorded(version)["RotaryEmbedding.forward_cuda"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_rotary_embedding_of_deepseek(
    layers: Any, version: str, enabled: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place in parts of wider rows; the table is in fp32 only where fi computes."""
    monkeypatch.setattr(fake_vllm.CustomOp, "enabled", classmethod(lambda cls: enabled))
    layer = fake_vllm.DeepseekScalingRotaryEmbedding(64, 64, 100, 1e4, False, torch.bfloat16)
    assert layer.cos_sin_cache.dtype == (torch.float32 if enabled else torch.bfloat16)
    assert fake_vllm.parameters(type(layer).forward_cuda) == recorded(version)[f"{type(layer).__name__}.forward_cuda"]
    if not enabled:
        return
    layer.cos_sin_cache = layer.cos_sin_cache.to(device)
    positions, offsets = torch.tensor([[3, 99, 0], [0, 0, 70]], device=device)
    rows, latent = (rand(3, n, 192, dtype=torch.bfloat16, device=device, seed=n) for n in (4, 1))
    q, k = rows[..., 128:], latent[..., 128:]
    want = fake_vllm.RotaryEmbedding.forward_cuda(layer, positions + offsets, q.double(), k.double())
    others = rows[..., :128].clone()
    assert layer.forward_cuda(positions, q, k, offsets) == (q, k)
    for got, wanted in zip((q, k), want):
        assert_close(got, wanted)
    assert torch.equal(rows[..., :128], others)


UTILS = "vllm.model_executor.layers.utils"


@pytest.mark.parametrize("tokens", [1, 64, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_products(layers: Any, version: str, tokens: int, biased: bool, device: str) -> None:
    """Few tokens and many, alone and in a compiled graph, which is compiled once for any number of tokens."""
    linear = sys.modules[f"{PLUGIN}.linear"]
    multiply = sys.modules[UTILS].default_unquantized_gemm  # type: ignore[attr-defined]
    seam = [x.rstrip("=") for x in recorded(version)["default_unquantized_gemm"]]
    assert (
        multiply is linear.product and fake_vllm.parameters(multiply) == recorded(version)["default_unquantized_gemm"]
    )
    assert tuple(seam) == linear.PARAMETERS
    weight = rand(4096, 1024, dtype=torch.bfloat16, device=device) / 32
    bias = rand(4096, dtype=torch.bfloat16, device=device, seed=2) if biased else None
    x = rand(tokens, 2048, dtype=torch.bfloat16, device=device, seed=1)[:, :1024]
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert linear.fits(x, weight)
    for found in (multiply(None, x, weight, bias), torch.ops.fi_vllm.product(x, weight, bias)):
        assert found.shape == want.shape and found.dtype == torch.bfloat16
        assert_close(found, want)


def test_products_are_traced_for_any_number_of_tokens(layers: Any) -> None:
    multiply, weight = sys.modules[UTILS].default_unquantized_gemm, torch.ones(4096, 1024).bfloat16()  # type: ignore[attr-defined]
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: multiply(None, x, weight) + 1, backend=keep, fullgraph=True, dynamic=True)
    for tokens in (65, 3, 200):
        assert bool((compiled(torch.ones(tokens, 1024).bfloat16()) == 1024 + 1).all())
    assert len(graphs) == 1


def test_products_that_stay(layers: Any, device: str) -> None:
    """Small matrices, other dtypes and shapes."""
    fits = sys.modules[f"{PLUGIN}.linear"].fits  # type: ignore[attr-defined]
    x, weight = torch.ones(2, 1024, device=device).bfloat16(), torch.ones(4096, 1024, device=device).bfloat16()
    assert fits(x, weight)
    assert not fits(x, weight[:4095]), "a small matrix"
    assert not fits(x[:, :512], weight[:, :512].repeat(4, 1)), "a short k"
    assert not fits(x.half(), weight.half()) and not fits(x, weight.float())
    assert not fits(x[None], weight)


@pytest.mark.parametrize("change", ["parameters", "device"])
def test_products_of_another_vllm_or_gpu_stay(
    version: str, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    plugin = fake_vllm.install(version, monkeypatch)
    plugin.register()
    linear, utils = sys.modules[f"{PLUGIN}.linear"], sys.modules[UTILS]
    own = (lambda x, weight: x) if change == "parameters" else (lambda layer, x, weight, bias=None: x)
    monkeypatch.setattr(utils, "default_unquantized_gemm", own)
    if change == "device":
        platform = linear.current_platform
        monkeypatch.setattr(platform, "is_device_capability", lambda major: major == 80)
    with caplog.at_level("INFO", "vllm"):
        linear.register()
    assert utils.default_unquantized_gemm is own  # type: ignore[attr-defined]
    assert any("default_unquantized_gemm" in x.message for x in caplog.records) is (change == "parameters")
