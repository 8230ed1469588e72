"""Batch decode against its peers on one GPU, interleaved in one process, as JSON lines.

python benchmarks/decode.py [--cases D1,D9] [--grid GB] [--above GB] [--variants auto,fa2_tc] [--peers FOLDERS]
[--rounds N] [--seconds N] [--seed N] [--out FILE]. A time is the median of CUDA-graph replays, each behind a flush of
L2 by a memset of 256 MB. Results are compared with fp64 first. A variant is an implementation, with what differs from
its tuning: fa3:ring=65536. --grid: every batch, length, heads, type and page size of GRID whose caches take no more
than so many GB, and more than --above, all in one buffer, in an order that spreads over the grid, until the seconds are
over.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sides import captured, host_us, replay_us

from fi_core.decode import ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Case(NamedTuple):
    lengths: list[int]
    qo_heads: int
    kv_heads: int
    kv: torch.dtype = BF16
    page_size: int = 16
    dim: int = 128
    q_len: int = 1
    layout: str = "NHD"


def varied() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 8193, (64,), generator=generator).tolist()


CASES: dict[str, Callable[[], Case]] = {
    "D1": lambda: Case([1024] * 16, 32, 8),
    "D2": lambda: Case([1024] * 64, 32, 8),
    "D3": lambda: Case([8192], 32, 8),
    "D4": lambda: Case([8192] * 16, 32, 8),
    "D5": lambda: Case([8192] * 128, 64, 8),
    "D6": lambda: Case([8192] * 64, 32, 32),
    "D7": lambda: Case(varied(), 32, 8),
    "D8": lambda: Case([131072] * 2, 32, 8),
    "D9": lambda: Case([8192] * 64, 32, 8, E4M3),
    "page1": lambda: Case([8192] * 16, 32, 8, page_size=1),
    "page4": lambda: Case([8192] * 16, 32, 8, page_size=4),
    "page8": lambda: Case([8192] * 16, 32, 8, page_size=8),
    "page64": lambda: Case([8192] * 16, 32, 8, page_size=64),
    "hnd": lambda: Case([8192] * 16, 32, 8, layout="HND"),
    "b4": lambda: Case([4096] * 4, 32, 8),
    "b1kv1k": lambda: Case([1024], 32, 8),
    "b1kv1k_mqa": lambda: Case([1024], 8, 1),
    "b1kv1k_fp8": lambda: Case([1024], 32, 8, E4M3),
    "b256kv512": lambda: Case([512] * 256, 32, 8),
    "mqa": lambda: Case([8192] * 64, 8, 1),
    "b64fp8kv1k": lambda: Case([1024] * 64, 32, 8, E4M3),
    "b1kv32k_fp8": lambda: Case([32768], 32, 8, E4M3),
    "spec4": lambda: Case([8192] * 16, 32, 8, q_len=4),
    "d64": lambda: Case([8192] * 32, 32, 8, dim=64),
    "d256": lambda: Case([8192] * 16, 32, 8, dim=256),
}


GRID = {
    "batch": (1, 4, 16, 64, 128, 256),
    "kv_len": (512, 1024, 4096, 8192, 32768, 131072),
    "heads": ((32, 8), (64, 8), (32, 32), (28, 4), (8, 1)),
    "kv": (BF16, E4M3),
    "page": (1, 16, 64),
}


def cache_bytes(case: Case) -> int:
    pages = sum(-(-n // case.page_size) for n in case.lengths)
    return pages * 2 * case.page_size * case.kv_heads * case.dim * case.kv.itemsize


def grid(least_bytes: float, most_bytes: float, seed: int) -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {}
    for batch, kv_len, (heads, kv_heads), kv, page in itertools.product(*GRID.values()):
        case = Case([kv_len] * batch, heads, kv_heads, kv, page)
        if least_bytes < cache_bytes(case) <= most_bytes:
            name = f"b{batch} kv{kv_len} {heads}/{kv_heads} {'fp8' if kv is E4M3 else 'bf16'} page {page}"
            found[name] = functools.partial(Case, case.lengths, heads, kv_heads, kv, page)
    names = list(found)
    random.Random(seed).shuffle(names)
    return {name: found[name] for name in names}


@functools.cache
def pools(most_bytes: int) -> dict[torch.dtype, torch.Tensor]:
    """For each type a buffer of random values that holds every cache of the grid."""
    halves = torch.empty(most_bytes // 2, dtype=BF16, device="cuda")
    for part in halves.split(1 << 28):
        part.normal_()
    bytes_ = torch.empty(2, halves.numel(), dtype=E4M3, device="cuda")
    for narrow, part in zip(bytes_.split(1 << 28, 1), halves.split(1 << 28)):
        narrow.copy_(part.to(E4M3))
    return {BF16: halves, E4M3: bytes_.view(-1)}


class Inputs:
    def __init__(self, case: Case, pool: torch.Tensor | None = None) -> None:
        self.case, device = case, "cuda"
        counts = [-(-n // case.page_size) for n in case.lengths]
        total, batch = sum(counts), len(case.lengths)
        inner = [case.page_size, case.kv_heads] if case.layout == "NHD" else [case.kv_heads, case.page_size]
        shape = (total, 2, *inner, case.dim)
        if pool is not None:
            self.kv = pool[: math.prod(shape)].view(shape)
        else:
            self.kv = torch.empty(shape, device=device, dtype=case.kv)
            for i in range(0, total, 65536):  # without a copy of the whole cache in fp32
                part = self.kv[i : i + 65536]
                part.copy_(torch.randn(part.shape, device=device, dtype=BF16).to(case.kv))
        self.k, self.v = self.kv[:, 0], self.kv[:, 1]
        self.indices = torch.randperm(total, device=device).to(torch.int32)
        self.indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        self.last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.lengths], dtype=torch.int32)
        for b in range(batch):  # what lies behind the last token
            if int(self.last[b]) < case.page_size:
                page = self.kv[self.indices[int(self.indptr[b + 1]) - 1].item()]
                tail = page[:, int(self.last[b]) :] if case.layout == "NHD" else page[:, :, int(self.last[b]) :]
                tail.copy_(torch.full(tail.shape, math.nan, device=device).to(case.kv))
        self.q = torch.randn(batch * case.q_len, case.qo_heads, case.dim, device=device, dtype=BF16)
        self.out = torch.empty_like(self.q)
        tokens = sum(case.lengths)
        self.bytes = tokens * 2 * case.kv_heads * case.dim * self.kv.element_size() + 2 * self.q.numel() * 2

    def reference(self, b: int) -> torch.Tensor:
        """fp64, of one request."""
        case = self.case
        pages = self.indices[int(self.indptr[b]) : int(self.indptr[b + 1])].long()
        group, n = case.qo_heads // case.kv_heads, case.lengths[b]
        k, v = (x[pages] if case.layout == "NHD" else x[pages].transpose(1, 2) for x in (self.k, self.v))
        k, v = (x.reshape(-1, case.kv_heads, case.dim)[:n] for x in (k, v))
        q = self.q[b * case.q_len : (b + 1) * case.q_len].double()
        out = torch.empty_like(q)
        seen = torch.arange(n, device="cuda")[None] <= torch.arange(n - case.q_len, n, device="cuda")[:, None]
        for h in range(case.qo_heads):
            s = q[:, h] @ k[:, h // group].double().T * case.dim**-0.5
            out[:, h] = s.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, h // group].double()
        return out


def chosen(impl: str, case: Case) -> str:
    return ops.choose(impl, torch.device("cuda", 0), BF16, case.kv, case.dim, case.dim, 0, case.page_size)


def ours(x: Inputs, impl: str, split: int = ops.BALANCED) -> tuple[Callable[[], None], Callable[[], None]]:
    """plan and run."""
    case, device = x.case, torch.device("cuda", 0)
    units = ops.units_of(case.qo_heads, case.kv_heads, case.q_len)
    indptr, last, layout = x.indptr.cuda(), x.last.cuda(), int(case.layout == "HND")
    impl = chosen(impl, case)
    needs = ops.sizes(device, len(case.lengths), units, split, x.indices.numel() * case.page_size, impl, case.kv)
    buffers = ops.allocate(device, needs, case.dim)

    def plan() -> None:
        ops.plan(buffers, indptr, last, None, case.page_size, units, q_len=case.q_len)

    def run() -> None:
        ops.attend(
            buffers, x.out, None, x.q, x.k, x.v, x.indices, impl, layout, q_len=case.q_len, sm_scale=case.dim**-0.5
        )

    plan()
    return plan, run


@contextlib.contextmanager
def tuned(variant: str) -> Iterator[str]:
    """The implementation of a variant, tuned as it says inside the block."""
    impl, *changes = variant.split(":")
    before = ops.TMA
    for change in changes:
        name, value = change.split("=")
        ops.TMA = ops.TMA._replace(**{name: type(getattr(ops.TMA, name))(int(value))})
    ops.batch_decode._calls.clear()
    try:
        yield impl
    finally:
        ops.TMA = before


def peers(x: Inputs) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Names and makers of what else can do it, as far as it is installed."""
    import os

    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")  # what is not prebuilt fails instead of compiling for minutes
    case, page = x.case, x.case.page_size
    import flashinfer

    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    most = -(-max(case.lengths) // page)
    table = torch.zeros(len(case.lengths), most, dtype=torch.int32, device="cuda")
    for b in range(len(case.lengths)):
        first, end = int(x.indptr[b]), int(x.indptr[b + 1])
        table[b, : end - first] = x.indices[first:end]

    def wrapper() -> Callable[[], Any]:
        w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, case.layout, use_tensor_cores=True)
        w.plan(
            x.indptr, x.indices, x.last, case.qo_heads, case.kv_heads, case.dim, page, q_data_type=BF16,
            kv_data_type=case.kv,
        )  # fmt: skip
        return lambda: w.run(x.q, x.kv)

    def xqa() -> Callable[[], Any]:
        zeroed = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        return lambda: flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            x.q, (x.k, x.v), zeroed, table, lengths, max(case.lengths), bmm1_scale=case.dim**-0.5, bmm2_scale=1.0,
            kv_layout=case.layout,
        )  # fmt: skip

    if case.q_len > 1:
        return
    yield "flashinfer fa2_tc", wrapper
    yield "flashinfer xqa", xqa
    for folder in sys.path:  # of vllm only the kernels are wanted: its own __init__ stays out
        if (Path(folder) / "vllm/vllm_flash_attn").is_dir():
            for name in ("vllm", "vllm.third_party"):
                module = types.ModuleType(name)
                module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
                sys.modules.setdefault(name, module)
            break
    from vllm.vllm_flash_attn import flash_attn_interface as fa

    def fa3() -> Callable[[], Any]:
        batch = len(case.lengths)
        cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        data = fa.get_scheduler_metadata(
            batch, 1, max(case.lengths), case.qo_heads, case.kv_heads, case.dim, lengths, qkv_dtype=BF16,
            cu_seqlens_q=cu, page_size=page, causal=True,
        )  # fmt: skip
        return lambda: fa.flash_attn_varlen_func(
            x.q, x.k, x.v, 1, cu, max(case.lengths), seqused_k=lengths, block_table=table, causal=True, fa_version=3,
            scheduler_metadata=data,
        )  # fmt: skip

    if case.kv == BF16 and case.layout == "NHD" and case.q_len == 1:
        yield "fa3", fa3


