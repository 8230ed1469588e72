"""Layouts of block scales, and the shapes that follow from them."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch


class SfLayout(Enum):
    """The layout of block scales, with FlashInfer's codes.

    The swizzled layouts consist of tiles of 4 columns and of 128 or 8 rows; rows and columns are padded to whole tiles.
    In the 128x4 layout scale (r, s) of C padded columns is at `r // 128 * C * 128 + s // 4 * 512 + r % 32 * 16 +
    r % 128 // 32 * 4 + s % 4`, in the 8x4 layout at `r // 8 * C * 8 + s // 4 * 32 + r % 8 * 4 + s % 4`.
    """

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


TILE_ROWS = {SfLayout.layout_128x4: 128, SfLayout.layout_8x4: 8}


def scale_shape(layout: SfLayout, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of a matrix, with padding."""
    if layout is SfLayout.layout_linear:
        return rows, columns
    return round_up(rows, TILE_ROWS[layout]), round_up(columns, 4)


def check_scales(name: str, scales: torch.Tensor, shape: tuple[int, ...], layout: SfLayout, size: int = 1) -> None:
    """Raises unless scales of `size` bytes have the shape of their matrices, for as many in another order would be read
    as these.

    Args:
        name: of the argument.
        scales: of any dtype of this size, or viewed as wider integers.
        shape: `[.., rows, blocks]` without padding. Rows of all matrices may be one dimension, and so may what belongs
            to a matrix, or all.
        layout: in which each matrix is padded.
        size: 1 or 2.

    Raises:
        ValueError: the shape is another.
        TypeError: the dtype does not fit.
    """
    *matrices, rows, blocks = shape
    rows, blocks = scale_shape(layout, rows, blocks)
    count, width = math.prod(matrices), scales.dtype.itemsize
    if (scales.dtype.is_floating_point and width != size) or scales.dtype.is_complex or width % size:
        raise TypeError(f"{name} must have elements of {size} bytes, or views of them as integers; got {scales.dtype}")
    got = (*scales.shape[:-1], scales.shape[-1] * width // size) if scales.ndim else ()
    whole = rows * blocks
    if got not in ((*matrices, rows, blocks), (count * rows, blocks), (count, whole), (count * whole,)):
        viewed = f" of {scales.dtype}" if width != size else ""
        raise ValueError(
            f"{name} must have shape {[*matrices, rows, blocks]} in {layout.name}, or be flat; got "
            f"{list(scales.shape)}{viewed}"
        )


def check_scales_of(name: str, scales: torch.Tensor, values: tuple[int, ...], block: int, layout: SfLayout) -> None:
    """The same for the scales of blocks of rows of values `[.., m, k]`, which are one matrix in a swizzled layout."""
    *rows, k = values
    if block > 0 and k % block == 0:  # else the kernel refuses the block
        own = rows if layout is SfLayout.layout_linear else [math.prod(rows)]
        check_scales(name, scales, (*own, k // block), layout)


def layout_of(swizzled: bool, tiles_of_8: bool = False) -> SfLayout:
    """The layout that FlashInfer's flags name."""
    if not swizzled:
        return SfLayout.layout_linear
    return SfLayout.layout_8x4 if tiles_of_8 else SfLayout.layout_128x4


def checked_layout(name: str, layout: SfLayout) -> SfLayout:
    """The layout; raises ValueError, naming the argument, if it is none."""
    if type(layout) is not SfLayout:
        raise ValueError(f"{name}: a member of SfLayout is required; got {layout!r}")
    return layout


def bytes_of(name: str, x: torch.Tensor, kind: str) -> torch.Tensor:
    """x as uint8; raises TypeError, naming the argument, unless it is of uint8 or of torch's dtype `kind`."""
    import torch

    if x.dtype is torch.uint8:
        return x
    if str(x.dtype) != f"torch.{kind}":
        raise TypeError(f"{name}: uint8 or {kind} is required; got {x.dtype}")
    return x.view(torch.uint8)


def matrix_of(name: str, x: torch.Tensor, last: str = "k") -> torch.Tensor:
    """x, of two dimensions or more, as `[rows, k]`."""
    if x.ndim < 2:
        raise ValueError(f"{name}: shape [..., m, {last}] is required; got {list(x.shape)}")
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def in_fp32(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale if scale is None or scale.dtype.itemsize == 4 else scale.float()
