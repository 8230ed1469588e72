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
