"""Descriptions of the quantizers: inputs, outputs, work."""

from __future__ import annotations

from typing import Any

from fi_core.observe.draw import Draw, dtype_of
from fi_core.observe.trace import Scalar, Tensor, options, sized, tensors
from fi_core.quantization import reference
from fi_core.quantization.description import LAYOUTS, SPECIAL, described, global_scale_of, rows_of, work_of
from fi_core.quantization.layout import SfLayout
from fi_core.utils import round_up

_E4M3_SCALED = (reference.e2m1, reference.block_amax, reference.swizzled, reference.e4m3_scaled)
_POWER_SCALED = (reference.e2m1, reference.block_amax, reference.swizzled, reference.exponents)
_MX8 = (reference.block_amax, reference.swizzled, reference.exponents, reference.mxfp8)
_PACKED = tensors({"dtype": "uint8"}, x_q="rows bytes", sf="sf_rows sf_columns")
_SHAPES = ((5, 96), (130, 320), (1, 64), (0, 64), (128, 64))


_LAYOUT = "is_sf_swizzled_layout is_sf_8x4_layout"
_SIZES: dict[str, Any] = {"dtype": "bfloat16", "rows": 5, "columns": 96}


@sized(
    **_SIZES, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True, is_sf_8x4_layout=False, column_major=False
)
def _make_fp4(draw: Draw, s: Any) -> dict[str, Any]:
    shape = (s.columns, s.rows) if s.column_major else (s.rows, s.columns)
    x, global_scale = rows_of(draw, shape, s.dtype, *SPECIAL), None if s.sf_use_ue8m0 else global_scale_of(draw)
    found = {"input": x.mT if s.column_major else x, "global_scale": global_scale}
    return {**found, **s.named("sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout", "is_sf_8x4_layout")}


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
        **tensors(input="rows columns"),
        **tensors({"dtype": "float32", "optional": True}, global_scale="one"),
        **options(int32="sf_vec_size", bool="sf_use_ue8m0 is_global_scale_inversed " + _LAYOUT),
    },
    _PACKED,
    work_of(16, 2),
    "Quantizes blocks of a row to e2m1, with e4m3 or power-of-two scales.",
    others=("nvfp4_4over6",),
)


@sized(**_SIZES, sf_layout="128x4", do_shuffle=False, sf_vec_size=16, global_scale=40.0)
def _make_nvfp4(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "a": rows_of(draw, (s.rows, s.columns), s.dtype, *SPECIAL),
        "a_global_sf": global_scale_of(draw, scale=s.global_scale),
        "sfLayout": SfLayout[f"layout_{s.sf_layout}"],
        **s.named("do_shuffle", "sf_vec_size"),
    }


NVFP4_QUANTIZE = described(
    "nvfp4_quantize",
    (*_E4M3_SCALED, reference.nvfp4_reference),
    _make_nvfp4,
    (*LAYOUTS, {"rows": 128, "columns": 128, "do_shuffle": True}, {"rows": 0, "columns": 32}),
    {
        **tensors(a="rows columns", a_global_sf="one"),
        **options(int32="sfLayout sf_vec_size", bool="do_shuffle"),
    },
    _PACKED,
    work_of(16, 2),
    "Quantizes blocks of 16 elements to e2m1 with e4m3 scales.",
    others=("per_token_activation", "nvfp4_4over6", "expanded_idx_to_permuted_idx", "out_scale"),
)


@sized(**_SIZES, sf_layout="128x4")
def _make_mxfp4(draw: Draw, s: Any) -> dict[str, Any]:
    layout = SfLayout[f"layout_{s.sf_layout}"]
    return {"a": rows_of(draw, (s.rows, s.columns), s.dtype, *SPECIAL), "sfLayout": layout}


MXFP4_QUANTIZE = described(
    "mxfp4_quantize",
    (*_POWER_SCALED, reference.mxfp4_reference),
    _make_mxfp4,
    (*LAYOUTS, {"dtype": "float16", "rows": 3, "columns": 320}, {"rows": 0, "columns": 32}),
    {**tensors(a="rows columns"), **options(int32="sfLayout")},
    _PACKED,
    work_of(32, 2),
    "Quantizes blocks of 32 elements to e2m1 with power-of-two scales.",
)


@sized(**_SIZES, global_scale=40.0, is_sf_swizzled_layout=True, is_sf_8x4_layout=False)
def _make_gated(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "input": draw.rows(draw.normal((s.rows, 2 * s.columns), s.dtype)),
        "global_scale": global_scale_of(draw, scale=s.global_scale),
        **s.named("is_sf_swizzled_layout", "is_sf_8x4_layout"),
    }


