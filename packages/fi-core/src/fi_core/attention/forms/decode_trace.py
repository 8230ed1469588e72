"""Trace templates of batch decode over block tables."""

from __future__ import annotations

from fi_core.attention.forms.tables_trace import tables_template
from fi_core.attention.forms.tables_trace import tables_trace as trace_of
from fi_core.observe.trace import Scalar


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


_TABLES = tables_template(
    "decode",
    "batch_size",
    {},
    {"bmm1_scale": Scalar(optional=True), "bmm2_scale": Scalar(optional=True)},
    _reference,
    "Attention of one query token a request over a block table; all scales are explicit.",
)
tables_trace = trace_of(_TABLES, lambda arguments: arguments.get("q_len_per_req", 1) == 1)
