"""Batch decode over block tables in one call without a plan: the interfaces of TensorRT-LLM and of its XQA kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fi_core.attention import contract, derived
from fi_core.attention.contract import LAYOUTS, Cache, Scale, code, op_scales, row_elements, scales_of
from fi_core.attention.forms import trace
from fi_core.attention.forms.tables_plan import BlockTablesPlan, buffers_in, step_of
from fi_core.attention.mask import mask_of_rank, pages_of_heads
from fi_core.attention.ops import decode as ops
from fi_core.attention.ops.request import facts_of
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import unsupported
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import with_lse
from fi_core.runtime.signature import takes
from fi_core.runtime.tensors import viewed
from fi_core.utils import ceil_div, check_shape_dtype_device, int32_index

_BACKENDS: dict[str, int] = dict.fromkeys(("auto", "trtllm-gen", "xqa"), 0)
_LN2 = math.log(2)
# Requests that differ in query tokens: decode is the faster way up to these (docs/notes/decode-draft-tokens.md).
_ONE_WAVE, _MOST_MASKED = 128, 256  # row tiles of all requests; rows of a kv head


class _Call(NamedTuple):
    """The arguments that the decode functions over block tables have in common."""

    out: torch.Tensor
    lse: torch.Tensor | None
    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    kv_layout: str
    workspace: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, Any]  # of batch_decode and of batch_prefill alike
    mask: torch.Tensor | None = None
    disable_split_kv: bool = False
    shared_table: bool = True  # as `shared` of page_tables
    plan: BlockTablesPlan | None = None


def _attend(c: _Call, q_len: int, qo_indptr: torch.Tensor | None = None) -> None:
    """Plans and runs batch decode for the rows `[batch_size * q_len, num_qo_heads, head_dim]` of q.

    qo_indptr: offsets of the rows of each request, of which q_len is then the maximum.
    """
    q, (k, v) = c.q, c.cache
    layout = code(LAYOUTS, c.kv_layout, "kv_layout")
    pages, pitch, v_table_offset = contract.page_tables(c.block_tables, c.shared_table)
    batch_size = c.block_tables.shape[0]
    seq_lens, mask = viewed("seq_lens", c.seq_lens, -1), c.mask
    if len(seq_lens) != batch_size or (qo_indptr is None and q.shape[0] != batch_size * q_len):
        raise ValueError(
            f"query: batch_size * q_len_per_req rows are required, with one row of block_tables ({batch_size}) and one "
            f"of seq_lens ({len(seq_lens)}) for each request; got {q.shape[0]} rows for q_len_per_req = {q_len}"
        )
    page_size, kv_heads = (k.shape[1], k.shape[2]) if layout == 0 else (k.shape[2], k.shape[1])
    if kv_heads < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"query: a multiple of the cache's {kv_heads} heads is required; got {q.shape[1]}")
    if mask is not None:
        if mask.ndim not in (2, 3) or not mask.is_contiguous() or mask.numel() % max(1, q.shape[0]):
            required = f"uint16 [batch_size, q_len_per_req, words] is required, contiguous, for {q.shape[0]} rows"
            got = f"{tuple(mask.shape)} of {mask.dtype} with strides {mask.stride()}"
            raise ValueError(f"mask: {required}; got {got}")
        mask = mask.view(torch.uint8)
        mask = mask if mask.ndim == 2 else mask.view(q.shape[0], -1)
    facts = facts_of(q, k, v, c.out.dtype, kv_heads, page_size, split_tables=v_table_offset != 0)
    tables, varying = (pages, pitch, seq_lens), qo_indptr is not None
    step = step_of(facts, *tables, (q.shape[1], kv_heads), q_len, c.options["window_left"], c.disable_split_kv, varying)
    if c.plan is None:
        buffers = buffers_in(c.workspace, step)
        step.write(buffers, seq_lens)()
    else:
        buffers = c.plan.buffers(step)
    ops.batch_decode(
        c.out, c.lse, buffers.partials, buffers.schedule, q, k, v, pages, layout, buffers.num_ctas, buffers.num_ranges,
        split_kv=buffers.split_kv, q_len=q_len, mask=mask, qo_indptr=qo_indptr, v_table_offset=v_table_offset,
        heads_per_tile=step.heads_per_tile, **c.options,
    )  # fmt: skip


def _attend_ragged(c: _Call, qo_indptr: torch.Tensor, most: int | None, name: str) -> None:
    """`_attend` for requests that differ in query tokens. most: their maximum, the argument `name`; None: unknown.

    Decode reads the keys again for each 16 rows of a kv head, but splits those of a request over CTAs. Prefill reads
    them once but does not split them, and its Hopper kernels support no mask.
    """
    qo_indptr, most = int32_index(qo_indptr), None if most == 1 else most  # 1 is the default, not a bound
    q, mask = c.q, c.mask
    if mask is not None:
        width = mask.shape[-1] * mask.element_size()
        if mask.ndim != 2 or mask.shape[0] != q.shape[0] or (most is not None and width != ceil_div(most, 32) * 4):
            words = "n" if most is None else f"ceil({name} / 32) * 2"
            raise ValueError(
                f"mask: uint16 [tokens, {words}] is required where requests differ in query tokens, for {q.shape[0]} "
                f"tokens and {name} = {most}; got {tuple(mask.shape)} of {mask.dtype}"
            )
    kv_heads = c.cache[0].shape[2 if c.kv_layout == "NHD" else 1]
    batch_size, rows = c.block_tables.shape[0], (most or 0) * (q.shape[1] // max(1, kv_heads))
    one_wave = not c.disable_split_kv and batch_size * kv_heads * ceil_div(rows, ops.Q_TILE) <= _ONE_WAVE
    few = rows <= ops.Q_TILE or one_wave
    # The batch does not decide with disable_split_kv, nor where is_on(). Prefill refuses tables that do not fit.
    fits = (few if mask is None else rows <= _MOST_MASKED) and not is_on()
    if most and qo_indptr.shape[0] == batch_size + 1 and fits:
        _attend(c, most, qo_indptr)
        return
    from fi_core.attention.forms.tables_prefill import attend_tables  # loaded where it is needed

    mask = None if mask is None else mask.view(torch.uint8)
    attend_tables(
        c.out, c.lse, q, c.cache, c.kv_layout, c.block_tables, c.seq_lens, qo_indptr, c.shared_table, causal=True,
        mask=mask, **c.options,
    )  # fmt: skip


def _attend_heads(c: _Call, q_len: int) -> None:
    """`_attend` for a block table of each kv head: every one is a request of its own, with one kv head."""
    if c.options["sinks"] is not None:
        raise unsupported("sinks", c.options["sinks"], "leave them out with enable_block_sparse_attention")
    layout = code(LAYOUTS, c.kv_layout, "kv_layout")
    cache, tables, lengths = pages_of_heads(c.cache, layout, c.block_tables, c.seq_lens)
    heads, batch_size = c.block_tables.shape[:2]
    if c.q.ndim != 3 or c.q.shape[0] != batch_size * q_len or c.q.shape[1] % heads:
        shape = f"[{batch_size * q_len}, a multiple of {heads}, head_dim]"
        raise ValueError(f"query: {shape} is required; got {tuple(c.q.shape)}")

    def by_head(x: torch.Tensor) -> torch.Tensor:
        """Rows of request, kv head and token, each with the query heads of the kv head."""
        return x.unflatten(0, (batch_size, q_len)).unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 2)  # type: ignore[no-any-return]

    out, lse = by_head(c.out), None if c.lse is None else by_head(c.lse)
    mask = None if c.mask is None else c.mask.repeat_interleave(heads, 0)
    call = c._replace(out=out, lse=lse, q=by_head(c.q), cache=cache, block_tables=tables, seq_lens=lengths, mask=mask)
    _attend(call, q_len)
    for given, written in ((c.out, out), (c.lse, lse)):
        if written is not None and given is not None and written.data_ptr() != given.data_ptr():
            rows = written.unflatten(0, (batch_size, heads, q_len)).transpose(1, 2)
            given.view(rows.shape).copy_(rows)


def _run(
    c: _Call, q_len: int, by_head: bool, qo_indptr: torch.Tensor | None, max_q_len: int | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if c.plan is not None and (by_head or qo_indptr is not None or not c.shared_table):
        raise unsupported("plan", c.plan, "leave it out with cum_seq_lens_q, sparse blocks or separate tables")
    if by_head:
        _attend_heads(c, q_len)
    elif qo_indptr is not None:
        _attend_ragged(c, qo_indptr, max_q_len, "max_q_len")
    else:
        _attend(c, q_len)
    return (c.out, c.lse) if return_lse and c.lse is not None else c.out


def _check_options(by_head: bool, cp_world: int, others: bool, shared_table: bool, kv_cache_sf: Any) -> None:
    """Raises NotImplementedError for options that exclude each other.

    by_head: enable_block_sparse_attention; others: whether an option is set that neither that nor cp_world permits.
    """
    if by_head and not shared_table:
        raise unsupported("uses_shared_paged_kv_idx", False, "pass one table with enable_block_sparse_attention")
    if others:
        advice = "leave out cum_seq_lens_q and mask, window_left with cp_world, and one of both for q_len_per_req > 1"
        raise unsupported("enable_block_sparse_attention, cp_world", (by_head, cp_world), advice)
    if kv_cache_sf is not None:
        raise unsupported("kv_cache_sf", type(kv_cache_sf).__name__, "leave out enable_block_sparse_attention")


def _results(
    query: torch.Tensor, v: torch.Tensor, out: Any, lse: Any, return_lse: bool, out_dtype: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`results` of query's dtype, fp16, bf16 or e4m3."""
    shape = (*query.shape[:2], row_elements(v))
    result, lse = contract.results(query, shape, out, lse, return_lse, out_dtype)
    if result.dtype not in (query.dtype, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        got = f"float16, bfloat16 or float8_e4m3fn is required; got {result.dtype}"
        raise ValueError(f"out_dtype: the query's ({query.dtype}), {got}")
    return result, lse


@with_lse
@fi_api(trace=trace.decode)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: Any = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: Any = None,
    *,
    disable_split_kv: bool = False,
    plan: BlockTablesPlan | None = None,
    logits_soft_cap: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a block table, without a plan: `softmax(q k^T * bmm1_scale) v * bmm2_scale` (TensorRT-LLM).

    Args:
        query: `[batch_size * q_len_per_req, num_qo_heads, head_dim]`. The query tokens are the last of their request;
            each attends to the keys up to its own position.
        kv_cache: a tuple (k_cache, v_cache), or one tensor whose dim 1 is 2 (K, V) or 1 (both are the same).
        workspace_buffer: on the device, contiguous, any content. 8 MiB is enough for any lengths and head dims up to
            256. It is scratch: calls that may overlap need one each.
        block_tables: int32 `[batch_size, max_pages]`; entries beyond a request's pages are not read. Without
            uses_shared_paged_kv_idx `[batch_size, 2, max_pages]`: pages of k_cache, and pages of v_cache.
        seq_lens: int32, uint32 or int64 `[batch_size]`, tokens of each request including those of the query.
        max_seq_len: not needed.
        bmm1_scale: the only factor of the scores, so it includes `1 / sqrt(head_dim)`; a number or a one-element fp32
            tensor on the device.
        bmm2_scale: factor of the output, likewise.
        window_left: number of keys before its own that a query attends to; -1: all.
        out: written and returned if given.
        out_dtype: dtype of the output: query's, fp16, bf16 or e4m3, which saturates; default that of out, or query's.
        o_sf_scale, o_sf_vec_size: of an NVFP4 output, not supported.
        kv_cache_sf: for NVFP4 caches (uint8, two elements a byte) the scales, in the form of the cache with head_dim /
            16 instead of head_dim / 2: e4m3, or their bytes as uint8. Global factors belong to bmm1_scale and
            bmm2_scale.
        sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to row_sum.
        kv_layout: "HND" (`[pages, num_kv_heads, page_size, head_dim]`) or "NHD".
        enable_pdl: programmatic dependent launch; None: where the device supports it.
        backend: "auto", "trtllm-gen" and "xqa" mean the same kernels.
        q_len_per_req: query tokens of each request.
        mask: with q_len_per_req > 1, for speculative trees: uint16 `[batch_size, q_len_per_req, ceil(q_len_per_req /
            32) * 2]`; bit t of row r: it attends to query token t. With cum_seq_lens_q uint16 `[tokens, ceil(max_q_len
            / 32) * 2]`, or any width without max_q_len.
        max_q_len: with cum_seq_lens_q, the longest qo_len. Without it the kernels are those of prefill, which do not
            split the keys of a request.
        cum_seq_lens_q: int32 `[batch_size + 1]` on the device; replaces q_len_per_req where requests differ. query is
            then `[tokens, num_qo_heads, head_dim]`, and request b has its rows `cum_seq_lens_q[b] : cum_seq_lens_q[b +
            1]`, also those of mask.
        skip_softmax_threshold_scale_factor: without effect; no softmax is skipped, which any threshold permits.
        lse: fp32 `[rows, num_qo_heads]`, base 2, written if given.
        return_lse: also return lse.
        bmm1_scale_log2: tensor, `bmm1_scale * log2 e`; replaces bmm1_scale.
        o_scale: without effect: bmm2_scale includes `1 / o_scale`, so the factor of the output is bmm2_scale alone.
        multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode, request_order, request_order_plan: not needed.
        uses_shared_paged_kv_idx: whether K and V of a token are in pages of the same id.
        enable_block_sparse_attention: block_tables has the pages of each kv head, int32 `[num_kv_heads, batch_size,
            max_pages]`, and seq_lens counts the tokens in them, `[batch_size]` or `[num_kv_heads, batch_size]`.
            Causality and window count the listed keys.
        cp_world, cp_rank: ranks that share the keys of a request, and this one (context parallelism): key i of its
            cache is token `i * cp_world + cp_rank`, and seq_lens counts the keys of this rank. Merge the results of all
            ranks with `merge_states`.
        causal_seqlens_kv_global: `[batch_size]` on the device, lengths over all ranks, required for q_len_per_req > 1
            with cp_world > 1.
        disable_split_kv: no request is split, so its result has the same bits alone and in any batch of the same
            q_len_per_req or max_q_len (not an argument of FlashInfer).
        plan: of these block_tables and seq_lens, made once a step for all layers; None: each call plans, by a launch of
            its own (not an argument of FlashInfer).
        logits_soft_cap: c > 0 replaces scores by `c tanh(score / c)` (not an argument of FlashInfer).

    Returns:
        out, or (out, lse).

    Raises:
        KeyError: backend or kv_layout.
        ValueError: shape, dtype or device.
        NotImplementedError: NVFP4 output; sparse blocks or context parallelism with cum_seq_lens_q or mask; both for
            several query tokens; sparse blocks with separate tables of K and V or with kv_cache_sf; plan with
            cum_seq_lens_q, sparse blocks or separate tables.
    """
    code(_BACKENDS, backend, "backend")
    contract.refuse_nvfp4(out, out_dtype, o_sf_scale, o_sf_vec_size)
    q_len, cache = 1 if q_len_per_req is None else q_len_per_req, contract.cache_pair(kv_cache, kv_layout)
    by_head, sharded = enable_block_sparse_attention, cp_world != 1 or causal_seqlens_kv_global is not None
    others = cum_seq_lens_q is not None or mask is not None or (cp_world > 1 and window_left >= 0)
    if by_head or (sharded and others):
        _check_options(by_head, cp_world, others or (sharded and q_len > 1), uses_shared_paged_kv_idx, kv_cache_sf)
    contract.check_nvfp4(kv_cache_sf, cache[0], "kv_cache")
    result, lse = _results(query, cache[1], out, lse, return_lse, out_dtype)
    scale, factor = (bmm1_scale, 1.0) if bmm1_scale_log2 is None else (bmm1_scale_log2, _LN2)
    options = {"window_left": window_left, "soft_cap": logits_soft_cap, "sinks": sinks, "enable_pdl": enable_pdl}
    options |= contract.bmm_scales(scale, bmm2_scale, scales_of(kv_cache_sf, kv_layout), factor)
    call = _Call(
        result, lse, query, cache, kv_layout, workspace_buffer, block_tables, seq_lens, options,
        mask=mask_of_rank(q_len, seq_lens, causal_seqlens_kv_global, cp_world, cp_rank) if sharded else mask,
        disable_split_kv=disable_split_kv, shared_table=uses_shared_paged_kv_idx, plan=plan,
    )  # fmt: skip
    return _run(call, q_len, by_head, cum_seq_lens_q, max_q_len, return_lse)


_OF_XQA = words(
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out sinks",
    "kv_layout enable_pdl q_len_per_req o_scale mask kv_cache_sf q_cu_seq_lens=cum_seq_lens_q * disable_split_kv",
)


@fi_api
@takes(derived.xqa_decode, _OF_XQA, trtllm_batch_decode_with_kv_cache, kv_layout="NHD")
def xqa_batch_decode_with_kv_cache(given: dict[str, Any]) -> torch.Tensor:
    """`trtllm_batch_decode_with_kv_cache` with "NHD" as the default layout; the output has the dtype of out or query.

    Args:
        q_cu_seq_lens: cum_seq_lens_q of that function, with q_len_per_req as its max_q_len.
    """
    return trtllm_batch_decode_with_kv_cache(**given, max_q_len=given["q_len_per_req"])  # type: ignore[no-any-return]


@fi_api
def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor | None,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: Scale = 1.0,
    kv_scale: Scale = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
    disable_split_kv: bool = False,
) -> None:
    """Decode attention over a page table, into `output`; scores are `q k^T * q_scale * kv_scale / sqrt(head_dim)`
    (XQA).

    The output is multiplied by `kv_scale * rcp_out_scale`.

    Args:
        q, output: `[batch_size, 1, num_qo_heads, head_dim]`, or `[batch_size, 1, q_seq_len, num_qo_heads, head_dim]`;
            with q_cu_seq_lens `[tokens, num_qo_heads, head_dim]`, optionally after axes of 1.
        k_cache, v_cache: pages of page_size tokens (any size from 1) of num_kv_heads heads.
        page_table: int32 `[batch_size, max_pages]`.
        seq_lens: uint32 `[batch_size, 1]`.
        workspace_buffer: as in `trtllm_batch_decode_with_kv_cache`.
        semaphores, sm_count: not needed.
        num_kv_heads, page_size: of the caches.
        sinks: fp32 `[num_kv_heads, group_size]`.
        q_scale, kv_scale, rcp_out_scale: numbers or one-element fp32 tensors.
        sliding_win_size: number of keys that the last query token attends to; 0: all.
        q_seq_len: query tokens of each request; with q_cu_seq_lens the maximum.
        mask, kv_layout, enable_pdl, disable_split_kv: as in `trtllm_batch_decode_with_kv_cache`.
        q_cu_seq_lens: int32 `[batch_size + 1]` on the device, where requests differ in query tokens.
        k_sf_cache, v_sf_cache: the scales of NVFP4 caches, as kv_cache_sf of `trtllm_batch_decode_with_kv_cache`.

    Raises:
        ValueError: shape, dtype or device.
        KeyError: kv_layout.
    """
    if (k_sf_cache is None) is not (v_sf_cache is None):
        raise ValueError(f"k_sf_cache, v_sf_cache: both or neither are required; got {k_sf_cache!r}, {v_sf_cache!r}")
    contract.check_nvfp4(k_sf_cache, k_cache, "k_cache")
    code(LAYOUTS, kv_layout, "kv_layout")
    tokens, heads = (1, 2) if kv_layout == "NHD" else (2, 1)
    if k_cache.ndim != 4 or (k_cache.shape[tokens], k_cache.shape[heads]) != (page_size, num_kv_heads):
        pages = f"pages of page_size = {page_size} tokens and num_kv_heads = {num_kv_heads} ({kv_layout})"
        raise ValueError(f"k_cache: {pages} are required; got shape {tuple(k_cache.shape)}")
    check_shape_dtype_device(output, (*q.shape[:-1], row_elements(v_cache)), None, q.device, "output")
    out = viewed("output", output, -1, q.shape[-2], row_elements(v_cache))
    query = viewed("q", q, -1, *q.shape[-2:])
    window_left = sliding_win_size - 1 if sliding_win_size > 0 else -1
    flat_sinks, of_cache = None if sinks is None else sinks.reshape(-1), (k_sf_cache, v_sf_cache)
    options = {"window_left": window_left, "sinks": flat_sinks, "enable_pdl": enable_pdl}
    options |= op_scales((q.shape[-1] ** -0.5, q_scale, kv_scale), (rcp_out_scale, kv_scale), of_cache)
    call = _Call(
        out, None, query, (k_cache, v_cache), kv_layout, workspace_buffer, page_table, seq_lens, options, mask,
        disable_split_kv,
    )  # fmt: skip
    if q_cu_seq_lens is None:
        _attend(call, q_seq_len)
    else:
        _attend_ragged(call, q_cu_seq_lens, q_seq_len, "q_seq_len")
