"""Descriptions of the quantizers: inputs, outputs, work."""

from __future__ import annotations

from typing import Any

from fi_core.observe.draw import Draw, dtype_of
from fi_core.observe.trace import Scalar, Tensor
from fi_core.quantization import reference
from fi_core.quantization.description import LAYOUTS, SPECIAL, described, global_scale_of, rows_of, work_of
from fi_core.quantization.layout import SfLayout
from fi_core.utils import round_up

_E4M3_SCALED = (reference.e2m1, reference.block_amax, reference.swizzled, reference.e4m3_scaled)
_POWER_SCALED = (reference.e2m1, reference.block_amax, reference.swizzled, reference.exponents)
_MX8 = (reference.block_amax, reference.swizzled, reference.exponents, reference.mxfp8)
_PACKED = {"x_q": Tensor(["rows", "bytes"], dtype="uint8"), "sf": Tensor(["sf_rows", "sf_columns"], dtype="uint8")}
_SHAPES = ((5, 96), (130, 320), (1, 64), (0, 64), (128, 64))


def _matrix(name: str) -> dict[str, Tensor]:
    return {name: Tensor(["rows", "columns"])}


def _make_fp4(
    draw: Draw, *, dtype: str = "bfloat16", rows: int = 5, columns: int = 96, sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False, is_sf_swizzled_layout: bool = True, is_sf_8x4_layout: bool = False,
    column_major: bool = False,
) -> dict[str, Any]:  # fmt: skip
    shape = (columns, rows) if column_major else (rows, columns)
    x = rows_of(draw, shape, dtype, *SPECIAL)
    return {
        "input": x.mT if column_major else x,
        "global_scale": None if sf_use_ue8m0 else global_scale_of(draw),
        "sf_vec_size": sf_vec_size,
        "sf_use_ue8m0": sf_use_ue8m0,
        "is_sf_swizzled_layout": is_sf_swizzled_layout,
        "is_sf_8x4_layout": is_sf_8x4_layout,
    }


FP4_QUANTIZE = described(
    "fp4_quantize",
    (*_POWER_SCALED, reference.e4m3_scaled, reference.fp4_reference),
    _make_fp4,
    (
        *({"rows": m, "columns": k, "dtype": dtype} for m, k in _SHAPES for dtype in ("bfloat16", "float16")),
        {"dtype": "float32"},
        {"dtype": "float8_e4m3fn"},
        *(
            {"rows": 13, "columns": 160, "sf_vec_size": 32, "sf_use_ue8m0": ue8m0, **layout}
            for ue8m0 in (False, True)
            for layout in ({}, {"is_sf_swizzled_layout": False}, {"is_sf_8x4_layout": True})
        ),
        {"rows": 64, "columns": 5, "column_major": True},
        {"rows": 64, "columns": 5, "column_major": True, "sf_vec_size": 32, "sf_use_ue8m0": True},
    ),
    {
        **_matrix("input"),
        "global_scale": Tensor(["one"], dtype="float32", optional=True),
        "sf_vec_size": Scalar("int32", optional=True),
        "sf_use_ue8m0": Scalar("bool", optional=True),
        "is_sf_swizzled_layout": Scalar("bool", optional=True),
        "is_sf_8x4_layout": Scalar("bool", optional=True),
        "is_global_scale_inversed": Scalar("bool", optional=True),
    },
    _PACKED,
    work_of(16, 2),
    "Quantizes blocks of a row to e2m1, with e4m3 or power-of-two scales.",
)


def _make_nvfp4(
    draw: Draw, *, dtype: str = "bfloat16", rows: int = 5, columns: int = 96, sf_layout: str = "128x4",
    do_shuffle: bool = False, sf_vec_size: int = 16, global_scale: float = 40.0,
) -> dict[str, Any]:  # fmt: skip
    return {
        "a": rows_of(draw, (rows, columns), dtype, *SPECIAL),
        "a_global_sf": global_scale_of(draw, scale=global_scale),
        "sfLayout": SfLayout[f"layout_{sf_layout}"],
        "do_shuffle": do_shuffle,
        "sf_vec_size": sf_vec_size,
    }


NVFP4_QUANTIZE = described(
    "nvfp4_quantize",
    (*_E4M3_SCALED, reference.nvfp4_reference),
    _make_nvfp4,
    (*LAYOUTS, {"rows": 128, "columns": 128, "do_shuffle": True}, {"rows": 0, "columns": 32}),
    {
        **_matrix("a"),
        "a_global_sf": Tensor(["one"]),
        "sfLayout": Scalar("int32", optional=True),
        "do_shuffle": Scalar("bool", optional=True),
        "sf_vec_size": Scalar("int32", optional=True),
    },
    _PACKED,
    work_of(16, 2),
    "Quantizes blocks of 16 elements to e2m1 with e4m3 scales.",
    others=("per_token_activation", "nvfp4_4over6"),
)


