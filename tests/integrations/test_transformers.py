"""transformers on fi's kernels: the tokens and logits of eager attention, for each family of models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fi_core
import fi_core.integrations.transformers as fi
from fi_core.integrations.plans import attend, attend_ragged

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from transformers_models import FAMILIES, small

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT, NEW = 40, 16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(name: str, device: str, **shape: Any) -> Any:
    fi.register()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return small(name, device, dtype, num_hidden_layers=2, hidden_size=128, intermediate_size=192, **shape)


def prompts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts; the second begins with padding."""
    ids = torch.randint(1, 256, (3, PROMPT), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return ids.to(device), mask.to(device)


@torch.inference_mode()
def logits(model: Any, way: str, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    model.set_attn_implementation(way)
    return model(ids, attention_mask=mask, **options).logits.float()


@torch.inference_mode()
def tokens(model: Any, way: str | None, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    if way:
        model.set_attn_implementation(way)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)  # type: ignore[no-any-return]


def assert_close(got: torch.Tensor, want: torch.Tensor, device: str, seen: torch.Tensor) -> None:
    """At all tokens that are no padding."""
    tolerance = (1e-4 if device == "cpu" else 0.06) * float(want.abs().max())
    assert float(((got - want).abs() * seen[..., None]).max()) <= tolerance


@pytest.mark.parametrize("qo_len", [1, 5])
def test_the_switch_of_batch_invariance_plans_again(qo_len: int, device: str) -> None:
    """A batch of the same shape, before, inside and after a block."""
    q = torch.randn(2, 4, qo_len, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(2, 2, 300, 64, device=device, dtype=torch.bfloat16)

    def attention() -> torch.Tensor:
        return attend(q, k, k, None, True, 0.125, -1, 0.0, None)

    before = attention()
    with fi_core.batch_invariant():
        torch.testing.assert_close(attention(), before, rtol=2**-7, atol=2**-8)  # weights round to bf16
    assert torch.equal(attention(), before)


def test_packed_requests_of_other_keys_are_planned_again(device: str) -> None:
    """The same rows over keys that are cut elsewhere."""
    q, k = (torch.randn(1, heads, n, 64, device=device, dtype=torch.bfloat16) for heads, n in ((4, 2), (2, 90)))
    rows, first, second = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [0, 30, 90], [0, 60, 90])
    )

    def attention(kv_indptr: torch.Tensor) -> torch.Tensor:
        return attend_ragged(q, k, k, rows, kv_indptr, True, 0.125, -1, 0.0, None)

    before = attention(first)
    assert not torch.equal(attention(second), before)
    assert torch.equal(attention(first), before)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_tokens_of_eager(name: str, device: str) -> None:
    """Alone and in a padded batch; windows are shorter than the prompt. bfloat16 may round tokens apart."""
    model, (ids, mask) = model_of(name, device), prompts(device)
    for rows in (slice(0, 1), slice(0, 3)):
        some = ids[rows], mask[rows]
        assert_close(logits(model, "fi", *some), logits(model, "eager", *some), device, some[1])
        got, want = tokens(model, "fi", *some), tokens(model, "eager", *some)
        assert got.shape == want.shape
        if device == "cpu":
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", FAMILIES)
def test_replaced_parts_change_no_token(name: str, device: str) -> None:
    model, (ids, mask) = model_of(name, device), prompts(device)
    eager, want = logits(model, "eager", ids, mask), tokens(model, "eager", ids, mask)
    counts = fi.replace(model)
    rotary, mlps = (0, 0) if name == "gpt-oss" else (1, 2)  # experts, and angles of another shape
    assert (counts["norms"] >= 5, counts["rotary"], counts["mlps"]) == (True, rotary, mlps)
    assert_close(logits(model, "fi", ids, mask), eager, device, mask)
    if device == "cpu":
        assert torch.equal(tokens(model, None, ids, mask), want)


PARTIAL: dict[str, dict[str, Any]] = {  # the share of a head's channels that rotates, and sizes
    "GPTNeoX": {"rotary_pct": 0.25},
    "Glm4Moe": {"partial_rotary_factor": 0.5, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "Nemotron": {"partial_rotary_factor": 0.5},
    "Qwen3Next": {"partial_rotary_factor": 0.25, "num_experts": 4, "num_experts_per_tok": 2},
    "Qwen3_5": {"partial_rotary_factor": 0.25},
    "Glm4": {"partial_rotary_factor": 0.5},  # neighbouring channels form a pair
}


@pytest.mark.parametrize("family", PARTIAL)
def test_replaced_parts_with_partial_rotary(family: str, device: str) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 64,
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "initializer_range": 0.08, "shared_expert_intermediate_size": 64, "pad_token_id": 0, **PARTIAL[family],
    }  # fmt: skip
    kind = "TextConfig" if family == "Qwen3_5" else "Config"
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}{kind}")(**shape)).eval()
    model = model.to(device)  # float32: in 16 bits rounding sends a token to another expert
    ids, mask = prompts(device)
    want = logits(model, "eager", ids, mask)
    rotary = fi.replace(model)["rotary"]
    assert rotary == (family != "Glm4") or (rotary, family, device) == (0, "Qwen3_5", "cuda")  # left as it is there
    assert_close(logits(model, "eager", ids, mask), want, device, mask)


