"""Chunked prefill of a batch over a paged cache: append a chunk, plan, run, checked against plain torch.

    python examples/prefill.py [CHUNK]

Three prompts run through attention in chunks of at most CHUNK tokens. In each step every unfinished request appends
the keys and values of its next chunk and attends to all of its cached tokens. The outputs of all chunks equal attention
over the whole prompts, computed in float64.
"""

from __future__ import annotations

import argparse

import torch

import fi_core

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 2, 128, 16, 64
PROMPTS = (300, 5, 77)
DTYPE = torch.bfloat16


def bounds(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one whole prompt."""
    group = HEADS // KV_HEADS
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    score = torch.einsum("ihd,jhd->hij", q.double(), k) * HEAD_DIM**-0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hij,jhd->ihd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)


def main() -> None:
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chunk", type=int, nargs="?", default=64, help="tokens of a chunk (default: %(default)s)")
    chunk = parser.parse_args().chunk
    q, k, v = (
        [torch.randn(n, heads, HEAD_DIM, device=DEVICE).to(DTYPE) for n in PROMPTS]
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = torch.full((PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=DTYPE, device=DEVICE)
    free = torch.randperm(PAGES).tolist()
    own = [[free.pop() for _ in range(0, n, PAGE_SIZE)] for n in PROMPTS]
    indices = torch.tensor([page for pages in own for page in pages], dtype=torch.int32, device=DEVICE)
    indptr = bounds([len(pages) for pages in own])
    prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE))
    done, outputs = [0] * len(PROMPTS), [[] for _ in PROMPTS]  # type: ignore[var-annotated]
    while any(d < n for d, n in zip(done, PROMPTS)):
        new = [min(chunk, n - d) for d, n in zip(done, PROMPTS)]
        part = [slice(d, d + n) for d, n in zip(done, new)]
        done = [d + n for d, n in zip(done, new)]
        seq_lens = torch.tensor(done, dtype=torch.int32)
        rows, here = bounds(new), torch.zeros(len(PROMPTS), dtype=torch.int32)
        batch, positions = fi_core.get_batch_indices_positions(rows.to(DEVICE), seq_lens.to(DEVICE), sum(new))
        fi_core.append_paged_kv_cache(
            torch.cat([x[p] for x, p in zip(k, part)]), torch.cat([x[p] for x, p in zip(v, part)]), batch, positions,
            cache, indices, indptr.to(DEVICE), here.to(DEVICE),
        )  # fmt: skip
        prefill.plan(
            rows, indptr, indices, here, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, causal=True, q_data_type=DTYPE,
            seq_lens=seq_lens,
        )  # fmt: skip
        out = prefill.run(torch.cat([x[p] for x, p in zip(q, part)]), cache)
        for results, rows_of in zip(outputs, out.split(new)):
            results.append(rows_of)
    worst = max(
        float((torch.cat(results) - expected(*tensors)).abs().max()) for results, *tensors in zip(outputs, q, k, v)
    )
    print(f"{prefill.resolved_backend} on {DEVICE.type}: largest error of {sum(PROMPTS)} tokens {worst:.4f}")
    if worst > 0.02:
        raise SystemExit("the results are wrong")


if __name__ == "__main__":
    main()
