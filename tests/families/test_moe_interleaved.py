"""cute_dsl_fused_moe_bf16: weights whose linear and gate rows alternate by 32, against the experts one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import rand
from families.moe_reference import chosen, error
from fi_core.tllm_enums import ActivationType as Act

BF16 = torch.bfloat16
E, K, H, WIDTH, TOKENS = 6, 2, 128, 96, 11


def given(device: str, dtype: torch.dtype = BF16, gated: bool = True) -> tuple[dict[str, Any], Any]:
    """The arguments, and the linear projection, gate and second weight of each expert."""
    linear, gate = (rand(E, WIDTH, H, dtype=dtype, device=device, seed=s, scale=H**-0.5) for s in (1, 2))
    down = rand(E, H, WIDTH, dtype=dtype, device=device, seed=3, scale=WIDTH**-0.5)
    blocks = torch.stack((linear.view(E, -1, 32, H), gate.view(E, -1, 32, H)), 2) if gated else linear
    ids, scales = chosen(TOKENS, E, K, device)
    arguments = {
        "x": rand(TOKENS, H, dtype=dtype, device=device), "token_selected_experts": ids, "token_final_scales": scales,
        "w1_weight": blocks.reshape(E, -1, H), "w2_weight": down, "num_experts": E, "top_k": K,
    }  # fmt: skip
    return arguments, (linear.double(), gate.double(), down.double())


def reference(arguments: dict[str, Any], weights: Any, act: Any, first: int = 0, experts: int = E) -> torch.Tensor:
    x, (linear, gate, down) = arguments["x"].double(), weights
    want = torch.zeros_like(x)
    for t in range(len(x)):
        for e, scale in zip(arguments["token_selected_experts"][t].tolist(), arguments["token_final_scales"][t]):
            if first <= e < first + experts:
                want[t] += scale.double() * (down[e] @ act(linear[e] @ x[t], gate[e] @ x[t]))
    return want


def swiglu(alpha: float, beta: float, limit: float) -> Any:
    def act(u: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        g = g.clamp(max=limit)
        return g * torch.sigmoid(alpha * g) * (u.clamp(-limit, limit) + beta)

    return act


def situ(gate: float, linear: float) -> Any:
    return lambda u, g: gate * (g / gate).tanh() * g.sigmoid() * (linear * (u / linear).tanh() if linear < 1e9 else u)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("options", "act"),
    [
        ({}, swiglu(1.0, 0.0, 1e30)),
        ({"swiglu_alpha": 1.7, "swiglu_beta": 1.0, "swiglu_limit": 0.8}, swiglu(1.7, 1.0, 0.8)),
        ({"activation_type": Act.GegluTanh}, lambda u, g: torch.nn.functional.gelu(g, approximate="tanh") * u),
        ({"activation_type": Act.Relu2}, lambda u, g: u.relu() ** 2),
        ({"situ_beta": 2.0, "situ_linear_beta": 1.5}, situ(2.0, 1.5)), ({"situ_beta": 2.0}, situ(2.0, 1e30)),
    ],
)  # fmt: skip
def test_activations(options: dict[str, Any], act: Any, dtype: torch.dtype, device: str) -> None:
    arguments, weights = given(device, dtype, options.get("activation_type") != Act.Relu2)
    out = fi_core.cute_dsl_fused_moe_bf16(**arguments, **options)
    # Projections, activated values and the result are rounded to the dtype, the products have fp32 sums.
    limit = 4 * torch.finfo(dtype).eps
    assert out.dtype == dtype and error(out, reference(arguments, weights, act)) < limit
    wrapper = fi_core.CuteDslBf16MoEWrapper(E, K, H, WIDTH, output_dtype=dtype, **options)
    tensors = [arguments[n] for n in ("x", "token_selected_experts", "token_final_scales", "w1_weight", "w2_weight")]
    poisoned = torch.full_like(out, torch.nan)
    assert wrapper.run(*tensors, moe_output=poisoned) is poisoned
    assert torch.equal(poisoned, out)


def test_some_of_the_experts_and_no_tokens(device: str) -> None:
    arguments, weights = given(device)
    part = {**arguments, "w1_weight": arguments["w1_weight"][2:5], "w2_weight": arguments["w2_weight"][2:5]}
    out = fi_core.cute_dsl_fused_moe_bf16(**part, num_local_experts=3, local_expert_offset=2)
    assert error(out, reference(arguments, weights, swiglu(1.0, 0.0, 1e30), 2, 3)) < 4 * torch.finfo(BF16).eps
    none = {n: arguments[n][:0] for n in ("x", "token_selected_experts", "token_final_scales")}
    assert fi_core.cute_dsl_fused_moe_bf16(**{**arguments, **none}).shape == (0, H)


def test_wrong_arguments_are_named() -> None:
    arguments, _ = given("cpu")
    for change, kind, words in (
        ({"activation_type": Act.Geglu}, ValueError, "activation_type must be one of .*cutlass_fused_moe computes"),
        ({"swiglu_limit": 0.0}, ValueError, "swiglu_limit must be finite and positive; got 0.0"),
        ({"situ_linear_beta": 2.0}, ValueError, "situ_linear_beta must be given with situ_beta only"),
        ({"situ_beta": 2.0, "activation_type": Act.Relu2}, ValueError, "situ_beta must be None with Relu2"),
        ({"w1_weight": arguments["w1_weight"][:, 1:]}, ValueError, r"w1_weight must have shape \[6, 192, 128\]; got"),
        ({"top_k": 3}, ValueError, r"token_selected_experts must have shape \[11, 3\]; got \[11, 2\]"),
        ({"w2_weight": arguments["w2_weight"].half()}, TypeError, "w2_weight must be bfloat16, or all three float16"),
        ({"moe_output": torch.empty(TOKENS, H)}, TypeError, "moe_output must be torch.bfloat16, as x"),
        ({"tactic": (128,)}, NotImplementedError, "tactic"),
    ):
        with pytest.raises(kind, match=words):
            fi_core.cute_dsl_fused_moe_bf16(**{**arguments, **change})
    tensors = [arguments[n] for n in ("x", "token_selected_experts", "token_final_scales", "w1_weight", "w2_weight")]
    with pytest.raises(ValueError, match="w2_weight must have 64 columns, as the wrapper says; got 96"):
        fi_core.CuteDslBf16MoEWrapper(E, K, H, 64).run(*tensors)
    with pytest.raises(TypeError, match=r"x must be torch\.float16, the wrapper's output_dtype"):
        fi_core.CuteDslBf16MoEWrapper(E, K, H, WIDTH, output_dtype=torch.float16).run(*tensors)
