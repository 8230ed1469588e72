"""The ops behind batch decode: `decode_plan`, which divides the work, and `batch_decode`, which does it.

A caller allocates `Buffers` once (they are private to it: kernels write them), calls `plan` when lengths change, and
`attend` for each layer. None of them synchronises, and the second and third may be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from fi_core.launch.op import Launcher, target_of
from fi_core.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.spec.dtype import DTYPES, short_name
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit
from fi_core.utils import PosEncodingMode, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    import torch

    Launch = tuple[Callable[..., None], Sequence[Any]]

TILE = 64  # keys; kDecodeTile of schedule.h
ROWS = 16  # packed query rows of a row tile; kDecodeRows
MOST_RANGES = 1023  # kDecodeMostRanges
CPU_BLOCKS = 64  # ranges of work on a CPU: a fixed number, so that results do not depend on the threads
BALANCED, NEVER = 0, -1  # values of `split`


def _plan_unit(axes: Axes) -> Unit:
    return Unit("fi/decode/decode_plan.cuh", "DecodePlanParams", (Entry("decode_plan", "decode_plan", 1024, (), 0, 1),))


DECODE_PLAN = Op(
    name="decode_plan",
    family="decode",
    schema="(Tensor(a!) schedule, Tensor? indptr, Tensor? last_page_len, Tensor? kv_len, int page_size, "
    "int pages_per_request, int units, int q_len, int window_left, int blocks, int ranges, int split) -> ()",
    axes={},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _plan_unit)),
)


_FP8 = ("e4m3", "e5m2")
# Config of the entries of batch_decode: (kind, head dim or its largest, ...); kinds are those of launch.h.
_ROWS_KIND, _TILES_KIND, _TMA_KIND, _CLUSTER_KIND = range(4)


def _rows_unit(axes: Axes) -> Unit:
    """CUDA cores, for whatever the others do not take."""
    types = f"{DTYPES[str(axes['q'])].device}, {DTYPES[str(axes['kv'])].device}"
    entries = (
        Entry("decode_rows", f"decode_rows<{types}, 1, 4>", 128, (_ROWS_KIND, 256), 0, 2),
        Entry("decode_wide_rows", f"decode_rows<{types}, 2, 1>", 128, (_ROWS_KIND, 512), 0, 2),
    )
    return Unit("fi/decode/batch_decode.cuh", "BatchDecodeParams", entries)


def _types(axes: Axes) -> tuple[str, int, int, int]:
    """T, Q, KV for the device; bytes of an element of q, of the cache, and of a row of the cache in shared memory."""
    q, kv = DTYPES[str(axes["q"])], DTYPES[str(axes["kv"])]
    multiply = DTYPES["f16"] if kv.bytes == 1 else q  # halves hold every fp8 value
    lines = ceil_div(int(str(axes["head_dim"])) * kv.bytes, 128)
    return f"{multiply.device}, {q.device}, {kv.device}", q.bytes, kv.bytes, lines * 128


def _tiles_blocks(narrow: bool) -> int:
    """Of a multiprocessor; H200, page 1: with 2 and 3 of bf16 keys b16 kv8k 144.7 and 140.6 us, b64 of varied lengths
    281 and 263, b256 kv512 160 and 147, b1 kv8k 28.1 and 29.5; fp8 keys, b64 kv8k 298.5 and 300."""
    return 2 if narrow else 3


def _tiles_unit(axes: Axes) -> Unit:
    """Tensor cores with cp.async. 99 KB of shared memory at most: all that a block has on sm_86, sm_89 and sm_120."""
    types, q_bytes, kv_bytes, line = _types(axes)
    # H200, page 1, b16 kv8k: 2 or 3 stages 144.7 and 144.0 us. fp8 keys, b64 kv8k: 16 of a warp 380 us, 32 298.5.
    dim, stages = int(str(axes["head_dim"])), 2
    warps, keys = (4 if dim <= 128 else 2), (32 if kv_bytes == 1 or line <= 128 else 16)
    ring = max(stages * 2 * keys * line, ROWS * (dim + 8) * 4)
    shared = warps * ring + ROWS * (dim * q_bytes + 16) + warps * ROWS * 8 + 192 + 16
    body = f"decode_tiles<{types}, {dim}, {warps}, {keys}, {stages}, {shared}>"
    entry = Entry("decode_tiles", body, warps * 32, (_TILES_KIND, dim), shared, _tiles_blocks(kv_bytes == 1))
    if axes["capability"] != 90 or dim > 128:
        return Unit("fi/decode/batch_decode.cuh", "BatchDecodeParams", (entry,))
    entries = (entry, _cluster_entry(types, dim, q_bytes, line, False, gather=True))
    return Unit("fi/decode/batch_decode_cluster_sm90.cuh", "BatchDecodeParams", entries)


def _tma_unit(axes: Axes) -> Unit:
    """Hopper. config: kind, head dim, whether a copy brings whole rows, MB of keys up to which they leave L2 first, and
    the keys of a stage."""
    types, q_bytes, kv_bytes, line = _types(axes)
    dim, tune = int(str(axes["head_dim"])), TMA
    whole = tune.whole and dim * kv_bytes % 128 == 0
    # Stages of 32 KB; of fp8 keys a warp takes 32, b64 kv8k: 287 us, with 16 of 64-key stages 364, of 8 warps 297.
    warps, warp_keys = (4 if dim <= 128 else 2), (32 if kv_bytes == 1 or line <= 128 else 16)
    keys = warps * warp_keys
    stage = 2 * keys * line
    rest = warps * ROWS * ((dim + 8) * 4 + 8) + 4 * (ROWS * (dim * q_bytes + 16) + 40 + 16) + 7 * 8 + 24 + 1024
    stages = (227 * 1024 - rest) // (stage + 24)
    long = min(max(2, tune.ring // stage), stages)
    stages = stages if kv_bytes > 1 else long  # of fp8 keys no more: b16 kv4k 8/1 22.4 us, with five 23.4
    shared = rest + stages * (stage + 24)
    body = f"decode_tma<{types}, {dim}, {warps}, {warp_keys}, {stages}, {long}, {str(whole).lower()}, {shared}>"
    config = (_TMA_KIND, dim, int(whole), tune.stream, min(keys, TILE))
    entry = Entry("decode_tma", body, warps * 32 + 96, config, shared, 1)
    entries = (entry, _cluster_entry(types, dim, q_bytes, line, whole)) if dim <= 128 else (entry,)
    return Unit("fi/decode/batch_decode_sm90.cuh", "BatchDecodeParams", entries)


def _cluster_entry(types: str, dim: int, q_bytes: int, line: int, whole: bool, gather: bool = False) -> Entry:
    """Of little work. H200, b1 kv1k 32/8: with 4 warps 10.1 us, 8 9.5; b1 kv8k: 19.0 and 17.8, with 3 stages 18.1."""
    warps, stage = 8, 2 * 16 * line
    stages = 16 * 1024 // stage
    rest = ROWS * (dim * q_bytes + 16) + ROWS * dim * 6 + warps * ROWS * 8 + 8
    shared = ceil_div(rest + warps * stages * (stage + 16), 16) * 16
    body = f"decode_cluster<{types}, {dim}, {warps}, {stages}, {str(whole).lower()}, {str(gather).lower()}, {shared}>"
    return Entry(
        "decode_cluster", body, warps * 32, (_CLUSTER_KIND, dim, int(whole), 0, 1 if gather else 16), shared, 1
    )


class TmaConfig(NamedTuple):
    """What of the Hopper kernel is tuned; microseconds on an H200."""

    ring: int = 96 * 1024  # bytes of keys in flight; b128 kv8k: 64 KB 1085, 96 KB 964, 128 KB 971
    whole: bool = True  # whole rows a copy; b128 kv8k: 977, a copy a line of 128 bytes 1012
    stream: int = 100  # MB of keys; b1 kv8k: 24.0 without the hint, 22.1 with; b128 kv8k: 998 and 1017


TMA = TmaConfig()
_HALF_Q = Constraint("q", "in", ("f16", "bf16", *_FP8))
_NO_F32 = Constraint("kv", "in", ("f16", "bf16", *_FP8))
_COMPILED_DIM = Constraint("head_dim", ">=", 1)


BATCH_DECODE = Op(
    name="batch_decode",
    family="decode",
    schema="(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) workspace, Tensor(d!) schedule, Tensor q, Tensor k_cache, "
    "Tensor v_cache, Tensor page_indices, Tensor? sinks, Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, "
    "Tensor? bmm1_scale, Tensor? bmm2_scale, Tensor? draft_mask, Tensor? qo_indptr, int kv_layout, "
    "int pos_encoding_mode, int q_len, int blocks, int ranges, int split, int window_left, float logits_soft_cap, "
    "float sm_scale, float v_scale, float rope_scale, float rope_theta, bool? enable_pdl, str impl) -> ()",
    # head_dim: of the tensor-core kernels, which are compiled for it; 0 stands for any other, or two that differ.
    axes={
        "q": ("f16", "bf16", "f32", "e4m3", "e5m2"),
        "kv": ("f16", "bf16", "f32", "e4m3", "e5m2"),
        "head_dim": (64, 80, 96, 128, 192, 256, 0),
    },
    impls=(
        Impl("cpu", ON_CPU),
        Impl("fa3", (*exactly(90), _HALF_Q, _NO_F32, _COMPILED_DIM), _tma_unit),
        Impl("fa2_tc", (*at_least(80), _HALF_Q, _NO_F32, _COMPILED_DIM), _tiles_unit),
        Impl("fa2", (*at_least(80), Constraint("head_dim", "==", 0)), _rows_unit),
    ),
    prebuilt=(
        *({"q": q, "kv": q, "head_dim": dim} for q in ("f16", "bf16") for dim in (64, 128, 256)),
        *({"q": q, "kv": "e4m3", "head_dim": dim} for q in ("f16", "bf16") for dim in (128, 0)),
        *({"q": q, "kv": q, "head_dim": 0} for q in ("f16", "bf16", "f32")),
    ),
)

# Keys of a page that one bulk tensor copy must bring to be worth its 70 cycles (H200, b16 kv8k, page 1: a copy a key
# 669 us, cp.async 153; page 16: 139 and 145).
_LEAST_BOX = 16
_DIMS = frozenset({64, 80, 96, 128, 192, 256})

decode_plan = Launcher(DECODE_PLAN, lambda schedule, *_: (schedule.get_device(),))


def _key(out, lse, workspace, schedule, q, k_cache, v_cache, *rest):  # type: ignore[no-untyped-def]
    impl = rest[-1]
    head_dim = 0 if impl == "fa2" else head_dim_axis(q.shape[2], v_cache.shape[3])
    return q.get_device(), q.dtype, k_cache.dtype, head_dim, impl


batch_decode = Launcher(BATCH_DECODE, _key)


def head_dim_axis(head_dim_qk: int, head_dim_vo: int) -> int:
    """The value of the axis head_dim."""
    return head_dim_qk if head_dim_qk == head_dim_vo and head_dim_qk in _DIMS else 0


@functools.cache
def choose(
    backend: str, device: torch.device, q: torch.dtype, kv: torch.dtype, head_dim_qk: int, head_dim_vo: int,
    pos_encoding_mode: int, page_size: int = 64,
) -> str:  # fmt: skip
    """The implementation for `attend`: the one that `backend` names, for "auto" the best that takes the rest.

    On a CPU it is "cpu", whatever is asked. Cached: a look-up per call. Raises UnsupportedError with the reasons if the
    named one, or none, takes the dtypes, head dims and position encoding; ValueError for another name.
    """
    target = target_of(device)
    axes = {"q": short_name(q), "kv": short_name(kv), "head_dim": head_dim_axis(head_dim_qk, head_dim_vo)}
    name = None if backend == "auto" or target.kind == "cpu" else backend
    # The kernel on CUDA cores takes any head dim and all types, and it alone rotates keys.
    if name == "fa2" or pos_encoding_mode == PosEncodingMode.ROPE_LLAMA.value:
        axes["head_dim"] = 0
    elif name is None and BATCH_DECODE.explain(target, axes)["fa2_tc"]:
        axes["head_dim"] = 0
    best = BATCH_DECODE.spec(target, axes, name).impl
    return "fa2_tc" if best == "fa3" and name is None and page_size % _LEAST_BOX else best


def fits(impl: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether addresses and strides are multiples of 16 bytes, as the tensor-core kernels need; "fa2" takes any."""
    if impl in ("cpu", "fa2"):
        return True
    low = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    for x in (q, k_cache, v_cache):
        a, b, *rest = x.stride()
        low |= (a | b | (rest[0] if len(rest) == 2 else 0)) * x.element_size()
    return low % 16 == 0


