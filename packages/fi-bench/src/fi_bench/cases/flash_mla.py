"""Cases of sparse multi-head latent attention by FlashMLA's names, and of appending to its caches."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fi_bench.described import described, eager, sizes_of


def _decode(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "batch_size", "qo_len", "kv_len", "page_size", "num_heads", "top_k", "extra", "form")


CASES = (
    described(
        "flash_mla.flash_mla_sparse_fwd",
        lambda p: sizes_of(p, "num_rows", "num_keys", "num_heads", "top_k"),
        None,
        lambda x: eager("flash_mla.flash_mla_sparse_fwd", x),
        op="batch_mla",
        also=("mla_plan",),
    ),
    described(
        "flash_mla.flash_mla_with_kvcache",
        _decode,
        None,
        lambda x: eager("flash_mla.flash_mla_with_kvcache", x),
        op="batch_mla",
        also=("mla_plan", "merge_state"),
    ),
    described(
        "page.latent.append_sparse_mla_kv_cache",
        lambda p: {"width": 512 if p.form == "packed" else 576, **sizes_of(p, "num_tokens", "page_size")},
        None,
        lambda x: eager("page.latent.append_sparse_mla_kv_cache", x),
        op="append_latent_rows",
    ),
)
