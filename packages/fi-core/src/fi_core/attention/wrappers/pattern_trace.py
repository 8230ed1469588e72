"""Trace templates of the wrappers with block-sparse patterns, a shared prefix, or ranges in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fi_core.attention.reference import attend_pages, attend_request
from fi_core.attention.wrappers import inputs, trace
from fi_core.attention.wrappers.inputs import HEADS, PAGED, attention_work, kept, lengths_of, normal, paged, plain_calls
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Planned, Scalar, Tensor, TraceTemplate, Work, sized, tensors
from fi_core.runtime.lazy import torch
from fi_core.utils import ceil_div

_SCORES: dict[str, Tensor | Scalar] = {"sm_scale": Scalar(), "causal": Scalar("bool", optional=True)}
_BLOCKS: dict[str, Any] = {"qo_len": 8192, "kv_len": 8192, "block_rows": 128, "block_columns": 128, "density": 0.5}


# A pattern of blocks for all heads.
def _blocks_reference(q, k, v, indptr, indices, R, C, **options):  # type: ignore[no-untyped-def]
    import torch

    rows = torch.arange(len(indptr)) * R
    options |= {"qo_indptr": rows.clamp(max=len(q)), "kv_last_page_len": torch.full_like(rows, C)}
    k, v = (x.unflatten(0, (-1, C)) for x in (k, v))
    return attend_pages(q, k, v, kv_indptr=indptr, kv_indices=indices, **options)[0]


@sized(**_BLOCKS, **HEADS)
def _make_blocks(draw: Draw, s: Any) -> dict[str, Any]:
    """Each row of blocks selects a share `density` of the columns, at random."""
    block_columns = min(s.block_columns, s.kv_len)
    columns = s.kv_len // block_columns
    count = min(columns, max(1, round(columns * s.density)))
    counts = [count] * ceil_div(s.qo_len, s.block_rows)
    counts[-1] -= draw.nasty and count > 1
    chosen = [draw.permutation(columns)[:n].sort().values for n in counts]
    q = inputs.query_of(draw, s.qo_len, s)
    keys = {name: normal(draw, (s.kv_len, s.num_kv_heads, s.head_dim), s.dtype) for name in "kv"}
    pattern = {"indptr": draw.offsets(counts), "indices": torch.cat(chosen)}
    sizes = {"R": s.block_rows, "C": block_columns, "M": s.qo_len, "N": s.kv_len}
    return {"q": q, **keys, **pattern, **sizes, "sm_scale": s.head_dim**-0.5}


def _work_blocks(x: Mapping[str, Any]) -> Work:
    rows = [min(x["R"], len(x["q"]) - i * x["R"]) for i in range(len(x["indptr"]) - 1)]
    pairs = sum(qo_len * n * x["C"] for qo_len, n in zip(rows, x["indptr"].diff().tolist()))
    all_keys = attention_work(x["q"], [(x["k"], x["v"], [(0, len(x["k"]))], False)])
    return Work(4 * pairs * x["q"].shape[1] * x["q"].shape[2], all_keys.bytes)


BLOCKS = trace.template(
    "gqa_block_sparse",
    {
        **tensors(q="qo_len num_qo_heads head_dim", k="kv_len num_kv_heads head_dim", v="kv_len num_kv_heads head_dim"),
        **tensors({"dtype": "int32"}, indptr="len_indptr", indices="nnz"),
        "R": Scalar("int32", description="Rows of a block."),
        "C": Scalar("int32", description="Columns of a block."),
        **_SCORES,
    },
    _blocks_reference,
    outputs={"output": Tensor(["qo_len", "num_qo_heads", "head_dim"], dtype_from_scalar="o_data_type", dtype_from="q")},
    op=trace.PREFILL,
    make=_make_blocks,
    samples=(
        {**trace.SMALL, "qo_len": 70, "kv_len": 96, "block_rows": 16, "block_columns": 8},
        {**trace.SMALL, "qo_len": 40, "kv_len": 64, "block_rows": 8, "block_columns": 16, "density": 1.0},
    ),
    work=_work_blocks,
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


@sized(**_BLOCKS, **HEADS)
def _make_head_blocks(draw: Draw, s: Any) -> dict[str, Any]:
    """Each kv head selects a share `density` of its blocks, at random; the last blocks may be smaller."""

    def sizes(tokens: int, block: int) -> Any:
        row = [block] * (tokens // block) + ([tokens % block] if tokens % block else [])
        return draw.int32(row).repeat(s.num_kv_heads, 1)

    rows, columns = sizes(s.qo_len, s.block_rows), sizes(s.kv_len, s.block_columns)
    grid = (s.num_kv_heads, rows.shape[1], columns.shape[1])
    q = normal(draw, (s.num_qo_heads, s.qo_len, s.head_dim), s.dtype)
    keys = {name: normal(draw, (s.num_kv_heads, s.kv_len, s.head_dim), s.dtype) for name in "kv"}
    pattern = {"block_mask_map": draw.integers(0, 1000, grid) < s.density * 1000}
    pattern |= {"block_row_sz": rows, "block_col_sz": columns}
    return {"q": q, **keys, **pattern, "sm_scale": s.head_dim**-0.5}


def _work_head_blocks(x: Mapping[str, Any]) -> Work:
    areas = x["block_row_sz"].long()[:, :, None] * x["block_col_sz"].long()[:, None]
    pairs = int((areas * x["block_mask_map"]).sum()) * (len(x["q"]) // len(x["k"]))
    return Work(4 * pairs * x["q"].shape[2], 2 * nbytes(x["q"], x["k"]))


HEAD_BLOCKS = trace.template(
    "gqa_variable_block_sparse",
    {
        **tensors(q="num_qo_heads qo_len head_dim", k="num_kv_heads kv_len head_dim", v="num_kv_heads kv_len head_dim"),
        **tensors({"dtype": "bool"}, block_mask_map="num_kv_heads rows columns"),
        **tensors({"dtype": "int32"}, block_row_sz="num_kv_heads rows", block_col_sz="num_kv_heads columns"),
        **_SCORES,
    },
    reference=(attend_request, _head_blocks_reference),
    op=trace.PREFILL,
    make=_make_head_blocks,
    plan=lambda wrapper, x: inputs.plan(wrapper, x, num_qo_heads=len(x["q"]), num_kv_heads=len(x["k"])),
    samples=({**trace.SMALL, "qo_len": 70, "kv_len": 100, "block_rows": 16, "block_columns": 24},),
    work=_work_head_blocks,
    description="Attention of rows of blocks over the columns of blocks that each kv head selects for them.",
)


# A prefix of all requests.
def _prefix_reference(q, k_shared, v_shared, **options):  # type: ignore[no-untyped-def]
    return attend_pages(q, prefix=(k_shared, v_shared), **options)[0]


def _make_prefix(draw: Draw, s: Any) -> dict[str, Any]:
    """The last tokens of requests, one in decode, with keys of their own behind one prefix."""
    kv_lens = lengths_of(s.kv_len, s.batch_size)
    qo_lens = lengths_of(getattr(s, "qo_len", 1), len(kv_lens))
    shared = (s.shared_kv_len, s.num_kv_heads, s.head_dim)
    return {
        **{name: normal(draw, shared, s.dtype) for name in ("k_shared", "v_shared")},
        **inputs.requests_of(draw, s, qo_lens, kv_lens, "unique_kv_cache"),
        **({"causal": s.causal} if hasattr(s, "causal") else {}),
    }


def _work_prefix(x: Mapping[str, Any]) -> Work:
    k, v, rows = x["k_shared"], x["v_shared"], len(x["q"])
    return inputs.both(inputs.work(x), attention_work(x["q"][:0], [(k, v, [(rows, len(k))], False)]))


def _prefix(kind: str, make: Callable[..., dict[str, Any]], samples: Sequence[Mapping[str, Any]]) -> TraceTemplate:
    prefill = kind == "prefill"
    return trace.template(
        f"gqa_shared_prefix_{kind}",
        {
            **tensors(q="total_q num_qo_heads head_dim", k_shared="num_shared num_kv_heads head_dim"),
            **tensors(v_shared="num_shared num_kv_heads head_dim"),
            **trace.caches("unique_kv_cache"),
            **(trace.QO_INDPTR if prefill else {}),
            **trace.TABLE,
            **(_SCORES if prefill else {"sm_scale": Scalar()}),
        },
        _prefix_reference,
        op=(*(trace.PREFILL if prefill else trace.DECODE), "merge_state", "single_attention"),
        make=make,
        samples=samples,
        work=_work_prefix,
        description="Attention over a prefix that all requests share, and over the own keys of each.",
    )


_SHARED = {"shared_kv_len": 8192, "kv_len": 512, **PAGED}
_make_decode_prefix = paged(batch_size=64, **_SHARED)(_make_prefix)
_make_prefill_prefix = paged(batch_size=16, qo_len=512, causal=True, **_SHARED)(_make_prefix)
DECODE_PREFIX = _prefix("decode", _make_decode_prefix, ({**trace.SMALL, "shared_kv_len": 37, "kv_len": (9, 1, 16)},))
PREFILL_PREFIX = _prefix(
    "prefill", _make_prefill_prefix, ({**trace.SMALL, "shared_kv_len": 20, "kv_len": (9, 4), "qo_len": (3, 4)},)
)


# Ranges in both directions.
def _ranges_reference(q, bidirectional_ranges, **options):  # type: ignore[no-untyped-def]
    import torch

    def seen(rows, key):  # type: ignore[no-untyped-def]
        first, last = bidirectional_ranges[rows].long().T[..., None]
        position = torch.arange(len(first), device=q.device)[:, None] + len(key) - len(first)
        return (key <= position) | ((key >= first) & (key <= last))

    return attend_pages(q, seen=seen, **options)[0]


@paged(batch_size=4, qo_len=2048, range_len=256, **PAGED)
def _make_ranges(draw: Draw, s: Any) -> dict[str, Any]:
    """Prompts in which every second run of range_len tokens is an image, whose tokens see each other."""
    qo_lens = lengths_of(s.qo_len, s.batch_size)
    ranges: list[int] = []
    for n in qo_lens:
        for i in range(n):
            begin = i - i % s.range_len
            ranges += [begin, min(begin + s.range_len, n) - 1] if i // s.range_len % 2 else [-1, -1]
    own = {"bidirectional_ranges": draw.int32(ranges).view(-1, 2)}
    return {**inputs.requests_of(draw, s, qo_lens, qo_lens), **own}


RANGES = trace.template(
    "gqa_paged_bidirectional_ranges",
    {
        "q": Tensor(["total_q", "num_qo_heads", "head_dim"]),
        **trace.caches(),
        **trace.QO_INDPTR,
        **trace.TABLE,
        "bidirectional_ranges": Tensor(["total_q", "two"], dtype="int32"),
        "sm_scale": Scalar(),
    },
    _ranges_reference,
    op=trace.PREFILL,
    make=_make_ranges,
    samples=({**trace.SMALL, "qo_len": (40, 3), "range_len": 8},),
    work=lambda x: inputs.work({**x, "causal": True}),  # the keys behind a row in its range are few
    description="Causal attention whose rows also attend to a range of keys around them.",
)

blocks = plain_calls(BLOCKS, "scale_q", "scale_k", "scale_v", "return_lse")
head_blocks = plain_calls(HEAD_BLOCKS, "return_lse")
decode_prefix = plain_calls(DECODE_PREFIX)
prefill_prefix = plain_calls(PREFILL_PREFIX)
ranges = plain_calls(
    RANGES, "causal_window_left", "range_window_left", "q_scale", "k_scale", "v_scale", "kv_cache_sf", "return_lse"
)


def _is_plain(wrapper: Any) -> bool:
    """Whether the plan of a pattern has neither a mask within blocks nor scales."""
    plain: bool = trace.SCORES["covered"](wrapper._inner)  # type: ignore[operator]
    return plain and wrapper._inner._plan.mask is None and all(x is None for x in wrapper._scales.values())


PLANNED_HEAD_BLOCKS: Planned = {
    **kept("block_mask_map", "block_row_sz", "block_col_sz"),
    **trace.of_inner("_inner", {**trace.SCORES, "causal": "_causal"}),
}
PLANNED_BLOCKS: Planned = {
    **kept("indptr", "indices", "R", "C"),
    **trace.of_inner("_inner", {**trace.SCORES, "causal": "_causal", "o_data_type": "_cached_o_data_type"}),
    "covered": _is_plain,
}
PLANNED_PREFIX = trace.of_inner("_inner", {**trace.PAGES, **trace.SCORES})
PLANNED_PREFILL_PREFIX = trace.of_inner("_inner", {**trace.ROWS, **trace.PAGES, **trace.SCORES})
PLANNED_RANGES: Planned = {
    **trace.ROWS,
    **trace.PAGES,
    **trace.SCORES,
    "covered": lambda wrapper: not wrapper._plan.soft_cap,
}
