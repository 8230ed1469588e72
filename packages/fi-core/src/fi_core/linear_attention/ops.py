"""Declares the operators of linear attention, and their kernel entries."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES, DType
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values

_THREADS = 128
_STATE_COLUMNS = (64, 128, 256)  # of a state that CUDA kernels hold in registers
_LANES = 8  # that share a row of a state
_CTAS_PER_SM = {64: 5, 128: 4, 256: 3, 512: 2}  # by elements of 8 lanes, of a state
# See rows_of_cta. The best of docs/notes/linear-attention-decode.md, as are the rows of a lane.
_ENTRY_CTAS, _PASS_CTAS = 4, 4


class RecurrentConfig(NamedTuple):
    once: int  # 1: takes one token of each row and stores nothing but the last state; 2: a warp has one row of a state
    rows_per_pass: int  # of a state, of a CTA; once: of a warp
    entry_ctas: int  # for each SM, so that the entry is taken
    pass_ctas: int  # for each SM, so that a CTA makes several passes


def _rows_of_lane(columns: int) -> tuple[int, ...]:
    """Rows of a state that a lane holds: many only where there are many states."""
    return tuple(rows for rows in (1, 2) if rows * columns <= 512)


def _recurrent_config(rows: int) -> RecurrentConfig:
    return RecurrentConfig(0, _THREADS // _LANES * rows, _ENTRY_CTAS, _PASS_CTAS)


def _once_entry(name: str, dtype: str, state: DType, columns: int) -> Entry:
    """A warp moves 4 KB, in loads of two rows of fp32 or four of 16 bits (docs/notes/linear-attention-decode.md)."""
    lanes = 16 if state.bytes == 4 else 8  # of a row
    rows = 4096 // (32 // lanes * columns * state.bytes)  # of a lane
    body = f"{name}_once<{dtype}, {state.device}, {columns}, {rows}, {lanes}>"
    return Entry(f"{name}_once", body, _THREADS, RecurrentConfig(1, 32 // lanes * rows, 0, 0))


def _recurrent_unit(axes: Values) -> Unit:
    dtype, state, columns = DTYPES[axes["dtype"]], DTYPES[axes["state"]], axes["dim_k"]
    k_last = axes["contiguous"] == "k"
    flags = f"{str(axes['gate'] == 'channel').lower()}, {str(k_last).lower()}"
    entries = []
    if k_last and axes["gate"] == "head":
        entries.append(_once_entry("recurrent_gated_delta_rule", dtype.device, state, columns))
    for rows in _rows_of_lane(columns) if k_last else (16 // state.bytes,):
        body = f"recurrent_gated_delta_rule<{dtype.device}, {state.device}, {columns}, {rows}, {flags}>"
        config, ctas = _recurrent_config(rows), _CTAS_PER_SM[rows * columns]
        if axes["gate"] == "channel":
            ctas = 0  # the gates of 16 channels are computed side by side: with a bound they spill
        entries.append(Entry(f"recurrent_gated_delta_rule_{rows}", body, _THREADS, config, ctas_per_sm=ctas))
    header = "fi/linear_attention/recurrent_gated_delta_rule.cuh"
    return Unit(header, "RecurrentGatedDeltaRuleParams", tuple(entries))


_FLOATS_16 = ("bf16", "f16")
RECURRENT_GATED_DELTA_RULE = Op(
    name="recurrent_gated_delta_rule",
    family="linear_attention",
    arguments="Tensor(a!) out, Tensor(b!) state, Tensor q, Tensor k, Tensor v, Tensor A_log, Tensor a, Tensor dt_bias, "
    "Tensor b, float scale, bool use_qk_l2norm=True, Tensor? state_indices=None, Tensor? output_state_indices=None, "
    "Tensor(c!)? intermediate_states=None, Tensor? token_state_indices=None, bool update_state=True, "
    "bool? enable_pdl=None",
    fields={
        "dtype": Field(_FLOATS_16, "bf16"),
        "state": Field(("f32", "bf16"), "f32"),
        "dim_k": Field(None, 128),
        "gate": Field(("head", "channel"), "head"),
        "contiguous": Field(("k", "v"), "k"),
    },
    axes={
        "dtype": _FLOATS_16,
        "state": ("f32", "bf16"),
        "dim_k": _STATE_COLUMNS,
        "gate": ("head", "channel"),
        "contiguous": ("k", "v"),
    },
    config=RecurrentConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation(
            "cuda_core",
            (
                *at_least(80),
                Constraint("dim_k", "in", _STATE_COLUMNS),
                Rule(
                    ("state", "dim_k", "contiguous"),
                    "a state with contiguous k, or one of fp32 with k = 64 or 128",
                    lambda state, dim_k, contiguous: contiguous == "k" or (state == "f32" and dim_k <= 128),
                ),
            ),
            _recurrent_unit,
        ),
    ),
    prebuilt=({"dtype": "bf16"},),
)


def _selective_unit(axes: Values) -> Unit:
    dtype, state, columns = DTYPES[axes["dtype"]], DTYPES[axes["state"]], axes["dstate"]
    body = f"selective_state_update_elements<{dtype.device}, {state.device}, {columns}>"
    entries = [Entry("selective_state_update_elements", body, _THREADS, RecurrentConfig(2, _THREADS // 32, 0, 0))]
    if state in _STATES:
        entries.append(_once_entry("selective_state_update", dtype.device, state, columns))
    for rows in _rows_of_lane(columns) if state in _STATES else ():
        body = f"selective_state_update<{dtype.device}, {state.device}, {columns}, {rows}>"
        config = _recurrent_config(rows)
        entries.append(
            Entry(
                f"selective_state_update_{rows}",
                body,
                _THREADS,
                config,
                ctas_per_sm=min(3, _CTAS_PER_SM[rows * columns]),
            )
        )
    header = "fi/linear_attention/selective_state_update.cuh"
    return Unit(header, "SelectiveStateUpdateParams", tuple(entries))


_FLOATS = ("bf16", "f16", "f32")
_STATES = (DTYPES["f32"], DTYPES["bf16"], DTYPES["f16"])  # others hold integers with a scale of each row
SELECTIVE_STATE_UPDATE = Op(
    name="selective_state_update",
    family="linear_attention",
    arguments="Tensor(a!) out, Tensor(b!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
    "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None, "
    "Tensor? dst_state_batch_indices=None, int pad_slot_id=-1, bool disable_state_update=False, "
    "Tensor(c!)? intermediate_states_buffer=None, Tensor? intermediate_state_indices=None, Tensor? cu_seqlens=None, "
    "Tensor? num_accepted_tokens=None, Tensor(d!)? state_scale=None, Tensor(e!)? intermediate_state_scales=None, "
    "Tensor? rand_seed=None, int philox_rounds=10, bool? enable_pdl=None",
    fields={
        "dtype": Field(_FLOATS, "bf16"),
        "state": Field(("f32", "bf16", "f16", "i16", "i8"), "f32"),
        "dstate": Field(None, 128),
    },
    axes={"dtype": _FLOATS, "state": ("f32", "bf16", "f16", "i16", "i8"), "dstate": _STATE_COLUMNS},
    config=RecurrentConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("cuda_core", (*at_least(80), Constraint("dstate", "in", _STATE_COLUMNS)), _selective_unit),
    ),
    prebuilt=({"dtype": "bf16"},),
)


class ChunkConfig(NamedTuple):
    step: int  # 0: prepares chunks, 1: maps segments, 2: carries states from segment to segment, 3: computes outputs
    columns: int  # of a state that a CTA computes
    cluster: int  # CTAs that copy for each other


_CHUNK = 64  # tokens
CHUNK_MATRIX = 2560  # elements of a lower triangular matrix of a chunk: 10 blocks of 16 x 16
_STAGES = 2
_MAP_COLUMNS = 64


class _Chunks(NamedTuple):
    """What the kernels of an implementation are called, and the form of their shared memory."""

    suffix: str
    columns: tuple[int, ...]  # of a state that a CTA may have
    matrix: int  # elements of a matrix of a chunk
    alignment: int
    pairs: bool  # whether the CTAs of 64 columns of a head are a cluster
    channel_columns: tuple[int, ...]  # with a gate for each channel
    channel_stages: int
    channel_ctas: int  # of the preparation with a gate for each channel, that fit an SM

    def shared_bytes(self, dim: int, columns: int, outputs: bool, channels: bool) -> int:
        """Of stages with k, a matrix of a chunk, v and factors; for outputs also q and the scores; with a gate for each
        channel k twice; of barriers.
        """
        tiles = (1 + outputs) * (_CHUNK * dim + self.matrix) + _CHUNK * columns + channels * _CHUNK * dim
        stages, factors = (self.channel_stages, dim) if channels else (_STAGES, 4 * _CHUNK)
        return stages * (2 * tiles + 4 * factors) + 2 * self.alignment

    def entries(self, axes: Values) -> tuple[Entry, ...]:
        dtype, dim, channels = DTYPES[axes["dtype"]], axes["dim"], axes["gate"] == "channel"
        entries, flag = [_prepare_entry(dtype.device, dim, self.channel_ctas if channels else 0)], str(channels).lower()
        size = self.shared_bytes(dim, _MAP_COLUMNS, False, channels)
        body = f"map_segments{self.suffix}<{dtype.device}, {dim}, {_MAP_COLUMNS}, {flag}, {size}>"
        entries.append(Entry("map_segments", body, 2 * _MAP_COLUMNS, ChunkConfig(1, _MAP_COLUMNS, 1), size, 1))
        size = 4 * (4 + 1) * 8 * dim + 128
        entries.append(Entry("carry_states", f"carry_states<{dim}, {size}>", 4 * dim, ChunkConfig(2, dim, 1), size))
        for columns in self.channel_columns if channels else self.columns:
            if columns <= dim:
                size = self.shared_bytes(dim, columns, True, channels)
                body = f"chunk_gated_delta_rule{self.suffix}<{dtype.device}, {dim}, {columns}, {flag}, {size}>"
                config = ChunkConfig(3, columns, 2 if self.pairs and dim == 2 * columns else 1)
                entries.append(Entry(f"chunk_states_{columns}", body, 2 * columns, config, size, 128 // columns))
        return tuple(entries)


def _prepare_entry(dtype: str, dim: int, channel_ctas: int) -> Entry:
    if channel_ctas:  # tiles of k and q, six strips of columns, A, its diagonal, that of the scores, vectors
        size = 2 * 2 * _CHUNK * dim + 6 * 2 * 16 * dim + 2 * CHUNK_MATRIX + 4 * 4 * 324 + 4 * 512
        size += 4 * 4 * dim + 4 * 3 * _CHUNK + 192
        return Entry(
            "prepare_chunks",
            f"prepare_channel_chunks<{dtype}, {dim}, {size}>",
            128,
            ChunkConfig(0, 0, 1),
            size,
            channel_ctas,
        )
    # Tiles of k and q, then in their place A of four heads; 14 vectors.
    size = max(2 * 2 * _CHUNK * dim, 4 * (2 * CHUNK_MATRIX + 4 * 4 * 324 + 64)) + 4 * 14 * _CHUNK + 128
    return Entry("prepare_chunks", f"prepare_chunks<{dtype}, {dim}, {size}>", 128, ChunkConfig(0, 0, 1), size, 5)


def _chunk_unit(axes: Values) -> Unit:
    entries = _Chunks("", (32, 64), CHUNK_MATRIX, 128, False, (32, 64), 1, 2).entries(axes)
    return Unit("fi/linear_attention/chunk_gated_delta_rule.cuh", "ChunkGatedDeltaRuleParams", entries)


def _chunk_wgmma_unit(axes: Values) -> Unit:
    # Two CTAs of 64 columns on each SM: faster than one of 128 (docs/notes/linear-attention-chunk-states.md).
    # With a gate for each channel, k twice leaves an SM one CTA: of 128 columns where there are many states.
    entries = _Chunks("_wgmma", (64,), 12 * 256, 1024, True, (64, 128), 2, 3).entries(axes)
    return Unit("fi/linear_attention/chunk_gated_delta_rule_sm90.cuh", "ChunkGatedDeltaRuleParams", entries)


_CHUNK_HEADS = (
    Constraint("dim", "in", (64, 128)),
    Rule(("dim", "dim_v"), "heads of v as wide as those of k", lambda dim, dim_v: dim == dim_v),
)
CHUNK_GATED_DELTA_RULE = Op(
    name="chunk_gated_delta_rule",
    family="linear_attention",
    arguments="Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, "
    "Tensor? g=None, Tensor? beta=None, bool use_qk_l2norm=False, Tensor(b)? initial_state=None, "
    "Tensor(b!)? output_state=None, Tensor? state_indices=None, Tensor(c!)? state_checkpoints=None, "
    "Tensor? checkpoint_cu_starts=None, int checkpoint_every_n_tokens=0, int segment_tokens=0, "
    "Tensor? output_state_indices=None, bool? enable_pdl=None",
    fields={
        "dtype": Field(_FLOATS_16, "bf16"),
        "dim": Field(None, 128),
        "dim_v": Field(None, 128),
        "gate": Field(("head", "channel"), "head"),
    },
    axes={"dtype": _FLOATS_16, "dim": (64, 128), "dim_v": (64, 128), "gate": ("head", "channel")},
    config=ChunkConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("wgmma_sm90", (*exactly(90), *_CHUNK_HEADS), _chunk_wgmma_unit),
        Implementation("mma_sm80", (*at_least(80), *_CHUNK_HEADS), _chunk_unit),
    ),
    prebuilt=({"dtype": "bf16"}, {"dtype": "bf16", "gate": "channel"}),
)

recurrent_gated_delta_rule = operator(RECURRENT_GATED_DELTA_RULE)
selective_state_update = operator(SELECTIVE_STATE_UPDATE)
chunk_gated_delta_rule = operator(CHUNK_GATED_DELTA_RULE)
