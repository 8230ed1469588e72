"""The indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556): logits of cheap heads, and the keys they choose.

A query row t gives key j the logit `scale[j] * sum_h weights[t, h] * max(0, q[t, h] . key[j])`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.indexer.ops import STATE_WORDS, mqa_logits, selects
from fi_core.indexer.trace import PAGED_LOGITS, PAGED_TOPK, RAGGED_LOGITS, RAGGED_TOPK
from fi_core.observe.log import fi_api
from fi_core.topk import prefers_last, top_k_page_table_transform, top_k_ragged_transform
from fi_core.utils import check_shape_dtype_device

if TYPE_CHECKING:
    import torch

__all__ = [
    "fp8_indexer_topk",
    "fp8_mqa_logits",
    "fp8_paged_indexer_topk",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]


def _required(**tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is None:
            raise TypeError(f"{name} must be a tensor; got None")


@fi_api(trace=RAGGED_LOGITS)
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Computes the indexer's logits of query rows, each over a window of one array of keys (DeepGEMM's function of this
    name; DeepSeek-V3.2, arXiv:2512.02556, equation 1).

    `logits[t, j] = scale[j] * sum_h weights[t, h] * max(0, q[t, h] . key[j])`, in fp32. Hopper adds products of e4m3
    with about 14 bits, so its logits differ from those of other devices by 2^-13 relative. A row's logits depend on
    nothing but the row and its keys.

    Args:
        q: `[T, heads, dim]`, e4m3, contiguous; 8, 16, 32 or 64 heads, dim 32, 64 or 128. Its scale
            belongs into weights.
        kv: the keys, `[N, dim]` e4m3, and their scales, `[N]` fp32.
        weights: `[T, heads]`, fp32; rows may be strided.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 `[T]`: row t sees the keys [start, end); none if start >= end.
        clean_logits: whether logits of keys that a row does not see become -inf; otherwise they are not written.
        max_seqlen_k: above 0: column c of row t is key start + c, of so many columns; needs clean_logits=False.

    Returns:
        `[T, N]` or `[T, max_seqlen_k]`, fp32.

    Raises:
        ValueError: a shape, device or layout is wrong, or clean_logits comes with max_seqlen_k.
        TypeError: a dtype is wrong.
    """
    if max_seqlen_k > 0 and clean_logits:
        raise ValueError(
            f"clean_logits must be False with max_seqlen_k; got max_seqlen_k = {max_seqlen_k}: what lies behind the "
            "keys of a row is not written then"
        )
    _required(cu_seq_len_k_start=cu_seq_len_k_start)
    keys, scales = kv
    logits = weights.new_empty(q.shape[0], max_seqlen_k if max_seqlen_k > 0 else keys.shape[0])
    mqa_logits(
        logits,
        q,
        keys,
        weights,
        cu_seq_len_k_end,
        starts=cu_seq_len_k_start,
        key_scales=scales,
        clean=clean_logits,
        relative=max_seqlen_k > 0,
    )
    return logits


def _paged_logits(
    logits: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    **options: bool,
) -> None:
    """Writes the logits of the rows of requests to `[batch * next_n, columns]`."""
    mqa_logits(logits, q, kv_cache, weights, context_lens, block_table=block_table, **options)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns a table of the shape that DeepGEMM's schedule has, of zeros: kernels here share out work by themselves.

    Args:
        context_lens: int32 `[batch]` or `[batch, next_n]`.
        block_kv: tokens of a page.
        num_sms: the rows of the table less one.
        indices: accepted; it has no effect.

    Returns:
        int32 `[num_sms + 1, 2]`.
    """
    return context_lens.new_zeros(num_sms + 1, 2)


@fi_api(trace=PAGED_LOGITS)
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the indexer's logits of the rows of each request over its pages of keys (DeepGEMM's function of this
    name). See `fp8_mqa_logits` for the formula.

    Args:
        q: `[batch, next_n, heads, dim]`, e4m3, contiguous; 8, 16, 32 or 64 heads, dim 32, 64 or 128.
        kv_cache: uint8 `[pages, page_size, 1, dim + 4]`, whose last axis is a size only: a page holds page_size * dim
            bytes of e4m3 values, then page_size fp32 scales. page_size is a multiple of 16; pages may be any multiple
            of 4 bytes apart.
        weights: `[batch * next_n, heads]`, fp32; rows may be strided.
        context_lens: int32 `[batch, next_n]`, the keys of each row; or `[batch]`: row t sees
            `context_lens - next_n + t + 1` of them.
        block_table: int32 `[batch, width]`; entries behind the last page of a request are not read.
        schedule_meta: accepted; kernels share out work by themselves.
        max_context_len: columns of the result.
        clean_logits: whether logits of keys that a row does not see become -inf; otherwise they are not written.
        indices: None; a selection of rows is refused.
        out: fp32 `[batch * next_n, max_context_len]`, rows may be strided; allocated if None.

    Returns:
        fp32 `[batch * next_n, max_context_len]`.

    Raises:
        ValueError: a shape, device or layout is wrong, indices are given, or, where contents are checked, context_lens
            or block_table hold what does not exist.
        TypeError: a dtype is wrong.
    """
    if indices is not None:
        raise ValueError(
            "indices must be None; got a tensor: select the rows of q, context_lens and block_table instead"
        )
    _required(block_table=block_table)
    if max_context_len < 0:
        raise ValueError(f"max_context_len must be 0 or more; got {max_context_len}")
    if out is None:
        out = weights.new_empty(weights.shape[0], max_context_len)
    _paged_logits(out, q, kv_cache, weights, context_lens, block_table, clean=clean_logits)
    return out


