"""Cases of top-k selection: what is compared is the scores that were picked, since libraries order them differently."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Work, dtype_of
from fi_bench.cases.common import ceil_div, integers, nbytes, normal

if TYPE_CHECKING:
    import torch


def _rows(p: Namespace, device: Any, generator: Any) -> Inputs:
    x = normal((p.batch_size, p.vocab_size), dtype_of(p.input_dtype), device, generator)
    return Inputs(input=x, k=min(p.top_k, p.vocab_size), sorted=p.sorted)


def _transform(p: Namespace, device: Any, generator: Any) -> Inputs:
    """Rows of random length; a page table in which no page occurs twice."""
    import torch

    rows, pages = p.num_rows or p.batch_size, ceil_div(p.max_len, p.page_size)
    x = normal((rows, p.max_len), dtype_of(p.input_dtype), device, generator)
    lengths = integers(1, p.max_len + 1, (rows,), device, generator)
    table = torch.randperm(p.batch_size * pages, device=device, generator=generator).int().view(p.batch_size, pages)
    to_batch = torch.arange(rows, device=device, dtype=torch.int32) % p.batch_size
    offsets = (lengths.cumsum(0) - lengths).int()
    return Inputs(input=x, k=p.top_k, lengths=lengths, table=table, to_batch=to_batch, offsets=offsets,
                  page_size=p.page_size)  # fmt: skip


def _inside(x: Inputs) -> torch.Tensor:
    """The scores, with -inf behind the length of each row."""
    import torch

    scores: torch.Tensor = x.input
    if "lengths" in x:
        behind = torch.arange(scores.shape[1], device=scores.device) >= x.lengths.unsqueeze(1)
        scores = scores.masked_fill(behind, float("-inf"))
    return scores


def _best(x: Inputs, scores: torch.Tensor) -> torch.Tensor:
    """The k largest in falling order, -inf where a row has fewer."""
    import torch

    best = scores.sort(dim=1, descending=True).values[:, : x.k]
    return torch.nn.functional.pad(best, (0, x.k - best.shape[1]), value=float("-inf"))


def _reference(x: Inputs) -> Outputs:
    best = _best(x, _inside(x).double())
    return {"picked": best} if "lengths" in x else {"values": best, "picked": best}


def _returned(x: Inputs, returned: Any) -> Outputs:
    values, indices = returned
    return {"values": _best(x, values), "picked": _best(x, x.input.gather(1, indices.long()))}


def _at(x: Inputs, places: torch.Tensor, taken: torch.Tensor) -> Outputs:
    picked = _inside(x).gather(1, places.long().clamp(0, x.input.shape[1] - 1))
    return {"picked": _best(x, picked.masked_fill(~taken, float("-inf")))}


def _from_slots(x: Inputs, slots: torch.Tensor) -> Outputs:
    """Scores of slots of the paged cache, by the inverse of the page table."""
    inverse = x.table.flatten().argsort()
    page = inverse[(slots.clamp(min=0) // x.page_size).long()] - x.to_batch.unsqueeze(1) * x.table.shape[1]
    return _at(x, page * x.page_size + slots % x.page_size, slots >= 0)


def _from_places(x: Inputs, places: torch.Tensor) -> Outputs:
    return _at(x, places - x.offsets.unsqueeze(1), places >= 0)


def _torch_places(x: Inputs) -> Any:
    """The k best places of each row, and which of them lie in it."""
    places = _inside(x).topk(min(x.k, x.input.shape[1]), dim=1).indices
    return places, places < x.lengths.unsqueeze(1)


def _torch_slots(x: Inputs) -> Any:
    places, taken = _torch_places(x)
    slots = x.table[x.to_batch.long()].gather(1, places // x.page_size) * x.page_size + places % x.page_size
    return slots.masked_fill(~taken, -1)


def _torch_ragged(x: Inputs) -> Any:
    places, taken = _torch_places(x)
    return (places + x.offsets.unsqueeze(1)).masked_fill(~taken, -1)


def _work(p: Namespace, x: Inputs) -> Work:
    """Read the scores in question once, write k results a row."""
    scores = int(x.lengths.sum()) if "lengths" in x else x.input.numel()
    results = x.input.shape[0] * x.k
    result = 4 if "lengths" in x else 8 + x.input.element_size()
    return Work(scores, scores * x.input.element_size() + results * result + nbytes(x.get("lengths")))


def _call_page_table(f: Any, x: Inputs) -> Any:
    if x.page_size == 1:  # older libraries have no page_size
        return f(x.input, x.table, x.lengths, x.k, x.to_batch)
    return f(x.input, x.table, x.lengths, x.k, x.to_batch, page_size=x.page_size)


CASES = (
    Case("top_k", "topk.top_k", _rows, lambda f, x: f(x.input, x.k, sorted=x.sorted), _returned, _reference, _work,
         lambda x: x.input.topk(x.k, dim=1, sorted=x.sorted), op="top_k"),
    Case("top_k_page_table_transform", "topk.top_k_page_table_transform", _transform, _call_page_table, _from_slots,
         _reference, _work, _torch_slots, op="top_k"),
    Case("top_k_ragged_transform", "topk.top_k_ragged_transform", _transform,
         lambda f, x: f(x.input, x.offsets, x.lengths, x.k), _from_places, _reference, _work, _torch_ragged,
         op="top_k"),
)  # fmt: skip
