"""Declares the operators of communication, and their kernel entries."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values


class _ReduceConfig(NamedTuple):
    max_world: int
    vecs: int  # vectors of 16 bytes of a thread


# Ranks, vectors of a thread, threads. A row that is normalized is a CTA's, so rows have up to 2048 vectors; the pieces
# of other messages need one vector. With 1024 threads a thread has 64 registers.
_REDUCE_SHAPES = ((2, 1, 1024), (2, 4, 512), (8, 1, 512), (8, 2, 512), (8, 4, 512))
# enum ReduceOutput of fi/comm/all_reduce.h
_OUTPUTS = {"sum": 0, "norm": 1, "e4m3": 2, "e2m1": 3, "row_e4m3": 4, "group_e4m3": 5}


def _all_reduce_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype, form = DTYPES[axes["dtype"]].device, axes["form"]
    name = "reduce_scatter" if form == "scatter" else f"all_reduce_{form}"
    entries = tuple(
        Entry(
            f"{name}_{world}_{vecs}",
            f"{name}<{dtype}, {_OUTPUTS[axes['output']]}, {world}, {vecs}>",
            threads,
            _ReduceConfig(world, vecs),
            ctas_per_sm=1,
        )
        for world, vecs, threads in _REDUCE_SHAPES
        if vecs == 1 or axes["output"] != "sum"
    )
    header = "fi/comm/reduce_scatter.cuh" if form == "scatter" else "fi/comm/all_reduce.cuh"
    return Unit(header, "AllReduceParams", entries)


_QUANTIZES_16_BITS = Rule(
    ("dtype", "output"),
    "f16 or bf16 where the norm is quantized",
    lambda dtype, output: dtype != "f32" or output in ("sum", "norm"),
)


ALL_REDUCE = Op(
    name="all_reduce",
    family="comm",
    arguments="Tensor(b|c) input, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "Tensor(b!)? out=None, Tensor(c!)? norm_out=None, Tensor(d!)? quant_out=None, "
    "Tensor(e!)? scale_out=None, Tensor(b)? residual_in=None, Tensor? weight=None, Tensor? scale=None, "
    "int layout=0, int group=128, float eps=1e-06, float weight_bias=0.0, int timeout_ms=300000, int shots=1, "
    "bool scatter=False, bool? enable_pdl=None, bool trigger_at_end=True, int? ctas=None",
    fields={
        "dtype": Field(("f16", "bf16", "f32"), "bf16"),
        "output": Field(tuple(_OUTPUTS), "sum"),
        "form": Field(("one_shot", "two_shot", "scatter"), "one_shot"),
    },
    config=_ReduceConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("cuda_core", (*at_least(80), _QUANTIZES_16_BITS), _all_reduce_unit),
    ),
    prebuilt=({"output": "sum"}, {"output": "norm"}),
)


_NOT_HOPPER = Rule(("capability",), "a capability other than 90", lambda capability: capability != 90)


class _AllToAllConfig(NamedTuple):
    stages: int  # chunks in shared memory


def _bulk_unit(axes: Values) -> Unit:
    entry = Entry("all_to_all", "all_to_all", 64, _AllToAllConfig(8))
    return Unit("fi/comm/all_to_all_sm90.cuh", "AllToAllParams", (entry,))


def _thread_unit(axes: Values) -> Unit:
    entry = Entry("all_to_all", "all_to_all_by_threads", 256, _AllToAllConfig(0))
    return Unit("fi/comm/all_to_all.cuh", "AllToAllParams", (entry,))


ALL_TO_ALL = Op(
    name="all_to_all",
    family="comm",
    arguments="Tensor input, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "int max_flags, Tensor(b!) out, bool gather=False, int timeout_ms=300000, bool? enable_pdl=None",
    config=_AllToAllConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("bulk_sm90", exactly(90), _bulk_unit),
        Implementation("cuda_core", (*at_least(80), _NOT_HOPPER), _thread_unit),
    ),
)


def _moe_dispatch_unit(axes: Values) -> Unit:
    return Unit("fi/comm/moe_dispatch.cuh", "MoeDispatchParams", (Entry("moe_dispatch", "moe_dispatch", 256),))


MOE_DISPATCH = Op(
    name="moe_dispatch",
    family="comm",
    arguments="Tensor experts, Tensor(d|e|f|g!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "int control_offset, int num_experts, Tensor(b!) rows, Tensor(c!) counts, Tensor payload0, Tensor(d!) received0, "
    "Tensor? payload1=None, Tensor(e!)? received1=None, Tensor? payload2=None, Tensor(f!)? received2=None, "
    "Tensor? payload3=None, Tensor(g!)? received3=None, int timeout_ms=300000, bool? enable_pdl=None",
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", at_least(80), _moe_dispatch_unit)),
)


def _moe_combine_unit(axes: Values) -> Unit:
    body = f"moe_combine<{DTYPES[axes['dtype']].device}>"
    return Unit("fi/comm/moe_combine.cuh", "MoeCombineParams", (Entry("moe_combine", body, 256),))


MOE_COMBINE = Op(
    name="moe_combine",
    family="comm",
    arguments="Tensor(a) payload, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "int control_offset, Tensor rows, Tensor(b!) out, int timeout_ms=300000, bool? enable_pdl=None",
    axes={"dtype": ("bf16", "f16", "f32")},
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", at_least(80), _moe_combine_unit)),
    prebuilt=({"dtype": "bf16"},),
)

all_reduce = operator(ALL_REDUCE)
all_to_all = operator(ALL_TO_ALL)
moe_dispatch = operator(MOE_DISPATCH)
moe_combine = operator(MOE_COMBINE)
