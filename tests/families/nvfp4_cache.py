"""Requests whose keys and values are NVFP4: in shuffled pages among poison, ragged, and dequantized in fp64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

import fi_core
from families.attention_reference import attention
from families.harness import rand
from fi_core.quantization.reference import e2m1_values

K_SCALE, V_SCALE = 0.37, 1.9  # the global factors


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values `[n, heads, dim / 2]`, scales `[n, heads, dim / 16]`, and what they stand for in fp64."""
    n, heads, dim = x.shape
    q, sf = fi_core.fp4_quantize(x.view(n * heads, dim), torch.ones(1), is_sf_swizzled_layout=False)
    scales = sf.view(torch.float8_e4m3fn).double().view(n * heads, dim // 16)
    exact = e2m1_values(q).double() * scales.repeat_interleave(16, -1)
    return q.view(n, heads, dim // 2), sf.view(n, heads, dim // 16), exact.view(n, heads, dim)


@dataclass
class Nvfp4:
    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    ragged: tuple[torch.Tensor, torch.Tensor]
    ragged_scales: tuple[torch.Tensor, torch.Tensor]
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    qo_lens: list[int]
    page_size: int

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k in self.k]

    def offsets(self, counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=self.q.device)

    @property
    def qo_indptr(self) -> torch.Tensor:
        return self.offsets(self.qo_lens)

    def block_tables(self) -> torch.Tensor:
        bounds = self.indptr.tolist()
        width = max(b - a for a, b in itertools.pairwise(bounds)) + 1
        table = torch.full((len(self.k), width), -1, dtype=torch.int32)
        for row, (a, b) in zip(table, itertools.pairwise(bounds)):
            row[: b - a] = self.indices[a:b].cpu()
        return table.to(self.q.device)

    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.q.device)

    def expected(self, custom_masks: list[torch.Tensor] | None = None, **options: Any) -> Any:
        found = []
        bounds = self.qo_indptr.tolist()
        for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
            mask = {} if custom_masks is None else {"custom_mask": custom_masks[b]}
            found.append(
                attention(self.q[begin:end], self.k[b], self.v[b], k_scale=K_SCALE, v_scale=V_SCALE, **mask, **options)
            )
        return tuple(torch.cat(parts) for parts in zip(*found))


def batch(
    lengths: list[int],
    qo_lens: list[int] | None = None,
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    dim_vo: int = 0,
    page_size: int = 16,
    layout: str = "NHD",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    padding: int = 0,
) -> Nvfp4:
    """padding: bytes between rows of the caches."""
    qo_lens, dim_vo, (qo_heads, kv_heads) = qo_lens or [1] * len(lengths), dim_vo or dim, heads
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1))[: sum(counts)]

    def pool(width: int, poison: int) -> torch.Tensor:
        slots = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
        x = torch.full((sum(counts) + 3, *slots, width + padding), poison, dtype=torch.uint8)
        return x[..., :width]

    # e4m3 0x7f is NaN.
    cache, scales = (tuple(pool(d // part, poison) for d in (dim, dim_vo)) for part, poison in ((2, 0x5D), (16, 0x7F)))
    exact: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    ragged: list[list[torch.Tensor]] = [[], [], [], []]
    at = 0
    for b, (n, count) in enumerate(zip(lengths, counts)):
        for part, d in enumerate((dim, dim_vo)):
            values, sf, known = quantized(rand(n, kv_heads, d, dtype=torch.bfloat16, device="cpu", seed=2 * b + part))
            exact[part].append(known)
            ragged[part].append(values)
            ragged[2 + part].append(sf)
            for i in range(count):
                rows = slice(i * page_size, min((i + 1) * page_size, n))
                for target, new in ((cache[part], values), (scales[part], sf)):
                    page = target[pages[at + i]] if layout == "NHD" else target[pages[at + i]].transpose(0, 1)
                    page[: rows.stop - rows.start] = new[rows]
        at += count
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(lengths, counts)]

    def move(x: torch.Tensor) -> torch.Tensor:
        if device == "cpu":
            return x
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return moved.copy_(x.to(device))

    def pair(x: Any) -> Any:
        return tuple(move(part) for part in x)

    joined = [torch.cat(x) if layout == "NHD" else torch.cat(x).transpose(0, 1).contiguous() for x in ragged]
    return Nvfp4(
        rand(sum(qo_lens), qo_heads, dim, dtype=dtype, device=device, seed=9), pair(cache), pair(scales),
        pair(joined[:2]), pair(joined[2:]),
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        pages.to(torch.int32).to(device), torch.tensor(last, dtype=torch.int32, device=device), *exact, qo_lens,
        page_size,
    )  # fmt: skip
