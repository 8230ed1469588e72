"""Trace templates of attention over block tables, for decode and prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fi_core.attention.reference import attend_request, gather_table
from fi_core.observe.trace import Scalar, Tensor, TraceTemplate, axes_of, dispatcher, options, tensors, words

_OTHERS = words(
    "sinks mask kv_cache_sf lse return_lse bmm1_scale_log2 cum_seq_lens_q q_len_per_req enable_block_sparse_attention",
    "cp_world cp_rank causal_seqlens_kv_global out_dtype o_scale o_sf_scale o_sf_vec_size logits_soft_cap",
)


def _decode_reference(query, k_cache, v_cache, block_tables, seq_lens, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1):  # type: ignore[no-untyped-def]
    out = query.double().new_empty((*query.shape[:2], v_cache.shape[3]))
    for b, n in enumerate(seq_lens.tolist()):
        k, v = (gather_table(cache, block_tables[b], n) for cache in (k_cache, v_cache))
        out[b] = attend_request(query[b : b + 1], k, v, bmm1_scale, True, window_left)[0][0]
    return out * bmm2_scale


def _prefill_reference(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale, bmm2_scale, window_left=-1, causal=True
):
    out, bounds = query.double().new_zeros((*query.shape[:2], v_cache.shape[3])), cum_seq_lens_q.tolist()
    for b, n in enumerate(seq_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        k, v = (gather_table(cache, block_tables[b], n) for cache in (k_cache, v_cache))
        out[rows] = attend_request(query[rows], k, v, bmm1_scale, causal, window_left)[0]
    return out * bmm2_scale


def _tables(
    kind: str, rows: str, inputs: dict[str, Tensor | Scalar], reference: Callable[..., Any], description: str
) -> Any:
    """A trace for `fi_api`: a template for calls in the default layout, HND, with one table; None for others.

    rows: the axis of the query's rows; inputs: those of the kind.
    """
    pages = words("num_pages num_kv_heads page_size head_dim")
    taken: dict[str, Tensor | Scalar] = {
        **tensors(query=f"{rows} num_qo_heads head_dim"),
        **{f"{name}_cache": Tensor(pages, param="kv_cache", tuple_idx=part) for part, name in enumerate("kv")},
        **tensors(block_tables="batch_size max_pages", seq_lens="batch_size"),
        **inputs,
        **options(int32="window_left"),
    }
    template = TraceTemplate(
        f"paged_{kind}",
        name_prefix=f"gqa_paged_{kind}_tables",
        axes=axes_of(taken, num_qo_heads="h", num_kv_heads="kv", head_dim="d", page_size="ps"),
        inputs=taken,
        outputs=tensors({"dtype_from": "query"}, output=f"{rows} num_qo_heads head_dim"),
        reference=(attend_request, gather_table, reference),
        tags=("kv_layout:HND",),
        others=[name for name in _OTHERS if name not in inputs],
        description=f"{description} over a block table; all scales are explicit.",
    )

    def choose(x: dict[str, Any]) -> TraceTemplate | None:
        return template if x.get("kv_layout", "HND") == "HND" and x.get("uses_shared_paged_kv_idx", True) else None

    return dispatcher([template], choose)


_DECODE: dict[str, Tensor | Scalar] = {**options(float32="bmm1_scale bmm2_scale")}
_PREFILL: dict[str, Tensor | Scalar] = {
    **tensors(cum_seq_lens_q="batch_size_plus_1"),
    **dict.fromkeys(("bmm1_scale", "bmm2_scale"), Scalar()),
    **options(bool="causal"),
}
decode = _tables("decode", "batch_size", _DECODE, _decode_reference, "Attention of one query token a request")
prefill = _tables("prefill", "qo_tokens", _PREFILL, _prefill_reference, "Attention of the last tokens of each request")
