"""Workspaces of mixtures of experts: their size, what is written to them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import moe_reference as reference
from families.harness import rand
from families.moe_reference import chosen
from families.test_moe import BF16, E4M3, layer
from fi_core.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size

E, K, H, WIDTH = 8, 2, 256, 128
FORMATS = ("16 bits", "fp8 blocks", "fp8 tensors", "mxfp4")


def call(form: str, tokens: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a layer, and those of the size of its workspace."""
    x, (w1, w2) = rand(tokens, H, dtype=BF16, device=device), layer(E, H, WIDTH, device)
    options: dict[str, bool] = {}
    scales: list[torch.Tensor] = []
    if form == "fp8 blocks":
        (w1, *s1), (w2, *s2) = reference.block_quantized(w1), reference.block_quantized(w2)
        scales, options = [s1[0], s2[0]], {"use_deepseek_fp8_block_scale": True}
    elif form == "fp8 tensors":
        (w1, s1, _), (w2, s2, _) = reference.tensor_quantized(w1), reference.tensor_quantized(w2)
        x, scales = x.to(E4M3), [s1, torch.tensor(30.0, device=device), s2, s2[:1]]
    elif form == "mxfp4":
        (w1, *s1), (w2, *s2) = reference.mxfp4_quantized(w1), reference.mxfp4_quantized(w2)
        scales, options = [s1[0], s2[0]], {"use_w4_group_scaling": True}
    ids, weights = chosen(tokens, E, K, device)
    given = {
        "input": x, "token_selected_experts": ids, "token_final_scales": weights, "fc1_expert_weights": w1,
        "fc2_expert_weights": w2, "output_dtype": BF16, "quant_scales": scales,
    }  # fmt: skip
    return given | options, {"x_dtype": x.dtype, "weight_dtype": w1.dtype} | options


@pytest.mark.parametrize("form", FORMATS)
def test_results_in_a_workspace(form: str, device: str) -> None:
    """The same as in memory of torch, with fewer tokens than the workspace is for, and nothing behind it written."""
    size = cutlass_fused_moe_workspace_size(200, H, WIDTH, E, K, **call(form, 1, device)[1])
    memory = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device=device)  # NaN in every format
    for tokens in (1, 64, 200):
        given, _ = call(form, tokens, device)
        want = cutlass_fused_moe(**given)
        for _ in range(2):
            assert torch.equal(cutlass_fused_moe(**given, workspace_buffer=memory[:size]), want)
    assert memory[size:].eq(0xFF).all() and not memory[:size].eq(0xFF).all()


@pytest.mark.parametrize("form", FORMATS)
def test_sizes_are_exact(form: str, device: str) -> None:
    """Besides the alignment; launches of several products need all of it, but with the activation in the first."""
    given, sizes = call(form, 150, device)
    needed = cutlass_fused_moe_workspace_size(150, H, WIDTH, E, K, **sizes) - 256
    spare = torch.empty(needed + 256, dtype=torch.uint8, device=device)
    begin = -spare.data_ptr() % 256
    cutlass_fused_moe(**given, workspace_buffer=spare[begin : begin + needed])
    with pytest.raises(ValueError, match="workspace_buffer must have more than"):
        cutlass_fused_moe(**given, workspace_buffer=spare[begin : begin + needed - 256])


def test_refusals(device: str) -> None:
    given, sizes = call("16 bits", 4, device)
    with pytest.raises(TypeError, match="workspace_buffer must be uint8"):
        cutlass_fused_moe(**given, workspace_buffer=torch.empty(1 << 20, device=device))
    with pytest.raises(ValueError, match="workspace_buffer must be contiguous, of one dimension"):
        cutlass_fused_moe(**given, workspace_buffer=torch.empty(9, 9, dtype=torch.uint8, device=device))
    for name, value in (("max_num_tokens", -1), ("top_k", 0)):
        numbers: dict[str, Any] = {
            "max_num_tokens": 1, "hidden_size": H, "intermediate_size": WIDTH, "num_experts_total": E, "top_k": K,
        }  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            cutlass_fused_moe_workspace_size(**numbers | {name: value}, **sizes)
    with pytest.raises(ValueError, match="num_experts_total must be a multiple of ep_size 3"):
        cutlass_fused_moe_workspace_size(1, H, WIDTH, E, K, ep_size=3, **sizes)
    with pytest.raises(ValueError, match="activation_type must be a value of ActivationType; got 4096"):
        cutlass_fused_moe_workspace_size(1, H, WIDTH, E, K, activation_type=4096, **sizes)
