"""Declares gemm_few_bits: products of few bf16 tokens and weights of 4 or 8 bits, which become bf16 in registers."""

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
_TOKENS = (8, 16, 32, 64)  # of a tile
_FP4_TOKENS = _TOKENS[:2]
FEW_TOKENS = 128  # of a product that streams its weights; for more they are dequantized first
_FP4_WEIGHTS = {16: "Nvfp4Weights", 32: "Mxfp4Weights"}  # by k that share a scale
_BLOCKS = (0, *_FP4_WEIGHTS)  # 0: e4m3 weights


class GemmFewBitsConfig(NamedTuple):
    tokens: int  # of a tile


def _unit(axes: Values) -> Unit:
    out, tokens = DTYPES[axes["out"]], axes["tokens"]
    config = GemmFewBitsConfig(tokens)
    if axes["block"] == 0:
        body, threads = f"gemm_fp8_weights<{out.device}, {tokens}>", 32 * ((8 if tokens > 32 else 16) + 2)  # two load
        entry = Entry(f"gemm_fp8_weights_{tokens}", body, threads, config, ctas_per_sm=1)
        return Unit("fi/gemm/gemm_fp8_weights_sm90.cuh", "GemmFp8WeightsParams", (entry,))
    body = f"gemm_few_bits<{out.device}, fi::{_FP4_WEIGHTS[axes['block']]}, {tokens}>"
    entry = Entry(f"gemm_few_bits_{tokens}", body, 640, config, ctas_per_sm=1)
    return Unit("fi/gemm/gemm_few_bits_sm90.cuh", "GemmFewBitsParams", (entry,))


def _tile(values: Values) -> Values:
    """With the tokens of the smallest tile that has m of them."""
    tiles = _FP4_TOKENS if values["block"] else _TOKENS
    return {**values, "tokens": next((t for t in tiles if t >= values["m"]), tiles[-1])}


GEMM_FEW_BITS = Op(
    name="gemm_few_bits",
    family="gemm",
    arguments="Tensor(a!) out, Tensor a, Tensor b, Tensor? b_scale=None, Tensor? alpha=None, Tensor? bias=None, "
    "int block_size=16, bool? enable_pdl=None",
    fields={
        "out": Field(("f16", "bf16", "f32"), "bf16"),
        "block": Field(_BLOCKS, 16),
        "alignment": Field((1, 2, 4, 8, 16), 16),
        "m": Field(None, _TOKENS[-1]),
    },
    axes={"out": ("f16", "bf16", "f32"), "block": _BLOCKS, "tokens": _TOKENS},
    config=GemmFewBitsConfig,
    varies={"m": _TOKENS},
    implementations=(
        Implementation("cpu", ON_CPU, axes=lambda v: {**v, "tokens": _TOKENS[0]}),
        Implementation(
            "mma_sm90",
            (*exactly(90), Constraint("alignment", ">=", _COPY_BYTES)),
            _unit,
            axes=_tile,
        ),
    ),
    prebuilt=({"block": 16, "m": _FP4_TOKENS[-1]},),
)
gemm_few_bits = operator(GEMM_FEW_BITS)


# By which op a product of bf16 tokens and such weights is computed; `gemm` takes weights that are dequantized before.
MULTIPLY_FEW_BITS = Op(
    name="multiply_few_bits",
    family="gemm",
    fields={
        "m": Field(None, 1),
        "row_bytes": Field(None, 16),  # of the weights
        "alignment": Field((1, 2, 4, 8, 16), 16),
        "dims": Field(None, 2),  # of the weights
    },
    implementations=(
        Implementation(
            "gemm_few_bits",
            (
                Rule(("capability",), "a CPU or capability == 90", lambda capability: capability in (0, 90)),
                Constraint("dims", "==", 2),
                Constraint("row_bytes", "multiple of", _COPY_BYTES),
                Constraint("alignment", ">=", _COPY_BYTES),
            ),
            preferred=(
                Rule(
                    ("m", "batch_invariant"),
                    f"m <= {FEW_TOKENS}",
                    lambda m, batch_invariant: batch_invariant or m <= FEW_TOKENS,
                ),
            ),
        ),
        Implementation("gemm", ()),
    ),
)


def streams(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether gemm_few_bits computes the product of bf16 tokens `[m, k]` and weights: packed fp4 `[n, k / 2]`, or e4m3
    `[n, k]`.
    """
    low = 1
    if b.stride(-1) == 1:
        low = a.data_ptr() | b.data_ptr() | a.stride(0) * 2 | b.stride(0)
    alignment = min(_COPY_BYTES, low & -low) if low else _COPY_BYTES
    m = min(a.shape[0], FEW_TOKENS + 1)
    return composition(MULTIPLY_FEW_BITS, a.device, m, b.shape[-1], alignment, b.ndim) == "gemm_few_bits"
