"""The ops behind batch MLA: `mla_plan` writes the schedules of a batch, `batch_mla` computes attention by one of them.

The number of query tokens need not be known on the host: a plan writes one schedule for narrow q tiles (few packed
rows of a request) and one for wide ones, and `batch_mla` takes the one of the kernel that the shape of q selects.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import NamedTuple

from fi_core.attention.ops.request import plan_implementations
from fi_core.observe.describe import words
from fi_core.page.latent import LATENT as LATENT
from fi_core.page.latent import ROPE as ROPE
from fi_core.page.latent import WIDTH
from fi_core.runtime.dispatch import Request, explain
from fi_core.runtime.launch.operator import operator, operators
from fi_core.runtime.lazy import torch
from fi_core.runtime.machine import multiprocessors_of, target_of
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES, short_name
from fi_core.runtime.spec.op import THREADS, Entry, Field, Implementation, Op, Unit, Values

NARROW_ROWS, WIDE_ROWS = 16, 64  # packed query rows of a CTA
_CPU_RANGES = 64

# schedule: int32 `[2, words]`, of which `words_of` gives the size. kv_len: int32 or int64 `[batch_size]`, tokens in the
# cache; without it each of batch_size requests has what its pages hold. qo_indptr: int32 `[batch_size + 1]`; without it
# each request has qo_len query tokens. kv_indptr: int32 `[batch_size + 1]`, offsets in the page table; without it
# request b has pages_per_request entries from b * pages_per_request on. context_lens: int32 `[batch_size]`, tokens of
# each request on all ranks, of which kv_len are here. Without split_kv no request is split: its result does not depend
# on the batch. fixed_splits: chunks of 512 tokens, which are folded in their order; the schedule cuts requests between
# them if a workspace of workspace_floats holds all. fine_splits: of narrow q tiles chunks of 128 tokens, folded first.
MLA_PLAN = Op(
    name="mla_plan",
    family="attention",
    arguments="Tensor(a!) schedule, Tensor? kv_len, int page_size, int heads, int max_ranges, int narrow_ranges, "
    "int wide_ranges, int narrow_rows, int wide_rows, Tensor? qo_indptr=None, Tensor? kv_indptr=None, "
    "int pages_per_request=0, int qo_len=1, Tensor? context_lens=None, bool split_kv=True, int batch_size=0, "
    "bool fixed_splits=False, int workspace_floats=0, bool fine_splits=False",
    implementations=plan_implementations("mla", "mla_plan<false>", "mla_plan<true>"),
)
mla_plan = operator(MLA_PLAN)


class MlaKind(IntEnum):
    """The kernel that a kernel entry of batch_mla instantiates; `MlaKind` of launch.h."""

    MMA = 1  # mma.sync, keys by cp.async
    PING_PONG = 2  # mma.sync by two alternating consumers, keys by cp.async of a producer warpgroup
    SWAPPED = 3  # wgmma with swapped operands, keys by TMA
    GATHER = 4  # wgmma, keys by cp.async, or from e4m3 by way of registers
    TMA = 5  # wgmma, keys by TMA


class MlaConfig(NamedTuple):
    kind: MlaKind
    rows: int = 0  # packed query rows of a CTA


_STAGE_KEYS = 32
# Compiled into kernels by the axis fixed_splits; without it they keep their instructions.
_FLAGS = {False: (), True: ("-DFI_FIXED_SPLITS",)}


def _mma_entry(axes: Values, stages: int) -> Entry:
    q, kv = DTYPES[axes["q"]], DTYPES[axes["kv"]]
    pitch, fp8 = 2 * WIDTH + 16, kv.bytes == 1
    raw = LATENT + 2 * ROPE + 16 if fp8 else pitch
    shared = stages * _STAGE_KEYS * (raw + 1) + NARROW_ROWS * pitch + 512 * (stages if fp8 else 1)
    shared += (4 if fp8 else 1) * NARROW_ROWS * (_STAGE_KEYS + 8) * 2 + 512 + 256
    body = f"batch_mla_mma<{q.device}, {kv.device}, {stages}, {shared}>"
    return Entry(f"batch_mla_mma_{stages}", body, 256, MlaConfig(MlaKind.MMA, NARROW_ROWS), shared, 1)


def _mma_unit(axes: Values) -> Unit:
    """mma.sync for any device: 163 KB of shared memory (sm_80), else 99 KB (sm_86, sm_89, sm_120)."""
    entries = tuple(_mma_entry(axes, stages) for stages in ((4, 3) if axes["kv"] == "e4m3" else (3, 2)))
    return Unit("fi/attention/mla/batch_mla.cuh", "BatchMlaParams", entries, flags=_FLAGS[axes["fixed_splits"]])


def _packed_unit(axes: Values) -> Unit:
    """Packed pages, whose rows are dequantized into stages of 16 bits."""
    like = _mma_unit({**axes, "kv": "bf16"})
    entries = tuple(
        entry._replace(name=f"batch_mla_packed_{stages}", body=f"batch_mla_packed<{stages}, {entry.shared_bytes}>")
        for entry, stages in zip(like.entries, (3, 2))
    )
    return Unit(like.header, like.params, entries, flags=like.flags)


def _narrow_unit(axes: Values) -> Unit:
    """16-bit caches in pages of 64 tokens, or with fixed splits: wgmma with swapped operands. Else mma.sync."""
    q, kv, fine = DTYPES[axes["q"]].device, DTYPES[axes["kv"]], axes["fixed_splits"]
    stages, shared = 4 if kv.bytes == 1 else 5, 227 * 1024  # of 64 and of 32 keys; all of it
    name = "batch_mla_fine" if fine else "batch_mla_swapped"
    swapped = Entry(name, f"{name}<{q}, {shared}>", 384, MlaConfig(MlaKind.SWAPPED, NARROW_ROWS), shared, 1)
    if fine:
        flags = ("-DFI_FINE_SPLITS", *THREADS)
        return Unit(f"fi/attention/mla/{name}_sm90.cuh", "BatchMlaParams", (swapped,), flags=flags)
    body = f"batch_mla_ping_pong<{q}, {kv.device}, {stages}, {shared}>"
    ping_pong = Entry("batch_mla_ping_pong", body, 640, MlaConfig(MlaKind.PING_PONG, NARROW_ROWS), shared, 1)
    if kv.bytes == 1:
        return Unit("fi/attention/mla/batch_mla_ping_pong_sm90.cuh", "BatchMlaParams", (ping_pong,))
    return Unit("fi/attention/mla/batch_mla_swapped_sm90.cuh", "BatchMlaParams", (swapped, ping_pong), flags=THREADS)


def _wgmma_unit(axes: Values) -> Unit:
    q, kv = DTYPES[axes["q"]].device, DTYPES[axes["kv"]]
    kinds = (("tma", MlaKind.TMA, "true"), ("gather", MlaKind.GATHER, "false"))[kv.bytes == 1 :]
    shared = 227 * 1024  # all of it
    body = f"batch_mla_wgmma<{q}, {kv.device}, "
    entries = tuple(
        Entry(f"batch_mla_wgmma_{name}", f"{body}{tma}, {shared}>", 384, MlaConfig(kind, WIDE_ROWS), shared, 1)
        for name, kind, tma in kinds
    )
    flags = _FLAGS[axes["fixed_splits"]] + (THREADS if len(entries) > 1 else ())
    return Unit("fi/attention/mla/batch_mla_sm90.cuh", "BatchMlaParams", entries, flags=flags)


# rows: "narrow" if requests have at most 16 packed query rows (tokens times heads) on average, or fine fixed splits.
FIELDS = {
    "q": Field(("f16", "bf16"), "bf16"),
    "kv": Field(("f16", "bf16", "e4m3", "u8"), "bf16"),
    "rows": Field(("narrow", "wide"), "narrow"),
    "has_rope": Field((False, True), True),
    "sparse": Field((False, True), False),
    "fixed_splits": Field((False, True), False),
}


_WIDE = (Constraint("has_rope", "==", True), Constraint("rows", "==", "wide"))
_FINE_SPLITS = Rule(
    ("fixed_splits", "rows", "kv", "has_rope", "sparse"),
    "no fixed splits, or fine ones (narrow rows) of 16-bit keys with a rotary part, not sparse",
    lambda fixed, rows, kv, rope, sparse: not fixed or (rows == "narrow" and kv != "e4m3" and rope and not sparse),
)
_16_BIT_KEYS = Constraint("kv", "in", ("f16", "bf16"))
_FP8_KEYS = (Constraint("q", "==", "bf16"), Constraint("kv", "==", "e4m3"))
_PLAIN_KEYS = Constraint("kv", "in", ("f16", "bf16", "e4m3"))
_PACKED_KEYS = (Constraint("q", "==", "bf16"), Constraint("kv", "==", "u8"), Constraint("sparse", "==", True))


def _types(values: Values) -> Values:
    return {"q": values["q"], "kv": values["kv"], "fixed_splits": values["fixed_splits"]}


# out, q_nope: `[tokens, heads, 512]`, fp16 or bf16. lse: fp32 `[tokens, heads]` contiguous, or None. q_pe: `[tokens,
# heads, 64]`. ckv_cache: `[num_pages, page_size, 512]`, kpe_cache: `[num_pages, page_size, 64]`, of q's dtype or e4m3;
# with e4m3 ckv_cache kpe_cache may be of q's dtype, with kpe_scale = ckv_scale. Packed pages: uint8 ckv_cache
# `[num_pages, page_size, 584]`, of which the last axis is a size only (batch_mla.h), without kpe_cache. Any strides
# with a contiguous last dimension, rows aligned to 16 bytes. q_pe and kpe_cache have width 0 without rope. ckv_scales:
# fp32 `[num_pages, page_size, 4]` with e4m3, scales of 128 columns each. page_indices: int32, contiguous; sparse: slots
# of the cache (page_size 1), -1 is no token; any_index: nor is what the cache does not have. score_stats: fp32 `[2,
# tokens, heads]`, the largest score of each row, or without exact_max one that is less by up to 8 powers of 2, and the
# lse without sinks, natural; -inf and inf without keys. sinks: fp32 `[heads]`, a logit that joins the softmax of each
# head. score_scale, out_scale: fp32 `[1]`, factors of scores and output. cp_world, cp_rank: token j of a request here
# is token j * cp_world + cp_rank of its context. num_heads, page_size: of tensors; 0: any. All others: as planned. In
# the schedule the CTAs of a split request count their arrivals.
BATCH_MLA = Op(
    name="batch_mla",
    family="attention",
    arguments="Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) workspace, Tensor(d!) schedule, Tensor q_nope, Tensor q_pe, "
    "Tensor ckv_cache, Tensor kpe_cache, Tensor page_indices, int batch_size, int max_ranges, int narrow_ranges, "
    "int wide_ranges, int cluster, float sm_scale, bool causal=False, float ckv_scale=1.0, float kpe_scale=1.0, "
    "Tensor? ckv_scales=None, bool lse_base_e=False, bool sparse=False, Tensor? sinks=None, Tensor? score_scale=None, "
    "Tensor? out_scale=None, Tensor(e!)? score_stats=None, bool any_index=False, bool exact_max=False, int cp_world=1, "
    "int cp_rank=0, bool? enable_pdl=None, int num_heads=0, int page_size=0, bool fixed_splits=False, "
    'bool fine_splits=False, str backend="auto"',
    planned=words(
        "workspace schedule page_indices batch_size max_ranges narrow_ranges wide_ranges cluster sm_scale causal",
        "num_heads page_size fixed_splits fine_splits enable_pdl backend",
    ),
    fields=FIELDS,
    axes={"q": ("f16", "bf16"), "kv": ("f16", "bf16", "e4m3", "u8"), "fixed_splits": (False, True)},
    config=MlaConfig,
    implementations=(
        Implementation("cpu", ON_CPU, axes=_types, backends=("cpu", "fa2")),
        Implementation("wgmma_sm90", (*exactly(90), _16_BIT_KEYS, *_WIDE), _wgmma_unit, _types, ("fa3",)),
        Implementation("wgmma_fp8_sm90", (*exactly(90), *_FP8_KEYS, *_WIDE), _wgmma_unit, _types, ("fa3",)),
        Implementation("narrow_sm90", (*exactly(90), _PLAIN_KEYS, _FINE_SPLITS), _narrow_unit, _types, ("fa3",)),
        Implementation("mma_sm80", (*at_least(80), _PLAIN_KEYS), _mma_unit, _types, ("fa2",)),
        Implementation("packed_sm80", (*at_least(80), *_PACKED_KEYS), _packed_unit, _types, ("fa2",)),
    ),
    prebuilt=(  # the models are bf16
        *(
            {"q": "bf16", "kv": kv, "rows": rows, "fixed_splits": fixed}
            for kv in ("bf16", "e4m3")
            for rows, fixed in (("narrow", False), ("wide", False), ("wide", True))
        ),
        {"q": "bf16", "kv": "bf16", "rows": "narrow", "fixed_splits": True},
        {"q": "bf16", "kv": "u8", "rows": "wide", "sparse": True},
    ),
)
batch_mla = operator(BATCH_MLA)
plan_run, run_planned = (made := operators()["batch_mla"]).plan, made.planned_function


class Sizes(NamedTuple):
    """The grid of a batch: work ranges of both schedules, and CTAs that share the KV of a wide q tile."""

    max_ranges: int
    narrow_ranges: int
    wide_ranges: int
    cluster: int

    @property
    def workspace_floats(self) -> int:
        """Floats of the partials: two of each work range."""
        rows = max(self.narrow_ranges * NARROW_ROWS, self.wide_ranges * self.cluster * WIDE_ROWS)
        return 2 * rows * (LATENT + 2)


def sizes(device: torch.device, heads: int) -> Sizes:
    """The grid for a device: all its SMs, in pairs if the heads of one token need two wide CTAs."""
    return _sizes(_CPU_RANGES if target_of(device).kind == "cpu" else min(1023, multiprocessors_of(device)), heads)


@functools.lru_cache(maxsize=64)
def _sizes(ctas: int, heads: int) -> Sizes:
    cluster = 2 if heads > WIDE_ROWS and ctas > 1 else 1
    return Sizes(ctas, ctas, ctas // cluster, cluster)


def fine_splits(device: torch.device, heads: int, has_rope: bool, kv: torch.dtype, backend: str) -> bool:
    """Whether fixed splits are fine: of few heads, whatever the number of query tokens, on the kernel for few rows."""
    if heads > NARROW_ROWS or kv.itemsize != 2:
        return False
    few = {"q": short_name(kv), "kv": short_name(kv), "rows": "narrow", "fixed_splits": True, "has_rope": has_rope}
    return not explain(Request.of(BATCH_MLA, target_of(device), few, backend))["narrow_sm90"]


def words_of(size: Sizes, batch_size: int) -> int:
    """Words of both schedules of a batch."""
    return 2 * (4 + (size.max_ranges + 1) * 16 + 8 * batch_size)


def place(
    int_workspace: torch.Tensor, float_workspace: torch.Tensor, heads: int, batch_size: int, fixed_splits: bool
) -> tuple[Sizes, torch.Tensor, torch.Tensor]:
    """(grid, schedules, partials) of a batch in the two workspaces, which are contiguous.

    A small float workspace limits the number of work ranges. With fixed_splits all of it may have partials.

    Raises:
        ValueError: names the workspace that is too small, and the bytes that are required.
    """
    size = sizes(int_workspace.device, heads)
    flat = float_workspace.view(torch.uint8).view(-1)
    room = flat[: flat.numel() // 4 * 4].view(torch.float32)
    row_floats = 2 * (LATENT + 2)  # a work range has two partials
    narrow, wide = row_floats * NARROW_ROWS, row_floats * WIDE_ROWS * size.cluster
    if room.numel() < max(narrow, wide):
        raise ValueError(f"float_workspace_buffer: {4 * max(narrow, wide)} bytes are required; got {flat.numel()}")
    size = size._replace(
        narrow_ranges=min(size.narrow_ranges, room.numel() // narrow),
        wide_ranges=min(size.wide_ranges, room.numel() // wide),
    )
    needed = words_of(size, batch_size)
    if int_workspace.nbytes < 4 * needed:
        raise ValueError(f"int_workspace_buffer: {4 * needed} bytes are required; got {int_workspace.nbytes}")
    schedule = int_workspace.view(torch.int32)[:needed].view(2, needed // 2)
    return size, schedule, room if fixed_splits else room[: size.workspace_floats]
