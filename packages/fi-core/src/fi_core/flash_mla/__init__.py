"""FlashMLA's names for multi-head latent attention over the keys that a list names, and over block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.attention.contract import number
from fi_core.attention.forms.tables_mla import Tables, dense_tables, plan_in
from fi_core.attention.merge import merge_state
from fi_core.attention.ops import mla as ops
from fi_core.flash_mla.trace import DECODE, SPARSE
from fi_core.observe.log import fi_api
from fi_core.page.latent import LATENT, PACKED_BYTES, ROW_BYTES, WIDTH, LatentCache, latent_cache
from fi_core.utils import check_shape_dtype_device, round_up

if TYPE_CHECKING:
    import torch

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclass
class FlashMLASchedMeta:
    """What stands for FlashMLA's schedule: nothing, each call plans on the device."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Returns (FlashMLASchedMeta(), None), whatever is passed: each call plans on the device."""
    return FlashMLASchedMeta(), None


class _List(NamedTuple):
    """A cache and the slots of it that each row of queries attends to.

    indices: int32 `[rows, K]`, contiguous. lengths: entries of each row; None: all.
    """

    cache: LatentCache
    indices: torch.Tensor
    lengths: torch.Tensor | None


class _Result(NamedTuple):
    """out `[rows, heads, 512]`; lse: base 2, sinks included; stats `[2, rows, heads]`: as `batch_mla` writes them."""

    out: torch.Tensor
    lse: torch.Tensor
    stats: torch.Tensor


def _attend(
    q: torch.Tensor, cache: LatentCache, tables: Tables, scale: float, sinks: torch.Tensor | None, **options: Any
) -> _Result:
    """Plans and computes attention of q `[rows, heads, width]`. The memory of schedule and partials is of the call."""
    import torch

    rows, heads = q.shape[:2]
    size, batch = ops.sizes(q.device, heads), tables.batch_size(q)
    room = round_up(4 * ops.words_of(size, batch), 256) + 4 * size.workspace_floats
    page_size = 1 if options.get("sparse") else cache.ckv.shape[1]
    grid, schedule, partials = plan_in(q.new_empty(room, dtype=torch.uint8), page_size, q, tables)
    out = q.new_empty(rows, heads, LATENT)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    stats = q.new_empty(2, rows, heads, dtype=torch.float32)
    ops.batch_mla(
        out,
        lse,
        workspace=partials,
        schedule=schedule,
        q_nope=q[..., :LATENT],
        q_pe=q[..., LATENT:],
        ckv_cache=cache.ckv,
        kpe_cache=cache.kpe,
        page_indices=tables.table,
        batch_size=batch,
        **grid,
        sm_scale=scale,
        ckv_scales=cache.scales,
        sinks=sinks,
        score_stats=stats,
        **options,
    )
    return _Result(out, lse, stats)


def _attend_list(q: torch.Tensor, x: _List, scale: float, sinks: torch.Tensor | None, **options: Any) -> _Result:
    tables = Tables(x.cache.placed(x.indices).view(-1), x.indices.shape[-1], x.lengths, None, 1)
    return _attend(q, x.cache, tables, scale, sinks, sparse=True, **options)


def _check_queries(q: torch.Tensor, shape: str, ndim: int, widths: tuple[int, ...]) -> None:
    import torch

    if q.ndim != ndim or q.shape[-1] not in widths or not q.shape[-2] or q.dtype is not torch.bfloat16:
        raise ValueError(
            f"q: torch.bfloat16 {shape} of width {' or '.join(map(str, widths))}, with 1 head or more, is required; "
            f"got {q.dtype}, shape {tuple(q.shape)}"
        )


def _check_numbers(head_dim: Any, name: str, sink: torch.Tensor | None, q: torch.Tensor) -> None:
    import torch

    if head_dim != LATENT:
        raise ValueError(f"{name}: {LATENT} is required; got {head_dim!r}")
    if sink is not None:
        check_shape_dtype_device(sink, (q.shape[-2],), torch.float32, q.device, "attn_sink")


