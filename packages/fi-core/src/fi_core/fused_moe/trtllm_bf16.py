"""Layers of 16-bit weights with the router inside, in the layouts of TensorRT-LLM's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.fused_moe.activations import activation_of
from fi_core.fused_moe.layer import TOKENS, Layer, Projection
from fi_core.fused_moe.routing import Routed, route, unpacked
from fi_core.fused_moe.trtllm import LayerCall, prepared, run_layer
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.launch.plan import Launches, plans_launches
from fi_core.tllm_enums import ActivationType, WeightLayout, is_gated_activation

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation

_TILE = 128  # rows of the epilogue tile that shuffled weights are for


def _run(
    p: Launches,
    routed: Routed,
    x: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    call: LayerCall,
    shuffled: bool,
    weight_layout: int,
    activation: Activation,
) -> torch.Tensor | list[torch.Tensor]:
    import torch

    for name, t in (("hidden_states", x), ("gemm1_weights", gemm1_weights), ("gemm2_weights", gemm2_weights)):
        if t.dtype not in (torch.bfloat16, torch.float16) or t.dtype is not x.dtype:
            raise TypeError(f"{name} must be bfloat16, or all three float16; got {t.dtype}")
    if x.ndim != 2:
        raise ValueError(f"hidden_states must have shape [tokens, hidden]; got {list(x.shape)}")
    gated = is_gated_activation(activation.kind)
    up = prepared(p, Projection(gemm1_weights), "gemm1_weights", weight_layout, _TILE, gated, shuffled)
    down = prepared(p, Projection(gemm2_weights), "gemm2_weights", weight_layout, _TILE, False, shuffled)
    return run_layer(p, Layer(x, up, down, x.dtype), activation, routed, call)


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS)
def trtllm_bf16_moe(
    p: Launches,
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = WeightLayout.BlockMajorK,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Routes tokens and computes a mixture of experts in bf16: `sum over the experts e of w_e down_e(act(up_e(x)))`.

    Args:
        routing_logits: `[tokens, num_experts]`, fp32, bf16 or fp16.
        routing_bias: `[num_experts]`, fp32, bf16 or fp16; for DeepSeekV3 and MiniMax2. None means 0.
        hidden_states: `[tokens, hidden]`, bf16 (or all tensors fp16).
        gemm1_weights: `[experts here, n, hidden]`: the linear projection, then the gate; n = 2 intermediate_size for a
            gated activation. In BlockMajorK `[experts, hidden / 64, n, 64]`.
        gemm2_weights: `[experts here, hidden, intermediate_size]`, or blocks.
        num_experts, top_k: of all ranks; at most 512 and 32.
        n_group, topk_group: groups of experts, for DeepSeekV3 alone; None or 1 means none.
        intermediate_size: outputs of the activation.
        local_expert_offset, local_num_experts: the experts whose weights are here; the result is a partial sum.
        routed_scaling_factor: factor of the weights of DeepSeekV3 and MiniMax2; None means 1.
        routing_method_type: a `RoutingMethodType`.
        use_shuffled_weight: whether rows are in the order of `reorder_rows_for_gated_act_gemm`, then
            `shuffle_matrix_a` with a tile of 128.
        weight_layout: MajorK, or BlockMajorK. Hopper's kernel for few tokens reads both; else BlockMajorK is copied to
            MajorK in each call.
        do_finalize: False leaves the weighted sum to the caller.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.
        tune_max_num_tokens: accepted; kernels are chosen by size.
        activation_type: an `ActivationType`.
        norm_topk_prob: whether SigmoidRenorm divides by the sum of the weights; without effect on other methods.
        routing_replay_out: int16 `[tokens or more, top_k]`; receives the chosen experts.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: fp32 `[experts here]`, the constants of SwigluBias; any of them
            turns Swiglu into it.
        output: `[tokens, hidden]`, bf16; allocated if None.

    Returns:
        output; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    routed = route(
        p,
        routing_logits,
        routing_bias,
        num_experts,
        top_k,
        n_group,
        topk_group,
        routed_scaling_factor,
        routing_method_type,
        norm_topk_prob,
        routing_replay_out,
        in_bf16=not do_finalize,
    )
    call = LayerCall(num_experts, intermediate_size, local_expert_offset, local_num_experts, do_finalize, output)
    activation = activation_of(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    order = use_shuffled_weight, weight_layout
    return _run(p, routed, hidden_states, gemm1_weights, gemm2_weights, call, *order, activation)


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS)
def trtllm_bf16_routed_moe(
    p: Launches,
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = WeightLayout.BlockMajorK,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    gemm1_lora_delta: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """As `trtllm_bf16_moe`, with experts that the caller has chosen.

    Args:
        topk_ids: int32 `[tokens, top_k]`, `expert << 16 | bits of the weight in bf16`; or a tuple of ids and weights.
        gemm1_lora_delta: `[tokens, top_k, n]`, bf16, contiguous: is added to the first product before the activation;
            the gate's columns first, then those of the linear projection (`bgmv_moe_gemm1_lora_delta`).
        routing_replay_out: None.
        others: as for `trtllm_bf16_moe`; those about routing are accepted.

    Returns:
        output; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1.
        With gemm1_lora_delta `[output, positions, activated [tokens * top_k, inter]]`, and without do_finalize the
        activated values after the three: rows of `bgmv_moe_gemm2_lora_delta`.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: routing_replay_out is given.
    """
    refuse("leave it out: topk_ids are the experts", routing_replay_out=routing_replay_out)
    call = LayerCall(
        num_experts, intermediate_size, local_expert_offset, local_num_experts, do_finalize, output
    )._replace(gemm1_lora_delta=gemm1_lora_delta)
    routed = unpacked(topk_ids, top_k)
    activation = activation_of(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    order = use_shuffled_weight, weight_layout
    return _run(p, routed, hidden_states, gemm1_weights, gemm2_weights, call, *order, activation)