def test_replaced_norms_with_a_gate_or_a_residual_in_float32(device: str) -> None:
    """Norms of Mamba-2 in 16 bits, which fi's kernel does not compute, stay right."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "state_size": 16}
    config = transformers.Mamba2Config(**sizes, n_groups=1, expand=2, residual_in_fp32=True, pad_token_id=0)
    model = transformers.Mamba2ForCausalLM(config).eval().to(device, torch.bfloat16)
    ids = prompts(device)[0]
    with torch.inference_mode():
        want = model(ids).logits
        assert fi.replace(model)["norms"] >= 3
        got = model(ids).logits
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_masks_of_other_kinds(name: str, device: str) -> None:
    """Padding on the right and in the middle, packed sequences, a static cache, bits."""
    model, (ids, mask) = model_of(name, device), prompts(device)
    for change in (slice(30, None), slice(10, 14)):
        padded = torch.ones_like(mask)
        padded[2, change] = 0
        assert_close(logits(model, "fi", ids, padded), logits(model, "eager", ids, padded), device, padded)
    packed = torch.cat([torch.arange(15), torch.arange(PROMPT - 15)])[None].to(device)
    one = ids[:1], torch.ones_like(mask[:1])
    with torch.inference_mode():
        found = []
        for way in ("fi", "eager"):
            model.set_attn_implementation(way)
            found.append(model(one[0], position_ids=packed).logits.float())
    assert_close(*found, device, one[1])
    if device == "cpu":
        options = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(tokens(model, "fi", ids, mask, **options), tokens(model, "eager", ids, mask, **options))


def test_continuous_batching(device: str) -> None:
    """generate_batch: packed requests, whose prompts and generated tokens share a step."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = model_of("mistral", device)
    ids = prompts("cpu")[0]
    lists = [ids[0].tolist(), ids[1, :5].tolist(), ids[2, :20].tolist()]
    want = [tokens(model, "eager", torch.tensor([own], device=device), None)[0, len(own) :].tolist() for own in lists]  # type: ignore[arg-type]
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        with pytest.raises(ImportError, match=r"transformers 5\.23 or newer"):
            fi.use_in_continuous_batching(model)
        return
    fi.use_in_continuous_batching(model)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(block_size=16, num_blocks=32, max_batch_tokens=64, use_cuda_graph=False)
    found = model.generate_batch(
        lists, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    got = [found[key].generated_tokens for key in sorted(found, key=lambda name: int(name.split("_")[-1]))]
    assert [len(own) for own in got] == [NEW] * 3
    if device == "cpu":
        assert got == want


def test_what_is_refused() -> None:
    model, (ids, mask) = model_of("mistral", "cpu"), prompts("cpu")
    model.set_attn_implementation("fi")
    with pytest.raises(NotImplementedError, match="no backward"):
        model(ids, attention_mask=mask)
    layer, x = model.model.layers[0].self_attn, torch.zeros(1, 2, 3, 64)
    with pytest.raises(ValueError, match=r"dropout: 0 is required"):
        fi.attention(layer, x, x, x, None, dropout=0.1)
    with pytest.raises(ValueError, match=r"position_bias: None is required"):
        fi.attention(layer, x, x, x, None, position_bias=x)
    windowed = model_of("gemma2", "cpu").model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"sliding_window: Gemma2Attention has a window that it does not pass"):
        fi.attention(windowed, x, x, x, None)
