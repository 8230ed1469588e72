"""Trace templates of the wrappers with block-sparse patterns, a shared prefix, or ranges in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fi_core.attention.reference import attend_request, gather_pages
from fi_core.attention.wrappers.inputs import (
    attention_work,
    cache_of,
    kept,
    lengths_of,
    pages_of,
    plain_calls,
    query_of,
    workspace_of,
)
from fi_core.observe.draw import Draw
from fi_core.observe.trace import Const, Planned, Scalar, Tensor, TraceTemplate, Var, Work
from fi_core.utils import canonicalize_torch_dtype, ceil_div

Lengths = int | Sequence[int]
_HEADS: dict[str, Var | Const] = {
    "num_qo_heads": Const(abbrev="h"), "num_kv_heads": Const(abbrev="kv"), "head_dim": Const(abbrev="d"),
}  # fmt: skip
_PAGED: dict[str, Var | Const] = {
    "num_pages": Var(), "num_kv_indices": Var(), "len_indptr": Var(), "batch_size": Var(), **_HEADS,
    "page_size": Const(abbrev="ps"),
}  # fmt: skip
_SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
_TOLERANCE = {"float16": (2e-3, 2e-3)}
_PREFILL, _DECODE = ("batch_prefill", "prefill_plan"), ("batch_decode", "decode_plan")


def _keys(draw: Draw, tokens: int, heads: int, dim: int, dtype: Any) -> Any:
    return draw.rows(draw.normal((tokens, heads, dim), canonicalize_torch_dtype(dtype)))


# A pattern of blocks for all heads.
def _blocks_reference(q, k, v, indptr, indices, R, C, sm_scale, causal=False):  # type: ignore[no-untyped-def]
    import torch

    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row in range(len(indptr) - 1):
        columns = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        keys = (columns[:, None] * C + torch.arange(C, device=columns.device)).flatten().to(q.device)
        rows = slice(row * R, min(len(q), (row + 1) * R))
        out[rows], _ = attend_request(q[rows], k[keys], v[keys], sm_scale, causal)
    return out


def _make_blocks(
    draw: Draw, *, qo_len: int = 8192, kv_len: int = 8192, block_rows: int = 128, block_columns: int = 128,
    density: float = 0.5, num_qo_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128, dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Each row of blocks selects a share `density` of the columns, at random."""
    import torch

    block_columns = min(block_columns, kv_len)
    columns = kv_len // block_columns
    count = min(columns, max(1, round(columns * density)))
    counts = [count] * ceil_div(qo_len, block_rows)
    counts[-1] -= draw.nasty and count > 1
    chosen = [draw.permutation(columns)[:n].sort().values for n in counts]
    return {
        "q": query_of(draw, qo_len, num_qo_heads, head_dim, dtype),
        **{name: _keys(draw, kv_len, num_kv_heads, head_dim, dtype) for name in "kv"},
        "indptr": draw.offsets(counts), "indices": torch.cat(chosen), "R": block_rows, "C": block_columns,
        "sm_scale": head_dim**-0.5,
    }  # fmt: skip