SILU_AND_MUL_NVFP4_QUANTIZE = described(
    "silu_and_mul_nvfp4_quantize",
    (*_E4M3_SCALED, reference.silu_reference),
    _make_gated,
    ({}, {"dtype": "float16", "rows": 1, "columns": 64, "is_sf_8x4_layout": True}, {"is_sf_swizzled_layout": False}),
    {
        **tensors(input="rows gated_columns", global_scale="one"),
        **options(int32="sf_vec_size", bool=_LAYOUT),
    },
    _PACKED,
    work_of(16, 2, gated=True),
    "SiLU of the first half of a row times the second half, quantized to e2m1 with e4m3 scales.",
    others=("nvfp4_4over6",),
)


@sized(dtype="bfloat16", batch_size=3, rows=5, columns=96, sf_vec_size=16, global_scale=40.0)
def _make_batched(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "a": rows_of(draw, (s.batch_size, s.rows, s.columns), s.dtype, *SPECIAL),
        "a_global_sf": global_scale_of(draw, scale=s.global_scale),
        "sf_vec_size": s.sf_vec_size,
    }


NVFP4_BATCHED_QUANTIZE = described(
    "nvfp4_batched_quantize",
    (*_E4M3_SCALED, reference.batched_reference),
    _make_batched,
    ({}, {"dtype": "float16", "batch_size": 2, "rows": 130, "columns": 64}),
    {**tensors(a="batch rows columns", a_global_sf="one"), **options(int32="sf_vec_size")},
    tensors({"dtype": "uint8"}, x_q="batch rows bytes", sf="batch sf_elements"),
    work_of(16, 2),
    "Quantizes a batch of matrices to e2m1 with e4m3 scales.",
    others=("nvfp4_4over6",),
)


@sized(dtype="bfloat16", batch_size=3, rows=5, columns=96)
def _make_grouped(draw: Draw, s: Any) -> dict[str, Any]:
    a = rows_of(draw, (s.batch_size, s.rows, s.columns), s.dtype, *SPECIAL)
    return {"a": a, "mask": draw.int32([s.rows] * s.batch_size)}


def _valid_rows(a: Any, mask: Any, a_global_sf: Any = None) -> dict[str, Any]:
    """Values of the valid rows, and scales of the tiles of 128 rows that have one."""
    import torch

    rows = torch.arange(round_up(a.shape[1], 128), device=mask.device).unsqueeze(-1) < mask.clamp(0, a.shape[1])
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
    tensors(a="batch rows columns", mask="batch", a_global_sf="batch"),
    {
        "x_q": Tensor(["rows", "bytes", "batch"], dtype="uint8"),
        "sf": Tensor(_GROUPS, dtype="float8_e4m3fn"),
    },
    work_of(16, 2),
    "Quantizes the valid rows of each group to e2m1 with e4m3 scales.",
    others=("nvfp4_4over6",),
    written=_valid_rows,
)
MXFP8_GROUPED_QUANTIZE = described(
    "mxfp8_grouped_quantize",
    (*_MX8, reference.mxfp8_grouped_reference),
    _make_grouped,
    ({}, {"dtype": "float16", "batch_size": 2, "rows": 130, "columns": 256}),
    tensors(a="batch rows columns", mask="batch"),
    {
        "x_q": Tensor(["rows", "width", "batch"], dtype="float8_e4m3fn"),
        "sf": Tensor(_GROUPS, dtype="uint8"),
    },
    work_of(32, 1),
    "Quantizes the valid rows of each group to e4m3 with power-of-two scales.",
    written=_valid_rows,
)


@sized(**_SIZES, is_sf_swizzled_layout=True, alignment=32)
def _make_mxfp8(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "input": rows_of(draw, (s.rows, s.columns), s.dtype, *SPECIAL, 448.0, 449.0, -896.0),
        **s.named("is_sf_swizzled_layout", "alignment"),
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
        **tensors(input="rows columns"),
        **options(bool="is_sf_swizzled_layout", int32="alignment sf_swizzle_layout"),
    },
    {"x_q": Tensor(["rows", "width"], dtype="float8_e4m3fn"), "sf": Tensor(["sf_elements"], dtype="uint8")},
    work_of(32, 1),
    "Quantizes blocks of 32 elements to e4m3 with power-of-two scales.",
)


@sized(**{**_SIZES, "columns": 256}, group_size=128, dst="float8_e4m3fn", column_major_scales=False, scale_ue8m0=False)
def _make_groups(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "x": rows_of(draw, (s.rows, s.columns), s.dtype, float("nan"), 1e-3, -0.0),
        "group_size": s.group_size,
        "dst_dtype": dtype_of(s.dst),
        **s.named("column_major_scales", "scale_ue8m0"),
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
        **tensors(x="rows columns"),
        "group_size": Scalar("int32"),
        **options(float32="eps", string="dst_dtype", bool="column_major_scales scale_ue8m0"),
    },
    {
        "x_q": Tensor(["rows", "columns"], dtype_from_scalar="dst_dtype"),
        "x_s": Tensor(["rows", "groups"], dtype="float32"),
    },
    work_of(32, 1),
    "Quantizes groups of elements to 8 bits with fp32 scales.",
)
