"""Declares gemm_fp4 and gemm_bf16_fp8: products of few bf16 tokens and weights of 4 or 8 bits, which become bf16 in
registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.resolve.ahead import composition
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch

_COPY_BYTES = 16  # that addresses and strides of operands are multiples of
_TOKENS = (8, 16)  # of a tile
FEW_TOKENS = 128  # of a product that streams fp4 weights; for more they are dequantized first


class GemmFp4Config(NamedTuple):
    tokens: int  # of a tile


class GemmBf16Fp8Config(NamedTuple):
    tokens: int  # of a tile


def _unit_of(name: str, weights: str, out: str, config: GemmFp4Config | GemmBf16Fp8Config) -> Unit:
    body = f"gemm_few_bits<{DTYPES[out].device}, fi::{weights}, {config.tokens}>"
    entry = Entry(f"{name}_{config.tokens}", body, 640, config, ctas_per_sm=1)
    return Unit("fi/gemm/gemm_few_bits_sm90.cuh", "GemmFewBitsParams", (entry,))


def _fp4_unit(axes: Values) -> Unit:
    weights = "Nvfp4Weights" if axes["block"] == 16 else "Mxfp4Weights"
    return _unit_of("gemm_fp4", weights, axes["out"], GemmFp4Config(axes["tokens"]))


def _fp8_unit(axes: Values) -> Unit:
    return _unit_of("gemm_bf16_fp8", "E4m3Weights", axes["out"], GemmBf16Fp8Config(axes["tokens"]))


GEMM_FP4 = Op(
    name="gemm_fp4",
    family="gemm",
    arguments="Tensor(a!) out, Tensor a, Tensor b, Tensor b_scale, Tensor? alpha=None, "
    "int block_size=16, bool? enable_pdl=None",
    fields={
        "out": Field(("f16", "bf16", "f32"), "bf16"),
        "block": Field((16, 32), 16),
        "alignment": Field((1, 2, 4, 8, 16), 16),
        "m": Field(None, _TOKENS[-1]),
    },
    axes={"out": ("f16", "bf16", "f32"), "block": (16, 32), "tokens": _TOKENS},
    config=GemmFp4Config,
    varies={"m": _TOKENS},
    implementations=(
        Implementation("cpu", ON_CPU, axes=lambda v: {**v, "tokens": _TOKENS[0]}),
        Implementation(
            "mma_sm90",
            (*exactly(90), Constraint("alignment", ">=", _COPY_BYTES)),
            _fp4_unit,
            axes=lambda v: {**v, "tokens": _TOKENS[v["m"] > _TOKENS[0]]},
        ),
    ),
    prebuilt=({"block": 16, "m": _TOKENS[-1]},),
)
gemm_fp4 = operator(GEMM_FP4)

GEMM_BF16_FP8 = Op(
    name="gemm_bf16_fp8",
    family="gemm",
    arguments="Tensor(a!) out, Tensor a, Tensor b, Tensor? alpha=None, Tensor? bias=None, bool? enable_pdl=None",
    fields={
        "out": Field(("f16", "bf16", "f32"), "bf16"),
        "alignment": Field((1, 2, 4, 8, 16), 16),
        "m": Field(None, _TOKENS[-1]),
    },
    axes={"out": ("f16", "bf16", "f32"), "tokens": _TOKENS},
    config=GemmBf16Fp8Config,
    varies={"m": _TOKENS},
    implementations=(
        Implementation("cpu", ON_CPU, axes=lambda v: {**v, "tokens": _TOKENS[0]}),
        Implementation(
            "mma_sm90",
            (*exactly(90), Constraint("alignment", ">=", _COPY_BYTES)),
            _fp8_unit,
            axes=lambda v: {**v, "tokens": _TOKENS[v["m"] > _TOKENS[0]]},
        ),
    ),
)
gemm_bf16_fp8 = operator(GEMM_BF16_FP8)


def _multiply(name: str, streaming: str, k: int) -> Op:
    """By which op a product of 16-bit tokens and such weights is computed; `gemm` takes weights that are dequantized
    before. k: that of a copy of weights.
    """
    return Op(
        name=name,
        family="gemm",
        fields={
            "m": Field(None, 1),
            "k": Field(None, 32),
            "alignment": Field((1, 2, 4, 8, 16), 16),
            "dims": Field(None, 2),  # of the weights
        },
        implementations=(
            Implementation(
                streaming,
                (
                    Rule(("capability",), "a CPU or capability == 90", lambda capability: capability in (0, 90)),
                    Constraint("dims", "==", 2),
                    Constraint("k", "multiple of", k),
                    Constraint("alignment", ">=", _COPY_BYTES),
                ),
                preferred=(Constraint("m", "<=", FEW_TOKENS),),
            ),
            Implementation("gemm", ()),
        ),
    )


MULTIPLY_FP4 = _multiply("multiply_fp4", "gemm_fp4", 2 * _COPY_BYTES)
MULTIPLY_BF16_FP8 = _multiply("multiply_bf16_fp8", "gemm_bf16_fp8", _COPY_BYTES)


def _streams(op: Op, a: torch.Tensor, b: torch.Tensor) -> bool:
    low = 1
    if b.stride(-1) == 1:
        low = a.data_ptr() | b.data_ptr() | a.stride(0) * 2 | b.stride(0)
    alignment = min(_COPY_BYTES, low & -low) if low else _COPY_BYTES
    m = min(a.shape[0], FEW_TOKENS + 1)
    return composition(op, a.device, m, a.shape[-1], alignment, b.ndim) != "gemm"


def streams(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether gemm_fp4 computes the product of bf16 tokens `[m, k]` and packed weights `[n, k / 2]`."""
    return _streams(MULTIPLY_FP4, a, b)


def streams_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether gemm_bf16_fp8 computes the product of bf16 tokens `[m, k]` and e4m3 weights `[n, k]`."""
    return _streams(MULTIPLY_BF16_FP8, a, b)
