"""The dtypes of fi: one row each, used by specs, generated units and messages."""

from __future__ import annotations

import functools
from typing import NamedTuple


class DType(NamedTuple):
    """`short` is the name in specs and URIs, `torch` the attribute of torch, `device` the type in device code; `code`
    and `bits` are those of DLPack.
    """

    short: str
    torch: str
    device: str
    bytes: int
    code: int
    bits: int

    @property
    def word(self) -> int:
        """The dtype as a word of a request in C++."""
        return self.code << 8 | self.bits


F16 = DType("f16", "float16", "__half", 2, 2, 16)
BF16 = DType("bf16", "bfloat16", "__nv_bfloat16", 2, 4, 16)
F32 = DType("f32", "float32", "float", 4, 2, 32)
E4M3 = DType("e4m3", "float8_e4m3fn", "__nv_fp8_e4m3", 1, 10, 8)
E5M2 = DType("e5m2", "float8_e5m2", "__nv_fp8_e5m2", 1, 12, 8)
E2M1 = DType("e2m1", "float4_e2m1fn_x2", "fi::E2m1", 1, 17, 4)  # of NVFP4: a byte holds two
I8 = DType("i8", "int8", "fi::int8_t", 1, 0, 8)
U8 = DType("u8", "uint8", "fi::uint8_t", 1, 1, 8)
I16 = DType("i16", "int16", "fi::int16_t", 2, 0, 16)
I32 = DType("i32", "int32", "fi::int32_t", 4, 0, 32)
I64 = DType("i64", "int64", "fi::int64_t", 8, 0, 64)
BOOL = DType("bool", "bool", "bool", 1, 6, 8)

DTYPES = {d.short: d for d in (F16, BF16, F32, E4M3, E5M2, E2M1, I8, U8, I16, I32, I64, BOOL)}
_BY_WORD = {d.word: d.short for d in DTYPES.values()}
_FAMILIES = {0: "int", 1: "uint", 2: "float", 5: "complex"}  # DLPack's codes of dtypes that no op takes
_BY_TORCH = {f"torch.{d.torch}": d.short for d in DTYPES.values()}


@functools.cache
def short_name(dtype: object) -> str:
    """The spec name of a torch dtype (`torch.bfloat16` -> "bf16"); other dtypes keep their torch name."""
    return _BY_TORCH.get(str(dtype), str(dtype))


def name_of_word(word: int) -> str:
    """The spec name of the dtype that a word of a request stands for; torch's name of one that has none."""
    code, bits = divmod(word, 256)
    return _BY_WORD.get(word) or f"torch.{_FAMILIES.get(code, f'dtype of code {code} and bits ')}{bits}"
