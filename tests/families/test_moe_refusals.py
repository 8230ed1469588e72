"""Options of layers of experts that mean nothing together, and scales of other shapes, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import moe_reference as reference
from families.harness import rand
from families.moe_reference import chosen, error, experts
from fi_core import fused_moe
from fi_core.fused_moe import ActivationType, RoutingMethodType
from fi_core.quantization import block_scale_interleave, shuffle_matrix_a, shuffle_matrix_sf_a

moe: Any = fused_moe  # calls are written with dictionaries of arguments
BF16, E, K, H, INTER, TOKENS = torch.bfloat16, 4, 2, 128, 128, 3
Arguments = dict[str, Any]
SWIZZLED = "use_mxfp8_act_scaling"


def weights(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((2 * INTER, H), (H, INTER))
    up, down = (rand(E, *shape, dtype=BF16, device=device, scale=0.2, seed=i) for i, shape in enumerate(shapes))
    return up, down


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    return torch.stack([block_scale_interleave(s).view(-1, s.shape[1]) for s in scales])


def plain(device: str, tokens: int = TOKENS, **more: Any) -> Arguments:
    """Arguments of `cutlass_fused_moe` with weights of 16 bits."""
    (ids, scales), (up, down) = chosen(tokens, E, K, device), weights(device)
    return {
        "input": rand(tokens, H, dtype=BF16, device=device),
        "token_selected_experts": ids,
        "token_final_scales": scales,
        "fc1_expert_weights": up,
        "fc2_expert_weights": down,
        "output_dtype": BF16,
        **more,
    }


def in_format(name: str, device: str, tokens: int = TOKENS) -> Arguments:
    """The same in a format with scales of blocks."""
    given, (up, down), ones = plain(device, tokens), weights(device), torch.ones(E, device=device)
    quantize: Any = {"nvfp4": lambda w: reference.nvfp4_quantized(w, 1.0), "int4": reference.int4_quantized}.get(
        name, reference.mxfp8_quantized if name == "mxfp8" else reference.mxfp4_quantized
    )
    (q1, s1, _), (q2, s2, _) = quantize(up), quantize(down)
    given |= {"fc1_expert_weights": q1, "fc2_expert_weights": q2}
    if name == "mxfp4":
        return given | {"quant_scales": [s1, s2], "use_w4_group_scaling": True}
    if name == "int4":
        none = torch.empty(0, device=device)
        return given | {"quant_scales": [s1, s2] + 6 * [none], "use_w4_group_scaling": True, "use_packed_weights": True}
    s1, s2 = swizzled(s1), swizzled(s2)
    x, rows = given["input"], torch.full((tokens, H // 16), 56, dtype=torch.uint8, device=device)  # 1 in e4m3
    if name == "nvfp4":
        fp4 = torch.zeros(tokens, H // 2, dtype=torch.uint8, device=device)
        return given | {
            "input": fp4,
            "input_sf": rows,
            "swizzled_input_sf": False,
            "quant_scales": [ones[0], s1, ones, ones[0], s2, ones],
        }
    return given | {
        "input": x.to(torch.float8_e4m3fn),
        "input_sf": torch.full_like(rows[:, ::2], 127).contiguous(),
        "swizzled_input_sf": False,
        "quant_scales": [s1, ones, s2, ones],
        SWIZZLED: True,
    }


@pytest.mark.parametrize("name", ["mxfp4", "int4", "nvfp4", "mxfp8", "mxfp8 by fp4"])
def test_a_rank_without_tokens(name: str, device: str) -> None:
    for _ in range(2):  # the second call finds what the first has planned
        assert moe.cutlass_fused_moe(**in_format(name, device, 0)).shape == (0, H)


@pytest.mark.parametrize("name", ["mxfp4", "int4", "nvfp4", "mxfp8", "mxfp8 by fp4"])
def test_scales_of_blocks_have_the_shape_of_their_weight(name: str, device: str) -> None:
    """Another order of as many scales would be read as this one."""
    given = in_format(name, device)
    want = moe.cutlass_fused_moe(**given)
    for place, scales in enumerate(given["quant_scales"]):
        if scales.ndim != 3:
            continue

        def sent(other: torch.Tensor, place: int = place) -> Arguments:
            own = list(given["quant_scales"])
            own[place] = other
            return {**given, "quant_scales": own}

        assert torch.equal(moe.cutlass_fused_moe(**sent(scales.flatten())), want)
        wide = torch.int64 if scales.dtype is BF16 else torch.float32
        halves = scales.view(E, 2, -1, scales.shape[2]).transpose(1, 2).reshape(E, -1, 2 * scales.shape[2])
        for other in (scales.mT.contiguous(), halves, scales[:2], scales[..., None]):
            with pytest.raises(ValueError, match=rf"quant_scales\[{place}\] must have shape"):
                moe.cutlass_fused_moe(**sent(other))
        if wide is torch.float32:
            with pytest.raises(TypeError, match=rf"quant_scales\[{place}\] must have elements of 1 byte"):
                moe.cutlass_fused_moe(**sent(torch.ones(E, scales.shape[1], scales.shape[2] // 4, device=device)))
    if "input_sf" in given:
        with pytest.raises(ValueError, match="input_sf must have shape"):
            moe.cutlass_fused_moe(**given | {"input_sf": given["input_sf"].t().contiguous()})


CONSTANTS = ("swiglu_alpha", "swiglu_beta", "swiglu_limit", "clamped_relu2_limit", "situ_beta", "situ_linear_beta")
TAKEN = {
    ActivationType.Swiglu: CONSTANTS[:3],
    ActivationType.SwigluBias: CONSTANTS[:3],
    ActivationType.SwigluStep: CONSTANTS[2:3],
    ActivationType.Situ: CONSTANTS[4:],
    ActivationType.ClampedRelu2: CONSTANTS[3:4],
}


@pytest.mark.parametrize("kind", [kind for kind in ActivationType if kind is not ActivationType.InvalidType])
def test_a_constant_is_used_or_refused(kind: ActivationType, device: str) -> None:
    given = plain(device, activation_type=kind)
    if not kind.is_gated:
        given["fc1_expert_weights"] = given["fc1_expert_weights"][:, :INTER]
    needed = {"clamped_relu2_limit": 9.0} if kind is ActivationType.ClampedRelu2 else {}
    without = moe.cutlass_fused_moe(**given | needed)
    for name in CONSTANTS:
        value = torch.full((E,), 0.3, device=device) if name.startswith("swiglu") else 0.3
        if name in TAKEN.get(kind, ()):
            assert not torch.equal(moe.cutlass_fused_moe(**given | needed | {name: value}), without), name
        else:
            with pytest.raises(ValueError, match=f"{name} must be None for {kind.name}: it is a constant of "):
                moe.cutlass_fused_moe(**given | needed | {name: value})


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"use_packed_weights": True}, "use_packed_weights"),
        ({"use_wfp4afp8_humming": True}, "use_wfp4afp8_humming"),
        ({"use_deepseek_fp8_block_scale": True, "use_w4_group_scaling": True}, "use_deepseek_fp8_block_scale"),
        ({"input_sf": torch.ones(TOKENS, H // 32)}, "input_sf must be None"),
        ({"cluster_rank": 1}, "cluster_rank must be in 0..cluster_size - 1 = 0; got 1"),
    ],
)
def test_options_that_mean_nothing_together(more: Arguments, text: str, device: str) -> None:
    with pytest.raises(ValueError, match=text):
        moe.cutlass_fused_moe(**plain(device, **more))


def routed(device: str, **more: Any) -> Arguments:
    """Arguments of `trtllm_bf16_routed_moe`."""
    given = plain(device)
    return {
        "topk_ids": (given["token_selected_experts"], given["token_final_scales"]),
        "hidden_states": given["input"],
        "gemm1_weights": given["fc1_expert_weights"],
        "gemm2_weights": given["fc2_expert_weights"],
        "num_experts": E,
        "top_k": K,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": INTER,
        "local_expert_offset": 0,
        "local_num_experts": E,
        "use_shuffled_weight": False,
        "weight_layout": 0,
        **more,
    }


def test_chosen_experts_are_as_many_as_told(device: str) -> None:
    given = routed(device)
    ids, scales = given["topk_ids"]
    packed = ids.int() << 16 | scales.bfloat16().view(torch.int16).int() & 0xFFFF
    for sent in ((ids, scales), packed):
        moe.trtllm_bf16_routed_moe(**given | {"topk_ids": sent})
        for top_k in (K - 1, K + 1):
            with pytest.raises(ValueError, match=rf"topk_ids must have {top_k} columns, top_k; got \[3, 2\]"):
                moe.trtllm_bf16_routed_moe(**given | {"topk_ids": sent, "top_k": top_k})
    with pytest.raises(TypeError, match=r"topk_ids\[1\], the weights, must be floats"):
        moe.trtllm_bf16_routed_moe(**given | {"topk_ids": (scales, ids)})
    with pytest.raises(ValueError, match=r"topk_ids must be a tensor, or a tuple \(ids, weights\); got 3 members"):
        moe.trtllm_bf16_routed_moe(**given | {"topk_ids": (ids, scales, scales)})


@pytest.mark.parametrize(
    "method", [method for method in RoutingMethodType if method is not RoutingMethodType.Unspecified]
)
def test_groups_are_those_of_deepseek(method: RoutingMethodType, device: str) -> None:
    given = routed(device, routing_logits=rand(TOKENS, E, dtype=torch.float32, device=device), routing_bias=None)
    del given["topk_ids"]
    given |= {"routing_method_type": method, "top_k": 1}
    moe.trtllm_bf16_moe(**given | {"n_group": 1, "topk_group": 1})
    grouped = given | {"n_group": 2, "topk_group": 1}
    if method is RoutingMethodType.DeepSeekV3:
        moe.trtllm_bf16_moe(**grouped)
        return
    with pytest.raises(
        ValueError, match=f"n_group must be None or 1 for routing_method_type {int(method)}: groups are"
    ):
        moe.trtllm_bf16_moe(**grouped)


def of_fp4(device: str) -> tuple[Arguments, torch.Tensor]:
    """Arguments of `trtllm_fp4_block_scale_routed_moe` with MXFP4 weights, and the result without factors."""
    given, found, values = routed(device), {}, []
    for name, weight in zip(("gemm1_weights", "gemm2_weights"), weights(device)):
        codes, scales, exact = reference.mxfp4_quantized(weight)
        order = fused_moe.reorder_rows_for_gated_act_gemm if name == "gemm1_weights" else torch.clone
        found[name] = torch.stack([shuffle_matrix_a(order(w), 128) for w in codes])
        own = [shuffle_matrix_sf_a(order(s), 128, 32).view(s.shape) for s in scales]
        found[f"{name}_scale"] = torch.stack(own)
        values.append(exact)
    for name in ("use_shuffled_weight", "weight_layout"):
        del given[name]
    nothing = ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")
    factors = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    given |= dict.fromkeys((*nothing, *factors, "routing_bias", "hidden_states_scale", "routed_scaling_factor"))
    return given | found, experts(given["hidden_states"], *given["topk_ids"], *values)


def test_factors_of_outputs_are_1_where_they_are_none(device: str) -> None:
    """The scale of activated values multiplies the linear projection; a gate has it not."""
    given, want = of_fp4(device)
    three = torch.full((E,), 3.0, device=device)
    for name, factor in (("output1_scale_scalar", 3.0), ("output2_scale_scalar", 3.0)):
        out = moe.trtllm_fp4_block_scale_routed_moe(**given | {name: three})[0]
        assert error(out, factor * want) < 1e-2, name


def test_scales_of_prepared_weights_have_their_shape(device: str) -> None:
    given, want = of_fp4(device)
    for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
        flat = moe.trtllm_fp4_block_scale_routed_moe(**given | {name: given[name].flatten(1)})[0]
        assert error(flat, want) < 1e-2
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            moe.trtllm_fp4_block_scale_routed_moe(**given | {name: given[name].mT.contiguous()})
    tokens, scales, _ = reference.mxfp8_quantized(given["hidden_states"])
    given |= {"hidden_states": tokens, "hidden_states_scale": scales}
    moe.trtllm_fp4_block_scale_routed_moe(**given)
    with pytest.raises(ValueError, match=r"hidden_states_scale must have shape \[3, 4\] in layout_linear, or be flat"):
        moe.trtllm_fp4_block_scale_routed_moe(**given | {"hidden_states_scale": scales.t().contiguous()})


@pytest.mark.parametrize(("name", "kind"), [("weight_layout", "WeightLayout"), ("fp8_quantization_type", "Fp8Quant")])
def test_a_code_that_is_none_is_named(name: str, kind: str, device: str) -> None:
    given = routed(device)
    (q1, s1, _), (q2, s2, _) = map(reference.block_quantized, weights(device))
    given |= {"gemm1_weights": q1, "gemm1_weights_scale": s1, "gemm2_weights": q2, "gemm2_weights_scale": s2}
    given |= {"routing_bias": None, "hidden_states_scale": None, "routed_scaling_factor": None}
    moe.trtllm_fp8_block_scale_routed_moe(**given)
    with pytest.raises(ValueError, match=f"{name} must be a {kind}.*: 0 .*; got 77"):
        moe.trtllm_fp8_block_scale_routed_moe(**given | {name: 77})
