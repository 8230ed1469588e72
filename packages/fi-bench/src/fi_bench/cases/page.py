"""Cases of the paged cache."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Work, dtype_of
from fi_bench.cases.common import nbytes, normal, page_table

if TYPE_CHECKING:
    import torch


def _table(p: Namespace, device: Any, generator: Any) -> Inputs:
    """The last s_qo tokens of every request are new."""
    import torch

    table = page_table([p.s_kv] * p.batch_size, p.page_size, device, generator)
    rows = torch.arange(p.batch_size * p.s_qo, dtype=torch.int32, device=device)
    return Inputs(
        **table,
        batch_indices=rows // p.s_qo,
        positions=(rows % p.s_qo) + (p.s_kv - p.s_qo),
        append_indptr=torch.arange(p.batch_size + 1, dtype=torch.int32, device=device) * p.s_qo,
        seq_lens=torch.full((p.batch_size,), p.s_kv, dtype=torch.int32, device=device),
        nnz=p.batch_size * p.s_qo,
        page_size=p.page_size,
        kv_layout=p.kv_layout,
    )


def _make_kv(p: Namespace, device: Any, generator: Any) -> Inputs:
    x = _table(p, device, generator)
    dtype = dtype_of(p.kv_dtype)
    tokens = (p.page_size, p.num_kv_heads) if p.kv_layout == "NHD" else (p.num_kv_heads, p.page_size)
    new, pool = (x.nnz, p.num_kv_heads, p.head_dim), (x.num_pages, *tokens, p.head_dim)
    x.update(
        key=normal(new, dtype, device, generator),
        value=normal(new, dtype, device, generator),
        k_cache=normal(pool, dtype, device, generator),
        v_cache=normal(pool, dtype, device, generator),
    )
    return x


def _make_mla(p: Namespace, device: Any, generator: Any) -> Inputs:
    x = _table(p, device, generator)
    dtype = dtype_of(p.kv_dtype)
    for part, dim in (("ckv", p.head_dim_ckv), ("kpe", p.head_dim_kpe)):
        x[part] = normal((x.nnz, dim), dtype, device, generator)
        x[f"{part}_cache"] = normal((x.num_pages, p.page_size, dim), dtype, device, generator)
    return x


def _slots(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot of every new row."""
    first = x.kv_indptr[x.batch_indices.long()] + x.positions // x.page_size
    return x.kv_indices[first.long()].long(), (x.positions % x.page_size).long()


def _write(x: Inputs, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    page, slot = _slots(x)
    if cache.ndim == 4 and x.kv_layout == "HND":
        cache = cache.transpose(1, 2)
    # float8 has no index_put: move the bytes
    view = cache.view(_bits(cache))
    view[page, slot] = rows.view(_bits(rows))
    return cache


def _bits(t: torch.Tensor) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]


def _torch_kv(x: Inputs) -> None:
    _write(x, x.k_cache, x.key)
    _write(x, x.v_cache, x.value)


def _torch_mla(x: Inputs) -> None:
    _write(x, x.ckv_cache, x.ckv)
    _write(x, x.kpe_cache, x.kpe)


def _whole(*names: str) -> Any:
    """The whole caches are compared, so that a write to a wrong slot shows."""

    def outputs(x: Inputs, _: Any) -> Outputs:
        return {name: x[name].view(_bits(x[name])) for name in names}

    return outputs


def _after(run: Any, *names: str) -> Any:
    def reference(x: Inputs) -> Outputs:
        copy = Inputs(x | {name: x[name].clone() for name in names})
        run(copy)
        outputs: Outputs = _whole(*names)(copy, None)
        return outputs

    return reference


def _positions(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    rows = torch.arange(x.nnz, dtype=torch.int32, device=x.append_indptr.device)
    batch = torch.searchsorted(x.append_indptr, rows, right=True, out_int32=True) - 1
    after = batch.long() + 1
    return batch, x.seq_lens[batch.long()] - (x.append_indptr[after] - rows)


def _position_outputs(x: Inputs, returned: Any) -> Outputs:
    return {"batch_indices": returned[0], "positions": returned[1]}


def _lengths(x: Inputs) -> torch.Tensor:
    pages = x.kv_indptr[1:] - x.kv_indptr[:-1]
    lengths: torch.Tensor = (pages - 1).clamp(min=0) * x.page_size + x.kv_last_page_len
    return lengths


CASES = (
    Case(
        routine="append_paged_kv_cache",
        function="page.append_paged_kv_cache",
        op="append_paged_kv_cache",
        make=_make_kv,
        call=lambda f, x: f(
            x.key, x.value, x.batch_indices, x.positions, (x.k_cache, x.v_cache), x.kv_indices, x.kv_indptr,
            x.kv_last_page_len, x.kv_layout,
        ),
        outputs=_whole("k_cache", "v_cache"),
        reference=_after(_torch_kv, "k_cache", "v_cache"),
        work=lambda p, x: Work(0, 2 * nbytes(x.key, x.value) + nbytes(x.batch_indices, x.positions)),
        torch=_torch_kv,
    ),
    Case(
        routine="append_paged_mla_kv_cache",
        function="page.append_paged_mla_kv_cache",
        op="append_paged_kv_cache",
        make=_make_mla,
        call=lambda f, x: f(
            x.ckv, x.kpe, x.batch_indices, x.positions, x.ckv_cache, x.kpe_cache, x.kv_indices, x.kv_indptr,
            x.kv_last_page_len,
        ),
        outputs=_whole("ckv_cache", "kpe_cache"),
        reference=_after(_torch_mla, "ckv_cache", "kpe_cache"),
        work=lambda p, x: Work(0, 2 * nbytes(x.ckv, x.kpe) + nbytes(x.batch_indices, x.positions)),
        torch=_torch_mla,
    ),
    Case(
        routine="get_batch_indices_positions",
        function="page.get_batch_indices_positions",
        op="get_batch_indices_positions",
        make=_table,
        call=lambda f, x: f(x.append_indptr, x.seq_lens, x.nnz),
        outputs=_position_outputs,
        reference=lambda x: _position_outputs(x, _positions(x)),
        work=lambda p, x: Work(0, nbytes(x.append_indptr, x.seq_lens, x.batch_indices, x.positions)),
        torch=_positions,
    ),
    Case(
        routine="get_seq_lens",
        function="page.get_seq_lens",
        op="get_seq_lens",
        make=_table,
        call=lambda f, x: f(x.kv_indptr, x.kv_last_page_len, x.page_size),
        outputs=lambda x, returned: {"seq_lens": returned},
        reference=lambda x: {"seq_lens": _lengths(x)},
        work=lambda p, x: Work(0, nbytes(x.kv_indptr, x.kv_last_page_len, x.seq_lens)),
        torch=_lengths,
    ),
)  # fmt: skip
