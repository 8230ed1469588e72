"""Descriptions of the attention wrappers, second half: inputs from sizes, the plan for them, and the work of a run.

A length is one number for all requests, or a list with one for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.template import with_sizes
from fi_core.observe.trace import TraceTemplate, Work
from fi_core.utils import canonicalize_torch_dtype, ceil_div

if TYPE_CHECKING:
    import torch

    Lengths = int | Sequence[int]
    Arguments = Mapping[str, Any]

_WORKSPACE = 128 << 20
CASCADE_LEVELS = 2  # that `make_cascade` makes: a shared prefix and the requests' own keys


# Inputs: the arguments of `run`, of `plan` and of the constructor by name.
def lengths_of(lengths: Lengths, batch_size: int) -> list[int]:
    return [lengths] * batch_size if isinstance(lengths, int) else list(lengths)


def _settings(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def query_of(draw: Draw, rows: int, num_qo_heads: int, head_dim: int, dtype: Any) -> torch.Tensor:
    return draw.rows(draw.normal((rows, num_qo_heads, head_dim), canonicalize_torch_dtype(dtype)))


def pages_of(draw: Draw, kv_lens: Sequence[int], page_size: int) -> dict[str, Any]:
    """The page table of requests, with pages in random order."""
    pages = [ceil_div(n, page_size) for n in kv_lens]
    return {
        "kv_indptr": draw.offsets(pages),
        "kv_indices": draw.permutation(sum(pages)),
        "kv_last_page_len": draw.int32([n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages)]),
    }


def cache_of(
    draw: Draw, tables: Sequence[Arguments], page_size: int, heads: int, dims: Sequence[int], dtype: Any, layout: str
) -> tuple[torch.Tensor, ...]:
    """K and V of the pages of all tables, which differ; nasty: the tokens behind a request are NaN."""
    pages = sum(len(table["kv_indices"]) for table in tables)
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    cache = tuple(draw.rows(draw.pages((pages, *inner, dim), canonicalize_torch_dtype(dtype))) for dim in dims)
    for table in tables if draw.nasty else ():
        ends, last = table["kv_indptr"][1:].tolist(), table["kv_last_page_len"].tolist()
        for end, used in zip(ends, last):
            for x in cache if used else ():
                page = x[int(table["kv_indices"][end - 1])]
                draw.poison(page[used:] if layout == "NHD" else page[:, used:])
    return cache


def _make(
    draw: Draw,
    *,
    kind: str,
    with_lse: bool,
    kv_layout: str,
    batch_size: int = 4,
    qo_len: Lengths = 1024,
    q_len_per_req: int = 1,
    kv_len: Lengths | None = None,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    head_dim_vo: int | None = None,
    page_size: int = 16,
    causal: bool = True,
    dtype: Any = "bfloat16",
    kv_dtype: Any = None,
    o_dtype: Any = None,
    use_tensor_cores: bool = True,
    backend: str = "auto",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    pos_encoding_mode: str | None = None,
    sm_scale: float | None = None,
    disable_split_kv: bool | None = None,
    sinks: bool = False,
) -> dict[str, Any]:
    """The last tokens of requests of these lengths; kv_len: default qo_len."""
    own: dict[str, Any] = {"causal": causal}
    if kind == "decode":
        qo_len, own = q_len_per_req, {"q_len_per_req": q_len_per_req, "use_tensor_cores": use_tensor_cores}
    kv_lens = lengths_of(qo_len if kv_len is None else kv_len, batch_size)
    qo_lens = lengths_of(qo_len, len(kv_lens))
    dims, kv_dtype = (head_dim, head_dim_vo or head_dim), canonicalize_torch_dtype(kv_dtype or dtype)
    if kind != "decode":
        own["qo_indptr"] = draw.offsets(qo_lens)
    if kind == "ragged":
        rows = (sum(kv_lens), num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, sum(kv_lens))
        keys: dict[str, Any] = {n: draw.rows(draw.normal((*rows, dim), kv_dtype)) for n, dim in zip("kv", dims)}
        keys["kv_indptr"] = draw.offsets(kv_lens)
    else:
        keys = pages_of(draw, kv_lens, page_size)
        keys["paged_kv_cache"] = cache_of(draw, [keys], page_size, num_kv_heads, dims, kv_dtype, kv_layout)
    return _settings(
        q=query_of(draw, sum(qo_lens), num_qo_heads, head_dim, dtype), **keys, **own,
        sinks=draw.normal((num_qo_heads,), "float32") if sinks else None,
        kv_layout=kv_layout, return_lse=with_lse, backend=backend, window_left=window_left,
        logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale, disable_split_kv=disable_split_kv,
        o_data_type=canonicalize_torch_dtype(o_dtype or dtype),
    )  # fmt: skip


_FIXED = ("kind", "with_lse")


def make_decode(layout: str, with_lse: bool) -> Callable[..., dict[str, Any]]:
    usual = {"kind": "decode", "with_lse": with_lse, "kv_layout": layout, "batch_size": 64, "kv_len": 4096}
    return with_sizes(_make, (*_FIXED, "qo_len", "causal"), **usual)


def make_paged(layout: str, with_lse: bool) -> Callable[..., dict[str, Any]]:
    without = (*_FIXED, "q_len_per_req", "use_tensor_cores")
    return with_sizes(_make, without, kind="paged", with_lse=with_lse, kv_layout=layout)


def make_ragged(layout: str, with_lse: bool) -> Callable[..., dict[str, Any]]:
    without = (*_FIXED, "q_len_per_req", "use_tensor_cores", "page_size", "sinks")
    return with_sizes(_make, without, kind="ragged", with_lse=with_lse, kv_layout=layout)


def make_cascade(layout: str) -> Callable[..., dict[str, Any]]:
    def make(
        draw: Draw,
        *,
        batch_size: int = 16,
        shared_kv_len: int = 8192,
        kv_len: Lengths = 512,
        qo_len: Lengths = 1,
        num_qo_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        page_size: int = 16,
        causal: bool = False,
        dtype: Any = "bfloat16",
        kv_layout: str = layout,
        logits_soft_cap: float | None = None,
    ) -> dict[str, Any]:
        """Requests with keys of their own behind one shared prefix."""
        kv_lens = lengths_of(kv_len, batch_size)
        qo_lens = lengths_of(qo_len, len(kv_lens))
        tables = [pages_of(draw, lens, page_size) for lens in ([shared_kv_len], kv_lens)]
        tables[1]["kv_indices"] += len(tables[0]["kv_indices"])
        return _settings(
            q=query_of(draw, sum(qo_lens), num_qo_heads, head_dim, dtype),
            paged_kv_cache=cache_of(draw, tables, page_size, num_kv_heads, (head_dim, head_dim), dtype, kv_layout),
            qo_indptr_arr=[draw.offsets([sum(qo_lens)]), draw.offsets(qo_lens)],
            paged_kv_indptr_arr=[table["kv_indptr"] for table in tables],
            paged_kv_indices_arr=[table["kv_indices"] for table in tables],
            paged_kv_last_page_len=[table["kv_last_page_len"] for table in tables],
            causal=causal, kv_layout=kv_layout, sm_scale=head_dim**-0.5, window_left=-1,
            logits_soft_cap=logits_soft_cap,
        )  # fmt: skip

    return make


# The plan: makes a wrapper and plans it. Page tables are on the host, as engines have them.
_OPTIONS = ("pos_encoding_mode", "sm_scale", "window_left", "logits_soft_cap", "rope_scale", "rope_theta",
            "o_data_type", "disable_split_kv")  # fmt: skip


def workspace_of(q: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)


def _options(x: Arguments, keys: torch.Tensor) -> dict[str, Any]:
    found = _settings(**{name: x.get(name) for name in _OPTIONS})
    return {**found, "q_data_type": x["q"].dtype, "kv_data_type": keys.dtype}


def _page_shape(x: Arguments) -> tuple[int, int]:
    """(page_size, num_kv_heads)"""
    _, *inner, _ = x["paged_kv_cache"][0].shape
    return tuple(inner) if x["kv_layout"] == "NHD" else (inner[1], inner[0])


def plan_decode(wrapper: Callable[..., Any], x: Arguments) -> Any:
    page_size, kv_heads = _page_shape(x)
    planned = wrapper(
        workspace_of(x["q"]), x["kv_layout"], use_tensor_cores=x["use_tensor_cores"], backend=x["backend"]
    )
    several = {"q_len_per_req": x["q_len_per_req"]} if x["q_len_per_req"] > 1 else {}
    planned.plan(
        x["kv_indptr"].cpu(), x["kv_indices"], x["kv_last_page_len"].cpu(), x["q"].shape[1], kv_heads,
        x["q"].shape[2], page_size, **_options(x, x["paged_kv_cache"][0]), **several,
    )  # fmt: skip
    return planned


def plan_paged(wrapper: Callable[..., Any], x: Arguments) -> Any:
    page_size, kv_heads = _page_shape(x)
    planned, (k, v) = wrapper(workspace_of(x["q"]), x["kv_layout"], backend=x["backend"]), x["paged_kv_cache"]
    planned.plan(
        x["qo_indptr"].cpu(), x["kv_indptr"].cpu(), x["kv_indices"], x["kv_last_page_len"].cpu(), x["q"].shape[1],
        kv_heads, x["q"].shape[2], page_size, head_dim_vo=v.shape[-1], causal=x["causal"], **_options(x, k),
    )  # fmt: skip
    return planned


def plan_ragged(wrapper: Callable[..., Any], x: Arguments) -> Any:
    planned = wrapper(workspace_of(x["q"]), x["kv_layout"], backend=x["backend"])
    kv_heads = x["k"].shape[1 if x["kv_layout"] == "NHD" else 0]
    planned.plan(
        x["qo_indptr"].cpu(), x["kv_indptr"].cpu(), x["q"].shape[1], kv_heads, x["q"].shape[2],
        head_dim_vo=x["v"].shape[-1], causal=x["causal"], **_options(x, x["k"]),
    )  # fmt: skip
    return planned


def plan_cascade(wrapper: Callable[..., Any], x: Arguments) -> Any:
    page_size, kv_heads = _page_shape(x)
    planned = wrapper(len(x["qo_indptr_arr"]), workspace_of(x["q"]), x["kv_layout"])
    bounds = ([table.cpu() for table in x[name]] for name in ("qo_indptr_arr", "paged_kv_indptr_arr"))
    last = [table.cpu() for table in x["paged_kv_last_page_len"]]
    planned.plan(
        *bounds, x["paged_kv_indices_arr"], last, x["q"].shape[1], kv_heads, x["q"].shape[2], page_size,
        causal=x["causal"], **_options(x, x["paged_kv_cache"][0]),
    )  # fmt: skip
    return planned


# The work, as FlashInfer's benchmark counts it.
def _kv_lens(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> list[int]:
    pairs = zip(indptr.diff().tolist(), last_page_len.tolist())
    return [(pages - 1) * page_size + last if pages else 0 for pages, last in pairs]


def lengths(x: Arguments) -> list[tuple[list[int], list[int], bool]]:
    """(qo_lens, kv_lens, causal) of a batch; of a cascade those of each level."""
    if "k" in x:
        return [(x["qo_indptr"].diff().tolist(), x["kv_indptr"].diff().tolist(), x["causal"])]
    page_size, _ = _page_shape(x)
    if "qo_indptr_arr" in x:
        tables = zip(x["qo_indptr_arr"], x["paged_kv_indptr_arr"], x["paged_kv_last_page_len"])
        found = [(qo.diff().tolist(), _kv_lens(kv, last, page_size), False) for qo, kv, last in tables]
        return [*found[:-1], (*found[-1][:2], x["causal"])]
    kv_lens = _kv_lens(x["kv_indptr"], x["kv_last_page_len"], page_size)
    if "qo_indptr" in x:
        return [(x["qo_indptr"].diff().tolist(), kv_lens, x["causal"])]
    q_len = x["q"].shape[0] // len(kv_lens)
    return [([q_len] * len(kv_lens), kv_lens, q_len > 1)]


def _pairs(x: Arguments) -> Iterator[int]:
    """Twice the pairs of a query and a key that it sees, of each request; half a pair on the diagonal."""
    for qo_lens, kv_lens, causal in lengths(x):
        for qo_len, kv_len in zip(qo_lens, kv_lens):
            seeing = min(qo_len, kv_len)
            yield seeing * (2 * kv_len - seeing) if causal else 2 * qo_len * kv_len


def work(x: Arguments) -> Work:
    """Each token of the requests, q and the results once; two operations for each pair, head and dimension."""
    q, (k, v) = x["q"], (x["k"], x["v"]) if "k" in x else x["paged_kv_cache"]
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[-2 if x["kv_layout"] == "NHD" else -3]
    tokens = sum(sum(kv_lens) for _, kv_lens, _ in lengths(x))
    keys = tokens * kv_heads * (head_dim + v.shape[-1]) * k.element_size()
    written = rows * heads * (v.shape[-1] * x.get("o_data_type", q.dtype).itemsize + 4 * bool(x.get("return_lse")))
    return Work(sum(_pairs(x)) * heads * (head_dim + v.shape[-1]), nbytes(q) + keys + written)


Part = tuple[Any, Any, list[tuple[int, int]], bool]  # q, k, (qo_len, kv_len) of each request, causal


def attention_work(parts: Sequence[Part], with_lse: bool = False) -> Work:
    """Two operations for each pair, head and dimension; q, the tokens of k and v, and the output once."""
    operations = total = 0
    for q, k, requests, causal in parts:
        for qo_len, kv_len in requests:
            seeing = min(qo_len, kv_len)
            pairs = seeing * (2 * kv_len - seeing) if causal else 2 * qo_len * kv_len
            operations += pairs * q.shape[-2] * 2 * q.shape[-1]
            total += 2 * kv_len * k.shape[-2] * k.shape[-1] * k.element_size()
        total += 2 * nbytes(q) + 4 * with_lse * q.shape[0] * q.shape[1]
    return Work(operations, total)


def kept(*names: str) -> dict[str, Any]:
    """`Planned` of a wrapper whose plan keeps these arguments in the dictionary `_described`."""
    return {name: lambda wrapper, name=name: wrapper._described.get(name) for name in names}


def plain_calls(template: TraceTemplate, *others: str) -> Callable[..., TraceTemplate | None]:
    """Selects the template, without these parameters, for plans that its reference covers; None for other plans."""
    described = dataclasses.replace(template, others=("kv_layout", *others))

    def select(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        plain = arguments.get("covered", True) and not arguments.get("logits_soft_cap")
        return described if plain else None

    select.templates = (described,)  # type: ignore[attr-defined]
    return select
