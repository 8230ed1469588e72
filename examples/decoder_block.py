"""One decoder block of Llama 3.2 1B's shape over the bytes of a text, computed by fi's kernels and checked op by op.

    python examples/decoder_block.py [FILE]

The weights are random; the tokens are the bytes of FILE (default: this repository's README). It runs on the GPU if
there is one, else on the CPU, with the same calls. Each line of the table shows the kernel of the op and its origin
(jit: compiled now from fi-kernels; store: compiled by an earlier run; or the package that ships it), the
time of the first call and the best of ten later ones, and the error against torch in float64, relative to the
largest value.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fi_core
from fi_core.runtime.resolve import store

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2048, 32, 8, 64, 8192
PROMPT, PAGE_SIZE = 200, 16
REPEATS = 10
TOLERANCE = 0.01  # of the largest value: bfloat16 has 8 bits
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
ROW = "{:40} {:>11} {:>9} {:>8}   {}"

errors: list[float] = []


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DTYPE).to(DEVICE)


def seconds(call: Callable[[], object]) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def distance(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    parts = [(g.double() - w.to(g.device)).abs().max() / w.abs().max().clamp(min=1e-30) for g, w in zip(got, want)]
    return float(torch.stack([part.cpu() for part in parts]).max())


def run(name: str, arguments: tuple[Any, ...], want: Any, written: tuple[int, ...] = (), **options: Any) -> Any:
    """Calls an op of fi_core and prints its line of the table; returns what it returns, or the arguments it writes.

    want: the result of plain torch for the same inputs. written: positions of the arguments that the op writes.
    """
    op = getattr(fi_core, name)
    if sys.stdout.isatty():
        print(ROW.format(name, "...", "", "", ""), end="\r", flush=True)
    copies = [tuple(a.clone() if i in written else a for i, a in enumerate(arguments)) for _ in range(REPEATS)]
    before, results = fi_core.loaded_kernels(), []
    first = seconds(lambda: results.append(op(*arguments, **options)))
    later = min(seconds(functools.partial(op, *copy, **options)) for copy in copies)
    returned = results[0] if isinstance(results[0], tuple) else (results[0],)
    got = tuple(arguments[i] for i in written) or returned
    errors.append(distance(got, want if isinstance(want, tuple) else (want,)))
    fresh = [f"{origin}: {kernel}" for kernel, origin in fi_core.loaded_kernels().items() if kernel not in before]
    origin = ", ".join(fresh) or "kernel of a line above"
    print(ROW.format(name, f"{first * 1e3:.1f} ms", f"{later * 1e6:.0f} us", f"{errors[-1]:.0e}", origin), flush=True)
    return got if len(got) > 1 else got[0]


# The reference: the formulas of the papers, in float64, by torch.


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with the frequencies of Llama 3.1: long wavelengths are scaled by 8."""
    half = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=x.device)
    frequency = 500000.0 ** (-half / HEAD_DIM)
    smooth = (frequency * 8192 / (2 * torch.pi * 3) - 1 / 3).clamp(0, 1)
    angle = positions.double()[:, None, None] * ((1 - smooth) * frequency / 8 + smooth * frequency)
    low, high = x.double().chunk(2, -1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens, and its base-2 log-sum-exp."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = torch.einsum("ihd,jhd->hij", q.double(), k) * q.shape[2] ** -0.5
    future = torch.ones(score.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    score = score.masked_fill(future, -torch.inf)
    return torch.einsum("hij,jhd->ihd", score.softmax(-1), v), score.logsumexp(-1).T * 1.4426950408889634


class Weights:
    def __init__(self) -> None:
        self.embedding = random(256, HIDDEN)
        self.attention_norm, self.mlp_norm = 1 + random(HIDDEN, scale=0.1), 1 + random(HIDDEN, scale=0.1)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.qkv = random(HIDDEN, width, scale=HIDDEN**-0.5)
        self.o = random(HEADS * HEAD_DIM, HIDDEN, scale=HIDDEN**-0.5)
        self.gate_up = random(HIDDEN, 2 * INTERMEDIATE, scale=HIDDEN**-0.5)
        self.down = random(INTERMEDIATE, HIDDEN, scale=INTERMEDIATE**-0.5)


class Cache:
    """Paged keys and values of one request."""

    def __init__(self, tokens: int) -> None:
        pages = -(-tokens // PAGE_SIZE)
        self.pages = random(pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, scale=0.0)
        self.indices = torch.arange(pages, dtype=torch.int32, device=DEVICE)

    def append(self, k: torch.Tensor, v: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the newest tokens of `total`; returns all keys and values so far."""
        pages = -(-total // PAGE_SIZE)
        indptr, rows, last, lengths = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE)
            for x in ([0, pages], [0, len(k)], [total - (pages - 1) * PAGE_SIZE], [total])
        )
        place = (torch.zeros(len(k)), torch.arange(total - len(k), total))
        batch, positions = run("get_batch_indices_positions", (rows, lengths, len(k)), place)
        want = self.pages.double().transpose(1, 2).flatten(0, 1)  # [tokens, 2, heads, dim]
        want[total - len(k) : total] = torch.stack([k, v], 1).double()
        want = want.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2)
        run(
            "append_paged_kv_cache",
            (k, v, batch, positions, self.pages, self.indices, indptr, last),
            want,
            written=(4,),
        )
        keys, values = (self.pages[:, i].flatten(0, 1)[:total] for i in (0, 1))
        return keys, values


def block(x: torch.Tensor, w: Weights, cache: Cache, total: int) -> torch.Tensor:
    """The decoder block on the newest tokens of `total`; x is their embedding."""
    positions = torch.arange(total - len(x), total, device=DEVICE)
    h = run("rmsnorm", (x, w.attention_norm, 1e-5), norm(x.double(), w.attention_norm))
    q, k, v = (h @ w.qkv).unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
    want = rotate(q, positions), rotate(k, positions)
    q, k = run("apply_llama31_rope_pos_ids_inplace", (q, k, positions), want, written=(0, 1))
    k, v = cache.append(k, v, total)
    want = attention(q, k, v)
    if len(q) > 1:
        o = run("single_prefill_with_kv_cache", (q, k, v), want[0], causal=True)
    else:
        o = run("single_decode_with_kv_cache", (q[0], k, v), want[0][0])[None]
        # The same over two halves of the keys, as with a shared prefix; merge_state combines the partials.
        parts = [(k[: total // 2], v[: total // 2]), (k[total // 2 :], v[total // 2 :])]
        states = [run("single_prefill_with_kv_cache_return_lse", (q, *part), attention(q, *part)) for part in parts]
        run("merge_state", (*states[0], *states[1]), want)
    o = o.flatten(1) @ w.o
    residual = o.double() + x.double()
    o, x = run("fused_add_rmsnorm", (o, x, w.mlp_norm, 1e-5), (norm(residual, w.mlp_norm), residual), written=(0, 1))
    h = o @ w.gate_up
    gate, up = h.double().chunk(2, -1)
    return x + run("silu_and_mul", (h,), torch.nn.functional.silu(gate) * up) @ w.down


def plain(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """The whole block in float64, from the embeddings of all tokens."""
    x = x.double()
    h = norm(x, w.attention_norm) @ w.qkv.double()
    q, k, v = h.unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
    positions = torch.arange(len(x), device=x.device)
    x = x + attention(rotate(q, positions), rotate(k, positions), v)[0].flatten(1) @ w.o.double()
    gate, up = (norm(x, w.mlp_norm) @ w.gate_up.double()).chunk(2, -1)
    return x + (torch.nn.functional.silu(gate) * up) @ w.down.double()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    readme = Path(__file__).resolve().parents[1] / "README.md"
    parser.add_argument("file", type=Path, nargs="?", default=readme, help="a text (default: README.md)")
    path = parser.parse_args().file
    try:
        text = path.read_bytes()[: PROMPT + 1]
    except OSError as error:
        sys.exit(f"FILE: a text is required; {error}")
    if len(text) < 3:
        sys.exit(f"FILE: at least 3 bytes are required; {path} has {len(text)}")
    torch.manual_seed(0)
    weights, total = Weights(), len(text)
    tokens = torch.tensor(list(text), device=DEVICE)
    cache = Cache(total)
    place = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"fi {fi_core.__version__}, torch {torch.__version__}, {place}")
    print(f"Text: {total} bytes of {path.name}, {text[:40].decode(errors='replace')!r} ...\n")
    print(ROW.format("op", "first call", "later", "error", "where the kernel comes from"))
    embedded = weights.embedding[tokens]
    print(f"-- the prompt, {total - 1} tokens")
    prompt = block(embedded[:-1].clone(), weights, cache, total - 1)
    print("-- the next token")
    last = block(embedded[-1:].clone(), weights, cache, total)
    want = plain(embedded, weights)
    error = distance([torch.cat([prompt, last])], [want])
    print(f"\nThe whole block, against torch in float64 from the text on: error {error:.1e} of the largest value.")
    origins = list(fi_core.loaded_kernels().values())
    counts = ", ".join(f"{origins.count(origin)} from {origin}" for origin in dict.fromkeys(origins))
    print(f"{len(origins)} kernels: {counts}. What is compiled here is kept in {store.roots()[0]}.")
    wrong = sum(not e <= TOLERANCE for e in [*errors, error])
    print(f"{len(errors)} calls checked; {f'{wrong} are WRONG' if wrong else 'all are right'}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
