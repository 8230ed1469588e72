"""The ops behind batch decode: `decode_plan` writes the schedule of a batch, `batch_decode` computes attention by it.

A caller allocates `Buffers` once, calls `decode_plan` when lengths change, and `batch_decode` for each layer. Kernels
write the buffers, so two callers must not share them. Neither call synchronises, and both may be captured in a CUDA
graph.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import NamedTuple

from fi_core.attention.ops.request import ALIGNED, CUDNN, FIELDS, KV_TYPES, TYPES, plan_implementations, with_tables
from fi_core.observe.describe import words
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.launch.operator import operator, operators
from fi_core.runtime.lazy import torch
from fi_core.runtime.machine import multiprocessors_of, target_of
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES, E2M1
from fi_core.runtime.spec.op import THREADS, Entry, Field, Implementation, Op, Unit, Values
from fi_core.utils import ceil_div, round_up

KV_TILE = 64  # keys; kDecodeKvTile of decode_schedule.h
Q_TILE = 16  # packed query rows; kDecodeQTile
MAX_RANGES = 1023  # work ranges; kDecodeMaxRanges
CPU_CTAS = 64  # "CTAs" of a CPU; a fixed number, so that results do not depend on the number of threads
BALANCED, NO_SPLIT = 0, -1  # values of `split_kv`, beside a number of KV tiles
INVARIANT_TOKENS = 512  # of a chunk where results must not depend on the batch


# The tensors are contiguous, and the numbers of the `Buffers` are those sized for the batch. indptr: int32
# `[batch_size + 1]`; page ids of request b are `page_indices[indptr[b] : indptr[b + 1]]`, or without it
# `page_indices[b * pages_per_request :][:pages_per_request]`, a flat block table. last_page_len: int32 `[batch_size]`;
# lengths are `(pages - 1) * page_size + last_page_len`. kv_len: int32, uint32 or int64 `[batch_size]`; lengths, which
# take precedence, up to the tokens of the pages. A request without pages has length 0. q_tiles: `num_q_tiles(...)`.
# q_len: query tokens of each request. window_left: keys before the last that are attended to (-1: all), which
# `batch_decode` must be given too.
DECODE_PLAN = Op(
    name="decode_plan",
    family="attention",
    arguments="Tensor(a!) schedule, Tensor? indptr, Tensor? last_page_len, Tensor? kv_len, int page_size, int q_tiles, "
    "int num_ctas, int num_ranges, int split_kv, int pages_per_request=0, int q_len=1, int window_left=-1",
    implementations=plan_implementations("decode"),
)
decode_plan = operator(DECODE_PLAN)


class DecodeKind(IntEnum):
    """The kernel that a kernel entry of batch_decode instantiates."""

    CUDA_CORE = 0  # one query row per warp
    MMA = 1  # mma.sync, keys by cp.async
    TMA = 2  # mma.sync, keys by TMA
    CLUSTER = 3  # mma.sync, one cluster of CTAs per request and query tile


class DecodeConfig(NamedTuple):
    kind: DecodeKind
    head_dim: int  # the largest that a CUDA_CORE entry takes; the only one that others take
    whole_rows: int = 0  # 1: a TMA copy loads whole rows of keys
    evict_first_mb: int = 0  # MB of keys and values of a batch up to which L2 evicts them first
    keys_per_copy: int = 1  # most keys of one TMA copy
    q_rows: int = 16  # most packed rows of a query tile
    ctas_per_sm: int = 0  # most CTAs of an SM that the entry runs; 0: any number
    heads: int = 1  # kv heads of a query tile; CUDA_CORE entries take any number


def _cuda_core_unit(axes: Values) -> Unit:
    """CUDA cores: every dtype, head dim, layout and option."""
    types = f"{DTYPES[axes['q']].device}, {DTYPES[axes['kv']].device}"
    narrow, wide = (DecodeConfig(DecodeKind.CUDA_CORE, dim) for dim in (256, 512))
    entries = (
        Entry("batch_decode_cuda_core", f"batch_decode_cuda_core<{types}, 1, 4>", 128, narrow, 0, 2),
        Entry("batch_decode_cuda_core_wide", f"batch_decode_cuda_core<{types}, 2, 1>", 128, wide, 0, 2),
    )
    return with_tables(Unit("fi/attention/decode/batch_decode.cuh", "BatchDecodeParams", entries), axes)


def _device_types(axes: Values) -> tuple[str, int, int, int]:
    """Template arguments T, Q, KV; bytes of an element of q and of kv, and of a key in shared memory."""
    q, kv = DTYPES[axes["q"]], DTYPES[axes["kv"]]
    operand = DTYPES["f16"] if kv.bytes == 1 else kv  # fp16 holds every fp8 value, and every one of NVFP4
    line = axes["head_dim"] // 2 if kv is E2M1 else ceil_div(axes["head_dim"] * kv.bytes, 128) * 128
    return f"{operand.device}, {q.device}, {kv.device}", q.bytes, kv.bytes, line


# The most KV tiles of all query tiles for which the mma_sm80 kernel has two CTAs per SM: beyond, three are faster
# (docs/notes/decode-page-size-1.md, as for all numbers of this kernel).
MOST_TILES_OF_TWO_CTAS = 8192


def _mma_ctas_per_sm(fp8: bool, tiles: int = 1 << 31) -> int:
    """CTAs per SM of the mma_sm80 kernel. tiles: KV tiles of all query tiles."""
    return 2 if fp8 or tiles <= MOST_TILES_OF_TWO_CTAS else 3


def _mma_unit(axes: Values) -> Unit:
    """mma.sync with cp.async. Shared memory is at most 99 KB, the limit of a CTA on sm_86, sm_89 and sm_120."""
    types, q_bytes, kv_bytes, line = _device_types(axes)
    dim, stages = axes["head_dim"], 2
    warps, keys = (4 if dim <= 128 else 2), (32 if kv_bytes == 1 or line <= 128 else 16)
    pipeline = max(stages * 2 * keys * line, Q_TILE * (dim + 8) * 4)
    fp4 = axes["kv"] == "e2m1"
    if fp4:  # the scales
        pipeline += stages * 2 * keys * dim // 16
    shared = warps * pipeline + Q_TILE * (dim * q_bytes + 16) + warps * Q_TILE * 8 + 192 + 16
    body = f"batch_decode_mma<{types}, {dim}, {warps}, {keys}, {stages}, {shared}>"
    config = DecodeConfig(DecodeKind.MMA, dim, evict_first_mb=200 if axes["capability"] == 90 else 0)
    most_ctas = _mma_ctas_per_sm(kv_bytes == 1)
    entry = Entry("batch_decode_mma", body, warps * 32, config, shared, most_ctas)
    if axes["capability"] != 90 or dim > 128 or fp4:
        return with_tables(Unit("fi/attention/decode/batch_decode.cuh", "BatchDecodeParams", (entry,)), axes)
    # With the registers of two CTAs an SM, where two run.
    two = entry._replace(name="batch_decode_mma_two_ctas", config=config._replace(ctas_per_sm=2), ctas_per_sm=2)
    entries = (*((two,) if most_ctas > 2 else ()), entry, _cluster_entry(types, dim, q_bytes, line, False, gather=True))
    return with_tables(Unit("fi/attention/decode/batch_decode_cluster_sm90.cuh", "BatchDecodeParams", entries), axes)


def _tma_unit(axes: Values) -> Unit:
    """mma.sync with a TMA pipeline, for Hopper."""
    types, q_bytes, _, line = _device_types(axes)
    dim, fp4 = axes["head_dim"], axes["kv"] == "e2m1"
    entries = [_tma_entry(axes, rows, heads) for rows, heads in (FP4_TILES if fp4 else ((Q_TILE, 1),))]
    if dim <= 128 and not fp4:
        entries.append(_cluster_entry(types, dim, q_bytes, line, bool(entries[0].config.whole_rows)))
    flags = THREADS if len(entries) > 1 else ()
    return with_tables(
        Unit("fi/attention/decode/batch_decode_sm90.cuh", "BatchDecodeParams", tuple(entries), flags=flags), axes
    )


def _tma_entry(axes: Values, rows: int, heads: int) -> Entry:
    """rows: the most of a query tile, or of each of its kv heads; heads: these. Only NVFP4 has 8 rows or more heads."""
    types, q_bytes, kv_bytes, line = _device_types(axes)
    dim, fp4 = axes["head_dim"], axes["kv"] == "e2m1"
    whole = fp4 or dim * kv_bytes % 128 == 0  # one TMA copy per row (docs/notes/decode-mainloop.md)
    # Stages of 32 KB (docs/notes/decode-fp8-stages.md).
    warps, groups, warp_keys = (4 if dim <= 128 else 2), 1, (32 if kv_bytes == 1 or line <= 128 else 16)
    if fp4:  # a conversion takes longer than one warp a scheduler has time for
        warps, groups = FP4_WARPS[dim, rows]
    keys = warps // groups * warp_keys
    scales = 2 * keys * dim // 16 if fp4 else 0
    stage = 2 * keys * line + scales
    tile_rows = rows if heads == 1 else Q_TILE
    rest = warps * rows * ((dim + 8) * 4 + 8) + 4 * (tile_rows * (dim * q_bytes + 16) + 40 + 16) + 7 * 8 + 24 + 1024
    stages = (227 * 1024 - rest) // (stage + 24)
    long = stages if fp4 else min(max(2, _BYTES_IN_FLIGHT // stage), stages)
    stages = stages if kv_bytes > 1 else long  # five stages are slower for fp8 keys
    shared = rest + stages * (stage + 24)
    if fp4:
        shared = round_up(shared - stages * scales, 16) + stages * scales
    numbers = f"{dim}, {warps}, {warp_keys}, {stages}, {long}, {str(whole).lower()}, {shared}, {groups}, {rows}"
    numbers += f", {heads}" if heads > 1 else ""
    copied = min(keys // heads, KV_TILE)
    config = DecodeConfig(DecodeKind.TMA, dim, int(whole), _EVICT_FIRST_MB, copied, rows, heads=heads)
    name = "batch_decode_tma" if rows == Q_TILE else f"batch_decode_tma_{rows}"
    name += f"_{heads}_heads" if heads > 1 else ""
    return Entry(name, f"batch_decode_tma<{types}, {numbers}>", warps * 32 + (128 if fp4 else 96), config, shared, 1)


# Query tiles of NVFP4: most rows of a kv head, and kv heads.
FP4_TILES = ((8, 4), (8, 2), (8, 1), (Q_TILE, 1))
# Requests times KV heads from which a query tile has several heads: fewer tiles have many splits, each with more rows
# to merge (docs/notes/decode-nvfp4.md).
FEWEST_OUTPUTS = {4: 128, 2: 32, 1: 0}
# Of NVFP4 keys, by head dim and most rows of a query tile: consumer warps, and their groups, which alternate.
FP4_WARPS = {
    **dict.fromkeys([(64, 8), (128, 8)], (12, 3)),
    **dict.fromkeys([(64, 16), (128, 16)], (8, 2)),
    **dict.fromkeys([(256, 8), (256, 16)], (4, 1)),
}


def _cluster_entry(types: str, dim: int, q_bytes: int, line: int, whole: bool, gather: bool = False) -> Entry:
    """For small batches, with 8 warps and stages of 16 KB (docs/notes/decode-cluster.md)."""
    warps, stage = 8, 2 * 16 * line
    stages = 16 * 1024 // stage
    rest = Q_TILE * (dim * q_bytes + 16) + Q_TILE * dim * 6 + warps * Q_TILE * 8 + 8
    shared = ceil_div(rest + warps * stages * (stage + 16), 16) * 16
    flags = f"{str(whole).lower()}, {str(gather).lower()}"
    body = f"batch_decode_cluster<{types}, {dim}, {warps}, {stages}, {flags}, {shared}>"
    config = DecodeConfig(DecodeKind.CLUSTER, dim, int(whole), 0, 1 if gather else 16)
    return Entry("batch_decode_cluster", body, warps * 32, config, shared, 1)


# Of the TMA kernel (docs/notes/decode-mainloop.md).
_BYTES_IN_FLIGHT = 96 * 1024  # of keys
_EVICT_FIRST_MB = 100  # of keys and values: larger batches are slower with it
HEAD_DIMS = (64, 80, 96, 128, 192, 256)  # of the tensor-core kernels
_FP4_HEAD_DIMS = (64, 128, 256)  # whose rows have a swizzle of their size
_NARROW = ("f16", "bf16", "e4m3", "e5m2")
TENSOR_CORES = (
    Constraint("q", "in", _NARROW),
    Constraint("kv", "in", (*_NARROW, "e2m1")),
    Constraint("head_dim_qk", "in", HEAD_DIMS),
    Rule(
        ("kv", "head_dim_qk"),
        f"head_dim_qk in {_FP4_HEAD_DIMS} for NVFP4 keys",
        lambda kv, dim: kv != "e2m1" or dim in _FP4_HEAD_DIMS,
    ),
    Rule(("head_dim_qk", "head_dim_vo"), "head_dim_vo == head_dim_qk", lambda qk, vo: qk == vo),
    Constraint("pos_encoding", "in", ("NONE", "ALIBI")),
    ALIGNED,
)
# A TMA copy takes 70 cycles to issue, so it must load many keys of a page (docs/notes/decode-page-size-1.md).
_WHOLE_COPIES = Constraint("page_size", "multiple of", 16)
# A TMA copy writes to a multiple of 128 bytes, which is up to four rows of NVFP4.
_PACKED_PAGES = Rule(
    ("kv", "page_size"), "page_size multiple of 4 for NVFP4 keys", lambda kv, size: kv != "e2m1" or size % 4 == 0
)
_FOR_TMA: tuple[Constraint | Rule, ...] = (
    *exactly(90),
    *TENSOR_CORES,
    _PACKED_PAGES,
    Constraint("heads_per_tile", "in", (1, 2, 4)),
)
_FOR_MMA: tuple[Constraint | Rule, ...] = (*at_least(80), *TENSOR_CORES, Constraint("heads_per_tile", "==", 1))


def _compiled(values: Values) -> Values:
    return {**_general(values), "head_dim": values["head_dim_qk"]}


def _general(values: Values) -> Values:
    return {"q": values["q"], "kv": values["kv"], "head_dim": 0, "split_tables": values["split_tables"]}


# out: `[tokens, num_qo_heads, head_dim_vo]`, fp16, bf16, fp32, e4m3 or e5m2. lse: fp32 `[tokens, num_qo_heads]`
# contiguous, base 2, or None. q: `[tokens, num_qo_heads, head_dim_qk]`. k, v: `[num_pages, page_size,
# num_kv_heads, dim]` (kv_layout 0, NHD) or `[num_pages, num_kv_heads, page_size, dim]` (1, HND), of q's dtype, or with
# a 16-bit q of the other one, of e4m3 or e5m2, or uint8: NVFP4, with dim / 2 bytes, and in k_scales and v_scales
# dim / 16 e4m3 scales (or their bytes). Any strides with a contiguous last dimension; head dims are multiples of 8 up
# to 512, of 16 for NVFP4.
#
# partials, schedule, num_ctas, num_ranges, split_kv: the `Buffers` that the last `decode_plan` filled. page_indices:
# int32, contiguous.
#
# pos_encoding: value of `PosEncodingMode`. sm_scale, bmm1_scale (fp32, one element on the device), scale_q (fp32
# `[num_qo_heads]`) and scale_k (fp32 `[num_kv_heads]`) multiply the scores; out_scale, bmm2_scale and scale_v
# (`[num_kv_heads]`) multiply the output but not lse. sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to row_sum,
# so lse includes it. A row without keys has out = 0 and lse = sinks[h] * log2(e), or -inf without sinks.
#
# q_len > 1: row i is at position kv_len - q_len + i and attends to keys up to that position. With mask (uint8
# `[tokens, ceil(q_len / 32) * 4]`) it attends to all keys before kv_len - q_len, and to key kv_len - q_len + t if bit
# t % 8 of byte t / 8 is set. qo_indptr (int32 `[batch_size + 1]`): request b has rows `qo_indptr[b] : qo_indptr[b + 1]`
# of q, out, lse and mask, at most q_len; its number of rows replaces q_len above. Rows outside all requests are
# not written. v_table_offset: as in batch_prefill. heads_per_tile: of the function of this name, as planned. rows,
# num_qo_heads: those that q must have, if a plan fixes them; rows 0: any. v None: k has keys and values in an axis of 2
# behind the pages.
BATCH_DECODE = Op(
    name="batch_decode",
    family="attention",
    arguments="Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) partials, Tensor(d!) schedule, Tensor q, Tensor k, "
    "Tensor? v, Tensor page_indices, int kv_layout, int num_ctas, int num_ranges, int split_kv, float sm_scale=1.0, "
    "float out_scale=1.0, Tensor? sinks=None, bool? enable_pdl=None, Tensor? scale_q=None, Tensor? scale_k=None, "
    "Tensor? scale_v=None, Tensor? bmm1_scale=None, Tensor? bmm2_scale=None, Tensor? k_scales=None, "
    "Tensor? v_scales=None, int q_len=1, int pos_encoding=0, int window_left=-1, float soft_cap=0.0, "
    "float rope_scale=1.0, float rope_theta=10000.0, Tensor? mask=None, Tensor? qo_indptr=None, int v_table_offset=0, "
    'int heads_per_tile=1, int rows=0, int num_qo_heads=0, str backend="auto"',
    planned=words(
        "partials schedule page_indices kv_layout num_ctas num_ranges split_kv q_len pos_encoding",
        "window_left soft_cap rope_scale rope_theta mask qo_indptr v_table_offset heads_per_tile rows num_qo_heads",
        "backend",
    ),
    fields={**FIELDS, "heads_per_tile": Field(None, 1)},
    axes={"q": TYPES, "kv": KV_TYPES, "head_dim": (*HEAD_DIMS, 0), "split_tables": (False, True)},
    config=DecodeConfig,
    takes_variant=True,
    beside=("batch_prefill", "prefill_plan"),
    implementations=(
        Implementation("cpu", ON_CPU, axes=_general, backends=("cpu", "fa2", "fa2_cuda_core")),
        Implementation("tma_sm90", _FOR_TMA, _tma_unit, _compiled, ("fa3",), preferred=(_WHOLE_COPIES,)),
        Implementation("mma_sm80", _FOR_MMA, _mma_unit, _compiled, ("fa2_tc", "fa2")),
        Implementation("cuda_core", at_least(80), _cuda_core_unit, _general, ("fa2", "fa2_cuda_core")),
        Implementation("cudnn", CUDNN, axes=_general, backends=("cudnn",), by_name=True),
    ),
    prebuilt=tuple(
        {"q": q, "kv": kv, "head_dim_qk": dim, "head_dim_vo": dim}
        for q, kv, dims in (
            *((q, q, (64, 128, 256)) for q in ("f16", "bf16")),
            *((q, "e4m3", (128,)) for q in ("f16", "bf16")),
            ("f32", "f32", (128,)),
        )
        for dim in dims
    ),
)
batch_decode = operator(BATCH_DECODE)
plan_run, run_planned = (made := operators()["batch_decode"]).plan, made.planned_function


class Buffers(NamedTuple):
    """Device memory of one user of batch decode. Kernels write both tensors, so two streams must not share them.

    Args:
        schedule: int32 `[schedule_words]`; `decode_plan` fills it, `batch_decode` reads it and counts arrivals in it.
        partials: fp32 `[max_partials, 16, head_dim_vo + 2]`, of splits of `batch_decode`.
        num_ctas: CTAs of the persistent kernel.
        num_ranges: most work ranges of the schedule. A work range is a run of consecutive work tiles for one CTA.
        split_kv: how the keys of a request are split. BALANCED: over CTAs of equal work. NO_SPLIT: not at all. A
            positive number (`kv_chunk_tiles`): into chunks of this many KV tiles of 64 tokens from position 0, so that
            the result of a request does not depend on its batch.
    """

    schedule: torch.Tensor
    partials: torch.Tensor
    num_ctas: int
    num_ranges: int
    split_kv: int


class Sizes(NamedTuple):
    """Sizes of `Buffers`: words of the schedule, number of partials, and the numbers of `Buffers`."""

    schedule_words: int
    max_partials: int
    num_ctas: int
    num_ranges: int
    split_kv: int


def grid_of(device: torch.device, choice: Choice | None = None, tiles: int = 1 << 31) -> tuple[int, int]:
    """(num_ctas, num_ranges): the CTAs of the persistent kernel, and the most work ranges for them.

    A CPU has a fixed number. choice: the kernel that is expected to run; another kernel also works. tiles: the most KV
    tiles of all query tiles, if known.
    """
    if target_of(device).kind == "cpu":
        return CPU_CTAS, 3 * CPU_CTAS
    return _grid(choice, multiprocessors_of(device), tiles <= MOST_TILES_OF_TWO_CTAS)


@functools.lru_cache(maxsize=4096)
def _grid(choice: Choice | None, multiprocessors: int, few_tiles: bool) -> tuple[int, int]:
    name = choice.implementation if choice else ""
    fp8 = choice is not None and dict(choice.spec.axes)["kv"] in ("e4m3", "e5m2", "e2m1")
    mma = _mma_ctas_per_sm(fp8, MOST_TILES_OF_TWO_CTAS) if few_tiles else _mma_ctas_per_sm(fp8)
    ctas_per_sm = {"mma_sm80": mma, "cuda_core": 4}.get(name, 1)
    num_ctas = min(MAX_RANGES, ctas_per_sm * multiprocessors)
    # A memory-bound kernel runs faster on some SMs, so its tile scheduler hands out smaller ranges dynamically.
    return num_ctas, min(MAX_RANGES, 3 * num_ctas) if name == "tma_sm90" and not fp8 else num_ctas


def heads_per_tile(
    choice: Choice, batch_size: int, num_qo_heads: int, num_kv_heads: int, q_len: int = 1, split_kv: int = BALANCED
) -> int:
    """KV heads of a query tile: several where one TMA copy then loads NVFP4 keys of all.

    Heads of a token share a sector of 32 bytes of scales in NHD, which one CTA then reads once. Results differ in the
    last bits, so this depends on the batch only where splits do.
    """
    if q_len > 1 or split_kv != BALANCED or choice.implementation != "tma_sm90":
        return 1
    if dict(choice.spec.axes)["kv"] != "e2m1" or not num_kv_heads:
        return 1
    rows, outputs = num_qo_heads // num_kv_heads, batch_size * num_kv_heads
    for _, heads in FP4_TILES:
        if heads * rows <= Q_TILE and num_kv_heads % heads == 0 and outputs >= FEWEST_OUTPUTS[heads]:
            return heads
    return 1


def num_q_tiles(num_qo_heads: int, num_kv_heads: int, q_len: int = 1, heads: int = 1) -> int:
    """Query tiles of a request: `num_kv_heads * ceil(num_qo_heads / num_kv_heads * q_len / 16)`; fewer with several
    kv heads in each, `heads`.
    """
    return num_kv_heads // heads * ceil_div(num_qo_heads // num_kv_heads * heads * q_len, Q_TILE)


def kv_chunk_tiles(chunk_tokens: int) -> int:
    """The value of `split_kv` for chunks of at least this many tokens: whole KV tiles of 64."""
    return ceil_div(max(1, chunk_tokens), KV_TILE)


def buffer_sizes(
    device: torch.device,
    batch_size: int,
    q_tiles: int,
    split_kv: int = BALANCED,
    tokens: int = 0,
    choice: Choice | None = None,
) -> Sizes:
    """Sizes for `batch_size` requests of any lengths.

    Args:
        device: device of the buffers.
        batch_size: number of requests.
        q_tiles: `num_q_tiles(...)`.
        split_kv: as in `Buffers`.
        tokens: the most tokens of all requests together: page_size times the number of page indices, or of the
            entries of a block table. 0: not known; chunks need it.
        choice: as in `grid_of`.
    """
    num_ctas, num_ranges = grid_of(device, choice, tokens // KV_TILE * q_tiles if tokens else 1 << 31)
    max_partials = 2 * num_ranges
    if split_kv > 0:
        max_partials = max(max_partials, q_tiles * (tokens // (split_kv * KV_TILE) + 2 * batch_size))
    schedule_words = 12 + (num_ranges + 1) * 8 + batch_size * 4 + max_partials  # one counter per partial
    return Sizes(schedule_words, max_partials, num_ctas, num_ranges, split_kv)


def allocate(device: torch.device, sizes: Sizes, head_dim_vo: int) -> Buffers:
    """New buffers. Neither needs initial values: `decode_plan` zeroes the counters."""
    schedule = torch.empty(sizes.schedule_words, dtype=torch.int32, device=device)
    partials = torch.empty((sizes.max_partials, Q_TILE, head_dim_vo + 2), dtype=torch.float32, device=device)
    return Buffers(schedule, partials, sizes.num_ctas, sizes.num_ranges, sizes.split_kv)
