"""Descriptions of the attention wrappers, second half: inputs from sizes, the plan for them, and the work of a run.

A length is one number for all requests, or a list with one for each.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fi_core.attention import contract
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import TraceTemplate, Work, dispatcher, sized
from fi_core.runtime.lazy import torch
from fi_core.utils import canonicalize_torch_dtype, ceil_div

Lengths: TypeAlias = "int | Sequence[int]"
Arguments = Mapping[str, Any]
Keys: TypeAlias = "tuple[torch.Tensor, torch.Tensor, Iterable[tuple[int, int]], bool]"
_WORKSPACE = 128 << 20
CASCADE_LEVELS = 2  # that `make_cascade` makes: a shared prefix and the requests' own keys
HEADS: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
PAGED: dict[str, Any] = {**HEADS, "page_size": 16}
paged = functools.partial(sized, {"head_dim_vo": None, "kv_dtype": None, "kv_layout": "NHD"})


# Inputs: the arguments of `run`, of `plan` and of the constructor by name.
def lengths_of(lengths: Lengths, batch_size: int) -> list[int]:
    return [lengths] * batch_size if isinstance(lengths, int) else list(lengths)


def normal(draw: Draw, shape: Sequence[int], dtype: Any) -> torch.Tensor:
    return draw.rows(draw.normal(shape, canonicalize_torch_dtype(dtype)))


def query_of(draw: Draw, rows: int, s: Any) -> torch.Tensor:
    return normal(draw, (rows, s.num_qo_heads, s.head_dim), s.dtype)


def pages_of(draw: Draw, kv_lens: Sequence[int], page_size: int) -> dict[str, Any]:
    """The page table of requests, with pages in random order."""
    pages = [ceil_div(n, page_size) for n in kv_lens]
    return {
        "kv_indptr": draw.offsets(pages),
        "kv_indices": draw.permutation(sum(pages)),
        "kv_last_page_len": draw.int32([n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages)]),
    }


def cache_of(draw: Draw, tables: Sequence[Arguments], s: Any) -> tuple[torch.Tensor, ...]:
    """K and V of the pages of all tables, which differ; nasty: the tokens behind a request are NaN."""
    pages, dtype = sum(len(table["kv_indices"]) for table in tables), canonicalize_torch_dtype(s.kv_dtype or s.dtype)
    inner = (s.page_size, s.num_kv_heads) if s.kv_layout == "NHD" else (s.num_kv_heads, s.page_size)
    dims = s.head_dim, s.head_dim_vo or s.head_dim
    cache = tuple(draw.rows(draw.pages((pages, *inner, dim), dtype)) for dim in dims)
    for table in tables if draw.nasty else ():
        ends, last = table["kv_indptr"][1:].tolist(), table["kv_last_page_len"].tolist()
        for end, used in zip(ends, last):
            for x in cache if used else ():
                page = x[int(table["kv_indices"][end - 1])]
                draw.poison(page[used:] if s.kv_layout == "NHD" else page[:, used:])
    return cache


def requests_of(
    draw: Draw, s: Any, qo_lens: Sequence[int], kv_lens: Sequence[int], cache: str = "paged_kv_cache"
) -> dict[str, Any]:
    """The last tokens of requests over pages. cache: the name of K and V."""
    table, q = pages_of(draw, kv_lens, s.page_size), query_of(draw, sum(qo_lens), s)
    own = {"qo_indptr": draw.offsets(qo_lens), "sm_scale": s.head_dim**-0.5}
    return {"q": q, cache: cache_of(draw, [table], s), **table, **own}


_BATCH = {"batch_size": 4, "kv_len": None, **PAGED, "head_dim_vo": None, "kv_dtype": None, "o_dtype": None}
_SCORES = {"window_left": -1, "logits_soft_cap": None, "pos_encoding_mode": None, "sm_scale": None}
_PLAN = {**_SCORES, "backend": "auto", "disable_split_kv": None, "sinks": False}
_PROMPTS = {"qo_len": 1024, "causal": True}
_SIZES: dict[str, dict[str, Any]] = {
    "paged_decode": {**_BATCH, **_PLAN, "batch_size": 64, "kv_len": 4096, "q_len_per_req": 1, "use_tensor_cores": True},
    "paged_prefill": {**_BATCH, **_PLAN, **_PROMPTS},
    "ragged_prefill": {**_BATCH, **_PLAN, **_PROMPTS},
}
for _absent in ("page_size", "sinks"):
    del _SIZES["ragged_prefill"][_absent]
_OF_PLAN = (*_SCORES, "causal", "q_len_per_req", "use_tensor_cores", "backend", "disable_split_kv", "kv_layout")


def make_batch(kind: str, layout: str, with_lse: bool) -> Callable[..., dict[str, Any]]:
    """Makes the last tokens of requests. kind: one of _SIZES; kv_len: default qo_len."""

    @sized(**_SIZES[kind], kv_layout=layout)
    def make(draw: Draw, s: Any) -> dict[str, Any]:
        qo_len = s.q_len_per_req if kind == "paged_decode" else s.qo_len
        kv_lens = lengths_of(qo_len if s.kv_len is None else s.kv_len, s.batch_size)
        qo_lens = lengths_of(qo_len, len(kv_lens))
        if kind == "ragged_prefill":
            rows = (sum(kv_lens), s.num_kv_heads) if s.kv_layout == "NHD" else (s.num_kv_heads, sum(kv_lens))
            dims, dtype = zip("kv", (s.head_dim, s.head_dim_vo or s.head_dim)), s.kv_dtype or s.dtype
            found: dict[str, Any] = {name: normal(draw, (*rows, dim), dtype) for name, dim in dims}
            found |= {"q": query_of(draw, sum(qo_lens), s), "sm_scale": s.head_dim**-0.5}
            found |= {"qo_indptr": draw.offsets(qo_lens), "kv_indptr": draw.offsets(kv_lens)}
        else:
            found = requests_of(draw, s, qo_lens, kv_lens)
        if kind == "paged_decode":
            del found["qo_indptr"]
        found |= {name: getattr(s, name) for name in _OF_PLAN if getattr(s, name, None) is not None}
        if getattr(s, "sinks", False):
            found["sinks"] = draw.normal((s.num_qo_heads,), "float32")
        return {**found, "return_lse": with_lse, "o_data_type": canonicalize_torch_dtype(s.o_dtype or s.dtype)}

    return make


def make_cascade(layout: str) -> Callable[..., dict[str, Any]]:
    """Makes requests with keys of their own behind one shared prefix."""
    sizes = {**PAGED, "batch_size": 16, "shared_kv_len": 8192, "kv_len": 512, "qo_len": 1, "causal": False}

    @sized({"head_dim_vo": None, "kv_dtype": None}, **sizes, kv_layout=layout, logits_soft_cap=None)
    def make(draw: Draw, s: Any) -> dict[str, Any]:
        kv_lens = lengths_of(s.kv_len, s.batch_size)
        qo_lens = lengths_of(s.qo_len, len(kv_lens))
        tables = [pages_of(draw, lens, s.page_size) for lens in ([s.shared_kv_len], kv_lens)]
        tables[1]["kv_indices"] += len(tables[0]["kv_indices"])
        names = {"kv_indptr": "paged_kv_indptr_arr", "kv_indices": "paged_kv_indices_arr"}
        names["kv_last_page_len"] = "paged_kv_last_page_len"
        return {
            "q": query_of(draw, sum(qo_lens), s),
            "paged_kv_cache": cache_of(draw, tables, s),
            "qo_indptr_arr": [draw.offsets([sum(qo_lens)]), draw.offsets(qo_lens)],
            **{arrays: [table[name] for table in tables] for name, arrays in names.items()},
            **s.named("causal", "kv_layout", "logits_soft_cap"),
            "sm_scale": s.head_dim**-0.5,
            "window_left": -1,
        }

    return make


# The plan: makes a wrapper and plans it. Page tables are on the host, as engines have them.
_CACHES = ("paged_kv_cache", "kv_cache", "unique_kv_cache", "paged_kv_cache_d")


def keys_of(x: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, or their caches, with tokens before heads."""
    k, v = (x["k"], x["v"]) if "k" in x else next(x[name] for name in _CACHES if name in x)
    return (k, v) if x.get("kv_layout", "NHD") == "NHD" else (k.transpose(-2, -3), v.transpose(-2, -3))