def _plan_blocks(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    planned, dtype = wrapper(workspace_of(x["q"])), x["q"].dtype
    planned.plan(
        x["indptr"], x["indices"], len(x["q"]), len(x["k"]), x["R"], x["C"], x["q"].shape[1], x["k"].shape[1],
        x["q"].shape[2], q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip
    return planned


def _work_blocks(x: Mapping[str, Any]) -> Work:
    rows = [min(x["R"], len(x["q"]) - i * x["R"]) for i in range(len(x["indptr"]) - 1)]
    pairs = sum(qo_len * n * x["C"] for qo_len, n in zip(rows, x["indptr"].diff().tolist()))
    all_keys = attention_work([(x["q"], x["k"], [(0, len(x["k"]))], False)])
    return Work(4 * pairs * x["q"].shape[1] * x["q"].shape[2], all_keys.bytes)


BLOCKS = TraceTemplate(
    "gqa_block_sparse",
    axes={"qo_len": Var(), "kv_len": Var(), "len_indptr": Var(), "nnz": Var(), **_HEADS},
    inputs={
        "q": Tensor(["qo_len", "num_qo_heads", "head_dim"]),
        "k": Tensor(["kv_len", "num_kv_heads", "head_dim"]),
        "v": Tensor(["kv_len", "num_kv_heads", "head_dim"]),
        "indptr": Tensor(["len_indptr"], dtype="int32"),
        "indices": Tensor(["nnz"], dtype="int32"),
        "R": Scalar("int32", description="Rows of a block."),
        "C": Scalar("int32", description="Columns of a block."),
        "sm_scale": Scalar(),
        "causal": Scalar("bool", optional=True),
    },
    outputs={"output": Tensor(["qo_len", "num_qo_heads", "head_dim"], dtype_from_scalar="o_data_type", dtype_from="q")},
    reference=(attend_request, _blocks_reference),
    op=_PREFILL,
    make=_make_blocks,
    plan=_plan_blocks,
    samples=(
        {**_SMALL, "qo_len": 70, "kv_len": 96, "block_rows": 16, "block_columns": 8},
        {**_SMALL, "qo_len": 40, "kv_len": 64, "block_rows": 8, "block_columns": 16, "density": 1.0},
    ),
    work=_work_blocks,
    tolerance=_TOLERANCE,
    description="Attention of rows of blocks over the columns of blocks that each of them selects.",
)


# A pattern of blocks for each kv head.
def _head_blocks_reference(q, k, v, block_mask_map, block_row_sz, block_col_sz, sm_scale, causal=False):  # type: ignore[no-untyped-def]
    import torch

    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[0] // k.shape[0]
    for head in range(k.shape[0]):
        columns = torch.repeat_interleave(torch.arange(block_col_sz.shape[1]), block_col_sz[head].long().cpu())
        first = 0
        for row, size in enumerate(block_row_sz[head].tolist()):
            keys = block_mask_map[head, row].cpu()[columns].nonzero().flatten().to(q.device)
            heads, rows = slice(head * group, (head + 1) * group), slice(first, first + size)
            part, _ = attend_request(
                q[heads, rows].transpose(0, 1), k[head, keys][:, None], v[head, keys][:, None], sm_scale, causal
            )
            out[heads, rows] = part.transpose(0, 1)
            first += size
    return out


def _make_head_blocks(
    draw: Draw, *, qo_len: int = 8192, kv_len: int = 8192, block_rows: int = 128, block_columns: int = 128,
    density: float = 0.5, num_qo_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128, dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Each kv head selects a share `density` of its blocks, at random; the last blocks may be smaller."""

    def sizes(tokens: int, block: int) -> Any:
        row = [block] * (tokens // block) + ([tokens % block] if tokens % block else [])
        return draw.int32(row).repeat(num_kv_heads, 1)

    rows, columns = sizes(qo_len, block_rows), sizes(kv_len, block_columns)
    grid = (num_kv_heads, rows.shape[1], columns.shape[1])
    keys = [_keys(draw, num_kv_heads, kv_len, head_dim, dtype) for _ in range(2)]
    return {
        "q": query_of(draw, num_qo_heads, qo_len, head_dim, dtype), "k": keys[0], "v": keys[1],
        "block_mask_map": draw.integers(0, 1000, grid) < density * 1000, "block_row_sz": rows,
        "block_col_sz": columns, "sm_scale": head_dim**-0.5,
    }  # fmt: skip


def _plan_head_blocks(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    planned, dtype = wrapper(workspace_of(x["q"])), x["q"].dtype
    planned.plan(
        x["block_mask_map"], x["block_row_sz"], x["block_col_sz"], len(x["q"]), len(x["k"]), x["q"].shape[2],
        q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return planned


def _work_head_blocks(x: Mapping[str, Any]) -> Work:
    areas = x["block_row_sz"].long()[:, :, None] * x["block_col_sz"].long()[:, None]
    pairs = int((areas * x["block_mask_map"]).sum()) * (len(x["q"]) // len(x["k"]))
    size = x["q"].element_size() * x["q"].shape[2]
    return Work(
        4 * pairs * x["q"].shape[2], 2 * size * (x["q"].shape[0] * x["q"].shape[1] + len(x["k"]) * x["k"].shape[1])
    )


HEAD_BLOCKS = TraceTemplate(
    "gqa_variable_block_sparse",
    axes={"qo_len": Var(), "kv_len": Var(), "rows": Var(), "columns": Var(), **_HEADS},
    inputs={
        "q": Tensor(["num_qo_heads", "qo_len", "head_dim"]),
        "k": Tensor(["num_kv_heads", "kv_len", "head_dim"]),
        "v": Tensor(["num_kv_heads", "kv_len", "head_dim"]),
        "block_mask_map": Tensor(["num_kv_heads", "rows", "columns"], dtype="bool"),
        "block_row_sz": Tensor(["num_kv_heads", "rows"], dtype="int32"),
        "block_col_sz": Tensor(["num_kv_heads", "columns"], dtype="int32"),
        "sm_scale": Scalar(),
        "causal": Scalar("bool", optional=True),
    },
    outputs={"output": Tensor(["num_qo_heads", "qo_len", "head_dim"], dtype_from="q")},
    reference=(attend_request, _head_blocks_reference),
    op=_PREFILL,
    make=_make_head_blocks,
    plan=_plan_head_blocks,
    samples=({**_SMALL, "qo_len": 70, "kv_len": 100, "block_rows": 16, "block_columns": 24},),
    work=_work_head_blocks,
    tolerance=_TOLERANCE,
    description="Attention of rows of blocks over the columns of blocks that each kv head selects for them.",
)


# A prefix of all requests.
def _prefix_reference(  # type: ignore[no-untyped-def]
    q, k_shared, v_shared, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, qo_indptr=None,
    causal=False,
):  # fmt: skip
    import torch

    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for request in range(len(kv_last_page_len)):
        begin, end = (request, request + 1) if qo_indptr is None else qo_indptr[request : request + 2].tolist()
        k, v = (
            gather_pages(cache, kv_indptr, kv_indices, kv_last_page_len, None, request, "NHD")
            for cache in (k_cache, v_cache)
        )
        k, v = torch.cat((k_shared, k)), torch.cat((v_shared, v))
        out[begin:end], _ = attend_request(q[begin:end], k, v, sm_scale, causal)
    return out


def _make_prefix(
    draw: Draw, *, batch_size: int = 64, shared_kv_len: int = 8192, kv_len: Lengths = 512, qo_len: Lengths = 256,
    num_qo_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, causal: bool = True,
    dtype: Any = "bfloat16", decode: bool = False,
) -> dict[str, Any]:  # fmt: skip
    kv_lens = lengths_of(kv_len, batch_size)
    qo_lens = [1] * len(kv_lens) if decode else lengths_of(qo_len, len(kv_lens))
    table = pages_of(draw, kv_lens, page_size)
    shared = [_keys(draw, shared_kv_len, num_kv_heads, head_dim, dtype) for _ in range(2)]
    own = {} if decode else {"qo_indptr": draw.offsets(qo_lens), "causal": causal}
    return {
        "q": query_of(draw, sum(qo_lens), num_qo_heads, head_dim, dtype),
        "k_shared": shared[0], "v_shared": shared[1],
        "unique_kv_cache": cache_of(draw, [table], page_size, num_kv_heads, (head_dim, head_dim), dtype, "NHD"),
        **table, "sm_scale": head_dim**-0.5, **own,
    }  # fmt: skip


def _make_decode_prefix(
    draw: Draw, *, batch_size: int = 64, shared_kv_len: int = 8192, kv_len: Lengths = 512, num_qo_heads: int = 32,
    num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Decode requests with keys of their own behind one prefix."""
    sizes = {name: value for name, value in locals().items() if name != "draw"}
    return _make_prefix(draw, **sizes, decode=True)


def _make_prefill_prefix(
    draw: Draw, *, batch_size: int = 16, shared_kv_len: int = 8192, kv_len: Lengths = 512, qo_len: Lengths = 512,
    num_qo_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, causal: bool = True,
    dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """The last tokens of requests with keys of their own behind one prefix."""
    sizes = {name: value for name, value in locals().items() if name != "draw"}
    return _make_prefix(draw, **sizes)


def _plan_prefix(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    _, page_size, kv_heads, dim = x["unique_kv_cache"][0].shape
    planned = wrapper(workspace_of(x["q"]))
    rows = () if "qo_indptr" not in x else (x["qo_indptr"],)
    planned.plan(
        *rows, x["kv_indptr"], x["kv_indices"], x["kv_last_page_len"], x["q"].shape[1], kv_heads, dim, page_size,
        x["q"].dtype,
    )  # fmt: skip
    return planned


def _work_prefix(x: Mapping[str, Any]) -> Work:
    size, pages = x["unique_kv_cache"][0].shape[1], x["kv_indptr"].diff().tolist()
    kv_lens = [(n - 1) * size + last if n else 0 for n, last in zip(pages, x["kv_last_page_len"].tolist())]
    qo_lens = x["qo_indptr"].diff().tolist() if "qo_indptr" in x else [1] * len(kv_lens)
    own = attention_work([(x["q"], x["unique_kv_cache"][0], list(zip(qo_lens, kv_lens)), bool(x.get("causal")))])
    shared = attention_work([(x["q"][:0], x["k_shared"], [(sum(qo_lens), len(x["k_shared"]))], False)])
    return Work(own.flops + shared.flops, own.bytes + shared.bytes)


def _prefix(kind: str, make: Callable[..., dict[str, Any]], samples: Sequence[Mapping[str, Any]]) -> TraceTemplate:
    prefill = kind == "prefill"
    return TraceTemplate(
        f"gqa_shared_prefix_{kind}",
        axes={"total_q": Var(), "num_shared": Var(), **_PAGED},
        inputs={
            "q": Tensor(["total_q", "num_qo_heads", "head_dim"]),
            "k_shared": Tensor(["num_shared", "num_kv_heads", "head_dim"]),
            "v_shared": Tensor(["num_shared", "num_kv_heads", "head_dim"]),
            **_caches("unique_kv_cache"),
            **({"qo_indptr": Tensor(["len_indptr"], dtype="int32")} if prefill else {}),
            **_TABLE,
            "sm_scale": Scalar(),
            **({"causal": Scalar("bool", optional=True)} if prefill else {}),
        },
        outputs={"output": Tensor(["total_q", "num_qo_heads", "head_dim"], dtype_from="q")},
        reference=(attend_request, gather_pages, _prefix_reference),
        op=(*(_PREFILL if prefill else _DECODE), "merge_state", "single_attention"),
        make=make,
        plan=_plan_prefix,
        samples=samples,
        work=_work_prefix,
        tolerance=_TOLERANCE,
        description="Attention over a prefix that all requests share, and over the own keys of each.",
    )


def _caches(param: str) -> dict[str, Tensor]:
    shape = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
    return {name: Tensor(shape, param=param, tuple_idx=i) for i, name in enumerate(("k_cache", "v_cache"))}


_TABLE: dict[str, Tensor | Scalar] = {
    "kv_indptr": Tensor(["len_indptr"], dtype="int32"),
    "kv_indices": Tensor(["num_kv_indices"], dtype="int32"),
    "kv_last_page_len": Tensor(["batch_size"], dtype="int32"),
}
DECODE_PREFIX = _prefix("decode", _make_decode_prefix, ({**_SMALL, "shared_kv_len": 37, "kv_len": (9, 1, 16)},))
PREFILL_PREFIX = _prefix(
    "prefill", _make_prefill_prefix, ({**_SMALL, "shared_kv_len": 20, "kv_len": (9, 4), "qo_len": (3, 4)},)
)


# Ranges in both directions.
def _ranges_reference(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, bidirectional_ranges, sm_scale
):
    import torch

    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for request in range(len(kv_last_page_len)):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        k, v = (
            gather_pages(cache, kv_indptr, kv_indices, kv_last_page_len, None, request, "NHD")
            for cache in (k_cache, v_cache)
        )
        key, ranges = torch.arange(len(k), device=q.device), bidirectional_ranges[rows].long()
        position = torch.arange(len(ranges), device=q.device)[:, None] + len(k) - len(ranges)
        seen = (key <= position) | ((key >= ranges[:, :1]) & (key <= ranges[:, 1:]))
        out[rows], _ = attend_request(q[rows], k, v, sm_scale, custom_mask=seen)
    return out


def _make_ranges(
    draw: Draw, *, batch_size: int = 4, qo_len: Lengths = 2048, range_len: int = 256, num_qo_heads: int = 32,
    num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Prompts in which every second run of range_len tokens is an image, whose tokens see each other."""
    qo_lens = lengths_of(qo_len, batch_size)
    table = pages_of(draw, qo_lens, page_size)
    ranges: list[int] = []
    for n in qo_lens:
        for i in range(n):
            begin = i - i % range_len
            ranges += [begin, min(begin + range_len, n) - 1] if i // range_len % 2 else [-1, -1]
    return {
        "q": query_of(draw, sum(qo_lens), num_qo_heads, head_dim, dtype),
        "paged_kv_cache": cache_of(draw, [table], page_size, num_kv_heads, (head_dim, head_dim), dtype, "NHD"),
        "qo_indptr": draw.offsets(qo_lens), **table, "bidirectional_ranges": draw.int32(ranges).view(-1, 2),
        "sm_scale": head_dim**-0.5,
    }  # fmt: skip


def _plan_ranges(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    _, page_size, kv_heads, dim = x["paged_kv_cache"][0].shape
    planned, dtype = wrapper(workspace_of(x["q"])), x["q"].dtype
    planned.plan(
        x["qo_indptr"], x["kv_indptr"], x["kv_indices"], x["kv_last_page_len"], x["q"].shape[1], kv_heads, dim,
        page_size, sm_scale=x["sm_scale"], q_data_type=dtype,
    )  # fmt: skip
    return planned


def _work_ranges(x: Mapping[str, Any]) -> Work:
    """As causal attention: the keys behind a row in its range are few."""
    return attention_work([(x["q"], x["paged_kv_cache"][0], [(n, n) for n in x["qo_indptr"].diff().tolist()], True)])


RANGES = TraceTemplate(
    "gqa_paged_bidirectional_ranges",
    axes={"total_q": Var(), "two": Var(), **_PAGED},
    inputs={
        "q": Tensor(["total_q", "num_qo_heads", "head_dim"]),
        **_caches("paged_kv_cache"),
        "qo_indptr": Tensor(["len_indptr"], dtype="int32"),
        **_TABLE,
        "bidirectional_ranges": Tensor(["total_q", "two"], dtype="int32"),
        "sm_scale": Scalar(),
    },
    outputs={"output": Tensor(["total_q", "num_qo_heads", "head_dim"], dtype_from="q")},
    reference=(attend_request, gather_pages, _ranges_reference),
    op=_PREFILL,
    make=_make_ranges,
    plan=_plan_ranges,
    samples=({**_SMALL, "qo_len": (40, 3), "range_len": 8},),
    work=_work_ranges,
    tolerance=_TOLERANCE,
    description="Causal attention whose rows also attend to a range of keys around them.",
)

blocks = plain_calls(BLOCKS, "scale_q", "scale_k", "scale_v", "return_lse")
head_blocks = plain_calls(HEAD_BLOCKS, "return_lse")
decode_prefix = plain_calls(DECODE_PREFIX)
prefill_prefix = plain_calls(PREFILL_PREFIX)
ranges = plain_calls(RANGES, "v_scale", "kv_cache_sf", "return_lse")
PLANNED_BLOCKS: Planned = kept("indptr", "indices", "R", "C", "sm_scale", "causal", "o_data_type", "covered")
PLANNED_HEAD_BLOCKS: Planned = kept("block_mask_map", "block_row_sz", "block_col_sz", "sm_scale", "causal", "covered")
PLANNED_PREFIX: Planned = kept("kv_indptr", "kv_indices", "kv_last_page_len", "sm_scale", "kv_layout")
PLANNED_PREFILL_PREFIX: Planned = {**PLANNED_PREFIX, **kept("qo_indptr")}
PLANNED_RANGES: Planned = kept(
    "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "sm_scale", "kv_layout", "covered"
)
