"""Top-k selection of rows: values and indices, or the slots of a page table that sparse attention is to read."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit
from fi_core.utils import int32_index

if TYPE_CHECKING:
    import torch

__all__ = [
    "TopKTieBreak",
    "can_implement_filtered_topk",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
]

_SORTABLE = 4096  # kTopKSortable of top_k.h: a larger k is sorted by torch


class TopKTieBreak(IntEnum):
    """Which of the values that equal the k-th largest are taken: those of small or of large index."""

    NONE = 0  # any; here SMALL
    SMALL = 1
    LARGE = 2


def _cluster_unit(axes: Axes) -> Unit:
    """config = (largest cluster, blocks an SM is to have or 0: choose, cluster to use or 0: choose)."""
    body = f"top_k_cluster<{DTYPES[str(axes['dtype'])].device}, 512>"
    return Unit(
        "fi/topk/top_k_sm90.cuh", "TopKParams", (Entry("top_k_cluster", body, 512, (16, 0, 0), blocks_per_sm=2),)
    )


def _unit(axes: Axes) -> Unit:
    """config as for clusters; a row has one block."""
    body = f"top_k<{DTYPES[str(axes['dtype'])].device}, 512>"
    return Unit("fi/topk/top_k.cuh", "TopKParams", (Entry("top_k", body, 512, (1, 0, 0), blocks_per_sm=2),))


TOP_K = Op(
    name="top_k",
    family="topk",
    schema="(Tensor input, int k, Tensor(a!)? values, Tensor(b!)? indices, Tensor(c!)? out, "
    "Tensor(d!)? out_raw_indices, Tensor? lengths, Tensor? row_starts, Tensor? src_page_table, Tensor? row_to_batch, "
    "Tensor? page_table_row_starts, Tensor? offsets, int page_size, bool prefer_last, bool sorted) -> ()",
    axes={"dtype": ("f32", "f16", "bf16")},
    impls=(
        Impl("cpu", ON_CPU),
        Impl("cluster", at_least(90), _cluster_unit),
        Impl("cuda", at_least(80), _unit),
    ),
)

_top_k = Launcher(TOP_K, lambda input, *_: (input.get_device(), input.dtype))


def can_implement_filtered_topk() -> bool:
    """Whether the current CUDA device has the shared memory (128 KB a block) that FlashInfer's filtered top-k asks for.

    False without a device. Nothing here depends on it: every function of this module runs on every device.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability()
    return capability in ((8, 0), (8, 7)) or capability[0] in (9, 10, 11)


def _prefers_last(tie_break: int) -> bool:
    if tie_break not in (0, 1, 2):
        raise ValueError(f"tie_break: TopKTieBreak NONE (0), SMALL (1) or LARGE (2) is required; got {tie_break!r}")
    return tie_break == 2


def _segment_reference(row, k, prefer_last):  # type: ignore[no-untyped-def]
    """The places of the k largest of a row, in order."""
    row = row.double().nan_to_num(nan=float("inf"), posinf=1.7e308, neginf=-float("inf"))
    if prefer_last:
        return (row.numel() - 1 - row.flip(0).argsort(descending=True, stable=True)[:k]).sort().values
    return row.argsort(descending=True, stable=True)[:k].sort().values