class Buffers(NamedTuple):
    """What one user of batch decode owns on its device. Kernels write both: two streams must not share them.

    schedule: int32 `[words]`; `plan` fills it, `attend` reads it and counts in it. workspace: fp32
    `[slots, 16, head_dim_vo + 2]`, scratch of `attend`. blocks: that share the work; ranges: into how many parts it
    may be divided for them. split: how a request is: BALANCED: so that all blocks have as much to do, its parts being
    merged; NEVER: not at all; > 0 (`chunk_of`): into chunks of so many tiles of 64 tokens, counted from its position 0,
    so that its result does not depend on the batch it is in.
    """

    schedule: torch.Tensor
    workspace: torch.Tensor
    blocks: int
    ranges: int
    split: int


class Sizes(NamedTuple):
    """Shapes of `Buffers`: words of the schedule, slots of the workspace, blocks and ranges; and split."""

    words: int
    slots: int
    blocks: int
    ranges: int
    split: int


@functools.cache
def blocks_of(device: torch.device, impl: str = "", kv: torch.dtype | None = None) -> tuple[int, int]:
    """Blocks that share the work, as many as fit a device at once (on a CPU a fixed number), and room for ranges.

    impl and kv, the type of the caches: those that are meant; others may run.
    """
    if device.type != "cuda":
        return CPU_BLOCKS, 3 * CPU_BLOCKS
    import torch

    narrow = kv is not None and kv.itemsize == 1
    each = {"fa2_tc": _tiles_blocks(narrow), "fa2": 4}.get(impl, 1)  # blocks of a multiprocessor
    blocks = min(MOST_RANGES, each * torch.cuda.get_device_properties(device).multi_processor_count)
    # Only where memory alone is the limit some multiprocessors are faster than others.
    return blocks, min(MOST_RANGES, 3 * blocks) if impl == "fa3" and not narrow else blocks


