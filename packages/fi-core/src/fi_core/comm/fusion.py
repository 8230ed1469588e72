"""All-reduce fused with what follows it: the addition of a residual, RMSNorm, quantization of the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.comm import ops
from fi_core.comm.workspace import AllReduceFusionWorkspace, shots_of
from fi_core.observe.log import fi_api
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = ["AllReduceFusionPattern", "QuantizationSFLayout", "allreduce_fusion", "compute_fp4_swizzled_layout_sf_size"]


class AllReduceFusionPattern:
    """What follows the sum over the ranks; plain integers, as FlashInfer's.

    AR is the sum, Residual the addition of a residual, RMSNorm its norm; Out: also the norm itself is written.
    """

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7


class QuantizationSFLayout:
    """The layout of block scales; plain integers, as FlashInfer's."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Returns the number of scales of a matrix of scales in the 128x4 layout, with its padding."""
    return round_up(total_row, 128) * round_up(total_column, 4)


_PATTERNS = range(6)
_QUANTIZED = {2: "e4m3", 3: "e2m1", 4: "e4m3", 5: "e2m1"}
_WITHOUT_NORM = (2, 3)


def _scale_elements(tokens: int, hidden: int, layout: int) -> int:
    rows = {0: round_up(tokens, 128), 1: round_up(tokens, 8)}.get(layout, tokens)
    columns = hidden // 16
    return rows * (columns if layout == QuantizationSFLayout.LINEAR else round_up(columns, 4))


@fi_api
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool | None = None,
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
) -> torch.Tensor:
    """Sums `input` over the ranks of the workspace, and computes what the pattern fuses with the sum.

    `s = sum of input over ranks + residual_in`; `norm = rmsnorm(s, rms_gamma, rms_eps)`. The sum is taken in fp32 in
    the order of ranks and rounded once, so that every rank has the same bits; the norm is computed from the rounded s,
    in fp32, and the quantized norm from the rounded norm. A -0 in a word of zeros may be summed as +0.

    Every rank calls with the same shapes and pattern, and with the same residual_in and rms_gamma, in the same order.
    Calls can be captured in CUDA graphs. A call waits on the device for the other ranks, up to the timeout of the
    workspace; then its results are NaN, and the next call raises.

    Args:
        input: `[tokens, hidden]`, contiguous; fp16 or bf16, for kAllReduce also fp32. The number of bytes of a row
            is a multiple of 16.
        workspace: of `create_allreduce_fusion_workspace`.
        pattern: of `AllReduceFusionPattern`, 0 to 5.
        launch_with_pdl: programmatic dependent launch; None enables it where the hardware has it (sm_90 and later).
        trigger_completion_at_end: False allows the next kernel to be scheduled once this one has sent its data.
        output: like input; receives the sum (kAllReduce).
        residual_out: like input; receives s. May be residual_in.
        norm_out: like input; receives the norm. May be input.
        quant_out: fp8: `[tokens, hidden]`, e4m3; fp4: `[tokens, hidden / 2]`, uint8, two e2m1 values a byte.
        scale_out: fp4: the scale of each block of 16 elements, e4m3 or uint8, in the layout of layout_code. Scales that
            only pad a swizzled layout are not written.
        residual_in: like input.
        rms_gamma: `[hidden]`, dtype of input.
        rms_eps: added to the mean of the squares.
        scale_factor: one fp32 element, or a number, which costs an allocation and a kernel. fp8: the dequantization
            scale, norm = quant_out * scale_factor. fp4: the global scale, 448 * 6 / max(abs(norm)).
        layout_code: of `QuantizationSFLayout`; None: SWIZZLED_128x4.
        use_oneshot: True: each rank sends all rows to all others; False: each row to its owner, who sends the result;
            None: by the size of the message.
        fp32_acc: accepted; sums are always fp32.

    Returns:
        output, norm_out or quant_out: the last that the pattern computes. Tensors that are not passed are allocated.

    Raises:
        ValueError: A shape, stride, device or pattern does not fit, or the workspace is too small.
        TypeError: A dtype does not fit, or a tensor that the pattern reads is missing.
        RuntimeError: An earlier call has failed: a rank did not come or called with other arguments; the text names it.
    """
    import torch

    if pattern not in _PATTERNS:
        raise ValueError(f"pattern: 0 to 5 of AllReduceFusionPattern is required; got {pattern!r}")
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise TypeError(f"workspace: an AllReduceFusionWorkspace is required; got {type(workspace).__name__}")
    if input.dim() != 2:
        raise ValueError(f"input: shape [tokens, hidden] is required; got {list(input.shape)}")
    shots = shots_of(input.numel() * input.element_size(), workspace.world_size, use_oneshot)
    common = {**workspace.shared, "shots": shots, "enable_pdl": launch_with_pdl}
    common["trigger_at_end"] = trigger_completion_at_end
    if pattern == AllReduceFusionPattern.kAllReduce:
        if output is None:
            output = torch.empty_like(input)
        ops.all_reduce(input, out=output, **common)
        return output
    if residual_in is None or rms_gamma is None:
        missing = "residual_in" if residual_in is None else "rms_gamma"
        raise TypeError(f"{missing}: a tensor is required by pattern {pattern}; got None")
    tokens, hidden = input.shape
    form = _QUANTIZED.get(pattern)
    if pattern not in _WITHOUT_NORM and norm_out is None:
        norm_out = torch.empty_like(input)
    if form == "e4m3" and quant_out is None:
        quant_out = input.new_empty(tokens, hidden, dtype=torch.float8_e4m3fn)
    layout = QuantizationSFLayout.SWIZZLED_128x4 if layout_code is None else layout_code
    if form == "e2m1":
        if quant_out is None:
            quant_out = input.new_empty(tokens, hidden // 2, dtype=torch.uint8)
        if scale_out is None:
            scale_out = input.new_zeros(_scale_elements(tokens, hidden, layout), dtype=torch.uint8)
    if isinstance(scale_factor, (int, float)):
        scale_factor = input.new_full((1,), scale_factor, dtype=torch.float32)
    ops.all_reduce(
        input, out=residual_out, norm_out=norm_out, quant_out=quant_out if form else None,
        scale_out=scale_out if form == "e2m1" else None, residual_in=residual_in, weight=rms_gamma,
        scale=scale_factor if form else None, layout=layout, eps=rms_eps, **common,
    )  # fmt: skip
    result = quant_out if form else norm_out
    assert result is not None
    return result
