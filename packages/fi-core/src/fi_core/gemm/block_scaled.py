"""Products of 4-bit and 8-bit operands whose blocks of 16 or 32 values of k share a scale: NVFP4, MXFP4 and MXFP8.

For few tokens on Hopper, one kernel reads fp4 weights and dequantizes them in registers. Otherwise both operands become
bf16, which holds their values exactly, and meet in a bf16 product.
"""

from __future__ import annotations

import functools
import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from fi_core.gemm import block_scaled_trace as trace
from fi_core.gemm.backends import takes_backends
from fi_core.gemm.dense import are_columns, output
from fi_core.gemm.few_bits_op import gemm_few_bits, streams
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api
from fi_core.quantization.fp4_quantization import block_scale_interleave
from fi_core.quantization.layout import SfLayout, scale_shape
from fi_core.quantization.ops import E4M3_SCALE, UE8M0_SCALE, block_dequantize
from fi_core.utils import get_shuffle_matrix_a_row_indices

if TYPE_CHECKING:
    import torch

_EPILOGUE_ROWS = 128  # of the trtllm kernels that shuffled weights are for


class Format(NamedTuple):
    """A format of values and scales."""

    dtype: str
    values: int  # of an element of the tensor
    block: int  # values that share a scale
    scale: int  # the format of scales
    scale_dtypes: tuple[str, ...]


NVFP4 = Format("uint8", 2, 16, E4M3_SCALE, ("uint8", "float8_e4m3fn"))
MXFP4 = Format("uint8", 2, 32, UE8M0_SCALE, ("uint8", "float8_e8m0fnu"))
MXFP8 = Format("float8_e4m3fn", 1, 32, UE8M0_SCALE, ("uint8", "float8_e8m0fnu"))


class Rows(Enum):
    """Whether scales of shape `[.., rows, k / block]` are linear, by what the function's contract says."""

    NEVER = 0
    UNLESS_SWIZZLED = 1  # a shape that fits both layouts is swizzled
    ONLY = 2  # a shape that fits both layouts is refused


class Scaled(NamedTuple):
    """An operand `[.., rows, k]` and its scales as bytes, by their names in the call."""

    values: torch.Tensor
    scales: torch.Tensor
    layout: SfLayout
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.values.shape[-1] * self.format.values)

    def bf16(self) -> torch.Tensor:
        """The values times the scales; bf16 holds them exactly."""
        import torch

        out = self.values.new_empty(self.shape, dtype=torch.bfloat16)
        block, scale = self.format.block, self.format.scale
        block_dequantize(out, self.values, self.scales, block_size=block, scale_format=scale, layout=self.layout.value)
        return out


def fp4_format(block_size: int, use_nvfp4: bool | None = None) -> Format:
    """The format of fp4 operands with this block size; raises ValueError if there is none."""
    found = {16: NVFP4, 32: MXFP4}.get(block_size)
    if found is None or use_nvfp4 not in (None, found is NVFP4):
        raise ValueError(
            "block_size must be 16 with use_nvfp4=True (e4m3 scales), or 32 with use_nvfp4=False (ue8m0 scales); got "
            f"{block_size} and use_nvfp4={use_nvfp4}"
        )
    return found


