"""Layers of fp8 weights with the router inside, in the layouts of TensorRT-LLM's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.fused_moe import trace
from fi_core.fused_moe.activations import activation_of
from fi_core.fused_moe.formats import block_scales, dequantized, fp8_blocks
from fi_core.fused_moe.layer import TOKENS, Layer, Mixed, Projection
from fi_core.fused_moe.ops import MXFP8
from fi_core.fused_moe.routing import Routed, route, unpacked
from fi_core.fused_moe.trtllm import (
    LayerCall,
    check_scale_of_tokens,
    check_tokens,
    prepared,
    run_layer,
    shared_experts,
)
from fi_core.gemm import block_scaled
from fi_core.observe.log import fi_api
from fi_core.quantization.layout import layout_of
from fi_core.runtime.errors import refuse
from fi_core.runtime.launch.plan import Launches, plans_launches
from fi_core.tllm_enums import ActivationType, Fp8QuantizationType, WeightLayout, is_gated_activation, member

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation

_BLOCK_TILE, _TILE = 64, 128  # rows of the epilogue tiles that shuffled weights are for


def _are_e4m3(**tensors: torch.Tensor) -> None:
    import torch

    for name, x in tensors.items():
        if x.dtype is not torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn; got {x.dtype}")


def _mx_layer(
    p: Launches,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    up: Projection,
    down: Projection,
    gated: bool,
    shuffled: bool,
    weight_layout: int,
) -> Layer:
    import torch

    if x_scale is not None:
        x = dequantized(p, x, "hidden_states_scale", x_scale, block_scaled.MXFP8, False)
    mixed, found = Mixed(MXFP8, layout_of(shuffled).value), []
    for name, w, alternates in (("gemm1_weights", up, gated), ("gemm2_weights", down, False)):
        assert w.scale is not None
        own = prepared(p, w._replace(mixed=mixed), name, weight_layout, _TILE, alternates, shuffled)
        shape = (len(w.weight), w.rows, w.columns_of_k // 32)
        found.append(own._replace(scale=block_scales(f"{name}_scale", w.scale, shape, shuffled)))
    return Layer(x, found[0], found[1], torch.bfloat16)


def _block_layer(
    p: Launches,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    up: Projection,
    down: Projection,
    shuffled: bool,
    weight_layout: int,
) -> Layer:
    """Rows of shuffled weights stay in their blocks of 128, so the scales hold; gate and linear rows are apart."""
    import torch

    assert up.scale is not None and down.scale is not None
    blocks = (x.shape[1] // 128, x.shape[0])
    if x_scale is not None:
        if tuple(x_scale.shape) != blocks:
            raise ValueError(f"hidden_states_scale must have shape {list(blocks)}; got {list(x_scale.shape)}")
        x_scale = x_scale.t()
    first, second = (
        prepared(p, w, name, weight_layout, _BLOCK_TILE, False, shuffled)
        for w, name in ((up, "gemm1_weights"), (down, "gemm2_weights"))
    )
    return fp8_blocks(x, first, second, torch.bfloat16, x_scale, ("gemm1_weights_scale", "gemm2_weights_scale"))


def _run_blocks(
    p: Launches,
    routed: Routed,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    up: Projection,
    down: Projection,
    activation: Activation,
    shuffled: bool,
    weight_layout: int,
    fp8_quantization_type: int | None,
    call: LayerCall,
) -> torch.Tensor | list[torch.Tensor]:
    if x.ndim != 2:
        raise ValueError(f"hidden_states must have shape [tokens, hidden]; got {list(x.shape)}")
    check_scale_of_tokens(x, x_scale)
    _are_e4m3(gemm1_weights=up.weight, gemm2_weights=down.weight)
    asked = Fp8QuantizationType.DeepSeekFp8 if fp8_quantization_type is None else fp8_quantization_type
    kind = member("fp8_quantization_type", Fp8QuantizationType, asked)
    if kind is Fp8QuantizationType.MxFp8:
        layer = _mx_layer(p, x, x_scale, up, down, is_gated_activation(activation.kind), shuffled, weight_layout)
    elif kind is Fp8QuantizationType.DeepSeekFp8:
        layer = _block_layer(p, x, x_scale, up, down, shuffled, weight_layout)
    else:
        raise ValueError(f"fp8_quantization_type must be DeepSeekFp8 or MxFp8; got {kind!r}")
    return run_layer(p, layer, activation, routed, call)


@fi_api(trace=trace.trtllm_blocks)
@plans_launches("output", by="hidden_states", tokens=TOKENS | {"hidden_states_scale": 1})
def trtllm_fp8_block_scale_moe(
    p: Launches,
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts: int | None = None,
    activation_type: int = ActivationType.Swiglu,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    *,
    gemm1_bias: torch.Tensor | None = None,
    gemm2_bias: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Routes tokens and computes a mixture of experts whose e4m3 weights have scales of blocks.

    DeepSeekFp8: scales of 1 x 128 of activations, which are quantised between the projections too, and of 128 x 128 of
    weights. MxFp8: powers of two of 32 values; activations become bf16.

    Args:
        routing_logits: `[tokens, num_experts]`, fp32, bf16 or fp16.
        routing_bias: `[num_experts]`, fp32, bf16 or fp16; for DeepSeekV3 and MiniMax2. None means 0.
        hidden_states: `[tokens, hidden]`, e4m3; bf16 is quantised here, without hidden_states_scale.
        hidden_states_scale: fp32 `[hidden / 128, tokens]`; MxFp8: uint8 (ue8m0) `[tokens, hidden / 32]`, linear.
        gemm1_weights: e4m3 `[experts here, n, hidden]`: the linear projection, then the gate; n = 2 intermediate_size
            for a gated activation. In BlockMajorK `[experts, hidden / 128, n, 128]`.
        gemm1_weights_scale: fp32 `[experts here, n / 128, hidden / 128]`; MxFp8: ue8m0 of 32, shuffled in the 128x4
            layout where weights are shuffled, else linear.
        gemm2_weights, gemm2_weights_scale: the same of `[experts here, hidden, intermediate_size]`.
        num_experts, top_k: of all ranks; at most 512 and 32.
        n_group, topk_group: groups of experts, for DeepSeekV3 alone; None or 1 means none.
        intermediate_size: outputs of the activation.
        local_expert_offset, local_num_experts: the experts whose weights are here; the result is a partial sum.
        routed_scaling_factor: factor of the weights of DeepSeekV3 and MiniMax2; None means 1.
        routing_method_type: a `RoutingMethodType`.
        use_shuffled_weight: whether rows are in the order of `shuffle_matrix_a` with a tile of 64 (MxFp8: of
            `reorder_rows_for_gated_act_gemm`, then `shuffle_matrix_a` with a tile of 128).
        weight_layout: MajorK, or BlockMajorK. Hopper's kernel for few tokens reads both; else BlockMajorK is copied to
            MajorK in each call.
        fp8_quantization_type: DeepSeekFp8 or MxFp8.
        num_fused_shared_experts: experts that each token has, whose weights follow those of num_experts. All experts
            must be here. Their outputs are added as they are: weight 1, which neither routed_scaling_factor nor
            norm_topk_prob changes, as DeepSeek-V3 adds its shared experts. For another weight choose the experts
            yourself and call the routed form. None means 0.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: fp32 `[experts here]`, the constants of SwigluBias.
        valid_hidden_size, valid_intermediate_size: accepted; padding of weights is zeros.
        gemm1_bias, gemm2_bias: `[experts here, n]` and `[experts here, hidden]`, fp32 or bf16, in the order of rows.
        do_finalize: False leaves the weighted sum to the caller.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.
        tune_max_num_tokens: accepted; kernels are chosen by size.
        activation_type: an `ActivationType`.
        norm_topk_prob: whether SigmoidRenorm divides by the sum of the weights; without effect on other methods.
        routing_replay_out: int16 `[tokens or more, top_k]`; receives the chosen experts.
        output: `[tokens, hidden]`, bf16; allocated if None.

    Returns:
        output; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1. Here
        top_k counts the shared experts too.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: layout MajorMn.
    """
    check_tokens(routing_logits, hidden_states)
    shared = shared_experts(num_fused_shared_experts, num_experts, local_num_experts)
    groups = (num_experts, top_k, n_group, topk_group, routed_scaling_factor)
    method = (routing_method_type, norm_topk_prob, routing_replay_out)
    routed = route(p, routing_logits, routing_bias, *groups, *method, in_bf16=not do_finalize, shared=shared)
    up = Projection(gemm1_weights, gemm1_weights_scale, gemm1_bias)
    down = Projection(gemm2_weights, gemm2_weights_scale, gemm2_bias)
    activation = activation_of(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    local = (intermediate_size, local_expert_offset, local_num_experts + shared)
    call = LayerCall(num_experts + shared, *local, do_finalize, output)
    form = (use_shuffled_weight, weight_layout, fp8_quantization_type)
    return _run_blocks(p, routed, hidden_states, hidden_states_scale, up, down, activation, *form, call)


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS | {"hidden_states_scale": 1})
def trtllm_fp8_block_scale_routed_moe(
    p: Launches,
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    *,
    num_fused_shared_experts: int | None = None,
    gemm1_bias: torch.Tensor | None = None,
    gemm2_bias: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """As `trtllm_fp8_block_scale_moe`, with experts that the caller has chosen.

    Args:
        topk_ids: int32 `[tokens, top_k]`, `expert << 16 | bits of the weight in bf16`; or a tuple of ids and weights.
        gemm1_lora_delta: `[tokens, top_k, n]`, bf16, contiguous: is added to the first product before the activation;
            the gate's columns first, then those of the linear projection (`bgmv_moe_gemm1_lora_delta`).
        num_fused_shared_experts: experts after num_experts; topk_ids lists them for the tokens that use them.
        others: as for `trtllm_fp8_block_scale_moe`; those about routing are accepted.

    Returns:
        output; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1.
        With gemm1_lora_delta `[output, positions, activated [tokens * top_k, inter]]`, and without do_finalize the
        activated values after the three: rows of `bgmv_moe_gemm2_lora_delta`.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: layout MajorMn.
    """
    shared = shared_experts(num_fused_shared_experts, num_experts, local_num_experts)
    up = Projection(gemm1_weights, gemm1_weights_scale, gemm1_bias)
    down = Projection(gemm2_weights, gemm2_weights_scale, gemm2_bias)
    activation = activation_of(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    local = (intermediate_size, local_expert_offset, local_num_experts + shared)
    call = LayerCall(num_experts + shared, *local, do_finalize, output, gemm1_lora_delta)
    form = (use_shuffled_weight, weight_layout, fp8_quantization_type)
    routed = unpacked(topk_ids, top_k, shared)
    return _run_blocks(p, routed, hidden_states, hidden_states_scale, up, down, activation, *form, call)


def _run_tensors(
    p: Launches,
    routed: Routed,
    x: torch.Tensor,
    gemm1_weights: torch.Tensor,
    output1_scales_scalar: torch.Tensor,
    output1_scales_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    output2_scales_scalar: torch.Tensor,
    scales_input: bool,
    activation: Activation,
    call: LayerCall,
) -> torch.Tensor | list[torch.Tensor]:
    """The scale of the linear projection includes that of the quantisation between the projections."""
    import torch

    experts = call.local_num_experts
    if x.ndim != 2:
        raise ValueError(f"hidden_states must have shape [tokens, hidden]; got {list(x.shape)}")
    _are_e4m3(hidden_states=x, gemm1_weights=gemm1_weights, gemm2_weights=gemm2_weights)
    scales = {
        "output1_scales_scalar": output1_scales_scalar,
        "output1_scales_gate_scalar": output1_scales_gate_scalar,
        "output2_scales_scalar": output2_scales_scalar,
    }
    for name, scale in scales.items():
        if tuple(scale.shape) != (experts,) or scale.dtype is not torch.float32:
            raise ValueError(f"{name} must be float32 [{experts}]; got {scale.dtype} {list(scale.shape)}")
    gated = is_gated_activation(activation.kind)
    found = []
    for name, weight, scale, alternates in (
        ("gemm1_weights", gemm1_weights, output1_scales_gate_scalar, gated),
        ("gemm2_weights", gemm2_weights, output2_scales_scalar, False),
    ):
        if weight.ndim != 3:
            raise ValueError(f"{name} must have shape [experts, n, k]; got {list(weight.shape)}")
        of_rows = scale.view(-1, 1).expand(-1, weight.shape[1])
        found.append(prepared(p, Projection(weight, of_rows), name, WeightLayout.MajorK, _TILE, alternates, True))
    quant = output1_scales_scalar / output1_scales_gate_scalar
    layer = Layer(x, found[0], found[1], torch.bfloat16, quant=quant)
    return run_layer(p, layer, activation, routed, call, scales_input=scales_input)


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS)
def trtllm_fp8_per_tensor_scale_moe(
    p: Launches,
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    output1_scales_scalar: torch.Tensor,
    output1_scales_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    output2_scales_scalar: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Routes tokens and computes a mixture of experts whose e4m3 tensors have one scale each.

    Args:
        routing_logits: `[tokens, num_experts]`, fp32, bf16 or fp16.
        routing_bias: `[num_experts]`, fp32, bf16 or fp16; for DeepSeekV3 and MiniMax2. None means 0.
        hidden_states: `[tokens, hidden]`, e4m3.
        gemm1_weights: e4m3 `[experts here, n, hidden]`, rows in the order of `reorder_rows_for_gated_act_gemm`, then
            `shuffle_matrix_a` with a tile of 128.
        output1_scales_scalar: fp32 `[experts here]`, output1_scales_gate_scalar times the scale with which activated
            values are quantised.
        output1_scales_gate_scalar: fp32 `[experts here]`, the scales of hidden_states and weight.
        gemm2_weights: e4m3 `[experts here, hidden, intermediate_size]`, rows shuffled with a tile of 128.
        output2_scales_scalar: fp32 `[experts here]`, the scales of activated values and weight.
        num_experts, top_k: of all ranks; at most 512 and 32.
        n_group, topk_group: groups of experts, for DeepSeekV3 alone; None or 1 means none.
        intermediate_size: outputs of the activation.
        local_expert_offset, local_num_experts: the experts whose weights are here; the result is a partial sum.
        routed_scaling_factor: factor of the weights of DeepSeekV3 and MiniMax2; None means 1.
        use_routing_scales_on_input: whether routing weights multiply the inputs of the experts (Llama 4), not the
            outputs.
        routing_method_type: a `RoutingMethodType`.
        do_finalize: False leaves the weighted sum to the caller.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.
        tune_max_num_tokens: accepted; kernels are chosen by size.
        activation_type: an `ActivationType`.
        norm_topk_prob: whether SigmoidRenorm divides by the sum of the weights; without effect on other methods.
        routing_replay_out: int16 `[tokens or more, top_k]`; receives the chosen experts.
        output: `[tokens, hidden]`, bf16; allocated if None.
        gemm1_clamp_limit: fp32 `[experts here]`: the linear projection is clamped to +-limit, the gate from above, both
            as they are after their scales.

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
        in_bf16=not do_finalize and not use_routing_scales_on_input,
    )
    return _run_tensors(
        p,
        routed,
        hidden_states,
        gemm1_weights,
        output1_scales_scalar,
        output1_scales_gate_scalar,
        gemm2_weights,
        output2_scales_scalar,
        use_routing_scales_on_input,
        activation_of(activation_type, limit=gemm1_clamp_limit),
        LayerCall(num_experts, intermediate_size, local_expert_offset, local_num_experts, do_finalize, output),
    )


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS)
def trtllm_fp8_per_tensor_scale_routed_moe(
    p: Launches,
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    output1_scales_scalar: torch.Tensor,
    output1_scales_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    output2_scales_scalar: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu,
    routing_replay_out: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """As `trtllm_fp8_per_tensor_scale_moe`, with experts that the caller has chosen.

    Args:
        topk_ids: int32 `[tokens, top_k]`, `expert << 16 | bits of the weight in bf16`; or a tuple of ids and weights.
        routing_replay_out: None.
        others: as for `trtllm_fp8_per_tensor_scale_moe`; those about routing are accepted.

    Returns:
        output; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: routing_replay_out is given.
    """
    refuse("leave it out: topk_ids are the experts", routing_replay_out=routing_replay_out)
    return _run_tensors(
        p,
        unpacked(topk_ids, top_k),
        hidden_states,
        gemm1_weights,
        output1_scales_scalar,
        output1_scales_gate_scalar,
        gemm2_weights,
        output2_scales_scalar,
        use_routing_scales_on_input,
        activation_of(activation_type, limit=gemm1_clamp_limit),
        LayerCall(num_experts, intermediate_size, local_expert_offset, local_num_experts, do_finalize, output),
    )
