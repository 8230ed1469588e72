"""All-reduce fused with what follows it: the addition of a residual, RMSNorm, quantization of the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.comm import ops
from fi_core.comm.workspace import AllReduceFusionWorkspace
from fi_core.fused_moe.ops import moe_finalize
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import BackendSupportedError
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = [
    "AllReduceFusionPattern",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "reduce_scatter_fusion",
]


class AllReduceFusionPattern:
    """What follows the sum over the ranks, or precedes it; plain integers, as FlashInfer's.

    AR is the sum, Residual the addition of a residual, RMSNorm its norm; Out: also the norm itself is written.
    MoEReduction and MoEFinalize: the message is the weighted sum of the results of experts.
    """

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout:
    """The layout of block scales; plain integers, as FlashInfer's."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Returns the number of scales of a matrix of scales in the 128x4 layout, with its padding."""
    return round_up(total_row, 128) * round_up(total_column, 4)


_PATTERNS = range(13)
_FORMS = {2: "fp8", 3: "fp4", 4: "fp8", 5: "fp4", 8: "groups", 9: "groups", 10: "rows", 11: "rows", 12: "fp8"}
_WITHOUT_NORM = (2, 3, 8, 10, 12)
_REDUCTION, _FINALIZE = (6,), (7, 12)  # patterns of experts


def _scale_elements(tokens: int, hidden: int, layout: int) -> int:
    rows = {0: round_up(tokens, 128), 1: round_up(tokens, 8)}.get(layout, tokens)
    columns = hidden // 16
    return rows * (columns if layout == QuantizationSFLayout.LINEAR else round_up(columns, 4))