def _on_host(name: str, value: Any) -> Any:
    if "indptr" not in name and "last_page_len" not in name:
        return value
    return [table.cpu() for table in value] if isinstance(value, list) else value.cpu()


def _arguments(function: Callable[..., Any], known: Arguments) -> dict[str, Any]:
    """The arguments of a function among what is known, of which some names are shorter or longer there."""
    found = {}
    for name in inspect.signature(function).parameters:
        short = name.removeprefix("paged_").removeprefix("unique_")
        others = (other for other in (name, short, f"kv_{name}", f"{name}_d", f"kv_{name}_d") if other in known)
        if (other := next(others, None)) is not None:
            found[name] = _on_host(other, known[other])
    return found


def plan(wrapper: Callable[..., Any], x: Arguments, **more: Any) -> Any:
    """Makes a wrapper and plans it: with the arguments of these names, and with what follows from shapes."""
    q, (k, v) = x["q"] if "q" in x else x["q_d"], keys_of(x)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    place = {"float_workspace_buffer": workspace, "device": q.device}
    sizes = {"num_qo_heads": q.shape[1], "num_kv_heads": k.shape[-2], "page_size": k.shape[1]}
    dims = {**dict.fromkeys(("head_dim", "head_dim_qk"), q.shape[2]), "head_dim_vo": v.shape[-1]}
    types = {**dict.fromkeys(("q_data_type", "data_type", "o_data_type"), q.dtype), "kv_data_type": k.dtype}
    known = {**place, "num_levels": len(x.get("qo_indptr_arr", ())), **sizes, **dims, **types, **x, **more}
    planned = wrapper(**_arguments(wrapper, known))
    planned.plan(**_arguments(planned.plan, known))
    return planned