def _listed(name: str, indices: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
    """The indices as `[rows, K]`. shape: that of all axes before K."""
    import torch

    if indices.dtype is not torch.int32 or tuple(indices.shape[:-1]) != shape or not indices.shape[-1]:
        raise ValueError(
            f"{name}: torch.int32 {[*shape, 'K']} with K of 1 or more is required; got {indices.dtype}, shape "
            f"{tuple(indices.shape)}"
        )
    if indices.device != q.device or not indices.is_contiguous():
        raise ValueError(
            f"{name}: a contiguous tensor on {q.device} is required; got strides {indices.stride()} on {indices.device}"
        )
    return indices.flatten(0, -2)


def _lengths(name: str, lengths: torch.Tensor | None, count: int, each: int, q: torch.Tensor) -> torch.Tensor | None:
    """The entries of every row, of `each` rows for every length."""
    import torch

    if lengths is None:
        return None
    check_shape_dtype_device(lengths, (count,), torch.int32, q.device, name)
    return lengths.contiguous() if each == 1 else lengths.repeat_interleave(each)


@fi_api(trace=SPARSE)
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query to the rows of one array that its list names (FlashMLA's function of this name;
    DeepSeek-V3.2, arXiv:2512.02556).

    A row is the key of all heads, and its first 512 columns are the value: `x = q . row * sm_scale`, `out = sum of
    softmax(x) * row[:512]`. A row that is listed twice counts twice.

    Args:
        q: `[T, heads, 576 or 512]`, bf16; any number of heads.
        kv: `[N, 1, width of q]`, bf16; N is 1 or more.
        indices: int32 `[T, 1, K]`, rows of kv; what is negative, or N and more, is no row.
        sm_scale: factor of the scores.
        d_v: 512.
        attn_sink: fp32 `[heads]`, a logit that joins each softmax, but neither max_logits nor lse: out is multiplied
            by `1 / (1 + exp(attn_sink - lse))`. -inf: none; +inf: out is 0.
        topk_length: int32 `[T]`, entries of each list that are read; None: all.

    Returns:
        out bf16 `[T, heads, 512]`; max_logits and lse, fp32 `[T, heads]`, of the scaled scores, natural. Without a row
        out is 0, max_logits -inf and lse +inf.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or d_v is not 512.
    """
    _check_queries(q, "[T, heads, width]", 3, (WIDTH, LATENT))
    _check_numbers(d_v, "d_v", attn_sink, q)
    if kv.ndim != 3 or kv.shape[1] != 1 or kv.shape[2] != q.shape[2] or kv.dtype != q.dtype or not kv.shape[0]:
        raise ValueError(
            f"kv: {q.dtype} [N, 1, {q.shape[2]}] with N of 1 or more is required; got {kv.dtype}, shape "
            f"{tuple(kv.shape)}"
        )
    rows = _listed("indices", indices, (q.shape[0], 1), q)
    lengths = _lengths("topk_length", topk_length, q.shape[0], 1, q)
    listed = _List(latent_cache("kv", kv, q, True), rows, lengths)
    found = _attend_list(q, listed, number(sm_scale, "sm_scale"), attn_sink, any_index=True, exact_max=True)
    return found.out, found.stats[0], found.stats[1]


@fi_api(trace=DECODE)
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of requests over a paged latent cache: to the tokens that a list names, or with
    block_table to all (FlashMLA's function of this name). See `flash_mla_sparse_fwd` for the formula.

    Args:
        q: `[batch, s_q, heads, 576]`, bf16; any number of heads. Of packed pages, and of lists of bf16 rows, it may be
            512 wide.
        k_cache: `[pages, page_size, 1, width of q]`, bf16; or bytes with is_fp8_kvcache: `[pages, page_size, 1, 656]`,
            rows of 512 e4m3, 4 fp32 scales of 128 columns and 64 bf16; or, with indices and queries of width 512,
            packed pages `[pages, page_size, 1, 584]`, in which page_size rows of 448 e4m3 and 64 bf16 come first, then
            8 bytes for each row: 7 ue8m0 scales of 64 columns, and one without use. With indices, pages of rows may
            be any multiple of a row apart, packed pages any multiple of 16 bytes.
        block_table: int32 `[batch, max_pages]`; not read with indices.
        cache_seqlens: int32 `[batch]`, tokens of each request, those of q included; not read with indices.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: accepted; each call plans on the device.
        softmax_scale: factor of the scores; None: `width of q ** -0.5`, which is not the `192 ** -0.5` of DeepSeek.
        causal: token i of s_q sees `cache_seqlens - s_q + i + 1` tokens; False with indices.
        is_fp8_kvcache: whether k_cache holds bytes.
        indices: int32 `[batch, s_q, K]`, slots `page * page_size + offset`; -1 is none.
        attn_sink: as of `flash_mla_sparse_fwd`.
        extra_k_cache, extra_indices_in_kvcache: a second cache, of pages of another size or form, and int32
            `[batch, s_q, K2]`, whose tokens join the softmax. Both parts are computed, then merged: their outputs are
            rounded to bf16 before.
        topk_length, extra_topk_length: int32 `[batch]`, entries of each list that are read; None: all.

    Returns:
        out bf16 `[batch, s_q, heads, 512]`; lse fp32 `[batch, heads, s_q]`, natural, without the sink, +inf of a row
        without tokens, of which out is 0.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or an argument is given or missing that the form has not.
    """
    _check_queries(q, "[batch, s_q, heads, width]", 4, (WIDTH, LATENT) if indices is not None else (WIDTH,))
    _check_numbers(head_dim_v, "head_dim_v", attn_sink, q)
    batch, s_q, heads, width = q.shape
    scale = width**-0.5 if softmax_scale is None else number(softmax_scale, "softmax_scale")
    rows = q.flatten(0, 1)
    if indices is None:
        extra = {"extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache}
        _without(**extra, topk_length=topk_length, extra_topk_length=extra_topk_length)
        cache = _paged("k_cache", k_cache, q, is_fp8_kvcache, False)
        tables = _of_requests(block_table, cache_seqlens, batch, s_q)
        found = _attend(rows, cache, tables, scale, attn_sink, causal=bool(causal) and s_q > 1)
    else:
        _check_lists(causal, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        cache = _paged("k_cache", k_cache, q, is_fp8_kvcache, True)
        lengths = _lengths("topk_length", topk_length, batch, s_q, q)
        listed = _List(cache, _listed("indices", indices, (batch, s_q), q), lengths)
        found = _attend_list(rows, listed, scale, attn_sink)
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            cache = _paged("extra_k_cache", extra_k_cache, q, is_fp8_kvcache, True)
            slots = _listed("extra_indices_in_kvcache", extra_indices_in_kvcache, (batch, s_q), q)
            lengths = _lengths("extra_topk_length", extra_topk_length, batch, s_q, q)
            found = _merge(found, _attend_list(rows, _List(cache, slots, lengths), scale, None))
    lse = found.stats[1].view(batch, s_q, heads).transpose(1, 2).contiguous()
    return found.out.view(batch, s_q, heads, LATENT), lse


def _without(**given: torch.Tensor | None) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name}: None is required without indices; got a tensor")


def _check_lists(causal: bool, extra: Any, extra_indices: Any, extra_length: Any) -> None:
    if causal:
        raise ValueError("causal: False is required with indices; got True: list the tokens that each row may see")
    if (extra is None) != (extra_indices is None):
        raise ValueError("extra_k_cache: it and extra_indices_in_kvcache are required together; got one of them")
    if extra is None and extra_length is not None:
        raise ValueError("extra_topk_length: None is required without extra_k_cache; got a tensor")


def _paged(name: str, cache: torch.Tensor, q: torch.Tensor, is_bytes: bool, sparse: bool) -> LatentCache:
    """The parts of a cache `[pages, page_size, 1, width]`."""
    if cache.ndim != 4 or cache.shape[2] != 1 or not cache.shape[0] or not cache.shape[1]:
        raise ValueError(
            f"{name}: [pages, page_size, 1, width] with a page or more is required; got {tuple(cache.shape)}"
        )
    if is_bytes != (cache.element_size() == 1):
        raise ValueError(
            f"{name}: {f'bytes [..., {ROW_BYTES} or {PACKED_BYTES}]' if is_bytes else q.dtype} is required with "
            f"is_fp8_kvcache={is_bytes}; got {cache.dtype}"
        )
    return latent_cache(name, cache.squeeze(2), q, sparse)


def _of_requests(block_table: Any, cache_seqlens: Any, batch: int, s_q: int) -> Tables:
    for name, x in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if x is None:
            raise ValueError(f"{name}: a tensor is required without indices; got None")
    if block_table.shape[0] != batch or tuple(cache_seqlens.shape) != (batch,):
        raise ValueError(
            f"block_table and cache_seqlens: [{batch}, max_pages] and [{batch}] are required; got "
            f"{tuple(block_table.shape)} and {tuple(cache_seqlens.shape)}"
        )
    return dense_tables(block_table, cache_seqlens, None, s_q, batch)


def _merge(a: _Result, b: _Result) -> _Result:
    """Attention to the tokens of both; a sink is in one of them."""
    import torch

    out, lse = merge_state(a.out, a.lse, b.out, b.lse)
    of_a, of_b = a.stats[1], b.stats[1]
    both = torch.where(of_a.isposinf(), of_b, torch.where(of_b.isposinf(), of_a, of_a.logaddexp(of_b)))
    return _Result(out, lse, torch.stack((a.stats[0].maximum(b.stats[0]), both)))
