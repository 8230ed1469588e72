"""Trace templates of batch decode over block tables."""

from __future__ import annotations

from fi_core.attention.forms.tables_trace import tables_template
from fi_core.attention.forms.tables_trace import tables_trace as trace_of
from fi_core.attention.reference import attend_request, gather_table
from fi_core.observe.trace import Scalar


def _reference(query, k_cache, v_cache, block_tables, seq_lens, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1):  # type: ignore[no-untyped-def]
    out = query.double().new_empty((*query.shape[:2], v_cache.shape[3]))
    for b, n in enumerate(seq_lens.tolist()):
        k, v = (gather_table(cache, block_tables[b], n) for cache in (k_cache, v_cache))
        out[b] = attend_request(query[b : b + 1], k, v, bmm1_scale, True, window_left)[0][0]
    return out * bmm2_scale


_TABLES = tables_template(
    "decode",
    "batch_size",
    {},
    {"bmm1_scale": Scalar(optional=True), "bmm2_scale": Scalar(optional=True)},
    (attend_request, gather_table, _reference),
    "Attention of one query token a request over a block table; all scales are explicit.",
)
tables_trace = trace_of(_TABLES)
