"""The paged KV cache: appending K and V, the MLA form of it, and the tables of who owns which row."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from fi_core.env import env
from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit
from fi_core.utils import _unpack_paged_kv_cache, check_shape_dtype_device, int32_index, is_graph_capturing

if TYPE_CHECKING:
    import torch

_CHECK = env.check  # read once: calls pay nothing for it


def _append_unit(axes: Axes) -> Unit:
    """Entries in order of preference; config = (bytes a vector, rows a thread)."""
    words = {16: "fi::uint32_t, 4", 4: "fi::uint32_t, 1", 2: "fi::uint16_t, 1", 1: "fi::uint8_t, 1"}
    return Unit(
        "fi/page/append_paged_kv_cache.cuh",
        "AppendParams",
        tuple(
            Entry(f"append_{size}_bytes_{rows}_rows", f"append_rows<{words[size]}, {rows}>", 256, (size, rows))
            for size, rows in ((16, 4), (16, 1), (4, 1), (2, 1), (1, 1))
        ),
    )


APPEND_PAGED_KV_CACHE = Op(
    name="append_paged_kv_cache",
    family="page",
    schema="(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!)? v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len, bool head_major, bool mla) "
    "-> ()",
    axes={},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _append_unit)),
)

GET_BATCH_INDICES_POSITIONS = Op(
    name="get_batch_indices_positions",
    family="page",
    schema="(Tensor(a!) batch_indices, Tensor(b!) positions, Tensor append_indptr, Tensor seq_lens, "
    "bool fill_positions) -> ()",
    axes={},
    impls=(
        Impl("cpu", ON_CPU),
        Impl(
            "cuda",
            at_least(80),
            lambda axes: Unit(
                "fi/page/get_batch_indices_positions.cuh",
                "BatchPositionsParams",
                (Entry("get_batch_indices_positions", "batch_indices_positions", 128),),
            ),
        ),
    ),
)

GET_SEQ_LENS = Op(
    name="get_seq_lens",
    family="page",
    schema="(Tensor(a!) seq_lens, Tensor kv_indptr, Tensor kv_last_page_len, int page_size) -> ()",
    axes={},
    impls=(
        Impl("cpu", ON_CPU),
        Impl(
            "cuda",
            at_least(80),
            lambda axes: Unit(
                "fi/page/get_seq_lens.cuh",
                "SeqLensParams",
                tuple(Entry(f"get_seq_lens_{w}", f"seq_lens<fi::{w}_t>", 128) for w in ("int32", "int64")),
            ),
        ),
    ),
)

_append = Launcher(APPEND_PAGED_KV_CACHE, lambda append_key, *_: (append_key.get_device(),))
_positions = Launcher(GET_BATCH_INDICES_POSITIONS, lambda batch_indices, *_: (batch_indices.get_device(),))
_seq_lens = Launcher(GET_SEQ_LENS, lambda seq_lens, *_: (seq_lens.get_device(),))


def _first(wrong: torch.Tensor) -> int | None:
    return int(wrong.nonzero()[0]) if wrong.any() else None


def check_append(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
) -> None:
    """Raise ValueError unless every row to be written has a page of its request (what FI_CHECK=1 adds to a call).

    Reads the tables on the host, so it waits for the device; does nothing while a CUDA graph is captured.
    """
    import torch

    if torch.compiler.is_compiling() or is_graph_capturing():
        return
    batch, position, page, start = (x.cpu().long() for x in (batch_indices, positions, kv_indices, kv_indptr))
    steps = start.diff()
    if (i := _first(torch.cat((start[:1], steps)) < 0)) is not None:
        raise ValueError(
            f"kv_indptr: must rise from 0 or more; got {start[i].item()} at {i} after {start[:i].tolist()[-1:]}"
        )
    if start[-1] > page.numel():
        raise ValueError(
            f"kv_indices: kv_indptr ends at {start[-1].item()}, so as many are required; got {page.numel()}"
        )
    used = page[start[0] : start[-1]]
    if (i := _first((used < 0) | (used >= num_pages))) is not None:
        raise ValueError(
            f"kv_indices: the cache has pages 0 to {num_pages - 1}; got {used[i].item()} at {i + int(start[0])}"
        )
    live = batch >= 0
    if (i := _first(live & (batch >= steps.numel()))) is not None:
        raise ValueError(f"batch_indices: kv_indptr has {steps.numel()} requests; got {batch[i].item()} at {i}")
    if not live.any():
        return
    room = steps[batch.clamp(min=0)] * page_size
    if (i := _first(live & ((position < 0) | (position >= room)))) is not None:
        raise ValueError(
            f"positions: request {batch[i].item()} has room for {room[i].item()} tokens; "
            f"got {position[i].item()} at {i}"
        )


def _paged(layout: str, part: str, dim: str) -> Tensor:
    tokens = ["page_size", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "page_size"]
    index = 0 if part == "k" else 1
    return Tensor(["num_pages", *tokens, dim], param="paged_kv_cache", tuple_idx=index)


def _append_reference(  # type: ignore[no-untyped-def]
    append_key, append_value, k_cache, v_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
):
    for row in (batch_indices >= 0).nonzero().flatten().tolist():
        page, slot = divmod(int(positions[row]), k_cache.shape[1])
        page = kv_indices[kv_indptr[batch_indices[row]] + page]
        k_cache[page, slot] = append_key[row]
        v_cache[page, slot] = append_value[row]
    return k_cache, v_cache


def _append_head_major_reference(  # type: ignore[no-untyped-def]
    append_key, append_value, k_cache, v_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
):
    for row in (batch_indices >= 0).nonzero().flatten().tolist():
        page, slot = divmod(int(positions[row]), k_cache.shape[2])
        page = kv_indices[kv_indptr[batch_indices[row]] + page]
        k_cache[page, :, slot] = append_key[row]
        v_cache[page, :, slot] = append_value[row]
    return k_cache, v_cache


_TABLE = {
    "batch_indices": Tensor(["nnz"]),
    "positions": Tensor(["nnz"]),
    "kv_indices": Tensor(["num_indices"]),
    "kv_indptr": Tensor(["batch_size_plus_1"]),
    "kv_last_page_len": Tensor(["batch_size"]),
}
_TABLE_AXES: dict[str, Var | Const] = {
    axis: Var() for axis in ("nnz", "num_pages", "num_indices", "batch_size_plus_1", "batch_size")
}


def _append_template(layout: str) -> TraceTemplate:
    caches = {f"{part}_cache": _paged(layout, part, dim) for part, dim in (("k", "head_dim"), ("v", "v_head_dim"))}
    return TraceTemplate(
        "append_paged_kv_cache",
        axes=_TABLE_AXES
        | {
            "num_kv_heads": Const(abbrev="kv"),
            "head_dim": Const(abbrev="d"),
            "v_head_dim": Const(abbrev=""),
            "page_size": Const(abbrev="ps"),
        },
        inputs={
            "append_key": Tensor(["nnz", "num_kv_heads", "head_dim"]),
            "append_value": Tensor(["nnz", "num_kv_heads", "v_head_dim"]),
            **caches,
            **_TABLE,
        },
        outputs={
            "k_cache": Tensor(
                caches["k_cache"].dim_names, param="paged_kv_cache", tuple_idx=0, dtype_from="append_key"
            ),
            "v_cache": Tensor(
                caches["v_cache"].dim_names, param="paged_kv_cache", tuple_idx=1, dtype_from="append_value"
            ),
        },
        reference=_append_reference if layout == "NHD" else _append_head_major_reference,
        tags=(f"kv_layout:{layout}",),
        description=f"Writes new K and V rows into the pages of their requests, {layout} pages.",
    )


def _append_trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of the layout; none for the short form of page size 1, whose shapes lack the page axis."""
    cache = arguments["paged_kv_cache"]
    axes = cache[0].ndim + 1 if isinstance(cache, tuple) else cache.ndim
    return _APPEND_TEMPLATES.get(arguments.get("kv_layout", "NHD")) if axes == 5 else None


