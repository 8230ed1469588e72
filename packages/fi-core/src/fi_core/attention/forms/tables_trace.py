"""Trace templates of attention over block tables, for decode and prefill."""

from __future__ import annotations

from typing import Any

from fi_core.attention.reference import attend_pages, attend_request, gather_pages
from fi_core.observe.trace import Scalar, Tensor, TraceTemplate, axes_of, dispatcher, options, tensors, words

_OTHERS = words(
    "sinks mask kv_cache_sf lse return_lse bmm1_scale_log2 cum_seq_lens_q q_len_per_req enable_block_sparse_attention",
    "cp_world cp_rank causal_seqlens_kv_global out_dtype o_scale o_sf_scale o_sf_vec_size logits_soft_cap",
)


def _reference(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, block_tables, seq_lens, bmm1_scale=1.0, bmm2_scale=1.0, cum_seq_lens_q=None, **options
):
    import torch

    options = {"causal": True, **options, "seq_lens": seq_lens, "qo_indptr": cum_seq_lens_q, "kv_layout": "HND"}
    options |= {"kv_indptr": torch.arange(len(seq_lens) + 1) * block_tables.shape[1]}
    indices = block_tables.flatten()
    return attend_pages(query, k_cache, v_cache, kv_indices=indices, sm_scale=bmm1_scale, **options)[0] * bmm2_scale


def _tables(kind: str, rows: str, inputs: dict[str, Tensor | Scalar], description: str) -> Any:
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
        reference=(attend_request, gather_pages, attend_pages, _reference),
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
decode = _tables("decode", "batch_size", _DECODE, "Attention of one query token a request")
prefill = _tables("prefill", "qo_tokens", _PREFILL, "Attention of the last tokens of each request")
