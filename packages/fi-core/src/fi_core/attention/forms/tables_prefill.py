"""Batch prefill in one call without a plan: the interfaces of TensorRT-LLM."""

from __future__ import annotations

from typing import Any

from fi_core.attention import contract
from fi_core.attention.contract import LAYOUTS, Cache, Scale, code, results, row_elements
from fi_core.attention.forms import trace
from fi_core.attention.forms.tables_plan import ContextTablesPlan
from fi_core.attention.ops import prefill as ops
from fi_core.attention.ops.request import facts_of
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import unsupported
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.returns import with_lse
from fi_core.runtime.tensors import viewed
from fi_core.utils import PosEncodingMode, int32_index

_BACKENDS: dict[str, int] = dict.fromkeys(("auto", "trtllm-gen", "cute-dsl", "cutlass"), 0)
_SCALES = words("bmm1_scale bmm2_scale scale_q scale_k scale_v")  # by head, or on the device


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
    window_left: int = -1,
    pos_encoding: int = 0,
    backend: str = "auto",
    step: ContextTablesPlan | None = None,
    **options: Any,
) -> None:
    """Plans into a new schedule and runs batch prefill; arguments are those of `ops.prefill_plan` and
    `ops.batch_prefill`.

    step: keeps the schedule for calls like this one. options: other arguments of batch_prefill.
    """
    if q.ndim != 3 or not 0 <= batch_size < 1 << 31:
        raise ValueError(
            "query: [tokens, num_qo_heads, head_dim] and a batch_size of 0 to 2^31 - 1 are required; got shape "
            f"{tuple(q.shape)} and {batch_size}"
        )
    rows, heads, _ = q.shape
    kv_heads = k.shape[-2 - layout]
    page_size = 1 if page_indices is None else k.shape[1 + layout]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query: a multiple of the {kv_heads} heads of the keys is required; got {heads}")
    facts = facts_of(
        q, k, v, out.dtype, kv_heads, 0 if page_indices is None else page_size,
        pos_encoding=PosEncodingMode(pos_encoding).name, mask="plain" if options.get("mask") is None else "custom",
        soft_cap=options.get("soft_cap", 0.0) > 0.0, scaled=any(options.get(name) is not None for name in _SCALES),
        split_tables=options.get("v_table_offset", 0) != 0,
    )  # fmt: skip
    choice = planned(ops.BATCH_PREFILL, q.device, backend, *facts, ahead=False)
    tile_tokens = ops.tile_tokens(heads, kv_heads, ops.q_tile_rows(choice))
    tables = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len": kv_len}
    numbers = {"batch_size": batch_size, "tile_tokens": tile_tokens, "page_size": page_size, "num_kv_heads": kv_heads}
    numbers |= {"qo_len": rows if qo_indptr is None else 0, "pages_per_request": pages_per_request}
    numbers |= {"causal": bool(causal), "window_left": window_left}
    key = choice, heads, rows, *numbers.values(), *(None if x is None else x.data_ptr() for x in tables.values())
    schedule = None if step is None else step.find(key)
    if schedule is None:
        schedule = q.new_empty(ops.schedule_words(batch_size, rows, tile_tokens), dtype=torch.int32)
        short = ops.short_tile_tokens(choice, heads, kv_heads, window_left >= 0)
        ops.prefill_plan(schedule, last_page_len=None, short_tile_tokens=short, **tables, **numbers)
        if step is not None:
            step.keep(key, schedule, *tables.values())
    ops.batch_prefill(
        out, lse, schedule, q, k, v, layout, batch_size, tile_tokens, page_indices=page_indices, causal=causal,
        window_left=window_left, pos_encoding=pos_encoding, backend=backend, **options,
    )  # fmt: skip


def attend_tables(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    kv_layout: str,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    shared_table: bool = True,
    **options: Any,
) -> None:
    """`attend_once` over a block table; shared_table: as `shared` of `page_tables`."""
    layout, (k, v) = code(LAYOUTS, kv_layout, "kv_layout"), cache
    pages, pitch, v_table_offset = contract.page_tables(block_tables, shared_table)
    batch_size = block_tables.shape[0]
    if seq_lens.numel() != batch_size or qo_indptr.numel() != batch_size + 1:
        required = f"one row, and one of seq_lens, for each of the {qo_indptr.numel() - 1} requests is required"
        raise ValueError(f"block_tables: {required}; got {batch_size} and {seq_lens.numel()}")
    attend_once(
        out, lse, query, k, v, layout, batch_size, qo_indptr=int32_index(qo_indptr),
        kv_len=int32_index(viewed("seq_lens", seq_lens, -1)), page_indices=pages, pages_per_request=pitch,
        v_table_offset=v_table_offset, **options,
    )  # fmt: skip


