"""Batch prefill in one call, without a plan: the forms of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import (
    CHECK,
    LAYOUTS,
    cache_pair,
    check_bounds,
    check_tables,
    code,
    flat_tables,
    refuse_nvfp4,
    refuse_split_tables,
    scale_product,
    unsupported,
)
from fi_core.observe.log import fi_api
from fi_core.prefill import ops
from fi_core.prefill.trace import tables_trace
from fi_core.utils import canonicalize_torch_dtype, check_shape_dtype_device, int32_index

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    Scale = float | torch.Tensor

_BACKENDS = ("auto", "trtllm-gen", "cute-dsl", "cutlass")


def attend_once(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: int,
    batch_size: int,
    *,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    page_indices: torch.Tensor | None = None,
    pages_per_request: int = 0,
    causal: bool = False,
    encoding: int = 0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    score_scale: tuple[float, Any] = (1.0, None),
    out_scale: tuple[float, Any] = (1.0, None),
    by_head: Sequence[torch.Tensor | None] = (None, None, None),
    draft_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> None:
    """Lists the tiles into a new schedule and computes them; arguments are those of `ops.plan` and `ops.attend`.

    encoding: pos_encoding_mode. by_head: scale_q, scale_k and scale_v. draft_mask: custom_mask without mask_indptr.
    """
    import torch

    rows, heads, dim = q.shape
    kv_heads = k.shape[-2 - layout]
    page_size = 1 if page_indices is None else k.shape[1 + layout]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query: a multiple of the {kv_heads} heads of the keys is required; got {heads}")
    if CHECK and qo_indptr is not None:
        check_bounds(qo_indptr, "cum_seq_lens_q", rows)
    if CHECK and kv_indptr is not None and page_indices is None:
        check_bounds(kv_indptr, "cum_seq_lens_kv", k.shape[layout])
    scaled = any(x is not None for x in (score_scale[1], out_scale[1], *by_head))
    impl = ops.choose(
        backend, q.device, q.dtype, k.dtype, out.dtype, dim, v.shape[-1], heads // kv_heads, encoding,
        draft_mask is None, 0 if page_indices is None else page_size, scaled,
    )  # fmt: skip
    if not ops.fits(impl, out, q, k, v):
        impl = "fa2"
    kind = impl, q.dtype, k.dtype, dim
    tokens = ops.tile_tokens(heads, kv_heads, ops.rows_of(*kind))
    schedule = q.new_empty(ops.words(batch_size, rows, tokens), dtype=torch.int32)
    ops.plan(
        schedule, batch_size, tokens, qo_indptr, kv_indptr, None, kv_len, page_size=page_size,
        qo_len=0 if qo_indptr is not None else rows, pages_per_request=pages_per_request, causal=causal,
        window_left=window_left, kv_heads=kv_heads, short_tokens=ops.short_tokens(heads, kv_heads, *kind),
    )  # fmt: skip
    ops.attend(
        schedule, batch_size, tokens, out, lse, q, k, v, page_indices, impl, layout, encoding, causal, window_left,
        logits_soft_cap, score_scale[0], out_scale[0], 1.0, 1e4, enable_pdl, sinks, by_head[0], by_head[1], by_head[2],
        score_scale[1], out_scale[1], draft_mask,
    )  # fmt: skip


def results(
    query: torch.Tensor, dim: int, out: Any, out_dtype: Any, lse: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors to write."""
    import torch

    shape = (*query.shape[:2], dim)
    if out is None:
        out = query.new_empty(shape, dtype=query.dtype if out_dtype is None else canonicalize_torch_dtype(out_dtype))
    else:
        wanted = None if out_dtype is None else canonicalize_torch_dtype(out_dtype)
        check_shape_dtype_device(out, shape, wanted, query.device, "out")
    if lse is not None:
        check_shape_dtype_device(lse, shape[:2], torch.float32, query.device, "lse")
    elif return_lse:
        lse = query.new_empty(shape[:2], dtype=torch.float32)
    return out, lse


def attend_tables(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    kv_layout: str,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    **options: Any,
) -> None:
    """`attend_once` over a block table."""
    layout, (k, v) = code(LAYOUTS, kv_layout, "kv_layout"), cache
    pages, pitch = flat_tables(block_tables)
    batch_size = block_tables.shape[0]
    if seq_lens.numel() != batch_size or len(qo_indptr) != batch_size + 1:
        raise ValueError(
            f"block_tables: one row, and one of seq_lens, for each of the {len(qo_indptr) - 1} requests is required; "
            f"got {batch_size} and {seq_lens.numel()}"
        )
    if CHECK:
        check_tables(k.shape[0], block_tables, seq_lens.view(-1), k.shape[1 + layout])
    attend_once(
        out, lse, query, k, v, layout, batch_size, qo_indptr=int32_index(qo_indptr),
        kv_len=int32_index(seq_lens.view(-1)), page_indices=pages, pages_per_request=pitch, **options,
    )  # fmt: skip


