"""Times decode and prefill of 16-bit queries over fp8 and bf16 caches of shapes drawn by a seed, in turns.

    python benchmarks/kv_dtypes.py [--seed N] [--cases 24] [--output_path FILE]

A row has the shape, the medians of CUDA graphs' replays behind a memset that flushes L2, and their ratio.
--device cpu only tries the calls.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from turns import in_turns, replays

import fi_core

HEADS = ((32, 8), (64, 8), (28, 4), (8, 1), (16, 16), (40, 8))
CACHE_BYTES = 6 << 30  # of bf16, at most
SCORES = 1 << 33  # query tokens x keys of a prefill, at most


class Shape(NamedTuple):
    kind: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    q_len: int  # query tokens of each request
    length: int  # keys of each request, the new ones among them


def drawn(rng: random.Random, kind: str, limit: float) -> Shape:
    """limit: a factor of the sizes, below 1 for a trial on a CPU."""
    while True:
        heads, kv_heads = rng.choice(HEADS)
        head_dim, page = rng.choice((64, 128, 128, 256)), rng.choice((16, 64))
        batch = round(2 ** rng.uniform(0, 7 if kind == "decode" else 4))
        length = round(2 ** rng.uniform(9, 17) * limit) + 1
        q_len = 1 if kind == "decode" else min(length, round(2 ** rng.uniform(7, 13) * limit) + 1)
        cache = batch * length * kv_heads * head_dim * 4
        if cache <= CACHE_BYTES * limit and batch * heads * q_len * length <= SCORES * limit:
            return Shape(kind, batch, heads, kv_heads, head_dim, page, q_len, length)


def call_of(s: Shape, kv_dtype: torch.dtype, device: str) -> Callable[[], Any]:
    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pages = -(-s.length // s.page)
    cache = torch.empty(s.batch * pages, 2, s.page, s.kv_heads, s.head_dim, dtype=kv_dtype, device=device)
    for part in cache.split(1 + (1 << 28) // cache[0].numel()):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=device))
    q = torch.randn(s.batch * s.q_len, s.heads, s.head_dim, dtype=torch.bfloat16, device=device)
    tables = ints([i * pages for i in range(s.batch + 1)]), torch.randperm(s.batch * pages, device=device).int()
    last = ints([s.length - (pages - 1) * s.page] * s.batch)
    sizes = s.heads, s.kv_heads, s.head_dim, s.page
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    dtypes: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": kv_dtype}
    out = torch.empty_like(q)
    if s.kind == "decode":
        decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(workspace)
        decode.plan(*tables, last, *sizes, **dtypes)
        return lambda: decode.run(q, cache, out=out)
    prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(workspace)
    prefill.plan(ints([i * s.q_len for i in range(s.batch + 1)]), *tables, last, *sizes, causal=True, **dtypes)
    return lambda: prefill.run(q, cache, out=out)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=24, help="half of them decode (24)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output_path", type=Path, help="append rows of JSON to this file")
    args = parser.parse_args(words)
    rng = random.Random(args.seed)
    limit = 1.0 if args.device == "cuda" else 2.0**-9
    shapes = [drawn(rng, kind, limit) for _ in range(args.cases // 2) for kind in ("decode", "prefill")]
    flush = torch.empty(256 << 20 if args.device == "cuda" else 0, dtype=torch.uint8, device=args.device)
    with torch.inference_mode():
        for shape in shapes:
            calls = [call_of(shape, dtype, args.device) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
            row: dict[str, Any] = shape._asdict()
            if args.device == "cuda":
                bf16, fp8 = in_turns(*map(replays, calls), before=flush.zero_)
                row |= {"bf16_us": round(bf16, 1), "fp8_us": round(fp8, 1), "ratio": round(fp8 / bf16, 3)}
            else:
                row |= {"finite": all(bool(call().isfinite().all()) for call in calls)}
            line = json.dumps(row)
            print(line, flush=True)
            if args.output_path:
                with args.output_path.open("a") as file:
                    file.write(line + "\n")
            del calls
            if args.device == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
