"""Trace templates of the page functions: references, inputs and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, samples, sized, tensors


def _paged(layout: str, part: str, dim: str) -> Tensor:
    tokens = ["page_size", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "page_size"]
    index = 0 if part == "k" else 1
    return Tensor(["num_pages", *tokens, dim], param="paged_kv_cache", tuple_idx=index)


def _write_rows(rows, caches, batch_indices, positions, kv_indices, kv_indptr):  # type: ignore[no-untyped-def]
    """caches: [pages, page_size, ...]; a position of a row is one of its request."""
    import torch

    real = (batch_indices >= 0).nonzero().flatten()
    position, page_size = positions[real].long(), caches[0].shape[1]
    page = kv_indices[kv_indptr[batch_indices[real].long()].long() + position // page_size].long()
    for cache, new in zip(caches, rows):  # as bytes, since fp8 has no index_put
        cache.view(torch.uint8)[page, position % page_size] = new[real].view(torch.uint8)
    return caches


def _append_reference(  # type: ignore[no-untyped-def]
    append_key, append_value, k_cache, v_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
):
    rows = (append_key, append_value)
    return _write_rows(rows, (k_cache, v_cache), batch_indices, positions, kv_indices, kv_indptr)


def _append_head_major_reference(  # type: ignore[no-untyped-def]
    append_key, append_value, k_cache, v_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
):
    rows, caches = (append_key, append_value), (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    _write_rows(rows, caches, batch_indices, positions, kv_indices, kv_indptr)
    return k_cache, v_cache


_TABLE = {
    **tensors(batch_indices="nnz", positions="nnz", kv_indices="num_indices", kv_indptr="batch_size_plus_1"),
    **tensors(kv_last_page_len="batch_size"),
}
_TABLE_AXES: dict[str, Var | Const] = {
    axis: Var() for axis in ("nnz", "num_pages", "num_indices", "batch_size_plus_1", "batch_size")
}


def _make_table(
    draw: Draw, batch_size: int, page_size: int, qo_len: int, kv_len: int | None
) -> tuple[dict[str, Any], int]:
    """A table of shuffled pages and the rows that are appended, at most qo_len a request; the number of pages.

    kv_len: length of every request. None: lengths differ, and the last row and two pages are of no request.
    """
    spare = 1 if kv_len is None else 0
    lengths = [b % 3 * page_size + 1 + (5 * b) % page_size if kv_len is None else kv_len for b in range(batch_size)]
    pages = [-(-n // page_size) for n in lengths]
    last = [n - (count - 1) * page_size for n, count in zip(lengths, pages)]
    appended = [min(qo_len, n) for n in lengths]
    batch = [b for b, n in enumerate(appended) for _ in range(n)]
    position = [n - count + i for n, count in zip(lengths, appended) for i in range(count)]
    total = sum(pages)
    table = {
        "batch_indices": draw.int32(batch + [-1] * spare),
        "positions": draw.int32(position + [0] * spare),
        "kv_indices": draw.permutation(total + 2 * spare)[:total].contiguous(),
        "kv_indptr": draw.offsets(pages),
        "kv_last_page_len": draw.int32(last),
    }
    return table, total + 2 * spare


def _make_append(layout: str) -> Callable[..., dict[str, Any]]:
    @sized(
        dtype="bfloat16", batch_size=4, page_size=5, qo_len=3, kv_len=None, num_kv_heads=3, head_dim=18, v_head_dim=10
    )
    def make(draw: Draw, s: Any) -> dict[str, Any]:
        table, pages = _make_table(draw, s.batch_size, s.page_size, s.qo_len, s.kv_len)
        nnz = len(table["positions"])
        slots = (s.page_size, s.num_kv_heads) if layout == "NHD" else (s.num_kv_heads, s.page_size)
        k, v = (draw.normal((nnz, s.num_kv_heads, dim), s.dtype) for dim in (s.head_dim, s.v_head_dim))
        caches = tuple(draw.rows(draw.normal((pages, *slots, dim), s.dtype)) for dim in (s.head_dim, s.v_head_dim))
        found = {"append_key": draw.rows(k), "append_value": draw.rows(v), "paged_kv_cache": caches}
        return {**found, "kv_layout": layout, **table}

    return make


def _append_work(arguments: Mapping[str, Any]) -> Work:
    """Reads and writes the new rows, and reads the tables."""
    rows = nbytes(*(arguments.get(name) for name in ("append_key", "append_value", "append_ckv", "append_kpe")))
    return Work(0, 2 * rows + nbytes(*(arguments[name] for name in _TABLE)))


_EXACT = dict.fromkeys(("k_cache", "v_cache", "ckv_cache", "kpe_cache"), (0.0, 0.0))  # bytes are copied
_SAMPLES = samples({"dtype": ("bfloat16", "float32", "float8_e4m3fn"), "page_size": (1, 5, 16)})


def _append_template(layout: str) -> TraceTemplate:
    caches = {f"{part}_cache": _paged(layout, part, dim) for part, dim in (("k", "head_dim"), ("v", "v_head_dim"))}
    return TraceTemplate(
        "append_paged_kv_cache",
        axes=_TABLE_AXES
        | {
            "num_kv_heads": Const(abbrev="kv"),
            "head_dim": Const(abbrev="d"),
            "v_head_dim": Const(abbrev=""),
            "page_size": Const(abbrev="ps"),
        },
        inputs={
            **tensors(append_key="nnz num_kv_heads head_dim", append_value="nnz num_kv_heads v_head_dim"),
            **caches,
            **_TABLE,
        },
        outputs={
            "k_cache": Tensor(
                caches["k_cache"].dim_names, param="paged_kv_cache", tuple_idx=0, dtype_from="append_key"
            ),
            "v_cache": Tensor(
                caches["v_cache"].dim_names, param="paged_kv_cache", tuple_idx=1, dtype_from="append_value"
            ),
        },
        reference=(_write_rows, _append_reference if layout == "NHD" else _append_head_major_reference),
        tags=(f"kv_layout:{layout}",),
        op="append_paged_kv_cache",
        make=_make_append(layout),
        samples=_SAMPLES,
        work=_append_work,
        tolerance=_EXACT,
        description=f"Writes new K and V rows into the pages of their requests, {layout} layout.",
    )


def append(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of the layout; None for caches without a page axis (page size 1)."""
    cache = arguments["paged_kv_cache"]
    axes = cache[0].ndim + 1 if isinstance(cache, tuple) else cache.ndim
    return _APPEND_TEMPLATES.get(arguments.get("kv_layout", "NHD")) if axes == 5 else None


