"""Runs all of fi_core.comm on the GPUs of a host, on 4 and 8 ranks: results, replays with skew, failures, times.

    python benchmarks/several_gpus.py [--ranks 4,8] [--parts results,replays,failures,times] [--output_path FILE]

Results: every collective by size and dtype against sums that each rank computes alone, and of torch.distributed; then
what the tests check. Replays: 2,000 of a graph of several calls, which begin at drawn times on each rank. Failures:
a killed rank, and ranks whose shapes differ. Times: `fi_bench.collectives` beside NCCL and symmetric memory, with both
forms of all-reduce, other dtypes and layers of experts; then the size up to which one shot is fastest.

A part that fails is named, and the others still run. Exit code 0: all passed. 1: a part failed. --device cpu tries
results and failures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from families import test_comm  # noqa: E402
from families.ranks import run_ranks  # noqa: E402

PARTS = ("results", "replays", "failures", "times")
SIZES = ((1, 4096), (1, 7168), (8, 4096), (32, 7168), (128, 7168), (512, 7168), (2048, 8192))
SMALL = ((1, 64), (8, 256))  # of a CPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPLAYS = 2000
# NVLink multicast is not used by fi, and stays off in what it is compared with.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def drawn(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def results(rank: int, world: int, device: torch.device, sizes: Iterable[tuple[int, int]]) -> None:
    """Sums in the order of the ranks, which each rank also computes alone: so all ranks have the same bits."""
    from fi_core import comm

    ranks = comm.TorchDistBackend()
    moving = comm.AllToAllWorkspace(device, ranks, timeout=60.0)
    for shape in sizes:
        tokens, hidden = shape
        for dtype in DTYPES:
            workspace = comm.create_allreduce_fusion_workspace(
                max_token_num=tokens, hidden_dim=hidden, dtype=dtype, device=device, timeout=60.0
            )
            every = [drawn(shape, dtype, device, seed) for seed in range(world)]
            total = torch.zeros(shape, device=device)
            for x in every:
                total += x.float()
            own, residual, gamma = every[rank], drawn(shape, dtype, device, 100), drawn((1, hidden), dtype, device, 101)
            want, s = total.to(dtype), (total + residual.float()).to(dtype)
            rms = s.double().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            norm = s.double() * rms * gamma.double()
            loose = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            for one_shot in (None, True, False):
                poisoned = torch.full_like(own, float("nan"))
                comm.allreduce_fusion(own, workspace, 0, output=poisoned, use_oneshot=one_shot)
                assert torch.equal(poisoned, want), f"all_reduce {shape} {dtype} {one_shot}"
                sums, normed = (torch.full_like(own, float("nan")) for _ in range(2))
                after: dict[str, Any] = {"residual_in": residual, "residual_out": sums, "norm_out": normed}
                comm.allreduce_fusion(own, workspace, 1, rms_gamma=gamma[0], use_oneshot=one_shot, **after)
                assert torch.equal(sums, s), f"sum with a residual {shape} {dtype} {one_shot}"
                torch.testing.assert_close(normed.double(), norm, **loose)
                test_comm._same_bits(normed)
            of_torch = own.to("cpu", torch.float32, copy=True)
            dist.all_reduce(of_torch)
            torch.testing.assert_close(of_torch.to(dtype), want.cpu(), **loose)
            if tokens % world == 0:
                part = comm.reduce_scatter_fusion(own, workspace)
                assert torch.equal(part, want.chunk(world)[rank]), f"reduce_scatter {shape} {dtype}"
                whole = torch.empty_like(own)
                moving.all_gather(part, whole.view(world, -1, hidden))
                assert torch.equal(whole, want), f"all_gather {shape} {dtype}"
                moved = torch.empty_like(own)
                moving.all_to_all(own.view(world, -1), moved.view(world, -1))
                theirs = torch.stack([x.view(world, -1)[rank] for x in every])
                assert torch.equal(moved.view(world, -1), theirs), f"all_to_all {shape} {dtype}"
            workspace.destroy()
    moving.destroy()


def fitted(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest message, in bytes, that one shot should send, by the times of both forms on each number of ranks."""
    times: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        words = row["case"].split()
        if row["provider"].startswith("fi, ") and words[0] == "all_reduce" and "x" in words[1]:
            tokens, hidden = map(int, words[1].split("x"))
            size = tokens * hidden * (4 if words[-1] == "float32" else 2)
            form = row["provider"].removeprefix("fi, ")
            known = times[row["ranks"]][size]
            known[form] = min(row["us"], known.get(form, row["us"]))
    found = []
    for ranks, sizes in times.items():
        both = sorted((size, x["one shot"], x["two shot"]) for size, x in sizes.items() if len(x) == 2)
        limits = [0, *(size for size, *_ in both)]
        # How much longer than its faster form each message takes, on the whole, with a limit.
        lost = {limit: sum((a if n <= limit else b) / min(a, b) - 1 for n, a, b in both) for limit in limits}
        best = min(limits, key=lambda limit: lost[limit])
        above = next((size for size, *_ in both if size > best), None)
        found.append({"ranks": ranks, "one_shot_bytes": best, "two_shot_from_bytes": above, "messages": both})
    return found


def times(world: int, seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        line += ["-m", "fi_bench.collectives", "--forms", "--layers", "--json", str(file)]
        line += ["--dtypes", "bfloat16,float16,float32"]
        subprocess.run(line, env=os.environ | ENVIRONMENT, check=True, timeout=seconds)
        return [json.loads(text) for text in file.read_text().splitlines()]


def parts_of(world: int, on_cpu: bool, kept: list[dict[str, Any]], left: Callable[[], float]) -> dict[str, Any]:
    """What each part runs."""
    device, sizes = ("cpu", SMALL) if on_cpu else ("gpus", SIZES)

    def timed() -> None:
        kept.extend(times(world, left()))
        for row in fitted(row for row in kept if row["ranks"] == world):
            print(json.dumps({"part": "thresholds", **row}), flush=True)

    def checked() -> None:
        run_ranks(results, world, device, sizes)
        run_ranks(test_comm._check_all, world, device)

    def failed() -> None:
        for how, killed in (("rank ends", (1,)), ("shapes differ", ())):
            run_ranks(test_comm._fail, world, device, how, killed=killed)

    found = {"results": checked, "failures": failed}
    if not on_cpu:  # which has no graphs
        found |= {"replays": lambda: run_ranks(test_comm._replay, world, device, REPLAYS), "times": timed}
    return found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8", help="numbers of ranks (4,8)")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the list above (all)")
    parser.add_argument("--seconds", type=float, default=460, help="after which no part begins (460)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output_path", type=Path, help="jsonl, a row for each case and library, as of collectives")
    args = parser.parse_args(words)
    os.environ.update(ENVIRONMENT)
    begun, failures, kept = time.monotonic(), 0, list[dict[str, Any]]()

    def left() -> float:
        return args.seconds - (time.monotonic() - begun)

    for world in map(int, args.ranks.split(",")):
        found = parts_of(world, args.device == "cpu", kept, left)
        for part in (name for name in args.parts.split(",") if name in found):
            since, error = time.monotonic(), ""
            if left() < 0:
                error = "no time is left"
            else:
                try:
                    found[part]()
                except Exception:
                    error = traceback.format_exc()[-3000:]
            failures += bool(error)
            row = {"part": part, "ranks": world, "seconds": round(time.monotonic() - since, 1)}
            print(json.dumps(row | ({"error": error} if error else {})), flush=True)
            if args.output_path:
                args.output_path.write_text("".join(json.dumps(x) + "\n" for x in kept))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