def _scales_like(x: torch.Tensor, form: str, layout: int, group: int) -> torch.Tensor:
    """An empty scale_out of a form of quantization."""
    import torch

    tokens, hidden = x.shape
    if form == "fp4":
        return x.new_zeros(_scale_elements(tokens, hidden, layout), dtype=torch.uint8)
    if form == "rows":
        return x.new_empty(tokens, 1, dtype=torch.float32)
    words = -(-hidden // max(1, group) // 4)
    return x.new_zeros(words, round_up(tokens, 4), dtype=torch.int32)[:, :tokens].t()


def _check_pattern(pattern: int, moe_finalize_backend: str) -> None:
    if pattern not in _PATTERNS:
        raise ValueError(f"pattern: 0 to 12 of AllReduceFusionPattern is required; got {pattern!r}")
    if moe_finalize_backend != "trtllm":
        raise BackendSupportedError(f"moe_finalize_backend: 'trtllm' is required; got {moe_finalize_backend!r}")


def _required(pattern: int, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{name}: a tensor is required by pattern {pattern}; got None")


def _check_form(form: str | None, quant_out: torch.Tensor | None, scale_out: torch.Tensor | None) -> None:
    """Raises TypeError for outputs whose dtypes stand for another form of quantization."""
    if form is None or quant_out is None:
        return
    wanted = "uint8" if form == "fp4" else "float8_e4m3fn"
    if str(quant_out.dtype) != f"torch.{wanted}":
        raise TypeError(f"quant_out: dtype {wanted} is required by the pattern; got {quant_out.dtype}")
    scales = {"rows": "float32", "groups": "int32"}.get(form)
    if scales and scale_out is not None and str(scale_out.dtype) != f"torch.{scales}":
        raise TypeError(f"scale_out: dtype {scales} is required by the pattern; got {scale_out.dtype}")


def _sum_of_experts(
    residual_in: torch.Tensor | None,
    rows: torch.Tensor,
    name: str,
    weights: torch.Tensor | None,
    weights_name: str,
    positions: torch.Tensor | None,
    added: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum of the rows of each token, `[tokens, hidden]`."""
    assert residual_in is not None
    if residual_in.dim() != 2 or not residual_in.shape[1]:
        raise ValueError(f"residual_in: shape [tokens, hidden] is required; got {list(residual_in.shape)}")
    message, (tokens, hidden) = residual_in.new_empty(residual_in.shape), residual_in.shape
    if rows.numel() % hidden or not rows.is_contiguous():
        raise ValueError(f"{name}: contiguous rows of {hidden} elements are required; got shape {list(rows.shape)}")
    if weights is not None and (weights.dim() != 2 or len(weights) != tokens):
        raise ValueError(f"{weights_name}: a row for each of {tokens} tokens is required; got {list(weights.shape)}")
    moe_finalize(message, rows.view(-1, hidden), positions, weights=weights, added=added)
    return message


def _reduced_experts(
    pattern: int,
    residual_in: torch.Tensor | None,
    active: torch.Tensor | None,
    scales: torch.Tensor | None,
    experts: int | None,
    added: torch.Tensor | None,
) -> torch.Tensor:
    """The sum of the experts of kMoEReduction."""
    name, weights_name = "moe_reduction_active_experts_token_input", "moe_reduction_scale_input"
    _required(pattern, **{name: active, weights_name: scales})
    assert active is not None and scales is not None
    _check_scales(scales, experts)
    return _sum_of_experts(residual_in, active, name, scales.t(), weights_name, None, added)


def _check(input: torch.Tensor, workspace: AllReduceFusionWorkspace) -> None:
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise TypeError(f"workspace: an AllReduceFusionWorkspace is required; got {type(workspace).__name__}")
    if input.dim() != 2:
        raise ValueError(f"input: shape [tokens, hidden] is required; got {list(input.shape)}")


def _norm(
    input: torch.Tensor,
    rows: torch.Tensor,
    form: str | None,
    with_norm: bool,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: int | None,
    group: int,
    **common: Any,
) -> torch.Tensor:
    """Reduces `input`, adds the residual, computes and quantizes the norm; outputs have the shape of `rows`."""
    import torch

    tokens, hidden = rows.shape
    if with_norm and norm_out is None:
        norm_out = rows.new_empty(tokens, hidden)
    layout = QuantizationSFLayout.SWIZZLED_128x4 if layout_code is None else layout_code
    if form == "fp4" and quant_out is None:
        quant_out = rows.new_empty(tokens, hidden // 2, dtype=torch.uint8)
    elif form and quant_out is None:
        quant_out = rows.new_empty(tokens, hidden, dtype=torch.float8_e4m3fn)
    if form in (None, "fp8"):
        scale_out = None
    elif scale_out is None:
        scale_out = _scales_like(rows, form, layout, group)
    if form not in ("fp8", "fp4"):
        scale_factor = None
    elif isinstance(scale_factor, (int, float)):
        scale_factor = rows.new_full((1,), scale_factor, dtype=torch.float32)
    quant_out = quant_out if form else None
    _check_form(form, quant_out, scale_out)
    ops.all_reduce(
        input,
        norm_out=norm_out,
        quant_out=quant_out,
        scale_out=scale_out,
        scale=scale_factor,
        layout=layout,
        group=group,
        **common,
    )
    result = quant_out if form else norm_out
    assert result is not None
    return result


def _check_scales(scales: torch.Tensor, experts: int | None) -> None:
    if scales.dim() != 2 or experts not in (None, len(scales)):
        raise ValueError(
            f"moe_reduction_scale_input: shape [moe_reduction_device_num_experts, tokens] is required, with {experts} "
            f"experts; got {list(scales.shape)}"
        )


@fi_api
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool | None = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    """Sums `input` over the ranks of the workspace, and computes what the pattern fuses with the sum.

    `s = sum of input over ranks + residual_in`; `norm = rmsnorm(s, rms_gamma + weight_bias, rms_eps)`. The sum
    is taken in fp32 in the order of ranks and rounded once, so that every rank has the same bits; the norm is computed
    from the rounded s, in fp32, and the quantized norm from the rounded norm. A -0 in a word of zeros may be summed as
    +0.

    The patterns of experts sum, in place of `input`, the weighted sum of the results of this rank's experts, rounded
    once, which a kernel of its own computes: kMoEReduction `sum over e of scale[e, t] * active[e, t] + token[t]`,
    kMoEFinalize `sum over j of expert_scale_factor[t, j] * input[expanded_idx_to_permuted_idx[t, j]] + shared[t]`.

    Every rank calls with the same shapes and pattern, and with the same residual_in and rms_gamma, in the same order.
    Calls can be captured in CUDA graphs. A call waits on the device for the other ranks, up to the timeout of the
    workspace; then its results are NaN, and the next call raises.

    Args:
        input: `[tokens, hidden]`, contiguous; fp16, bf16 or, without quantization, fp32. The number of bytes of a row
            is a multiple of 16. kMoEFinalize: `[rows, hidden]`, contiguous; kMoEReduction does not read it.
        workspace: of `create_allreduce_fusion_workspace`.
        pattern: of `AllReduceFusionPattern`, 0 to 12.
        launch_with_pdl: programmatic dependent launch; None enables it where the hardware has it (sm_90 and later).
        trigger_completion_at_end: False allows the next kernel to be scheduled once this one has sent its data.
        output: like input; receives the sum (kAllReduce).
        residual_out: like input; receives s. May be residual_in.
        norm_out: like input; receives the norm. May be input.
        quant_out: fp8: `[tokens, hidden]`, e4m3; fp4: `[tokens, hidden / 2]`, uint8, two e2m1 values a byte.
        scale_out: fp4: the scale of each block of 16 elements, e4m3 or uint8, in the layout of layout_code. Scales that
            only pad a layout are not written. DynamicFP8: `[tokens, 1]`, fp32, the dequantization scale of a row,
            max(abs(norm)) / 448, at least 1 / (448 * 512). PerTokenGroupFP8Packed: `[tokens, hidden / group / 4]`,
            int32, column-major, as DeepGEMM takes it: a byte is the exponent of a group's scale, 2^(byte - 127), the
            smallest that is not below max(abs(norm)) / 448.
        residual_in: like input.
        rms_gamma: `[hidden]`, dtype of input.
        rms_eps: added to the mean of the squares.
        scale_factor: one fp32 element, or a number, which costs an allocation and a kernel. fp8: the dequantization
            scale, norm = quant_out * scale_factor. fp4: the global scale, 448 * 6 / max(abs(norm)).
        layout_code: of `QuantizationSFLayout`; None: SWIZZLED_128x4.
        use_oneshot: True: each rank sends all rows to all others; False: each row to its owner, who sends the result;
            None: by the size of the message.
        fp32_acc: accepted; sums are always fp32.
        moe_reduction_device_num_experts: the number of experts of this rank; None: not checked.
        moe_reduction_scale_input: `[experts, tokens]`, fp32, bf16 or fp16.
        moe_reduction_active_experts_token_input: `[experts, tokens, hidden]`, or flat; contiguous, like residual_in.
        moe_reduction_token_input: `[tokens, hidden]`, or None.
        expanded_idx_to_permuted_idx: `[tokens, top_k]`, int32: the row of each expert's result; below 0: none.
        expert_scale_factor: `[tokens, top_k]`, fp32, bf16 or fp16; None: ones.
        shared_expert_output: `[tokens, hidden]`, or None.
        block_quant_group_size: elements of a group: 32, 64 or 128, a divisor of hidden; None: 128.
        weight_bias: added to rms_gamma in fp32; 1 for Gemma.
        moe_finalize_backend: "trtllm".

    Returns:
        output, norm_out or quant_out: the last that the pattern computes. Tensors that are not passed are allocated.
        kMoEReduction quantizes if quant_out is passed: e4m3 as fp8, uint8 as fp4.

    Raises:
        ValueError: A shape, stride, device or pattern does not fit, or the workspace is too small.
        TypeError: A dtype does not fit, or a tensor that the pattern reads is missing.
        RuntimeError: An earlier call has failed: a rank did not come or called with other arguments; the text names it.
    """
    _check_pattern(pattern, moe_finalize_backend)
    if pattern != AllReduceFusionPattern.kAllReduce:
        _required(pattern, residual_in=residual_in, rms_gamma=rms_gamma)
    if pattern in _REDUCTION:
        active, scales = moe_reduction_active_experts_token_input, moe_reduction_scale_input
        experts = (active, scales, moe_reduction_device_num_experts)
        input = _reduced_experts(pattern, residual_in, *experts, moe_reduction_token_input)
    elif pattern in _FINALIZE:
        _required(pattern, expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx)
        weights, positions = (expert_scale_factor, "expert_scale_factor"), expanded_idx_to_permuted_idx
        input = _sum_of_experts(residual_in, input, "input", *weights, positions, shared_expert_output)
    _check(input, workspace)
    input, shots = workspace.prepared(input, use_oneshot)
    common = {**workspace.shared, "shots": shots, "enable_pdl": launch_with_pdl}
    common["trigger_at_end"] = trigger_completion_at_end
    if pattern == AllReduceFusionPattern.kAllReduce:
        output = input.new_empty(input.shape) if output is None else output
        ops.all_reduce(input, out=output, **common)
        return output
    form = _FORMS.get(pattern)
    if pattern in _REDUCTION and quant_out is not None:
        form = "fp4" if str(quant_out.dtype) == "torch.uint8" else "fp8"
    return _norm(
        input, input, form, pattern not in _WITHOUT_NORM, norm_out, quant_out, scale_out, scale_factor, layout_code,
        block_quant_group_size or 128, out=residual_out, residual_in=residual_in, weight=rms_gamma, eps=rms_eps,
        weight_bias=weight_bias, **common,
    )  # fmt: skip


@fi_api
def reduce_scatter_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int = AllReduceFusionPattern.kAllReduce,
    launch_with_pdl: bool | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    block_quant_group_size: int = 128,
) -> torch.Tensor:
    """Sums `input` over the ranks and keeps this rank's slice of the rows, with what the pattern fuses with the sum.

    For sequence parallelism: each rank has the residual of its own rows only, and computes their norm;
    `AllToAllWorkspace.all_gather` then gives the norm, or its quantized form, to all ranks. The bits are those of
    `allreduce_fusion`.

    Args:
        input: `[ranks * tokens, hidden]`, contiguous; fp16, bf16 or, without quantization, fp32. The number of bytes of
            a row is a multiple of 16. Rank r keeps rows r * tokens to (r + 1) * tokens.
        workspace: of `create_allreduce_fusion_workspace`, for the ranks of one host.
        pattern: of `AllReduceFusionPattern`, without experts: 0 to 5 and 8 to 11.
        output, residual_out, norm_out, quant_out, scale_out, residual_in: as for `allreduce_fusion`, of `tokens` rows.
        launch_with_pdl, rms_gamma, rms_eps, scale_factor, layout_code, block_quant_group_size: as there.

    Returns:
        output, norm_out or quant_out: the last that the pattern computes. Tensors that are not passed are allocated.

    Raises:
        ValueError: A shape, stride, device or pattern does not fit, or the workspace is too small.
        TypeError: A dtype does not fit, or a tensor that the pattern reads is missing.
        RuntimeError: An earlier call has failed: a rank did not come or called with other arguments; the text names it.
    """
    if pattern not in _PATTERNS or pattern in _REDUCTION + _FINALIZE:
        raise ValueError(f"pattern: one of AllReduceFusionPattern without experts is required; got {pattern!r}")
    _check(input, workspace)
    if not workspace.one_host:
        raise ValueError("workspace: the ranks of one host are required; got several hosts")
    if len(input) % workspace.world_size:
        raise ValueError(
            f"input: rows for each of {workspace.world_size} ranks are required; got shape {list(input.shape)}"
        )
    rows = input[: len(input) // workspace.world_size]
    common = {**workspace.shared, "scatter": True, "enable_pdl": launch_with_pdl}
    if pattern == AllReduceFusionPattern.kAllReduce:
        if output is None:
            output = rows.new_empty(rows.shape)
        ops.all_reduce(input, out=output, **common)
        return output
    _required(pattern, residual_in=residual_in, rms_gamma=rms_gamma)
    return _norm(
        input,
        rows,
        _FORMS.get(pattern),
        pattern not in _WITHOUT_NORM,
        norm_out,
        quant_out,
        scale_out,
        scale_factor,
        layout_code,
        block_quant_group_size,
        out=residual_out,
        residual_in=residual_in,
        weight=rms_gamma,
        eps=rms_eps,
        **common,
    )
