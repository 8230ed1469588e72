"""Trace template of batch prefill over block tables. (Those of the wrappers would need what their plan was given.)"""

from __future__ import annotations

from typing import Any

from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var


def _reference(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale, bmm2_scale, window_left=-1, causal=True
):
    import torch

    k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)  # tokens before heads
    group, out = query.shape[1] // k_cache.shape[2], query.new_zeros((*query.shape[:2], v_cache.shape[3])).double()
    bounds = cum_seq_lens_q.tolist()
    for b, n in enumerate(seq_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        pages = block_tables[b, : (n + k_cache.shape[1] - 1) // k_cache.shape[1]].long()
        k, v = (x[pages].flatten(0, 1)[:n].double().repeat_interleave(group, 1) for x in (k_cache, v_cache))
        q = query[rows].double()
        s = torch.einsum("ihd,jhd->ihj", q, k) * bmm1_scale
        position = torch.arange(q.shape[0], device=q.device)[:, None] + n - q.shape[0]
        key = torch.arange(n, device=q.device)
        seen = key <= position if causal else key >= 0 * position
        if window_left >= 0:
            seen = seen & (key >= position - window_left)
        weight = s.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        out[rows] = torch.einsum("ihj,jhd->ihd", weight, v) * bmm2_scale
    return out


def _cache(part: int) -> Tensor:
    return Tensor(["num_pages", "num_kv_heads", "page_size", "head_dim"], param="kv_cache", tuple_idx=part)


_TABLES = TraceTemplate(
    "paged_prefill",
    name_prefix="gqa_paged_prefill_tables",
    axes={
        "qo_tokens": Var(),
        "batch_size": Var(),
        "batch_size_plus_1": Var(),
        "max_pages": Var(),
        "num_pages": Var(),
        "num_qo_heads": Const(abbrev="h"),
        "num_kv_heads": Const(abbrev="kv"),
        "head_dim": Const(abbrev="d"),
        "page_size": Const(abbrev="ps"),
    },
    inputs={
        "query": Tensor(["qo_tokens", "num_qo_heads", "head_dim"]),
        "k_cache": _cache(0),
        "v_cache": _cache(1),
        "block_tables": Tensor(["batch_size", "max_pages"]),
        "seq_lens": Tensor(["batch_size"]),
        "cum_seq_lens_q": Tensor(["batch_size_plus_1"]),
        "bmm1_scale": Scalar(),
        "bmm2_scale": Scalar(),
        "window_left": Scalar("int32", optional=True),
        "causal": Scalar("bool", optional=True),
    },
    outputs={"output": Tensor(["qo_tokens", "num_qo_heads", "head_dim"], dtype_from="query")},
    reference=_reference,
    tags=("kv_layout:HND",),
    description="Attention of the last tokens of each request over a block table; all scales are explicit.",
)


def tables_trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template, of the default layout."""
    return _TABLES if arguments.get("kv_layout", "HND") == "HND" else None


tables_trace.templates = (_TABLES,)  # type: ignore[attr-defined]
