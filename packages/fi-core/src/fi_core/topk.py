"""Selects the k largest elements of rows: values and indices, or the KV cache slots that sparse attention reads."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values
from fi_core.utils import int32_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import torch

__all__ = [
    "TopKTieBreak",
    "can_implement_filtered_topk",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
]

_SORTABLE = 4096  # kTopKSortable of top_k.h: torch sorts a larger k


class TopKTieBreak(IntEnum):
    """Which of the values equal to the k-th largest are selected: those with small or with large index."""

    NONE = 0  # either; here as SMALL
    SMALL = 1
    LARGE = 2


class _Config(NamedTuple):
    largest_cluster: int


def _cluster_unit(axes: Values) -> Unit:
    body = f"top_k_cluster<{DTYPES[str(axes['dtype'])].device}, 512>"
    return Unit(
        "fi/topk/top_k_sm90.cuh", "TopKParams", (Entry("top_k_cluster", body, 512, _Config(16), ctas_per_sm=2),)
    )


def _unit(axes: Values) -> Unit:
    body = f"top_k<{DTYPES[str(axes['dtype'])].device}, 512>"
    return Unit("fi/topk/top_k.cuh", "TopKParams", (Entry("top_k", body, 512, _Config(1), ctas_per_sm=2),))


TOP_K = Op(
    name="top_k",
    family="topk",
    arguments="Tensor input, int k, Tensor(a!)? values=None, Tensor(b!)? indices=None, Tensor(c!)? out=None, "
    "Tensor(d!)? out_raw_indices=None, Tensor? lengths=None, Tensor? row_starts=None, Tensor? src_page_table=None, "
    "Tensor? row_to_batch=None, Tensor? page_table_row_starts=None, Tensor? offsets=None, int page_size=1, "
    "bool prefer_last=False, bool sorted=False",
    axes={"dtype": ("f32", "f16", "bf16")},
    config=_Config,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("cluster", at_least(90), _cluster_unit),
        Implementation("cuda", at_least(80), _unit),
    ),
)

_top_k = operator(TOP_K)


def can_implement_filtered_topk() -> bool:
    """Whether the current CUDA device has the shared memory (128 KB per CTA) that FlashInfer's filtered top-k needs.

    No function of this module depends on it: each runs on every device.

    Returns:
        supported: bool, False without a device.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability()
    return capability in ((8, 0), (8, 7)) or capability[0] in (9, 10, 11)


def prefers_last(tie_break: int) -> bool:
    if tie_break not in (0, 1, 2):
        raise ValueError(f"tie_break: TopKTieBreak NONE (0), SMALL (1) or LARGE (2) is required; got {tie_break!r}")
    return tie_break == 2


def _segment_reference(row, k, prefer_last):  # type: ignore[no-untyped-def]
    """Returns the indices of the k largest elements of a row, in order."""
    row = row.double().nan_to_num(nan=float("inf"), posinf=1.7e308, neginf=-float("inf"))
    if prefer_last:
        return (row.numel() - 1 - row.flip(0).argsort(descending=True, stable=True)[:k]).sort().values
    return row.argsort(descending=True, stable=True)[:k].sort().values


def _top_k_reference(input, k, sorted=False, tie_break=0):  # type: ignore[no-untyped-def]
    indices = input.new_empty((input.shape[0], k)).long()
    for i, row in enumerate(input):
        chosen = _segment_reference(row, k, tie_break == 2)
        if sorted:
            ranked = row[chosen].double().nan_to_num(nan=float("inf"), posinf=1.7e308, neginf=-float("inf"))
            chosen = chosen[ranked.argsort(descending=True, stable=True)]  # torch on CUDA sorts -NaN apart from NaN
        indices[i] = chosen
    return input.gather(1, indices), indices


def _make_scores(draw: Draw, dtype: str, num_rows: int, width: int) -> torch.Tensor:
    """Strided rows in which values tie, with NaN and infinities."""
    x = draw.normal((num_rows, width), dtype)
    if draw.nasty:
        x = (x * 8).round() / 8
        draw.special(x, float("nan"), float("inf"), float("-inf"), -float("nan"), 0.0, -0.0)
    return draw.rows(x)


