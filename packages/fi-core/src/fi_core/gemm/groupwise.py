"""Products of fp8 operands that have a scale for every 128 values of k: one problem, groups of rows, masked batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fi_core.compat.backend import get_compute_capability
from fi_core.gemm import trace
from fi_core.gemm.backends import on_hopper, takes_backends
from fi_core.gemm.dense import is_fp8, output
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api
from fi_core.quantization.ops import FLOAT_SCALE, block_quantize

if TYPE_CHECKING:
    from typing import Any

    import torch

_BLOCK = 128
_MODES = ("K", "MN")  # which dimension of scales is contiguous
_SCALE_ROWS = {(1, _BLOCK, _BLOCK): 1, (_BLOCK, _BLOCK, _BLOCK): _BLOCK}  # of a, by scale_granularity_mnk
Shape = tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _check_shapes(
    a: Shape, b: Shape, a_scale: Shape, b_scale: Shape, mode: str, granularity: tuple[int, int, int], groups: bool
) -> None:
    """Raises unless the shapes are those of a product with blocks of k; once for each combination."""
    for name, shape in (("a", a), ("b", b)):
        if len(shape) < 2:
            raise ValueError(f"{name} must have at least two dimensions; got {list(shape)}")
    k, (n, k_of_b) = a[-1], b[-2:]
    if k % _BLOCK:
        raise ValueError(f"a must have shape [.., k] with k a multiple of {_BLOCK}; got {list(a)}")
    if k_of_b != k:
        raise ValueError(f"b must have shape [.., n, k] with k = {k}; got {list(b)}")
    if mode not in _MODES:
        raise ValueError(f'scale_major_mode must be "K" or "MN"; got {mode!r}')
    known = list(_SCALE_ROWS)[: 1 if groups else 2]
    if tuple(granularity) not in known:
        raise ValueError(f"scale_granularity_mnk must be {' or '.join(map(str, known))}; got {granularity}")
    rows = _ceil(a[-2], granularity[0])
    for name, scale, own in (("a_scale", a_scale, rows), ("b_scale", b_scale, _ceil(n, _BLOCK))):
        want = (own, k // _BLOCK) if mode == "K" else (k // _BLOCK, own)
        if tuple(scale[-2:]) != want:
            text = f"[.., {want[0]}, {want[1]}] for mode {mode!r}"
            raise ValueError(f"{name} must have shape {text}; got {list(scale)}")


def _multiply(
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    mode: str,
    granularity: tuple[int, int, int],
    groups: bool = False,
    **more: Any,
) -> torch.Tensor:
    """Checks and computes a product; more: arguments of the op that name the groups."""
    try:
        scale_rows = _SCALE_ROWS[granularity] if mode in _MODES else 0
        if out is None or out_dtype is not None:
            out = output(a, (*a.shape[:-1], b.shape[-2]), out, out_dtype)
        if not scale_rows or (groups and scale_rows > 1):
            raise ValueError
        gemm(out, a, b, a_scale, b_scale, scales_transposed=mode == "MN", scale_rows=scale_rows, **more)
    except Exception:  # checks cost time, so that they wait for the refusal of the kernel
        try:
            _check_shapes(a.shape, b.shape, a_scale.shape, b_scale.shape, mode, granularity, groups)
        except TypeError:  # of a key that has no hash
            raise TypeError(f"scale_granularity_mnk must be a tuple of three integers; got {granularity!r}") from None
        is_fp8(a, b)
        raise
    return out


def _found_scales(name: str, scale: torch.Tensor, rows: int, blocks: int, contiguous: int) -> torch.Tensor:
    """`[rows, blocks]` of scales in either order. If both are equal, `contiguous` tells which of them (0 or 1) the
    dimension of stride 1 is.
    """
    if rows == blocks and scale.shape == (rows, blocks):
        return scale if scale.stride(contiguous) == 1 else scale.t()
    if scale.shape == (rows, blocks):
        return scale
    if scale.shape == (blocks, rows):
        return scale.t()
    raise ValueError(f"{name} must have shape [{rows}, {blocks}] or [{blocks}, {rows}]; got {list(scale.shape)}")


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@fi_api(trace=trace.GROUPWISE)
@takes_backends("cutlass", "trtllm", "cutile", "auto")
def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cutlass",
) -> torch.Tensor:
    """Computes `out[i, j] = sum over blocks t of k of a_scale[i, t] * b_scale[j / 128, t] * (a[i, t] . b[j, t])`.

    Args:
        a: `[m, k]`, e4m3 or e5m2; k is a multiple of 128, rows may be strided. Any m works, 0 too.
        b: `[n, k]`, e4m3 or e5m2, but not both e5m2.
        a_scale: fp32; mode "K": `[m, k / 128]`, "MN": `[k / 128, m]`. With granularity (128, 128, 128) one for each 128
            rows: `[ceil(m / 128), k / 128]`.
        b_scale: fp32; mode "K": `[ceil(n / 128), k / 128]`, "MN": `[k / 128, ceil(n / 128)]`.
        scale_major_mode: "K" or "MN". None is for backend "trtllm", which takes either order by shape; of square scales
            m is the contiguous dimension of a_scale, and k that of b_scale.
        mma_sm: 1 or 2; accepted as a hint for other GPUs.
        scale_granularity_mnk: (1, 128, 128) or (128, 128, 128).
        out: `[m, n]`; rows may be strided. Allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        backend: a name of FlashInfer; all of them select the kernels of this library.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype, device or mode does not fit; the text names the argument.
    """
    if scale_major_mode is None:
        if backend != "trtllm":
            raise ValueError(f'scale_major_mode must be "K" or "MN" for backend {backend!r}; got None')
        blocks = _ceil(a.shape[-1], _BLOCK)
        a_scale = _found_scales("a_scale", a_scale, _ceil(a.shape[0], scale_granularity_mnk[0]), blocks, 0)
        b_scale = _found_scales("b_scale", b_scale, _ceil(b.shape[0], _BLOCK), blocks, 1)
        scale_major_mode = "K"
    return _multiply(out, out_dtype, a, b, a_scale, b_scale, scale_major_mode, scale_granularity_mnk)


@takes_backends()
def gemm_fp8_nt_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `gemm_fp8_nt_groupwise` with one scale for each 128 rows and 128 k of a: granularity (128, 128, 128)."""
    return gemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, scale_major_mode, mma_sm, (128, 128, 128), out, out_dtype, "cutlass"
    )


