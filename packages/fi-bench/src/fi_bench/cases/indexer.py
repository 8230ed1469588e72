"""Cases of the logits of a sparse attention indexer."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fi_bench.described import described, eager, sizes_of


def _sizes(*names: str, **options: Any) -> Any:
    def sizes(p: Namespace) -> dict[str, Any]:
        return sizes_of(p, "heads", "dim", *names) | options

    return sizes


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
)
