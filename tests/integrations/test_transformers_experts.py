"""transformers' experts on fi's kernels: no farther from fp32 than transformers' own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations import moe

import fi_core.integrations.transformers as fi

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 3, "initializer_range": 0.1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {}, "Qwen3Moe": {"norm_topk_prob": True}, "GptOss": {"sliding_window": 16},
    "Olmoe": {"hidden_act": "gelu"}, "Qwen2Moe": {"hidden_act": "gelu_pytorch_tanh"},
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(family: str, device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES.get(family, {}) | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("_bias"):
            weight.data.normal_(0, 0.1)
    return model.to(device, torch.bfloat16)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_those_of_transformers(family: str, device: str) -> None:
    fi.register_experts()
    model = model_of(family, device)
    layers = [x for x in model.modules() if hasattr(x, "gate_up_proj") and hasattr(x, "is_transposed")]
    generator = torch.Generator().manual_seed(2)
    for layer, tokens in zip(layers, (1, 67)):
        x = torch.randn(tokens, 128, generator=generator).to(device, torch.bfloat16)
        scores, ids = torch.rand(tokens, 8, generator=generator).to(device).topk(3)
        results = {}
        for name in ("eager", "fi"):
            model.set_experts_implementation(name)
            results[name] = layer(x, ids, scores.to(torch.bfloat16)).float()
        wide = {name: p.data for name, p in layer.named_parameters()}
        for p in layer.parameters():
            p.data = p.data.float()
        model.set_experts_implementation("eager")
        want = layer(x.float(), ids, scores.to(torch.bfloat16).float())
        for name, p in layer.named_parameters():
            p.data = wide[name]
        error, own = ((results[name] - want).norm() / want.norm() for name in ("fi", "eager"))
        assert error <= 1.1 * own + 1e-4, f"{tokens} tokens: {error:.1e}, transformers {own:.1e}"


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_logits_of_a_model(family: str, device: str) -> None:
    """Attention is fi's too."""
    fi.register()
    fi.register_experts()
    model, ids = model_of(family, device), torch.randint(1, 256, (2, 40), generator=torch.Generator().manual_seed(3))
    logits = {}
    for name in ("fi", "eager"):
        model.set_experts_implementation(name)
        model.set_attn_implementation(name)
        logits[name] = model(ids.to(device)).logits.float()
    exact = model.float()
    exact.set_experts_implementation("eager")
    exact.set_attn_implementation("eager")
    want = exact(ids.to(device)).logits
    # Of the median token: rounding sends some tokens to other experts.
    error, own = ((logits[name] - want).norm(dim=-1).median() / want.norm(dim=-1).median() for name in logits)
    assert error <= 1.25 * own + 1e-3, f"{error:.1e}, transformers {own:.1e}"


@torch.no_grad()
def test_weights_that_change_are_read_again() -> None:
    fi.register_experts()
    model = model_of("Mixtral")
    layer = model.model.layers[0].mlp.experts
    x, ids, scores = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    model.set_experts_implementation("fi")
    before = layer(x, ids, scores)
    layer.down_proj *= 2
    torch.testing.assert_close(layer(x, ids, scores).float(), 2 * before.float(), rtol=0.02, atol=0.02)
    assert not layer(x, torch.full_like(ids, 8), scores).any(), "experts of other ranks add nothing"


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fi.register_experts()
    layer = model_of("Mixtral").model.layers[0].mlp.experts
    given = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    monkeypatch.setattr(layer, "act_fn", torch.nn.Tanh())
    with torch.inference_mode(), pytest.raises(ValueError, match="MixtralExperts has another activation"):
        fi.experts(layer, *given)
    layer.has_gate = False
    with torch.inference_mode(), pytest.raises(ValueError, match="has no gates"):
        fi.experts(layer, *given)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.2.0")  # not always what was imported first
    with pytest.raises(ImportError, match=r"transformers 5\.17 or newer is required; got 5\.2\.0"):
        fi.register_experts()
    assert "fi" in moe.ALL_EXPERTS_FUNCTIONS
