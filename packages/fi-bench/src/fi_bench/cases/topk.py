"""Cases of top-k selection. The selected scores are compared, since libraries order them differently."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Work, dtype_of
from fi_bench.cases.common import integers, normal
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch


def _rows(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "sorted", num_rows="batch_size", width="vocab_size", k="top_k", dtype="input_dtype")


def _ragged(p: Namespace) -> dict[str, Any]:
    return {**sizes_of(p, width="max_len", k="top_k", dtype="input_dtype"), "num_rows": p.num_rows or p.batch_size}


def _inside(x: Inputs) -> torch.Tensor:
    """The scores, with -inf behind the length of each row."""
    import torch

    behind = torch.arange(x.input.shape[1], device=x.input.device) >= x.lengths.unsqueeze(1)
    scores: torch.Tensor = x.input.masked_fill(behind, float("-inf"))
    return scores


def _falling(scores: torch.Tensor) -> torch.Tensor:
    return scores.sort(dim=1, descending=True).values


def _selected(x: Inputs, outputs: Outputs) -> Outputs:
    picked = x.input.gather(1, outputs["indices"].long())
    return {"values": _falling(outputs["values"]), "indices": _falling(picked)}


def _at(x: Inputs, places: torch.Tensor, taken: torch.Tensor) -> Outputs:
    """Scores at places of their rows, -inf where none was taken."""
    picked = _inside(x).gather(1, places.long().clamp(0, x.input.shape[1] - 1))
    return {"out": _falling(picked.masked_fill(~taken, float("-inf")))}


def _from_slots(x: Inputs, outputs: Outputs) -> Outputs:
    """Scores of slots of the paged cache, by the inverse of the page table."""
    slots, table = outputs["out"], x.src_page_table
    inverse = table.flatten().argsort()
    page = inverse[(slots.clamp(min=0) // x.page_size).long()] - x.row_to_batch.unsqueeze(1) * table.shape[1]
    return _at(x, page * x.page_size + slots % x.page_size, slots >= 0)


def _from_places(x: Inputs, outputs: Outputs) -> Outputs:
    return _at(x, outputs["out"] - x.offsets.unsqueeze(1), outputs["out"] >= 0)


def _torch_places(x: Inputs) -> Any:
    """The k best places of each row, and which of them lie in it."""
    import torch

    places = _inside(x).topk(min(x.k, x.input.shape[1]), dim=1).indices
    places = torch.nn.functional.pad(places, (0, x.k - places.shape[1]), value=x.input.shape[1] - 1)
    taken = places < x.lengths.unsqueeze(1)
    taken[:, x.input.shape[1] :] = False
    return places, taken


def _torch_slots(x: Inputs) -> Any:
    places, taken = _torch_places(x)
    pages = x.src_page_table[x.row_to_batch.long()].gather(1, places // x.page_size)
    return (pages * x.page_size + places % x.page_size).masked_fill(~taken, -1)


def _torch_ragged(x: Inputs) -> Any:
    places, taken = _torch_places(x)
    return (places + x.offsets.unsqueeze(1)).masked_fill(~taken, -1)


def _call_page_table(f: Any, x: Inputs) -> Any:
    if x.page_size == 1:  # older libraries have no page_size
        return f(x.input, x.src_page_table, x.lengths, x.k, x.row_to_batch)
    return f(x.input, x.src_page_table, x.lengths, x.k, x.row_to_batch, page_size=x.page_size)


def _make_varlen(p: Namespace, device: Any, generator: Any) -> Inputs:
    x = Inputs(input=normal((p.batch_size, p.max_seq_len), dtype_of("float32"), device, generator), k=p.top_k)
    x["lengths"] = integers(1, p.max_seq_len + 1, (p.batch_size,), device, generator).int()
    return x


def _torch_varlen(x: Inputs) -> tuple[torch.Tensor, None]:
    places, taken = _torch_places(x)
    return places.masked_fill(~taken, -1), None


def _from_varlen(x: Inputs, places: torch.Tensor) -> Outputs:
    """The scores of the selected columns; a row with fewer than k ends in -1."""
    picked = _inside(x).gather(1, places.long().clamp(min=0)).masked_fill(places < 0, float("-inf"))
    return {"scores": _falling(picked)}


def _varlen_work(p: Namespace, x: Inputs) -> Work:
    """Each visible score once, and the selected indices."""
    seen = int(x.lengths.sum())
    return Work(seen, 4 * seen + 4 * x.k * len(x.lengths))


CASES = (
    Case(
        routine="top_k_varlen",
        function="topk_varlen.top_k_varlen",
        op="top_k",
        make=_make_varlen,
        call=lambda f, x: f(x.input, x.lengths, x.k),
        outputs=lambda x, returned: _from_varlen(x, returned[0]),
        reference=lambda x: _from_varlen(x, _torch_varlen(x)[0]),
        work=_varlen_work,
        torch=_torch_varlen,
    ),
    described(
        "topk.top_k",
        _rows,
        lambda f, x: f(x.input, x.k, sorted=x.sorted),
        lambda x: tuple(x.input.topk(x.k, dim=1, sorted=x.sorted)),
        compared=_selected,
        op="top_k",
    ),
    described(
        "topk.top_k_page_table_transform",
        lambda p: {**_ragged(p), **sizes_of(p, "batch_size", "page_size")},
        _call_page_table,
        _torch_slots,
        compared=_from_slots,
        op="top_k",
    ),
    described(
        "topk.top_k_ragged_transform",
        _ragged,
        lambda f, x: f(x.input, x.offsets, x.lengths, x.k),
        _torch_ragged,
        compared=_from_places,
        op="top_k",
    ),
)