_APPEND_TEMPLATES = {layout: _append_template(layout) for layout in ("NHD", "HND")}
append.templates = tuple(_APPEND_TEMPLATES.values())  # type: ignore[attr-defined]


def append_mla_reference(  # type: ignore[no-untyped-def]
    append_ckv, append_kpe, ckv_cache, kpe_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
):
    rows = (append_ckv, append_kpe)
    return _write_rows(rows, (ckv_cache, kpe_cache), batch_indices, positions, kv_indices, kv_indptr)


@sized(dtype="bfloat16", batch_size=4, page_size=5, qo_len=3, kv_len=None, head_dim_ckv=34, head_dim_kpe=6)
def _make_append_mla(draw: Draw, s: Any) -> dict[str, Any]:
    table, pages = _make_table(draw, s.batch_size, s.page_size, s.qo_len, s.kv_len)
    found: dict[str, Any] = {}
    for part, dim in (("ckv", s.head_dim_ckv), ("kpe", s.head_dim_kpe)):
        found[f"append_{part}"] = draw.rows(draw.normal((len(table["positions"]), dim), s.dtype))
        found[f"{part}_cache"] = draw.rows(draw.normal((pages, s.page_size, dim), s.dtype))
    return {**found, **table}


APPEND_MLA = TraceTemplate(
    "append_paged_mla_kv_cache",
    axes=_TABLE_AXES
    | {
        "head_dim_ckv": Const(abbrev="ckv"),
        "head_dim_kpe": Const(abbrev="kpe"),
        "page_size": Const(abbrev="ps"),
    },
    inputs={
        **tensors(append_ckv="nnz head_dim_ckv", append_kpe="nnz head_dim_kpe"),
        **tensors(ckv_cache="num_pages page_size head_dim_ckv", kpe_cache="num_pages page_size head_dim_kpe"),
        **_TABLE,
    },
    outputs={
        "ckv_cache": Tensor(["num_pages", "page_size", "head_dim_ckv"], param="ckv_cache", dtype_from="append_ckv"),
        "kpe_cache": Tensor(["num_pages", "page_size", "head_dim_kpe"], param="kpe_cache", dtype_from="append_kpe"),
    },
    reference=(_write_rows, append_mla_reference),
    op="append_paged_kv_cache",
    make=_make_append_mla,
    samples=_SAMPLES,
    work=_append_work,
    tolerance=_EXACT,
    description="Writes new compressed-KV and rope-key rows into the pages of their requests.",
)


