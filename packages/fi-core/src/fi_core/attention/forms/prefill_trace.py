"""Trace template of batch prefill over block tables."""

from __future__ import annotations

from fi_core.attention.forms.tables_trace import tables_template
from fi_core.attention.forms.tables_trace import tables_trace as trace_of
from fi_core.attention.reference import attend_request, gather_table
from fi_core.observe.trace import Scalar, Tensor, Var


def _reference(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale, bmm2_scale, window_left=-1, causal=True
):
    out, bounds = query.double().new_zeros((*query.shape[:2], v_cache.shape[3])), cum_seq_lens_q.tolist()
    for b, n in enumerate(seq_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        k, v = (gather_table(cache, block_tables[b], n) for cache in (k_cache, v_cache))
        out[rows] = attend_request(query[rows], k, v, bmm1_scale, causal, window_left)[0]
    return out * bmm2_scale


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
    (attend_request, gather_table, _reference),
    "Attention of the last tokens of each request over a block table; all scales are explicit.",
)
tables_trace = trace_of(_TABLES)
