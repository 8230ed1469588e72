"""Small valid calls of layers of experts with the router inside, and of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from families.harness import rand
from families.moe_reference import block_quantized, chosen, mxfp4_quantized
from fi_core import fused_moe
from fi_core.fused_moe import WeightLayout
from fi_core.tllm_enums import Fp8QuantizationType

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
E, K, H, INTER, TOKENS = 4, 2, 128, 128, 3  # experts, top_k, hidden, inter
Arguments = dict[str, Any]


def _sizes(**more: Any) -> Arguments:
    return {
        "num_experts": E, "top_k": K, "n_group": None, "topk_group": None, "intermediate_size": INTER,
        "local_expert_offset": 0, "local_num_experts": E, "routed_scaling_factor": None, **more,
    }  # fmt: skip


def _router() -> Arguments:
    return {"routing_logits": rand(TOKENS, E, dtype=F32, device="cpu"), "routing_bias": None}


def _experts(pair: bool, biased: bool = True) -> Arguments:
    """Chosen experts, as a pair of tensors or packed."""
    ids, weights = chosen(TOKENS, E, K, "cpu")
    packed = ids << 16 | weights.bfloat16().view(torch.int16).int() & 0xFFFF
    return {"topk_ids": (ids, weights) if pair else packed} | ({"routing_bias": None} if biased else {})


def _x() -> torch.Tensor:
    return rand(TOKENS, H, dtype=BF16, device="cpu")


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(rand(E, *shape, dtype=BF16, device="cpu", scale=0.1) for shape in ((2 * INTER, H), (H, INTER)))


def _bf16(layout: WeightLayout) -> Arguments:
    up, down = _weights()
    if layout is WeightLayout.BlockMajorK:
        up, down = (w.view(*w.shape[:2], -1, 64).transpose(1, 2).contiguous() for w in (up, down))
    shuffled = layout is WeightLayout.BlockMajorK
    return {
        "hidden_states": _x(), "gemm1_weights": up, "gemm2_weights": down, **_sizes(),
        "use_shuffled_weight": shuffled, "weight_layout": layout,
    }  # fmt: skip


def _fp8_blocks() -> Arguments:
    (q1, s1, _), (q2, s2, _) = map(block_quantized, _weights())
    return {
        "hidden_states": _x().to(E4M3), "hidden_states_scale": torch.ones(H // 128, TOKENS), "gemm1_weights": q1,
        "gemm1_weights_scale": s1, "gemm2_weights": q2, "gemm2_weights_scale": s2, **_sizes(),
    }  # fmt: skip


def _mxfp8() -> Arguments:
    def powers(*shape: int) -> torch.Tensor:
        return torch.full(shape, 127, dtype=torch.uint8)

    up, down = (w.to(E4M3) for w in _weights())
    return {
        "hidden_states": _x().to(E4M3), "hidden_states_scale": powers(TOKENS, H // 32), "gemm1_weights": up,
        "gemm1_weights_scale": powers(E, 2 * INTER, H // 32), "gemm2_weights": down,
        "gemm2_weights_scale": powers(E, H, INTER // 32), **_sizes(),
        "fp8_quantization_type": Fp8QuantizationType.MxFp8,
    }  # fmt: skip


def _fp8_tensors() -> Arguments:
    up, down = (w.to(E4M3) for w in _weights())
    one = torch.ones(E)
    return {
        "hidden_states": _x().to(E4M3), "gemm1_weights": up, "output1_scales_scalar": one,
        "output1_scales_gate_scalar": one.clone(), "gemm2_weights": down, "output2_scales_scalar": one.clone(),
        **_sizes(use_routing_scales_on_input=False),
    }  # fmt: skip


def _fp4() -> Arguments:
    (q1, s1, _), (q2, s2, _) = map(mxfp4_quantized, _weights())
    nothing = dict.fromkeys(
        ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias", "output1_scale_scalar",
         "output1_scale_gate_scalar", "output2_scale_scalar")
    )  # fmt: skip
    return {
        "hidden_states": _x(), "hidden_states_scale": None, "gemm1_weights": q1, "gemm1_weights_scale": s1,
        "gemm2_weights": q2, "gemm2_weights_scale": s2, **nothing, **_sizes(),
    }  # fmt: skip


def _topk() -> Arguments:
    return {
        "scores": rand(TOKENS, 16, dtype=F32, device="cpu"), "bias": rand(16, dtype=F32, device="cpu"), "n_group": 4,
        "topk_group": 2, "topk": K, "routed_scaling_factor": 2.5, "topk_values": torch.empty(TOKENS, K),
        "topk_indices": torch.empty(TOKENS, K, dtype=torch.int32),
    }  # fmt: skip


def _interleaved() -> Arguments:
    ids, weights = chosen(TOKENS, E, K, "cpu")
    up, down = _weights()
    return {
        "x": _x(), "token_selected_experts": ids, "token_final_scales": weights, "w1_weight": up, "w2_weight": down,
        "num_experts": E, "top_k": K, "moe_output": torch.empty(TOKENS, H, dtype=BF16),
    }  # fmt: skip


def _e4m3_tokens() -> Arguments:
    ids, weights = chosen(TOKENS, E, K, "cpu")
    prepare: Any = fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming
    (w1, s1, r1), (w2, s2, r2) = (prepare(*mxfp4_quantized(w)[:2]) for w in _weights())
    return {
        "input": _x(), "token_selected_experts": ids, "token_final_scales": weights, "fc1_expert_weights": w1,
        "fc2_expert_weights": w2, "output_dtype": BF16, "quant_scales": [s1, r1 * 64, r1, s2, r2 * 64],
        "use_w4_group_scaling": True, "use_wfp4afp8_humming": True,
    }  # fmt: skip


def _config() -> fused_moe.MoEConfig:
    return fused_moe.MoEConfig(
        fused_moe.RoutingConfig(E, K), fused_moe.QuantConfig(), fused_moe.ExpertConfig(INTER), fused_moe.SwiGLU(2.0)
    )


def _layer() -> tuple[Callable[..., Any], Arguments]:
    kind: Any = fused_moe.MoELayer
    return kind.__init__, {"self": object.__new__(kind), "config": _config(), "device": torch.device("cpu")}


def _call() -> tuple[Callable[..., Any], Arguments]:
    kind: Any = fused_moe.MoELayer
    ids, weights = chosen(TOKENS, E, K, "cpu")
    up, down = _weights()
    view = {"fc1_expert_weights": up, "fc2_expert_weights": down}
    return kind.__call__, {
        "self": kind(_config(), torch.device("cpu")), "act_pack": fused_moe.MoEActivationPack(_x(), None, ids, weights),
        "weight_pack": fused_moe.MoEWeightPack({"cutlass_bf16": view}),
    }  # fmt: skip


def _wrapper() -> tuple[Callable[..., Any], Arguments]:
    kind: Any = fused_moe.CuteDslBf16MoEWrapper
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": INTER}
    return kind.__init__, {"self": object.__new__(kind), **sizes, "output_dtype": BF16, "swiglu_limit": 7.0}


def _wrapped() -> tuple[Callable[..., Any], Arguments]:
    kind: Any = fused_moe.CuteDslBf16MoEWrapper
    given = {name: value for name, value in _interleaved().items() if name not in ("num_experts", "top_k")}
    return kind.run, {"self": kind(E, K, H, INTER), **given}


LAYERS: dict[str, Callable[[], tuple[Callable[..., Any], Arguments]]] = {
    "of a config": _layer, "call": _call, "wrapper": _wrapper, "wrapped": _wrapped,
}  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[..., Any], Callable[[], Arguments]]]:
    """A name, the function, and what makes its arguments."""
    moe: Any = fused_moe
    major, blocks = WeightLayout.MajorK, WeightLayout.BlockMajorK
    yield "experts:bf16", moe.trtllm_bf16_moe, lambda: {**_router(), **_bf16(major)}
    yield "experts:bf16 routed", moe.trtllm_bf16_routed_moe, lambda: {**_experts(False, False), **_bf16(blocks)}
    yield "experts:fp8 blocks", moe.trtllm_fp8_block_scale_moe, lambda: {**_router(), **_fp8_blocks()}
    yield "experts:mxfp8", moe.trtllm_fp8_block_scale_moe, lambda: {**_router(), **_mxfp8()}
    yield "experts:fp8 routed", moe.trtllm_fp8_block_scale_routed_moe, lambda: {**_experts(True), **_fp8_blocks()}
    yield "experts:fp8 tensors", moe.trtllm_fp8_per_tensor_scale_moe, lambda: {**_router(), **_fp8_tensors()}
    yield (
        "experts:fp8 tensors routed", moe.trtllm_fp8_per_tensor_scale_routed_moe,
        lambda: {**_experts(False), **_fp8_tensors()},
    )  # fmt: skip
    yield "experts:fp4 routed", moe.trtllm_fp4_block_scale_routed_moe, lambda: {**_experts(False), **_fp4()}
    yield "experts:topk", moe.fused_topk_deepseek, _topk
    yield "experts:interleaved", moe.cute_dsl_fused_moe_bf16, _interleaved
    yield "experts:e4m3 tokens", moe.cutlass_fused_moe, _e4m3_tokens
    yield "experts:workspace", moe.cutlass_fused_moe_workspace_size, lambda: {
        "max_num_tokens": TOKENS, "hidden_size": H, "intermediate_size": INTER, "num_experts_total": E, "top_k": K,
        "x_dtype": BF16, "weight_dtype": BF16,
    }  # fmt: skip