def _top_k_reference(input, k, sorted=False, tie_break=0):  # type: ignore[no-untyped-def]
    indices = input.new_empty((input.shape[0], k)).long()
    for i, row in enumerate(input):
        places = _segment_reference(row, k, tie_break == 2)
        if sorted:
            places = places[row[places].double().argsort(descending=True, stable=True)]
        indices[i] = places
    return input.gather(1, indices), indices


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
        reference=_top_k_reference,
        description="The k largest of each row and their indices, in index order or sorted by value.",
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
    """The k largest of each row: exactly k, also where values are equal.

    input: `[rows, width]`, fp32, fp16 or bf16, width < 2^30; the row stride is free, the last dimension contiguous.
    k: 0 to width. sorted: from the largest down, equal values by rising index; else by rising index, which costs
    nothing. A sorted k beyond 4096 on CUDA is sorted by `torch.sort`, in a second step.
    tie_break: which of the values equal to the k-th largest are taken, see `TopKTieBreak`.
    deterministic, dsa_graph_safe: accepted, without effect. Results never depend on timing, batch or grid, nothing
    synchronises, no workspace is used, and every call can be captured in a CUDA graph.

    NaN is the largest value, as in `torch.topk`, whatever its sign; all NaN are equal, and so are -0 and +0.

    Returns (values `[rows, k]` of input's dtype, indices `[rows, k]` int64). Raises ValueError (shape, stride, k,
    tie_break; rows too long for the shared memory of the device, above 700 000 elements where a block has
    99 KB) or TypeError (dtype).
    """
    import torch

    rows = input.shape[0]
    if not 0 <= k <= input.shape[-1]:
        raise ValueError(f"k: 0 to the length of a row, {input.shape[-1]}, is required; got {k}")
    values = input.new_empty((rows, k))
    indices = input.new_empty((rows, k), dtype=torch.int64)
    in_kernel = sorted and (k <= _SORTABLE or not input.is_cuda)
    prefer_last = _prefers_last(tie_break)
    _top_k(input, k, values, indices, None, None, None, None, None, None, None, None, 1, prefer_last, in_kernel)
    if sorted and not in_kernel:
        # NaN as the one largest value: torch sorts those of negative sign elsewhere.
        keys = values.double().nan_to_num(nan=math.inf, posinf=1.7e308, neginf=-math.inf)
        order = keys.argsort(dim=1, descending=True, stable=True)
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def _page_table_reference(  # type: ignore[no-untyped-def]
    input, src_page_table, lengths, k, row_to_batch=None, tie_break=0, row_starts=None, page_table_row_starts=None,
    page_size=1,
):  # fmt: skip
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
        reference=_page_table_reference,
        description="The k largest scores of each row, as slots of a paged cache.",
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
    """The k largest scores of each row's segment, mapped to slots of a paged cache.

    Row i selects among `input[i, s : s + lengths[i]]`, s = row_starts[i] or 0 (cut to the row). A selected x becomes
    `src_page_table[b, c + x // page_size] * page_size + x % page_size`, with b = row_to_batch[i] or i, and
    c = page_table_row_starts[i], else row_starts[i], else 0. Slots come in the order of x; those that the length leaves
    over are -1. Columns of the table are not checked.

    input: as in `top_k`; src_page_table: `[batch, pages]`; lengths, row_to_batch, row_starts, page_table_row_starts:
    `[rows]`. All index tensors are int32 and stay on the device; int64 ones are copied to int32.
    k: 0 or more. out, out_raw_indices: int32 `[rows, k]` to be written; the latter gets x, or -1.
    tie_break, deterministic, dsa_graph_safe and NaN are as in `top_k`.

    Returns out, int32 `[rows, k]`. Raises ValueError (shape, stride, device, page_size, tie_break; row_starts without
    page_table_row_starts where page_size is not 1) or TypeError (dtype).
    """
    import torch

    if k < 0:
        raise ValueError(f"k: 0 or more is required; got {k}")
    if out is None:
        out = input.new_empty((input.shape[0], k), dtype=torch.int32)
    _top_k(
        input,
        k,
        None,
        None,
        out,
        out_raw_indices,
        int32_index(lengths),
        None if row_starts is None else int32_index(row_starts),
        int32_index(src_page_table),
        None if row_to_batch is None else int32_index(row_to_batch),
        None if page_table_row_starts is None else int32_index(page_table_row_starts),
        None,
        page_size,
        _prefers_last(tie_break),
        False,
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
        reference=_ragged_reference,
        description="The k largest scores of each row, as places in a ragged tensor.",
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
    """The k largest scores of each row's segment, as `x + offsets[i]`: places in a ragged tensor.

    Row i selects among `input[i, s : s + lengths[i]]`, s = row_starts[i] or 0 (cut to the row). Results come in the
    order of x; those that the length leaves over are -1. offsets: `[rows]`; the rest is as in
    `top_k_page_table_transform`.

    Returns int32 `[rows, k]`. Raises ValueError (shape, stride, device, tie_break) or TypeError (dtype).
    """
    import torch

    if k < 0:
        raise ValueError(f"k: 0 or more is required; got {k}")
    out = input.new_empty((input.shape[0], k), dtype=torch.int32)
    _top_k(
        input,
        k,
        None,
        None,
        out,
        None,
        int32_index(lengths),
        None if row_starts is None else int32_index(row_starts),
        None,
        None,
        None,
        int32_index(offsets),
        1,
        _prefers_last(tie_break),
        False,
    )
    return out
