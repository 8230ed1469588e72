"""mono_moe: routing and experts of a few tokens, against the experts one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import rand
from families.moe_reference import E4M3_LIMIT, block_quantized, error, through_e4m3
from fi_core import fused_moe

BF16 = torch.bfloat16


def layer(device: str, experts: int = 6, inter: int = 128, hidden: int = 256) -> tuple[dict[str, Any], Any]:
    """The arguments of three tokens, and the dequantised gate, up and down weights."""
    up = rand(experts, 2 * inter, hidden, dtype=torch.float32, device=device, scale=hidden**-0.5)
    down = rand(experts, hidden, inter, dtype=torch.float32, device=device, seed=1, scale=inter**-0.5)
    (q_up, s_up, wide_up), (q_down, s_down, wide_down) = block_quantized(up), block_quantized(down)
    given = {
        "activations_in": rand(3, hidden, dtype=BF16, device=device, seed=2),
        "router_logits": rand(3, experts, dtype=BF16, device=device, seed=3, scale=2.0),
        "expert_weights_up": q_up, "expert_scales_up": s_up,
        "expert_weights_down": q_down, "expert_scales_down": s_down,
    }  # fmt: skip
    return given, (*wide_up.double().chunk(2, 1), wide_down.double())


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_of_the_best_scores(scoring: str, renormalize: bool, device: str) -> None:
    given, (gate, up, down) = layer(device)
    logits, x = given["router_logits"].double(), given["activations_in"].double()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    weights, chosen = scores.topk(2)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    want, rounded = torch.zeros_like(x), through_e4m3(x, 128)
    for t in range(3):
        for weight, e in zip(weights[t], chosen[t].tolist()):
            h = torch.nn.functional.silu(gate[e] @ rounded[t]) * (up[e] @ rounded[t])
            want[t] += weight * (down[e] @ through_e4m3(h, 128))
    options = {"top_k": 2, "scoring_func": scoring, "renormalize": renormalize}
    got = fused_moe.mono_moe(**given, **options)
    assert got.dtype == BF16
    assert error(got, want) < E4M3_LIMIT
    ready = fused_moe.interleave_for_tma_wgmma_up(given["expert_weights_up"])
    assert fused_moe.interleave_for_tma_wgmma_up(given["expert_weights_up"]) is ready
    room = fused_moe.alloc_scratchpad(torch.device(device))
    assert room.numel() == fused_moe.get_scratchpad_size_bytes() > 0
    out = torch.empty_like(got)
    prepared = {**given, "expert_weights_up": ready}
    again = fused_moe.mono_moe(**prepared, **options, out=out, scratchpad=room, interleave_up=False)
    assert again is out
    assert torch.equal(out, got)


def test_wrong_arguments_are_named() -> None:
    given, _ = layer("cpu")
    assert fused_moe.has_monomoe()
    for change, words in (
        ({"top_k": 9}, "top_k must be 1 to 8, at most the experts; got 9"),
        ({"scoring_func": "relu"}, "scoring_func must be 'softmax' or 'sigmoid'; got 'relu'"),
        ({"router_logits": given["router_logits"][:, 1:]}, r"router_logits must have shape \[3, 6\]; got \[3, 5\]"),
        ({"expert_scales_up": given["expert_scales_down"][:, :1]}, r"expert_scales_up must have shape \[6, 2, 2\]"),
        ({"expert_weights_up": given["expert_weights_up"][:, :128]}, "expert_weights_up must have 2 n rows, n a"),
        ({"interleave_up": False}, "expert_weights_up must come from interleave_for_tma_wgmma_up"),
    ):
        with pytest.raises(ValueError, match=words):
            fused_moe.mono_moe(**{**given, "top_k": 2, **change})
    with pytest.raises(ValueError, match=r"w_fp8 must have shape \[experts, 2 n, hidden\], n a multiple of 64"):
        fused_moe.interleave_for_tma_wgmma_up(given["expert_weights_up"][:, :96])
