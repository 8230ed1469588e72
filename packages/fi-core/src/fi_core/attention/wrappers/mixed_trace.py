"""Trace templates of the wrappers for mixed batches: BatchAttention, POD and BatchPOD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.attention.reference import attend_pages, attend_request
from fi_core.attention.wrappers import inputs, trace
from fi_core.attention.wrappers.inputs import PAGED, attention_work, kept, lengths_of, paged, plain_calls
from fi_core.observe.draw import Draw
from fi_core.observe.trace import Planned, Scalar, Tensor, Work, options, tensors


def _mixed_reference(kv_len_arr, **options):  # type: ignore[no-untyped-def]
    return attend_pages(seq_lens=kv_len_arr, **options)


def _halves_reference(  # type: ignore[no-untyped-def]
    q_p, q_d, k_cache, v_cache, sm_scale, causal_p=False, k_p=None, v_p=None, k_cache_p=None, v_cache_p=None, **tables
):
    prefill = {name.removesuffix("_p"): x for name, x in tables.items() if name.endswith("_p")}
    decode = {name.removesuffix("_d"): x for name, x in tables.items() if name.endswith("_d")}
    for half in (prefill, decode):
        half["kv_last_page_len"] = half.pop("last_page_len", None)
    if k_p is not None:
        out_p, _ = attend_request(q_p, k_p, v_p, sm_scale, causal_p)
    else:
        out_p, _ = attend_pages(q_p, k_cache_p, v_cache_p, sm_scale=sm_scale, causal=causal_p, **prefill)
    return out_p, attend_pages(q_d, k_cache, v_cache, sm_scale=sm_scale, **decode)[0]


@paged(batch_size=60, kv_len=3072, num_prompts=3, qo_len=1024, causal=True, **PAGED)
def _make_mixed(draw: Draw, s: Any) -> dict[str, Any]:
    """batch_size decode requests of these kv_lens, then prompts of these qo_lens."""
    prompts = lengths_of(s.qo_len, s.num_prompts)
    kv_lens = [*lengths_of(s.kv_len, s.batch_size), *prompts]
    qo_lens = [1] * (len(kv_lens) - len(prompts)) + prompts
    own = {"kv_len_arr": draw.int32(kv_lens), "causal": s.causal, "kv_layout": "NHD"}
    return {**inputs.requests_of(draw, s, qo_lens, kv_lens, "kv_cache"), **own}


def _work_mixed(x: Mapping[str, Any]) -> Work:
    pairs = zip(x["qo_indptr"].diff().tolist(), x["kv_len_arr"].tolist())
    return attention_work(x["q"], [(*x["kv_cache"], pairs, x["causal"])], with_lse=True)


MIXED = trace.template(
    "gqa_paged_mixed",
    {
        **tensors(q="total_q num_qo_heads head_dim"),
        **trace.caches("kv_cache"),
        **trace.tables("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
        "sm_scale": Scalar(),
        **options(bool="causal", string="kv_layout"),
    },
    _mixed_reference,
    outputs={
        **tensors({"dtype_from": "q"}, output="total_q num_qo_heads head_dim"),
        **tensors({"dtype": "float32"}, lse="total_q num_qo_heads"),
    },
    constraints=("len_indptr == batch_size + 1",),
    op=(*trace.PREFILL, *trace.DECODE),
    make=_make_mixed,
    samples=(
        {**trace.SMALL, "kv_len": (37, 1, 16), "qo_len": (20, 3)},
        {**trace.SMALL, "kv_len": (9, 40), "qo_len": (70,), "causal": False, "page_size": 5},
    ),
    work=_work_mixed,
    description="Attention of decode requests and prompts in one batch over a paged KV cache.",
)


def _half(draw: Draw, s: Any, qo_lens: list[int], kv_lens: list[int], suffix: str) -> dict[str, Any]:
    made = inputs.requests_of(draw, s, qo_lens, kv_lens)
    return {"sm_scale": made.pop("sm_scale")} | {n.replace("kv_last", "last") + suffix: x for n, x in made.items()}


@paged(batch_size=60, kv_len=3072, qo_len=2048, causal=True, **PAGED)
def _make_pod(draw: Draw, s: Any) -> dict[str, Any]:
    """A prompt of qo_len, and batch_size decode requests of these kv_lens."""
    kv_lens = lengths_of(s.kv_len, s.batch_size)
    keys = {name: inputs.normal(draw, (s.qo_len, s.num_kv_heads, s.head_dim), s.dtype) for name in ("k_p", "v_p")}
    decode = _half(draw, s, [1] * len(kv_lens), kv_lens, "_d")
    return {"q_p": inputs.query_of(draw, s.qo_len, s), **keys, **decode, "causal_p": s.causal}


@paged(batch_size=60, kv_len=3072, num_prompts=3, qo_len=1024, causal=True, **PAGED)
def _make_batch_pod(draw: Draw, s: Any) -> dict[str, Any]:
    """Prompts of these qo_lens, and batch_size decode requests of these kv_lens."""
    kv_lens, qo_lens = lengths_of(s.kv_len, s.batch_size), lengths_of(s.qo_len, s.num_prompts)
    decode = _half(draw, s, [1] * len(kv_lens), kv_lens, "_d")
    return {**_half(draw, s, qo_lens, qo_lens, "_p"), **decode, "causal_p": s.causal}


def _work_halves(x: Mapping[str, Any]) -> Work:
    prompts = [(len(x["q_p"]), len(x["k_p"]))] if "k_p" in x else [(n, n) for n in x["qo_indptr_p"].diff().tolist()]
    keys_p = (x["k_p"], x["v_p"]) if "k_p" in x else x["paged_kv_cache_p"]
    page_size = x["paged_kv_cache_d"][0].shape[1]
    decode = [(1, n) for n in inputs.kv_lens_of(x["kv_indptr_d"], x["last_page_len_d"], page_size)]
    return inputs.both(
        attention_work(x["q_p"], [(*keys_p, prompts, x["causal_p"])]),
        attention_work(x["q_d"], [(*x["paged_kv_cache_d"], decode, False)]),
    )


_DECODE: dict[str, Tensor | Scalar] = {
    "q_d": Tensor(["num_d", "num_qo_heads", "head_dim"]),
    **trace.caches("paged_kv_cache_d"),
    **trace.tables("kv_indptr", "kv_indices", "last_page_len", suffix="_d"),
    "sm_scale": Scalar(),
    "causal_p": Scalar("bool", optional=True),
}


def _pod(op_type: str, prefill: dict[str, Tensor | Scalar], make: Callable[..., Any], **options: Any) -> Any:
    q_p = Tensor(["num_p", "num_qo_heads", "head_dim"])
    return trace.template(
        op_type,
        {"q_p": q_p, **prefill, **_DECODE},
        _halves_reference,
        outputs={
            "output_p": Tensor(q_p.dim_names, dtype_from="q_p"),
            "output_d": Tensor(["num_d", "num_qo_heads", "head_dim"], dtype_from="q_d"),
        },
        make=make,
        work=_work_halves,
        **options,
    )


POD = _pod(
    "gqa_pod",
    {name: Tensor(["num_kv_p", "num_kv_heads", "head_dim"]) for name in ("k_p", "v_p")},
    _make_pod,
    op=(*trace.PREFILL, *trace.DECODE, "single_attention"),
    samples=(
        {**trace.SMALL, "kv_len": (37, 1, 16), "qo_len": 20},
        {**trace.SMALL, "kv_len": (9,), "qo_len": 5, "causal": False},
    ),
    description="Attention of a prompt over its K and V, and of decode requests over a paged KV cache.",
)
BATCH_POD = _pod(
    "gqa_paged_batch_pod",
    {
        **trace.caches("paged_kv_cache_p", suffix="_p"),
        **trace.tables("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", suffix="_p"),
    },
    _make_batch_pod,
    op=(*trace.PREFILL, *trace.DECODE),
    samples=({**trace.SMALL, "kv_len": (37, 1, 16), "qo_len": (20, 3)},),
    description="Attention of prompts, and of decode requests, over paged KV caches.",
)

_SCALES = ("k_scale", "v_scale", "q_scale", "kv_cache_sf", "kv_cache_sf_p", "kv_cache_sf_d", "variant_args")
_OTHERS, _MASKS = (*_SCALES, "return_lse"), ("custom_mask", "packed_custom_mask")
_OF_HALF = (*_MASKS, "kv_layout", "pos_encoding_mode", "sm_scale", "window_left", "return_lse")
mixed = plain_calls(MIXED, *_OTHERS)
pod = plain_calls(POD, *_OTHERS, *(f"{name}_{half}" for half in "pd" for name in _OF_HALF))
batch_pod = plain_calls(BATCH_POD, *_OTHERS, *(f"{name}_p" for name in _MASKS))
PLANNED_MIXED: Planned = kept(
    "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "sm_scale", "causal", "kv_layout", "covered"
)
_PAGES = {name.replace("kv_last", "last"): held for name, held in trace.PAGES.items()}
PLANNED_POD, _OF_DECODE = (
    {**trace.of_inner(name, _PAGES, "_d"), **trace.of_inner(name, trace.SCORES)} for name in ("_inner", "_decode")
)
PLANNED_BATCH_POD: Planned = {**_OF_DECODE, **trace.of_inner("_prefill", {**trace.ROWS, **_PAGES}, "_p")}
