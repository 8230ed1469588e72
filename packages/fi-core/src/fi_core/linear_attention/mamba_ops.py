"""Declares the operators that only Mamba-2 layers have, and their kernel entries."""

from __future__ import annotations

from typing import Any, NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values

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


class RingConfig(NamedTuple):
    rows: int  # of a state, of a CTA


def _ring_unit(name: str, params: str, axes: Values) -> Unit:
    """A lane has 64 numbers of a state, as many as leave an SM four CTAs."""
    dtype, state, columns = DTYPES[axes["dtype"]], DTYPES[axes["state"]], axes["dstate"]
    rows = min(4, 512 // columns)  # of a lane
    cta_rows = 16 * rows
    size = 4 * (3 * _RING_TOKENS * columns + 2 * _RING_TOKENS * (cta_rows + 2)) + 16
    body = f"{name}<{dtype.device}, {state.device}, {columns}, {rows}, {size}>"
    entry = Entry(name, body, 128, RingConfig(cta_rows), size, ctas_per_sm=4 if columns <= 128 else 3)
    return Unit(f"fi/linear_attention/{name}.cuh", params, (entry,))


def _checkpointing_unit(axes: Values) -> Unit:
    return _ring_unit("checkpointing_ssu", "CheckpointingSsuParams", axes)


_RING_TOKENS = 16  # that are replayed, and that are new
_RING_AXES: dict[str, Any] = {"dtype": ("bf16", "f16"), "state": ("f32", "bf16", "f16"), "dstate": (64, 128, 256)}
_RING_FIELDS = {
    "dtype": Field(("bf16", "f16"), "bf16"),
    "state": Field(("f32", "bf16", "f16"), "f32"),
    "dstate": Field(None, 128),
}
_RING_STATES = (*at_least(80), Constraint("dstate", "in", (64, 128, 256)))
CHECKPOINTING_SSU = Op(
    name="checkpointing_ssu",
    family="linear_attention",
    arguments="Tensor(a!) out, Tensor(b!) state, Tensor(c!) x_cache, Tensor(d!) B_cache, Tensor(e!) dt_cache, "
    "Tensor ring_start, Tensor prev_num_accepted_tokens, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, "
    "Tensor? state_batch_indices=None, int pad_slot_id=-1, Tensor? cu_seqlens=None, int max_seqlen=0, "
    "bool? enable_pdl=None",
    fields=_RING_FIELDS,
    axes=_RING_AXES,
    config=RingConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", _RING_STATES, _checkpointing_unit)),
    prebuilt=({"dtype": "bf16"},),
)

checkpointing_ssu = operator(CHECKPOINTING_SSU)