@fi_api(trace=trace.prefill)
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
    *,
    logits_soft_cap: float = 0.0,
    plan: ContextTablesPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention over a block table, without a plan: `softmax(mask(q k^T * bmm1_scale)) v * bmm2_scale`
    (TensorRT-LLM).

    The arguments that are not listed are those of `trtllm_batch_decode_with_kv_cache`.

    Args:
        query: `[qo_tokens, num_qo_heads, head_dim]`; request b has rows `cum_seq_lens_q[b] : cum_seq_lens_q[b + 1]`,
            its last tokens.
        workspace_buffer, max_q_len, max_kv_len, cum_seq_lens_kv, multi_ctas_kv_counter_buffer: not needed.
        seq_lens: int32 or uint32 `[batch_size]` (int64 is converted), tokens of each request including those of the
            query.
        batch_size: number of requests.
        cum_seq_lens_q: int32 `[batch_size + 1]`, on the device.
        out_dtype: dtype of a new output; default query's.
        skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress: without effect; nothing is skipped or
            rounded, which any setting permits.
        causal: a row attends to the keys up to its own position.
        lse: fp32 `[qo_tokens, num_qo_heads]`, base 2, written if given.
        backend: "trtllm-gen", "cute-dsl", "cutlass" and "auto" mean the same kernels.
        logits_soft_cap: c > 0 replaces scores by `c tanh(score / c)` (not an argument of FlashInfer).
        plan: of a step, in which the first layer plans for all; None: each call plans, by a launch of its own (not an
            argument of FlashInfer).

    Returns:
        out, or (out, lse).

    Raises:
        KeyError: backend or kv_layout.
        ValueError: shape, dtype or device. Wrong contents of tables: on the CPU, and on CUDA with FI_CHECK=1 at import,
            which synchronises.
        NotImplementedError: NVFP4 output.
    """
    code(_BACKENDS, backend, "backend")
    contract.refuse_nvfp4(out, out_dtype, None if o_sf_scale == 1.0 else o_sf_scale, o_sf_vec_size)
    cache = contract.cache_pair(kv_cache, kv_layout)
    contract.check_nvfp4(kv_cache_sf, cache[0], "kv_cache")
    scales = contract.bmm_scales(bmm1_scale, bmm2_scale, contract.scales_of(kv_cache_sf, kv_layout))
    result, lse = results(query, (*query.shape[:2], row_elements(cache[1])), out, lse, return_lse, out_dtype)
    if len(cum_seq_lens_q) != batch_size + 1:
        required = f"batch_size + 1 = {batch_size + 1} elements are required"
        raise ValueError(f"cum_seq_lens_q: {required}; got {len(cum_seq_lens_q)}")
    attend_tables(
        result, lse, query, cache, kv_layout, block_tables, seq_lens, cum_seq_lens_q, uses_shared_paged_kv_idx,
        causal=causal, window_left=window_left, sinks=sinks, enable_pdl=enable_pdl, soft_cap=logits_soft_cap,
        step=plan, **scales,
    )  # fmt: skip
    return (result, lse) if return_lse and lse is not None else result


@with_lse
@fi_api
def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor | None,
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
    sage_attn_sfs: Any = (None, None, None, None),
    num_elts_per_sage_attn_blk: Any = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention over ragged K and V, for MLA prefill: `softmax(mask(q k^T * bmm1_scale)) v * bmm2_scale`.

    The arguments that are not listed, the result and other errors are those of `trtllm_batch_context_with_kv_cache`.

    Args:
        query: `[qo_tokens, num_qo_heads, head_dim_qk]`.
        key: `[kv_tokens, num_kv_heads, head_dim_qk]`.
        value: `[kv_tokens, num_kv_heads, head_dim_vo]`; DeepSeek has head dims (192, 128).
        seq_lens: int32, uint32 or int64 `[batch_size]`, keys of each request from its offset on; None: up to the next.
        q_seq_lens_cpu, kv_seq_lens_cpu, skip_all_rows_active_check: not needed.
        bmm1_scale: factor of the scores, including `1 / sqrt(head_dim_qk)`.
        cum_seq_lens_q, cum_seq_lens_kv: int32 `[batch_size + 1]` on the device, offsets of the requests.
        is_causal: causal mask, aligned to the bottom right.
        attention_sinks: the sinks.
        sage_attn_sfs, num_elts_per_sage_attn_blk: scale factors of SageAttention, not supported; None and 0 are none.

    Raises:
        NotImplementedError: SageAttention.
    """
    for name, came in (("sage_attn_sfs", sage_attn_sfs), ("num_elts_per_sage_attn_blk", num_elts_per_sage_attn_blk)):
        members = came if isinstance(came, (tuple, list)) else (came,)
        if any(x is not None and not (isinstance(x, int) and x == 0) for x in members):
            raise unsupported(name, came, "pass 16-bit tensors, or e4m3 ones with their scale in bmm1_scale")
    code(_BACKENDS, backend, "backend")
    contract.refuse_nvfp4(out, None, None if o_sf_scale in (1.0, -1.0) else o_sf_scale, None)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name}: shape [tokens, heads, head_dim] is required; got {tuple(x.shape)}")
    result, lse = results(query, (*query.shape[:2], value.shape[2]), out, lse, return_lse)
    lengths = None if seq_lens is None else int32_index(viewed("seq_lens", seq_lens, -1))
    attend_once(
        result, lse, query, key, value, 0, batch_size, qo_indptr=int32_index(cum_seq_lens_q),
        kv_indptr=int32_index(cum_seq_lens_kv), kv_len=lengths, causal=is_causal, window_left=window_left,
        sinks=attention_sinks, enable_pdl=enable_pdl, **contract.bmm_scales(bmm1_scale, bmm2_scale),
    )  # fmt: skip
    return (result, lse) if return_lse and lse is not None else result
