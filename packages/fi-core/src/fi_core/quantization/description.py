"""The parts that descriptions of quantization functions share: inputs, work, template."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Scalar, Tensor, TraceTemplate, Var, Work
from fi_core.quantization.layout import layout_of, scale_shape
from fi_core.utils import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    Sizes = Sequence[Mapping[str, Any]]


_TINY = 2.0**-24
SPECIAL = (float("inf"), float("nan"), float("-inf"), -0.0, 0.0, _TINY, -_TINY, 5.0, 0.25, 3.5)


def rows_of(draw: Draw, shape: Sequence[int], dtype: str, *special: float) -> torch.Tensor:
    """Values of many magnitudes; if nasty, a block of zeros and one with special values, in strided rows."""
    x = draw.normal(shape, dtype)
    if draw.nasty and x.numel() and dtype != "float8_e4m3fn":
        x *= (2.0 ** draw.integers(-12, 6, (*shape[:-1], 1), "int32")).to(x.dtype)
        x.view(-1)[:32] = 0
        draw.special(x, *special)
    return draw.rows(x)


def global_scale_of(draw: Draw, shape: tuple[int, ...] = (1,), scale: float = 40.0) -> torch.Tensor:
    return draw.normal(shape, "float32").abs() + scale


def _scale_bytes(arguments: Mapping[str, Any], shape: Sequence[int], block: int) -> int:
    """Bytes of the scales of matrices, with padding; scales are fp32 if the arguments name a group size."""
    *batch, rows, columns = shape
    if "group_size" in arguments and "x" in arguments:
        return 4 * rows * columns // block
    layout = arguments.get("sfLayout")
    if layout is None:
        swizzled = arguments.get("is_sf_swizzled_layout", True) and "weight" not in arguments
        layout = layout_of(swizzled, arguments.get("is_sf_8x4_layout", False))
    return math.prod((*batch, *scale_shape(layout, rows, columns // block)))


def work_of(block: int, values_per_byte: int, gated: bool = False) -> Callable[[Mapping[str, Any]], Work]:
    """The work of a quantizer: the first argument is read; values and scales are written."""

    def work(arguments: Mapping[str, Any]) -> Work:
        x = next(iter(arguments.values()))
        size = arguments.get("sf_vec_size") or arguments.get("group_size") or block
        columns = round_up(x.shape[-1] // (2 if gated else 1), arguments.get("alignment", size))
        shape = (*x.shape[:-1], columns)
        if "mask" in arguments and values_per_byte == 1:
            shape = (*x.shape[:-1], round_up(columns, 128))
        written = math.prod(shape) // values_per_byte + _scale_bytes(arguments, shape, size)
        return Work(3 * x.numel(), nbytes(x) + written)

    return work


def described(
    name: str,
    helpers: Sequence[Callable[..., Any]],
    make: Callable[..., dict[str, Any]],
    samples: Sizes,
    inputs: Mapping[str, Tensor | Scalar],
    outputs: Mapping[str, Tensor],
    work: Callable[[Mapping[str, Any]], Work],
    description: str,
    *,
    op: str = "block_quantize",
    tolerance: tuple[float, float] = (0.0, 0.0),
    written: Callable[..., Mapping[str, Any]] | None = None,
    others: Sequence[str] = (),
) -> TraceTemplate:
    tensors = (entry for entry in (*inputs.values(), *outputs.values()) if isinstance(entry, Tensor))
    axes = {axis: Var() for entry in tensors for axis in entry.dim_names}
    return TraceTemplate(
        name,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=tuple(helpers),
        op=op,
        make=make,
        samples=samples,
        work=work,
        written=written,
        tolerance=dict.fromkeys(outputs, tolerance),
        others=others,
        description=description,
    )


LAYOUTS = tuple({"rows": 13, "columns": 96, "sf_layout": layout} for layout in ("128x4", "8x4", "linear"))
