"""Declares the operators that only Mamba-2 layers have, and their kernel entries."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

_FLOATS = ("bf16", "f16", "f32")


class ConvConfig(NamedTuple):
    vec_size: int  # channels of a thread
    width: int


def _conv_unit(axes: Values) -> Unit:
    dtype = DTYPES[axes["dtype"]]
    entries = tuple(
        Entry(f"causal_conv1d_{width}_{vec}", f"causal_conv1d<{dtype.device}, {width}, {vec}>", 128,
              ConvConfig(vec, width), ctas_per_sm=3 if width == 5 else 4)
        for vec in (16 // dtype.bytes, 1)
        for width in (4, 2, 3, 5)
    )  # fmt: skip
    return Unit("fi/linear_attention/causal_conv1d.cuh", "CausalConv1dParams", entries)


CAUSAL_CONV1D = Op(
    name="causal_conv1d",
    family="linear_attention",
    arguments="Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, Tensor(b!) conv_states, "
    "Tensor? query_start_loc=None, Tensor? slots=None, Tensor? has_initial_state=None, bool silu=True, "
    "int pad_slot_id=-1, int null_block_id=-1, Tensor? initial_state_idx=None, "
    "Tensor? block_idx_first_scheduled_token=None, Tensor? block_idx_last_scheduled_token=None, "
    "Tensor? num_computed_tokens=None, int block_size_to_align=0, Tensor? num_accepted_tokens=None, "
    "int max_query_len=-1, bool reads_states=True, bool? enable_pdl=None",
    axes={"dtype": _FLOATS},
    config=ConvConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", at_least(80), _conv_unit)),
    prebuilt=({"dtype": "bf16"},),
)

causal_conv1d = operator(CAUSAL_CONV1D)
