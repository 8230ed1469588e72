"""Trace templates of the attention wrappers' `run`. PLANNED_* name the attributes that hold the arguments of `plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fi_core.attention.reference import attend_request, gather_pages
from fi_core.attention.wrappers import inputs
from fi_core.observe.trace import Const, Planned, Scalar, Tensor, TraceTemplate, Var


def _decode_reference(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, seq_lens=None, window_left=-1,
    logits_soft_cap=None, sinks=None, q_scale=None, k_scale=None, v_scale=None, kv_layout="NHD",
):  # fmt: skip
    import torch

    batch_size = len(kv_indptr) - 1
    scale = sm_scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
    outs, lses = [], []
    for request, rows in enumerate(q.view(batch_size, -1, *q.shape[1:])):
        k, v = (
            gather_pages(cache, kv_indptr, kv_indices, kv_last_page_len, seq_lens, request, kv_layout)
            for cache in (k_cache, v_cache)
        )
        out, lse = attend_request(rows, k, v, scale, len(rows) > 1, window_left, logits_soft_cap, sinks)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs) * (1.0 if v_scale is None else v_scale), torch.cat(lses)


def _paged_prefill_reference(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale, seq_lens=None, causal=False,
    window_left=-1, logits_soft_cap=None, sinks=None, q_scale=None, k_scale=None, v_scale=None, kv_layout="NHD",
):  # fmt: skip
    import torch

    scale = sm_scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for request in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        k, v = (
            gather_pages(cache, kv_indptr, kv_indices, kv_last_page_len, seq_lens, request, kv_layout)
            for cache in (k_cache, v_cache)
        )
        out[rows], lse[rows] = attend_request(q[rows], k, v, scale, causal, window_left, logits_soft_cap, sinks)
    return out * (1.0 if v_scale is None else v_scale), lse


def _ragged_prefill_reference(  # type: ignore[no-untyped-def]
    q, k, v, qo_indptr, kv_indptr, sm_scale, causal=False, window_left=-1, logits_soft_cap=None, sinks=None,
    q_scale=None, k_scale=None, v_scale=None, kv_layout="NHD",
):  # fmt: skip
    import torch

    k, v = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    scale = sm_scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for request in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        keys = slice(int(kv_indptr[request]), int(kv_indptr[request + 1]))
        out[rows], lse[rows] = attend_request(
            q[rows], k[keys], v[keys], scale, causal, window_left, logits_soft_cap, sinks
        )
    return out * (1.0 if v_scale is None else v_scale), lse


def _cascade_reference(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, sm_scale, causal=False, window_left=-1, logits_soft_cap=None, kv_layout="NHD", **tables
):
    import torch

    levels = sum(name.startswith("qo_indptr_") for name in tables)
    outs, lses = [], []
    for level in range(levels):
        qo_indptr, kv_indptr = tables[f"qo_indptr_{level}"], tables[f"kv_indptr_{level}"]
        kv_indices, last_page_len = tables[f"kv_indices_{level}"], tables[f"kv_last_page_len_{level}"]
        out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
        for request in range(len(qo_indptr) - 1):
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            k, v = (
                gather_pages(cache, kv_indptr, kv_indices, last_page_len, None, request, kv_layout)
                for cache in (k_cache, v_cache)
            )
            is_last = level == levels - 1
            out[rows], lse[rows] = attend_request(
                q[rows], k, v, sm_scale, causal and is_last, window_left, logits_soft_cap
            )
        outs.append(out)
        lses.append(lse)
    scores = torch.stack(lses) * 0.6931471805599453
    weight = scores.softmax(0).masked_fill((scores == -torch.inf).all(0), 0.0)
    return (weight[..., None] * torch.stack(outs)).sum(0)


_HEADS: dict[str, Var | Const] = {
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
    "head_dim": Const(abbrev="d"),
    "head_dim_vo": Const(abbrev=""),
}
_OPTIONS: dict[str, Tensor | Scalar] = {
    "sm_scale": Scalar(description="Multiplies the scores."),
    "window_left": Scalar("int32", optional=True, description="Keys before its own that a query sees; -1: all."),
    "logits_soft_cap": Scalar(optional=True),
}
_RUN_OPTIONS: dict[str, Tensor | Scalar] = {
    "sinks": Tensor(["num_qo_heads"], dtype="float32", optional=True, description="exp(sinks) joins the softmax sum."),
    "q_scale": Scalar(optional=True),
    "k_scale": Scalar(optional=True),
    "v_scale": Scalar(optional=True),
}
_CAUSAL = Scalar("bool", optional=True, description="A query sees the keys up to its own position.")
_LAYOUT = Scalar("string", optional=True)


_PREFILL_OPS = ("batch_prefill", "prefill_plan")
_TOLERANCE = {"float16": (2e-3, 2e-3), "float32": (1e-4, 1e-4)}
_SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
_SCORES = {"window_left": 7, "logits_soft_cap": 5.0, "sm_scale": 0.3}
_DECODE_SAMPLES = (
    {**_SMALL, "kv_len": (37, 0, 16, 5)},
    {**_SMALL, "kv_len": (37, 1), "dtype": "bfloat16", "num_kv_heads": 4, "page_size": 5, "head_dim": 40},
    {**_SMALL, "kv_len": (38, 9), **_SCORES, "sinks": True},
    {**_SMALL, "kv_len": (37, 3, 16), "q_len_per_req": 3, "o_dtype": "bfloat16"},
)
_PREFILL_SAMPLES = (
    {**_SMALL, "qo_len": (5, 0, 16, 1), "kv_len": (37, 3, 16, 40), "causal": True},
    {**_SMALL, "qo_len": (5, 4, 1), "kv_len": (9, 0, 33), "causal": False, "dtype": "bfloat16", "head_dim_vo": 32},
    {**_SMALL, "qo_len": (5, 20), "kv_len": (37, 20), "causal": True, **_SCORES, "o_dtype": "bfloat16"},
)
_PAGED_SAMPLES = (*_PREFILL_SAMPLES, {**_PREFILL_SAMPLES[0], "page_size": 5, "num_kv_heads": 1, "sinks": True})
_CASCADE_SAMPLES = (
    {**_SMALL, "shared_kv_len": 37, "kv_len": (9, 1, 16)},
    {**_SMALL, "shared_kv_len": 20, "kv_len": (9, 4), "qo_len": (3, 4), "causal": True, "dtype": "bfloat16"},
)


def _table(name: str, axis: str, **options: Any) -> Tensor:
    return Tensor([axis], param=name, dtype="int32", **options)


def _caches(layout: str) -> dict[str, Tensor | Scalar]:
    tokens = ["page_size", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "page_size"]
    return {
        name: Tensor(["num_pages", *tokens, dim], param="paged_kv_cache", tuple_idx=index)
        for index, (name, dim) in enumerate((("k_cache", "head_dim"), ("v_cache", "head_dim_vo")))
    }


def _outputs(rows: str, with_lse: bool) -> dict[str, Tensor | Scalar]:
    out = Tensor([rows, "num_qo_heads", "head_dim_vo"], dtype_from_scalar="o_data_type", dtype_from=None)
    lse = Tensor([rows, "num_qo_heads"], dtype="float32", description="Base 2; the reference always returns it.")
    return {"output": out, "lse": lse} if with_lse else {"output": out}


def _paged_template(kind: str, layout: str, with_lse: bool) -> TraceTemplate:
    decode = kind == "decode"
    rows = "num_rows" if decode else "total_q"
    axes = {rows: Var(), "num_pages": Var(), "num_kv_indices": Var(), "len_indptr": Var(), "batch_size": Var()}
    qo_indptr = {} if decode else {"qo_indptr": _table("qo_indptr", "len_indptr")}
    return TraceTemplate(
        f"gqa_paged_{kind}",
        axes={**axes, **_HEADS, "page_size": Const(abbrev="ps")},
        inputs={
            "q": Tensor([rows, "num_qo_heads", "head_dim"]),
            **_caches(layout),
            **qo_indptr,
            "kv_indptr": _table("kv_indptr", "len_indptr"),
            "kv_indices": _table("kv_indices", "num_kv_indices"),
            "kv_last_page_len": _table("kv_last_page_len", "batch_size"),
            "seq_lens": _table("seq_lens", "batch_size", optional=True),
            **_OPTIONS,
            **({} if decode else {"causal": _CAUSAL}),
            **_RUN_OPTIONS,
            "kv_layout": _LAYOUT,
        },
        outputs=_outputs(rows, with_lse),
        constraints=("len_indptr == batch_size + 1",),
        reference=(attend_request, gather_pages, _decode_reference if decode else _paged_prefill_reference),
        op=("batch_decode", "decode_plan") if decode else _PREFILL_OPS,
        make=(inputs.make_decode if decode else inputs.make_paged)(layout, with_lse),
        plan=inputs.plan_decode if decode else inputs.plan_paged,
        samples=_DECODE_SAMPLES if decode else _PAGED_SAMPLES,
        work=inputs.work,
        tolerance=_TOLERANCE,
        tags=(f"kv_layout:{layout}",),
        description=(
            "Attention of the last tokens of each request (one, or the same number of each) over a paged KV cache."
            if decode
            else "Attention of the tokens of each request, its last ones, over a paged KV cache."
        ),
    )


def _ragged_template(layout: str, with_lse: bool) -> TraceTemplate:
    tokens = ["total_kv", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "total_kv"]
    return TraceTemplate(
        "gqa_ragged_prefill",
        axes={"total_q": Var(), "total_kv": Var(), "len_indptr": Var(), **_HEADS},
        inputs={
            "q": Tensor(["total_q", "num_qo_heads", "head_dim"]),
            "k": Tensor([*tokens, "head_dim"]),
            "v": Tensor([*tokens, "head_dim_vo"]),
            "qo_indptr": _table("qo_indptr", "len_indptr"),
            "kv_indptr": _table("kv_indptr", "len_indptr"),
            **_OPTIONS,
            "causal": _CAUSAL,
            **_RUN_OPTIONS,
            "kv_layout": _LAYOUT,
        },
        outputs=_outputs("total_q", with_lse),
        reference=(attend_request, _ragged_prefill_reference),
        op=_PREFILL_OPS,
        make=inputs.make_ragged(layout, with_lse),
        plan=inputs.plan_ragged,
        samples=_PREFILL_SAMPLES,
        work=inputs.work,
        tolerance=_TOLERANCE,
        tags=(f"kv_layout:{layout}",),
        others=("o_scale",),
        description="Attention of the tokens of each request, its last ones, over keys that follow each other.",
    )


@functools.cache
def _cascade_template(layout: str, levels: int) -> TraceTemplate:
    axes: dict[str, Var | Const] = {"total_q": Var(), "num_pages": Var()}
    tables: dict[str, Tensor | Scalar] = {}
    for level in range(levels):
        for name, param, axis in (
            ("qo_indptr", "qo_indptr_arr", "len_indptr"),
            ("kv_indptr", "paged_kv_indptr_arr", "len_indptr"),
            ("kv_indices", "paged_kv_indices_arr", "num_kv_indices"),
            ("kv_last_page_len", "paged_kv_last_page_len", "batch_size"),
        ):
            axes[f"{axis}_{level}"] = Var()
            tables[f"{name}_{level}"] = _table(param, f"{axis}_{level}", tuple_idx=level)
    return TraceTemplate(
        "gqa_paged_cascade",
        name_prefix=f"gqa_paged_cascade_{levels}_levels",
        axes={**axes, **_HEADS, "page_size": Const(abbrev="ps")},
        inputs={
            "q": Tensor(["total_q", "num_qo_heads", "head_dim"]),
            **_caches(layout),
            **tables,
            **_OPTIONS,
            "causal": _CAUSAL,
            "kv_layout": _LAYOUT,
        },
        outputs={"output": Tensor(["total_q", "num_qo_heads", "head_dim_vo"], dtype_from="q")},
        reference=(attend_request, gather_pages, _cascade_reference),
        op=(*_PREFILL_OPS, "merge_state"),
        make=inputs.make_cascade(layout) if levels == inputs.CASCADE_LEVELS else None,
        plan=inputs.plan_cascade,
        samples=_CASCADE_SAMPLES,
        work=inputs.work,
        tolerance=_TOLERANCE,
        others=("k_scale", "v_scale"),
        tags=(f"kv_layout:{layout}",),
        description="Attention over levels of shared keys, each with its page table; causal within the last level.",
    )


# Arguments of `plan`, by the attributes of the wrapper that hold them.


def _scale(wrapper: Any) -> float:
    head_dim: int = wrapper._head_dim if hasattr(wrapper, "_head_dim") else wrapper._head_dim_qk
    return float(head_dim**-0.5 if wrapper._sm_scale is None else wrapper._sm_scale)


def _has_mask(wrapper: Any) -> bool:
    return wrapper._plan.kept != "plain"  # type: ignore[no-any-return]


_PLANNED: Planned = {
    "kv_layout": "_kv_layout",
    "sm_scale": _scale,
    "window_left": "_window_left",
    "logits_soft_cap": "_logits_soft_cap",
    "pos_encoding_mode": "_pos_encoding_mode",
    "variant": "_variant",
}
_PAGES: Planned = {
    "kv_indptr": "_paged_kv_indptr_buf",
    "kv_indices": "_paged_kv_indices_buf",
    "kv_last_page_len": "_paged_kv_last_page_len_buf",
}
PLANNED_DECODE: Planned = {
    **_PLANNED,
    **_PAGES,
    "seq_lens": lambda wrapper: wrapper._plan.lengths[2],
    "has_mask": lambda wrapper: wrapper._plan.mask is not None,
    "q_len_per_req": "_q_len_per_req",
    "o_data_type": "_cached_o_data_type",
}
_PREFILL: Planned = {
    **_PLANNED,
    "qo_indptr": "_qo_indptr_buf",
    "causal": "_causal",
    "has_mask": _has_mask,
    "o_data_type": lambda wrapper: wrapper._plan.out_dtype,
}
PLANNED_PAGED: Planned = {**_PREFILL, **_PAGES, "seq_lens": "_kv_lens_buffer"}
PLANNED_RAGGED: Planned = {**_PREFILL, "kv_indptr": "_kv_indptr_buf", "sinks": "_sinks"}


def _of_levels(attribute: str) -> Callable[[Any], Any]:
    return lambda wrapper: tuple(getattr(level, attribute) for level in wrapper._planned_levels)


def _of_last(held: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(wrapper: Any) -> Any:
        last = wrapper._batch_prefill_wrappers[-1]
        return getattr(last, held) if isinstance(held, str) else held(last)

    return read


PLANNED_CASCADE: Planned = {
    **{name: _of_last(held) for name, held in {**_PLANNED, "causal": "_causal"}.items()},
    "qo_indptr_arr": _of_levels("_qo_indptr_buf"),
    "paged_kv_indptr_arr": _of_levels("_paged_kv_indptr_buf"),
    "paged_kv_indices_arr": _of_levels("_paged_kv_indices_buf"),
    "paged_kv_last_page_len": _of_levels("_paged_kv_last_page_len_buf"),
}


# Selects the template of a call; None for options that no reference covers and for caches without a page axis.


def _is_covered(arguments: dict[str, Any]) -> bool:
    plain = arguments.get("pos_encoding_mode", "NONE") == "NONE" and arguments.get("lse_base", "log2") == "log2"
    return (
        plain
        and arguments.get("lse_layout", "NH") == "NH"
        and arguments.get("variant") is None
        and arguments.get("kv_cache_sf") is None
        and not arguments.get("args")
        and not arguments.get("has_mask")
    )


def _has_page_axis(arguments: dict[str, Any]) -> bool:
    cache = arguments["paged_kv_cache"]
    return len(cache[0].shape if isinstance(cache, (tuple, list)) else cache.shape[1:]) == 4


def _select(templates: dict[tuple[str, bool], TraceTemplate], is_paged: bool) -> Any:
    def select(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        if not _is_covered(arguments) or (is_paged and not _has_page_axis(arguments)):
            return None
        return templates[arguments.get("kv_layout", "NHD"), bool(arguments.get("return_lse", False))]

    select.templates = tuple(templates.values())  # type: ignore[attr-defined]
    return select


_KINDS = [(layout, with_lse) for layout in ("NHD", "HND") for with_lse in (False, True)]
paged_decode = _select({kind: _paged_template("decode", *kind) for kind in _KINDS}, True)
paged_prefill = _select({kind: _paged_template("prefill", *kind) for kind in _KINDS}, True)
ragged_prefill = _select({kind: _ragged_template(*kind) for kind in _KINDS}, False)


def cascade(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of a cascade with the number of levels of the call."""
    if not _is_covered(arguments) or not _has_page_axis(arguments):
        return None
    return _cascade_template(arguments.get("kv_layout", "NHD"), len(arguments["qo_indptr_arr"]))


cascade.templates = tuple(_cascade_template(layout, inputs.CASCADE_LEVELS) for layout in ("NHD", "HND"))  # type: ignore[attr-defined]