@fi_api(trace=trace.GROUP_GROUPWISE)
@takes_backends("trtllm", "cutlass", "cutile", "auto")
def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "trtllm",
    segment_alignment: int = 1,
) -> torch.Tensor:
    """As `gemm_fp8_nt_groupwise` for groups of rows: rows `m_indptr[g] .. m_indptr[g + 1] - 1` of a meet `b[g]`.

    Args:
        a: `[cum_m, k]`, e4m3 or e5m2; k is a multiple of 128.
        b: `[groups, n, k]`.
        a_scale: fp32; mode "K": `[cum_m, k / 128]`, "MN": `[k / 128, cum_m]`.
        b_scale: fp32; mode "K": `[groups, ceil(n / 128), k / 128]`, "MN": `[groups, k / 128, ceil(n / 128)]`.
        m_indptr: `[groups + 1]`, int32. Groups may be empty and of any size. Rows of no group are not written.
        scale_granularity_mnk: (1, 128, 128).
        scale_major_mode: "K" or "MN".
        mma_sm, segment_alignment: accepted as hints for other GPUs.
        out: `[cum_m, n]`; allocated if None.
        out_dtype, backend: as for `gemm_fp8_nt_groupwise`.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype, device or mode does not fit; the text names the argument.
    """
    return _multiply(
        out, out_dtype, a, b, a_scale, b_scale, scale_major_mode, scale_granularity_mnk, True, m_indptr=m_indptr
    )


@fi_api(trace=trace.GROUP_DEEPGEMM)
@takes_backends()
def group_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `gemm_fp8_nt_groupwise` where row i of a meets `b[m_indices[i]]`, the contiguous layout of DeepGEMM.

    Args:
        a: `[m, k]`, e4m3; k is a multiple of 128.
        b: `[groups, n, k]`, e4m3.
        a_scale: `[m, k / 128]`, fp32.
        b_scale: `[groups, ceil(n / 128), k / 128]`, fp32.
        m_indices: `[m]`, int32. It is the same for each 128 rows, counted from 0, or -1, which marks rows whose result
            is not defined.
        scale_granularity_mnk: (1, 128, 128).
        out: `[m, n]`; allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    return _multiply(out, out_dtype, a, b, a_scale, b_scale, "K", scale_granularity_mnk, True, m_indices=m_indices)


