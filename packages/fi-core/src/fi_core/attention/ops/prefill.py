"""The ops behind batch prefill: `prefill_plan` writes the list of work tiles, `batch_prefill` computes attention by it.

A caller keeps one schedule, calls `prefill_plan` when lengths change, and `batch_prefill` for each layer. Kernels count
in the schedule, so two callers must not share it. Neither call synchronises, and both may be captured in a CUDA graph.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from fi_core.attention.ops import request
from fi_core.attention.ops.request import BOTH, FIELDS, KV_TYPES, TYPES, element_bytes, with_tables
from fi_core.observe.describe import words
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.launch.operator import operator, operators
from fi_core.runtime.lazy import torch
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES, E2M1, DType
from fi_core.runtime.spec.op import THREADS, Entry, Implementation, Op, Unit, Values
from fi_core.utils import round_up

# The 16-bit operand type of tensor cores that represents q and k exactly. Of a q of 16 bits and keys of the other 16 it
# is that of the keys, to which q is rounded.
MULTIPLY = {"f16": "f16", "bf16": "bf16", "e4m3": "f16", "e5m2": "f16"}


class TileShape(NamedTuple):
    """TileShape in mma_tile_loader.cuh: head dims per pass, m16 tiles per warp, warps, keys per stage."""

    dim_qk: int
    dim_vo: int
    m_tiles: int
    warps: int
    keys: int
    blocks: int  # a multiprocessor

    @property
    def rows(self) -> int:
        return 16 * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, kv: DType) -> int:
        """sizeof(MmaTileLoader::Shared), and the 128 bytes to which its start is aligned."""
        keys, rows = self.keys * (self.dim_qk + self.dim_vo), self.rows
        raw = keys // 2 if kv is E2M1 else keys if kv.bytes == 1 else 2 * 8 * kv.bytes
        angles = 4 * self.dim_qk if self.dim_qk > 128 else 2048
        more = 16 * self.m_tiles * self.threads + 32 * self.keys + 24 * rows + angles + 68
        scales = keys // 16 + 32 * self.keys + 8 if kv is E2M1 else 0  # and their addresses
        return round_up(round_up(2 * (rows * self.dim_qk + keys) + raw + more, 128) + scales, 128) + 128

    def body(self, kernel: str, q: str, kv: str) -> str:
        operand = kv if DTYPES[kv].bytes == 2 else MULTIPLY[q]
        names = (DTYPES[operand].device, DTYPES[q].device, DTYPES[kv].device)
        shape = f"fi::TileShape<{self.dim_qk}, {self.dim_vo}, {self.m_tiles}, {self.warps}, {self.keys}>"
        return f"{kernel}<{', '.join(names)}, {shape}, {self.shared_bytes(DTYPES[kv])}>"


# Any head dim, in passes of 128 (docs/notes/prefill-mma.md, as for WIDE_TILES). With 8-bit keys, and in the kernel of
# single requests, 64 keys would spill a few registers.
TILE, TILE_OF_48 = TileShape(128, 128, 2, 4, 64, 2), TileShape(128, 128, 2, 4, 48, 2)
# Head dims above 128 in one pass, 16-bit keys; upper bounds of (head_dim_qk, head_dim_vo).
WIDE_TILES = {192: TileShape(192, 128, 2, 4, 64, 2), 256: TileShape(256, 256, 1, 4, 64, 2)}


Q_TILE = 128  # packed query rows of the default work tile
_LARGE_SHARED = (90, 100, 103)  # capabilities with 227 KB of shared memory
_HEADER, _COUNTERS = 8, 256 * 12  # schedule_words; PrefillSchedule::kHeader, kCounters
_WORK = 56  # bytes; sizeof(WorkTile)


# All tensors are contiguous. schedule: int32, `schedule_words(...)` or longer, aligned to 16 bytes; needs no initial
# values. qo_indptr: int32 `[batch_size + 1]`, offsets of query tokens; without it qo_len each. kv_indptr: int32
# `[batch_size + 1]`; page ids of request b are `page_indices[kv_indptr[b] : kv_indptr[b + 1]]`, or without it
# `page_indices[b * pages_per_request :][:pages_per_request]`, a flat block table. Ragged keys have page_size 1 and
# kv_indptr in tokens. last_page_len: int32 `[batch_size]`; lengths are `(pages - 1) * page_size + last_page_len`, else
# of full pages. kv_len: int32 or uint32 `[batch_size]`; lengths, which take precedence, up to the tokens of the
# pages. tile_tokens: `tile_tokens(...)` with the `q_tile_rows(...)` of the choice. causal, window_left: the expected
# mask, by which tiles are sorted; `batch_prefill` may be given another. Each tile is computed for every kv head.
# short_tile_tokens: `short_tile_tokens(...)`: tiles may have this height (results have the same bits). max_partials:
# `max_partials(...)` of the partials that `batch_prefill` is given: the keys of the last tiles, or of all tiles of a
# small batch, may then be split over CTAs, by the number of SMs and the rest of the batch; an implementation without
# split-KV computes each tile whole. num_ctas: CTAs of the persistent kernel; 0: one per SM.
PREFILL_PLAN = Op(
    name="prefill_plan",
    family="attention",
    arguments="Tensor(a!) schedule, Tensor? qo_indptr, Tensor? kv_indptr, Tensor? last_page_len, Tensor? kv_len, "
    "int batch_size, int tile_tokens, int page_size=1, int qo_len=0, int pages_per_request=0, bool causal=False, "
    "int window_left=-1, int num_kv_heads=1, int short_tile_tokens=0, int max_partials=0, int num_ctas=0",
    implementations=request.plan_implementations("prefill"),
)
prefill_plan = operator(PREFILL_PLAN)


class PrefillKind(IntEnum):
    """The kernel that a kernel entry of batch_prefill instantiates."""

    MMA = 0  # mma.sync, keys by cp.async
    WGMMA = 1  # wgmma on 16-bit operands, keys by TMA, or by cp.async from pages of no whole groups of 8 tokens
    WGMMA_FP8 = 2  # wgmma on fp8 operands


class PrefillConfig(NamedTuple):
    kind: PrefillKind
    rows_per_cta: int  # packed query rows
    keys_per_stage: int
    columns_per_cta: int  # of the output
    ctas_per_sm: int
    splits_kv: int = 0  # 1: the keys of a work tile may be split over CTAs


def _mma_unit(axes: Values) -> Unit:
    """mma.sync."""
    q, kv = DTYPES[axes["q"]], DTYPES[axes["kv"]]
    tile = WIDE_TILES[axes["head_dim"]] if axes["head_dim"] else TILE if kv.bytes == 2 else TILE_OF_48
    size, body = tile.shared_bytes(kv), tile.body("batch_prefill_mma", q.short, kv.short)
    config = PrefillConfig(PrefillKind.MMA, tile.rows, tile.keys, tile.dim_vo, tile.blocks)
    entry = Entry("batch_prefill_mma", body, tile.threads, config, size, tile.blocks)
    return with_tables(Unit("fi/attention/prefill/batch_prefill.cuh", "BatchPrefillParams", (entry,)), axes)


# The 16-bit wgmma kernel: axis head_dim -> (head_dim_qk, head_dim_vo, keys per stage, consumer warpgroups of 64 rows).
# docs/notes/prefill-tiles.md has the trials. No others.
_WGMMA_TILES = {64: (64, 64, 128, 3), 128: (128, 128, 128, 3), 192: (192, 128, 128, 2), 256: (256, 256, 80, 2)}
_WGMMA_HEAD_DIM_VO = {qk: vo for qk, vo, *_ in _WGMMA_TILES.values()}
# With a user's variant, as _WGMMA_TILES: its hooks need registers.
VARIANT_TILES = {64: (64, 64, 128, 2), 128: (128, 128, 128, 2), 192: (192, 128, 80, 2), 256: (256, 256, 64, 2)}
# The fp8 kernel, as _WGMMA_TILES (docs/notes/prefill-fp8.md).
_FP8_TILES = {64: (64, 64, 128, 3), 128: (128, 128, 128, 3), 192: (192, 128, 128, 3), 256: (256, 256, 128, 2)}
# 16-bit q over small pages of fp8 keys: keys per stage, fp8 stages (docs/notes/prefill-fp8-keys.md).
_GATHERED_TILES = {64: (128, 2), 128: (96, 2), 192: (80, 2), 256: (64, 1)}


def _wgmma_shared_bytes(qk: int, vo: int, keys: int, groups: int, most: int = 226 * 1024) -> int:
    """sizeof(PrefillKernel::Shared), and the 1024 bytes to which its start is aligned. most: of tiles."""
    q_bytes = 2 * 64 * groups * qk
    tiles = q_bytes + 2 * 2 * keys * (qk + vo)
    query_stages = 2 if tiles + q_bytes <= most else 1
    return round_up(tiles + q_bytes * (query_stages - 1) + (12 + 2 * query_stages) * 8 + 2 * _WORK, 1024) + 1024


def _wgmma_unit(axes: Values) -> Unit:
    """wgmma and TMA: one entry whose TMA copies load 64 columns, and one whose copies load whole rows."""
    q, head_dim = DTYPES[axes["q"]], axes["head_dim"]
    if q.bytes == 1:
        return _fp8_unit(axes)
    if DTYPES[axes["kv"]].bytes == 1:
        return _mixed_unit(axes)
    qk, vo, keys, groups = (VARIANT_TILES if axes.get("variant") else _WGMMA_TILES)[head_dim]
    if axes["soft_cap"]:
        keys = min(keys, 64 if vo > 128 else 96 if vo > 64 else 128)  # the cap needs the registers of the others
    size, capped = _wgmma_shared_bytes(qk, vo, keys, groups), "true" if axes["soft_cap"] else "false"
    config = PrefillConfig(PrefillKind.WGMMA, 64 * groups, keys, vo, 1, splits_kv=1)

    def entry(name: str, whole_rows: str) -> Entry:
        body = f"batch_prefill_wgmma<{q.device}, {qk}, {vo}, {keys}, {whole_rows}, {capped}, {groups}, {size}>"
        return Entry(name, body, 128 * (groups + 1), config, size, 1)

    entries = (entry("batch_prefill_wgmma", "false"), entry("batch_prefill_wgmma_whole_rows", "true"))
    return with_tables(
        Unit("fi/attention/prefill/batch_prefill_sm90.cuh", "BatchPrefillParams", entries, flags=THREADS), axes
    )


def _fp8_shared_bytes(qk: int, vo: int, keys: int, groups: int) -> int:
    """sizeof(PrefillFp8Kernel::Shared), and the 1024 bytes to which its start is aligned."""
    padded_qk, padded_vo = round_up(qk, 128), round_up(vo, 128)
    query_stages, key_stages = 1 if vo > 128 else 2, 2 if padded_qk > 128 else 3
    tiles = query_stages * 64 * groups * padded_qk + keys * (key_stages * (padded_qk + vo) + 2 * padded_vo)
    return round_up(tiles + (2 * query_stages + 4 * key_stages + 8) * 8 + 2 * _WORK, 1024) + 1024


def _fp8_unit(axes: Values) -> Unit:
    """wgmma on fp8: queries, keys, values and softmax weights."""
    qk, vo, keys, groups = _FP8_TILES[axes["head_dim"]]
    if axes["soft_cap"]:
        keys = 96
    size, capped = _fp8_shared_bytes(qk, vo, keys, groups), "true" if axes["soft_cap"] else "false"
    config = PrefillConfig(PrefillKind.WGMMA_FP8, 64 * groups, keys, vo, 1)
    body = f"batch_prefill_wgmma_fp8<{DTYPES[axes['q']].device}, {qk}, {vo}, {keys}, {capped}, {groups}, {size}>"
    entry = Entry("batch_prefill_wgmma_fp8", body, 128 * (groups + 1), config, size, 1)
    return with_tables(Unit("fi/attention/prefill/batch_prefill_fp8_sm90.cuh", "BatchPrefillParams", (entry,)), axes)


def _mixed_unit(axes: Values) -> Unit:
    """The 16-bit wgmma kernel with warps that convert keys and values from fp8 (docs/notes/prefill-fp8-keys.md)."""
    q, kv, head_dim = DTYPES[axes["q"]], DTYPES[axes["kv"]], axes["head_dim"]
    qk, vo, keys, groups = _WGMMA_TILES[head_dim]
    keys = min(keys, _GATHERED_TILES[head_dim][0]) if axes["soft_cap"] and vo > 64 else keys

    def entry(name: str, keys: int, last: int, size: int, warpgroups: int) -> Entry:
        types = f"{q.device}, {kv.device}, {qk}, {vo}, {keys}, {'true' if axes['soft_cap'] else 'false'}"
        config = PrefillConfig(PrefillKind.WGMMA, 64 * groups, keys, vo, 1, splits_kv=1)
        return Entry(name, f"{name}<{types}, {groups}, {last}, {size}>", 128 * (groups + warpgroups), config, size, 1)

    size = _wgmma_shared_bytes(qk, vo, keys, groups) + 1024  # with the barriers of fp8 tiles
    by_tma = entry("batch_prefill_wgmma_mixed", keys, 4 if vo > 128 else 2, size, 2 if vo > 128 else 1)
    keys, stages = _GATHERED_TILES[head_dim]
    raw = stages * keys * (round_up(qk, 128) + round_up(vo, 128))  # the 16-bit kernel's Shared has the rest
    size = raw + _wgmma_shared_bytes(qk, vo, keys, groups, 226 * 1024 - raw) + 1024
    entries = (by_tma, entry("batch_prefill_wgmma_gathered", keys, stages, size, 2))
    header = "fi/attention/prefill/batch_prefill_mixed_sm90.cuh"
    return with_tables(Unit(header, "BatchPrefillParams", entries, flags=THREADS), axes)


def _fp8(dtype: str) -> bool:
    return element_bytes(dtype) == 1


# Constraints of the wgmma kernels, for paged and ragged keys.
WGMMA = (
    Constraint("q", "in", ("f16", "bf16", "e4m3", "e5m2")),
    Constraint("kv", "in", ("f16", "bf16", "e4m3", "e5m2")),
    Rule(("q", "kv"), "kv of q's dtype, or fp8 with a 16-bit q", lambda q, kv: q == kv or (_fp8(kv) and not _fp8(q))),
    Rule(
        ("q", "kv", "out"),
        "output of q's dtype, or of 16 bits for fp8 keys, or of 8 for fp8 queries",
        lambda q, kv, out: q == out or (_fp8(kv) and element_bytes(out) == 2) or (_fp8(q) and _fp8(out)),
    ),
    Constraint("head_dim_qk", "in", tuple(_WGMMA_TILES)),
    Rule(
        ("head_dim_qk", "head_dim_vo"),
        "head_dim_vo == head_dim_qk, or 128 for 192",
        lambda qk, vo: vo == _WGMMA_HEAD_DIM_VO.get(qk, qk),
    ),
    Constraint("group_size", "<=", Q_TILE),
    Constraint("pos_encoding", "==", "NONE"),
    Constraint("mask", "==", "plain"),
    Rule(
        ("kv", "scaled"), "no scales by head or on the device, or fp8 keys", lambda kv, scaled: _fp8(kv) or not scaled
    ),
    request.ALIGNED,
)
_WITHOUT_ALIBI = Rule(
    ("pos_encoding", "batch_invariant"),
    "no ALIBI inside of fi_core.batch_invariant(): it counts rows from the first of a chunk; add a bias by jit_args",
    lambda encoding, batch_invariant: not batch_invariant or encoding != "ALIBI",
)
_FOR_MMA: tuple[Constraint | Rule, ...] = (*at_least(80), Constraint("q", "in", tuple(MULTIPLY)), _WITHOUT_ALIBI)


def _types(values: Values) -> Values:
    return {name: values[name] for name in ("q", "kv", "split_tables")}


def _compiled(values: Values) -> Values:
    return {**_types(values), "head_dim": values["head_dim_qk"], "soft_cap": values["soft_cap"]}


def _general(values: Values) -> Values:
    """Axis head_dim: a wide tile for head dims above 128 of 16-bit keys, if shared memory has room; else 0."""
    qk, vo, head_dim = values["head_dim_qk"], values["head_dim_vo"], 0
    if max(qk, vo) > 128 and values["capability"] in _LARGE_SHARED and element_bytes(values["kv"]) == 2:
        head_dim = next((key for key, t in WIDE_TILES.items() if qk <= t.dim_qk and vo <= t.dim_vo), 0)
    return {**_types(values), "head_dim": head_dim, "soft_cap": False}


# out: `[qo_tokens, num_qo_heads, head_dim_vo]`, fp16, bf16, fp32, e4m3 or e5m2. lse: fp32 `[qo_tokens, num_qo_heads]`
# contiguous, base 2, or None. q: `[qo_tokens, num_qo_heads, head_dim_qk]`. k, v with page_indices (int32, contiguous):
# `[num_pages, page_size, num_kv_heads, dim]` (kv_layout 0, NHD) or `[num_pages, num_kv_heads, page_size, dim]` (1,
# HND); without: `[kv_tokens, num_kv_heads, dim]` or `[num_kv_heads, kv_tokens, dim]`; of q's dtype, or with a 16-bit q
# of the other one, of e4m3 or e5m2, or uint8: NVFP4, as for batch_decode. Any strides with a contiguous last dimension;
# head dims are multiples of 8 up to 512. schedule, batch_size, tile_tokens: of the last plan.
# zero_padded_rows: rows of out that belong to no request become zero; without it they are not written.
#
# pos_encoding, the scales of scores and output, and sinks: as for batch_decode, also for a row without keys.
#
# Row i of a request is at position p = kv_len - qo_len + i. causal: it attends to keys j <= p. mask replaces
# causal: it attends to the keys whose bit is set; uint8, the `[qo_len, kv_len]` masks of the requests flattened,
# element e in bit e % 8 of byte e / 8, the mask of request b from byte mask_indptr[b] (int32 `[batch_size + 1]`) on.
# Without mask_indptr, mask is `[qo_tokens, n]`: a row attends to all keys before the query tokens of its
# request, and to query token t if bit t % 8 of byte t / 8 is set; no request may have more than 8 n rows. items
# replaces both: a row attends to keys j <= p that are before prefix_len[b] (int32 or uint32 `[batch_size]`), or from
# p - items[b][p - prefix_len[b]] + 1 on (uint16 `[batch_size, n]`). window_left w >= 0 also masks keys j < p - w.
#
# partials: uint8, aligned to 16 bytes; private while the kernel runs; needed if `plan` was given
# max_partials. kv_tokens: tokens of all requests, if known; it decides how many heads share the L2 cache. num_ctas: the
# most CTAs of a persistent kernel, so that another kernel runs beside it; 0: as many as fit. v_table_offset: V has a
# page table of its own, this many entries of page_indices behind that of K; 0: K and V share theirs. num_qo_heads:
# those that q must have, if a plan fixes them; 0: any. v None: as for batch_decode.
BATCH_PREFILL = Op(
    name="batch_prefill",
    family="attention",
    arguments="Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) schedule, Tensor q, Tensor k, Tensor? v, int kv_layout, "
    "int batch_size, int tile_tokens, float sm_scale=1.0, float out_scale=1.0, Tensor? sinks=None, "
    "bool zero_padded_rows=False, bool? enable_pdl=None, Tensor? scale_q=None, Tensor? scale_k=None, "
    "Tensor? scale_v=None, Tensor? bmm1_scale=None, Tensor? bmm2_scale=None, Tensor? k_scales=None, "
    "Tensor? v_scales=None, Tensor? page_indices=None, Tensor(d!)? partials=None, bool causal=False, "
    "int pos_encoding=0, int window_left=-1, float soft_cap=0.0, float rope_scale=1.0, float rope_theta=10000.0, "
    "Tensor? mask=None, Tensor? mask_indptr=None, Tensor? prefix_len=None, Tensor? items=None, int kv_tokens=0, "
    'int num_ctas=0, int num_qo_heads=0, int v_table_offset=0, str backend="auto"',
    planned=words(
        "schedule kv_layout batch_size tile_tokens page_indices partials causal pos_encoding window_left soft_cap",
        "rope_scale rope_theta mask mask_indptr prefix_len items kv_tokens num_ctas num_qo_heads v_table_offset",
        "backend",
    ),
    fields=FIELDS,
    axes={"q": TYPES, "kv": KV_TYPES, "head_dim": (*_WGMMA_TILES, 0), "soft_cap": BOTH, "split_tables": BOTH},
    config=PrefillConfig,
    takes_variant=True,
    beside=("batch_decode", "decode_plan"),
    implementations=(
        Implementation("cpu", (*ON_CPU, _WITHOUT_ALIBI), axes=_general, backends=("cpu", "fa2")),
        Implementation("wgmma_sm90", (*exactly(90), *WGMMA), _wgmma_unit, _compiled, ("fa3",)),
        Implementation("mma_sm80", _FOR_MMA, _mma_unit, _general, ("fa2",)),
        Implementation("cudnn", request.CUDNN, axes=_general, backends=("cudnn",), by_name=True),
    ),
    prebuilt=(
        *(
            {"q": q, "kv": q, "out": q, "head_dim_qk": qk, "head_dim_vo": vo, "soft_cap": soft_cap}
            for q in ("f16", "bf16")
            for qk, vo in _WGMMA_HEAD_DIM_VO.items()
            for soft_cap in ((False, True) if qk == 128 else (False,))
        ),
        *({"q": q, "kv": "e4m3", "out": "bf16" if q == "e4m3" else q} for q in ("e4m3", "f16", "bf16")),
    ),
)
batch_prefill = operator(BATCH_PREFILL)
plan_run, run_planned = (made := operators()["batch_prefill"]).plan, made.planned_function


def tile_tokens(num_qo_heads: int, num_kv_heads: int, rows: int = Q_TILE) -> int:
    """Query tokens of a work tile of `rows` packed rows. It depends on no lengths, so results do not either."""
    return max(1, rows * num_kv_heads // max(1, num_qo_heads))


def q_tile_rows(choice: Choice) -> int:
    """Packed query rows of a work tile. A kernel of 128 rows does not take tiles of 192."""
    return choice.entries[0].config.rows_per_cta if choice.implementation == "wgmma_sm90" else Q_TILE


def short_tile_tokens(choice: Choice, num_qo_heads: int, num_kv_heads: int, windowed: bool) -> int:
    """Query tokens of the shorter work tiles that `plan` may choose instead; 0 if the kernel has none.

    With a window there are none: KV tiles then begin at the window of a work tile, so the height would change results.
    """
    if windowed or q_tile_rows(choice) <= Q_TILE or not _splits_kv(choice):
        return 0
    return tile_tokens(num_qo_heads, num_kv_heads)


_MOST_SPLIT_TILES, _MOST_SPLITS = 256, 16  # kMaxSplitTiles and kMaxSplits of prefill_plan.h
_ENOUGH_PARTIALS = 128 << 20  # bytes, as the wrappers document of their float workspace


def _splits_kv(choice: Choice) -> bool:
    return choice.implementation == "wgmma_sm90" and bool(choice.entries[0].config.splits_kv)


def _partial_bytes(choice: Choice, head_dim_vo: int) -> int:
    return q_tile_rows(choice) // 64 * 128 * 4 * (head_dim_vo // 2 + 4)


def max_partials(choice: Choice, workspace_bytes: int, head_dim_vo: int) -> int:
    """Number of partials that fit into a workspace; 0 if the kernel does not split KV."""
    return workspace_bytes // _partial_bytes(choice, head_dim_vo) if _splits_kv(choice) else 0


def partials_bytes(choice: Choice, tiles: int, head_dim_vo: int) -> int:
    """Bytes of the partials of as many splits as a plan may choose for this many work tiles of all kv heads."""
    if not _splits_kv(choice):
        return 0
    most = min(tiles, _MOST_SPLIT_TILES) * _MOST_SPLITS * _partial_bytes(choice, head_dim_vo)
    return min(most, _ENOUGH_PARTIALS)


def requests(schedule: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The requests of the last `plan`, int32 `[batch_size, 4]`: first row, qo_len, first page or key, kv_len."""
    begin = _HEADER + _COUNTERS
    return schedule[begin : begin + 4 * batch_size].view(-1, 4)


def schedule_words(batch_size: int, qo_tokens: int, tile_tokens: int) -> int:
    """Length of the schedule of a batch of this many query tokens, in work tiles of `tile_tokens`."""
    return _HEADER + _COUNTERS + 4 * batch_size + 2 * (qo_tokens // tile_tokens + batch_size)
