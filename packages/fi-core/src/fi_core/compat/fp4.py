"""Packed FP4 tensors, and the row permutations of weights and scales for trtllm-style kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class FP4Tensor:
    """A packed NVFP4 tensor.

    Args:
        data: uint8, two e2m1 values per byte.
        scale: e4m3, one scale per block of 16 values.
        scale_start_index: token index of the first scale, for tensors that share one `scale`.
        original_shape: shape before packing.

    Raises:
        ValueError: data or scale has another dtype.
    """

    data: torch.Tensor
    scale: torch.Tensor
    scale_start_index: int = 0
    original_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        import torch

        if self.data.dtype != torch.uint8:
            raise ValueError(f"data must be torch.uint8, got {self.data.dtype}")
        if self.scale.dtype != torch.float8_e4m3fn:
            raise ValueError(f"scale must be torch.float8_e4m3fn, got {self.scale.dtype}")

    @property
    def dtype(self) -> str:
        return "nvfp4"


def get_shuffle_block_size(epilogue_tile_m: int) -> int:
    """Returns the rows of a permuted block: 32 if the epilogue tile is a multiple of 128, else 16."""
    return 32 if epilogue_tile_m % 128 == 0 else 16


def get_shuffle_matrix_a_row_indices(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Returns the indices with which `input_tensor[indices]` has its rows in the order of the kernel.

    In each block of b rows (`get_shuffle_block_size`), row i moves to `i % s * (b / s) + i / s`, with s = 4 for blocks
    of 32 and s = 2 for blocks of 16.

    Args:
        input_tensor: `[m, k]`, m a multiple of b.
        epilogue_tile_m: rows of the epilogue tile of the kernel.

    Returns:
        `[m]`, int64, on the CPU.

    Raises:
        ValueError: input_tensor has another shape.
    """
    import torch

    block = get_shuffle_block_size(epilogue_tile_m)
    if input_tensor.ndim != 2 or input_tensor.shape[0] % block:
        raise ValueError(
            f"input_tensor: shape [m, k] with m a multiple of {block} is required for epilogue_tile_m "
            f"{epilogue_tile_m}; got {list(input_tensor.shape)}"
        )
    step = block // 8
    rows = torch.arange(input_tensor.shape[0]).view(-1, 8, step)
    return rows.transpose(1, 2).reshape(-1)


def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Returns the same indices for linear scales.

    Args:
        input_tensor: `[m, k / num_elts_per_sf]`, m a multiple of 128, the second dimension of 4.
        epilogue_tile_m: rows of the epilogue tile of the kernel.
        num_elts_per_sf: elements that share a scale, 16 or 32; the permutation does not depend on it.

    Returns:
        `[m]`, int64, on the CPU.

    Raises:
        ValueError: input_tensor has another shape, or num_elts_per_sf another value.
    """
    if num_elts_per_sf not in (16, 32):
        raise ValueError(f"num_elts_per_sf: 16 or 32 is required; got {num_elts_per_sf}")
    if input_tensor.ndim != 2 or input_tensor.shape[0] % 128 or input_tensor.shape[1] % 4:
        raise ValueError(
            "input_tensor: shape [m, c] with m a multiple of 128 and c a multiple of 4 is required; "
            f"got {list(input_tensor.shape)}"
        )
    return get_shuffle_matrix_a_row_indices(input_tensor, epilogue_tile_m)
