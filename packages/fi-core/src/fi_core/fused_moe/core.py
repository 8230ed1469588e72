"""Orders of the rows and columns of expert weights, as TensorRT-LLM's kernels store them; and `cutlass_fused_moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.fused_moe.cutlass import cutlass_fused_moe
from fi_core.fused_moe.workspace import cutlass_fused_moe_workspace_size
from fi_core.tllm_enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout
from fi_core.utils import get_shuffle_matrix_a_row_indices, get_shuffle_matrix_sf_a_row_indices

if TYPE_CHECKING:
    import torch

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "RoutingMethodType",
    "WeightLayout",
    "_maybe_get_cached_w3_w1_permute_indices",
    "convert_to_block_layout",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_w2_permute_indices_with_cache",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
    "reorder_rows_for_gated_act_gemm",
]


def get_reorder_rows_for_gated_act_gemm_row_indices(x: torch.Tensor) -> torch.Tensor:
    """Returns the indices with which `x[indices]` alternates between rows of the two halves of x.

    Args:
        x: `[m, ...]`, m even: the linear projections, then the gates.

    Returns:
        `[m]`, int64, on the CPU: 0, m / 2, 1, m / 2 + 1, ...

    Raises:
        ValueError: m is odd.
    """
    import torch

    if not x.ndim or x.shape[0] % 2:
        raise ValueError(f"x: an even number of rows is required; got shape {list(x.shape)}")
    return torch.arange(x.shape[0]).view(2, -1).t().reshape(-1)


def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    """Alternates between rows of the two halves of a gated weight: row 2 i is row i, row 2 i + 1 is row m / 2 + i.

    Args:
        x: `[m, ...]`, m even: the linear projections, then the gates.

    Returns:
        As x.

    Raises:
        ValueError: m is odd.
    """
    return x[get_reorder_rows_for_gated_act_gemm_row_indices(x).to(x.device)]


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """Stores blocks of columns one after the other.

    Args:
        input_tensor: `[m, k]`, k a multiple of blockK.
        blockK: columns of a block; kernels take 128 bytes.

    Returns:
        `[k / blockK, m, blockK]`, contiguous.

    Raises:
        ValueError: The shape does not fit.
    """
    if input_tensor.ndim != 2 or blockK < 1 or input_tensor.shape[1] % blockK:
        raise ValueError(
            f"input_tensor: shape [m, k], k a multiple of blockK ({blockK}), is required; got "
            f"{list(input_tensor.shape)}"
        )
    m, k = input_tensor.shape
    return input_tensor.view(m, k // blockK, blockK).transpose(0, 1).contiguous()


def _shuffle_indices(x: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int | None) -> torch.Tensor:
    if num_elts_per_sf is None:
        return get_shuffle_matrix_a_row_indices(x, epilogue_tile_m)
    return get_shuffle_matrix_sf_a_row_indices(x, epilogue_tile_m, num_elts_per_sf)


def _maybe_get_cached_w3_w1_permute_indices(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w3_w1_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """Returns the indices with which `w[indices]` is the first weight of an expert in the order of the kernel.

    Args:
        _cache_permute_indices: a dictionary that keeps the indices of each shape.
        dst_w3_w1_weight: the weight `[m, k]`, or its linear scales.
        epilogue_tile_m: rows of the epilogue tile of the kernel.
        num_elts_per_sf: for scales, the elements that share one; None for the weight.
        is_gated_act_gemm: whether rows of the linear projection and of the gate alternate first.

    Returns:
        `[m]`, int64, on the device of the weight.

    Raises:
        ValueError: The shape does not fit the tile.
    """
    w = dst_w3_w1_weight
    key = ("w3_w1", tuple(w.shape), epilogue_tile_m, num_elts_per_sf, is_gated_act_gemm, w.device)
    found = _cache_permute_indices.get(key)
    if found is None:
        found = _shuffle_indices(w, epilogue_tile_m, num_elts_per_sf)
        if is_gated_act_gemm:
            found = get_reorder_rows_for_gated_act_gemm_row_indices(w)[found]
        found = _cache_permute_indices[key] = found.to(w.device)
    return found


def get_w2_permute_indices_with_cache(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w2_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool | None = None,
) -> torch.Tensor:
    """Returns the indices with which `w[indices]` is the second weight of an expert in the order of the kernel.

    Args:
        _cache_permute_indices: a dictionary that keeps the indices of each shape.
        dst_w2_weight: the weight `[m, k]`, or its linear scales.
        epilogue_tile_m: rows of the epilogue tile of the kernel.
        num_elts_per_sf: for scales, the elements that share one; None for the weight.
        is_gated_act_gemm: accepted; the second weight has the same order after every activation.

    Returns:
        `[m]`, int64, on the device of the weight.

    Raises:
        ValueError: The shape does not fit the tile.
    """
    w = dst_w2_weight
    key = ("w2", tuple(w.shape), epilogue_tile_m, num_elts_per_sf, w.device)
    found = _cache_permute_indices.get(key)
    if found is None:
        found = _cache_permute_indices[key] = _shuffle_indices(w, epilogue_tile_m, num_elts_per_sf).to(w.device)
    return found


def interleave_moe_weights_for_sm90_mixed_gemm(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    """Returns 4-bit weights in the order that `cutlass_fused_moe` reads: rows as they are, contiguous.

    Args:
        weight: `[experts, n, k / 2]`, uint8: two values a byte, an even k in the lower half.
        quant_type: "fp4" (e2m1) or "int4" (signed).

    Returns:
        As weight; itself if it is contiguous.

    Raises:
        ValueError: weight or quant_type is something else.
    """
    if quant_type not in ("fp4", "int4"):
        raise ValueError(f'quant_type must be "fp4" or "int4"; got {quant_type!r}')
    if weight.ndim != 3 or str(weight.dtype) != "torch.uint8":
        raise ValueError(f"weight must be uint8 [experts, n, k / 2]; got {weight.dtype} {list(weight.shape)}")
    return weight.contiguous()


def interleave_moe_scales_for_sm90_mixed_gemm(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Returns the scales of 4-bit weights in the order that `cutlass_fused_moe` reads: as they are, contiguous.

    Args:
        scales: `[experts, n, k / group_size]`, uint8 (ue8m0) for groups of 32, 16 bits for groups of 128.
        group_size: 32 or 128.

    Returns:
        As scales; itself if it is contiguous.

    Raises:
        ValueError: scales or group_size is something else.
    """
    if group_size not in (32, 128):
        raise ValueError(f"group_size must be 32 or 128; got {group_size}")
    if scales.ndim != 3:
        raise ValueError(f"scales must have shape [experts, n, k / {group_size}]; got {list(scales.shape)}")
    return scales.contiguous()