@fi_api(trace=tables_trace)
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention over a block table: `softmax(q k^T * bmm1_scale) v * bmm2_scale`, without a plan.

    query: `[qo_tokens, num_qo_heads, head_dim]`; request b has rows `cum_seq_lens_q[b] : cum_seq_lens_q[b + 1]` (int32
    `[batch_size + 1]`, on the device), its last tokens. kv_cache: a tuple (k_cache, v_cache), or one tensor whose dim 1
    is 2 (K, V) or 1 (both are the same); "HND" (`[pages, num_kv_heads, page_size, head_dim]`) or "NHD". block_tables:
    `[batch_size, max_pages]`, int32; entries beyond a request's pages are not read. seq_lens: `[batch_size]`, int32 or
    uint32 (int64 is converted): tokens, those of the query included.

    The scales are numbers or fp32 tensors of one element on the device; there is no other factor, so bmm1_scale has to
    contain `1 / sqrt(head_dim)`. causal: a row sees the keys up to its own. window_left: how many keys before its own
    a row sees; -1: all. sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to the sum of the softmax.

    out: written if given; its dtype, or out_dtype, or query's. lse: fp32 `[qo_tokens, num_qo_heads]`, base 2, written
    if given, returned with return_lse. backend: "trtllm-gen", "cute-dsl", "cutlass" and "auto" mean the same kernels.
    skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress: nothing is skipped or rounded, which any
    setting allows. workspace_buffer, max_q_len, max_kv_len, cum_seq_lens_kv, multi_ctas_kv_counter_buffer: not needed.

    Returns out or (out, lse). Raises KeyError (backend, kv_layout), ValueError (shape, dtype, device), and
    NotImplementedError for NVFP4 and separate tables of K and V. With FI_CHECK=1 at import, also ValueError for page
    ids out of range, which waits for the device.
    """
    if backend not in _BACKENDS:
        raise KeyError(f"backend: allowed are {', '.join(_BACKENDS)}; got {backend!r}")
    refuse_nvfp4(kv_cache_sf, out, out_dtype, None if o_sf_scale == 1.0 else o_sf_scale, o_sf_vec_size)
    refuse_split_tables(uses_shared_paged_kv_idx)
    cache = cache_pair(kv_cache, kv_layout)
    result, lse = results(query, cache[1].shape[3], out, out_dtype, lse, return_lse)
    if len(cum_seq_lens_q) != batch_size + 1:
        raise ValueError(
            f"cum_seq_lens_q: batch_size + 1 = {batch_size + 1} elements are required; got {len(cum_seq_lens_q)}"
        )
    attend_tables(
        result, lse, query, cache, kv_layout, block_tables, seq_lens, cum_seq_lens_q, causal=causal,
        window_left=window_left, score_scale=scale_product(1.0, bmm1_scale), out_scale=scale_product(1.0, bmm2_scale),
        sinks=sinks, enable_pdl=enable_pdl,
    )  # fmt: skip
    return (result, lse) if return_lse and lse is not None else result


@fi_api
def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    o_sf_scale: float | None,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    skip_all_rows_active_check: bool = False,
    sage_attn_sfs: Any = None,
    num_elts_per_sage_attn_blk: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention over contiguous keys, as MLA prefill needs it: `softmax(q k^T * bmm1_scale) v * bmm2_scale`.

    query: `[qo_tokens, num_qo_heads, head_dim_qk]`, key: `[kv_tokens, num_kv_heads, head_dim_qk]`, value: `[kv_tokens,
    num_kv_heads, head_dim_vo]`, (192, 128) for DeepSeek. cum_seq_lens_q, cum_seq_lens_kv: int32 `[batch_size + 1]` on
    the device, where the requests begin. is_causal aligns to the bottom right. bmm1_scale contains
    `1 / sqrt(head_dim_qk)`. The rest, results and errors are as in
    `trtllm_batch_context_with_kv_cache`; seq_lens, the `_cpu` lengths and skip_all_rows_active_check are not needed.
    sage_attn_sfs, num_elts_per_sage_attn_blk (factors of blocks, SageAttention) are not supported.
    """
    for name, came in (("sage_attn_sfs", sage_attn_sfs), ("num_elts_per_sage_attn_blk", num_elts_per_sage_attn_blk)):
        if came is not None and any(x is not None for x in (came if isinstance(came, (tuple, list)) else (came,))):
            raise unsupported(name, came, "pass 16-bit tensors, or e4m3 ones with their scale in bmm1_scale")
    if backend not in _BACKENDS:
        raise KeyError(f"backend: allowed are {', '.join(_BACKENDS)}; got {backend!r}")
    refuse_nvfp4(None, out, None, None if o_sf_scale in (1.0, -1.0) else o_sf_scale, None)
    result, lse = results(query, value.shape[2], out, None, lse, return_lse)
    attend_once(
        result, lse, query, key, value, 0, batch_size, qo_indptr=int32_index(cum_seq_lens_q),
        kv_indptr=int32_index(cum_seq_lens_kv), causal=is_causal, window_left=window_left,
        score_scale=scale_product(1.0, bmm1_scale), out_scale=scale_product(1.0, bmm2_scale), sinks=attention_sinks,
        enable_pdl=enable_pdl,
    )  # fmt: skip
    return (result, lse) if return_lse and lse is not None else result
