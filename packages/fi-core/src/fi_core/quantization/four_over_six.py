"""NVFP4 whose blocks choose between two scales by their errors ("Four Over Six", arXiv:2512.02010)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from fi_core.quantization.layout import TILE_ROWS, SfLayout, scale_shape

if TYPE_CHECKING:
    import torch

__all__ = ["NVFP44Over6Config", "NVFP44Over6ErrMode", "nvfp4_e4m3_max", "resolve_nvfp4_4over6"]

_BLOCK = 16
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of the magnitudes of e2m1


class NVFP44Over6ErrMode(IntEnum):
    """The error of a block: the sum of absolute errors, or of their squares."""

    MAE = 0
    MSE = 1


@dataclass(frozen=True)
class NVFP44Over6Config:
    """A block of 16 is quantised with the scales `amax / 6` and `amax / 4`; the second is taken if its error is less.

    Args:
        e4m3_max: the largest scale, 448 or 256; the global scale is conventionally `e4m3_max * 6 / max(abs(x))`.
        err_mode: an `NVFP44Over6ErrMode`, or its name.
        err_use_fast_math: False: errors are computed in fp32.

    Raises:
        ValueError: e4m3_max or err_mode is another.
        NotImplementedError: err_use_fast_math is asked for.
    """

    e4m3_max: int = 448
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self) -> None:
        if self.e4m3_max not in (256, 448):
            raise ValueError(f"e4m3_max must be 256 or 448; got {self.e4m3_max!r}")
        try:
            mode = self.err_mode
            found = NVFP44Over6ErrMode[mode.upper()] if isinstance(mode, str) else NVFP44Over6ErrMode(mode)
        except (KeyError, ValueError):
            raise ValueError(f"err_mode must be MAE or MSE; got {self.err_mode!r}") from None
        if self.err_use_fast_math:
            raise NotImplementedError("err_use_fast_math is not supported: leave it out, errors are computed in fp32")
        object.__setattr__(self, "err_mode", found)

    @property
    def err_mode_name(self) -> str:
        """ "MAE" or "MSE"."""
        assert isinstance(self.err_mode, NVFP44Over6ErrMode)
        return self.err_mode.name


def resolve_nvfp4_4over6(setting: object = None) -> NVFP44Over6Config | None:
    """The recipe that an argument `nvfp4_4over6` means; None and False mean none. FlashInfer's variables are not read.

    Raises:
        TypeError: it is neither a recipe nor None.
    """
    if setting is None or setting is False:
        return None
    if not isinstance(setting, NVFP44Over6Config):
        raise TypeError(f"nvfp4_4over6 must be an NVFP44Over6Config or None; got {type(setting).__name__}")
    return setting


def nvfp4_e4m3_max(nvfp4_4over6_config: NVFP44Over6Config | None = None) -> float:
    """The largest scale of a block: 448 without a recipe."""
    return 448.0 if nvfp4_4over6_config is None else float(nvfp4_4over6_config.e4m3_max)


def _codes(x: torch.Tensor) -> torch.Tensor:
    """e2m1 of fp32: to nearest, ties to even, NaN to 6. No constant is a tensor: the host would wait for its copy."""
    size, codes = x.abs(), x.signbit().long() << 3
    for code, middle in enumerate(_MIDPOINTS):
        codes += ~(size < middle if code % 2 else size <= middle)
    return codes


def _values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 of e2m1: the magnitude of code c is max(c / 2, c - 2, 2 c - 8)."""
    import torch

    size = (codes & 7).float()
    return torch.maximum(torch.maximum(size / 2, size - 2), 2 * size - 8) * torch.where(codes > 7, -1.0, 1.0)


def _candidate(
    x: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, largest: int, recipe: NVFP44Over6Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and errors of blocks whose largest magnitude becomes `largest`."""
    import torch

    stored = (scale * amax / largest).clamp(max=float(recipe.e4m3_max)).to(torch.float8_e4m3fn)
    step = stored.float() / scale
    codes = _codes(x / step.where(step != 0, 1.0)[..., None]).where(step[..., None] != 0, 0)
    error = (_values(codes) * step[..., None] - x).abs()
    error = error.square() if recipe.err_mode is NVFP44Over6ErrMode.MSE else error
    return codes, stored.view(torch.uint8), error.sum(-1)


def _scale_of_blocks(x: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """The global scale in a shape that broadcasts to the blocks of x, `[.., m, k / 16]`."""
    import torch

    if global_scale is None:
        return x.new_ones(1, dtype=torch.float32)
    matrices, rows = (1, len(x)) if x.ndim == 2 else x.shape[:2]
    shapes: dict[int, tuple[int, ...]] = {1: (1,), matrices: (matrices, *[1] * (x.ndim - 1))}
    if matrices == 1:
        shapes[rows] = (rows, 1)
    count = global_scale.numel()
    if count not in shapes:
        raise ValueError(
            f"global_scale must have 1 element, or one for each of {matrices} matrices or of the {rows} rows of one; "
            f"got {list(global_scale.shape)}"
        )
    return global_scale.float().view(shapes[count])


def quantize_rows(
    x: torch.Tensor, global_scale: torch.Tensor | None, recipe: NVFP44Over6Config, *, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values `[.., k / 2]` and e4m3 scales `[.., k / 16]`, uint8, of 16-bit or fp32 rows `[.., k]`.

    global_scale: fp32 of one element, of one for each matrix `[b, m, k]`, or of one for each row; None: 1.

    Raises:
        ValueError: k is no multiple of 16, x has another dtype, or global_scale another number of elements.
    """
    import torch

    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"nvfp4_4over6 must be None for {x.dtype}: pass float16, bfloat16 or float32")
    if x.shape[-1] % _BLOCK:
        raise ValueError(f"input must have a multiple of {_BLOCK} columns; got {list(x.shape)}")
    scale = _scale_of_blocks(x, global_scale)
    scale = scale.reciprocal() if inverse else scale
    blocks = x.float().unflatten(-1, (-1, _BLOCK))
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    (codes, stored, error), (other, other_stored, other_error) = (
        _candidate(blocks, amax, scale, largest, recipe) for largest in (6, 4)
    )
    takes = other_error < error
    codes, stored = torch.where(takes[..., None], other, codes).flatten(-2), torch.where(takes, other_stored, stored)
    return (codes[..., ::2] | codes[..., 1::2] << 4).byte(), stored


def laid_out(scales: torch.Tensor, layout: SfLayout) -> torch.Tensor:
    """Linear scales `[.., rows, columns]` in a layout, padded with zeros: `[.., padded rows, padded columns]`."""
    if layout is SfLayout.layout_linear:
        return scales
    rows, columns = scale_shape(layout, *scales.shape[-2:])
    padded = scales.new_zeros(*scales.shape[:-2], rows, columns)
    padded[..., : scales.shape[-2], : scales.shape[-1]] = scales
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, TILE_ROWS[layout])).transpose(-3, -2)
    if layout is SfLayout.layout_128x4:  # row r of a tile lies at r % 32, r // 32
        tiles = tiles.unflatten(-2, (4, 32)).transpose(-3, -2)
    found: torch.Tensor = tiles.reshape(padded.shape)
    return found
