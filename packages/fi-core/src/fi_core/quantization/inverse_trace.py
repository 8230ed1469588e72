"""Descriptions of block_scale_interleave and of the inverse functions: inputs, outputs, work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fi_core.observe.draw import Draw, dtype_of, nbytes
from fi_core.observe.trace import Scalar, Tensor, Work, options, sized
from fi_core.quantization import reference
from fi_core.quantization.description import LAYOUTS, described, global_scale_of
from fi_core.quantization.layout import SfLayout, layout_of, scale_shape
from fi_core.utils import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _dequantize_work(values_per_byte: int) -> Callable[[Mapping[str, Any]], Work]:
    """The work of the inverse: values and scales are read, fp32 is written."""

    def work(arguments: Mapping[str, Any]) -> Work:
        x, scales, *_ = arguments.values()
        return Work(2 * values_per_byte * x.numel(), nbytes(x, scales) + 4 * values_per_byte * x.numel())

    return work


def _interleave_work(arguments: Mapping[str, Any]) -> Work:
    x = arguments["unswizzled_sf"]
    padded = math.prod((*x.shape[:-2], round_up(x.shape[-2], 128), round_up(x.shape[-1], 4)))
    return Work(0, nbytes(x) + padded * x.element_size())


@sized(dtype="uint8", batch_size=2, rows=130, columns=10)
def _make_interleave(draw: Draw, s: Any) -> dict[str, Any]:
    shape = (s.batch_size, s.rows, s.columns)
    return {"unswizzled_sf": draw.integers(0, 255, shape).to(dtype_of(s.dtype))}


BLOCK_SCALE_INTERLEAVE = described(
    "block_scale_interleave",
    (reference.swizzled, reference.interleave_reference),
    _make_interleave,
    ({}, {"dtype": "bfloat16"}, {"rows": 128, "columns": 16}, {"rows": 0}),
    {"unswizzled_sf": Tensor(["batch", "rows", "columns"])},
    {"sf": Tensor(["sf_elements"], dtype_from="unswizzled_sf")},
    _interleave_work,
    "Copies linear block scales to the 128x4 layout, padded with zeros.",
    op="block_scale_interleave",
)


@sized(
    rows=5, columns=96, sf_vec_size=16, ufp8_type=1, is_sf_swizzled_layout=True, is_sf_8x4_layout=False, scaled=False
)
def _make_dequantize(draw: Draw, s: Any) -> dict[str, Any]:
    layout = layout_of(s.is_sf_swizzled_layout, s.is_sf_8x4_layout)
    return {
        "e2m1_tensor": draw.integers(0, 256, (s.rows, s.columns // 2), "uint8"),
        "ufp8_scale_tensor": draw.integers(0, 128, scale_shape(layout, s.rows, s.columns // s.sf_vec_size), "uint8"),
        "global_scale_tensor": global_scale_of(draw) if s.scaled else None,
        **s.named("sf_vec_size", "ufp8_type", "is_sf_swizzled_layout", "is_sf_8x4_layout"),
    }


_SCALES = Tensor(["sf_rows", "sf_columns"], dtype="uint8")
_VALUES = {"output": Tensor(["rows", "columns"], dtype="float32")}
_EXACT = (1e-6, 0.0)  # two roundings of fp32
E2M1_AND_UFP8SF_SCALE_TO_FLOAT = described(
    "e2m1_and_ufp8sf_scale_to_float",
    (reference.linear, reference.e2m1_values, reference.powers, reference.to_float_reference),
    _make_dequantize,
    (
        {},
        {"scaled": True},
        {"rows": 130, "columns": 160, "sf_vec_size": 32, "ufp8_type": 0},
        {"is_sf_swizzled_layout": False},
        {"rows": 13, "is_sf_8x4_layout": True},
    ),
    {
        "e2m1_tensor": Tensor(["rows", "bytes"]),
        "ufp8_scale_tensor": _SCALES,
        "global_scale_tensor": Tensor(["one"], dtype="float32", optional=True),
        **options(int32="sf_vec_size ufp8_type", bool="is_sf_swizzled_layout is_sf_8x4_layout"),
    },
    _VALUES,
    _dequantize_work(2),
    "Converts e2m1 values with block scales to fp32.",
    op="block_dequantize",
    tolerance=_EXACT,
)


def _make_mxfp4_values(draw: Draw, *, rows: int = 5, columns: int = 96, sf_layout: str = "128x4") -> dict[str, Any]:
    layout = SfLayout[f"layout_{sf_layout}"]
    return {
        "a_fp4": draw.integers(0, 256, (rows, columns // 2), "uint8"),
        "a_sf": draw.integers(100, 140, scale_shape(layout, rows, columns // 32), "uint8"),
        "sfLayout": layout,
    }


MXFP4_DEQUANTIZE = described(
    "mxfp4_dequantize",
    (reference.linear, reference.e2m1_values, reference.powers, reference.mxfp4_dequantize_reference),
    _make_mxfp4_values,
    LAYOUTS,
    {
        "a_fp4": Tensor(["rows", "bytes"]),
        "a_sf": _SCALES,
        "sfLayout": Scalar("int32", optional=True),
    },
    _VALUES,
    _dequantize_work(2),
    "Converts e2m1 values with power-of-two scales to fp32.",
    op="block_dequantize",
    tolerance=_EXACT,
)
MXFP4_DEQUANTIZE_HOST = described(
    "mxfp4_dequantize_host",
    (reference.e2m1_values, reference.powers, reference.host_reference),
    lambda draw, *, rows=5, columns=96, group_size=32: {
        "weight": draw.integers(0, 256, (rows, columns // 2), "uint8"),
        "scale": draw.integers(100, 140, (rows, columns // group_size), "uint8"),
        "group_size": group_size,
    },
    ({}, {"group_size": 16}, {"rows": 0}),
    {
        "weight": Tensor(["rows", "bytes"]),
        "scale": _SCALES,
        "group_size": Scalar("int32", optional=True),
    },
    _VALUES,
    _dequantize_work(2),
    "Converts e2m1 values with linear power-of-two scales to fp32.",
    op="block_dequantize",
    tolerance=_EXACT,
)


@sized(rows=5, columns=96, is_sf_swizzled_layout=True)
def _make_mxfp8_values(draw: Draw, s: Any) -> dict[str, Any]:
    layout = SfLayout.layout_128x4 if s.is_sf_swizzled_layout else SfLayout.layout_linear
    return {
        "input": draw.rows(draw.normal((s.rows, s.columns), "float8_e4m3fn")),
        "scale_tensor": draw.integers(100, 140, scale_shape(layout, s.rows, s.columns // 32), "uint8"),
        "is_sf_swizzled_layout": s.is_sf_swizzled_layout,
    }


MXFP8_DEQUANTIZE_HOST = described(
    "mxfp8_dequantize_host",
    (reference.linear, reference.powers, reference.mxfp8_host_reference),
    _make_mxfp8_values,
    ({}, {"rows": 130, "columns": 64}, {"is_sf_swizzled_layout": False}),
    {
        "input": Tensor(["rows", "columns"]),
        "scale_tensor": _SCALES,
        **options(bool="is_sf_swizzled_layout", int32="sf_swizzle_layout"),
    },
    _VALUES,
    _dequantize_work(1),
    "Converts e4m3 values with power-of-two scales to fp32.",
    op="block_dequantize",
    tolerance=_EXACT,
)
