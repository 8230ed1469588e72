"""Cases of a sparse attention indexer: its logits, and the choice of keys by them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fi_bench.case import Inputs
from fi_bench.described import described, eager, sizes_of


def _sizes(*names: str, **options: Any) -> Any:
    def sizes(p: Namespace) -> dict[str, Any]:
        return sizes_of(p, "heads", "dim", *names) | options

    return sizes


def _torch_topk(x: Inputs) -> Any:
    """A stable sort of the logits: of equal ones the first are chosen."""
    import torch

    paged = "kv_cache" in x
    if paged:
        columns = x.block_table.shape[1] * x.kv_cache.shape[1]
        more = {"schedule_meta": None, "max_context_len": columns, "clean_logits": True}
        logits = eager("indexer.fp8_paged_mqa_logits", Inputs(**_of(x, _PAGED), **more))
    else:
        logits = eager("indexer.fp8_mqa_logits", Inputs(**_of(x, _RAGGED)))
    columns = logits.shape[1]
    found = logits.argsort(dim=1, descending=True, stable=True)[:, : x.top_k]
    unseen = logits.gather(1, found) == -torch.inf
    found = found.masked_fill(unseen, columns).sort(1).values
    found = torch.nn.functional.pad(found, (0, x.top_k - found.shape[1]), value=columns)
    unseen = found == columns
    if paged:
        size, owner = x.kv_cache.shape[1], torch.arange(len(found), device=found.device)[:, None] // x.q.shape[1]
        found = x.block_table[owner, found.masked_fill(unseen, 0) // size] * size + found % size
    return found.masked_fill(unseen, -1).int()


_RAGGED = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
_PAGED = ("q", "kv_cache", "weights", "context_lens", "block_table")


def _of(x: Inputs, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: x[name] for name in names}


CASES = (
    described(
        "indexer.fp8_mqa_logits",
        _sizes("num_rows", "num_keys"),
        None,
        lambda x: eager("indexer.fp8_mqa_logits", x),
        op="mqa_logits",
    ),
    described(
        "indexer.fp8_paged_mqa_logits",
        _sizes("batch_size", "next_n", "kv_len", "page_size", clean_logits=True),  # else results have holes
        None,
        lambda x: eager("indexer.fp8_paged_mqa_logits", x),
        op="mqa_logits",
    ),
    described(
        "indexer.fp8_indexer_topk",
        _sizes("num_rows", "num_keys", "top_k"),
        None,
        _torch_topk,
        op="mqa_logits",
        also=("top_k",),
    ),
    described(
        "indexer.fp8_paged_indexer_topk",
        _sizes("batch_size", "next_n", "kv_len", "page_size", "top_k", output="slot"),
        None,
        _torch_topk,
        op="mqa_logits",
        also=("top_k",),
    ),
)