def _make(
    draw: Draw, *, dtype: str = "float32", num_rows: int = 3, width: int = 1003, k: int = 50, **options: Any
) -> dict[str, Any]:
    return {"input": _make_scores(draw, dtype, num_rows, width), "k": min(k, width), **options}


def _make_segments(*tables: str) -> Callable[..., dict[str, Any]]:
    """Scores of which each row has a segment, of any length; if nasty, one is empty and one is shorter than k.

    A page table has batch_size rows, in which no page occurs twice; row i of the scores reads row i % batch_size.
    """

    def make(
        draw: Draw,
        *,
        dtype: str = "float32",
        num_rows: int = 4,
        width: int = 1003,
        k: int = 50,
        page_size: int = 1,
        batch_size: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"input": _make_scores(draw, dtype, num_rows, width), "k": k}
        lengths = [width - 40 * i if i < 2 else 7 * (i - 2) for i in range(num_rows)]
        found["lengths"] = draw.int32(lengths) if draw.nasty else draw.integers(1, width + 1, (num_rows,))
        if "src_page_table" in tables:
            batch, pages = batch_size or num_rows, -(-width // page_size)
            found["src_page_table"] = draw.permutation(batch * pages).view(batch, pages)
            found["page_size"] = page_size
            if batch_size is not None:
                found["row_to_batch"] = draw.int32([i % batch for i in range(num_rows)])
        if "offsets" in tables:
            found["offsets"] = draw.offsets([width] * (num_rows - 1))
        return {**found, **options}

    return make


def _samples(*options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple({"dtype": dtype, **more} for dtype in ("float32", "float16", "bfloat16") for more in ({}, *options))


def _work(written: int) -> Callable[[Mapping[str, Any]], Work]:
    """Each row, or its segment, is read once; so many bytes a result are written besides the value."""

    def work(arguments: Mapping[str, Any]) -> Work:
        x, lengths = arguments["input"], arguments.get("lengths")
        size = written + (x.element_size() if written == 8 else 0)
        scores = x.numel() if lengths is None else int(lengths.sum())
        results = x.shape[0] * arguments["k"]
        return Work(scores, scores * x.element_size() + size * results + nbytes(lengths))

    return work


_EXACT = dict.fromkeys(("float32", "float16", "bfloat16"), (0.0, 0.0))
_TIE_BREAK = Scalar("int32", optional=True, description="0, 1: small indices first; 2: large ones")


@fi_api(
    trace=TraceTemplate(
        "top_k",
        axes={"num_rows": Var(), "width": Const(abbrev="v"), "k": Const()},
        inputs={
            "input": Tensor(["num_rows", "width"]),
            "k": Scalar("int32"),
            "sorted": Scalar("bool", optional=True),
            "tie_break": _TIE_BREAK,
        },
        outputs={
            "values": Tensor(["num_rows", "k"], dtype_from="input"),
            "indices": Tensor(["num_rows", "k"], dtype="int64"),
        },
        reference=(_segment_reference, _top_k_reference),
        op="top_k",
        make=_make,
        samples=_samples({"sorted": True}, {"tie_break": 2}, {"k": 0}, {"num_rows": 1, "width": 20000, "k": 2048}),
        work=_work(8),
        tolerance=_EXACT,
        description="Selects the k largest elements of each row and their indices, in index order or sorted by value.",
    )
)
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the k largest elements of each row: exactly k, also where values are equal.

    Results never depend on timing, batch or grid. Nothing synchronises, no workspace is used, and every call can be
    captured in a CUDA graph. NaN is the largest value whatever its sign, as in `torch.topk`; all NaN are equal, and so
    are -0 and +0.

    Args:
        input: `[rows, width]`, fp32, fp16 or bf16, width < 2^30; any row stride, last dimension contiguous.
        k: 0 to width.
        sorted: whether to sort by value in descending order, equal values by rising index. False: by rising index, at
            no cost. On CUDA, a sorted k above 4096 is sorted by `torch.sort` in a second step.
        deterministic: accepted for compatibility; results are always deterministic.
        tie_break: which of the values equal to the k-th largest are selected, see `TopKTieBreak`.
        dsa_graph_safe: accepted for compatibility, without effect.

    Returns:
        values: `[rows, k]` of input's dtype.
        indices: int64 `[rows, k]`.

    Raises:
        ValueError: a shape, stride, k or tie_break is wrong, or rows are too long for the shared memory of the device:
            above 700 000 elements where a CTA has 99 KB.
        TypeError: a dtype is wrong.
    """
    import torch

    rows = input.shape[0]
    if not 0 <= k <= input.shape[-1]:
        raise ValueError(f"k: 0 to the length of a row, {input.shape[-1]}, is required; got {k}")
    values = input.new_empty(rows, k)
    indices = input.new_empty(rows, k, dtype=torch.int64)
    in_kernel = sorted and (k <= _SORTABLE or not input.is_cuda)
    prefer_last = prefers_last(tie_break)
    _top_k(input, k, values, indices, prefer_last=prefer_last, sorted=in_kernel)
    if sorted and not in_kernel:
        # Maps NaN to the largest value: torch places NaN of negative sign elsewhere.
        keys = values.double().nan_to_num(nan=math.inf, posinf=1.7e308, neginf=-math.inf)
        order = keys.argsort(dim=1, descending=True, stable=True)
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def _page_table_reference(  # type: ignore[no-untyped-def]
    input,
    src_page_table,
    lengths,
    k,
    row_to_batch=None,
    tie_break=0,
    row_starts=None,
    page_table_row_starts=None,
    page_size=1,
):
    out = lengths.new_full((input.shape[0], k), -1).int()
    columns = row_starts if page_table_row_starts is None else page_table_row_starts
    for i, row in enumerate(input):
        start = 0 if row_starts is None else int(row_starts[i])
        x = _segment_reference(row[start : start + max(int(lengths[i]), 0)], k, tie_break == 2)
        table = src_page_table[i if row_to_batch is None else int(row_to_batch[i])]
        first = 0 if columns is None else int(columns[i])
        out[i, : x.numel()] = (table[first + x // page_size] * page_size + x % page_size).int()
    return out


_SEGMENT: dict[str, Tensor | Scalar] = {
    "lengths": Tensor(["num_rows"]),
    "k": Scalar("int32"),
    "tie_break": _TIE_BREAK,
    "row_starts": Tensor(["num_rows"], optional=True),
}


@fi_api(
    trace=TraceTemplate(
        "top_k_page_table_transform",
        axes={"num_rows": Var(), "width": Var(), "batch_size": Var(), "num_pages": Var(), "k": Const()},
        inputs={
            "input": Tensor(["num_rows", "width"]),
            "src_page_table": Tensor(["batch_size", "num_pages"]),
            **_SEGMENT,
            "row_to_batch": Tensor(["num_rows"], optional=True),
            "page_table_row_starts": Tensor(["num_rows"], optional=True),
            "page_size": Scalar("int32", optional=True),
        },
        outputs={"out": Tensor(["num_rows", "k"], dtype="int32")},
        reference=(_segment_reference, _page_table_reference),
        op="top_k",
        make=_make_segments("src_page_table"),
        samples=_samples({"page_size": 16}, {"tie_break": 2}),
        work=_work(4),
        description="Selects the k largest scores of each row, as slots of a paged KV cache.",
    )
)
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Selects the k largest scores of each row's segment and maps them to slots of a paged KV cache.

    Row i selects among `input[i, s : s + lengths[i]]` with s = row_starts[i] or 0, clamped to the row. A selected x
    becomes `src_page_table[b, c + x // page_size] * page_size + x % page_size`, with b = row_to_batch[i] or i, and
    c = page_table_row_starts[i], else row_starts[i], else 0. Slots come in the order of x; those beyond the length are
    -1. All index tensors stay on the device; int64 ones are copied to int32. NaN is the largest value, as in `top_k`.

    Args:
        input: `[rows, width]`, fp32, fp16 or bf16, as in `top_k`.
        src_page_table: int32 `[batch, pages]`. Column indices are not checked against its width.
        lengths: int32 `[rows]`, elements of each row's segment.
        k: 0 or more.
        row_to_batch: int32 `[rows]`, the row of the page table. None: row i.
        deterministic: accepted for compatibility; results are always deterministic.
        tie_break: which of the values equal to the k-th largest are selected, see `TopKTieBreak`.
        dsa_graph_safe: accepted for compatibility, without effect.
        row_starts: int32 `[rows]`, first element of each row's segment. None: 0.
        page_table_row_starts: int32 `[rows]`, column of the segment's first page. None: row_starts.
        page_size: tokens per page, 1 or more.
        out: int32 `[rows, k]`, to be written. None: a new tensor.
        out_raw_indices: int32 `[rows, k]`, to which x is written, or -1. None: not written.

    Returns:
        out: int32 `[rows, k]`.

    Raises:
        ValueError: a shape, stride, device, k, page_size or tie_break is wrong, or row_starts is given without
            page_table_row_starts where page_size is not 1.
        TypeError: a dtype is wrong.
    """
    import torch

    if not 0 <= k < 1 << 31:
        raise ValueError(f"k: 0 to 2^31 - 1 is required; got {k}")
    if out is None:
        out = input.new_empty(input.shape[0], k, dtype=torch.int32)
    _top_k(
        input,
        k,
        out=out,
        out_raw_indices=out_raw_indices,
        lengths=int32_index(lengths),
        row_starts=None if row_starts is None else int32_index(row_starts),
        src_page_table=int32_index(src_page_table),
        row_to_batch=None if row_to_batch is None else int32_index(row_to_batch),
        page_table_row_starts=None if page_table_row_starts is None else int32_index(page_table_row_starts),
        page_size=page_size,
        prefer_last=prefers_last(tie_break),
    )
    return out


def _ragged_reference(input, offsets, lengths, k, tie_break=0, row_starts=None):  # type: ignore[no-untyped-def]
    out = lengths.new_full((input.shape[0], k), -1).int()
    for i, row in enumerate(input):
        start = 0 if row_starts is None else int(row_starts[i])
        x = _segment_reference(row[start : start + max(int(lengths[i]), 0)], k, tie_break == 2)
        out[i, : x.numel()] = (x + int(offsets[i])).int()
    return out


@fi_api(
    trace=TraceTemplate(
        "top_k_ragged_transform",
        axes={"num_rows": Var(), "width": Var(), "k": Const()},
        inputs={"input": Tensor(["num_rows", "width"]), "offsets": Tensor(["num_rows"]), **_SEGMENT},
        outputs={"out": Tensor(["num_rows", "k"], dtype="int32")},
        reference=(_segment_reference, _ragged_reference),
        op="top_k",
        make=_make_segments("offsets"),
        samples=_samples({"tie_break": 2}),
        work=_work(4),
        description="Selects the k largest scores of each row, as positions in a ragged tensor.",
    )
)
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Selects the k largest scores of each row's segment as `x + offsets[i]`, positions in a ragged tensor.

    Row i selects among `input[i, s : s + lengths[i]]` with s = row_starts[i] or 0, clamped to the row. Results come in
    the order of x; those beyond the length are -1. All index tensors stay on the device; int64 ones are copied to
    int32. NaN is the largest value, as in `top_k`.

    Args:
        input: `[rows, width]`, fp32, fp16 or bf16, as in `top_k`.
        offsets: int32 `[rows]`, added to the results of each row.
        lengths: int32 `[rows]`, elements of each row's segment.
        k: 0 or more.
        deterministic: accepted for compatibility; results are always deterministic.
        tie_break: which of the values equal to the k-th largest are selected, see `TopKTieBreak`.
        dsa_graph_safe: accepted for compatibility, without effect.
        row_starts: int32 `[rows]`, first element of each row's segment. None: 0.

    Returns:
        out: int32 `[rows, k]`.

    Raises:
        ValueError: a shape, stride, device, k or tie_break is wrong.
        TypeError: a dtype is wrong.
    """
    import torch

    if not 0 <= k < 1 << 31:
        raise ValueError(f"k: 0 to 2^31 - 1 is required; got {k}")
    out = input.new_empty(input.shape[0], k, dtype=torch.int32)
    _top_k(
        input,
        k,
        out=out,
        lengths=int32_index(lengths),
        row_starts=None if row_starts is None else int32_index(row_starts),
        offsets=int32_index(offsets),
        prefer_last=prefers_last(tie_break),
    )
    return out
