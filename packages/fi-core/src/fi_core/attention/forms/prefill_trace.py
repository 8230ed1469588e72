"""Trace template of batch prefill over block tables."""

from __future__ import annotations

from fi_core.attention.forms.tables_trace import tables_template
from fi_core.attention.forms.tables_trace import tables_trace as trace_of
from fi_core.observe.trace import Scalar, Tensor, Var


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


_TABLES = tables_template(
    "prefill",
    "qo_tokens",
    {"qo_tokens": Var(), "batch_size_plus_1": Var()},
    {
        "cum_seq_lens_q": Tensor(["batch_size_plus_1"]),
        "bmm1_scale": Scalar(),
        "bmm2_scale": Scalar(),
        "causal": Scalar("bool", optional=True),
    },
    _reference,
    "Attention of the last tokens of each request over a block table; all scales are explicit.",
)
tables_trace = trace_of(_TABLES, lambda _: True)
