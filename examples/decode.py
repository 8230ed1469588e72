"""Decoding of a batch over a paged cache: append, plan, run, step after step, checked against plain torch.

    python examples/decode.py [STEPS]

Three requests of different lengths share one paged KV cache. Each step appends one token to every request, plans the
batch and runs attention in two layers; nothing waits for the GPU. On a GPU the two layers are captured once in a CUDA
graph and replayed in every later step. The last step is compared with attention in float64.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

import fi_core

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 32, 8, 128, 16, 256
PROMPTS = (40, 1, 500)
DTYPE = torch.bfloat16


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


class PageTable:
    """The pages of each request."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.free = torch.randperm(PAGES).tolist()
        self.lengths = [0 for _ in lengths]
        self.pages: list[list[int]] = [[] for _ in lengths]
        for request, length in enumerate(lengths):
            self.grow(request, length)

    def grow(self, request: int, tokens: int) -> None:
        self.lengths[request] += tokens
        while len(self.pages[request]) * PAGE_SIZE < self.lengths[request]:
            self.pages[request].append(self.free.pop())

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """indptr, indices and last_page_len, on the host."""
        counts = [len(own) for own in self.pages]
        last = [length - (count - 1) * PAGE_SIZE for length, count in zip(self.lengths, counts)]
        return ints([0, *counts]).cumsum(0, dtype=torch.int32), ints([*itertools.chain(*self.pages)]), ints(last)


def append(caches: list[torch.Tensor], table: PageTable, new: list[int]) -> None:
    """Random keys and values for the last `new[b]` tokens of each request."""
    indptr, indices, last = (x.to(DEVICE) for x in table.tensors())
    rows = ints([0, *new]).cumsum(0, dtype=torch.int32).to(DEVICE)
    seq_lens = ints(table.lengths).to(DEVICE)
    batch, positions = fi_core.get_batch_indices_positions(rows, seq_lens, sum(new))
    for cache in caches:
        k, v = random(sum(new), KV_HEADS, HEAD_DIM), random(sum(new), KV_HEADS, HEAD_DIM)
        fi_core.append_paged_kv_cache(k, v, batch, positions, cache, indices, indptr, last)


def expected(q: torch.Tensor, cache: torch.Tensor, table: PageTable) -> torch.Tensor:
    rows = []
    for query, own, length in zip(q.double(), table.pages, table.lengths):
        k, v = cache[own].double().transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(HEADS // KV_HEADS, 2)
        score = torch.einsum("hd,jhd->hj", query, k) * HEAD_DIM**-0.5
        rows.append(torch.einsum("hj,jhd->hd", score.softmax(-1), v))
    return torch.stack(rows)


def main() -> None:
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="?", default=20, help="steps of decoding (default: %(default)s)")
    steps = parser.parse_args().steps
    table = PageTable(PROMPTS)
    caches = [torch.zeros(PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE) for _ in range(LAYERS)]
    append(caches, table, list(PROMPTS))
    buffer = torch.zeros(PAGES, dtype=torch.int32, device=DEVICE)
    decode = fi_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(16 << 20, dtype=torch.uint8, device=DEVICE), torch.zeros_like(buffer[: len(PROMPTS) + 1]), buffer,
        torch.zeros_like(buffer[: len(PROMPTS)]),
    )  # fmt: skip
    q = [random(len(PROMPTS), HEADS, HEAD_DIM) for _ in caches]
    out = [torch.empty_like(x) for x in q]

    def layers() -> None:
        for queries, cache, result in zip(q, caches, out):
            decode.run(queries, cache, out=result)

    graph = None
    for step in range(steps):
        for request in range(len(PROMPTS)):
            table.grow(request, 1)
        append(caches, table, [1] * len(PROMPTS))
        tables = table.tensors()
        start = time.perf_counter()
        decode.plan(*tables, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=DTYPE)
        planned = time.perf_counter()
        for queries in q:
            queries.copy_(random(*queries.shape))
        if graph is not None:
            graph.replay()
        else:
            layers()
            if DEVICE.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    layers()
        if step in (0, steps - 1):
            print(f"step {step}: lengths {table.lengths}, plan took {1e6 * (planned - start):.0f} us of the host")
    worst = max(float((x - expected(y, c, table)).abs().max()) for x, y, c in zip(out, q, caches))
    print(f"{decode.resolved_backend} on {DEVICE.type}: largest error of the last step {worst:.4f}")
    if worst > 0.02:
        raise SystemExit("the results are wrong")


if __name__ == "__main__":
    main()
