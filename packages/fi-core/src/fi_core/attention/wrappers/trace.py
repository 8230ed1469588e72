"""Trace templates of the attention wrappers' `run`. PLANNED_* name the attributes that hold the arguments of `plan`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fi_core.attention.reference import attend_pages, attend_request, gather_pages
from fi_core.attention.wrappers import inputs
from fi_core.observe.trace import Planned, Scalar, Tensor, TraceTemplate, axes_of, dispatcher, tensors


def _ragged_reference(k, v, kv_indptr, kv_layout="NHD", **options):  # type: ignore[no-untyped-def]
    import torch

    k, v = ((x if kv_layout == "NHD" else x.transpose(0, 1)).unsqueeze(1) for x in (k, v))  # pages of one token
    options |= {"kv_indices": torch.arange(len(k), device=k.device), "kv_last_page_len": torch.ones_like(kv_indptr)}
    return attend_pages(k_cache=k, v_cache=v, kv_indptr=kv_indptr, **options)


def _cascade_reference(q, k_cache, v_cache, sm_scale, causal=False, **options):  # type: ignore[no-untyped-def]
    import torch

    levels: list[dict[str, torch.Tensor]] = []
    while f"qo_indptr_{len(levels)}" in options:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        levels.append({name: options.pop(f"{name}_{len(levels)}") for name in names})
    states = [
        attend_pages(q, k_cache, v_cache, sm_scale=sm_scale, causal=causal and level is levels[-1], **level, **options)
        for level in levels
    ]
    scores = torch.stack([lse for _, lse in states]) * 0.6931471805599453
    weight = scores.softmax(0).masked_fill((scores == -torch.inf).all(0), 0.0)
    return (weight[..., None] * torch.stack([out for out, _ in states])).sum(0)


FIXED = {"num_qo_heads": "h", "num_kv_heads": "kv", "head_dim": "d", "head_dim_vo": "", "page_size": "ps"}
PREFILL, DECODE = ("batch_prefill", "prefill_plan"), ("batch_decode", "decode_plan")
SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
CAUSAL = Scalar("bool", optional=True, description="A query sees the keys up to its own position.")
LAYOUT = Scalar("string", optional=True)
_OPTIONS: dict[str, Tensor | Scalar] = {
    "sm_scale": Scalar(description="Multiplies the scores."),
    "window_left": Scalar("int32", optional=True, description="Keys before its own that a query sees; -1: all."),
    "logits_soft_cap": Scalar(optional=True),
}
_RUN_OPTIONS: dict[str, Tensor | Scalar] = {
    "sinks": Tensor(["num_qo_heads"], dtype="float32", optional=True, description="exp(sinks) joins the softmax sum."),
    **{name: Scalar(optional=True) for name in ("q_scale", "k_scale", "v_scale")},
}
_SCORES = {"window_left": 7, "logits_soft_cap": 5.0, "sm_scale": 0.3}
_DECODE_SAMPLES = (
    {**SMALL, "kv_len": (37, 0, 16, 5)},
    {**SMALL, "kv_len": (37, 1), "dtype": "bfloat16", "num_kv_heads": 4, "page_size": 5, "head_dim": 40},
    {**SMALL, "kv_len": (38, 9), **_SCORES, "sinks": True},
    {**SMALL, "kv_len": (37, 3, 16), "q_len_per_req": 3, "o_dtype": "bfloat16"},
)
_PREFILL_SAMPLES = (
    {**SMALL, "qo_len": (5, 0, 16, 1), "kv_len": (37, 3, 16, 40), "causal": True},
    {**SMALL, "qo_len": (5, 4, 1), "kv_len": (9, 0, 33), "causal": False, "dtype": "bfloat16", "head_dim_vo": 32},
    {**SMALL, "qo_len": (5, 20), "kv_len": (37, 20), "causal": True, **_SCORES, "o_dtype": "bfloat16"},
)
_PAGED_SAMPLES = (*_PREFILL_SAMPLES, {**_PREFILL_SAMPLES[0], "page_size": 5, "num_kv_heads": 1, "sinks": True})
_CASCADE_SAMPLES = (
    {**SMALL, "shared_kv_len": 37, "kv_len": (9, 1, 16)},
    {**SMALL, "shared_kv_len": 20, "kv_len": (9, 4), "qo_len": (3, 4), "causal": True, "dtype": "bfloat16"},
)


def template(
    op_type: str, taken: Mapping[str, Tensor | Scalar], *reference: Callable[..., Any], **options: Any
) -> TraceTemplate:
    """A template of attention in fp64 by `attend_pages`; its output has the shape and dtype of q, if not given."""
    usual: dict[str, Any] = {"reference": (attend_request, gather_pages, attend_pages, *reference)}
    usual |= {"plan": inputs.plan, "tolerance": {"float16": (2e-3, 2e-3), "float32": (1e-4, 1e-4)}}
    if isinstance(q := taken.get("q"), Tensor):
        usual["outputs"] = {"output": Tensor(q.dim_names, dtype_from="q")}
    return TraceTemplate(op_type, axes=axes_of(taken, **FIXED), inputs=taken, **usual | options)


_AXES = {"qo_indptr": "len_indptr", "kv_indptr": "len_indptr", "kv_indices": "num_kv_indices"}


def tables(*names: str, suffix: str = "", **options: Any) -> dict[str, Tensor | Scalar]:
    """Tables of a batch. suffix: of the names and axes."""
    axes = {name: _AXES.get(name, "batch_size") + suffix for name in names}
    return {name + suffix: Tensor([axis], dtype="int32", **options) for name, axis in axes.items()}


TABLE = tables("kv_indptr", "kv_indices", "kv_last_page_len")
QO_INDPTR = tables("qo_indptr")


def caches(
    param: str = "paged_kv_cache", layout: str = "NHD", suffix: str = "", dim_vo: str = "head_dim"
) -> dict[str, Tensor | Scalar]:
    tokens = ["page_size", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "page_size"]
    return {
        name + suffix: Tensor([f"num_pages{suffix}", *tokens, dim], param=param, tuple_idx=index)
        for index, (name, dim) in enumerate((("k_cache", "head_dim"), ("v_cache", dim_vo)))
    }


_OVER_PAGES = "over a paged KV cache."
# By kind: the axis of rows, the ops, samples, and the description.
_KINDS: dict[str, tuple[str, tuple[str, str], Sequence[Mapping[str, Any]], str]] = {
    "paged_decode": (
        "num_rows",
        DECODE,
        _DECODE_SAMPLES,
        f"Attention of the last tokens of each request (one, or the same number of each) {_OVER_PAGES}",
    ),
    "paged_prefill": (
        "total_q",
        PREFILL,
        _PAGED_SAMPLES,
        f"Attention of the tokens of each request, its last ones, {_OVER_PAGES}",
    ),
    "ragged_prefill": (
        "total_q",
        PREFILL,
        _PREFILL_SAMPLES,
        "Attention of the tokens of each request, its last ones, over keys that follow each other.",
    ),
}


def _batch_template(kind: str, layout: str, with_lse: bool) -> TraceTemplate:
    rows, op, samples, description = _KINDS[kind]
    is_paged, of_prefill = kind != "ragged_prefill", op is PREFILL
    tokens = "total_kv num_kv_heads" if layout == "NHD" else "num_kv_heads total_kv"
    keys: Mapping[str, Any] = tensors(k=f"{tokens} head_dim", v=f"{tokens} head_dim_vo")
    of_pages = {**TABLE, **tables("seq_lens", optional=True)}
    lse = Tensor([rows, "num_qo_heads"], dtype="float32", description="Base 2; the reference always returns it.")
    out = Tensor([rows, "num_qo_heads", "head_dim_vo"], dtype_from_scalar="o_data_type", dtype_from=None)
    return template(
        f"gqa_{kind}",
        {
            "q": Tensor([rows, "num_qo_heads", "head_dim"]),
            **(caches(layout=layout, dim_vo="head_dim_vo") if is_paged else keys),
            **(QO_INDPTR if of_prefill else {}),
            **(of_pages if is_paged else tables("kv_indptr")),
            **_OPTIONS,
            **({"causal": CAUSAL} if of_prefill else {}),
            **_RUN_OPTIONS,
            "kv_layout": LAYOUT,
        },
        *(() if is_paged else (_ragged_reference,)),
        outputs={"output": out, "lse": lse} if with_lse else {"output": out},
        constraints=("len_indptr == batch_size + 1",) if is_paged else None,
        op=op,
        make=inputs.make_batch(kind, layout, with_lse),
        samples=samples,
        work=inputs.work,
        tags=(f"kv_layout:{layout}",),
        others=() if is_paged else ("o_scale",),
        description=description,
    )


_LEVELS = {
    "qo_indptr": "qo_indptr_arr",
    "kv_indptr": "paged_kv_indptr_arr",
    "kv_indices": "paged_kv_indices_arr",
    "kv_last_page_len": "paged_kv_last_page_len",
}  # arguments of `plan`


@functools.cache
def _cascade_template(layout: str, levels: int) -> TraceTemplate:
    of_levels: dict[str, Tensor | Scalar] = {}
    for level in range(levels):
        for name, param in _LEVELS.items():
            of_levels |= tables(name, suffix=f"_{level}", param=param, tuple_idx=level)
    q = Tensor(["total_q", "num_qo_heads", "head_dim"])
    paged = caches(layout=layout, dim_vo="head_dim_vo")
    return template(
        "gqa_paged_cascade",
        {"q": q, **paged, **of_levels, **_OPTIONS, "causal": CAUSAL, "kv_layout": LAYOUT},
        _cascade_reference,
        name_prefix=f"gqa_paged_cascade_{levels}_levels",
        outputs={"output": Tensor(["total_q", "num_qo_heads", "head_dim_vo"], dtype_from="q")},
        op=(*PREFILL, "merge_state"),
        make=inputs.make_cascade(layout) if levels == inputs.CASCADE_LEVELS else None,
        samples=_CASCADE_SAMPLES,
        work=inputs.work,
        others=("k_scale", "v_scale"),
        tags=(f"kv_layout:{layout}",),
        description="Attention over levels of shared keys, each with its page table; causal within the last level.",
    )


# Arguments of `plan`, by the attributes of the wrapper that hold them.


def _scale(wrapper: Any) -> float:
    head_dim: int = wrapper._head_dim if hasattr(wrapper, "_head_dim") else wrapper._head_dim_qk
    return float(head_dim**-0.5 if wrapper._sm_scale is None else wrapper._sm_scale)


def _is_plain(wrapper: Any) -> bool:
    """Whether a plan has no option of the scores that references without options leave out."""
    plan = wrapper._plan
    return not plan.pos_encoding and plan.window_left < 0 and not plan.soft_cap and wrapper._variant is None


def of_inner(inner: str, held: Planned, suffix: str = "") -> Planned:
    """What the wrapper holds that is this attribute of another one. suffix: of the names."""

    def reader(read: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
        find = operator.attrgetter(read) if isinstance(read, str) else read
        return lambda wrapper: find(getattr(wrapper, inner))

    return {f"{name}{suffix}": reader(read) for name, read in held.items()}


def _held(*names: str) -> dict[str, str | Callable[[Any], Any]]:
    """Arguments that the wrapper has under their names."""
    return {name: f"_{name}" for name in names}


SCORES: Planned = {**_held("kv_layout"), "sm_scale": _scale, "covered": _is_plain}
_PLANNED: Planned = {
    **_held("kv_layout", "window_left", "logits_soft_cap", "pos_encoding_mode", "variant"),
    "sm_scale": _scale,
}
PAGES: Planned = {name: f"_paged_{name}_buf" for name in TABLE}
PLANNED_DECODE: Planned = {
    **_PLANNED,
    **PAGES,
    **_held("q_len_per_req"),
    "seq_lens": lambda wrapper: wrapper._plan.lengths[2],
    "has_mask": lambda wrapper: wrapper._plan.mask is not None,
    "o_data_type": "_cached_o_data_type",
}
ROWS: Planned = {"qo_indptr": "_qo_indptr_buf"}
_PREFILL: Planned = {
    **_PLANNED,
    **ROWS,
    **_held("causal"),
    "has_mask": lambda wrapper: wrapper._plan.kept != "plain",
    "o_data_type": lambda wrapper: wrapper._plan.out_dtype,
}
PLANNED_PAGED: Planned = {**_PREFILL, **PAGES, "seq_lens": "_kv_lens_buffer"}
PLANNED_RAGGED: Planned = {**_PREFILL, **_held("sinks"), "kv_indptr": "_kv_indptr_buf"}


def _of_levels(attribute: Any) -> Callable[[Any], Any]:
    return lambda wrapper: tuple(getattr(level, attribute) for level in wrapper._planned_levels)


PLANNED_CASCADE: Planned = {
    **of_inner("_last", {**_PLANNED, **_held("causal")}),
    **{param: _of_levels({**ROWS, **PAGES}[name]) for name, param in _LEVELS.items()},
}


# Selects the template of a call; None for options that no reference covers and for caches without a page axis.


_USUAL = {"pos_encoding_mode": "NONE", "lse_base": "log2", "lse_layout": "NH"}


def _is_covered(arguments: dict[str, Any]) -> bool:
    given = arguments.get("variant") is not None or arguments.get("kv_cache_sf") is not None
    more = given or arguments.get("args") or arguments.get("has_mask")
    return not more and all(arguments.get(name, usual) == usual for name, usual in _USUAL.items())


def _has_page_axis(arguments: dict[str, Any]) -> bool:
    cache = arguments["paged_kv_cache"]
    return len(cache[0].shape if isinstance(cache, (tuple, list)) else cache.shape[1:]) == 4


def _select(kind: str) -> Any:
    forms = [(layout, with_lse) for layout in ("NHD", "HND") for with_lse in (False, True)]
    templates = {form: _batch_template(kind, *form) for form in forms}

    def choose(arguments: dict[str, Any]) -> TraceTemplate | None:
        if not _is_covered(arguments) or (kind != "ragged_prefill" and not _has_page_axis(arguments)):
            return None
        return templates[arguments.get("kv_layout", "NHD"), bool(arguments.get("return_lse", False))]

    return dispatcher(templates.values(), choose)


paged_decode, paged_prefill, ragged_prefill = map(_select, _KINDS)


def _cascade(arguments: dict[str, Any]) -> TraceTemplate | None:
    """The template of a cascade with the number of levels of the call."""
    if not _is_covered(arguments) or not _has_page_axis(arguments):
        return None
    return _cascade_template(arguments.get("kv_layout", "NHD"), len(arguments["qo_indptr_arr"]))


cascade = dispatcher([_cascade_template(layout, inputs.CASCADE_LEVELS) for layout in ("NHD", "HND")], _cascade)
