"""Times calls and whole steps of four models inside and outside of batch_invariant(), in turns in one process.

    python benchmarks/batch_invariance.py --out benchmarks/results/h200-batch-invariance.jsonl

A row is a call or a step with a batch of requests: us outside (off_us) and inside (on_us) of a block, the median of
CUDA-graph replays of both in turns. Steps are all layers of a model (of DeepSeek-V2-Lite those with experts), the last
norm, the product of the vocabulary and sampling. The weights and caches of two layers (four of Qwen3-Next: three of
them linear), more than L2 holds, are drawn, and used by all layers in turn; experts of a token are drawn, too. A decode
step has one token for each request over 4096 keys, a prefill step 256 tokens without a prefix.

With --peers, the folder of FlashInfer and of FlashAttention-3 (vLLM's build), rows of attention have those two as well,
by their own modes: `fixed_split_size` of as many tokens as a chunk has here, `disable_split_kv` and `num_splits` 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fi_core
from fi_core import fused_moe, gdn_decode, gdn_prefill, mamba, mla
from fi_core.attention.ops.decode import INVARIANT_TOKENS

BATCHES = (1, 8, 32, 128)
KEYS, PROMPT, PAGE = 4096, 256, 16
Call = Callable[[], Any]


class Model(NamedTuple):
    """A model's shape. Sizes that are 0: it has no such part."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    width: int  # of the dense part, or of shared experts
    vocab: int
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    latent: int = 0  # of MLA: of keys; heads are 128 + 64 wide, values 128
    linear: int = 0  # value heads of linear layers, of 128; half as many key heads
    layers: int = 2  # that differ
    passes: int = 1  # over them in a step


MODELS = (
    Model("Llama-8B", 4096, 32, 8, 128, 14336, 128256, passes=16),
    Model("Qwen3-30B-A3B", 2048, 32, 4, 128, 0, 151936, 128, 8, 768, passes=24),
    Model("DeepSeek-V2-Lite", 2048, 16, 16, 192, 2816, 102400, 64, 6, 1408, latent=512, passes=13),
    Model("Qwen3-Next", 2048, 16, 2, 256, 512, 151936, 512, 10, 512, linear=32, layers=4, passes=12),
)


class Room:
    """Draws tensors on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def draw(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, device=self.device, dtype=dtype).normal_(0, scale)

    def weight(self, n: int, k: int) -> torch.Tensor:
        return self.draw(n, k, scale=k**-0.5)

    def workspace(self) -> torch.Tensor:
        return torch.empty(256 << 20, dtype=torch.uint8, device=self.device)

    def offsets(self, batch: int, step: int) -> torch.Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=self.device) * step

    def pages(self, batch: int, keys: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Offsets, ids in no order, and tokens of the last pages."""
        each = keys // size
        ids = torch.randperm(batch * each, device=self.device).int()
        last = torch.full((batch,), size, dtype=torch.int32, device=self.device)
        return self.offsets(batch, each), ids, last


