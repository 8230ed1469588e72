"""MLA decode in one call over block tables, dense or sparse: the names of TensorRT-LLM's and XQA's kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from fi_core.attention import derived
from fi_core.attention.contract import Scale, check_backend, check_workspace, flat_tables, number, results
from fi_core.attention.ops import mla as ops
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.page.latent import WIDTH, latent_cache
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import with_lse
from fi_core.runtime.signature import takes
from fi_core.utils import round_up

_BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "xqa", "cute-dsl")
_LSE_BASES = {None: False, "base2": False, "basee": True}
_SCALE_FORMATS = ("auto", "arbitrary_fp32", "pow2_fp32", "ue8m0")


def _require(when: str = "", **values: tuple[Any, Any]) -> None:
    """Raises ValueError for a value that is not the one required: (value, required) by name."""
    for name, (value, required) in values.items():
        if value != required:
            raise ValueError(f"{name}: {required} is required{when}; got {value!r}")


def _check_words(
    backend: str, lse_base: str | None, scale_format: str, kv_lora_rank: int, qk_rope_head_dim: int
) -> None:
    check_backend(backend, _BACKENDS, ())
    if lse_base not in _LSE_BASES:
        raise ValueError(f"return_lse_base: base2 or basee is required; got {lse_base!r}")
    if scale_format not in _SCALE_FORMATS:
        raise ValueError(f"kv_scale_format: one of {', '.join(_SCALE_FORMATS)} is required; got {scale_format!r}")
    _require(kv_lora_rank=(kv_lora_rank, ops.LATENT), qk_rope_head_dim=(qk_rope_head_dim, ops.ROPE))


def _rows(query: torch.Tensor, varying: bool) -> tuple[torch.Tensor, int]:
    """The rows of q, and those of each request; 0 where requests differ. Raises ValueError."""
    if query.ndim != (3 if varying else 4) or query.shape[-1] != WIDTH or not query.shape[-2]:
        required = "[tokens, heads, 576]" if varying else "[batch_size, q_len, heads, 576]"
        raise ValueError(f"query: {required} is required, of 1 head or more; got {tuple(query.shape)}")
    return (query, 0) if varying else (query.flatten(0, 1), query.shape[1])


def _scale(value: Scale, name: str) -> tuple[float, torch.Tensor | None]:
    """(number, None) or (1, tensor `[1]`). Raises ValueError, TypeError."""
    if not isinstance(value, torch.Tensor):
        return number(value, name), None
    if value.numel() != 1 or value.dtype is not torch.float32:
        got = f"{value.dtype}, shape {tuple(value.shape)}"
        raise ValueError(f"{name}: a number or a fp32 tensor of one element is required; got {got}")
    return 1.0, value.reshape(1)


def _sinks(sinks: Any) -> torch.Tensor | None:
    """The sinks of a call, also out of a list of one tensor."""
    if not isinstance(sinks, (list, tuple)):
        return sinks  # type: ignore[no-any-return]
    if len(sinks) != 1:
        raise ValueError(f"sinks: a tensor [heads], or a list of one, is required; got a list of {len(sinks)}")
    return sinks[0]  # type: ignore[no-any-return]


def _context(
    enable_dcp: bool, world: int, rank: int, lens: torch.Tensor | None, sparse: bool, causal: bool
) -> torch.Tensor | None:
    """The lengths on all ranks of decode context parallelism; None without. Raises ValueError."""
    if not enable_dcp:
        _require(" without enable_dcp", cp_world=(world, 1), cp_rank=(rank, 0))
        if lens is not None:
            raise ValueError("causal_seqlens_kv_global: None is required without enable_dcp; got a tensor")
        return None
    if sparse:
        raise ValueError("enable_dcp: False is required with sparse_mla_top_k; give each rank its own slots")
    if causal and lens is None:
        required = "int32 [batch_size], tokens on all ranks, is required with enable_dcp and several query tokens"
        raise ValueError(f"causal_seqlens_kv_global: {required}; got None")
    return lens


@with_lse
@fi_api
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with absorbed weights over block tables; with sparse_mla_top_k over the listed tokens only.

    It plans and runs in one call, without synchronising. Arguments that are not listed have no effect.

    Args:
        query: `[batch_size, q_len, heads, 576]`, latent part first; with cum_seq_lens_q `[tokens, heads, 576]`. fp16 or
            bf16; bf16 with a float8_e4m3fn cache.
        kv_cache: `[num_pages, page_size, 576]`, of query's dtype or float8_e4m3fn; or bytes (uint8 or float8_e4m3fn)
            `[num_pages, page_size, 656]`: a row has 512 float8_e4m3fn, a fp32 scale of each 128 of them, and 64 bf16
            of the rotary part (DeepSeek V3.2). Either may have an axis of 1 behind num_pages.
        workspace_buffer: schedules and partials; contiguous, aligned to 16 bytes, not shared by streams.
        kv_lora_rank: 512.
        qk_rope_head_dim: 64.
        block_tables: int32 `[batch_size, max_pages]`, page ids; sparse: int32 `[batch_size, q_len, top_k]`, slots
            of the cache (`page * page_size + offset`) that each query token attends to, -1 for none.
        seq_lens: `[batch_size]`, tokens of each request, its query tokens included; with enable_dcp those of this rank.
            Not read for sparse attention.
        sparse_mla_top_k: 0, or the width of block_tables for sparse attention.
        out: `[batch_size, q_len, heads, 512]`, of query's dtype; allocated if None.
        bmm1_scale: factor of the scores, `sm_scale` and scales of query and cache included; a number or fp32 `[1]`.
        bmm2_scale: factor of the output, likewise. A number is positive.
        sinks: fp32 `[heads]`, a logit that joins the softmax and the lse of each head; or a list of one such tensor.
        backend: "auto"; "trtllm-gen", "xqa" and "cute-dsl" mean "auto"; "fa2" and "fa3" as in the MLA wrapper.
        lse: fp32 `[batch_size * q_len, heads]`, written if given.
        return_lse: also return lse.
        kv_scale_format: "auto", "arbitrary_fp32", "pow2_fp32" or "ue8m0"; all fp32 scales are taken as they are.
        cum_seq_lens_q: int32 `[batch_size + 1]`, offsets of query tokens.
        sparse_mla_top_k_lens: int32 `[batch_size * q_len]`, entries of each row of block_tables; default: all.
        enable_dcp: the tokens of a request are shared out to ranks: token j here is token `j * cp_world + cp_rank`.
            Merge the states of the ranks by `merge_states`.
        cp_world, cp_rank: ranks, and this one.
        causal_seqlens_kv_global: int32 `[batch_size]`, tokens of each request on all ranks; required with enable_dcp
            and several query tokens.
        return_lse_base: "base2" (the default) or "basee".

    Returns:
        out, or (out, lse). With several query tokens attention is causal.

    Raises:
        ValueError: shape, dtype, device, stride, width or backend.
    """
    _check_words(backend, return_lse_base, kv_scale_format, kv_lora_rank, qk_rope_head_dim)
    q, q_len = _rows(query, cum_seq_lens_q is not None)
    shape, sparse = (*query.shape[:-1], ops.LATENT), sparse_mla_top_k > 0
    out, lse = results(query, shape, out, lse, return_lse, query.dtype, q.shape[:2])
    causal, kernels = not sparse and q_len != 1, backend if backend in ("fa2", "fa3") else "auto"
    context = _context(enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, sparse, causal)
    cache = latent_cache("kv_cache", kv_cache.squeeze(1) if kv_cache.ndim == 4 else kv_cache, query, sparse)
    if sparse:
        tables = sparse_tables(cache.placed(block_tables), sparse_mla_top_k, sparse_mla_top_k_lens, q.shape[0])
    else:
        tables = dense_tables(block_tables, seq_lens, cum_seq_lens_q, q_len, len(query))
    fine = is_on() and ops.fine_splits(q.device, q.shape[1], not sparse, cache.ckv.dtype, kernels)
    grid, schedule, partials = plan_in(workspace_buffer, 1 if sparse else cache.ckv.shape[1], q, tables, context, fine)
    scale, score_scale = _scale(bmm1_scale, "bmm1_scale")
    value_scale, out_scale = _scale(bmm2_scale, "bmm2_scale")
    if not value_scale > 0:
        raise ValueError(f"bmm2_scale: a positive number is required; got {value_scale!r}")
    ops.batch_mla(
        out.flatten(0, 1) if out.ndim == 4 else out, lse, partials, schedule, q[..., : ops.LATENT],
        q[..., ops.LATENT :], cache.ckv, cache.kpe, tables.table, tables.batch_size(q), **grid, backend=kernels,
        sm_scale=scale / value_scale, causal=causal, ckv_scale=value_scale, kpe_scale=value_scale,
        ckv_scales=cache.scales, lse_base_e=_LSE_BASES[return_lse_base], sparse=sparse, sinks=_sinks(sinks),
        score_scale=score_scale, out_scale=out_scale, cp_world=cp_world, cp_rank=cp_rank, enable_pdl=enable_pdl,
    )  # fmt: skip
    return (out, lse) if return_lse and lse is not None else out