def measure(
    name: str, case: Case, variants: list[str], with_peers: bool, rounds: int, pool: torch.Tensor | None = None
) -> Iterator[dict[str, Any]]:
    x = Inputs(case, pool)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    used: list[Any] = []  # what graphs refer to: buffers, and kernels that another variant replaces
    rows: dict[str, dict[str, Any]] = {}
    checked = sorted({0, len(case.lengths) - 1} if pool is None else {0})
    expected = {b: x.reference(b) for b in checked}
    seen: set[tuple[str, str]] = set()
    for variant in variants:
        row = {"case": name, "who": variant}
        try:
            with tuned(variant) as impl:
                row["impl"] = chosen(impl, case)
                key = row["impl"], variant.partition(":")[2]
                if key in seen:
                    continue
                seen.add(key)
                rows[variant] = row
                start = time.perf_counter()
                plan, run = ours(x, impl)
                x.out.fill_(math.nan)
                run()
                torch.cuda.synchronize()
                used += [plan, run, dict(ops.batch_decode.kernels)]
                row["first_s"] = round(time.perf_counter() - start, 2)
                row["error"] = max(
                    float((x.out[b * case.q_len : (b + 1) * case.q_len].double() - y).abs().max())
                    for b, y in expected.items()
                )
                row["nan"] = bool(x.out.isnan().any())
                graphs[variant] = captured(run)
                if pool is None:
                    row["host_us"] = round(host_us(run), 1)
                if pool is None and variant == variants[0]:
                    row["plan_host_us"] = round(host_us(plan), 1)
                    graphs["plan"], rows["plan"] = captured(plan), {"case": name, "who": "plan"}
        except Exception as error:
            row["failed"] = str(error)[:300]
            rows[variant] = row
    if with_peers:
        try:
            for peer, make in peers(x):
                row = rows[peer] = {"case": name, "who": peer}
                try:
                    run = make()
                    run()
                    used.append(run)
                    graphs[peer] = captured(run)
                except Exception as error:
                    row["failed"] = str(error)[:300]
        except Exception as error:
            rows["peers"] = {"case": name, "who": "peers", "failed": str(error)[:300]}
    times = replay_us(graphs, rounds)
    for who, row in rows.items():
        if times.get(who):
            us = sorted(times[who])
            row["us"] = round(us[len(us) // 2], 2)
            row["tbs"] = round(x.bytes / row["us"] / 1e6, 3) if who != "plan" else None
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="D1,D2,D3,D4,D5,D6,D7,D8,D9")
    parser.add_argument("--variants", default="auto,fa2_tc")
    parser.add_argument("--peers", nargs="?", const="", help="measure them too; folders to import them from, with ':'")
    parser.add_argument("--grid", type=float, help="GB of the largest cache")
    parser.add_argument("--above", type=float, default=0, help="GB of the smallest cache of the grid")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the grid")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    sys.path += filter(None, (args.peers or "").split(":"))
    lines, start, most = [], time.perf_counter(), (args.grid or 0) * 1e9
    cases = (
        grid(args.above * 1e9, most, args.seed) if args.grid else {name: CASES[name] for name in args.cases.split(",")}
    )
    for name, make in cases.items():
        if time.perf_counter() - start > args.seconds:
            break
        case = make()
        pool = pools(int(most))[case.kv] if args.grid else None
        for row in measure(name, case, args.variants.split(","), args.peers is not None, args.rounds, pool):
            lines.append(json.dumps(row))
            print(lines[-1], flush=True)
            if args.out:
                args.out.write_text("\n".join(lines) + "\n")
        if not args.grid:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
