"""mxfp4 experts with e4m3 activations: the prepared weights bit by bit, and the layer against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import rand
from families.moe_reference import E4M3_LIMIT, chosen, error, through_e4m3
from fi_core.fused_moe import (
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)

BF16 = torch.bfloat16
E, K, H, WIDTH = 4, 2, 256, 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
prepare: Any = preprocess_moe_weights_for_sm90_mixed_gemm_humming


def stored(n: int, k: int, span: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every kind, and exponents up to `span` apart, in each expert."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(124 - span, 125, (E, n, k // 32), dtype=torch.uint8, generator=generator)
    scales[:, 0, 0], scales[:, 0, 1] = 124 - span, 124
    return codes.to(device), scales.to(device)


def split(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()


def wide(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """`code * 2^exponent` in fp64."""
    split_codes = split(codes)
    values = E2M1.to(codes.device)[split_codes & 7] * torch.where(split_codes > 7, -1.0, 1.0).double()
    return values * torch.exp2(exponents.double()).repeat_interleave(32, -1)


def reference(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, block: int = 0
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    x = through_e4m3(x.double(), block, bool(block))
    for e in range(E):
        token, slot = (ids == e).nonzero(as_tuple=True)
        linear, gate = (x[token] @ up[e].T).chunk(2, -1)
        y = through_e4m3(torch.nn.functional.silu(gate) * linear, block, bool(block)) @ down[e].T
        out.index_add_(0, token, y * weights[token, slot, None].double())
    return out


@pytest.mark.parametrize("span", [0, 7, 27])
@pytest.mark.parametrize("max_range", [11, 3])
def test_logical_form(span: int, max_range: int, device: str) -> None:
    """Exponents from lo on are offsets of the residual; values with smaller ones are rounded, half away from zero."""
    codes, scales = stored(64, 128, span, 0, device)
    weight, offset, residual = prepare(codes, scales, max_range, interleave=False)
    assert weight.dtype == offset.dtype == torch.uint8 and weight.shape == codes.shape and offset.shape == scales.shape
    lo = max(124 - span, 124 - max_range)
    assert residual.tolist() == [2.0 ** (lo - 127) / 2] * E
    assert torch.equal(offset.int(), scales.int().clamp(min=lo) - lo + 1)
    given = wide(codes, scales.int() - 127) / torch.exp2(scales.double().clamp(min=lo) - 127).repeat_interleave(32, -1)
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64, device=device)
    nearest = (given.abs()[..., None] >= steps).sum(-1) + (given < 0) * 8
    negative_zero = split(codes) > 8
    assert torch.equal(split(weight), torch.where((nearest == 0) & negative_zero, 8, nearest))
    if span <= max_range:
        assert torch.equal(wide(weight, offset) * residual.double()[:, None, None], wide(codes, scales.int() - 127))


@pytest.mark.parametrize("span", [0, 11, 27])
@pytest.mark.parametrize("block", [0, 32])
def test_layer(span: int, block: int, device: str) -> None:
    """Weights are exact whatever the range of exponents; what differs is e4m3 rounding of other sides, and bf16."""
    tokens = 33
    x = rand(tokens, H, dtype=BF16, device=device)
    (w1, s1), (w2, s2) = stored(2 * WIDTH, H, span, 1, device), stored(H, WIDTH, span, 2, device)
    ids, weights = chosen(tokens, E, K, device)
    (q1, p1, r1), (q2, p2, r2) = prepare(w1, s1), prepare(w2, s2)
    assert q1.shape == w1.shape and p1.shape == s1.shape and r1.shape == (E,)
    unused = torch.full((E,), torch.nan, device=device)
    scales = [p1.view(torch.int32), r1 * 64, unused, p2.view(torch.int32), r2 * 64]
    given: dict[str, Any] = {
        "input": x, "token_selected_experts": ids, "token_final_scales": weights, "fc1_expert_weights": q1,
        "fc2_expert_weights": q2, "output_dtype": BF16, "quant_scales": scales, "use_w4_group_scaling": True,
        "use_wfp4afp8_humming": True, "use_mxfp8_act_scaling": bool(block),
    }  # fmt: skip
    out = cutlass_fused_moe(**given)
    want = reference(x, ids, weights, wide(w1, s1.int() - 127), wide(w2, s2.int() - 127), block)
    assert error(out, want) < E4M3_LIMIT
    size = cutlass_fused_moe_workspace_size(
        tokens, H, WIDTH, E, K, x_dtype=BF16, weight_dtype=torch.uint8, use_w4_group_scaling=True,
        use_wfp4afp8_humming=True, use_mxfp8_act_scaling=bool(block),
    )  # fmt: skip
    room = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    assert torch.equal(cutlass_fused_moe(**given, workspace_buffer=room), out)
    nothing = {"input": x[:0], "token_selected_experts": ids[:0], "token_final_scales": weights[:0]}
    assert cutlass_fused_moe(**{**given, **nothing}).shape == (0, H)


def test_biases_ranks_and_zero_rows(device: str) -> None:
    """The second of two expert ranks adds its biases; a token of zeros yields what the biases do."""
    x = rand(5, H, dtype=torch.float16, device=device)
    x[3] = 0
    (w1, s1), (w2, s2) = stored(2 * WIDTH, H, 5, 1, device), stored(H, WIDTH, 5, 2, device)
    b1, b2 = (rand(E, n, dtype=torch.float32, device=device, seed=n) for n in (2 * WIDTH, H))
    ids, weights = chosen(5, 2 * E, K, device)
    (q1, p1, r1), (q2, p2, r2) = prepare(w1, s1), prepare(w2, s2)
    out = cutlass_fused_moe(
        x, ids, weights, q1, q2, torch.float32, [p1, r1 * 64, r1, p2, r2 * 64], b1, b2, ep_size=2, ep_rank=1,
        use_w4_group_scaling=True, use_wfp4afp8_humming=True,
    )  # fmt: skip
    want, up, down = torch.zeros_like(x, dtype=torch.float64), wide(w1, s1.int() - 127), wide(w2, s2.int() - 127)
    rounded = through_e4m3(x.double())
    for t, j in (ids >= E).nonzero().tolist():
        e = int(ids[t, j]) - E
        linear, gate = (up[e] @ rounded[t] + b1[e].double()).chunk(2)
        y = down[e] @ through_e4m3((torch.nn.functional.silu(gate) * linear)[None])[0] + b2[e].double()
        want[t] += weights[t, j].double() * y
    assert error(out, want) < E4M3_LIMIT
    assert fi_core.fused_moe.cutlass_fused_moe is cutlass_fused_moe


def test_wrong_arguments_are_named() -> None:
    codes, scales = stored(2 * WIDTH, H, 3, 0, "cpu")
    for arguments, words in (
        ((codes[0], scales), r"weight must have shape \[experts, n, k / 2\], k a multiple of 32; got \[256, 128\]"),
        ((codes, scales[:, 1:]), r"raw_scale must have shape \[4, 256, 8\] on cpu; got \[4, 255, 8\]"),
        ((codes, scales, 12), r"max_range must be in 0\.\.11; got 12"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(*arguments)
    with pytest.raises(TypeError, match=r"raw_scale must be uint8; got torch\.int8"):
        prepare(codes, scales.view(torch.int8))
    x, down = rand(3, H, dtype=BF16, device="cpu"), stored(H, WIDTH, 3, 1, "cpu")
    ids, weights = chosen(3, E, K, "cpu")
    one = torch.ones(E)
    good = [scales, one, one, down[1], one]
    for given, options, words in (
        (good, {}, "use_wfp4afp8_humming must come with use_w4_group_scaling=True and use_packed_weights=False; got "),
        (good[:4], {"use_w4_group_scaling": True}, "quant_scales must have 5 tensors for use_wfp4afp8_humming; got 4"),
        ([*good[:4], one[:1]], {"use_w4_group_scaling": True}, r"quant_scales\[4\], residuals times 64, must have sha"),
    ):
        with pytest.raises(ValueError, match=words):
            cutlass_fused_moe(x, ids, weights, codes, down[0], BF16, given, use_wfp4afp8_humming=True, **options)