# The work, as FlashInfer's benchmark counts it.
def kv_lens_of(*table: Any) -> list[int]:
    return contract.kv_lens(*table).tolist()


def lengths(x: Arguments) -> list[tuple[list[int], list[int], bool]]:
    """(qo_lens, kv_lens, causal) of a batch; of a cascade those of each level."""
    if "k" in x:
        return [(x["qo_indptr"].diff().tolist(), x["kv_indptr"].diff().tolist(), x["causal"])]
    page_size = keys_of(x)[0].shape[1]
    if "qo_indptr_arr" in x:
        tables = zip(x["qo_indptr_arr"], x["paged_kv_indptr_arr"], x["paged_kv_last_page_len"])
        found = [(qo.diff().tolist(), kv_lens_of(kv, last, page_size), False) for qo, kv, last in tables]
        return [*found[:-1], (*found[-1][:2], x["causal"])]
    kv_lens = kv_lens_of(x["kv_indptr"], x["kv_last_page_len"], page_size)
    if "qo_indptr" in x:
        return [(x["qo_indptr"].diff().tolist(), kv_lens, bool(x.get("causal", False)))]
    q_len = x["q"].shape[0] // len(kv_lens)
    return [([q_len] * len(kv_lens), kv_lens, q_len > 1)]


def attention_work(q: torch.Tensor, keys: Iterable[Keys], out_dtype: Any = None, with_lse: Any = False) -> Work:
    """Two operations for each pair of a query and a key that it sees, head and dimension; q, each token and the results
    once. keys: k, v, (qo_len, kv_len) of each request, and causal, of which half a pair is on the diagonal.
    """
    rows, heads, head_dim = q.shape
    operations = total = dim_vo = 0
    for k, v, requests, causal in keys:
        dim_vo = v.shape[-1]
        for qo_len, kv_len in requests:
            seeing = min(qo_len, kv_len)
            pairs = seeing * (2 * kv_len - seeing) if causal else 2 * qo_len * kv_len
            operations += pairs * heads * (head_dim + dim_vo)
            total += kv_len * k.shape[-2] * (head_dim + dim_vo) * k.element_size()
    written = rows * heads * (dim_vo * (out_dtype or q.dtype).itemsize + 4 * bool(with_lse))
    return Work(operations, nbytes(q) + total + written)


def work(x: Arguments) -> Work:
    """`attention_work` of a batch, or of the levels of a cascade."""
    keys = [(*keys_of(x), zip(qo_lens, kv_lens), causal) for qo_lens, kv_lens, causal in lengths(x)]
    return attention_work(x["q"], keys, x.get("o_data_type"), x.get("return_lse"))


def both(a: Work, b: Work) -> Work:
    return Work(a.flops + b.flops, a.bytes + b.bytes)


def kept(*names: str) -> dict[str, Any]:
    """`Planned` of a wrapper whose plan keeps these arguments in the dictionary `_described`."""
    return {name: lambda wrapper, name=name: wrapper._described.get(name) for name in names}


def plain_calls(template: TraceTemplate, *others: str) -> Callable[..., TraceTemplate | None]:
    """Selects the template, without these parameters, for plans that its reference covers; None for other plans."""
    described = dataclasses.replace(template, others=("kv_layout", *others))

    def choose(x: dict[str, Any]) -> TraceTemplate | None:
        return described if x.get("covered", True) and not x.get("logits_soft_cap") else None

    return dispatcher([described], choose)