def _make_mxfp4(
    draw: Draw, *, dtype: str = "bfloat16", rows: int = 5, columns: int = 96, sf_layout: str = "128x4"
) -> dict[str, Any]:
    layout = SfLayout[f"layout_{sf_layout}"]
    return {"a": rows_of(draw, (rows, columns), dtype, *SPECIAL), "sfLayout": layout}


MXFP4_QUANTIZE = described(
    "mxfp4_quantize",
    (*_POWER_SCALED, reference.mxfp4_reference),
    _make_mxfp4,
    (*LAYOUTS, {"dtype": "float16", "rows": 3, "columns": 320}, {"rows": 0, "columns": 32}),
    {**_matrix("a"), "sfLayout": Scalar("int32", optional=True)},
    _PACKED,
    work_of(32, 2),
    "Quantizes blocks of 32 elements to e2m1 with power-of-two scales.",
)


def _make_gated(
    draw: Draw, *, dtype: str = "bfloat16", rows: int = 5, columns: int = 96, global_scale: float = 40.0,
    is_sf_swizzled_layout: bool = True, is_sf_8x4_layout: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "input": draw.rows(draw.normal((rows, 2 * columns), dtype)),
        "global_scale": global_scale_of(draw, scale=global_scale),
        "is_sf_swizzled_layout": is_sf_swizzled_layout,
        "is_sf_8x4_layout": is_sf_8x4_layout,
    }


SILU_AND_MUL_NVFP4_QUANTIZE = described(
    "silu_and_mul_nvfp4_quantize",
    (*_E4M3_SCALED, reference.silu_reference),
    _make_gated,
    ({}, {"dtype": "float16", "rows": 1, "columns": 64, "is_sf_8x4_layout": True}, {"is_sf_swizzled_layout": False}),
    {
        "input": Tensor(["rows", "gated_columns"]),
        "global_scale": Tensor(["one"]),
        "sf_vec_size": Scalar("int32", optional=True),
        "is_sf_swizzled_layout": Scalar("bool", optional=True),
        "is_sf_8x4_layout": Scalar("bool", optional=True),
    },
    _PACKED,
    work_of(16, 2, gated=True),
    "SiLU of the first half of a row times the second half, quantized to e2m1 with e4m3 scales.",
)


def _make_batched(
    draw: Draw, *, dtype: str = "bfloat16", batch_size: int = 3, rows: int = 5, columns: int = 96,
    sf_vec_size: int = 16, global_scale: float = 40.0,
) -> dict[str, Any]:  # fmt: skip
    return {
        "a": rows_of(draw, (batch_size, rows, columns), dtype, *SPECIAL),
        "a_global_sf": global_scale_of(draw, scale=global_scale),
        "sf_vec_size": sf_vec_size,
    }


NVFP4_BATCHED_QUANTIZE = described(
    "nvfp4_batched_quantize",
    (*_E4M3_SCALED, reference.batched_reference),
    _make_batched,
    ({}, {"dtype": "float16", "batch_size": 2, "rows": 130, "columns": 64}),
    {
        "a": Tensor(["batch", "rows", "columns"]),
        "a_global_sf": Tensor(["one"]),
        "sf_vec_size": Scalar("int32", optional=True),
    },
    {
        "x_q": Tensor(["batch", "rows", "bytes"], dtype="uint8"),
        "sf": Tensor(["batch", "sf_elements"], dtype="uint8"),
    },
    work_of(16, 2),
    "Quantizes a batch of matrices to e2m1 with e4m3 scales.",
)


def _make_grouped(
    draw: Draw, *, dtype: str = "bfloat16", batch_size: int = 3, rows: int = 5, columns: int = 96
) -> dict[str, Any]:
    a = rows_of(draw, (batch_size, rows, columns), dtype, *SPECIAL)
    return {"a": a, "mask": draw.int32([rows] * batch_size)}


def _valid_rows(a: Any, mask: Any, a_global_sf: Any = None) -> dict[str, Any]:
    """Values of the valid rows, and scales of the tiles of 128 rows that have one."""
    import torch

    rows = torch.arange(round_up(a.shape[1], 128)).unsqueeze(-1) < mask.clamp(0, a.shape[1])
    return {"x_q": rows[: a.shape[1], None], "sf": rows[::128].view(1, 1, -1, 1, 1, len(a))}


