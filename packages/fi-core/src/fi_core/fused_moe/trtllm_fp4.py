"""Layers of fp4 weights with the router inside, in the layouts of TensorRT-LLM's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.fused_moe.activations import activation_of
from fi_core.fused_moe.formats import block_scales, dequantized
from fi_core.fused_moe.layer import TOKENS, Layer, Mixed, Projection
from fi_core.fused_moe.ops import MXFP4, NVFP4
from fi_core.fused_moe.routing import Routed, route, unpacked
from fi_core.fused_moe.trtllm import LayerCall, check_scale_of_tokens, prepared, run_layer, shared_experts
from fi_core.gemm import block_scaled
from fi_core.observe.log import fi_api
from fi_core.quantization.layout import SfLayout
from fi_core.runtime.errors import refuse
from fi_core.runtime.launch.plan import Launches, plans_launches
from fi_core.tllm_enums import ActivationType, WeightLayout, is_gated_activation

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation

_TILE = 128  # rows of the epilogue tile that shuffled weights are for


def _dequantized(p: Launches, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Tokens as 16-bit floats, without their global scale."""
    import torch

    check_scale_of_tokens(x, scale)
    if x.dtype in (torch.bfloat16, torch.float16):
        return x
    if scale is not None and x.dtype is torch.float8_e4m3fn:
        return dequantized(p, x, "hidden_states_scale", scale, block_scaled.MXFP8, False)
    if scale is not None and x.dtype is torch.uint8:
        return dequantized(p, x, "hidden_states_scale", scale, block_scaled.NVFP4, False)
    raise TypeError(f"hidden_states must be bfloat16, float8_e4m3fn or uint8 (fp4); got {x.dtype}")