def product(room: Room, n: int, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = room.weight(n, k)
    return lambda x: fi_core.mm_bf16(x, weight.T)


def decode_attention(room: Room, heads: int, kv_heads: int, dim: int, batch: int, keys: int) -> Callable[..., Any]:
    indptr, ids, last = room.pages(batch, keys, PAGE)
    cache = room.draw(len(ids), 2, PAGE, kv_heads, dim)
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(room.workspace(), use_tensor_cores=True)
    wrapper.plan(indptr, ids, last, heads, kv_heads, dim, PAGE, q_data_type=torch.bfloat16)
    rows = torch.arange(batch, dtype=torch.int32, device=room.device)
    at = torch.full((batch,), keys - 1, dtype=torch.int32, device=room.device)

    def call(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        if k is not None and v is not None:
            fi_core.append_paged_kv_cache(k, v, rows, at, cache, ids, indptr, last)
        return wrapper.run(q, cache)  # type: ignore[return-value]

    return call


def prefill_attention(room: Room, heads: int, kv_heads: int, dims: tuple[int, int], batch: int) -> Callable[..., Any]:
    wrapper = fi_core.BatchPrefillWithRaggedKVCacheWrapper(room.workspace())
    indptr = room.offsets(batch, PROMPT)
    wrapper.plan(indptr, indptr, heads, kv_heads, dims[0], dims[1], causal=True, q_data_type=torch.bfloat16)
    return lambda q, k, v: wrapper.run(q, k, v)


def latent_attention(room: Room, heads: int, batch: int, keys: int) -> Callable[..., Any]:
    size = 64
    indptr, ids, _ = room.pages(batch, keys, size)
    latent, rope = room.draw(len(ids), size, 512), room.draw(len(ids), size, 64)
    wrapper = mla.BatchMLAPagedAttentionWrapper(room.workspace())
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=room.device)
    types = torch.bfloat16, torch.bfloat16
    wrapper.plan(room.offsets(batch, 1), indptr, ids, lengths, heads, 512, 64, size, True, 192**-0.5, *types)
    return lambda q, q_rope: wrapper.run(q, q_rope, latent, rope)


def experts(room: Room, m: Model, tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    up = room.draw(m.experts, 2 * m.expert_width, m.hidden, scale=m.hidden**-0.5)
    down = room.draw(m.experts, m.hidden, m.expert_width, scale=m.expert_width**-0.5)
    router = product(room, m.experts, m.hidden)
    ids = torch.rand(tokens, m.experts, device=room.device).topk(m.top_k).indices.int()
    scales = torch.full((tokens, m.top_k), 1 / m.top_k, device=room.device)
    shared = dense(room, m) if m.width else None

    def call(x: torch.Tensor) -> torch.Tensor:
        router(x)
        out: torch.Tensor = fused_moe.cutlass_fused_moe(x, ids, scales, up, down, torch.bfloat16, [])
        return out if shared is None else out.add_(shared(x))

    return call


def dense(room: Room, m: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    up, down = product(room, 2 * m.width, m.hidden), product(room, m.hidden, m.width)
    return lambda x: down(fi_core.silu_and_mul(up(x)))


def attention(room: Room, m: Model, batch: int, is_decode: bool, keys: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Projections, rotation and attention over keys and values."""
    tokens, widths = batch * (1 if is_decode else PROMPT), (m.heads * m.dim, m.kv_heads * m.dim, m.kv_heads * m.dim)
    qkv, o = product(room, sum(widths), m.hidden), product(room, m.hidden, widths[0])
    at = torch.full((tokens,), keys - 1, device=room.device, dtype=torch.int32)
    attend = (
        decode_attention(room, m.heads, m.kv_heads, m.dim, batch, keys)
        if is_decode
        else prefill_attention(room, m.heads, m.kv_heads, (m.dim, m.dim), batch)
    )

    def call(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(tokens, -1, m.dim) for part in qkv(x).split(widths, 1))
        fi_core.apply_rope_pos_ids_inplace(q, k, at)
        return o(attend(q, k, v).view(tokens, -1))

    return call


def latent(room: Room, m: Model, batch: int, is_decode: bool, keys: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same of MLA: decode with absorbed projections, prompts with keys of each head."""
    tokens = batch * (1 if is_decode else PROMPT)
    project, down = product(room, m.heads * 192, m.hidden), product(room, m.latent + 64, m.hidden)
    o = product(room, m.hidden, m.heads * 128)
    keys_of, values_of = room.draw(m.heads, m.latent, 128, scale=0.1), room.draw(m.heads, 128, m.latent, scale=0.04)
    if is_decode:
        attend = latent_attention(room, m.heads, batch, keys)
    else:
        heads = product(room, m.heads * 256, m.latent)
        attend = prefill_attention(room, m.heads, m.heads, (192, 128), batch)

    def call(x: torch.Tensor) -> torch.Tensor:
        q, row = project(x).view(tokens, m.heads, 192), down(x)
        if is_decode:
            absorbed = fi_core.bmm_bf16(q[..., :128].transpose(0, 1), keys_of.transpose(1, 2))
            out = attend(absorbed.transpose(0, 1).contiguous(), q[..., 128:].contiguous())
            return o(fi_core.bmm_bf16(out.transpose(0, 1), values_of.transpose(1, 2)).transpose(0, 1).flatten(1))
        k, v = heads(row[:, : m.latent].contiguous()).view(tokens, m.heads, 256).split((128, 128), 2)
        k = torch.cat([k, row[:, None, m.latent :].expand(-1, m.heads, -1)], 2)
        return o(attend(q, k, v.contiguous()).view(tokens, -1))

    return call


def linear(room: Room, m: Model, batch: int, is_decode: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gated delta net: projections, convolution, recurrence."""
    tokens, values, keys = batch * (1 if is_decode else PROMPT), m.linear * 128, m.linear * 64
    project, gates = product(room, 2 * keys + 2 * values, m.hidden), product(room, 2 * m.linear, m.hidden)
    o, weight = product(room, m.hidden, values), room.draw(2 * keys + values, 4)
    memory = room.draw(batch, 2 * keys + values, 3)
    states = room.draw(batch, m.linear, 128, 128, scale=0.1, dtype=torch.float32)
    decay, bias = torch.zeros(m.linear, device=room.device), torch.zeros(m.linear, device=room.device)
    starts = room.offsets(batch, PROMPT)

    def call(x: torch.Tensor) -> torch.Tensor:
        mixed, z = project(x).split((2 * keys + values, values), 1)
        a, b = gates(x).split(m.linear, 1)
        if is_decode:
            mixed = mamba.causal_conv1d_update(mixed, memory, weight, activation="silu")
            q, k, v = (y.reshape(batch, 1, -1, 128) for y in mixed.split((keys, keys, values), 1))
            out, _ = gdn_decode.gated_delta_rule_decode_pretranspose(
                q, k, v, states, decay, a.reshape(batch, 1, -1), bias, b.reshape(batch, 1, -1)
            )
        else:
            mixed = mamba.causal_conv1d_fn(mixed.T, weight, None, memory, starts).T
            q, k, v = (y.reshape(tokens, -1, 128) for y in mixed.split((keys, keys, values), 1))
            g, beta = a.float().sigmoid(), b.float().sigmoid()
            out = gdn_prefill.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
        return o(out.reshape(tokens, -1) * z)

    return call


def step(room: Room, m: Model, batch: int, is_decode: bool, keys: int = KEYS) -> Call:
    """A step of a model, as the module describes it."""
    tokens, parts = batch * (1 if is_decode else PROMPT), list[Callable[[torch.Tensor], torch.Tensor]]()
    for i in range(m.layers):
        if m.linear and i % 4 != 3:
            parts.append(linear(room, m, batch, is_decode))
        else:
            parts.append((latent if m.latent else attention)(room, m, batch, is_decode, keys))
        parts.append(experts(room, m, tokens) if m.experts else dense(room, m))
    x, norm, vocabulary = room.draw(tokens, m.hidden), room.draw(m.hidden), product(room, m.vocab, m.hidden)
    seeds = torch.arange(batch, device=room.device)

    def call() -> torch.Tensor:
        residual, y = x.clone(), torch.zeros_like(x)
        for part in parts * m.passes:
            fi_core.fused_add_rmsnorm(y, residual, norm)
            y = part(y)
        last = residual if is_decode else residual.view(batch, PROMPT, -1)[:, -1].contiguous()
        logits = vocabulary(fi_core.rmsnorm(last, norm))
        return fi_core.sampling.top_k_top_p_sampling_from_logits(logits.float(), 50, 0.9, seed=seeds, offset=seeds)

    return call


def calls(room: Room) -> Iterator[tuple[str, Callable[[int], Call]]]:
    """Of each family: a name, and what makes the call for a batch."""

    def products(n: int, k: int) -> Callable[[int], Call]:
        def make(m: int) -> Call:
            x, own = room.draw(m, k), [product(room, n, k) for _ in range(max(1, (100 << 20) // (2 * n * k)))]
            return lambda: [multiply(x) for multiply in own]

        return make

    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
    shapes |= {"o": (4096, 4096), "o of Qwen3": (2048, 4096), "q_a": (1536, 7168), "kv_a": (576, 7168)}
    for name, (n, k) in shapes.items():
        yield f"gemm {name} {n}x{k}", products(n, k)

    def bound(
        make: Callable[..., Callable[..., Any]], shape: Sequence[int], width: int, *drawn: tuple[int, ...]
    ) -> Any:
        """width: bytes of a token in a cache. As of layers, there are caches enough that L2 does not hold the next."""

        def call(m: int) -> Call:
            count = max(1, math.ceil((100 << 20) / (m * shape[-1] * width)))
            made = [make(room, *shape[:-1], m, shape[-1]) for _ in range(count)]
            inputs = [room.draw(m, *own) for own in drawn]
            return lambda: [attend(*inputs) for attend in made]

        return call

    yield "decode 32/8 4k", bound(decode_attention, (32, 8, 128, 4096), 4096, (32, 128))
    yield "decode 32/4 16k", bound(decode_attention, (32, 4, 128, 16384), 2048, (32, 128))
    yield "mla 16 4k", bound(latent_attention, (16, 4096), 1152, (16, 512), (16, 64))
    yield "mla 128 4k", bound(latent_attention, (128, 4096), 1152, (128, 512), (128, 64))

    def prompts(m: int) -> Call:
        attend, widths = prefill_attention(room, 32, 8, (128, 128), m), (32, 8, 8)
        q, k, v = (room.draw(m * PROMPT, heads, 128) for heads in widths)
        return lambda: attend(q, k, v)

    yield "prefill 256", prompts

    def layer(m: int) -> Call:
        x, mixture = room.draw(m, 2048), experts(room, MODELS[1], m)
        return lambda: mixture(x)

    yield "moe qwen3-30b", layer

    def norms(m: int) -> Call:
        x, weight = room.draw(m, 4096), room.draw(4096)
        return lambda: [fi_core.rmsnorm(x, weight) for _ in range(8)]

    yield "rmsnorm", norms

    def sampling(m: int) -> Call:
        x, seeds = room.draw(m, 128256, dtype=torch.float32), torch.arange(m, device=room.device)
        sample = fi_core.sampling.top_k_top_p_sampling_from_logits
        return lambda: sample(x, 50, 0.9, seed=seeds, offset=seeds)

    yield "sampling", sampling

    def delta(m: int) -> Call:
        q, k, v = (room.draw(m * 64, 16, 128, scale=0.1) for _ in range(3))
        g, beta = (torch.rand(m * 64, 16, device=room.device) for _ in range(2))
        starts = room.offsets(m, 64)
        return lambda: gdn_prefill.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=starts)

    yield "gdn prefill 64", delta


def flash_attention() -> Any:
    """FlashAttention-3 of vLLM's build, without the rest of vLLM."""
    for name in ("vllm", "vllm.third_party"):
        sys.modules[name] = module = types.ModuleType(name)
        module.__path__ = [str(Path(path, *name.split("."))) for path in sys.path]
    return importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func


def peers(room: Room) -> Iterator[tuple[str, str, Callable[[int, bool], Call]]]:
    """A case, a peer's mode, and what makes the call for a batch, outside and inside of the mode."""
    flashinfer: Any = importlib.import_module("flashinfer")
    fa3 = flash_attention()

    def decode(shape: tuple[int, int, int, int], m: int, is_on: bool, **options: Any) -> Callable[..., Any]:
        heads, kv_heads, dim, keys = shape
        indptr, ids, last = room.pages(m, keys, PAGE)
        cache = room.draw(len(ids), 2, PAGE, kv_heads, dim)
        if not options:
            lengths = torch.full((m,), keys, dtype=torch.int32, device=room.device)
            tables, split = {"seqused_k": lengths, "block_table": ids.view(m, -1)}, {"num_splits": 1} if is_on else {}
            k, v, rows = cache[:, 0], cache[:, 1], room.offsets(m, 1)
            return lambda q: fa3(q, k, v, 1, rows, keys, causal=True, fa_version=3, **tables, **split)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(indptr, ids, last, heads, kv_heads, dim, PAGE, **types, **(options if is_on else {}))
        return lambda q: wrapper.run(q, cache)

    def workspace() -> torch.Tensor:  # of all chunks
        return torch.empty(2 << 30, dtype=torch.uint8, device=room.device)

    def many(shape: tuple[int, int, int, int], options: dict[str, Any], m: int, is_on: bool) -> Call:
        heads, kv_heads, dim, keys = shape
        count = max(1, math.ceil((100 << 20) / (m * keys * 4 * kv_heads * dim)))
        made, q = [decode(shape, m, is_on, **options) for _ in range(count)], room.draw(m, heads, dim)
        return lambda: [attend(q) for attend in made]

    pages = {"fixed_split_size": INVARIANT_TOKENS // PAGE}
    modes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("FlashInfer, fixed_split_size", pages),
        ("FlashInfer, disable_split_kv", {"disable_split_kv": True}),
        ("FlashAttention-3, num_splits 1", {}),
    )
    for case, shape in (("decode 32/8 4k", (32, 8, 128, 4096)), ("decode 32/4 16k", (32, 4, 128, 16384))):
        for mode, options in modes:
            yield case, mode, functools.partial(many, shape, options)

    def prompts(m: int, is_on: bool) -> Call:
        indptr = room.offsets(m, PROMPT)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa2")
        options = {"fixed_split_size": INVARIANT_TOKENS} if is_on else {}  # ragged keys: in tokens
        wrapper.plan(indptr, indptr, 32, 8, 128, causal=True, q_data_type=torch.bfloat16, **options)
        q, k, v = (room.draw(m * PROMPT, heads, 128) for heads in (32, 8, 8))
        return lambda: wrapper.run(q, k, v)

    yield "prefill 256", modes[0][0], prompts


def cases(room: Room) -> Iterator[tuple[str, bool, Callable[[int], Call]]]:
    """A name, whether it is a step, and what makes the call for a batch."""
    for model in MODELS:
        yield f"decode step {model.name}", True, lambda m, model=model: step(room, model, m, True)
    for name, make in calls(room):
        yield name, False, make
    for model in MODELS:
        yield f"prefill step {model.name}", True, lambda m, model=model: step(room, model, m, False)


def repeated(call: Call, device: str) -> Call:
    """A graph of the call, behind one that has loaded its kernels; on a CPU the call."""
    call()
    if device == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def microseconds(call: Call, device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def timed(make: Callable[[int], Call], batch: int, device: str, times: int = 9) -> tuple[float, float]:
    """us outside and inside of a block, medians in turns. Both draw the same weights."""
    calls, made = list[Call](), list[Call]()  # a graph does not keep what its call reads
    for on in (False, True):
        torch.manual_seed(0)
        with fi_core.batch_invariant() if on else contextlib.nullcontext():
            calls.append(make(batch))
            made.append(repeated(calls[-1], device))
    return in_turns(made, device, times)


def timed_peer(make: Callable[[int, bool], Call], batch: int, times: int = 9) -> tuple[float, float]:
    """The same of a peer's mode."""
    calls, made = list[Call](), list[Call]()
    for on in (False, True):
        torch.manual_seed(0)
        calls.append(make(batch, on))
        made.append(repeated(calls[-1], "cuda"))
    return in_turns(made, "cuda", times)


def in_turns(made: Sequence[Call], device: str, times: int) -> tuple[float, float]:
    """us of both calls."""
    found: list[tuple[float, ...]] = []
    for n in range(times):
        off = microseconds(made[0], device)
        with fi_core.batch_invariant() if device == "cpu" else contextlib.nullcontext():
            found.append((off, microseconds(made[1], device)))
        if n >= 2 and off > 5e4:  # long ones vary little
            break
    off, on = (statistics.median(values) for values in zip(*found[1:]))
    return off, on


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="jsonl, which is written anew")
    parser.add_argument("--only", nargs="+", default=[], help="words of the cases to time (all); not of peers")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--peers", type=Path, nargs="+", default=[], help="folders of FlashInfer and of vLLM")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no other case behind so many")
    args = parser.parse_args(words)
    device, begin = ("cuda", time.monotonic()) if torch.cuda.is_available() else ("cpu", time.monotonic())
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    torch.set_grad_enabled(False)
    sys.path[:0] = map(str, args.peers)
    room = Room(device)
    every: list[tuple[str, dict[str, Any], Callable[[int], tuple[float, float]]]] = [
        (name, {"step": True} if is_step else {}, lambda m, make=make: timed(make, m, device))
        for name, is_step, make in cases(room)
    ]
    if args.peers:
        every += [(case, {"peer": mode}, functools.partial(timed_peer, make)) for case, mode, make in peers(room)]
    with args.out.open("w") as file:
        for name, kind, measure in every:
            if args.only and not any(word in name for word in args.only) and "peer" not in kind:
                continue
            for batch in args.batches:
                if time.monotonic() - begin > args.seconds:
                    return 0
                off, on = measure(batch)
                row = {"card": card, "case": name, "batch": batch, "off_us": round(off, 1), "on_us": round(on, 1)}
                print(f"{name} {batch} {kind.get('peer', '')}: {off:.1f} {on:.1f} {on / off:.3f}", flush=True)
                file.write(json.dumps(row | kind) + "\n")
                file.flush()
                if device == "cuda":
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
