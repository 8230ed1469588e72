"""The dtypes of fi: one row each, used by specs, generated units and messages."""

from __future__ import annotations

import functools
from typing import NamedTuple


class DType(NamedTuple):
    """`short` is the name in specs and URIs, `torch` the attribute of torch, `device` the type in device code."""

    short: str
    torch: str
    device: str
    bytes: int


F16 = DType("f16", "float16", "__half", 2)
BF16 = DType("bf16", "bfloat16", "__nv_bfloat16", 2)
F32 = DType("f32", "float32", "float", 4)
E4M3 = DType("e4m3", "float8_e4m3fn", "__nv_fp8_e4m3", 1)
E5M2 = DType("e5m2", "float8_e5m2", "__nv_fp8_e5m2", 1)
E2M1 = DType("e2m1", "float4_e2m1fn_x2", "fi::E2m1", 1)  # of NVFP4: a byte holds two
I8 = DType("i8", "int8", "fi::int8_t", 1)
U8 = DType("u8", "uint8", "fi::uint8_t", 1)
I16 = DType("i16", "int16", "fi::int16_t", 2)
I32 = DType("i32", "int32", "fi::int32_t", 4)
I64 = DType("i64", "int64", "fi::int64_t", 8)
BOOL = DType("bool", "bool", "bool", 1)

DTYPES = {d.short: d for d in (F16, BF16, F32, E4M3, E5M2, E2M1, I8, U8, I16, I32, I64, BOOL)}
_BY_TORCH = {f"torch.{d.torch}": d.short for d in DTYPES.values()}


@functools.cache
def short_name(dtype: object) -> str:
    """The spec name of a torch dtype (`torch.bfloat16` -> "bf16"); other dtypes keep their torch name."""
    return _BY_TORCH.get(str(dtype), str(dtype))