_APPEND_TEMPLATES = {layout: _append_template(layout) for layout in ("NHD", "HND")}
_append_trace.templates = tuple(_APPEND_TEMPLATES.values())  # type: ignore[attr-defined]


@fi_api(trace=_append_trace)
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new K and V rows into the pages of their requests, in place.

    Row i becomes token `t = positions[i]` of request `b = batch_indices[i]`: slot `t % page_size` of page
    `kv_indices[kv_indptr[b] + t // page_size]`. Rows with `batch_indices[i] < 0` are skipped.

    append_key: `[nnz, num_heads, head_dim]`; append_value: `[nnz, num_heads, v_head_dim]`. Any dtype of whole bytes,
    the same as the cache's (the bytes are copied). Strides are free but for the last dimension.
    batch_indices, positions: `[nnz]`, as from `get_batch_indices_positions`.
    paged_kv_cache: `[pages, 2, page_size, num_heads, head_dim]` ("NHD"), `[pages, 2, num_heads, page_size, head_dim]`
    ("HND"), or a tuple (k_cache, v_cache) without the axis of 2; without the page axis, page_size is 1.
    kv_indptr `[batch_size + 1]`, kv_indices, kv_last_page_len `[batch_size]`: the page table after the append.
    All index tensors are contiguous and int32; int64 ones are copied to int32.

    Raises ValueError (shape, stride, device), TypeError (dtype) or KeyError (kv_layout, container of the cache). With
    FI_CHECK=1 at import, also ValueError for page ids, positions and offsets out of range, which waits for the device.
    """
    head_major = kv_layout == "HND"
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    if getattr(paged_kv_cache, "ndim", 0) == 5 and (head_major or kv_layout == "NHD"):
        k_cache, v_cache = paged_kv_cache, None  # type: ignore[assignment]  # the op splits it; views cost 3 us a call
    else:
        k_cache, v_cache = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    if _CHECK:
        page_size = k_cache.shape[-2 if head_major else -3]
        check_append(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[0], page_size)
    _append(
        append_key,
        append_value,
        int32_index(batch_indices),
        int32_index(positions),
        k_cache,
        v_cache,
        int32_index(kv_indices),
        int32_index(kv_indptr),
        int32_index(kv_last_page_len),
        head_major,
        False,
    )


def _append_mla_reference(  # type: ignore[no-untyped-def]
    append_ckv, append_kpe, ckv_cache, kpe_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
):
    for row in (batch_indices >= 0).nonzero().flatten().tolist():
        page, slot = divmod(int(positions[row]), ckv_cache.shape[1])
        page = kv_indices[kv_indptr[batch_indices[row]] + page]
        ckv_cache[page, slot] = append_ckv[row]
        kpe_cache[page, slot] = append_kpe[row]
    return ckv_cache, kpe_cache


@fi_api(
    trace=TraceTemplate(
        "append_paged_mla_kv_cache",
        axes=_TABLE_AXES
        | {
            "head_dim_ckv": Const(abbrev="ckv"),
            "head_dim_kpe": Const(abbrev="kpe"),
            "page_size": Const(abbrev="ps"),
        },
        inputs={
            "append_ckv": Tensor(["nnz", "head_dim_ckv"]),
            "append_kpe": Tensor(["nnz", "head_dim_kpe"]),
            "ckv_cache": Tensor(["num_pages", "page_size", "head_dim_ckv"]),
            "kpe_cache": Tensor(["num_pages", "page_size", "head_dim_kpe"]),
            **_TABLE,
        },
        outputs={
            "ckv_cache": Tensor(["num_pages", "page_size", "head_dim_ckv"], param="ckv_cache", dtype_from="append_ckv"),
            "kpe_cache": Tensor(["num_pages", "page_size", "head_dim_kpe"], param="kpe_cache", dtype_from="append_kpe"),
        },
        reference=_append_mla_reference,
        description="Writes new compressed-KV and rope-key rows into the pages of their requests.",
    )
)
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """`append_paged_kv_cache` for MLA (arXiv:2405.04434): a compressed KV and a rope key a token, in place.

    append_ckv: `[nnz, head_dim_ckv]`, append_kpe: `[nnz, head_dim_kpe]`; any sizes (512 and 64 in the paper).
    ckv_cache: `[pages, page_size, head_dim_ckv]`, kpe_cache: `[pages, page_size, head_dim_kpe]`, of the same dtypes.
    The rest, errors and FI_CHECK are as in `append_paged_kv_cache`.
    """
    if _CHECK:
        check_append(batch_indices, positions, kv_indices, kv_indptr, *ckv_cache.shape[:2])
    _append(
        append_ckv,
        append_kpe,
        int32_index(batch_indices),
        int32_index(positions),
        ckv_cache,
        kpe_cache,
        int32_index(kv_indices),
        int32_index(kv_indptr),
        int32_index(kv_last_page_len),
        False,
        True,
    )


def _positions_reference(append_indptr, seq_lens, nnz):  # type: ignore[no-untyped-def]
    batch_indices, positions = append_indptr.new_full((nnz,), -1), append_indptr.new_zeros(nnz)
    bounds = append_indptr.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        batch_indices[begin:end] = b
        positions[begin:end] = seq_lens[b] - append_indptr.new_tensor(range(end - begin, 0, -1))[: nnz - begin]
    return batch_indices, positions


@fi_api(
    trace=TraceTemplate(
        "get_batch_indices_positions",
        axes={"nnz": Var(), "batch_size": Var(), "batch_size_plus_1": Var()},
        inputs={
            "append_indptr": Tensor(["batch_size_plus_1"]),
            "seq_lens": Tensor(["batch_size"]),
            "nnz": Scalar("int32"),
        },
        outputs={"batch_indices": Tensor(["nnz"], dtype="int32"), "positions": Tensor(["nnz"], dtype="int32")},
        reference=_positions_reference,
        description="The request and the position in it of each appended row; padding rows get request -1.",
    )
)
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each appended row and its position there: `seq_lens[b] - (append_indptr[b + 1] - row)`.

    append_indptr: `[batch_size + 1]`, row r belongs to request b if `append_indptr[b] <= r < append_indptr[b + 1]`.
    seq_lens: `[batch_size]`, tokens after the append. Both int32, contiguous; int64 ones are copied to int32.
    nnz: number of rows to fill; may exceed `append_indptr[-1]` (padding for CUDA graphs), never reads it back.
    batch_indices, positions: int32 `[nnz]` buffers to fill; allocated if None.

    Returns (batch_indices, positions). A row of no request gets -1; its position is 0, or untouched in a buffer given.
    Raises ValueError (nnz, shape, device, buffer) or TypeError (dtype).
    """
    import torch

    if nnz < 0:
        raise ValueError(f"nnz: must be 0 or more; got {nnz}")
    append_indptr, seq_lens = int32_index(append_indptr), int32_index(seq_lens)
    fill_positions = positions is None
    if batch_indices is None:
        batch_indices = append_indptr.new_empty(nnz, dtype=torch.int32)
    else:
        check_shape_dtype_device(batch_indices, (nnz,), torch.int32, append_indptr.device, "batch_indices")
    if positions is None:
        positions = append_indptr.new_empty(nnz, dtype=torch.int32)
    else:
        check_shape_dtype_device(positions, (nnz,), torch.int32, append_indptr.device, "positions")
    _positions(batch_indices, positions, append_indptr, seq_lens, fill_positions)
    return batch_indices, positions