def positions_reference(append_indptr, seq_lens, nnz):  # type: ignore[no-untyped-def]
    import itertools

    batch_indices, positions = append_indptr.new_full((nnz,), -1), append_indptr.new_zeros(nnz)
    bounds = append_indptr.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        batch_indices[begin:end] = b
        positions[begin:end] = seq_lens[b] - append_indptr.new_tensor(range(end - begin, 0, -1))[: nnz - begin]
    return batch_indices, positions


@sized(batch_size=5, nnz=12, qo_len=None, kv_len=100)
def _make_positions(draw: Draw, s: Any) -> dict[str, Any]:
    """Requests of qo_len rows and kv_len tokens, or of 0 to 3 rows; rows of no request behind them up to nnz."""
    counts = [b % 4 if s.qo_len is None else s.qo_len for b in range(s.batch_size)]
    lengths = draw.int32(counts) + draw.integers(0, 100, (s.batch_size,))
    if s.qo_len is not None:
        lengths.fill_(s.kv_len)
    return {"append_indptr": draw.offsets(counts), "seq_lens": lengths, "nnz": max(s.nnz, sum(counts))}


POSITIONS = TraceTemplate(
    "get_batch_indices_positions",
    axes={"nnz": Var(), "batch_size": Var(), "batch_size_plus_1": Var()},
    inputs={
        **tensors(append_indptr="batch_size_plus_1", seq_lens="batch_size"),
        "nnz": Scalar("int32"),
    },
    outputs={"batch_indices": Tensor(["nnz"], dtype="int32"), "positions": Tensor(["nnz"], dtype="int32")},
    reference=positions_reference,
    op="get_batch_indices_positions",
    make=_make_positions,
    samples=({}, {"batch_size": 1, "nnz": 1}, {"batch_size": 300, "nnz": 1000}),
    work=lambda arguments: Work(0, nbytes(*arguments.values()) + 8 * arguments["nnz"]),
    description="The request of each appended row and its position there; padding rows get request -1.",
)


def _seq_lens_reference(kv_indptr, kv_last_page_len, page_size):  # type: ignore[no-untyped-def]
    import torch

    pages, last, largest = kv_indptr.tolist(), kv_last_page_len.tolist(), torch.iinfo(kv_last_page_len.dtype).max
    full = [min(max(pages[b + 1] - pages[b] - 1, 0) * page_size, largest) for b in range(len(last))]
    lengths = [min(tokens + rest, largest) for tokens, rest in zip(full, last)]
    return kv_last_page_len.new_tensor(lengths)


def _make_seq_lens(draw: Draw, *, batch_size: int = 5, page_size: int = 7, kv_len: int | None = None) -> dict[str, Any]:
    """Requests of kv_len tokens, or of 0 to 3 pages."""
    pages = [b % 4 if kv_len is None else -(-kv_len // page_size) for b in range(batch_size)]
    last = [1 + b % page_size if kv_len is None else (kv_len - 1) % page_size + 1 for b in range(batch_size)]
    last = [tokens if count else 0 for tokens, count in zip(last, pages)]
    return {"kv_indptr": draw.offsets(pages), "kv_last_page_len": draw.int32(last), "page_size": page_size}


SEQ_LENS = TraceTemplate(
    "get_seq_lens",
    axes={"batch_size": Var(), "batch_size_plus_1": Var()},
    inputs={
        **tensors(kv_indptr="batch_size_plus_1", kv_last_page_len="batch_size"),
        "page_size": Scalar("int32"),
    },
    outputs={"seq_lens": Tensor(["batch_size"], dtype_from="kv_last_page_len")},
    reference=_seq_lens_reference,
    op="get_seq_lens",
    make=_make_seq_lens,
    samples=({}, {"batch_size": 1}, {"batch_size": 300, "page_size": 16}),
    work=lambda arguments: Work(0, nbytes(*arguments.values()) + nbytes(arguments["kv_last_page_len"])),
    description="The number of tokens of each request of a page table.",
)
