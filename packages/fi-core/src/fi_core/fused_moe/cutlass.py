"""cutlass_fused_moe: a layer whose experts the caller has chosen, in the formats of weights that FlashInfer takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.fused_moe import trace
from fi_core.fused_moe.activations import activation_of
from fi_core.fused_moe.expert_lora import adapters_of
from fi_core.fused_moe.formats import check_backend, check_experts, check_ranks, layer_of
from fi_core.fused_moe.launches import compute_layer
from fi_core.fused_moe.layer import TOKENS, TokenExperts
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.launch.plan import Launches, plans_launches
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_WORDS = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")


@fi_api(trace=trace.cutlass)
@plans_launches("output", workspace="workspace_buffer", tokens=TOKENS)
def cutlass_fused_moe(
    p: Launches,
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor] | None = None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: Sequence[int] | None = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: float | None = None,
    situ_beta: float | torch.Tensor | None = None,
    situ_linear_beta: float | torch.Tensor | None = None,
    backend: str = "cutlass",
    lora: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Computes a mixture of experts: `out[t] = sum over j of scales[t, j] fc2_e(act(fc1_e(x[t])))`, e the j-th expert.

    A gated activation is that of the second half of the outputs of fc1 (the gate) and the first half (the linear
    projection): `silu(gate) * linear` by default. The result is the same in every run: experts are added in the order
    of the slots, without atomics. Nothing waits for the device, so calls can be captured in CUDA graphs.

    Formats, by arguments; scales are lists of tensors. Those of blocks have the shape `[e, rows, columns / block]`, in
    the 128x4 layout with both padded; the last two dimensions, or all, may be one, and integers may hold several:

    * 16 bits: fp16 or bf16 input and weights; quant_scales None or empty.
    * fp8 per tensor: e4m3 input and weights; `[fc1_dequant [e], fc2_quant [1], fc2_dequant [e], input_dequant]`, fp32.
      fc1_dequant includes input_dequant, fc2_dequant `1 / fc2_quant`.
    * fp8 with scales of 128 x 128 (use_deepseek_fp8_block_scale): bf16 or fp16 input, quantised here, e4m3 weights;
      `[fc1_scales [e, n / 128, hidden / 128], fc2_scales [e, hidden / 128, inter / 128]]`, fp32.
    * mxfp4 weights, 16-bit input (use_w4_group_scaling): weights and scales through
      `interleave_moe_weights_for_sm90_mixed_gemm` and `interleave_moe_scales_for_sm90_mixed_gemm`; `[fc1, fc2]`.
    * mxfp4 weights, e4m3 activations (use_w4_group_scaling and use_wfp4afp8_humming): 16-bit input, each row of which
      is quantised before either product with the scale `max(abs(row)) / 448`, or with a ue8m0 scale for each 32 values
      (use_mxfp8_act_scaling); weights, scales and residuals of `preprocess_moe_weights_for_sm90_mixed_gemm_humming`:
      `[fc1_scales, fc1_residual * 64, unused, fc2_scales, fc2_residual * 64]`. Products are those of 16 bits.
    * int4 weights, 16-bit input (use_w4_group_scaling and use_packed_weights): groups of 128;
      `[fc1_scales, fc2_scales, fc1_input_scale, fc2_input_scale, fc1_zeros, fc2_zeros, fc1_alpha, fc2_alpha]`.
    * NVFP4 weights, and MXFP8 or MXFP4 weights with MXFP8 input (use_mxfp8_act_scaling): computed with 16-bit
      activations; `[a1_scale, w1_scales, 1 / (a1_scale w1_scale), a2_scale, w2_scales, 1 / (a2_scale w2_scale)]` and
      `[w1_scales, ones, w2_scales, ones]`.

    Args:
        input: `[tokens, hidden]`; fp4: uint8 `[tokens, hidden / 2]`. Any number of tokens works, 0 too.
        token_selected_experts: `[tokens, top_k]`, int32 or int64, of all ranks' experts; others, such as -1, add 0.
        token_final_scales: `[tokens, top_k]`, fp32 or bf16; None means ones.
        fc1_expert_weights: `[e, n, hidden]` of this rank's experts, n = 2 inter for a gated activation, else inter.
        fc2_expert_weights: `[e, hidden, inter]`.
        output_dtype: bf16, fp16 or fp32.
        quant_scales: as above.
        fc1_expert_biases, fc2_expert_biases: `[e, n]` and `[e, hidden]`, fp32 or 16 bits. Of tensor-parallel ranks, the
            first adds the second.
        input_sf: the scales of MXFP8 or NVFP4 input, uint8 `[tokens, hidden / 32]` or `[tokens, hidden / 16]`,
            padded in the 128x4 layout, or flat.
        swiglu_alpha, swiglu_beta, swiglu_limit: fp32 `[e]`, for Swiglu and SwigluBias; any of them selects
            `g sigmoid(alpha g) (u + beta)` with `g = min(gate, limit)` and u the linear projection within +-limit.
            swiglu_limit is also that of SwigluStep, 7 if None.
        tp_size, tp_rank: the slice of inter that the weights hold; the result is a partial sum.
        ep_size, ep_rank: this rank has experts `ep_rank e` to `(ep_rank + 1) e - 1`; the result is a partial sum.
        cluster_size, cluster_rank: 1 and 0.
        output: `[tokens, hidden]`, output_dtype; allocated if None.
        enable_alltoall: the tokens have been dispatched to this rank; changes nothing here.
        min_latency_mode: False.
        tune_max_num_tokens, profile_ids, use_fused_finalize: accepted; kernels are chosen by size.
        backend: "cutlass", which selects the kernels of this library.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.
        activation_type: an `ActivationType`.
        swizzled_input_sf: whether input_sf has the 128x4 layout, or is linear.
        workspace_buffer: uint8 `[bytes]`, memory for what lies between the kernels, of
            `cutlass_fused_moe_workspace_size` or more bytes; no other call may use it at the same time. None: memory
            of torch.
        use_wfp4afp8_humming: e4m3 activations for mxfp4 weights, as above.
        clamped_relu2_limit: the constant of ClampedRelu2.
        situ_beta, situ_linear_beta: constants of Situ (4 and 25), not 0: numbers, or tensors `[1]` or `[e]`.
        lora: an `ExpertLora`: adapters of the experts, each token with its own or none, for 16-bit input. Tokens
            without one get the bits of the call without adapters.

    Returns:
        output.

    Raises:
        ValueError: A shape, device or option does not fit; the text names the argument.
        TypeError: A dtype does not fit.
        NotImplementedError: min_latency_mode or cluster_size is asked for.
        BackendSupportedError: backend is another.
    """
    _check_options(backend, min_latency_mode, cluster_size, cluster_rank)
    constants = (swiglu_alpha, swiglu_beta, swiglu_limit, clamped_relu2_limit, situ_beta, situ_linear_beta)
    activation = activation_of(activation_type, *constants, fc1_expert_weights.shape[0], _WORDS)
    weights = (fc1_expert_weights, fc2_expert_weights, quant_scales or ())
    formats: dict[str, Any] = {"fp8_block_scale": use_deepseek_fp8_block_scale}
    formats |= {"w4_group_scaling": use_w4_group_scaling, "mxfp8_activations": use_mxfp8_act_scaling}
    formats |= {"packed_weights": use_packed_weights, "e4m3_activations": use_wfp4afp8_humming}
    layer = layer_of(p, input, *weights, output_dtype, input_sf, swizzled_input_sf, **formats)
    check_experts(layer, activation, token_selected_experts, token_final_scales, tp_size, tp_rank, ep_size, ep_rank)
    output = _output(p, output, layer.x.shape, output_dtype, input.device)
    up, down_bias = layer.up._replace(bias=fc1_expert_biases), fc2_expert_biases if tp_rank == 0 else None
    layer, experts = layer._replace(up=up, down=layer.down._replace(bias=down_bias)), len(up.weight)
    routed = TokenExperts(token_selected_experts, token_final_scales, ep_rank * experts)
    if layer.x.shape[0]:
        adapters = None if lora is None else adapters_of(lora, layer, activation)
        compute_layer(p, output, layer, activation, experts * ep_size, routed, lora=adapters)
    return output


def _check_options(backend: str, min_latency_mode: bool, cluster_size: int, cluster_rank: int) -> None:
    """Raises BackendSupportedError, NotImplementedError and ValueError."""
    check_backend(backend)
    ranks = None if cluster_size == 1 else cluster_size
    advice = "leave it out: kernels are chosen by the number of tokens"
    refuse(advice, min_latency_mode=min_latency_mode, cluster_size=ranks)
    check_ranks(cluster=(cluster_size, cluster_rank))


def _output(
    p: Launches, output: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor in place of None. Raises ValueError unless the output has this shape, dtype and device."""
    if output is None:
        return p.result(shape, dtype)
    if output.shape != shape or output.dtype is not dtype or output.device != device:
        raise ValueError(
            f"output must be {dtype} of shape {list(shape)} on {device}; got {output.dtype} {list(output.shape)} on "
            f"{output.device}"
        )
    return output