@functools.lru_cache(maxsize=4096)
def _layout_of(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale_name: str,
    scale_shape_: tuple[int, ...],
    scale_dtype: torch.dtype,
    strides: tuple[int, ...] | None,
    format: Format,
    layout: SfLayout,
    may_be_rows: Rows,
) -> tuple[SfLayout, bool]:
    """The layout of scales, and whether all rows of a batch are one matrix; once for each combination.

    strides: of scales that are not contiguous.
    """
    import torch

    if dtype is not getattr(torch, format.dtype):
        raise ValueError(f"{name} must be {format.dtype}; got {dtype}")
    if str(scale_dtype).removeprefix("torch.") not in format.scale_dtypes:
        raise ValueError(f"{scale_name} must be {' or '.join(format.scale_dtypes)}; got {scale_dtype}")
    *batch, rows, k = (*shape[:-1], shape[-1] * format.values)
    if k == 0 or k % format.block:
        raise ValueError(f"{name} must have a positive k that is a multiple of {format.block}; got {list(shape)}")
    columns = k // format.block
    scales, linear = tuple(scale_shape_), (*batch, rows, columns)
    padded, flat = (*batch, *scale_shape(layout, rows, columns)), math.prod(scale_shape(layout, rows, columns))
    if scales == linear and may_be_rows is not Rows.NEVER:
        if scales != padded or not flat:
            return SfLayout.layout_linear, False
        if may_be_rows is Rows.ONLY:
            raise ValueError(
                f"{scale_name} must not have shape {list(scales)} for {name} {list(shape)}, which fits rows and layout "
                f"{layout.name}; pass it flat in that layout: as `mxfp8_quantize` returns it, or "
                "`block_scale_interleave` of rows"
            )
    if strides is not None:
        raise ValueError(f"{scale_name} must be contiguous in the order of {name}; got strides {strides}")
    if scales in (padded, (*batch, flat)):
        return layout, False
    count = math.prod(batch)
    all_rows = math.prod(scale_shape(layout, count * rows, columns))
    if scales == (all_rows,):
        if all_rows == count * flat and rows * count % scale_shape(layout, 1, 1)[0] and count > 1:
            raise ValueError(
                f"{scale_name} must have shape {list(padded)} for {name} {list(shape)}; {all_rows} flat values fit one "
                "padding of each matrix and one of all rows"
            )
        return layout, True
    rows_form, advice = f"{list(linear)}, or ", ""
    if may_be_rows is Rows.NEVER:
        rows_form, advice = "", "; `block_scale_interleave` makes that of rows"
    raise ValueError(
        f"{scale_name} must have shape {rows_form}{list(padded)} in layout {layout.name}, for {name} {list(shape)}; "
        f"got {list(scales)}{advice}"
    )


def scaled(
    name: str,
    x: torch.Tensor,
    scale_name: str,
    scales: torch.Tensor,
    format: Format,
    layout: SfLayout = SfLayout.layout_128x4,
    may_be_rows: Rows = Rows.UNLESS_SWIZZLED,
) -> Scaled:
    """Checks an operand `[.., rows, k]` and its scales.

    Scales of the padded shape are in `layout`, each matrix of a batch by itself. Flat ones are in `layout`, all rows of
    a batch as one matrix. Those of shape `[.., rows, k / block]` may be linear.
    """
    import torch

    strides = None if scales.is_contiguous() else scales.stride()
    layout, one_matrix = _layout_of(
        name, x.shape, x.dtype, scale_name, scales.shape, scales.dtype, strides, format, layout, may_be_rows
    )
    if strides is not None:
        scales = scales.contiguous()
    if one_matrix and x.ndim > 2:
        x = x.reshape(-1, x.shape[-1])
    return Scaled(x, scales if scales.dtype is torch.uint8 else scales.view(torch.uint8), layout, format)


