"""The op behind single-request attention; its public functions are in attention/forms."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from fi_core.attention.contract import LAYOUTS, POS_ENCODINGS, code
from fi_core.attention.ops.decode import TENSOR_CORES
from fi_core.attention.ops.prefill import MULTIPLY, TILE_OF_48, WGMMA
from fi_core.attention.ops.request import FIELDS, TYPES, alignment, element_bytes, facts_of
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.errors import unsupported
from fi_core.runtime.invariance import is_on
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values
from fi_core.utils import ceil_div

_ROWS = 4  # packed query rows per CTA of the CUDA-core kernel, in registers


class AttentionStep(IntEnum):
    """The kernel that a kernel entry of single_attention instantiates."""

    MMA = 0  # mma.sync, one query tile per CTA
    CUDA_CORE = 1  # one chunk of keys per CTA
    COMBINE = 2  # merges the partial results of the chunks


class SingleConfig(NamedTuple):
    step: AttentionStep
    largest_head_dim: int
    rows_per_cta: int


def _cuda_core_unit(axes: Values) -> Unit:
    """CUDA cores. The keys of few rows are split into chunks, whose partials are then combined."""
    q, kv = DTYPES[axes["q"]], DTYPES[axes["kv"]]
    rows = f"single_attention_cuda_core<{q.device}, {kv.device}"
    narrow, wide = SingleConfig(AttentionStep.CUDA_CORE, 256, _ROWS), SingleConfig(AttentionStep.CUDA_CORE, 512, 1)
    entries = [Entry("single_attention_cuda_core", f"{rows}, 1, {_ROWS}>", 128, narrow)]
    if q.short not in MULTIPLY:
        entries.append(Entry("single_attention_cuda_core_wide", f"{rows}, 2, 1>", 128, wide))
    entries.append(Entry("combine_chunks", "combine_chunks", 128, SingleConfig(AttentionStep.COMBINE, 512, 1)))
    return Unit("fi/attention/single/single_attention.cuh", "SingleAttentionParams", tuple(entries))


def _mma_unit(axes: Values) -> Unit:
    """mma.sync."""
    q, kv = DTYPES[axes["q"]], DTYPES[axes["kv"]]
    tile = TILE_OF_48
    size, body = tile.shared_bytes(kv), tile.body("single_attention_mma", q.short, kv.short)
    config = SingleConfig(AttentionStep.MMA, 512, tile.rows)
    entry = Entry("single_attention_mma", body, tile.threads, config, size, tile.blocks)
    return Unit("fi/attention/single/single_attention.cuh", "SingleAttentionParams", (entry,))


_FEW = 16  # packed rows (of the query heads of one kv head) up to which an mma tile would be mostly empty
_WIDE = 256  # larger head dims need two registers per lane, which the CUDA-core kernel has for fp32 only
_MOST_CTAS = 528  # four per SM of an H200
_LEAST_KEYS = 128  # per chunk; for fewer, merging costs more than parallel reads save
# Packed query rows from which the Hopper kernel is worth its second launch (docs/notes/prefill-mma.md).
_LEAST_PREFILL_ROWS = 1024
_OWN = "single"  # the backend name of this op's own kernels


_NARROW = Rule(
    ("q", "head_dim_qk", "head_dim_vo"),
    f"fp32, or head dims up to {_WIDE}",
    lambda q, qk, vo: q == "f32" or max(qk, vo) <= _WIDE,
)
_FEW_ROWS = Rule(
    ("qo_len", "group_size"),
    f"one query token, or at most {_FEW} packed query rows",
    lambda qo_len, group: qo_len == 1 or qo_len * group <= _FEW,
)
_SAME_TYPES = Rule(
    ("q", "kv"),
    "kv of q's dtype, or fp8 with a 16-bit q",
    lambda q, kv: q == kv or (element_bytes(kv) == 1 and element_bytes(q) == 2),
)
_MUCH = Rule(
    ("qo_len", "group_size"),
    f"{_LEAST_PREFILL_ROWS} packed query rows or more",
    lambda qo_len, group: qo_len * group >= _LEAST_PREFILL_ROWS,
)
_FOR_DECODE: tuple[Constraint | Rule, ...] = (
    *at_least(80),
    Constraint("decode", "==", True),
    *TENSOR_CORES,
    _SAME_TYPES,
)
_FOR_PREFILL: tuple[Constraint | Rule, ...] = (*exactly(90), Constraint("decode", "==", False), *WGMMA)
_MUCH_UNSCALED = (_MUCH, Constraint("scaled", "==", False))
_FOR_CORES: tuple[Constraint | Rule, ...] = (*at_least(80), _NARROW)
_FOR_MMA = (*at_least(80), Constraint("q", "in", tuple(MULTIPLY)))


def _axes(few: bool) -> Callable[[Values], Values]:
    return lambda values: {"few": few, "q": values["q"], "kv": values["kv"]}


# out: `[qo_len, num_qo_heads, head_dim_vo]`, lse: fp32 `[qo_len, num_qo_heads]` or None, q: `[qo_len, num_qo_heads,
# head_dim_qk]`, or all without the axis of tokens. k, v: `[kv_len, num_kv_heads, dim]` (kv_layout 0) or
# `[num_kv_heads, kv_len, dim]` (1). workspace: fp32 `[chunks, rows, head_dim_vo + 2]`, where the keys of few rows are
# split. custom_mask: bool `[qo_len, kv_len]`; packed_custom_mask: its bits. Implementations "batch_decode" and
# "batch_prefill" are the kernels of batches, for a batch of one; the public functions call them.
SINGLE_ATTENTION = Op(
    name="single_attention",
    family="attention",
    arguments="Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, Tensor q, Tensor k, Tensor v, int kv_layout, "
    "int pos_encoding=0, bool causal=False, int window_left=-1, float soft_cap=0.0, float sm_scale=1.0, "
    "float out_scale=1.0, float rope_scale=1.0, float rope_theta=10000.0, Tensor? custom_mask=None, "
    "Tensor? packed_custom_mask=None, Tensor? scale_q=None, Tensor? scale_k=None, Tensor? scale_v=None, "
    f'str backend="{_OWN}"',
    fields={**FIELDS, "qo_len": Field(None, 1), "decode": Field((False, True), False)},
    axes={"few": (False, True), "q": TYPES, "kv": TYPES},
    config=SingleConfig,
    takes_variant=True,
    implementations=(
        Implementation("cpu", ON_CPU, axes=_axes(True), backends=("cpu", _OWN, "fa2")),
        Implementation("batch_decode", _FOR_DECODE, axes=_axes(True)),
        Implementation("batch_prefill", _FOR_PREFILL, axes=_axes(False), backends=("fa3",), preferred=_MUCH_UNSCALED),
        Implementation("cuda_core", _FOR_CORES, _cuda_core_unit, _axes(True), ("fa2", _OWN), preferred=(_FEW_ROWS,)),
        Implementation("mma_sm80", _FOR_MMA, _mma_unit, _axes(False), ("fa2", _OWN)),
    ),
    prebuilt=tuple(
        {"q": q, "kv": kv, "out": q, "qo_len": qo_len}
        for q, kv in (*zip(TYPES, TYPES), *((q, kv) for q in ("f16", "bf16") for kv in ("e4m3", "e5m2")))
        for qo_len in ((1, 128) if q != "f32" else (1,))
    ),
)
single_attention = operator(SINGLE_ATTENTION)


def chunks_of(rows: int, num_kv_heads: int, kv_len: int, qo_len: int, window_left: int) -> int:
    """Number of chunks into which the CUDA-core kernel splits the keys, so that few rows occupy the whole device.

    It depends on the shape only, so results do not change from device to device. Chunks times query heads stays below
    2112 or the number of heads, which bounds the workspace.
    """
    visible = kv_len if window_left < 0 else min(kv_len, window_left + qo_len)
    ctas = max(1, num_kv_heads * ceil_div(rows, _ROWS))
    return max(1, min(ceil_div(visible, _LEAST_KEYS), _MOST_CTAS // ctas))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_layout: str,
    pos_encoding_mode: str,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    qk_factor: float | None = None,
    v_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    splits: bool = True,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Allocates the results and calls the op; the common end of the public functions. q: `[qo_len, heads, d]` or
    `[heads, d]`.

    qk_factor: factor of sm_scale. splits: whether the keys of few rows may be split. options: other arguments of the
    op.
    """
    if is_on() and q.ndim == 3 and q.shape[0] > 1:  # chunks of a prompt take other kernels and splits
        raise unsupported("q", tuple(q.shape), "inside of batch_invariant() pass prompts to a wrapper of batch prefill")
    layout = code(LAYOUTS, kv_layout, "kv_layout")
    encoding = code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k and v must have 3 dimensions; got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    *outer, dim = q.shape
    heads, qo_len, dim_vo, kv_heads = outer[-1], outer[0] if q.ndim == 3 else 1, v.shape[2], k.shape[1 - layout]
    shape = (*outer, dim_vo)
    out = q.new_empty(*shape) if out_dtype is None else q.new_empty(*shape, dtype=out_dtype)  # a dtype costs 1 us
    lse = q.new_empty(*outer, dtype=torch.float32) if return_lse else None
    workspace, rows = None, qo_len * heads // max(1, kv_heads)
    if splits and (qo_len == 1 or rows <= _FEW) and (max(dim, dim_vo) <= _WIDE or q.dtype is torch.float32):
        chunks = chunks_of(rows, kv_heads, k.shape[layout], qo_len, window_left)
        if chunks > 1:
            workspace = q.new_empty((chunks, qo_len * heads, dim_vo + 2), dtype=torch.float32)
    scale: float = (dim**-0.5 if dim else 1.0) if sm_scale is None else sm_scale
    options |= {"rope_scale": 1.0 if rope_scale is None else rope_scale}
    options |= {"rope_theta": 1e4 if rope_theta is None else rope_theta}
    options |= {"sm_scale": scale if qk_factor is None else scale * qk_factor, "soft_cap": logits_soft_cap or 0.0}
    options |= {"out_scale": 1.0 if v_scale is None else v_scale, "window_left": window_left}
    single_attention(out, lse, workspace, q, k, v, layout, encoding, **options)
    return out if lse is None else (out, lse)


def single_choice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: int,
    out_dtype: torch.dtype,
    pos_encoding_mode: str,
    backend: str,
    *,
    decode: bool,
    **facts: Any,
) -> Choice:
    """The choice for a call, among the kernels of this op and those of batches; for q, k and v of regular shapes.

    facts: mask, soft_cap and scaled. Raises UnsupportedError with reasons if the named backend, or none, supports it.
    """
    facts |= {"pos_encoding": pos_encoding_mode, "alignment": alignment(q, k, v)}
    made = facts_of(q, k, v, out_dtype, k.shape[1 - layout], 0, **facts)
    qo_len = min(q.shape[0], _LEAST_PREFILL_ROWS) if q.ndim == 3 else 1
    return planned(SINGLE_ATTENTION, q.device, backend, *made, qo_len, decode, ahead=False)
