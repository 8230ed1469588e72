"""The ops behind batch prefill: `prefill_plan` lists the tiles of query rows, `batch_prefill` computes them.

A caller keeps one schedule (private to it: kernels count in it), calls `plan` when lengths change, and `attend` for
each layer. Neither synchronises, and both may be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from fi_core.attention.tiles import MULTIPLY, TILE, TILE_OF_48, WIDE_TILES
from fi_core.errors import UnsupportedError
from fi_core.launch.op import Launcher, target_of
from fi_core.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.spec.dtype import DTYPES, short_name
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit
from fi_core.utils import PosEncodingMode, round_up

if TYPE_CHECKING:
    import torch

    from fi_core.decode.ops import Launch

ROWS = 128  # packed query rows of a tile
_LARGE_SHARED = (90, 100, 103)  # capabilities with 227 KB of shared memory
_LEAST_COPY = 8  # keys that a bulk copy must bring
_HEADER, _COUNTERS = 8, 256 * 12  # words; PrefillSchedule::kHeader, kCounters
_WORK = 48  # bytes; sizeof(Work)


def _plan_unit(axes: Axes) -> Unit:
    return Unit("fi/prefill/prefill_plan.cuh", "PrefillPlanParams", (Entry("prefill_plan", "prefill_plan", 1024),))


PREFILL_PLAN = Op(
    name="prefill_plan",
    family="prefill",
    schema="(Tensor(a!) schedule, Tensor? qo_indptr, Tensor? kv_indptr, Tensor? last_page_len, Tensor? kv_len, "
    "int batch_size, int qo_len, int page_size, int pages_per_request, int tile_tokens, bool causal, int window_left, "
    "int kv_heads, int short_tokens, int slots, int blocks) -> ()",
    axes={},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _plan_unit)),
)


def _tiles_unit(axes: Axes) -> Unit:
    """mma.sync; config = (kind 0, rows a block, columns of the output, blocks a multiprocessor)."""
    q, kv = DTYPES[str(axes["q"])], DTYPES[str(axes["kv"])]
    head_dim = axes["head_dim"]
    assert isinstance(head_dim, int)
    tile = WIDE_TILES[head_dim] if head_dim else TILE if kv.bytes == 2 else TILE_OF_48
    size, body = tile.shared_bytes(kv.bytes), tile.body("prefill_tiles", q.short, kv.short)
    entry = Entry("prefill_tiles", body, tile.threads, (0, tile.rows, tile.dim_vo, tile.blocks), size, tile.blocks)
    return Unit("fi/prefill/batch_prefill.cuh", "PrefillProblem", (entry,))


# Of the Hopper kernel: axis head_dim -> (head_dim_qk, head_dim_vo, keys a step, consumer groups of 64 rows). H200,
# head_dim 128: 128 keys against 96, one sequence of 16k, page 16, 717 against 666 TFLOP/s; 128 random lengths to 1k 432
# against 440. head_dim 192, 4 of 4k: 2 groups and 128 keys 630, 3 and 112 619. Others unmeasured.
_HOPPER = {64: (64, 64, 128, 3), 128: (128, 128, 128, 3), 192: (192, 128, 128, 2), 256: (256, 256, 80, 2)}
_HOPPER_VALUES = {qk: vo for qk, vo, *_ in _HOPPER.values()}
# Of the kernels for e4m3, and for 16-bit q over fp8: keys a step; head dims are 128. On an H200, one sequence of 16k,
# page 16: e4m3 909 TFLOP/s with 128 keys, 861 with 96. Of 16-bit q only 128 keys are measured, 433.
_FP8_KEYS, _FP8_ROWS, _MIXED_KEYS, _FP8_DIM = 128, 192, 128, 128


def _hopper_bytes(qk: int, vo: int, keys: int, groups: int) -> int:
    """sizeof(PrefillKernel::Shared), and the 1024 bytes to which its start is aligned."""
    more = 2 * 64 * groups * qk  # of queries; a second tile of them, where it fits
    tiles = more + 2 * 2 * keys * (qk + vo)
    query_stages = 2 if tiles + more <= 226 * 1024 else 1
    return round_up(tiles + more * (query_stages - 1) + (12 + 2 * query_stages) * 8 + 2 * _WORK, 1024) + 1024


def _hopper_unit(axes: Axes) -> Unit:
    """wgmma and TMA; config = (kind 1, keys a step), of copies of 64 columns and of whole rows."""
    q, head_dim = DTYPES[str(axes["q"])], axes["head_dim"]
    assert isinstance(head_dim, int)
    if q.bytes == 1:
        return _fp8_unit(axes)
    if DTYPES[str(axes["kv"])].bytes == 1:
        return _mixed_unit(axes)
    qk, vo, keys, groups = _HOPPER[head_dim]
    if axes["soft_cap"]:
        keys = min(keys, 64 if vo > 128 else 96 if vo > 64 else 128)  # the cap takes the registers of more
    size, capped = _hopper_bytes(qk, vo, keys, groups), "true" if axes["soft_cap"] else "false"

    def entry(name: str, whole_rows: str) -> Entry:
        body = f"batch_prefill<{q.device}, {qk}, {vo}, {keys}, {whole_rows}, {capped}, {groups}, {size}>"
        return Entry(name, body, 128 * (groups + 1), (1, keys), size, 1)

    entries = (entry("batch_prefill", "false"), entry("batch_prefill_rows", "true"))
    return Unit("fi/prefill/batch_prefill_sm90.cuh", "BatchPrefillParams", entries)


def _fp8_bytes(keys: int) -> int:
    """sizeof(PrefillFp8Kernel::Shared), and the 1024 bytes to which its start is aligned."""
    return round_up(_FP8_DIM * (2 * _FP8_ROWS + 8 * keys) + 24 * 8 + 2 * _WORK, 1024) + 1024


def _fp8_unit(axes: Axes) -> Unit:
    """wgmma on e4m3, which multiplies and weighs; config = (kind 2, keys a step)."""
    assert axes["head_dim"] == _FP8_DIM and axes["kv"] == "e4m3"
    keys = 96 if axes["soft_cap"] else _FP8_KEYS
    size, capped = _fp8_bytes(keys), "true" if axes["soft_cap"] else "false"
    entry = Entry("batch_prefill_fp8", f"batch_prefill_fp8<{keys}, {capped}, {size}>", 512, (2, keys), size, 1)
    return Unit("fi/prefill/batch_prefill_fp8_sm90.cuh", "BatchPrefillParams", (entry,))


def _mixed_unit(axes: Axes) -> Unit:
    """The 16-bit kernel, whose keys and values a warpgroup converts; config = (kind 1, keys a step)."""
    assert axes["head_dim"] == _FP8_DIM
    q, kv = DTYPES[str(axes["q"])], DTYPES[str(axes["kv"])]
    keys = 112 if axes["soft_cap"] else _MIXED_KEYS
    size = 2 * _FP8_DIM * (ROWS + 6 * keys) + 3 * 1024  # barriers of either kernel, and the alignment
    capped = "true" if axes["soft_cap"] else "false"
    body = f"batch_prefill_mixed<{q.device}, {kv.device}, {keys}, {capped}, {size}>"
    return Unit(
        "fi/prefill/batch_prefill_mixed_sm90.cuh",
        "BatchPrefillParams",
        (Entry("batch_prefill_mixed", body, 512, (1, keys), size, 1),),
    )


BATCH_PREFILL = Op(
    name="batch_prefill",
    family="prefill",
    schema="(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) schedule, Tensor(d!)? workspace, Tensor q, Tensor k, "
    "Tensor v, Tensor? page_indices, Tensor? custom_mask, Tensor? mask_indptr, Tensor? prefix_len, Tensor? items, "
    "Tensor? sinks, Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, Tensor? bmm1_scale, Tensor? bmm2_scale, "
    "int batch_size, int tile_tokens, int kv_tokens, bool clear_rest, int kv_layout, int pos_encoding_mode, "
    "bool causal, int window_left, float logits_soft_cap, float sm_scale, float v_scale, float rope_scale, "
    "float rope_theta, bool? enable_pdl, str impl) -> ()",
    # head_dim: what a kernel is compiled for, 192 with values of 128; 0: any. soft_cap: of the Hopper kernel.
    axes={
        "q": ("f16", "bf16", "f32", "e4m3", "e5m2"),
        "kv": ("f16", "bf16", "f32", "e4m3", "e5m2"),
        "head_dim": (64, 128, 192, 256, 0),
        "soft_cap": (False, True),
    },
    impls=(
        Impl("cpu", ON_CPU),
        Impl(
            "fa3",
            (
                *exactly(90),
                Constraint("q", "in", ("f16", "bf16", "e4m3")),
                Constraint("kv", "in", ("f16", "bf16", "e4m3", "e5m2")),
                Constraint("head_dim", "in", tuple(_HOPPER)),
            ),
            _hopper_unit,
        ),
        Impl(
            "fa2",
            (*at_least(80), Constraint("q", "in", tuple(MULTIPLY)), Constraint("head_dim", "==", 0)),
            _tiles_unit,
        ),
        # The same kernel with tiles that need the shared memory of these: half of 227 KB.
        Impl(
            "fa2_wide",
            (
                Constraint("device", "==", "cuda"),
                Constraint("capability", "in", _LARGE_SHARED),
                Constraint("q", "in", ("f16", "bf16")),
                Constraint("kv", "in", ("f16", "bf16")),
                Constraint("head_dim", "in", tuple(WIDE_TILES)),
                Constraint("soft_cap", "==", False),
            ),
            _tiles_unit,
        ),
    ),
    prebuilt=(
        *(
            {"q": q, "kv": kv, "head_dim": 0, "soft_cap": False}
            for q, kv in (*((q, q) for q in MULTIPLY if q != "e5m2"), ("f16", "e4m3"), ("bf16", "e4m3"))
        ),
        *(
            {"q": q, "kv": q, "head_dim": head_dim, "soft_cap": soft_cap}
            for q in ("f16", "bf16")
            for head_dim in _HOPPER
            for soft_cap in ((False, True) if head_dim == 128 else (False,))
        ),
        *({"q": q, "kv": "e4m3", "head_dim": 128, "soft_cap": False} for q in ("e4m3", "f16", "bf16")),
    ),
)

prefill_plan = Launcher(PREFILL_PLAN, lambda schedule, *_: (schedule.get_device(),))


@functools.cache
def _wide_tile(device: int, dim_qk: int, dim_vo: int) -> int:
    """The key of WIDE_TILES whose tile holds these head dims, where the device has room for it; else 0."""
    import torch

    if target_of(torch.device("cuda", device)).capability not in _LARGE_SHARED:
        return 0
    return next((key for key, t in WIDE_TILES.items() if dim_qk <= t.dim_qk and dim_vo <= t.dim_vo), 0)


def _key(out, lse, schedule, workspace, q, k, v, *rest):  # type: ignore[no-untyped-def]
    impl = rest[-1]
    if impl != "fa3":
        device, dims = q.get_device(), (q.shape[2], v.shape[-1])
        if max(dims) > 128 and impl == "fa2" and k.itemsize == 2 and (wide := _wide_tile(device, *dims)):
            return device, q.dtype, k.dtype, wide, False, "fa2_wide"
        return device, q.dtype, k.dtype, 0, False, impl
    return q.get_device(), q.dtype, k.dtype, q.shape[2], rest[-7] > 0.0, impl


batch_prefill = Launcher(BATCH_PREFILL, _key)


def tile_tokens(num_qo_heads: int, num_kv_heads: int, rows: int = ROWS) -> int:
    """Query tokens of a tile: as many as fill `rows` packed rows. It depends on no lengths, so results do not."""
    return max(1, rows * num_kv_heads // max(1, num_qo_heads))


@functools.cache
def rows_of(impl: str, q: torch.dtype, kv: torch.dtype, head_dim_qk: int) -> int:
    """Packed query rows of a tile of an implementation; kernels for fewer rows than a tile of 192 do not take it."""
    if impl != "fa3" or q.itemsize != kv.itemsize:
        return ROWS
    if q.itemsize == 1:
        return _FP8_ROWS
    return 64 * _HOPPER[head_dim_qk][3]


def short_tokens(
    num_qo_heads: int, num_kv_heads: int, impl: str, q: torch.dtype, kv: torch.dtype, head_dim_qk: int
) -> int:
    """Query tokens of the lower tiles that an implementation takes as well, for `plan` to choose; 0: none."""
    low = rows_of(impl, q, kv, head_dim_qk) > ROWS and q.itemsize == 2
    return tile_tokens(num_qo_heads, num_kv_heads) if low else 0


def slots(workspace_bytes: int, impl: str, q: torch.dtype, kv: torch.dtype, head_dim: tuple[int, int]) -> int:
    """Parts of tiles that a workspace of so many bytes has room for; 0 if the implementation splits none."""
    if impl != "fa3" or q.itemsize != 2 or kv.itemsize != 2:
        return 0
    return workspace_bytes // (rows_of(impl, q, kv, head_dim[0]) // 64 * 128 * 4 * (head_dim[1] // 2 + 4))


def requests(schedule: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`[batch_size, 4]`: first row, rows, first page or key, tokens of each request of the last `plan`."""
    begin = _HEADER + _COUNTERS
    return schedule[begin : begin + 4 * batch_size].view(-1, 4)


