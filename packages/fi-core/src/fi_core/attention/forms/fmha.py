"""Batch prefill with the arguments of TensorRT-LLM's FMHA v2: five layouts of q, k and v in one call."""

from __future__ import annotations

import math
from typing import Any

from fi_core.attention.contract import POS_ENCODINGS, Scale, bmm_scales, flat_tables, results
from fi_core.attention.forms.tables_prefill import attend_once
from fi_core.observe.log import fi_api
from fi_core.runtime.env import env
from fi_core.runtime.lazy import torch
from fi_core.runtime.tensors import viewed
from fi_core.utils import _unpack_paged_kv_cache, int32_index

_CAUSAL = {"causal": True, "sliding_window": True, "chunked": True, "padding": False}


def _members(qkv: Any, names: str) -> Any:
    if not isinstance(qkv, (tuple, list)) or len(qkv) != names.count(",") + 1:
        came = f"{len(qkv)} members" if isinstance(qkv, (tuple, list)) else type(qkv).__name__
        raise ValueError(f"qkv: a tuple ({names}) is required; got {came}")
    return qkv


def _split(qkv: Any, input_layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """q, k, v, and the layout code of k and v."""
    if input_layout == "PACKED_QKV":
        if qkv.ndim != 4 or qkv.shape[1] != 3:
            raise ValueError(f"qkv: shape [tokens, 3, num_heads, head_dim] is required; got {tuple(qkv.shape)}")
        q, k, v = qkv.unbind(1)
        return q, k, v, 0
    if input_layout == "CONTIGUOUS_Q_KV":
        q, kv = _members(qkv, "q, kv")
        if kv.ndim != 4 or kv.shape[1] != 2:
            raise ValueError(f"qkv: kv [kv_tokens, 2, num_kv_heads, head_dim] is required; got shape {tuple(kv.shape)}")
        return q, kv[:, 0], kv[:, 1], 0
    if input_layout == "SEPARATE_Q_K_V":
        q, k, v = _members(qkv, "q, k, v")
        return q, k, v, 0
    if input_layout in ("Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"):
        q, cache = _members(qkv, "q, kv_cache")
        k, v = _unpack_paged_kv_cache(cache, input_layout[-3:])
        return q, k, v, int(input_layout.endswith("HND"))
    allowed = "PACKED_QKV, CONTIGUOUS_Q_KV, Q_PAGED_KV_NHD, Q_PAGED_KV_HND, SEPARATE_Q_K_V"
    raise ValueError(f"input_layout: allowed are {allowed}; got {input_layout!r}")


def _chunks(
    size: int, max_q_len: int, page_size: int, batch_size: int, most_keys: int, tables: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Splits requests at multiples of `size` keys, so that a causal mask within each piece gives chunked attention.

    Each request has as many pieces as max_q_len rows can touch; some may have no rows. page_size: 1 for keys;
    most_keys: of the pages of a request. Returns the number of pieces, and the tables with theirs, computed on the
    device.
    """
    if size % page_size:
        raise ValueError(f"chunked_attention_size: a multiple of the page size ({page_size}) is required; got {size}")
    qo_indptr = tables["qo_indptr"]
    if "kv_indptr" in tables:
        begins, kv_len = tables["kv_indptr"], tables["kv_indptr"].diff()
    else:
        begins = torch.arange(batch_size + 1, dtype=torch.int32, device=qo_indptr.device) * tables["pages_per_request"]
        kv_len = tables["kv_len"].clamp(max=most_keys)
    if len(qo_indptr) != batch_size + 1 or len(begins) != batch_size + 1 or len(kv_len) != batch_size:
        required = f"batch_size + 1 = {batch_size + 1} offsets and {batch_size} lengths are required"
        got = f"{len(qo_indptr)}, {len(begins)} and {len(kv_len)}"
        raise ValueError(f"cum_seq_lens_q, cum_seq_lens_kv and seq_lens: {required}; got {got}")
    most = max(max_q_len + size - 2, 0) // size + 1
    qo_len, begin = qo_indptr.diff(), begins[:-1, None]  # first key or page of each request
    position = kv_len - qo_len  # of the first row; below 0 rows see nothing
    first = position.div(size, rounding_mode="floor")
    edges = (first[:, None] + torch.arange(most + 1, dtype=torch.int32, device=first.device)) * size
    rows = qo_indptr[:-1, None] + (edges - position[:, None]).clamp(min=0).minimum(qo_len[:, None])
    keys = edges.clamp(min=0).minimum(kv_len[:, None])
    lengths, pages = keys.diff(), (keys[:, :-1] + page_size - 1) // page_size  # of the request, before each piece
    pieces = {"qo_indptr": (rows[:, :-1], qo_indptr), "kv_indptr": (begin + pages, begins)}
    made = {name: torch.cat((start.flatten(), whole[-1:])).int() for name, (start, whole) in pieces.items()}
    return kv_len.numel() * most, {**tables, **made, "kv_len": lengths.flatten().int()}


def _table_of_both(block_tables: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The pages of K and V, from separate pages of K and of V, both counted from the first page of k."""
    if block_tables.shape[1] != 2:
        raise ValueError(f"block_tables: [batch_size, 2, max_pages] is required; got shape {tuple(block_tables.shape)}")
    pages, bytes_of_page = block_tables[:, 0], k.stride(0) * k.element_size()
    apart, rest = divmod(v.data_ptr() - k.data_ptr(), bytes_of_page or 1)
    if rest:
        raise ValueError(
            f"block_tables: pages of V are counted in pages of K, {bytes_of_page} bytes, but v_cache begins "
            f"{v.data_ptr() - k.data_ptr()} bytes after k_cache; pass [batch_size, max_pages]"
        )
    if (env.check or (env.check is None and not k.is_cuda)) and not (block_tables[:, 1] - pages == apart).all():
        required = f"its page of K + {apart}, the distance of the caches in pages"
        raise ValueError(f"block_tables: a page of V must be {required}")
    return pages


def _tables(
    k: torch.Tensor, v: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, batch_size: int
) -> dict[str, Any]:
    """A block table and the lengths of its requests as options of `attend_once`. Raises ValueError."""
    block_tables = _table_of_both(block_tables, k, v) if block_tables.ndim == 3 else block_tables
    pages, pitch = flat_tables(block_tables)
    if block_tables.shape[0] < batch_size:
        raise ValueError(f"block_tables: {batch_size} rows are required, batch_size; got {block_tables.shape[0]}")
    kv_len = int32_index(viewed("seq_lens", seq_lens, -1))
    return {"kv_len": kv_len, "page_indices": pages, "pages_per_request": pitch}


def _modes(mask_mode: str, chunk: int, pos_encoding_mode: str | None) -> tuple[str, int]:
    """The mask and the value of the position encoding, of which case does not matter. Raises ValueError."""
    mask_mode = mask_mode.lower()
    if mask_mode not in _CAUSAL:
        raise ValueError(f"mask_mode: allowed are {', '.join(_CAUSAL)}; got {mask_mode!r}")
    if (mask_mode == "chunked") != (chunk > 0):
        raise ValueError(
            'chunked_attention_size: a positive number is required with mask_mode "chunked", and 0 with others; got '
            f"{chunk} with {mask_mode!r}"
        )
    encoding = POS_ENCODINGS.get((pos_encoding_mode or "NONE").upper())
    if encoding is None:
        raise ValueError(f"pos_encoding_mode: allowed are None, {', '.join(POS_ENCODINGS)}; got {pos_encoding_mode!r}")
    return mask_mode, encoding


@fi_api
def trtllm_fmha_v2_prefill(
    qkv: Any,
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: torch.Tensor | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float | None = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention without a plan: `softmax(mask(q k^T * bmm1_scale)) v * bmm2_scale` (TensorRT-LLM's FMHA v2).

    All tensors are on the device. out and sinks are those of `trtllm_batch_decode_with_kv_cache`.

    Args:
        qkv: by input_layout. "PACKED_QKV": `[tokens, 3, num_heads, head_dim]`. "CONTIGUOUS_Q_KV": (q `[qo_tokens,
            num_qo_heads, head_dim]`, kv `[kv_tokens, 2, num_kv_heads, head_dim]`). "SEPARATE_Q_K_V": (q, k, v).
            "Q_PAGED_KV_NHD" and "Q_PAGED_KV_HND": (q, paged cache), the cache a tensor `[pages, 2, ...]` or a tuple.
        input_layout: one of these names.
        workspace_buffer, max_kv_len: not needed.
        seq_lens: int32 `[batch_size]`, tokens of each request, for paged layouts.
        max_q_len: the longest qo_len; "chunked" relies on it.
        bmm1_scale: factor of the scores, including `1 / sqrt(head_dim)`; a number or a one-element fp32 tensor.
        bmm2_scale: factor of the output, likewise.
        batch_size: number of requests.
        cum_seq_lens_q, cum_seq_lens_kv: int32 `[batch_size + 1]`, offsets of the requests.
        block_tables: int32 `[batch_size, max_pages]`, for paged layouts. With a cache that is a tuple also int32
            `[batch_size, 2, max_pages]`: pages of K, and pages of V counted from the first page of k_cache; both caches
            must have the same pages, which is checked where tables are checked.
        out_dtype: dtype of a new output; default q's.
        pos_encoding_mode: None or "NONE"; "ROPE_LLAMA" or "ALIBI", as in the wrappers. Case does not matter.
        logits_soft_cap_scale: c > 0 replaces scores by `c tanh(score / c)`.
        mask_mode: "causal" (aligned to the bottom right), "sliding_window" (causal, and window_left keys before a row's
            own), "chunked" (causal within the chunk of keys of the row) or "padding" (all keys). Case does not
            matter.
        window_left: number of keys before its own that a row attends to; -1: all.
        chunked_attention_size: keys of a chunk, a multiple of the page size, for "chunked".
        save_softmax_stats: also return the statistics of the softmax.
        skip_softmax_threshold_scale_factor: without effect; no softmax is skipped.

    Returns:
        out `[qo_tokens, num_qo_heads, head_dim]`. With save_softmax_stats (out, stats), stats fp32 `[qo_tokens,
        num_qo_heads, 2]`: (m, s) with `exp(m) s` the sum of the exponentials of a row. TensorRT-LLM's m is the maximum;
        here it is the logarithm of the sum and s is 1, which merges alike. A row without keys has (-inf, 0).

    Raises:
        ValueError: layout, shape, dtype, device, block_tables, mask_mode or pos_encoding_mode.
        TypeError: a member of qkv is no tensor.
    """
    mask_mode, encoding = _modes(mask_mode, chunked_attention_size, pos_encoding_mode)
    q, k, v, layout = _split(qkv, input_layout)
    for x in (q, k, v):
        if not hasattr(x, "dtype"):
            raise TypeError(f"qkv: tensors are required as its members; got a {type(x).__name__}")
    if (k.ndim == 4) == (block_tables is None):
        raise ValueError(f"block_tables: for paged layouts, and no others; got {input_layout} with {block_tables!r}")
    result, lse = results(q, (*q.shape[:2], v.shape[-1]), out, None, save_softmax_stats, out_dtype)
    tables: dict[str, Any] = {"kv_indptr": int32_index(cum_seq_lens_kv)}
    page_size, most_keys = 1, 0
    if block_tables is not None:
        tables = _tables(k, v, block_tables, seq_lens, batch_size)
        page_size = k.shape[1 + layout]
        most_keys = block_tables.shape[-1] * page_size
    tables["qo_indptr"] = int32_index(cum_seq_lens_q)
    if mask_mode == "chunked":
        sizes = chunked_attention_size, max_q_len, page_size
        batch_size, tables = _chunks(*sizes, batch_size, most_keys, tables)
    attend_once(
        result, lse, q, k, v, layout, batch_size, causal=_CAUSAL[mask_mode], pos_encoding=encoding,
        window_left=window_left, soft_cap=logits_soft_cap_scale or 0.0, sinks=sinks, **tables,
        **bmm_scales(bmm1_scale, bmm2_scale),
    )  # fmt: skip
    if lse is None:
        return result
    return result, torch.stack((lse * math.log(2.0), lse.isfinite().float()), dim=-1)
