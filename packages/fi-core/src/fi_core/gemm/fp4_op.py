"""Declares gemm_fp4: products of few bf16 tokens and fp4 weights, which become bf16 in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.runtime.launch.operator import composition, operator
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


def _unit(axes: Values) -> Unit:
    out, tokens = DTYPES[axes["out"]], axes["tokens"]
    scales = "Nvfp4Scales" if axes["block"] == 16 else "Mxfp4Scales"
    body = f"gemm_fp4<{out.device}, fi::{scales}, {tokens}>"
    entry = Entry(f"gemm_fp4_{tokens}", body, 640, GemmFp4Config(tokens), ctas_per_sm=1)
    return Unit("fi/gemm/gemm_fp4_sm90.cuh", "GemmFp4Params", (entry,))


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
            _unit,
            axes=lambda v: {**v, "tokens": _TOKENS[v["m"] > _TOKENS[0]]},
        ),
    ),
    prebuilt=({"block": 16, "m": _TOKENS[-1]},),
)
gemm_fp4 = operator(GEMM_FP4)


# By which op a product of bf16 tokens and fp4 weights is computed; `gemm` takes weights that are dequantized before.
MULTIPLY_FP4 = Op(
    name="multiply_fp4",
    family="gemm",
    fields={
        "m": Field(None, 1),
        "k": Field(None, 32),
        "alignment": Field((1, 2, 4, 8, 16), 16),
        "dims": Field(None, 2),  # of the weights
    },
    implementations=(
        Implementation(
            "gemm_fp4",
            (
                Rule(("capability",), "a CPU or capability == 90", lambda capability: capability in (0, 90)),
                Constraint("dims", "==", 2),
                Constraint("k", "multiple of", 2 * _COPY_BYTES),
                Constraint("alignment", ">=", _COPY_BYTES),
            ),
            preferred=(Constraint("m", "<=", FEW_TOKENS),),
        ),
        Implementation("gemm", ()),
    ),
)


def streams(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether gemm_fp4 computes the product of bf16 tokens `[m, k]` and packed weights `[n, k / 2]`."""
    low = 1
    if b.stride(-1) == 1:
        low = a.data_ptr() | b.data_ptr() | a.stride(0) * 2 | b.stride(0)
    alignment = min(_COPY_BYTES, low & -low) if low else _COPY_BYTES
    m = min(a.shape[0], FEW_TOKENS + 1)
    return composition(MULTIPLY_FP4, a.device, m, a.shape[-1], alignment, b.ndim) == "gemm_fp4"
