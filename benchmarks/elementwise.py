"""The elementwise families beside FlashInfer and a plain copy, in one run: GPU and host time, as JSON lines.

python benchmarks/elementwise.py [--only TEXT] [--out FILE] [--iters N]; needs a CUDA device. FlashInfer is measured
where it is installed. `copy` is torch.neg(a, out=b) over the bytes of the case: what moving them costs at this size.
Time: median of CUDA-graph replays between two events, the L2 flushed by a 256 MB memset before each, sides interleaved.
An empty kernel is the first row: its time is inside every other one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from sides import Sides, gpu_us, host_us

import fi_core

try:
    import flashinfer
except ImportError:
    flashinfer = None

Case = tuple[str, int, Sides]  # name, bytes that must move, sides
BF16 = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def both(function: str, *args: object, **kwargs: object) -> Sides:
    """The same call on both sides."""
    sides = {"fi_core": lambda: getattr(fi_core, function)(*args, **kwargs)}
    if flashinfer is not None:
        sides["flashinfer"] = lambda: getattr(flashinfer, function)(*args, **kwargs)
    return sides


def norm_cases() -> Iterator[Case]:
    for n, d in ((1, 4096), (32, 4096), (512, 4096), (16384, 8192)):
        x, r, w, out = rand(n, d), rand(n, d), rand(d), rand(n, d)
        yield f"rmsnorm {n}x{d}", 4 * n * d, both("rmsnorm", x, w, 1e-6, out)
        yield f"fused_add_rmsnorm {n}x{d}", 8 * n * d, both("fused_add_rmsnorm", x, r, w, 1e-6)
    q, w = rand(16384, 32, 128), rand(128)
    yield "rmsnorm 16384x32x128", 4 * q.numel(), both("rmsnorm", q, w, 1e-6, torch.empty_like(q))


def activation_cases() -> Iterator[Case]:
    for n, h in ((32, 14336), (16384, 14336)):
        x, out = rand(n, 2 * h), rand(n, h)
        for name in ("silu_and_mul", "gelu_tanh_and_mul"):
            yield f"{name} {n}x{h}", 6 * n * h, both(name, x, out)


def rope_cases() -> Iterator[Case]:
    cache = torch.randn(131072, 128, device="cuda")
    for n in (64, 16384, 65536):
        q, k = rand(n, 32, 128), rand(n, 8, 128)
        positions = torch.arange(n, device="cuda", dtype=torch.int32)
        moved = 4 * (q.numel() + k.numel())
        yield f"rope_pos_ids_inplace n{n}", moved, both("apply_rope_pos_ids_inplace", q, k, positions)
        yield f"llama31_rope_inplace n{n}", moved, both("apply_llama31_rope_pos_ids_inplace", q, k, positions)
        flat = (positions.long(), q.view(n, -1), k.view(n, -1), 128, cache)
        yield f"rope_cos_sin_inplace n{n}", moved, both("apply_rope_with_cos_sin_cache_inplace", *flat)


def page_cases() -> Iterator[Case]:
    for n in (64, 16384, 65536):
        k, v = rand(n, 8, 128), rand(n, 8, 128)
        pages = (n + 15) // 16
        cache = torch.zeros(pages, 2, 16, 8, 128, device="cuda", dtype=BF16)
        batch = torch.zeros(n, device="cuda", dtype=torch.int32)
        positions = torch.arange(n, device="cuda", dtype=torch.int32)
        indices = torch.randperm(pages, device="cuda").int()
        indptr = torch.tensor([0, pages], device="cuda", dtype=torch.int32)
        last = torch.tensor([(n - 1) % 16 + 1], device="cuda", dtype=torch.int32)
        args = (k, v, batch, positions, cache, indices, indptr, last)
        yield f"append_paged_kv n{n}", 8 * k.numel(), both("append_paged_kv_cache", *args)


def cascade_cases() -> Iterator[Case]:
    va, vb = rand(16384, 32, 128), rand(16384, 32, 128)
    sa, sb = rand(16384, 32, dtype=torch.float32), rand(16384, 32, dtype=torch.float32)
    yield "merge_state 16384x32x128", 6 * va.numel() + 12 * sa.numel(), both("merge_state", va, sa, vb, sb)


def measured(sides: Sides, iters: int) -> dict[str, dict[str, float | str]]:
    """Per side its medians, or why it does not run."""
    found: dict[str, dict[str, float | str]] = {}
    working: Sides = {}
    for side, call in sides.items():
        try:
            call()
            working[side] = call
        except Exception as error:  # a peer without this kernel must not lose the row
            found[side] = {"error": f"{type(error).__name__}: {error}"[:200]}
    for side, samples in gpu_us(working, iters).items():
        found[side] = {"us": round(statistics.median(samples), 2), "host_us": round(host_us(working[side]), 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write JSON lines here too")
    parser.add_argument("--iters", type=int, default=30)
    args = parser.parse_args()
    source, target = rand(1 << 29), rand(1 << 29)
    one = torch.ones(1, device="cuda")
    empty = statistics.median(gpu_us({"neg": lambda: torch.neg(one, out=one)}, args.iters)["neg"])
    rows: list[dict[str, object]] = [
        {"case": "one element", "us": round(empty, 2), "gpu": torch.cuda.get_device_name()}
    ]
    print(json.dumps(rows[0]), flush=True)
    for family in (norm_cases, activation_cases, rope_cases, page_cases, cascade_cases):
        for name, moved, sides in family():
            if args.only not in name:
                continue
            a, b = source[: moved // 4], target[: moved // 4]
            found = measured({**sides, "copy": lambda a=a, b=b: torch.neg(a, out=b)}, args.iters)
            row: dict[str, object] = {"case": name, "bytes": moved, **found}
            ours, peer, copy = (found.get(side, {}).get("us") for side in ("fi_core", "flashinfer", "copy"))
            if isinstance(ours, float) and isinstance(copy, float):
                row |= {"tb_per_s": round(moved / ours / 1e6, 3), "of_copy": round(copy / ours, 3)}
            if isinstance(ours, float) and isinstance(peer, float):
                row["ratio"] = round(ours / peer, 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