_OF_XQA = words(
    "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len",
    "out bmm1_scale bmm2_scale sinks enable_pdl",
)


@takes(derived.xqa_mla, _OF_XQA, trtllm_batch_decode_with_kv_cache_mla)
def xqa_batch_decode_with_kv_cache_mla(given: dict[str, Any]) -> torch.Tensor:
    """`trtllm_batch_decode_with_kv_cache_mla` for dense attention, under XQA's name."""
    return trtllm_batch_decode_with_kv_cache_mla(**given)  # type: ignore[no-any-return]


class Tables(NamedTuple):
    """The page table of a call, flat with `width` entries a request, and lengths.

    lengths: of each request; None: all its entries. indptr: offsets of query tokens; None: q_len each.
    """

    table: torch.Tensor
    width: int
    lengths: torch.Tensor | None
    indptr: torch.Tensor | None
    q_len: int

    def batch_size(self, q: torch.Tensor) -> int:
        return q.shape[0] if self.lengths is None else self.lengths.numel()


def dense_tables(
    block_tables: torch.Tensor, seq_lens: Any, indptr: torch.Tensor | None, q_len: int, rows: int
) -> Tables:
    """The tables of requests, as many as rows of query, or as indptr has. Raises ValueError."""
    if seq_lens is None:
        raise ValueError("seq_lens: [batch_size] is required without sparse_mla_top_k; got None")
    batch_size = rows if indptr is None else indptr.numel() - 1
    if batch_size != seq_lens.numel() or batch_size != block_tables.shape[0]:
        got = f"{batch_size} requests are required, by query; got {seq_lens.numel()} and {block_tables.shape[0]}"
        raise ValueError(f"seq_lens, block_tables: lengths and rows of {got}")
    return Tables(*flat_tables(block_tables), seq_lens, indptr, q_len)


