"""Times a decode step of models with random weights in a CUDA graph of fi's kernels, beside a stream of its bytes.

    python benchmarks/decode_step.py [--models qwen3-0.6b] [--batches 1,4,16] [--lengths 1024,8192] [--output_path FILE]

A row has the bytes that the step must read (weights once, of experts those that were chosen, and the KV cache), the
time of a kernel that only reads as many bytes, the time of the step, and of a profile of its kernels: how many there
are, for how long at least one runs, the gaps between them, and the time by kind. --device cpu only tries the step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stream import Read, stream
from turns import in_turns, replays

import fi_core
from fi_core.fused_moe import RoutingMethodType, WeightLayout, trtllm_bf16_moe
from fi_core.gemm import mm_bf16

PAGE, EPS = 16, 1e-6
# What a kernel's name holds, and the kind that it counts to; the first that fits.
KINDS = (("attention", ("batch_decode", "decode")), ("experts", ("moe", "rout")), ("products", ("gemm", "small_m")))


class Model(NamedTuple):
    """Sizes of a decoder; of experts `width` is the width of one."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    qk_norm: bool = True


MODELS = {
    "qwen3-0.6b": Model(28, 1024, 16, 8, 128, 3072, 151936),
    "llama-3.2-1b": Model(16, 2048, 32, 8, 64, 8192, 128256, qk_norm=False),
    "qwen3-8b": Model(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-30b-a3b": Model(48, 2048, 32, 4, 128, 768, 151936, experts=128, top_k=8),
}


class Layer(NamedTuple):
    """Matrices `[outputs, inputs]` of a layer; up and down `[experts, ...]` if it has experts, whose gate is second."""

    qkv: torch.Tensor
    o: torch.Tensor
    router: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor


class Weights:
    """All matrices of a model in one buffer, so that one kernel can read as many bytes."""

    def __init__(self, m: Model, device: torch.device) -> None:
        heads = (m.heads + 2 * m.kv_heads) * m.head_dim
        each = (m.experts,) if m.experts else ()
        shapes = [(heads, m.hidden), (m.hidden, m.heads * m.head_dim)]
        shapes += [(m.experts, m.hidden)] if m.experts else []
        shapes += [(*each, 2 * m.width, m.hidden), (*each, m.hidden, m.width)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.flat = torch.empty(m.layers * sum(sizes) + m.vocab * m.hidden, dtype=torch.bfloat16, device=device)
        for part in self.flat.split(1 << 28):  # of variance 1 / inputs, so that values keep their size
            part.normal_(0, m.hidden**-0.5)
        at = 0
        self.layers: list[Layer] = []
        for _ in range(m.layers):
            found = []
            for shape, size in zip(shapes, sizes):
                found.append(self.flat[at : at + size].view(shape))
                at += size
            router = found[2] if m.experts else None
            self.layers.append(Layer(found[0], found[1], router, found[-2], found[-1]))
        self.lm_head = self.flat[at:].view(m.vocab, m.hidden)
        self.norm = torch.ones(m.hidden, dtype=torch.bfloat16, device=device)
        self.head_norm = torch.ones(m.head_dim, dtype=torch.bfloat16, device=device) if m.qk_norm else None
        angles = (
            torch.arange(1 << 14, device=device)[:, None]
            / 1e4 ** torch.linspace(0, 1, m.head_dim // 2 + 1, device=device)[:-1]
        )
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)


class Step:
    """A decode step of `batch` requests that have `length` tokens in the cache, the new one among them."""

    def __init__(self, m: Model, weights: Weights, batch: int, length: int) -> None:
        device = weights.flat.device
        pages = -(-length // PAGE)
        self.m, self.weights, self.batch, self.length = m, weights, batch, length
        shape = (m.layers, batch * pages, 2, PAGE, m.kv_heads, m.head_dim)
        self.caches = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for cache in self.caches:
            cache.normal_()

        def ints(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.indptr = ints([i * pages for i in range(batch + 1)])
        self.indices = torch.randperm(batch * pages, device=device).int()
        self.last = ints([length - (pages - 1) * PAGE] * batch)
        self.rows, self.positions = ints(range(batch)), ints([length - 1] * batch)
        self.wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(64 << 20, dtype=torch.uint8, device=device)
        )
        self.wrapper.plan(
            self.indptr,
            self.indices,
            self.last,
            m.heads,
            m.kv_heads,
            m.head_dim,
            PAGE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        self.embedded = torch.randn(batch, m.hidden, device=device).bfloat16()
        self.chosen: list[torch.Tensor] = []  # logits of routers, of a call that keeps them

    def __call__(self, keep: bool = False) -> torch.Tensor:
        """The likeliest token of each request."""
        m, w = self.m, self.weights
        residual = self.embedded.clone()
        x = fi_core.rmsnorm(residual, w.norm, EPS)
        for layer, cache in zip(w.layers, self.caches):
            qkv = mm_bf16(x, layer.qkv.t()).unflatten(1, (-1, m.head_dim))
            q, k, v = qkv.split([m.heads, m.kv_heads, m.kv_heads], 1)
            fi_core.apply_rope_with_cos_sin_cache_inplace(
                self.positions, q, k, m.head_dim, w.cos_sin, q_weight=w.head_norm, k_weight=w.head_norm, eps=EPS
            )
            fi_core.append_paged_kv_cache(k, v, self.rows, self.positions, cache, self.indices, self.indptr, self.last)
            x = mm_bf16(self.wrapper.run(q, cache).flatten(1), layer.o.t())
            fi_core.fused_add_rmsnorm(x, residual, w.norm, EPS)
            x = self.experts(x, layer, keep) if m.experts else self.mlp(x, layer)
            fi_core.fused_add_rmsnorm(x, residual, w.norm, EPS)
        logits = mm_bf16(x, w.lm_head.t(), out_dtype=torch.float32)
        return fi_core.top_k(logits, 1)[1]

    def mlp(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        return mm_bf16(fi_core.silu_and_mul(mm_bf16(x, layer.up.t())), layer.down.t())

    def experts(self, x: torch.Tensor, layer: Layer, keep: bool) -> torch.Tensor:
        m = self.m
        assert layer.router is not None
        logits = mm_bf16(x, layer.router.t(), out_dtype=torch.float32)
        if keep:
            self.chosen.append(logits.topk(m.top_k).indices.unique())
        found = trtllm_bf16_moe(
            logits,
            None,
            x,
            layer.up,
            layer.down,
            m.experts,
            m.top_k,
            None,
            None,
            m.width,
            0,
            m.experts,
            routing_method_type=RoutingMethodType.Renormalize,
            use_shuffled_weight=False,
            weight_layout=WeightLayout.MajorK,
        )
        assert isinstance(found, torch.Tensor)
        return found

    def bytes(self) -> int:
        """That the step must read; of experts those that a call with `keep` has chosen."""
        m, flat = self.m, self.weights.flat
        elements = flat.numel()
        if m.experts:
            unused = sum(m.experts - len(chosen) for chosen in self.chosen)
            elements -= unused * 3 * m.width * m.hidden
        cache = m.layers * self.batch * self.length * 2 * m.kv_heads * m.head_dim
        return 2 * (elements + cache)


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "others")


def profile(call: Callable[[], object]) -> dict[str, Any]:
    """Of the kernels of a call: their number, the time in which at least one runs, that of gaps, and by kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in found.events()
        if e.device_type == torch._C._autograd.DeviceType.CUDA
    )
    busy, until = 0.0, kernels[0][0]
    by_kind: defaultdict[str, float] = defaultdict(float)
    for start, end, name in kernels:  # a kernel may begin before its predecessor ends: the overlap counts once
        alone = max(0.0, end - max(start, until))
        busy += alone
        by_kind[kind_of(name)] += alone
        until = max(until, end)
    gaps = until - kernels[0][0] - busy
    by_kind_us = {kind: round(us, 1) for kind, us in sorted(by_kind.items())}
    return {"kernels": len(kernels), "busy_us": round(busy, 1), "gaps_us": round(gaps, 1), "by_kind_us": by_kind_us}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.models:
        m = MODELS[name]
        weights = Weights(m, torch.device(args.device))
        for length in args.lengths:
            for batch in args.batches:
                step = Step(m, weights, batch, length)
                step(keep=True)
                row = {"model": name, "batch": batch, "length": length, "bytes": step.bytes()}
                if args.device == "cuda":
                    cached = step.caches.flatten()
                    read = weights.flat[: (row["bytes"] - cached.nbytes) // 2 // 8 * 8]
                    streamed = stream([Read(read), Read(cached)], torch.empty(64, device="cuda"))
                    replay = replays(step)
                    times = in_turns(replay, streamed)
                    row |= dict(zip(("step_us", "stream_us"), (round(us, 1) for us in times)), **profile(replay))
                yield row
                del step
        del weights
        torch.cuda.empty_cache()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], metavar="N,...", help="requests (1,4,16)")
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192], metavar="N,...", help="tokens (1024,8192)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output_path", type=Path, help="append rows of JSON to this file")
    args = parser.parse_args(words)
    with torch.inference_mode():
        for row in rows(args):
            line = json.dumps(row)
            print(line, flush=True)
            if args.output_path:
                with args.output_path.open("a") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