def _seq_lens_reference(kv_indptr, kv_last_page_len, page_size):  # type: ignore[no-untyped-def]
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


@fi_api(
    trace=TraceTemplate(
        "get_seq_lens",
        axes={"batch_size": Var(), "batch_size_plus_1": Var()},
        inputs={
            "kv_indptr": Tensor(["batch_size_plus_1"]),
            "kv_last_page_len": Tensor(["batch_size"]),
            "page_size": Scalar("int32"),
        },
        outputs={"seq_lens": Tensor(["batch_size"], dtype_from="kv_last_page_len")},
        reference=_seq_lens_reference,
        description="Tokens of each request of a page table.",
    )
)
def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request: `max(kv_indptr[b + 1] - kv_indptr[b] - 1, 0) * page_size + kv_last_page_len[b]`.

    kv_indptr: `[batch_size + 1]` in pages, kv_last_page_len: `[batch_size]`; both int32 or both int64, contiguous. A
    request without pages has the length in kv_last_page_len, so pass 0 there.

    Returns `[batch_size]` of their dtype. Raises ValueError (shape, device, page_size) or TypeError (dtype).
    """
    seq_lens = kv_last_page_len.new_empty(kv_last_page_len.shape)
    _seq_lens(seq_lens, kv_indptr, kv_last_page_len, page_size)
    return seq_lens