_LEAST_BYTE = 128  # of the stored scales: exponent 1, which is offset 1 of the logical form, is byte 128
_VALUES, _MIDPOINTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of e2m1


def _shifted_codes(device: torch.device) -> torch.Tensor:
    """`[256, 256]`: two e2m1 codes of a byte divided by 2^shift, rounded half away from zero; -0 becomes 0."""
    import torch

    codes = torch.arange(16, device=device)
    values = torch.tensor(_VALUES, dtype=torch.float64, device=device)[codes & 7]
    shifted = values * torch.exp2(-torch.arange(256, dtype=torch.float64, device=device))[:, None]
    rounded = torch.bucketize(shifted, torch.tensor(_MIDPOINTS, dtype=torch.float64, device=device), right=True)
    table = (rounded | (codes & 8)).to(torch.uint8)
    table[:, 8] = 0
    return (table[:, :, None] << 4 | table[:, None, :]).view(256, 256)


def preprocess_moe_weights_for_sm90_mixed_gemm_humming(
    weight: torch.Tensor, raw_scale: torch.Tensor, max_range: int = 11, *, interleave: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepares mxfp4 weights for `cutlass_fused_moe(use_wfp4afp8_humming=True)`, which quantises activations to e4m3.

    An expert's weights are a residual, `2^(lo - 128)`, times 2 to the power of small offsets: with hi the largest scale
    byte of the expert, lo is the smallest byte, but at least `hi - max_range`.

    Args:
        weight: `[experts, n, k / 2]`, uint8: two e2m1 values a byte, an even k in the lower half.
        raw_scale: `[experts, n, k / 32]`, uint8: ue8m0, the exponent plus 127 of each 32 values.
        max_range: 0 to 11.
        interleave: whether the results are for `cutlass_fused_moe`. Its layouts are fi's own, and the weights are exact
            whatever the range of exponents; those below 2^-139 of an expert's largest scale are 0. False: the logical
            form, whose smaller exponents become lo and the values with them, rounded half away from zero.

    Returns:
        weight: uint8 `[experts, n, k / 2]`; scale: uint8 `[experts, n, k / 32]`; residual: fp32 `[experts]`, which
        `cutlass_fused_moe` takes times 64. The logical form means `code * 2^scale * residual`, scale 1 to 12.

    Raises:
        ValueError: a shape, device or max_range does not fit.
        TypeError: weight or raw_scale is not uint8.
    """
    import torch

    for name, x in (("weight", weight), ("raw_scale", raw_scale)):
        if x.dtype is not torch.uint8:
            raise TypeError(f"{name} must be uint8; got {x.dtype}")
    if weight.ndim != 3 or weight.shape[2] % 16:
        raise ValueError(f"weight must have shape [experts, n, k / 2], k a multiple of 32; got {list(weight.shape)}")
    expected = [*weight.shape[:2], weight.shape[2] // 16]
    if list(raw_scale.shape) != expected or raw_scale.device != weight.device:
        raise ValueError(
            f"raw_scale must have shape {expected} on {weight.device}; got {list(raw_scale.shape)} on "
            f"{raw_scale.device}"
        )
    if isinstance(max_range, bool) or max_range not in range(12):
        raise ValueError(f"max_range must be in 0..11; got {max_range}")
    exponents = raw_scale.flatten(1).short()
    if not exponents.numel():
        return weight.clone(), raw_scale.clone(), weight.new_ones(len(weight), dtype=torch.float32)
    lo = torch.maximum(exponents.amin(1), exponents.amax(1) - max_range)
    residual = torch.exp2(lo.float() - 128)
    offset = raw_scale.short() - lo[:, None, None] + 1
    if interleave:
        stored = offset + (_LEAST_BYTE - 1)
        vanishes = (stored < 0).repeat_interleave(16, -1)
        return weight.masked_fill(vanishes, 0), stored.clamp(min=0).byte(), residual
    shifts, codes, table = (1 - offset).clamp(min=0), torch.empty_like(weight), _shifted_codes(weight.device)
    for e, (shift, own) in enumerate(zip(shifts, weight)):  # one by one: indices take 16 times the memory of weights
        codes[e] = table[shift.repeat_interleave(16, -1).int(), own.int()]
    return codes, offset.clamp(min=1).byte(), residual