def _format(name: str, p: Projection) -> tuple[int, int]:
    """NVFP4 or MXFP4, by the number of scales, and the values of a block."""
    assert p.scale is not None
    if p.weight.ndim != 3:
        raise ValueError(f"{name} must have shape [experts, n, k / 2]; got {list(p.weight.shape)}")
    experts, rows, half = p.weight.shape
    fits = [
        (format, block)
        for format, block in ((NVFP4, 16), (MXFP4, 32))
        if p.scale.numel() == experts * (-(-rows // 128) * 128) * (-(-2 * half // (4 * block)) * 4)
    ]
    if len(fits) > 1:  # of 64 columns or fewer: the last dimension tells, as in FlashInfer
        fits = [(format, block) for format, block in fits if p.scale.ndim == 3 and p.scale.shape[2] * block == 2 * half]
        if not fits:
            raise ValueError(
                f"{name}_scale must have shape [experts, n, k / block], as blocks of 16 and of 32 give its size; got "
                f"{list(p.scale.shape)}"
            )
    if fits:
        return fits[0]
    raise ValueError(
        f"{name}_scale must have the scales of 16 or 32 values of {name} in the 128x4 layout; got {list(p.scale.shape)}"
    )


def _run(
    p: Launches,
    routed: Routed,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    up: Projection,
    down: Projection,
    activation: Activation,
    factors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    call: LayerCall,
    *,
    per_token_scale: torch.Tensor | None,
    scale_layout: SfLayout | None,
) -> list[torch.Tensor]:
    """Activated values stay 16-bit floats, so the scale with which they were quantised goes into the last factor."""
    import torch

    refuse("multiply hidden_states_scale by it", per_token_scale=per_token_scale)
    if scale_layout not in (None, SfLayout.layout_linear):
        raise ValueError(
            f"hidden_states_scale_layout must be layout_linear, as tokens are gathered by row; got {scale_layout!r}"
        )
    if hidden_states.ndim != 2:
        raise ValueError(f"hidden_states must have shape [tokens, hidden]; got {list(hidden_states.shape)}")
    for name, given in zip(("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"), factors):
        if given is not None and (given.dtype is not torch.float32 or given.numel() not in (1, len(up.weight))):
            got = f"{given.dtype} {list(given.shape)}"
            raise ValueError(f"{name} must be float32 [{len(up.weight)}], one for each expert; got {got}")
    linear, gate, last = (None if given is None else given.reshape(-1) for given in factors)
    for ratio in (linear, None if gate is None else 1 / gate):
        if ratio is not None:
            last = ratio if last is None else last * ratio
    x, found = _dequantized(p, hidden_states, hidden_states_scale), []
    alternates = is_gated_activation(activation.kind)
    for name, w, factor, reorders in (
        ("gemm1_weights", up, gate, alternates),
        ("gemm2_weights", down, last, False),
    ):
        assert w.scale is not None
        (experts, rows, half), (format, block) = w.weight.shape, _format(name, w)
        scale = block_scales(f"{name}_scale", w.scale, (experts, rows, 2 * half // block), swizzled=True)
        mixed = Mixed(format, SfLayout.layout_128x4.value, factor)
        own = w._replace(weight=w.weight.contiguous().view(torch.uint8), scale=scale, mixed=mixed)
        found.append(prepared(p, own, name, WeightLayout.MajorK, _TILE, reorders, True))
    out = run_layer(p, Layer(x, found[0], found[1], x.dtype), activation, routed, call)
    return out if isinstance(out, list) else [out]


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS | {"hidden_states_scale": 0})
def trtllm_fp4_block_scale_moe(
    p: Launches,
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    num_fused_shared_experts: int | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """Routes tokens and computes a mixture of experts whose fp4 weights have scales of 16 (NVFP4) or 32 (MXFP4) values.

    Weights become bf16 in registers and activations stay bf16, so the result has no error of quantised activations.

    Args:
        routing_logits: `[tokens, num_experts]`, fp32, bf16 or fp16.
        routing_bias: `[num_experts]`, fp32, bf16 or fp16; for DeepSeekV3 and MiniMax2. None means 0.
        hidden_states: `[tokens, hidden]`, bf16; e4m3 with ue8m0 scales `[tokens, hidden / 32]`; or uint8
            `[tokens, hidden / 2]` (NVFP4) with e4m3 scales `[tokens, hidden / 16]`.
        hidden_states_scale: those scales, linear.
        gemm1_weights: uint8 `[experts here, n, hidden / 2]`, rows in the order of `reorder_rows_for_gated_act_gemm`,
            then `shuffle_matrix_a` with a tile of 128.
        gemm1_weights_scale: e4m3 or ue8m0 scales in the order of `shuffle_matrix_sf_a`.
        gemm1_bias: `[experts here, n]`, fp32 or bf16, in the order of the rows of the weight.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: fp32 `[experts here]`, the constants of SwigluBias.
        gemm2_weights, gemm2_weights_scale, gemm2_bias: the same of `[experts here, hidden, intermediate_size]`.
        output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: fp32 `[experts here]`: factors of the
            first product with and without the global scale of activated values, and of the second; None means 1.
        num_experts, top_k: of all ranks; at most 512 and 32.
        n_group, topk_group: groups of experts, for DeepSeekV3 alone; None or 1 means none.
        intermediate_size: outputs of the activation.
        local_expert_offset, local_num_experts: the experts whose weights are here; the result is a partial sum.
        routed_scaling_factor: factor of the weights of DeepSeekV3 and MiniMax2; None means 1.
        routing_method_type: a `RoutingMethodType`.
        per_token_scale: None.
        do_finalize: False leaves the weighted sum to the caller.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.
        tune_max_num_tokens: accepted; kernels are chosen by size.
        activation_type: an `ActivationType`.
        norm_topk_prob: whether SigmoidRenorm divides by the sum of the weights; without effect on other methods.
        routing_replay_out: int16 `[tokens or more, top_k]`; receives the chosen experts.
        output: `[tokens, hidden]`, bf16; allocated if None.
        num_fused_shared_experts: as for `trtllm_fp8_block_scale_moe`.
        valid_hidden_size, valid_intermediate_size: accepted; padding of weights is zeros.
        hidden_states_scale_layout: None or layout_linear.

    Returns:
        `[output]`; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: per_token_scale is given.
    """
    shared = shared_experts(num_fused_shared_experts, num_experts, local_num_experts)
    groups = (num_experts, top_k, n_group, topk_group, routed_scaling_factor)
    method = (routing_method_type, norm_topk_prob, routing_replay_out)
    routed = route(p, routing_logits, routing_bias, *groups, *method, in_bf16=not do_finalize, shared=shared)
    up = Projection(gemm1_weights, gemm1_weights_scale, gemm1_bias)
    down = Projection(gemm2_weights, gemm2_weights_scale, gemm2_bias)
    activation = activation_of(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    local = (intermediate_size, local_expert_offset, local_num_experts + shared)
    call = LayerCall(num_experts + shared, *local, do_finalize, output)
    scales = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    more: Any = {"per_token_scale": per_token_scale, "scale_layout": hidden_states_scale_layout}
    x, x_scale = hidden_states, hidden_states_scale
    return _run(p, routed, x, x_scale, up, down, activation, scales, call, **more)


@fi_api
@plans_launches("output", by="hidden_states", tokens=TOKENS | {"hidden_states_scale": 0})
def trtllm_fp4_block_scale_routed_moe(
    p: Launches,
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """As `trtllm_fp4_block_scale_moe`, with experts that the caller has chosen.

    Args:
        topk_ids: int32 `[tokens, top_k]`, `expert << 16 | bits of the weight in bf16`; or a tuple of ids and weights.
        gemm1_lora_delta: `[tokens, top_k, n]`, bf16, contiguous: is added to the first product before the activation;
            the gate's columns first, then those of the linear projection (`bgmv_moe_gemm1_lora_delta`).
        num_fused_shared_experts: experts after num_experts; topk_ids lists them for the tokens that use them.
        others: as for `trtllm_fp4_block_scale_moe`; those about routing are accepted.

    Returns:
        `[output]`; without do_finalize `[rows [tokens * top_k, hidden], weights [tokens, top_k] bf16, positions
        [tokens * top_k] int32]`, where position t * top_k + j is the row of the j-th expert of token t, or -1.
        With gemm1_lora_delta `[output, positions, activated [tokens * top_k, inter]]`, and without do_finalize the
        activated values after the three: rows of `bgmv_moe_gemm2_lora_delta`.

    Raises:
        ValueError: A shape, layout, device or number does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: per_token_scale is given.
    """
    shared = shared_experts(num_fused_shared_experts, num_experts, local_num_experts)
    up = Projection(gemm1_weights, gemm1_weights_scale, gemm1_bias)
    down = Projection(gemm2_weights, gemm2_weights_scale, gemm2_bias)
    activation = activation_of(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    local = (intermediate_size, local_expert_offset, local_num_experts + shared)
    call = LayerCall(num_experts + shared, *local, do_finalize, output, gemm1_lora_delta)
    scales = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    more: Any = {"per_token_scale": per_token_scale, "scale_layout": hidden_states_scale_layout}
    x, x_scale = hidden_states, hidden_states_scale
    return _run(p, unpacked(topk_ids, top_k, shared), x, x_scale, up, down, activation, scales, call, **more)
