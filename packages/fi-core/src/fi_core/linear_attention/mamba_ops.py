"""Declares the operators that only Mamba-2 layers have, and their kernel entries."""

from __future__ import annotations

from typing import Any, NamedTuple

from fi_core.linear_attention.ops import CHUNK_MATRIX
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import THREADS, Entry, Field, Implementation, Op, Unit, Values

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
    size = 2 * (3 * _RING_TOKENS * columns + 2 * _RING_TOKENS * cta_rows) + 4 * 4 * _RING_TOKENS + 16
    body = f"{name}<{dtype.device}, {state.device}, {columns}, {rows}, {size}>"
    entry = Entry(name, body, 128, RingConfig(cta_rows), size, ctas_per_sm=4 if columns <= 128 else 3)
    return Unit(f"fi/linear_attention/{name}.cuh", params, (entry,))


def _checkpointing_unit(axes: Values) -> Unit:
    return _ring_unit("checkpointing_ssu", "CheckpointingSsuParams", axes)


def _materialize_unit(axes: Values) -> Unit:
    return _ring_unit("replayssm_materialize", "ReplayssmMaterializeParams", axes)


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

REPLAYSSM_MATERIALIZE = Op(
    name="replayssm_materialize",
    family="linear_attention",
    # What is written lies at the addresses of state_ptrs.
    arguments="Tensor(a!) state_ptrs, Tensor state_slot_strides, Tensor x_cache_ptrs, Tensor x_cache_slot_strides, "
    "Tensor B_cache_ptrs, Tensor B_cache_slot_strides, Tensor dt_cache_ptrs, Tensor dt_cache_slot_strides, "
    "Tensor A_ptrs, Tensor src_slots, Tensor dst_slots, Tensor ring_start, Tensor replay_prefix_len, "
    "Tensor active_request_indices, int state_dtype, int input_dtype, int matrix_dtype, int dim, int dstate, "
    "int num_heads, int heads_per_group, int max_window, int ring_buffer_len, int pad_slot_id=-1, "
    "bool? enable_pdl=None",
    fields=_RING_FIELDS,
    axes=_RING_AXES,
    config=RingConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda_core", _RING_STATES, _materialize_unit)),
    prebuilt=({"dtype": "bf16"},),
)

checkpointing_ssu = operator(CHECKPOINTING_SSU)
replayssm_materialize = operator(REPLAYSSM_MATERIALIZE)


class SsdConfig(NamedTuple):
    step: int  # 0: prepares chunks, 1: goes through them, 2: and may store states in between
    columns: int  # of dim, of a CTA
    cluster: int  # CTAs that copy for each other
    stages: int  # of copies


_CHUNK = 64  # tokens


def _prepare_entry(axes: Values) -> Entry:
    dtype, width = DTYPES[axes["dtype"]], axes["width"]
    size = 2 * 2 * _CHUNK * width + 3 * 4 * 8 * _CHUNK + 128
    return Entry("ssd_prepare", f"ssd_prepare<{dtype.device}, {width}, {size}>", 128, SsdConfig(0, 0, 1, 0), size, 4)


def _ssd_entry(axes: Values, step: int, cluster: int, stages: int, wgmma: bool) -> Entry:
    """With four stages a CTA has an SM alone: for so few heads that no SM gets two."""
    dtype, width, columns = DTYPES[axes["dtype"]], axes["width"], min(axes["dim"], 64)
    matrix, alignment = (12 * 512, 1024) if wgmma else (2 * CHUNK_MATRIX, 128)
    size = stages * (2 * _CHUNK * (2 * width + columns) + matrix + 4 * 4 * _CHUNK) + 2 * alignment
    name, flag = ("ssd_states", "false") if step == 1 else ("ssd_states_checkpoints", "true")
    more = f"{'true' if cluster == 2 else 'false'}, {stages}, " if wgmma else ""
    suffix = "_wgmma" if wgmma else ""
    body = f"ssd_states{suffix}<{dtype.device}, {width}, {columns}, {flag}, {more}{size}>"
    config = SsdConfig(step, columns, cluster, stages)
    return Entry(f"{name}_{cluster}_{stages}", body, 2 * columns, config, size, 2 if wgmma and stages == 2 else 1)


def _ssd_unit(axes: Values) -> Unit:
    entries = (_prepare_entry(axes), *(_ssd_entry(axes, step, 1, 2, False) for step in (1, 2)))
    return Unit("fi/linear_attention/ssd_combined.cuh", "SsdCombinedParams", entries)


def _ssd_wgmma_unit(axes: Values) -> Unit:
    # The last one serves groups of an odd number of heads, whether states are kept or not: a kernel has 60 to 130 KB.
    forms = ((1, 2, 4), (1, 2, 2), (2, 2, 2), (2, 1, 2))
    entries = (_prepare_entry(axes), *(_ssd_entry(axes, *form, True) for form in forms))
    return Unit("fi/linear_attention/ssd_combined_sm90.cuh", "SsdCombinedParams", entries, flags=THREADS)


_SSD_WIDTH = Constraint("width", "in", (64, 128))
SSD_COMBINED = Op(
    name="ssd_combined",
    family="linear_attention",
    arguments="Tensor(a!) out, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
    "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float dt_low=0.0, "
    "float dt_high=3.4e38, Tensor? cu_seqlens=None, Tensor(b)? initial_states=None, "
    "Tensor? initial_state_indices=None, Tensor(b!)? final_states=None, Tensor? final_state_indices=None, "
    "Tensor(b!)? checkpoint_states=None, Tensor? checkpoint_token_indices=None, "
    "Tensor? checkpoint_state_slots=None, Tensor? checkpoint_last=None, bool? enable_pdl=None",
    fields={"dtype": Field(("bf16", "f16"), "bf16"), "width": Field(None, 128), "dim": Field(None, 64)},
    axes={"dtype": ("bf16", "f16"), "width": (64, 128), "dim": (32, 64, 128)},
    config=SsdConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("wgmma_sm90", (*exactly(90), _SSD_WIDTH, Constraint("dim", "in", (64, 128))), _ssd_wgmma_unit),
        Implementation("mma_sm80", (*at_least(80), _SSD_WIDTH, Constraint("dim", "in", (32, 64, 128))), _ssd_unit),
    ),
    prebuilt=({"dtype": "bf16"},),
)

ssd_combined = operator(SSD_COMBINED)
