"""Declares the operators of communication, and their kernel entries."""

from __future__ import annotations

from typing import Any, NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values


class _ReduceConfig(NamedTuple):
    max_world: int
    vecs: int  # vectors of 16 bytes of a thread


# Ranks, vectors of a thread, threads. A row that is normalized is a CTA's, so rows have up to 2048 vectors; the pieces
# of other messages need one vector. With 1024 threads a thread has 64 registers.
_REDUCE_SHAPES = ((2, 1, 1024), (2, 4, 512), (8, 1, 512), (8, 2, 512), (8, 4, 512))
_OUTPUTS = {"sum": 0, "norm": 1, "e4m3": 2, "e2m1": 3}  # enum ReduceOutput of fi/comm/all_reduce.h


def _all_reduce_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype, shots = DTYPES[axes["dtype"]].device, {1: "one_shot", 2: "two_shot"}[axes["shots"]]
    entries = tuple(
        Entry(
            f"all_reduce_{shots}_{world}_{vecs}",
            f"all_reduce_{shots}<{dtype}, {_OUTPUTS[axes['output']]}, {world}, {vecs}>",
            threads,
            _ReduceConfig(world, vecs),
            ctas_per_sm=1,
        )
        for world, vecs, threads in _REDUCE_SHAPES
        if vecs == 1 or axes["output"] != "sum"
    )
    return Unit("fi/comm/all_reduce.cuh", "AllReduceParams", entries)


def _reduce_request(dtype: Any, norm: bool, quantized: Any, shots: int) -> tuple[Any, ...]:
    output = "sum" if not norm else "norm" if quantized is None else "e2m1" if "uint8" in str(quantized) else "e4m3"
    return dtype, output, shots


ALL_REDUCE = Op(
    name="all_reduce",
    family="comm",
    arguments="Tensor input, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "Tensor(b!)? out=None, Tensor(c!)? norm_out=None, Tensor(d!)? quant_out=None, "
    "Tensor(e!)? scale_out=None, Tensor? residual_in=None, Tensor? weight=None, Tensor? scale=None, "
    "int layout=0, float eps=1e-06, int timeout_ms=300000, int shots=1, bool? enable_pdl=None, "
    "bool trigger_at_end=True, int? ctas=None",
    read="input.dtype, weight is not None, quant_out is not None and quant_out.dtype or None, shots",
    request=_reduce_request,
    fields={
        "dtype": Field(("f16", "bf16", "f32"), "bf16"),
        "output": Field(tuple(_OUTPUTS), "sum"),
        "shots": Field((1, 2), 1),
    },
    config=_ReduceConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", at_least(80), _all_reduce_unit)),
    prebuilt=({"output": "sum"}, {"output": "norm"}),
)


def _all_to_all_unit(axes: Values) -> Unit:
    return Unit("fi/comm/all_to_all_sm90.cuh", "AllToAllParams", (Entry("all_to_all", "all_to_all", 64),))


ALL_TO_ALL = Op(
    name="all_to_all",
    family="comm",
    arguments="Tensor input, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "int max_flags, Tensor(b!) out, int timeout_ms=300000, bool? enable_pdl=None",
    implementations=(Implementation("cpu", ON_CPU), Implementation("bulk_sm90", exactly(90), _all_to_all_unit)),
)


def _moe_dispatch_unit(axes: Values) -> Unit:
    return Unit("fi/comm/moe_dispatch.cuh", "MoeDispatchParams", (Entry("moe_dispatch", "moe_dispatch", 256),))


MOE_DISPATCH = Op(
    name="moe_dispatch",
    family="comm",
    arguments="Tensor experts, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
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
    arguments="Tensor payload, Tensor(a!) workspace, Tensor peers, Tensor status, int rank, int rotation_bytes, "
    "int control_offset, Tensor rows, Tensor(b!) out, int timeout_ms=300000, bool? enable_pdl=None",
    read="payload.dtype",
    axes={"dtype": ("bf16", "f16", "f32")},
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", at_least(80), _moe_combine_unit)),
    prebuilt=({"dtype": "bf16"},),
)

all_reduce = operator(ALL_REDUCE)
all_to_all = operator(ALL_TO_ALL)
moe_dispatch = operator(MOE_DISPATCH)
moe_combine = operator(MOE_COMBINE)
