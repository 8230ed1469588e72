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
MOST_SLICES = 3  # kMostLoraSlices


class LoraDeltaConfig(NamedTuple):
    rows: int  # pairs of a CTA
    window: int  # pairs among which those of an adapter and an expert are found


def _delta_unit(axes: Values) -> Unit:
    types = ", ".join(DTYPES[axes[name]].device for name in ("dtype", "x", "out"))
    entries = tuple(
        Entry(
            f"lora_delta_{8 * tiles}",
            f"lora_delta<{types}, fi::kLora{axes['stage']}, {tiles}>",
            256,
            LoraDeltaConfig(8 * tiles, 512),
            ctas_per_sm=ctas,
        )
        for tiles, ctas in ((1, 3), (2, 2), (4, 2 if axes["capability"] >= 90 else 1))
    )
    return Unit("fi/lora/lora_delta.cuh", "LoraDeltaParams", entries)


LORA_DELTA = Op(
    name="lora_delta",
    family="lora",
    arguments="Tensor(a!) out, Tensor x, Tensor lora_indices, Tensor? a=None, Tensor? b=None, Tensor? a1=None, "
    "Tensor? b1=None, Tensor? a2=None, Tensor? b2=None, Tensor? tokens=None, Tensor? experts=None, "
    "Tensor? offsets=None, Tensor? scales=None, Tensor? begins=None, int stage=0, float scale=1.0, int rank=-1, "
    "int columns=-1, int begin=0, int a_stride=0, int b_stride=0, int first_expert=0, int loras=-1, "
    "bool per_pair=False, bool add=False, bool fill=False, bool? enable_pdl=None",
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