_LOGITS_BYTES = 256 << 20  # of the logits that exist at a time


def _checked(
    indices: torch.Tensor | None,
    scores: torch.Tensor | None,
    q: torch.Tensor,
    rows: int,
    top_k: int,
    **tables: tuple[torch.Tensor, int],
) -> None:
    """Raises ValueError. tables: tensors whose first dimension is that of q, or that times next_n, by name."""
    import torch

    if top_k < 1:
        raise ValueError(f"top_k must be 1 or more; got {top_k}")
    for name, (table, count) in tables.items():
        if not table.ndim or table.shape[0] != count:
            raise ValueError(f"{name} must have {count} rows, by q {list(q.shape)}; got {list(table.shape)}")
    for name, x, dtype in (("indices", indices, torch.int32), ("scores", scores, torch.float32)):
        if x is not None:
            check_shape_dtype_device(x, (rows, top_k), dtype, q.device, name)


def _scores_of(logits: torch.Tensor, columns: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The logits at columns, of which -1 is none."""
    found = logits.gather(1, columns.long().clamp(min=0)).masked_fill(columns < 0, float("-inf"))
    return found if out is None else out.copy_(found)


@fi_api(trace=RAGGED_TOPK)
def fp8_indexer_topk(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    top_k: int = 2048,
    *,
    relative: bool = False,
    tie_break: int = 1,
    indices: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    return_scores: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Chooses the top_k keys with the largest `fp8_mqa_logits` of each row, exactly.

    Logits of some rows at a time, at most 256 MB, lie in memory of the call. Nothing synchronises, and a row's result
    depends on nothing but the row and its keys.

    Args:
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end: as of `fp8_mqa_logits`.
        top_k: 1 or more.
        relative: whether indices count from the row's first key, not from that of kv.
        tie_break: of equal logits 0 and 1 choose small indices first, 2 large ones. NaN counts as -inf.
        indices: int32 `[T, top_k]`, to be written; allocated if None.
        scores: fp32 `[T, top_k]`, to be written if return_scores; allocated if None.
        return_scores: whether the logits of the chosen keys are returned too.

    Returns:
        int32 `[T, top_k]`: `min(top_k, visible keys)` of each row, rising, then -1. With return_scores also fp32
        `[T, top_k]`, -inf where there is no key.

    Raises:
        ValueError: a shape, device, layout, top_k or tie_break is wrong.
        TypeError: a dtype is wrong.
    """
    import torch

    rows, columns = q.shape[0], kv[0].shape[0]
    _required(cu_seq_len_k_start=cu_seq_len_k_start)
    bounds = {"cu_seq_len_k_start": (cu_seq_len_k_start, rows), "cu_seq_len_k_end": (cu_seq_len_k_end, rows)}
    _checked(indices, scores, q, rows, top_k, weights=(weights, rows), **bounds)
    if indices is None:
        indices = cu_seq_len_k_start.new_empty(rows, top_k)
    if return_scores and scores is None:
        scores = weights.new_empty(rows, top_k)
    step = max(1, min(rows, _LOGITS_BYTES // (4 * max(columns, 1))))
    scratch = weights.new_empty(step, max(columns, 1))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        start, end = cu_seq_len_k_start[part], cu_seq_len_k_end[part]
        logits = scratch[: start.shape[0]]
        mqa_logits(
            logits,
            q[part],
            kv[0],
            weights[part],
            end,
            starts=start,
            key_scales=kv[1],
            relative=True,
            orders_nan=True,
        )
        begin = start.clamp(min=0)
        lengths = (end.clamp(max=columns) - begin).clamp(min=0)
        found = top_k_ragged_transform(logits, torch.zeros_like(begin), lengths, top_k, tie_break=tie_break)
        if return_scores:
            _scores_of(logits, found, scores[part])  # type: ignore[index]
        indices[part] = found if relative else torch.where(found < 0, found, found + begin[:, None])
    return (indices, scores) if return_scores else indices  # type: ignore[return-value]


def _choose_paged_in_pieces(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    indices: torch.Tensor,
    scores: torch.Tensor | None,
    output: str,
    tie_break: int,
) -> None:
    """Chooses keys of some requests at a time, whose logits take at most _LOGITS_BYTES, or of one."""
    import torch

    (batch, next_n), page_size, top_k = q.shape[:2], kv_cache.shape[1], indices.shape[1]
    columns = block_table.shape[1] * page_size
    lengths = context_lens
    if context_lens.ndim == 1:
        rows = torch.arange(1 - next_n, 1, dtype=torch.int32, device=q.device)
        lengths = (context_lens.clamp(min=0)[:, None] + rows).clamp(min=0)
    step = max(1, min(batch, _LOGITS_BYTES // (4 * max(columns * next_n, 1))))  # requests
    owners = torch.arange(step, dtype=torch.int32, device=q.device).repeat_interleave(next_n)
    scratch = weights.new_empty(step * next_n, max(columns, 1))
    for first in range(0, batch, step):
        some = slice(first, first + step)
        part = slice(first * next_n, min(first + step, batch) * next_n)
        tables, positions = block_table[some], torch.empty_like(indices[part])
        logits = scratch[: positions.shape[0]]
        _paged_logits(logits, q[some], kv_cache, weights[part], context_lens[some], tables, orders_nan=True)
        slots = top_k_page_table_transform(
            logits,
            tables,
            lengths[some].flatten(),
            top_k,
            owners[: positions.shape[0]],
            tie_break=tie_break,
            page_size=page_size,
            out_raw_indices=positions,
        )
        if scores is not None:
            _scores_of(logits, positions, scores[part])
        indices[part] = slots if output == "slot" else positions


@fi_api(trace=PAGED_TOPK)
def fp8_paged_indexer_topk(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int = 2048,
    *,
    output: str = "position",
    tie_break: int = 1,
    indices: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    return_scores: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Chooses the top_k keys with the largest `fp8_paged_mqa_logits` of each row, exactly.

    Logits of all requests lie in memory of the call, as wide as block_table is long, if they take at most 64 MB: on
    sm_90 one kernel computes and ranks them then. Otherwise logits of some requests lie there at a time: at most
    256 MB, or those of one request. Nothing synchronises.

    Args:
        q, kv_cache, weights, context_lens, block_table: as of `fp8_paged_mqa_logits`.
        top_k: 1 or more.
        output: "position": in the request; "slot": `block_table[b, j // page_size] * page_size + j % page_size`, as
            sparse MLA takes it.
        tie_break, indices, scores, return_scores: as of `fp8_indexer_topk`, for `batch * next_n` rows.

    Returns:
        As `fp8_indexer_topk`. Slots come in the order of positions.

    Raises:
        ValueError: a shape, device, layout, top_k, output or tie_break is wrong.
        TypeError: a dtype is wrong.
    """
    batch, next_n = q.shape[:2]
    page_size = kv_cache.shape[1]
    _required(block_table=block_table)
    of_requests = {"context_lens": (context_lens, batch), "block_table": (block_table, batch)}
    _checked(indices, scores, q, batch * next_n, top_k, weights=(weights, batch * next_n), **of_requests)
    if output not in ("position", "slot"):
        raise ValueError(f"output must be 'position' or 'slot'; got {output!r}")
    columns = block_table.shape[1] * page_size
    if columns >= 1 << 31:
        raise ValueError(f"block_table must have pages of less than 2^31 tokens; got {list(block_table.shape)}")
    chosen = context_lens.new_empty(batch * next_n, top_k) if indices is None else indices
    if not return_scores:
        scores = None
    elif scores is None:
        scores = weights.new_empty(batch * next_n, top_k)
    rows = batch * next_n
    if selects(q, kv_cache, rows * columns, chosen, scores):
        mqa_logits(
            weights.new_empty(rows, max(columns, page_size)),
            q,
            kv_cache,
            weights,
            context_lens,
            block_table=block_table,
            indices=chosen,
            scores=scores,
            state=context_lens.new_empty(rows, STATE_WORDS),
            mapped=output == "slot",
            prefer_last=prefers_last(tie_break),
        )
    else:
        _choose_paged_in_pieces(q, kv_cache, weights, context_lens, block_table, chosen, scores, output, tie_break)
    return (chosen, scores) if scores is not None else chosen
