"""The descriptions of attention of one request, and over block tables, for decode and prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fi_core.attention.reference import attend_pages, attend_request, gather_pages
from fi_core.observe.describe import with_sizes
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Scalar, Tensor, TraceTemplate, Work, axes_of, dispatcher, options, tensors, words

_OTHERS = words("pos_encoding_mode q_scale k_scale v_scale scale_q scale_k scale_v packed_custom_mask kv_cache_sf")


def _reference(  # type: ignore[no-untyped-def]
    q, k, v, custom_mask=None, causal=False, kv_layout="NHD", sm_scale=None, window_left=-1, logits_soft_cap=None
):
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    rows, scale = q if q.ndim == 3 else q[None], q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out, lse = attend_request(rows, k, v, scale, causal, window_left, logits_soft_cap, None, custom_mask)
    return (out, lse) if q.ndim == 3 else (out[0], lse[0])


def _make(
    draw: Draw,
    *,
    with_lse: bool,
    kv_layout: str,
    dtype: str = "bfloat16",
    qo_len: int | None = 9,
    kv_len: int = 37,
    num_qo_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim_qk: int = 40,
    head_dim_vo: int = 24,
    kv_dtype: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The last tokens of a request, or one token without that axis, over strided keys."""
    k, v = (draw.normal((kv_len, num_kv_heads, dim), kv_dtype or dtype) for dim in (head_dim_qk, head_dim_vo))
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    rows = () if qo_len is None else (qo_len,)
    q = draw.rows(draw.normal((*rows, num_qo_heads, head_dim_qk), dtype))
    return {"q": q, "k": draw.rows(k), "v": draw.rows(v), "kv_layout": kv_layout, "return_lse": with_lse, **options}


def _samples(*options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    dtypes = ("bfloat16", "float16", "float32")
    return (*({"dtype": dtype, **more} for dtype in dtypes for more in ({}, *options)), {"head_dim_qk": 128})


def _work(arguments: Mapping[str, Any]) -> Work:
    """Every tensor once; two operations for each pair of a query and a key that it sees, head and dimension."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    qo_len, heads = q.shape[0] if q.ndim == 3 else 1, q.shape[-2]
    kv_len = k.shape[0 if arguments["kv_layout"] == "NHD" else 1]
    pairs = qo_len * kv_len - (qo_len * (qo_len - 1) // 2 if arguments.get("causal") else 0)
    written = qo_len * heads * v.shape[-1] * (arguments.get("o_dtype") or q.dtype).itemsize
    return Work(2 * pairs * heads * (q.shape[-1] + v.shape[-1]), nbytes(q, k, v) + written)


def single_trace(
    kind: str,
    rows: Sequence[str],
    samples: Sequence[dict[str, Any]],
    description: str,
    **inputs: Tensor | Scalar,
) -> Any:
    """A trace for `fi_api`. rows: the axes of q before its heads; inputs: those of this kind alone."""

    def template(layout: str, with_lse: bool) -> TraceTemplate:
        tokens = ["kv_len", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "kv_len"]
        lse = {"lse": Tensor([*rows, "num_qo_heads"], dtype="float32", description="Base 2.")} if with_lse else {}
        output = Tensor([*rows, "num_qo_heads", "head_dim_vo"], dtype_from="q", dtype_from_scalar="o_dtype")
        taken: dict[str, Tensor | Scalar] = {
            "q": Tensor([*rows, "num_qo_heads", "head_dim_qk"]),
            "k": Tensor([*tokens, "head_dim_qk"]),
            "v": Tensor([*tokens, "head_dim_vo"]),
            **inputs,
            **options(string="kv_layout", float32="sm_scale logits_soft_cap", int32="window_left"),
        }
        return TraceTemplate(
            f"single_{kind}",
            axes=axes_of(taken, num_qo_heads="h", num_kv_heads="kv", head_dim_qk="d", head_dim_vo=""),
            inputs=taken,
            outputs={"output": output, **lse},
            reference=(attend_request, _reference),
            op="single_attention",
            make=with_sizes(_make, hidden, with_lse=with_lse, kv_layout=layout, **only),
            samples=_samples(*samples),
            work=_work,
            tolerance={"float32": (2e-5, 2e-5)},
            tags=(f"kv_layout:{layout}",),
            others=_OTHERS,
            description=description,
        )

    hidden, only = (("with_lse",), {}) if rows else (("with_lse", "qo_len"), {"qo_len": None})
    templates = {(layout, lse): template(layout, lse) for layout in ("NHD", "HND") for lse in (False, True)}

    def choose(x: dict[str, Any]) -> TraceTemplate | None:
        return templates.get((x.get("kv_layout", "NHD"), bool(x.get("return_lse", False))))

    return dispatcher(templates.values(), choose)


_OF_TABLES = words(
    "sinks mask kv_cache_sf lse return_lse bmm1_scale_log2 cum_seq_lens_q q_len_per_req enable_block_sparse_attention",
    "cp_world cp_rank causal_seqlens_kv_global out_dtype o_scale o_sf_scale o_sf_vec_size logits_soft_cap",
)


def _tables_reference(  # type: ignore[no-untyped-def]
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
        reference=(attend_request, gather_pages, attend_pages, _tables_reference),
        tags=("kv_layout:HND",),
        others=[name for name in _OF_TABLES if name not in inputs],
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
