"""Declares the operators of low-rank adapters: their products, and sums of them for each token."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

_FLOATS = ("bf16", "f16", "f32")
DELTA, SHRINK, EXPAND = range(3)  # enum LoraStage of lora_delta.h
_STAGES = ("Delta", "Shrink", "Expand")
MOST_SLICES = 3  # kMostSlices of lora_delta.h
MOST_RANK = 256


class LoraDeltaConfig(NamedTuple):
    step: int  # enum LoraStep of lora_delta.cc
    rows: int = 0  # pairs of a tile
    window: int = 256  # pairs among which those of an adapter and an expert are found
    ctas: int = 1  # of an SM


_SHRINK_STEP, _EXPAND_STEP, _ADD_STEP = range(3)


def _delta_unit(axes: Values) -> Unit:
    dtype, x, out = (DTYPES[axes[name]].device for name in ("dtype", "x", "out"))
    middle = x if axes["stage"] == "Expand" else "float"
    entries: list[Entry] = []
    for tiles in (1, 2, 4):
        rows = 8 * tiles
        if axes["stage"] != "Expand":
            config = LoraDeltaConfig(_SHRINK_STEP, rows, ctas=2)
            entries.append(Entry(f"lora_shrink_{rows}", f"lora_shrink<{dtype}, {tiles}>", 256, config, ctas_per_sm=2))
        if axes["stage"] != "Shrink":
            ctas = {1: 3, 2: 2, 4: 1 if axes["out"] == "f32" else 2}[tiles]
            config = LoraDeltaConfig(_EXPAND_STEP, rows, ctas=ctas)
            body = f"lora_expand<{dtype}, {middle}, {out}, {tiles}>"
            entries.append(Entry(f"lora_expand_{rows}", body, 256, config, ctas_per_sm=ctas))
    if axes["stage"] == "Shrink":
        entries.append(Entry("lora_add_parts", f"lora_add_parts<{out}>", 256, LoraDeltaConfig(_ADD_STEP)))
    return Unit("fi/lora/lora_delta.cuh", "LoraDeltaParams", tuple(entries))


LORA_DELTA = Op(
    name="lora_delta",
    family="lora",
    arguments="Tensor(a!) out, Tensor x, Tensor lora_indices, Tensor? a=None, Tensor? b=None, Tensor? a1=None, "
    "Tensor? b1=None, Tensor? a2=None, Tensor? b2=None, Tensor? tokens=None, Tensor? experts=None, "
    "Tensor? offsets=None, Tensor? scales=None, Tensor? begins=None, Tensor(b!)? sums=None, int stage=0, "
    "float scale=1.0, int rank=-1, int columns=-1, int begin=0, int a_stride=0, int b_stride=0, int first_expert=0, "
    "int loras=-1, bool per_pair=False, bool add=False, bool fill=False, bool ready=False, bool? enable_pdl=None",
    axes={"dtype": ("bf16", "f16"), "x": _FLOATS, "out": _FLOATS, "stage": _STAGES},
    config=LoraDeltaConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("mma_sm80", at_least(80), _delta_unit)),
    prebuilt=({"x": "bf16", "out": "bf16"},),
)


class LoraSumConfig(NamedTuple):
    vec_size: int  # columns of a thread


def _sum_unit(axes: Values) -> Unit:
    types = f"{DTYPES[axes['x']].device}, {DTYPES[axes['out']].device}"
    return Unit(
        "fi/lora/lora_sum.cuh",
        "LoraSumParams",
        (Entry("lora_sum", f"lora_sum<{types}, 4>", 256, LoraSumConfig(4)),),
    )


LORA_SUM = Op(
    name="lora_sum",
    family="lora",
    arguments="Tensor(a!) out, Tensor x, Tensor lora_indices, Tensor? tokens=None, Tensor? weights=None, "
    "Tensor? rows=None, bool? enable_pdl=None",
    axes={"x": _FLOATS, "out": _FLOATS},
    config=LoraSumConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _sum_unit)),
    prebuilt=({"x": "bf16", "out": "bf16"},),
)

lora_delta = operator(LORA_DELTA)
lora_sum = operator(LORA_SUM)

_FEW_BINS = 32  # kFewBins of lora_delta.cc


def sums_shape(pairs: int, ranks: int, k: int, bins: int) -> tuple[int, int, int]:
    """The shape of the `sums` of a lora_delta in a plan: `[parts, pairs, ranks]`. Other calls get memory of torch.

    Args:
        pairs: rows of the result.
        ranks: of all slices together.
        k: values of a row of x.
        bins: adapters times experts.
    """
    return (min(8, -(-k // 512)) if bins <= _FEW_BINS else -(-k // 2048), pairs, ranks)