@fi_api(trace=trace.BATCH_DEEPGEMM)
@takes_backends("deepgemm", "auto")
def batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "deepgemm",
) -> torch.Tensor:
    """As `gemm_fp8_nt_groupwise` for the first `masked_m[g]` rows of each `a[g]`, the masked layout of DeepGEMM.

    Args:
        a: `[groups, m, k]`, e4m3; k is a multiple of 128.
        b: `[groups, n, k]`, e4m3.
        a_scale: `[groups, m, k / 128]`, fp32, with any strides.
        b_scale: `[groups, ceil(n / 128), k / 128]`, fp32.
        masked_m: `[groups]`, int32: rows that exist. Other rows of out are not written.
        expected_m: the likely number of rows of a group; it decides the tile shape, not the result.
        scale_granularity_mnk: (1, 128, 128).
        out: `[groups, m, n]`; allocated if None.
        out_dtype: bf16, fp16 or fp32; None means that of out, or bf16.
        backend: "deepgemm" or "auto"; both select the kernels of this library.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    if masked_m is None:
        raise TypeError("masked_m must be a torch.Tensor; got None")
    more = {"masked_m": masked_m, "expected_m": expected_m}
    return _multiply(out, out_dtype, a, b, a_scale, b_scale, "K", scale_granularity_mnk, True, **more)


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of x `[m, k]`, and the fp32 scales `[m, k / 128]` that give it back: largest magnitude / 448."""
    import torch

    quantized = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((x.shape[0], x.shape[1] // _BLOCK), dtype=torch.float32)
    block_quantize(quantized, scale, x, block_size=_BLOCK, scale_format=FLOAT_SCALE)
    return quantized, scale


@fi_api(trace=trace.BLOCKSCALE_SM90)
@on_hopper
def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes `input @ weight.T` in fp8 with a scale for every 128 k, on Hopper and on CPUs.

    bf16 operands are converted to e4m3: `scale = max|x| / 448` of 128 values, `q = round(x / scale)`. NaN does not
    count for a scale and stays NaN; of a block with an infinity all results are NaN.

    Args:
        input: `[m, k]`, bf16 or e4m3; k is a multiple of 128.
        weight: `[n, k]`, e4m3, or bf16 if input is bf16; n is a multiple of 64.
        input_scale: fp32, for e4m3 input only: `[m, k / 128]`, or `[k / 128, ld]` with ld >= m, as kernels store it. Of
            square scales the former is read.
        weight_scale: fp32, for e4m3 weight only: `[n, k / 128]` or `[ceil(n / 128), k / 128]`.
        out: `[m, n]`; allocated if None.
        out_dtype: bf16 or fp16; None means that of out, or bf16.

    Returns:
        out.

    Raises:
        ValueError: A shape, dtype, scale or device does not fit; the text names the argument.
    """
    import torch

    if input.is_cuda and get_compute_capability(input.device) != (9, 0):
        raise ValueError("input must be on a Hopper GPU (sm_90) or a CPU; gemm_fp8_nt_groupwise runs on others")
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1] or input.shape[1] % _BLOCK:
        raise ValueError(
            f"input must have shape [m, k] and weight [n, k], k divisible by block size {_BLOCK}; got "
            f"{list(input.shape)} and {list(weight.shape)}"
        )
    if weight.shape[0] % 64:
        raise ValueError(f"weight must have shape [n, k] with n a multiple of 64; got {list(weight.shape)}")
    a, a_scale = _operand("input", input, input_scale)
    b, b_scale = _operand("weight", weight, weight_scale)
    if a is input and b is not weight:
        raise ValueError(
            "weight: FP8 input with BF16 weight is not supported, weight must be float8_e4m3fn too; got bfloat16"
        )
    m, blocks = a.shape[0], a.shape[1] // _BLOCK
    rows = {weight.shape[0], _ceil(weight.shape[0], _BLOCK)}
    if a_scale.shape != (m, blocks):
        if a_scale.ndim != 2 or a_scale.shape[0] != blocks or a_scale.shape[1] < m:
            raise ValueError(
                f"input_scale must have shape [{m}, {blocks}], or [{blocks}, {m} or more]; got {list(a_scale.shape)}"
            )
        a_scale = a_scale[:, :m].t()
    if b_scale.ndim != 2 or b_scale.shape[0] not in rows or b_scale.shape[1] != blocks:
        raise ValueError(f"weight_scale must have shape [{sorted(rows)}, {blocks}]; got {list(b_scale.shape)}")
    if out_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"out_dtype must be bfloat16 or float16; got {out_dtype}")
    out = output(a, (m, weight.shape[0]), out, out_dtype)
    gemm(out, a, b, a_scale, b_scale)
    return out


def _operand(name: str, x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 operand and its scales: those that are given, or of a bf16 operand those that it gets."""
    import torch

    if x.dtype is torch.bfloat16:
        if scale is not None:
            raise ValueError(f"{name}_scale should not be provided for BF16 {name}, which is quantised inside")
        return quantize_blocks(x)
    if x.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"{name} must be FP8 (float8_e4m3fn) or BF16; got {x.dtype}")
    if scale is None:
        raise ValueError(f"{name}_scale is required when {name} is FP8; got None")
    return x, scale