def _scalar(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
    if x is not None and x.numel() != 1:
        raise ValueError(f"{name} must have one element; got {list(x.shape)}")
    return x if x is None or x.ndim == 1 else x.reshape(1)


def multiply_fp4(out: torch.Tensor, a: torch.Tensor, b: Scaled, alpha: torch.Tensor | None) -> None:
    """out = alpha * a @ b.T for bf16 a."""
    if streams(a, b.values):
        scales = b.scales
        if b.layout is SfLayout.layout_linear:
            scales = block_scale_interleave(scales.view(b.shape[0], -1))
        gemm_few_bits(out, a, b.values, scales, alpha, block_size=b.format.block)
    else:
        gemm(out, a, b.bf16(), alpha)


@functools.lru_cache(maxsize=256)
def _place_of_row(n: int, device: torch.device) -> torch.Tensor:
    """Where `shuffle_matrix_a` puts each row of weights."""
    import torch

    return get_shuffle_matrix_a_row_indices(torch.empty(n, 1), _EPILOGUE_ROWS).argsort().to(device)


def _can_be_shuffled(b: torch.Tensor) -> None:
    if b.shape[1] % _EPILOGUE_ROWS:
        raise ValueError(f'b must have n a multiple of 128 for backend "trtllm"; got {list(b.shape)}')


def _unshuffled(out: torch.Tensor) -> torch.Tensor:
    """out, whose columns are in the order of shuffled weights, with its columns in the order of the weights."""
    return out.copy_(out.index_select(1, _place_of_row(out.shape[1], out.device)))


@fi_api(trace=trace.MM_FP4)
@takes_backends("auto", "cudnn", "trtllm", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x", "cake")
def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool = True,
) -> torch.Tensor:
    """Computes `alpha * (a * a_descale) @ (b * b_descale)` of fp4 operands with fp32 sums.

    Both operands are dequantized to bf16, which holds their values exactly; few tokens stream fp4 weights on Hopper.

    Args:
        a: `[m, k / 2]`, uint8: two e2m1 a byte, an even k in the lower half. k is a multiple of block_size; rows may be
            strided.
        b: `[k / 2, n]`, uint8: the transposed view of weights `[n, k / 2]`.
        a_descale: `[m, k / block_size]`, or in the 128x4 layout `[m padded to 128, k / block_size padded to 4]`; uint8
            or e4m3 (block_size 32: ue8m0). A shape that fits both is read as the latter.
        b_descale: the transposed view of the same for weights.
        alpha: one fp32 element; None means 1.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        out: `[m, n]`; rows may be strided. Allocated if None.
        block_size: 16 (NVFP4: e4m3 scales) or 32 (MXFP4: power-of-two scales).
        use_8x4_sf_layout: a_descale is in the 8x4 layout.
        backend: a name of FlashInfer; all of them select the kernels of this library. "trtllm" takes weights and scales
            from `shuffle_matrix_a` and `shuffle_matrix_sf_a` with an epilogue tile of 128, n a multiple of 128.
        use_nvfp4: whether block_size is 16.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
        BackendSupportedError: There is no backend of this name.
    """
    format = fp4_format(block_size, use_nvfp4)
    are_columns(b, a)
    if backend == "trtllm":
        _can_be_shuffled(b)
    layout = SfLayout.layout_8x4 if use_8x4_sf_layout else SfLayout.layout_128x4
    left = scaled("a", a, "a_descale", a_descale, format, layout)
    right = scaled("b", b.t(), "b_descale", b_descale.t() if b_descale.ndim == 2 else b_descale, format)
    out = output(a, (a.shape[0], b.shape[1]), out, out_dtype)
    multiply_fp4(out, left.bf16(), right, _scalar("alpha", alpha))
    return _unshuffled(out) if backend == "trtllm" else out


_BF16_FP4 = ("cudnn", "cute-dsl", "cute-dsl-native", "blackwell-native", "blackwell-tiled", "auto")


@fi_api(trace=trace.MM_BF16_FP4)
@takes_backends(*_BF16_FP4)
def mm_bf16_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    block_size: int = 16,
    backend: str = "cudnn",
    enable_pdl: bool = True,
) -> torch.Tensor:
    """Computes `alpha * a @ (b * b_descale).T` of bf16 tokens and fp4 weights (W4A16) with fp32 sums.

    Args:
        a: `[m, k]`, bf16; k is a multiple of block_size, rows may be strided. Any m works, 0 too.
        b: `[n, k / 2]`, uint8: two e2m1 a byte, an even k in the lower half; as `prepare_bf16_fp4_weights` returns it.
        b_descale: `[n, k / block_size]`, or in the 128x4 layout `[n padded to 128, k / block_size padded to 4]`; uint8
            or e4m3 (block_size 32: ue8m0). A shape that fits both is read as the latter, which is faster.
        alpha: one fp32 element; None means 1.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        out: `[m, n]`; rows may be strided. Allocated if None.
        block_size: 16 (NVFP4: e4m3 scales) or 32 (MXFP4: power-of-two scales; weights beyond the range of bf16 are
            infinite).
        backend: a name of FlashInfer; all of them select the kernels of this library.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    import torch

    right = scaled("b", b, "b_descale", b_descale, fp4_format(block_size))
    if a.dtype is not torch.bfloat16:
        raise ValueError(f"a must be bfloat16; got {a.dtype}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != right.shape[1]:
        raise ValueError(f"a must have shape [m, {right.shape[-1]}] for b {list(b.shape)}; got {list(a.shape)}")
    out = output(a, (a.shape[0], b.shape[0]), out, out_dtype)
    multiply_fp4(out, a, right, _scalar("alpha", alpha))
    return out


@takes_backends(*_BF16_FP4)
def prepare_bf16_fp4_weights(
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    block_size: int = 16,
    backend: str = "cudnn",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Prepares fp4 weights for `mm_bf16_fp4`, which reads them as they are; only linear scales change their layout.

    Args:
        b: `[n, k / 2]`, uint8.
        b_descale: as for `mm_bf16_fp4`.
        alpha: one fp32 element.
        block_size: 16 or 32.
        backend: as for `mm_bf16_fp4`; all of them read the same weights.

    Returns:
        (b, b_descale, alpha): b and alpha themselves, and the scales in the 128x4 layout.

    Raises:
        ValueError: A shape or dtype does not fit; the text names the argument.
    """
    right = scaled("b", b, "b_descale", b_descale, fp4_format(block_size))
    if right.layout is SfLayout.layout_linear:
        rows, columns = scale_shape(SfLayout.layout_128x4, right.shape[0], right.shape[1] // block_size)
        b_descale = block_scale_interleave(right.scales.view(right.shape[0], -1)).view(rows, columns)
    return b, b_descale, _scalar("alpha", alpha)


def _mxfp8(
    name: str,
    x: torch.Tensor,
    scale_name: str,
    scales: torch.Tensor,
    layout: SfLayout = SfLayout.layout_128x4,
    may_be_rows: Rows = Rows.ONLY,
) -> torch.Tensor:
    return scaled(name, x, scale_name, scales, MXFP8, layout, may_be_rows).bf16().view(x.shape)


def _rows_of(scales: torch.Tensor) -> torch.Tensor:
    """Scales of weights in the order of weights: linear ones come transposed."""
    return scales.mT if scales.ndim > 1 else scales


@fi_api(trace=trace.MM_MXFP8)
@takes_backends("auto", "cutlass", "trtllm", "cute-dsl", "cutedsl_low_latency", "cudnn", "b12x")
def mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes `(a * a_descale) @ (b * b_descale)` of MXFP8 operands, by a bf16 product, which holds them exactly.

    Args:
        a: `[m, k]`, e4m3; k is a multiple of 32, rows may be strided.
        b: `[k, n]`, e4m3: the transposed view of weights `[n, k]`.
        a_descale: powers of two (ue8m0) of 32 values of k, uint8: flat in the 128x4 layout as `mxfp8_quantize` returns
            it, or `[m, k / 32]`, unless that is also the shape of the 128x4 layout.
        b_descale: the same for weights: flat in the 128x4 layout, or a transposed view `[k / 32, n]`.
        out: `[m, n]`; rows may be strided. Allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        use_8x4_sf_layout: a_descale is in the 8x4 layout.
        backend: a name of FlashInfer; all of them select the kernels of this library. "trtllm" takes weights from
            `shuffle_matrix_a(.., 128)`, n a multiple of 128, and flat scales: those of weights from
            `shuffle_matrix_sf_a(.., 128, 32)`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    are_columns(b, a)
    shuffled = backend == "trtllm"
    if shuffled:
        _can_be_shuffled(b)
        for name, scales in (("a_descale", a_descale), ("b_descale", b_descale)):
            if scales.ndim != 1:
                raise ValueError(
                    f'{name} must be flat in a swizzled layout for backend "trtllm"; got {list(scales.shape)}. '
                    "`mxfp8_quantize` makes that of a, `shuffle_matrix_sf_a(.., 128, 32)` that of b"
                )
    layout = SfLayout.layout_8x4 if use_8x4_sf_layout else SfLayout.layout_128x4
    left = _mxfp8("a", a, "a_descale", a_descale, layout)
    right = _mxfp8("b", b.t(), "b_descale", _rows_of(b_descale))
    out = output(a, (a.shape[0], b.shape[1]), out, out_dtype)
    gemm(out, left, right)
    return _unshuffled(out) if shuffled else out


@fi_api(trace=trace.BMM_MXFP8)
@takes_backends("auto", "cudnn", "cutlass")
def bmm_mxfp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes `(A[i] * A_scale[i]) @ (B[i] * B_scale[i])` for each matrix of a batch, as `mm_mxfp8`.

    Args:
        A: `[batch, m, k]`, e4m3; k is a multiple of 32.
        B: `[batch, k, n]`, e4m3: the transposed view of weights `[batch, n, k]`.
        A_scale: uint8 in the 128x4 layout: flat for all rows as `mxfp8_quantize` returns it, or
            `[batch, m padded to 128, k / 32 padded to 4]`; or `[batch, m, k / 32]`, unless that is the same shape.
        B_scale: the same for weights, `[batch, n padded to 128, k / 32 padded to 4]`; rows are a transposed view
            `[batch, k / 32, n]`.
        dtype: of the result, bf16, fp16 or fp32.
        out: `[batch, m, n]`; allocated if None.
        backend: as for `mm_mxfp8`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    are_columns(B, A, "B", batched=True)
    left = _mxfp8("A", A, "A_scale", A_scale, may_be_rows=Rows.UNLESS_SWIZZLED)
    if B_scale.is_contiguous() and B_scale.shape[1:] == scale_shape(
        SfLayout.layout_128x4, B.shape[-1], B.shape[-2] // 32
    ):
        right = _mxfp8("B", B.mT, "B_scale", B_scale, may_be_rows=Rows.NEVER)
    else:
        right = _mxfp8("B", B.mT, "B_scale", _rows_of(B_scale))
    out = output(A, (*A.shape[:-1], B.shape[-1]), out, dtype)
    gemm(out, left, right)
    return out
