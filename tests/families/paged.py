"""Batches over a paged KV cache: nasty pools (shuffled pages, NaN wherever no token lies), and their fp64 results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from families.attention_reference import attention
from families.harness import rand

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
FORMS = ("tuple", "fused", "strided")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def split_tables(cache: Cache, tables: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The cache with its pages of V in another order, and block tables `[batch, 2, most pages]` of K and V."""
    k, v = cache if isinstance(cache, tuple) else cache.unbind(1)
    order = torch.randperm(len(v), generator=torch.Generator().manual_seed(3)).to(v.device)
    moved = v.clone()
    moved[order] = v
    pages = order.int()[tables.long().clamp(min=0)].masked_fill(tables < 0, -1)
    return (k, moved), torch.stack((tables, pages), 1)


@dataclass(frozen=True)
class Paged:
    """Requests of the given lengths. `k`, `v` are their tokens, `[kv_len, kv_heads, d]` each; `cache` holds them."""

    q: torch.Tensor
    cache: Cache
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int
    kv_layout: str
    q_len: int

    @property
    def lengths(self) -> list[int]:
        return [k.shape[0] for k in self.k]

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k[0].shape[1]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.q.dtype, "kv_data_type": self.k[0].dtype}

    def plan_arguments(self) -> tuple[Any, ...]:
        """The positional arguments of plan()."""
        return (self.indptr, self.indices, self.last_page_len, *self.heads, self.q.shape[2], self.page_size)

    def block_tables(self) -> torch.Tensor:
        """`[batch, most pages + 1]`, with -1 where no page is."""
        starts = self.indptr.tolist()
        width = max((b - a for a, b in itertools.pairwise(starts)), default=0) + 1
        table = torch.full((len(self.k), width), -1, dtype=torch.int32)
        for row, (a, b) in zip(table, itertools.pairwise(starts)):
            row[: b - a] = self.indices[a:b]
        return table.to(self.q.device)

    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.q.device)

    def only(self, requests: Sequence[int]) -> Paged:
        """A batch of some of the requests, in this order, over the same pool."""
        starts = self.indptr.tolist()
        own = [self.indices[starts[b] : starts[b + 1]] for b in requests]
        rows = [self.q[b * self.q_len : (b + 1) * self.q_len] for b in requests]
        return Paged(
            torch.cat(rows), self.cache, offsets(map(len, own), self.indptr.device), torch.cat(own),
            self.last_page_len[list(requests)], [self.k[b] for b in requests], [self.v[b] for b in requests],
            self.page_size, self.kv_layout, self.q_len,
        )  # fmt: skip

    def expected(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64, row by row; options are those of `attention`."""
        results = [
            attention(self.q[b * self.q_len : (b + 1) * self.q_len], k, v, causal=self.q_len > 1, **options)
            for b, (k, v) in enumerate(zip(self.k, self.v))
        ]
        outs, lses = zip(*results)
        return torch.cat(outs), torch.cat(lses)


def offsets(counts: Iterable[int], device: Any) -> torch.Tensor:
    """[0, c0, c0 + c1, ...] as int32."""
    sums = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
    return sums.to(torch.int32).to(device)


def _pools(
    pages: int, rows: tuple[int, int], dim: int, dtype: torch.dtype, device: str, form: str
) -> list[torch.Tensor]:
    """K and V pools of NaN, `[pages, rows, dim]`, as halves of one tensor or with gaps between rows and pages."""
    nan = torch.full((1,), float("nan")).to(dtype).to(device)
    if form == "fused":
        both = nan.expand(pages, 2, *rows, dim).clone()
        return [both]
    gap = 8 if form == "strided" else 0
    return [nan.expand(pages, rows[0], rows[1] + gap, dim + gap).clone()[:, :, : rows[1], :dim] for _ in range(2)]


def paged(
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 16,
    kv_layout: str = "NHD",
    form: str = "tuple",
    q_len: int = 1,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Paged:
    """A random batch. Its pages are shuffled in a pool with pages of no request; a slot without a token is NaN."""
    kv_dtype = kv_dtype or dtype
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts)
    generator = torch.Generator().manual_seed(seed + 1)
    pages = torch.randperm(total + 3, generator=generator)[:total]
    rows = (page_size, heads[1]) if kv_layout == "NHD" else (heads[1], page_size)
    pools = _pools(total + 3, rows, dim, kv_dtype, device, form)
    k_pool, v_pool = pools[0].unbind(1) if form == "fused" else pools
    ks, vs, first = [], [], 0
    for b, (n, count) in enumerate(zip(lengths, counts)):
        own = pages[first : first + count]
        first += count
        tokens = torch.arange(n)
        at = own[tokens // page_size].to(device), (tokens % page_size).to(device)
        for x, pool, salt in ((ks, k_pool, 1), (vs, v_pool, 2)):
            value = rand(n, heads[1], dim, dtype=kv_dtype, device=device, seed=1000 * seed + 10 * b + salt)
            x.append(value)
            view = pool if kv_layout == "NHD" else pool.transpose(1, 2)
            if n:  # float8 has no index_put: move the bits
                view.view(BITS[kv_dtype.itemsize])[at] = value.view(BITS[kv_dtype.itemsize])
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lengths], dtype=torch.int32, device=device)
    q = rand(len(lengths) * q_len, heads[0], dim, dtype=dtype, device=device, seed=seed)
    cache: Cache = pools[0] if form == "fused" else (pools[0], pools[1])
    return Paged(
        q, cache, offsets(counts, device), pages.to(torch.int32).to(device), last, ks, vs, page_size, kv_layout, q_len
    )


def numbers_of(buffers: Any) -> dict[str, int]:
    """What decode_plan is told of the buffers that it plans for."""
    return {name: getattr(buffers, name) for name in ("num_ctas", "num_ranges", "split_kv")}
