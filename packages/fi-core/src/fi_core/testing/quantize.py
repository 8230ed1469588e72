"""fp8 quantization with one scale per tile, in plain torch, for inputs and references of scaled GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0  # float8_e4m3fn
_SMALLEST_AMAX = 1e-4


def _tiled(x: torch.Tensor, tile: tuple[int, ...]) -> torch.Tensor:
    """Returns x in fp32, zero-padded to whole tiles, as [n0, t0, n1, t1, ...]."""
    import torch

    if len(tile) != x.ndim:
        raise ValueError(f"tile_shape must have {x.ndim} entries for an input of shape {tuple(x.shape)}, got {tile}")
    padding = [p for size, t in zip(reversed(x.shape), reversed(tile), strict=True) for p in (0, -size % t)]
    padded = torch.nn.functional.pad(x.float(), padding)
    return padded.view([n for size, t in zip(padded.shape, tile, strict=True) for n in (size // t, t)])


def _power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """Returns the smallest power of two that scales amax into the range of fp8."""
    import torch

    return torch.pow(2.0, torch.ceil(torch.log2(amax.clamp(min=_SMALLEST_AMAX) / FP8_MAX)))


def _cast(x: torch.Tensor, tile: tuple[int, ...], epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    tiles = _tiled(x, tile)
    inner = tuple(range(1, tiles.ndim, 2))
    scale = _power_of_two_scale(tiles.abs().amax(dim=inner, keepdim=True))
    padded_shape = [tiles.shape[i] * tiles.shape[i + 1] for i in range(0, tiles.ndim, 2)]
    quantized = (tiles / (scale + epsilon)).reshape(padded_shape)[tuple(slice(size) for size in x.shape)]
    return quantized.to(torch.float8_e4m3fn).contiguous(), scale.reshape(tiles.shape[::2])


def quantize_fp8(
    x: torch.Tensor,
    scale_shape: tuple[int, ...],
    tile_shape: tuple[int, ...],
    scale_major_mode: Literal["K", "MN"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes x to e4m3 with one power-of-two scale per tile: `x = x_fp8 * scale`.

    Args:
        x: tensor of any float dtype.
        scale_shape: expected shape of the scales.
        tile_shape: one extent per dimension of x; the last tile of a dimension may be cut off.
        scale_major_mode: "K": the scales have the dimension order of x; "MN": the last two dimensions are swapped.

    Returns:
        (x_fp8, scale): e4m3 with the shape of x, and fp32 with shape scale_shape.

    Raises:
        ValueError: tile_shape, scale_shape or scale_major_mode does not fit x.
    """
    quantized, scale = _cast(x, tuple(tile_shape), 1e-8)
    scale = _major(scale, scale_major_mode)
    if tuple(scale.shape) != tuple(scale_shape):
        raise ValueError(
            f"scale_shape must be {tuple(scale.shape)} for an input of shape {tuple(x.shape)} in tiles of "
            f"{tuple(tile_shape)} with scale_major_mode={scale_major_mode!r}, got {tuple(scale_shape)}"
        )
    return quantized, scale.contiguous()


def dequantize_fp8(x: torch.Tensor, x_scale: torch.Tensor, scale_major_mode: Literal["K", "MN"]) -> torch.Tensor:
    """Computes `x * scale` in fp32, the inverse of `quantize_fp8`. Tile extents (powers of two) follow from the shapes.

    Args:
        x: fp8 tensor.
        x_scale: one fp32 scale per tile.
        scale_major_mode: "K" or "MN", as for `quantize_fp8`.

    Returns:
        fp32 tensor with the shape of x.
    """
    scale = _major(x_scale, scale_major_mode)
    for dim, (size, tiles) in enumerate(zip(x.shape, scale.shape, strict=True)):
        width = _tile_width(size, tiles)
        scale = scale.repeat_interleave(width, dim).narrow(dim, 0, size)
    return x.float() * scale


def _tile_width(size: int, tiles: int) -> int:
    """Returns the tile width from a dimension and its number of tiles: the power of two that covers `size`."""
    return size if tiles == 1 else 1 << (-(-size // tiles) - 1).bit_length()


def _major(scale: torch.Tensor, mode: str) -> torch.Tensor:
    if mode not in ("K", "MN"):
        raise ValueError(f"scale_major_mode must be 'K' or 'MN', got {mode!r}")
    return scale if mode == "K" else scale.transpose(-2, -1)


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `[m, n]` to e4m3 with one scale per 1 x 128 block.

    Args:
        x: `[m, n]`, any float dtype, n a multiple of 128.

    Returns:
        (x_fp8, scale): `[m, n]`, e4m3, and `[m, n / 128]`, fp32.
    """
    if x.ndim != 2 or x.shape[1] % 128:
        raise ValueError(f"x must be [m, n] with n a multiple of 128, got {tuple(x.shape)}")
    return _cast(x, (1, 128), 0.0)


def per_block_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `[m, n]` to e4m3 with one scale per 128 x 128 block.

    Args:
        x: `[m, n]`, any float dtype.

    Returns:
        (x_fp8, scale): `[m, n]`, e4m3, and `[ceil(m / 128), ceil(n / 128)]`, fp32.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [m, n], got {tuple(x.shape)}")
    return _cast(x, (128, 128), 0.0)
