"""Declares the operators of block quantization, and their kernel entries."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values

# How the scale of a block is computed and stored: enum ScaleFormat of block_quantize.h.
E4M3_SCALE, UE8M0_SCALE, FLOAT_SCALE, POWER_OF_TWO_SCALE = range(4)


class _Config(NamedTuple):
    aligned: bool  # rows start at multiples of a vector of each tensor


def _quantize_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype, out = DTYPES[axes["dtype"]], "E2m1" if axes["out"] == "e2m1" else DTYPES[axes["out"]].device
    scale = {"e4m3": "kE4m3Scale", "ue8m0": "kUe8m0Scale", "f32": "kFloatScale", "pow2": "kPowerOfTwoScale"}
    arguments = f"{dtype.device}, fi::{out}" if axes["out"] == "e2m1" else f"{dtype.device}, {out}"
    arguments += f", {axes['block']}, fi::{scale[axes['scale']]}, {str(axes['gated']).lower()}"
    entries = tuple(
        Entry(f"block_quantize_{name}", f"block_quantize<{arguments}, {str(aligned).lower()}>", 128, _Config(aligned))
        for name, aligned in (("vectors", True), ("elements", False))
    )
    return Unit("fi/quantization/block_quantize.cuh", "BlockQuantizeParams", entries)


_FORMATS = ("e4m3", "ue8m0", "f32", "pow2")  # by the numbers of scale formats
BLOCK_QUANTIZE = Op(
    name="block_quantize",
    family="quantization",
    arguments="Tensor(a!) out, Tensor(b!) scales, Tensor input, Tensor? global_scale=None, Tensor? mask=None, "
    "int block_size=16, int scale_format=0, int layout=0, bool gated=False, bool inverse_global_scale=False, "
    "bool shuffle=False, float eps=0.0, bool? enable_pdl=None",
    fields={
        "dtype": Field(("f16", "bf16", "f32", "e4m3"), "bf16"),
        "out": Field(("e2m1", "e4m3", "e5m2", "i8"), "e2m1"),
        "block": Field((16, 32, 64, 128, 256), 16),
        "scale": Field(_FORMATS, "e4m3"),
        "gated": Field((False, True), False),
    },
    config=_Config,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _quantize_unit)),
    prebuilt=(
        *(
            {"dtype": dtype, "out": out, "block": block, "scale": scale}
            for dtype in ("f16", "bf16")
            for out, block, scale in (("e2m1", 16, "e4m3"), ("e4m3", 32, "ue8m0"), ("e4m3", 128, "f32"))
        ),
        {"block": 32, "scale": "ue8m0"},
        {"gated": True},
        {"out": "e4m3", "block": 128, "scale": "pow2"},
    ),
)


class _VectorConfig(NamedTuple):
    columns_per_thread: int  # 4: any alignment


def _interleave_unit(axes: Values) -> Unit:
    types, widest = {"u8": ("fi::uint8_t, fi::uint32_t", 16), "bf16": ("fi::uint16_t, fi::uint64_t", 8)}[axes["dtype"]]
    entries = tuple(
        Entry(f"block_scale_interleave_{vec}", f"block_scale_interleave<{types}, {vec // 4}>", 256, _VectorConfig(vec))
        for vec in (widest, 4)
    )
    return Unit("fi/quantization/block_scale_interleave.cuh", "BlockScaleInterleaveParams", entries)


BLOCK_SCALE_INTERLEAVE = Op(
    name="block_scale_interleave",
    family="quantization",
    arguments="Tensor(a!) out, Tensor input",
    axes={"dtype": ("u8", "bf16")},
    config=_VectorConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _interleave_unit)),
    prebuilt=({"dtype": "u8"},),
)


def _dequantize_unit(axes: Values) -> Unit:
    dtype = "E2m1" if axes["input"] == "e2m1" else DTYPES[axes["input"]].device
    types = f"{'fi::' if dtype == 'E2m1' else ''}{dtype}, {DTYPES[axes['out']].device}"
    body = f"block_dequantize<{types}, {str(axes['scale'] == 'ue8m0').lower()}>"
    return Unit(
        "fi/quantization/block_dequantize.cuh", "BlockDequantizeParams", (Entry("block_dequantize", body, 256),)
    )


BLOCK_DEQUANTIZE = Op(
    name="block_dequantize",
    family="quantization",
    arguments="Tensor(a!) out, Tensor input, Tensor scales, Tensor? global_scale=None, int block_size=16, "
    "int scale_format=0, int layout=0",
    fields={
        "input": Field(("e2m1", "e4m3", "e5m2"), "e2m1"),
        "out": Field(("f32", "bf16"), "f32"),
        "scale": Field(("e4m3", "ue8m0"), "e4m3"),
    },
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _dequantize_unit)),
    prebuilt=(
        {"scale": "e4m3"},
        {"scale": "ue8m0"},
        *(
            {"input": dtype, "out": "bf16", "scale": scale}
            for dtype, scale in (("e2m1", "e4m3"), ("e2m1", "ue8m0"), ("e4m3", "ue8m0"))
        ),
    ),
)

block_quantize = operator(BLOCK_QUANTIZE)
block_scale_interleave = operator(BLOCK_SCALE_INTERLEAVE)
block_dequantize = operator(BLOCK_DEQUANTIZE)
