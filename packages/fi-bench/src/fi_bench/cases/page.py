"""Cases of the paged cache: the last s_qo tokens of every request are new."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch


def _table(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "batch_size", "page_size", qo_len="s_qo", kv_len="s_kv", dtype="kv_dtype")


def _write(x: Inputs, cache: torch.Tensor, rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """Writes the rows into a cache with pages of tokens first."""
    first = x.kv_indptr[x.batch_indices.long()] + x.positions // page_size
    page, slot = x.kv_indices[first.long()].long(), (x.positions % page_size).long()
    cache.view(_bits(cache))[page, slot] = rows.view(_bits(rows))  # float8 has no index_put: move the bytes
    return cache


def _bits(t: torch.Tensor) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]


def _torch_kv(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = x.paged_kv_cache
    caches = (k, v) if x.kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))
    for cache, rows in zip(caches, (x.append_key, x.append_value), strict=True):
        _write(x, cache, rows, cache.shape[1])
    return k, v


def _torch_nvfp4(x: Inputs) -> tuple[torch.Tensor, ...]:
    """Both caches, then their scales."""
    import torch

    from fi_core.quantization.reference import e4m3_scaled

    caches = *x.paged_kv_cache, *x.kv_cache_sf
    pages = [c if x.kv_layout == "NHD" else c.transpose(1, 2) for c in caches]
    page_size = pages[0].shape[1]
    if "slot_mapping" in x:
        page, slot = x.slot_mapping // page_size, x.slot_mapping % page_size
    else:
        first = x.kv_indptr[x.batch_indices.long()] + x.positions // page_size
        page, slot = x.kv_indices[first.long()].long(), (x.positions % page_size).long()
    for i, (rows, scale) in enumerate(((x.append_key, x.k_scale), (x.append_value, x.v_scale))):
        factor = 1.0 / torch.tensor([scale], device=rows.device)
        pages[i][page, slot], pages[2 + i][page, slot] = e4m3_scaled(rows, 16, factor)
    return caches


def _torch_mla(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    page_size = x.ckv_cache.shape[1]
    return _write(x, x.ckv_cache, x.append_ckv, page_size), _write(x, x.kpe_cache, x.append_kpe, page_size)


def _torch_concat(x: Inputs) -> torch.Tensor:
    x.k[..., : x.k_nope.shape[-1]] = x.k_nope
    x.k[..., x.k_nope.shape[-1] :] = x.k_rope
    k: torch.Tensor = x.k
    return k


def _torch_positions(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    rows = torch.arange(x.nnz, dtype=torch.int32, device=x.append_indptr.device)
    batch = torch.searchsorted(x.append_indptr, rows, right=True, out_int32=True) - 1
    after = batch.long() + 1
    return batch, x.seq_lens[batch.long()] - (x.append_indptr[after] - rows)


def _torch_lengths(x: Inputs) -> torch.Tensor:
    pages = x.kv_indptr[1:] - x.kv_indptr[:-1]
    lengths: torch.Tensor = (pages - 1).clamp(min=0) * x.page_size + x.kv_last_page_len
    return lengths


CASES = (
    described(
        "page.append_paged_kv_cache",
        lambda p: {**_table(p), **sizes_of(p, "num_kv_heads", "head_dim", v_head_dim="head_dim")},
        lambda f, x: f(
            x.append_key,
            x.append_value,
            x.batch_indices,
            x.positions,
            x.paged_kv_cache,
            x.kv_indices,
            x.kv_indptr,
            x.kv_last_page_len,
            x.kv_layout,
        ),
        _torch_kv,
        which=lambda p, template: f"kv_layout:{p.kv_layout}" in template.tags,
        op="append_paged_kv_cache",
    ),
    described(
        "page.nvfp4_quantize_append_paged_kv_cache",
        lambda p: {**_table(p), "dtype": "bfloat16", **sizes_of(p, "num_kv_heads", "head_dim", v_head_dim="head_dim")},
        lambda f, x: f(
            x.append_key,
            x.append_value,
            x.batch_indices,
            x.positions,
            x.paged_kv_cache,
            x.kv_cache_sf,
            x.kv_indices,
            x.kv_indptr,
            x.kv_last_page_len,
            x.k_scale,
            x.v_scale,
            kv_layout=x.kv_layout,
        ),
        _torch_nvfp4,
        which=lambda p, template: f"kv_layout:{p.kv_layout}" in template.tags,
        op="append_nvfp4_kv_cache",
    ),
    described(
        "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        lambda p: {**_table(p), "dtype": "bfloat16", **sizes_of(p, "num_kv_heads", "head_dim", v_head_dim="head_dim")},
        lambda f, x: f(
            x.append_key,
            x.append_value,
            x.slot_mapping,
            x.paged_kv_cache,
            x.kv_cache_sf,
            x.k_scale,
            x.v_scale,
            x.kv_layout,
        ),
        _torch_nvfp4,
        which=lambda p, template: f"kv_layout:{p.kv_layout}" in template.tags,
        op="append_nvfp4_kv_cache",
    ),
    described(
        "page.append_paged_mla_kv_cache",
        lambda p: {**_table(p), **sizes_of(p, "head_dim_ckv", "head_dim_kpe")},
        lambda f, x: f(
            x.append_ckv,
            x.append_kpe,
            x.batch_indices,
            x.positions,
            x.ckv_cache,
            x.kpe_cache,
            x.kv_indices,
            x.kv_indptr,
            x.kv_last_page_len,
        ),
        _torch_mla,
        op="append_paged_kv_cache",
    ),
    described(
        "concat_ops.concat_mla_k",
        lambda p: {"n": p.batch_size * p.s_qo, **sizes_of(p, heads="num_kv_heads")},
        lambda f, x: f(x.k, x.k_nope, x.k_rope),
        _torch_concat,
        op="concat_mla_k",
        poison=("k",),
    ),
    described(
        "page.get_batch_indices_positions",
        lambda p: {**sizes_of(p, "batch_size", qo_len="s_qo", kv_len="s_kv"), "nnz": p.batch_size * p.s_qo},
        lambda f, x: f(x.append_indptr, x.seq_lens, x.nnz),
        _torch_positions,
        op="get_batch_indices_positions",
    ),
    described(
        "page.get_seq_lens",
        lambda p: sizes_of(p, "batch_size", "page_size", kv_len="s_kv"),
        lambda f, x: f(x.kv_indptr, x.kv_last_page_len, x.page_size),
        _torch_lengths,
        op="get_seq_lens",
    ),
)
