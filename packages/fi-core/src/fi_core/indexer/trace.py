"""Descriptions of an indexer's functions."""

from __future__ import annotations

from typing import Any

from fi_core.observe.describe import samples
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, sized


def _logits_of(q, values, scales, weights):  # type: ignore[no-untyped-def]
    """Of one row: q [heads, dim], values [keys, dim], scales [keys], weights [heads]."""
    return ((q.double() @ values.double().T).relu() * weights.double()[:, None]).sum(0) * scales.double()


def _ragged_reference(  # type: ignore[no-untyped-def]
    q, keys, key_scales, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0
):
    out = weights.new_full((q.shape[0], max_seqlen_k or keys.shape[0]), -float("inf")).double()
    for t in range(q.shape[0]):
        start, end = max(int(cu_seq_len_k_start[t]), 0), min(int(cu_seq_len_k_end[t]), keys.shape[0])
        if start < end:
            first = 0 if max_seqlen_k else start
            logits = _logits_of(q[t], keys[start:end], key_scales[start:end], weights[t])
            out[t, first : first + end - start] = logits
    return out


def _ragged_seen(keys, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0, **_):  # type: ignore[no-untyped-def]
    import torch

    start, end = cu_seq_len_k_start[:, None], cu_seq_len_k_end[:, None].clamp(max=keys.shape[0])
    first = torch.zeros_like(start) if max_seqlen_k else start
    column = torch.arange(max_seqlen_k or keys.shape[0], device=keys.device)
    return {"logits": (column >= first) & (column < first + end - start) | clean_logits}


def _lengths_of(context_lens, next_n):  # type: ignore[no-untyped-def]
    """The keys of each row, [batch, next_n]."""
    if context_lens.ndim == 2:
        return context_lens
    return (context_lens[:, None] - next_n + 1 + context_lens.new_tensor(range(next_n))).clamp(min=0)