_GROUPS = ("tile_rows", "quarters", "row_tiles", "tile_columns", "column_tiles", "batch")
SCALED_FP4_GROUPED_QUANTIZE = described(
    "scaled_fp4_grouped_quantize",
    (*_E4M3_SCALED, reference.grouped_reference),
    lambda draw, *, dtype="bfloat16", batch_size=3, rows=5, columns=96: {
        **_make_grouped(draw, dtype=dtype, batch_size=batch_size, rows=rows, columns=columns),
        "a_global_sf": global_scale_of(draw, (batch_size,)),
    },
    ({}, {"dtype": "float16", "batch_size": 2, "rows": 130, "columns": 64}),
    {
        "a": Tensor(["batch", "rows", "columns"]),
        "mask": Tensor(["batch"]),
        "a_global_sf": Tensor(["batch"]),
    },
    {
        "x_q": Tensor(["rows", "bytes", "batch"], dtype="uint8"),
        "sf": Tensor(_GROUPS, dtype="float8_e4m3fn"),
    },
    work_of(16, 2),
    "Quantizes the valid rows of each group to e2m1 with e4m3 scales.",
    written=_valid_rows,
)
MXFP8_GROUPED_QUANTIZE = described(
    "mxfp8_grouped_quantize",
    (*_MX8, reference.mxfp8_grouped_reference),
    _make_grouped,
    ({}, {"dtype": "float16", "batch_size": 2, "rows": 130, "columns": 256}),
    {"a": Tensor(["batch", "rows", "columns"]), "mask": Tensor(["batch"])},
    {
        "x_q": Tensor(["rows", "width", "batch"], dtype="float8_e4m3fn"),
        "sf": Tensor(_GROUPS, dtype="uint8"),
    },
    work_of(32, 1),
    "Quantizes the valid rows of each group to e4m3 with power-of-two scales.",
    written=_valid_rows,
)


def _make_mxfp8(
    draw: Draw, *, dtype: str = "bfloat16", rows: int = 5, columns: int = 96, is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
) -> dict[str, Any]:  # fmt: skip
    return {
        "input": rows_of(draw, (rows, columns), dtype, *SPECIAL, 448.0, 449.0, -896.0),
        "is_sf_swizzled_layout": is_sf_swizzled_layout,
        "alignment": alignment,
    }


MXFP8_QUANTIZE = described(
    "mxfp8_quantize",
    (*_MX8, reference.mxfp8_reference),
    _make_mxfp8,
    (
        *({"rows": m, "columns": k, "dtype": dtype} for m, k in _SHAPES for dtype in ("bfloat16", "float32")),
        {"dtype": "float16", "rows": 3, "columns": 160, "is_sf_swizzled_layout": False},
        {"alignment": 256},
        {"alignment": 64, "is_sf_swizzled_layout": False},
    ),
    {
        **_matrix("input"),
        "is_sf_swizzled_layout": Scalar("bool", optional=True),
        "alignment": Scalar("int32", optional=True),
        "sf_swizzle_layout": Scalar("int32", optional=True),
    },
    {"x_q": Tensor(["rows", "width"], dtype="float8_e4m3fn"), "sf": Tensor(["sf_elements"], dtype="uint8")},
    work_of(32, 1),
    "Quantizes blocks of 32 elements to e4m3 with power-of-two scales.",
)


def _make_groups(
    draw: Draw, *, dtype: str = "bfloat16", rows: int = 5, columns: int = 256, group_size: int = 128,
    dst: str = "float8_e4m3fn", column_major_scales: bool = False, scale_ue8m0: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "x": rows_of(draw, (rows, columns), dtype, float("nan"), 1e-3, -0.0),
        "group_size": group_size,
        "dst_dtype": dtype_of(dst),
        "column_major_scales": column_major_scales,
        "scale_ue8m0": scale_ue8m0,
    }


PER_TOKEN_GROUP_QUANT_8BIT = described(
    "per_token_group_quant_8bit",
    (reference.block_amax, reference.exponents, reference.group_reference),
    _make_groups,
    (
        *({"dst": name} for name in ("float8_e4m3fn", "float8_e5m2", "int8")),
        *({"dtype": dtype, "group_size": size} for dtype, size in (("float16", 16), ("float32", 32), ("bfloat16", 64))),
        {"column_major_scales": True, "rows": 130, "columns": 512, "group_size": 256},
        {"column_major_scales": True, "scale_ue8m0": True},
        {"rows": 0},
    ),
    {
        **_matrix("x"),
        "group_size": Scalar("int32"),
        "eps": Scalar(optional=True),
        "dst_dtype": Scalar("string", optional=True),
        "column_major_scales": Scalar("bool", optional=True),
        "scale_ue8m0": Scalar("bool", optional=True),
    },
    {
        "x_q": Tensor(["rows", "columns"], dtype_from_scalar="dst_dtype"),
        "x_s": Tensor(["rows", "groups"], dtype="float32"),
    },
    work_of(32, 1),
    "Quantizes groups of elements to 8 bits with fp32 scales.",
)