def sparse_tables(block_tables: torch.Tensor, top_k: int, lens: torch.Tensor | None, tokens: int) -> Tables:
    """The tables of sparse attention, in which each query token is a request of its own."""
    if block_tables.shape[-1] != top_k or block_tables.numel() != tokens * top_k or not block_tables.is_contiguous():
        required = f"contiguous indices of {tokens} query tokens times sparse_mla_top_k {top_k} are required"
        raise ValueError(f"block_tables: {required}; got {tuple(block_tables.shape)}")
    if lens is not None and lens.numel() != tokens:
        raise ValueError(f"sparse_mla_top_k_lens: {tokens} lengths are required; got {lens.numel()}")
    return Tables(block_tables.view(-1), top_k, None if lens is None else lens.view(-1), None, 1)


def plan_in(
    workspace: torch.Tensor, page_size: int, q: torch.Tensor, tables: Tables, context: Any = None, fine: bool = False
) -> tuple[dict[str, int], torch.Tensor, torch.Tensor]:
    """The grid and its splits (fine: fixed ones), the schedules where the workspace begins, and partials."""
    check_workspace(workspace, "workspace_buffer")
    flat, heads, batch_size = workspace.view(torch.uint8).view(-1), q.shape[1], tables.batch_size(q)
    first = round_up(4 * ops.words_of(ops.sizes(workspace.device, heads), batch_size), 256)
    if flat.numel() <= first:
        raise ValueError(f"workspace_buffer: more than {first} bytes are required; got {flat.numel()}")
    fixed_splits = is_on()
    size, schedule, partials = ops.place(flat[:first], flat[first:], heads, batch_size, fixed_splits)
    ops.mla_plan(
        schedule, tables.lengths, page_size, heads, size.max_ranges, size.narrow_ranges, size.wide_ranges,
        ops.NARROW_ROWS, ops.WIDE_ROWS * size.cluster, qo_indptr=tables.indptr, pages_per_request=tables.width,
        qo_len=tables.q_len, context_lens=context, batch_size=batch_size, fixed_splits=fixed_splits,
        workspace_floats=partials.numel(), fine_splits=fine,
    )  # fmt: skip
    return {**size._asdict(), "fixed_splits": fixed_splits, "fine_splits": fine}, schedule, partials