def _paged_reference(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits=False):  # type: ignore[no-untyped-def]
    batch, next_n, _, dim = q.shape
    page_size = kv_cache.shape[1]
    lengths = _lengths_of(context_lens, next_n)
    out = weights.new_full((batch * next_n, max_context_len), -float("inf")).double()
    for b in range(batch):
        used = -(-int(lengths[b].max()) // page_size)
        pages = kv_cache[block_table[b, :used].long()].reshape(used, -1)
        values = pages[:, : page_size * dim].contiguous().view(q.dtype).reshape(-1, dim)
        scales = pages[:, page_size * dim :].contiguous().view(weights.dtype).flatten()
        for t in range(next_n):
            n, row = int(lengths[b, t]), b * next_n + t
            out[row, :n] = _logits_of(q[b, t], values[:n], scales[:n], weights[row])
    return out


def _sum_of_heads(q, values, weights):  # type: ignore[no-untyped-def]
    """q [..., rows, heads, dim], values [..., keys, dim], weights [..., rows, heads] to [..., rows, keys]."""
    import torch

    q, values, found = q.half(), values.half().transpose(-1, -2), None
    for h in range(q.shape[-2]):
        part = torch.matmul(q[..., h, :], values).relu().float() * weights[..., h, None]
        found = part if found is None else found + part
    return found


def _ragged_eager(  # type: ignore[no-untyped-def]
    q, keys, key_scales, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0
):
    import torch

    logits = _sum_of_heads(q, keys, weights) * key_scales
    key = torch.arange(keys.shape[0], device=q.device)
    seen = (key >= cu_seq_len_k_start[:, None]) & (key < cu_seq_len_k_end[:, None])
    return logits.masked_fill(~seen, -float("inf"))


def _paged_eager(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits=False):  # type: ignore[no-untyped-def]
    import torch

    batch, next_n, _, dim = q.shape
    pages, page_size = kv_cache[block_table.long()].flatten(2), kv_cache.shape[1]
    values = pages[..., : page_size * dim].contiguous().view(q.dtype).reshape(batch, -1, dim)
    scales = pages[..., page_size * dim :].contiguous().view(weights.dtype).reshape(batch, 1, -1)
    logits = _sum_of_heads(q, values, weights.view(batch, next_n, -1)) * scales
    out = weights.new_full((batch * next_n, max_context_len), -float("inf"))
    columns = min(max_context_len, logits.shape[-1])
    out[:, :columns] = logits.flatten(0, 1)[:, :columns]
    ends = (
        context_lens if context_lens.ndim == 2 else context_lens[:, None] + torch.arange(1 - next_n, 1, device=q.device)
    )
    unseen = torch.arange(max_context_len, device=q.device) >= ends.reshape(-1, 1)
    return out.masked_fill_(unseen, -float("inf"))


def _seen(q, weights, context_lens, max_context_len, clean_logits=False, **_):  # type: ignore[no-untyped-def]
    import torch

    lengths = _lengths_of(context_lens, q.shape[1]).reshape(-1, 1)
    seen = torch.arange(max_context_len, device=q.device) < lengths
    return {"logits": seen | clean_logits}


def _e4m3(draw: Draw, shape: tuple[int, ...]) -> Any:
    """Small integers, of which sums are exact."""
    return draw.integers(-2, 3, shape).float().to(_torch().float8_e4m3fn)


def _torch() -> Any:
    import torch

    return torch


def _weights(draw: Draw, rows: int, heads: int) -> Any:
    return draw.rows(draw.integers(-3, 4, (rows, heads)).float())


def _scales(draw: Draw, shape: tuple[int, ...]) -> Any:
    return 2.0 ** draw.integers(-2, 2, shape).float()


def _ragged(draw: Draw, s: Any) -> dict[str, Any]:
    """The last rows see all keys, as those of a prompt; if nasty, windows begin later and one is empty."""
    ends = [max(0, s.num_keys - (s.num_rows - 1 - t)) for t in range(s.num_rows)]
    starts = [min(3 * t, s.num_keys) if draw.nasty else 0 for t in range(s.num_rows)]
    if draw.nasty:
        starts[-1] = ends[-1]
    return {
        "q": _e4m3(draw, (s.num_rows, s.heads, s.dim)),
        "kv": (_e4m3(draw, (s.num_keys, s.dim)), _scales(draw, (s.num_keys,))),
        "weights": _weights(draw, s.num_rows, s.heads),
        "cu_seq_len_k_start": draw.int32(starts),
        "cu_seq_len_k_end": draw.int32(ends),
    }


def _paged(draw: Draw, s: Any) -> dict[str, Any]:
    """Pages in random order; if nasty, one request is short, and what no row sees is NaN."""
    torch = _torch()
    lengths = [max(1, s.kv_len - (41 * b if draw.nasty else 0)) for b in range(s.batch_size)]
    width, values = -(-s.kv_len // s.page_size), s.page_size * s.dim
    pages = s.batch_size * width + 2
    table = draw.permutation(pages)[: pages - 2].view(s.batch_size, width).contiguous()
    cache = torch.empty(pages, s.page_size * (s.dim + 4), dtype=torch.uint8, device=draw.device)
    cache[:, :values] = _e4m3(draw, (pages, values)).view(torch.uint8)
    cache[:, values:] = _scales(draw, (pages, s.page_size)).view(torch.uint8)
    if draw.nasty:
        for b, n in enumerate(lengths):
            page, used = cache[int(table[b, (n - 1) // s.page_size])], (n - 1) % s.page_size + 1
            page[used * s.dim : values] = 0x7F
            page[values:].view(torch.float32)[used:] = float("nan")
    return {
        "q": _e4m3(draw, (s.batch_size, s.next_n, s.heads, s.dim)),
        "kv_cache": cache.view(pages, s.page_size, 1, s.dim + 4),
        "weights": _weights(draw, s.batch_size * s.next_n, s.heads),
        "context_lens": draw.int32(lengths),
        "block_table": table,
    }


@sized(num_rows=11, num_keys=150, heads=64, dim=128, clean_logits=True)
def _make_ragged(draw: Draw, s: Any) -> dict[str, Any]:
    return _ragged(draw, s) | {"clean_logits": s.clean_logits}


@sized(num_rows=11, num_keys=150, heads=64, dim=128, top_k=64, relative=False, tie_break=1)
def _make_ragged_topk(draw: Draw, s: Any) -> dict[str, Any]:
    return _ragged(draw, s) | {"top_k": s.top_k, "relative": s.relative, "tie_break": s.tie_break}


@sized(batch_size=3, next_n=2, kv_len=150, page_size=64, heads=64, dim=128, clean_logits=False)
def _make_paged(draw: Draw, s: Any) -> dict[str, Any]:
    columns = s.kv_len + (70 if draw.nasty else 0)
    more = {"schedule_meta": None, "max_context_len": columns, "clean_logits": s.clean_logits}
    return _paged(draw, s) | more


@sized(batch_size=3, next_n=2, kv_len=150, page_size=64, heads=64, dim=128, top_k=64, output="position", tie_break=1)
def _make_paged_topk(draw: Draw, s: Any) -> dict[str, Any]:
    return _paged(draw, s) | {"top_k": s.top_k, "output": s.output, "tie_break": s.tie_break}


def _seen_keys(arguments: Any) -> tuple[int, int]:
    """The sum over rows of the keys that they see, and the keys that are read once."""
    if "context_lens" in arguments:
        lengths = _lengths_of(arguments["context_lens"], arguments["q"].shape[1])
        return int(lengths.sum()), int(lengths.max(1).values.sum())
    start, end = arguments["cu_seq_len_k_start"], arguments["cu_seq_len_k_end"]
    return int((end - start).clamp(min=0).sum()), arguments["kv"][1].numel()


def _work(written: int) -> Any:
    """Every product of a head and a key that it sees; `written` bytes for each logit, or for each key chosen."""

    def work(arguments: Any) -> Work:
        q = arguments["q"]
        seen, read = _seen_keys(arguments)
        heads, dim = q.shape[-2:]
        results = seen if written == 4 else q.numel() // (heads * dim) * arguments["top_k"]
        return Work(2 * seen * heads * dim, read * (dim + 4) + nbytes(q, arguments["weights"]) + 4 * results)

    return work


_FORMS = ((64, 128), (32, 128), (8, 64), (16, 32))  # heads, dim
_ROWS: dict[str, Var | Const] = {"num_rows": Var(), "heads": Const(abbrev="h"), "dim": Const(abbrev="d")}
_RAGGED_INPUTS: dict[str, Tensor | Scalar] = {
    "q": Tensor(["num_rows", "heads", "dim"]),
    "keys": Tensor(["num_keys", "dim"], param="kv", tuple_idx=0),
    "key_scales": Tensor(["num_keys"], param="kv", tuple_idx=1),
    "weights": Tensor(["num_rows", "heads"]),
    "cu_seq_len_k_start": Tensor(["num_rows"]),
    "cu_seq_len_k_end": Tensor(["num_rows"]),
}
_PAGED_AXES: dict[str, Var | Const] = {
    "batch_size": Var(),
    "next_n": Var(),
    "heads": Const(abbrev="h"),
    "dim": Const(abbrev="d"),
    "num_pages": Var(),
    "page_size": Const(abbrev="ps"),
    "one": Const(abbrev=""),
    "page_bytes": Const(abbrev=""),
    "rows": Var(),
    "width": Var(),
}
_PAGED_INPUTS: dict[str, Tensor | Scalar] = {
    "q": Tensor(["batch_size", "next_n", "heads", "dim"]),
    "kv_cache": Tensor(["num_pages", "page_size", "one", "page_bytes"]),
    "weights": Tensor(["rows", "heads"]),
    "context_lens": Tensor(["batch_size"]),
    "block_table": Tensor(["batch_size", "width"]),
}
_EXACT = {"logits": (1e-6, 0.0), "indices": (0.0, 0.0)}


def _ragged_topk_reference(  # type: ignore[no-untyped-def]
    q, keys, key_scales, weights, cu_seq_len_k_start, cu_seq_len_k_end, top_k=2048, relative=False, tie_break=1
):
    logits = _ragged_reference(q, keys, key_scales, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    out = cu_seq_len_k_start.new_full((q.shape[0], top_k), -1)
    for t in range(q.shape[0]):
        start, end = max(int(cu_seq_len_k_start[t]), 0), min(int(cu_seq_len_k_end[t]), keys.shape[0])
        if start < end:
            found = _largest(logits[t, start:end], top_k, tie_break)
            out[t, : found.numel()] = found + (0 if relative else start)
    return out


def _largest(row, k, tie_break):  # type: ignore[no-untyped-def]
    """The indices of the k largest, rising; of equal ones the first, or with tie_break 2 the last."""
    if tie_break == 2:
        return (row.numel() - 1 - row.flip(0).argsort(descending=True, stable=True)[:k]).sort().values
    return row.argsort(descending=True, stable=True)[:k].sort().values


def _paged_topk_reference(  # type: ignore[no-untyped-def]
    q, kv_cache, weights, context_lens, block_table, top_k=2048, output="position", tie_break=1
):
    batch, next_n = q.shape[:2]
    page_size = kv_cache.shape[1]
    lengths = _lengths_of(context_lens, next_n).flatten()
    logits = _paged_reference(q, kv_cache, weights, context_lens, block_table, int(lengths.max()))
    out = context_lens.new_full((batch * next_n, top_k), -1)
    for row in range(batch * next_n):
        found = _largest(logits[row, : int(lengths[row])], top_k, tie_break)
        if output == "slot":
            found = block_table[row // next_n, found // page_size] * page_size + found % page_size
        out[row, : found.numel()] = found
    return out


RAGGED_LOGITS = TraceTemplate(
    "fp8_mqa_logits",
    axes={**_ROWS, "num_keys": Var(), "columns": Var()},
    inputs={
        **_RAGGED_INPUTS,
        "clean_logits": Scalar("bool", optional=True),
        "max_seqlen_k": Scalar("int32", optional=True),
    },
    outputs={"logits": Tensor(["num_rows", "columns"], dtype="float32")},
    reference=(_logits_of, _ragged_reference),
    written=_ragged_seen,
    op="mqa_logits",
    make=_make_ragged,
    samples=(
        *samples({"heads, dim": _FORMS, "num_rows": (3, 11)}),
        {"num_rows": 1, "num_keys": 3000},
        {"clean_logits": False},
    ),
    work=_work(4),
    eager=_ragged_eager,
    tolerance=_EXACT,
    description="The indexer's logits of query rows over windows of one array of keys.",
)

PAGED_LOGITS = TraceTemplate(
    "fp8_paged_mqa_logits",
    axes={**_PAGED_AXES, "columns": Var()},
    inputs={
        **_PAGED_INPUTS,
        "max_context_len": Scalar("int32"),
        "clean_logits": Scalar("bool", optional=True),
    },
    outputs={"logits": Tensor(["rows", "columns"], dtype="float32")},
    reference=(_logits_of, _lengths_of, _paged_reference),
    written=_seen,
    op="mqa_logits",
    make=_make_paged,
    samples=(
        *samples({"heads, dim": _FORMS, "next_n": (1, 2, 3)}),
        {"clean_logits": True},
        {"page_size": 16},
        {"page_size": 48, "kv_len": 700, "batch_size": 40},
    ),
    work=_work(4),
    eager=_paged_eager,
    tolerance=_EXACT,
    others=("schedule_meta", "indices", "out"),
    description="The indexer's logits of the rows of requests over their pages of keys.",
)

RAGGED_TOPK = TraceTemplate(
    "fp8_indexer_topk",
    axes={**_ROWS, "num_keys": Var(), "top_k": Const(abbrev="k")},
    inputs={
        **_RAGGED_INPUTS,
        "top_k": Scalar("int32"),
        "relative": Scalar("bool", optional=True),
        "tie_break": Scalar("int32", optional=True),
    },
    outputs={"indices": Tensor(["num_rows", "top_k"], dtype="int32")},
    reference=(_logits_of, _largest, _ragged_reference, _ragged_topk_reference),
    op=("mqa_logits", "top_k"),
    make=_make_ragged_topk,
    samples=({}, {"heads": 32}, {"relative": True, "tie_break": 2}, {"num_keys": 30}),
    work=_work(0),
    tolerance=_EXACT,
    others=("indices", "scores", "return_scores"),
    description="The keys with the largest indexer logits of query rows over windows of one array of keys.",
)

PAGED_TOPK = TraceTemplate(
    "fp8_paged_indexer_topk",
    axes={**_PAGED_AXES, "top_k": Const(abbrev="k")},
    inputs={
        **_PAGED_INPUTS,
        "top_k": Scalar("int32"),
        "output": Scalar("string", optional=True),
        "tie_break": Scalar("int32", optional=True),
    },
    outputs={"indices": Tensor(["rows", "top_k"], dtype="int32")},
    reference=(_logits_of, _lengths_of, _largest, _paged_reference, _paged_topk_reference),
    op=("mqa_logits", "top_k"),
    make=_make_paged_topk,
    samples=({}, {"heads": 32, "next_n": 1}, {"output": "slot"}, {"tie_break": 2, "page_size": 16}),
    work=_work(0),
    tolerance=_EXACT,
    others=("indices", "scores", "return_scores"),
    description="The keys with the largest indexer logits of the rows of requests, as positions or slots.",
)
