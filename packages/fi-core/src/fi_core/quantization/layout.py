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
