"""Batches of prefill: query rows of each request over paged or ragged keys with NaN around them, and fp64 results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from families import cudnn_frontend
from families.attention_reference import attention
from families.engine import engine
from families.harness import TOLERANCE, assert_close, guarded, rand
from families.paged import Cache, Paged, offsets, paged
from fi_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from fi_core.runtime.errors import UnsupportedError

LSE = (1e-4, 1e-4)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Batch:
    """Query rows q of all requests, and their keys: in pages (`pool`), and as k and v, one tensor a request."""

    q: torch.Tensor
    qo_lens: Sequence[int]
    pool: Paged
    cache: Cache
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def qo_indptr(self) -> torch.Tensor:
        return offsets(self.qo_lens, self.q.device)

    @property
    def kv_indptr(self) -> torch.Tensor:
        return offsets(map(len, self.k), self.q.device)

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k[0].shape[1]

    @property
    def dims(self) -> tuple[int, int]:
        return self.k[0].shape[2], self.v[0].shape[2]

    def types(self) -> dict[str, Any]:
        return {"q_data_type": self.q.dtype, "kv_data_type": self.k[0].dtype, "head_dim_vo": self.dims[1]}

    def paged_plan(self) -> tuple[Any, ...]:
        p = self.pool
        return (self.qo_indptr, p.indptr, p.indices, p.last_page_len, *self.heads, self.dims[0], p.page_size)

    def ragged_plan(self) -> tuple[Any, ...]:
        return (self.qo_indptr, self.kv_indptr, *self.heads, self.dims[0])

    def ragged(self, kv_layout: str = "NHD") -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values one after another, between rows of NaN that belong to no request."""
        results = []
        for parts in (self.k, self.v):
            tokens = torch.cat(parts)
            shape = (tokens.shape[0] + 3, *tokens.shape[1:])
            whole = guarded(
                shape if kv_layout == "NHD" else (shape[1], shape[0], shape[2]), tokens.dtype, str(self.q.device)
            )
            view = whole if kv_layout == "NHD" else whole.transpose(0, 1)
            view[: tokens.shape[0]] = tokens
            results.append(whole)
        return results[0], results[1]

    def expected(
        self, masks: Sequence[torch.Tensor] | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64; options are those of `attention`, masks the custom masks of the requests."""
        outs, lses = [], []
        for b, q in enumerate(self.q.split(list(self.qo_lens))):
            extra = {} if masks is None else {"custom_mask": masks[b]}
            out, lse = attention(q, self.k[b], self.v[b], **extra, **options)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def only(self, requests: Sequence[int]) -> Batch:
        """A batch of some of the requests, in this order, over the same pool."""
        rows = self.q.split(list(self.qo_lens))
        return replace(
            self, q=torch.cat([rows[b] for b in requests]), qo_lens=[self.qo_lens[b] for b in requests],
            pool=self.pool.only(requests), k=[self.k[b] for b in requests], v=[self.v[b] for b in requests],
        )  # fmt: skip


def batch(
    lens: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    **pages: Any,
) -> Batch:
    """Random requests of (qo_len, kv_len); `pages` are options of `paged`."""
    lengths = [kv for _, kv in lens]
    make = {"heads": heads, "dtype": dtype, "kv_dtype": kv_dtype, "device": device, "seed": seed, **pages}
    pool = paged(lengths, dim=dims[0], **make)
    cache, v = pool.cache, pool.v
    if dims[0] != dims[1]:  # the same seed gives the same pages
        values = paged(lengths, dim=dims[1], **make)
        assert torch.equal(values.indices, pool.indices)
        cache, v = (pool.cache[0], values.cache[1]), values.v
    rows = [qo for qo, _ in lens]
    q = rand(sum(rows), heads[0], dims[0], dtype=dtype, device=device, seed=seed)
    return Batch(q, rows, pool, cache, pool.k, v)


def workspace(device: str, size: int = 1024) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def backends(device: str) -> tuple[str, ...]:
    """What the same tests run with."""
    return ("auto",) if device == "cpu" else ("auto", "fa2", "fa3")


def planned(
    b: Batch,
    wrapper: type = BatchPrefillWithPagedKVCacheWrapper,
    *,
    graph: Any = None,
    more: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[Any]:
    """A planned wrapper for each backend, and each of `more`, that takes the options; at least one must."""
    device, count = str(b.q.device.type), 0
    is_paged = wrapper is BatchPrefillWithPagedKVCacheWrapper
    for backend in (*backends(device), *more):
        room = workspace(device, 64 << 20 if backend == "cudnn" or device == "cuda" else 1024)  # for parts of requests
        w = wrapper(room, b.pool.kv_layout, backend=backend, **(graph or {}))
        try:
            w.plan(*(b.paged_plan() if is_paged else b.ragged_plan()), **(b.types() | options))
        except UnsupportedError:
            assert backend in ("fa3", "cudnn"), "the others take everything"
            continue
        count += 1
        yield w
    assert count


def _check_cudnn(
    w: Any, q: torch.Tensor, keys: Any, run: dict[str, Any], want: torch.Tensor, want_lse: torch.Tensor
) -> None:
    """As below, where cuDNN takes the shapes and options; test_cudnn.py has those that it must take."""
    try:
        out, lse = w.run(q, *keys, return_lse=True, **run)
    except UnsupportedError:
        return
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=(1e-3, 1e-3))
    assert_close(w.run(q, *keys, **run), want)


def check(
    b: Batch, *, masks: Sequence[torch.Tensor] | None = None, run: dict[str, Any] | None = None,
    tolerance: tuple[float, float] | None = None, lse_tolerance: tuple[float, float] = LSE,
    expect: dict[str, Any] | None = None, refused_by: str = "", **options: Any,
) -> None:  # fmt: skip
    """Both wrappers on each backend against fp64. `options` go to plan and to the reference, `expect` to the latter.

    The backend `refused_by` must refuse `run`, and say why.
    """
    run = run or {}
    want, want_lse = b.expected(masks, **({k: x for k, x in options.items() if k != "o_data_type"} | (expect or {})))
    if masks is not None:
        options["custom_mask"] = torch.cat([m.flatten() for m in masks])
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        is_paged = wrapper is BatchPrefillWithPagedKVCacheWrapper
        keys = (b.cache,) if is_paged else b.ragged(b.pool.kv_layout)
        for w in planned(b, wrapper, more=cudnn_frontend.backends(str(b.q.device.type)), **options):
            if w.resolved_backend == "cudnn":
                _check_cudnn(w, b.q, cudnn_frontend.finite(keys), run, want, want_lse)
                continue
            if refused_by and engine(w).backend == refused_by:
                with pytest.raises(UnsupportedError, match="requires"):
                    w.run(b.q, *keys, **run)
                continue
            out, lse = w.run(b.q, *keys, return_lse=True, **run)
            assert out.dtype == options.get("o_data_type", b.q.dtype) and lse.dtype == torch.float32
            assert_close(out, want, tolerance=tolerance or TOLERANCE[out.dtype])
            assert_close(lse, want_lse, tolerance=lse_tolerance)
            assert torch.equal(w.run(b.q, *keys, **run), out), "the same with and without the LSE"