def units_of(num_qo_heads: int, num_kv_heads: int, q_len: int = 1) -> int:
    """Row tiles of all kv heads: `num_kv_heads * ceil(num_qo_heads / num_kv_heads * q_len / 16)`."""
    return num_kv_heads * ceil_div(num_qo_heads // num_kv_heads * q_len, ROWS)


def chunk_of(split_tokens: int) -> int:
    """The value of `split` for chunks of at least so many tokens: whole tiles of 64."""
    return ceil_div(max(1, split_tokens), TILE)


def sizes(
    device: torch.device,
    batch_size: int,
    units: int,
    split: int = BALANCED,
    tokens: int = 0,
    impl: str = "",
    kv: torch.dtype | None = None,
) -> Sizes:
    """What `batch_size` requests need, whatever their lengths. impl, kv: as in `blocks_of`.

    units: `units_of(...)`. split: as in `Buffers`. tokens: with chunks, the most tokens that the requests may have
    together: page_size times the number of page indices, or of the entries of a block table.
    """
    blocks, ranges = blocks_of(device, impl, kv)
    slots = 2 * ranges
    if split > 0:
        slots = max(slots, units * (tokens // (split * TILE) + 2 * batch_size))
    return Sizes(
        12 + (ranges + 1) * 8 + batch_size * 4 + slots, slots, blocks, ranges, split
    )  # a counter for each slot


def allocate(device: torch.device, needs: Sizes, head_dim_vo: int) -> Buffers:
    """New buffers; neither needs initial values (`plan` zeroes the counters)."""
    import torch

    return Buffers(
        torch.empty(needs.words, dtype=torch.int32, device=device),
        torch.empty((needs.slots, ROWS, head_dim_vo + 2), dtype=torch.float32, device=device),
        needs.blocks,
        needs.ranges,
        needs.split,
    )


def plan(
    buffers: Buffers,
    indptr: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    page_size: int,
    units: int,
    *,
    pages_per_request: int = 0,
    q_len: int = 1,
    window_left: int = -1,
) -> None:
    """Divides the work of a batch, on the device and without synchronising: one kernel of one block.

    All tensors lie on the device of the buffers and are contiguous. Page ids of request b are
    `page_indices[indptr[b] : indptr[b + 1]]` (indptr: int32 `[batch_size + 1]`), or without indptr
    `page_indices[b * pages_per_request :][:pages_per_request]`: a flat block table. Lengths are kv_len (int32, uint32
    or int64 `[batch_size]`), or `(pages - 1) * page_size + last_page_len` (int32 `[batch_size]`). A length is limited
    to what the request's pages hold; a request without pages has length 0.

    units: `units_of(...)`. q_len: query tokens of each request. window_left: keys before the last that are seen,
    negative: all; `attend` must get the same.

    Raises ValueError or TypeError (shape, dtype, device). The batch must be the one that the buffers were sized for.
    """
    decode_plan(
        buffers.schedule, indptr, last_page_len, kv_len, page_size, pages_per_request, units, q_len, window_left,
        buffers.blocks, buffers.ranges, buffers.split,
    )  # fmt: skip


def attend(
    buffers: Buffers,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indices: torch.Tensor,
    impl: str,
    kv_layout: int,
    pos_encoding_mode: int = 0,
    q_len: int = 1,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sm_scale: float = 1.0,
    v_scale: float = 1.0,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    bmm1_scale: torch.Tensor | None = None,
    bmm2_scale: torch.Tensor | None = None,
    draft_mask: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    variant: Launch | None = None,
) -> None:
    """Attention of all requests as the last `plan` on the same buffers divided it, in one launch.

    out: `[batch_size * q_len, num_qo_heads, head_dim_vo]`, fp16, bf16, fp32, e4m3 or e5m2. lse: fp32
    `[batch_size * q_len, num_qo_heads]` contiguous, base 2, or None. q: `[batch_size * q_len, num_qo_heads,
    head_dim_qk]`. k_cache, v_cache: `[num_pages, page_size, num_kv_heads, dim]` (kv_layout 0, NHD) or
    `[num_pages, num_kv_heads, page_size, dim]` (1, HND), of q's dtype, or e4m3 or e5m2 with a 16-bit q. Strides are
    free but for the last dimension; head dims are multiples of 8 up to 512. page_indices: int32, contiguous.

    impl: what `choose` answers, if `fits` (else "fa2"). pos_encoding_mode: value of `PosEncodingMode`.
    sm_scale, bmm1_scale (fp32, one element on the device), scale_q (fp32 `[num_qo_heads]`) and scale_k (fp32
    `[num_kv_heads]`) multiply the scores; v_scale, bmm2_scale and scale_v (`[num_kv_heads]`) the output; the last are
    not in lse. sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to the sum of the softmax, so it is in lse, and a
    row without keys has lse = sinks[h] * log2(e). Else such a row has out = 0, lse = -inf. With q_len > 1 row i sees
    keys up to its own position kv_len - q_len + i, or with draft_mask all keys before kv_len - q_len and of the rest
    those whose bit is set: uint8 `[batch_size * q_len, ceil(q_len / 32) * 4]`, key kv_len - q_len + t is bit t % 8 of
    byte t / 8. qo_indptr (int32 `[batch_size + 1]`): request b has rows `qo_indptr[b] : qo_indptr[b + 1]` of q, out,
    lse and draft_mask, q_len at most, whose number takes the place of q_len above; rows of no request stay as they are.

    variant: the op with a user's variant, and what it takes more; scales of scores and the soft cap are then its own.

    Raises ValueError, TypeError; UnsupportedError where impl does not take the dtypes, head dims or encoding.
    """
    launch, extras = (batch_decode, ()) if variant is None else variant
    launch(
        out, lse, buffers.workspace, buffers.schedule, q, k_cache, v_cache, page_indices, sinks, scale_q, scale_k,
        scale_v, bmm1_scale, bmm2_scale, draft_mask, qo_indptr, kv_layout, pos_encoding_mode, q_len, buffers.blocks,
        buffers.ranges, buffers.split, window_left, logits_soft_cap, sm_scale, v_scale, rope_scale, rope_theta,
        enable_pdl, impl, *extras,
    )  # fmt: skip
