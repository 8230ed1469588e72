"""Trace templates of attention over block tables, shared by decode and prefill."""

from __future__ import annotations

from typing import Any

from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, tensors, words

_OTHERS = words(
    "sinks mask kv_cache_sf lse return_lse bmm1_scale_log2 cum_seq_lens_q q_len_per_req enable_block_sparse_attention",
    "cp_world cp_rank causal_seqlens_kv_global out_dtype o_scale o_sf_scale o_sf_vec_size",
)


def _cache(part: int) -> Tensor:
    return Tensor(["num_pages", "num_kv_heads", "page_size", "head_dim"], param="kv_cache", tuple_idx=part)


def tables_template(
    kind: str, rows: str, axes: dict[str, Var], inputs: dict[str, Tensor | Scalar], reference: Any, description: str
) -> TraceTemplate:
    """Template over a cache in the default layout, HND. rows: the axis of the query's rows; axes, inputs: those of the
    kind.
    """
    return TraceTemplate(
        f"paged_{kind}",
        name_prefix=f"gqa_paged_{kind}_tables",
        axes={
            **axes,
            "batch_size": Var(),
            "max_pages": Var(),
            "num_pages": Var(),
            "num_qo_heads": Const(abbrev="h"),
            "num_kv_heads": Const(abbrev="kv"),
            "head_dim": Const(abbrev="d"),
            "page_size": Const(abbrev="ps"),
        },
        inputs={
            "query": Tensor([rows, "num_qo_heads", "head_dim"]),
            "k_cache": _cache(0),
            "v_cache": _cache(1),
            **tensors(block_tables="batch_size max_pages", seq_lens="batch_size"),
            **inputs,
            "window_left": Scalar("int32", optional=True),
        },
        outputs={"output": Tensor([rows, "num_qo_heads", "head_dim"], dtype_from="query")},
        reference=reference,
        tags=("kv_layout:HND",),
        others=[name for name in _OTHERS if name not in inputs],
        description=description,
    )


def tables_trace(template: TraceTemplate) -> Any:
    """A trace for `fi_api`: the template for HND calls with one table; else None."""

    def trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        plain = arguments.get("kv_layout", "HND") == "HND" and arguments.get("uses_shared_paged_kv_idx", True)
        return template if plain else None

    trace.templates = (template,)  # type: ignore[attr-defined]
    return trace
