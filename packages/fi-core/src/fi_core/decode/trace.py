"""Trace templates of batch decode over block tables. (Those of the wrapper would need what its plan was given.)"""

from __future__ import annotations

from typing import Any

from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var


def _reference(query, k_cache, v_cache, block_tables, seq_lens, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1):  # type: ignore[no-untyped-def]
    import torch

    k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)  # tokens before heads
    group, out = query.shape[1] // k_cache.shape[2], torch.empty(*query.shape[:2], v_cache.shape[3]).double()
    for b, n in enumerate(seq_lens.tolist()):
        pages = block_tables[b, : (n + k_cache.shape[1] - 1) // k_cache.shape[1]].long()
        k, v = (x[pages].flatten(0, 1)[:n].double().repeat_interleave(group, 1) for x in (k_cache, v_cache))
        s = torch.einsum("hd,jhd->hj", query[b].double(), k) * bmm1_scale
        if window_left >= 0:
            s[:, : max(0, n - 1 - window_left)] = -torch.inf
        out[b] = torch.einsum("hj,jhd->hd", s.softmax(-1), v) * bmm2_scale
    return out


def _cache(part: int) -> Tensor:
    return Tensor(["num_pages", "num_kv_heads", "page_size", "head_dim"], param="kv_cache", tuple_idx=part)


_TABLES = TraceTemplate(
    "paged_decode",
    name_prefix="gqa_paged_decode_tables",
    axes={
        "batch_size": Var(),
        "max_pages": Var(),
        "num_pages": Var(),
        "num_qo_heads": Const(abbrev="h"),
        "num_kv_heads": Const(abbrev="kv"),
        "head_dim": Const(abbrev="d"),
        "page_size": Const(abbrev="ps"),
    },
    inputs={
        "query": Tensor(["batch_size", "num_qo_heads", "head_dim"]),
        "k_cache": _cache(0),
        "v_cache": _cache(1),
        "block_tables": Tensor(["batch_size", "max_pages"]),
        "seq_lens": Tensor(["batch_size"]),
        "bmm1_scale": Scalar(optional=True),
        "bmm2_scale": Scalar(optional=True),
        "window_left": Scalar("int32", optional=True),
    },
    outputs={"output": Tensor(["batch_size", "num_qo_heads", "head_dim"], dtype_from="query")},
    reference=_reference,
    tags=("kv_layout:HND",),
    description="Attention of one query token a request over a block table; all scales are explicit.",
)


def tables_trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template, of the default layout and one query token a request."""
    plain = arguments.get("kv_layout", "HND") == "HND" and arguments.get("q_len_per_req", 1) == 1
    return _TABLES if plain else None


tables_trace.templates = (_TABLES,)  # type: ignore[attr-defined]