def words(batch_size: int, rows: int, tokens: int) -> int:
    """Length of the schedule of a batch with so many query tokens, in tiles of `tokens`."""
    return _HEADER + _COUNTERS + 4 * batch_size + 2 * (rows // tokens + batch_size)


@functools.cache
def choose(
    backend: str, device: torch.device, q: torch.dtype, kv: torch.dtype, out: torch.dtype, head_dim_qk: int,
    head_dim_vo: int, group: int, pos_encoding_mode: int, plain: bool, page_size: int = 0, scaled: bool = False,
) -> str:  # fmt: skip
    """The implementation for `attend`: the one that `backend` names ("fa2", "fa3"), for "auto" the best that fits.

    plain: neither custom mask nor items. scaled: scales by head or on the device. page_size: 0 for ragged keys. On a
    CPU it is "cpu". Cached: a look-up per call. Raises UnsupportedError with the reasons if the named one, or none,
    takes it.
    """
    target = target_of(device)
    general = {"q": short_name(q), "kv": short_name(kv), "head_dim": 0, "soft_cap": False}
    if target.kind == "cpu":
        return BATCH_PREFILL.spec(target, general).impl
    if backend == "fa2":
        return BATCH_PREFILL.spec(target, general, "fa2").impl
    e4m3, kv_fp8 = short_name(q) == "e4m3", kv.itemsize == 1
    values = head_dim_qk if kv_fp8 else _HOPPER_VALUES.get(head_dim_qk)
    reasons = [
        f"requires {wanted}, got {got}"
        for wanted, got, met in (
            ("kv of q's dtype, or fp8 with a 16-bit q", f"{q}, {kv}", q is kv or (kv_fp8 and q.itemsize == 2)),
            ("output of q's dtype, or of 16 bits for e4m3", str(out), q is out or (e4m3 and out.itemsize == 2)),
            ("head_dim_qk 128 for fp8", str(head_dim_qk), not kv_fp8 or head_dim_qk == _FP8_DIM),
            ("values of head_dim_qk, or 128 for 192", str(head_dim_vo), head_dim_vo == values),
            ("at most 128 query heads a kv head", str(group), group <= ROWS),
            ("pos_encoding_mode NONE", PosEncodingMode(pos_encoding_mode).name, pos_encoding_mode == 0),
            ("no mask", "one", plain),
            ("no scales by head or on the device, or e4m3", "scales", e4m3 or not scaled),
        )
        if not met
    ]
    reasons += BATCH_PREFILL.explain(target, general | {"head_dim": head_dim_qk})["fa3"]
    # A bulk copy ends with its page: 16 prompts of 1024, 32/8 heads of 128, take 406 us with pages of 16 and 2956 us
    # with pages of 1 (H200), more than by the other kernel.
    small = page_size > 0 and math.gcd(page_size, _LEAST_COPY) < _LEAST_COPY
    if not reasons and not (backend == "auto" and small):
        return "fa3"
    if backend == "auto":
        return BATCH_PREFILL.spec(target, general, "fa2").impl
    raise UnsupportedError(f"batch_prefill by {backend} is not supported on {target}:", {backend: reasons})


def fits(impl: str, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether addresses and strides are multiples of 16 bytes, as the Hopper kernel needs; others take any."""
    if impl != "fa3":
        return True
    o, x, y, z = out.stride(), q.stride(), k.stride(), v.stride()
    bits = out.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | (o[0] | o[1]) * out.itemsize
    bits |= (x[0] | x[1]) * q.itemsize | (y[0] | y[1] | y[-2] | z[0] | z[1] | z[-2]) * k.itemsize
    return bits % 16 == 0


def plan(
    schedule: torch.Tensor,
    batch_size: int,
    tokens: int,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    last_page_len: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    qo_len: int = 0,
    pages_per_request: int = 0,
    causal: bool = False,
    window_left: int = -1,
    kv_heads: int = 1,
    short_tokens: int = 0,
    slots: int = 0,
    blocks: int = 0,
) -> None:
    """Lists the tiles of a batch, on the device and without synchronising: one kernel of one block.

    schedule: int32, `words(...)` or longer, aligned to 16 bytes; needs no initial values. tokens: `tile_tokens(...)`
    with the `rows_of(...)` what `choose` answers. All tensors lie on its device and are contiguous. qo_indptr: int32
    `[batch_size + 1]`, query tokens; None: qo_len each. Page ids of request b are `page_indices[kv_indptr[b] :
    kv_indptr[b + 1]]` (int32 `[batch_size + 1]`), or without kv_indptr `page_indices[b * pages_per_request
    :][:pages_per_request]`: a flat block table. Ragged keys have page_size 1 and kv_indptr in tokens. Lengths are
    kv_len (int32 or uint32 `[batch_size]`), limited to what the pages hold, or `(pages - 1) * page_size +
    last_page_len`, or all that the pages hold.

    causal and window_left say in which order tiles are best taken; `attend` may be given others. short_tokens:
    `short_tokens(...)`, of tiles that the plan may choose instead (results are the same bits), or 0. With
    slots (`slots(...)` of the workspace that `attend` then gets) keys of the last tiles, or of all if they are few,
    may be split among blocks, by the number of multiprocessors and by what else is in the batch; implementations that
    cannot merge parts take tiles whole. kv_heads: each tile is one of every kv head. blocks: how many take tiles at a
    time; 0: one a multiprocessor.

    Raises ValueError or TypeError (shape, dtype, device).
    """
    prefill_plan(
        schedule, qo_indptr, kv_indptr, last_page_len, kv_len, batch_size, qo_len, page_size, pages_per_request, tokens,
        causal, window_left, kv_heads, short_tokens, slots, blocks,
    )  # fmt: skip


def attend(
    schedule: torch.Tensor,
    batch_size: int,
    tokens: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_indices: torch.Tensor | None,
    impl: str,
    kv_layout: int,
    pos_encoding_mode: int = 0,
    causal: bool = False,
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
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    prefix_len: torch.Tensor | None = None,
    items: torch.Tensor | None = None,
    kv_tokens: int = 0,
    clear_rest: bool = False,
    variant: Launch | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attention of all requests that the last `plan` on this schedule listed, in one launch.

    out: `[qo_tokens, num_qo_heads, head_dim_vo]`, fp16, bf16, fp32, e4m3 or e5m2. lse: fp32 `[qo_tokens, num_qo_heads]`
    contiguous, base 2, or None. q: `[qo_tokens, num_qo_heads, head_dim_qk]`. k, v with page_indices (int32,
    contiguous): `[num_pages, page_size, num_kv_heads, dim]` (kv_layout 0, NHD) or `[num_pages, num_kv_heads, page_size,
    dim]` (1, HND); without: `[kv_tokens, num_kv_heads, dim]` or `[num_kv_heads, kv_tokens, dim]`; of q's dtype, or e4m3
    or e5m2 with a 16-bit q. Strides are free but for the last dimension; head dims are multiples of 8 up to 512. Rows
    of no request become zero in out with clear_rest, else they are not written.

    impl: what `choose` answers, if `fits` (else "fa2"). pos_encoding_mode: value of `PosEncodingMode`.
    sm_scale, bmm1_scale (fp32, one element on the device), scale_q (fp32 `[num_qo_heads]`) and scale_k (fp32
    `[num_kv_heads]`) multiply the scores; v_scale, bmm2_scale and scale_v (`[num_kv_heads]`) the output; the last are
    not in lse. sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to the sum of the softmax, so it is in lse, and a
    row without keys has lse = sinks[h] * log2(e). Else such a row has out = 0, lse = -inf.

    Row i of a request stands at position p = kv_len - qo_len + i. causal: it sees keys j <= p; custom_mask, which takes
    its place: those whose bit is set, uint8, each request's `[qo_len, kv_len]` flattened, element e in bit e % 8 of
    byte e / 8, from byte mask_indptr[b] (int32 `[batch_size + 1]`) on; or without mask_indptr, `[qo_tokens, n]`: keys
    before the query tokens, and of these, the last keys, token t if bit t % 8 of byte t / 8 of the row is set; no
    request may have more than 8 n rows. items, which takes the place of both: keys j <=
    p that are before prefix_len[b] (int32 or uint32 `[batch_size]`), or from p - items[b][p - prefix_len[b]] + 1 on
    (uint16 `[batch_size, n]`). window_left w >= 0 hides keys j < p - w whatever else is given.

    workspace: uint8, aligned to 16 bytes, private while the kernel runs; needed if `plan` was given slots.

    kv_tokens: of all requests, if known: decides how many heads share the L2 cache. variant: the op with a user's
    variant, and what it takes more; scales of scores and the soft cap are then its own.

    Raises ValueError, TypeError; UnsupportedError where impl does not take the dtypes, head dims or options.
    """
    launch, extras = (batch_prefill, ()) if variant is None else variant
    launch(
        out, lse, schedule, workspace, q, k, v, page_indices, custom_mask, mask_indptr, prefix_len, items, sinks,
        scale_q, scale_k, scale_v, bmm1_scale, bmm2_scale, batch_size, tokens, kv_tokens, clear_rest,
        kv_layout, pos_encoding_mode, causal, window_left, logits_soft_cap, sm_scale, v_scale, rope_scale, rope_theta,
        enable_pdl, impl, *extras,
    )  # fmt: skip
