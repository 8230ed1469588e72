"""Batch prefill against its peers on one GPU, interleaved in one process, as JSON lines.

python benchmarks/prefill.py [--cases P1,R1] [--backends fa3,fa2] [--peers FOLDERS] [--rounds N] [--out FILE]. A time is
the median of CUDA-graph replays of run(), each behind a flush of L2 by a memset of 256 MB; causal, bf16, or e4m3 with
bf16 outputs. Outputs are compared with those of backend fa2, which its tests compare with fp64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sides import captured, replay_us

import fi_core

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Case(NamedTuple):
    lengths: list[tuple[int, int]]  # qo_len, kv_len of each request
    qo_heads: int
    kv_heads: int
    dim_qk: int = 128
    dim_vo: int = 128
    page_size: int = 16  # 0: ragged
    dtype: torch.dtype = BF16  # of q, k and v
    kv_dtype: torch.dtype | None = None  # of k and v, if another

    @property
    def flops(self) -> float:
        """Of the visible pairs of query and key: row i of n sees kv_len - n + i + 1 keys."""
        pairs = sum(n * kv - n * (n - 1) / 2 for n, kv in self.lengths)
        return 2 * (self.dim_qk + self.dim_vo) * self.qo_heads * pairs


def short() -> list[tuple[int, int]]:
    lengths = torch.randint(1, 1025, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    return [(n, n) for n in lengths]


CASES: dict[str, Callable[[], Case]] = {
    "P1": lambda: Case([(1024, 1024)] * 16, 32, 8),
    "P2": lambda: Case([(4096, 4096)] * 4, 32, 8),
    "P3": lambda: Case([(16384, 16384)], 32, 8),
    "P4": lambda: Case([(512, 512)], 32, 8),
    "P5": lambda: Case([(512, 8192)] * 8, 32, 8),
    "R1": lambda: Case([(16384, 16384)], 32, 8, page_size=0),
    "R2": lambda: Case([(4096, 4096)] * 4, 128, 128, 192, 128, page_size=0),
    "short": lambda: Case(short(), 32, 8, page_size=0),
    "H1": lambda: Case([(8192, 8192)], 16, 8, 256, 256),
    "H2": lambda: Case([(8192, 8192)], 16, 8, 256, 256, page_size=0),
    "F1": lambda: Case([(8192, 8192)], 32, 8, dtype=E4M3),
    "F2": lambda: Case([(16384, 16384)], 32, 8, dtype=E4M3),
    "F3": lambda: Case([(16384, 16384)], 32, 8, page_size=0, dtype=E4M3),
    "M1": lambda: Case([(16384, 16384)], 32, 8, kv_dtype=E4M3),
    "F4": lambda: Case([(1024, 1024)] * 16, 32, 8, dtype=E4M3),
}


class Inputs:
    """Random tensors of a case, and the tables that wrappers plan with, on the host."""

    def __init__(self, case: Case) -> None:
        def sums(values: list[int]) -> torch.Tensor:
            return torch.tensor([0, *values]).cumsum(0).int()

        def rand(*shape: int, dtype: torch.dtype = case.kv_dtype or case.dtype) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=BF16).to(dtype)

        self.case = case
        self.qo_indptr = sums([n for n, _ in case.lengths])
        self.q = rand(int(self.qo_indptr[-1]), case.qo_heads, case.dim_qk, dtype=case.dtype)
        kv = [n for _, n in case.lengths]
        if case.page_size:
            pages = [-(-n // case.page_size) for n in kv]
            self.kv_indptr = sums(pages)
            self.last = torch.tensor([(n - 1) % case.page_size + 1 for n in kv], dtype=torch.int32)
            self.indices = torch.randperm(sum(pages), device="cuda").int()
            self.kv = rand(sum(pages), 2, case.page_size, case.kv_heads, case.dim_qk)
            self.table = torch.zeros(len(kv), max(pages), dtype=torch.int32, device="cuda")
            for b, n in enumerate(pages):
                self.table[b, :n] = self.indices[self.kv_indptr[b] : self.kv_indptr[b] + n]
            self.lengths = torch.tensor(kv, dtype=torch.int32, device="cuda")
        else:
            self.kv_indptr = sums(kv)
            self.k, self.v = rand(sum(kv), case.kv_heads, case.dim_qk), rand(sum(kv), case.kv_heads, case.dim_vo)


def wrapper(library: Any, x: Inputs, backend: str) -> Callable[[], torch.Tensor]:
    """run() of a planned wrapper; the libraries are call-compatible."""
    case, workspace = x.case, torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    types_ = {
        "causal": True,
        "q_data_type": case.dtype,
        "kv_data_type": case.kv_dtype or case.dtype,
        "o_data_type": BF16,
    }
    if case.page_size:
        paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        tables = (x.qo_indptr.cuda(), x.kv_indptr.cuda(), x.indices, x.last.cuda())
        paged.plan(*tables, case.qo_heads, case.kv_heads, case.dim_qk, case.page_size, **types_)
        return lambda: paged.run(x.q, x.kv)
    ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    tables = (x.qo_indptr.cuda(), x.kv_indptr.cuda())
    ragged.plan(*tables, case.qo_heads, case.kv_heads, case.dim_qk, head_dim_vo=case.dim_vo, **types_)
    return lambda: ragged.run(x.q, x.k, x.v)


def flash_attention_3(x: Inputs) -> Callable[[], torch.Tensor]:
    """vLLM's build of FlashAttention-3, whose package must not be imported as a whole."""
    for name in ("vllm", "vllm.third_party"):
        folder = next(p for p in sys.path if p.endswith("vl"))
        module = types.ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules.setdefault(name, module)
    from vllm.vllm_flash_attn import flash_attn_interface

    case, call = x.case, flash_attn_interface.flash_attn_varlen_func
    longest_q, longest_kv = (max(column) for column in zip(*case.lengths))
    cu = x.qo_indptr.cuda()
    if case.page_size:
        k, v = x.kv[:, 0], x.kv[:, 1]
        paged = {"seqused_k": x.lengths, "block_table": x.table}
        return lambda: call(x.q, k, v, longest_q, cu, longest_kv, causal=True, fa_version=3, **paged)
    ck = x.kv_indptr.cuda()
    return lambda: call(x.q, x.k, x.v, longest_q, cu, longest_kv, cu_seqlens_k=ck, causal=True, fa_version=3)


def contenders(x: Inputs, backends: list[str], with_peers: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for backend in backends:
        yield backend, lambda backend=backend: wrapper(fi_core, x, backend)
    if with_peers:
        import flashinfer

        for backend in backends:
            yield f"flashinfer {backend}", lambda backend=backend: wrapper(flashinfer, x, backend)
        yield "flash_attention_3", lambda: flash_attention_3(x)


def measure(name: str, case: Case, backends: list[str], with_peers: bool, rounds: int) -> Iterator[dict[str, Any]]:
    x, rows, graphs = Inputs(case), {}, {}
    used = []  # what graphs refer to
    want = wrapper(fi_core, x, "fa2")().float()
    for who, make in contenders(x, backends, with_peers):
        row: dict[str, Any] = {"case": name, "who": who}
        rows[who] = row
        start = time.perf_counter()
        try:
            run = make()
            out = run()
            torch.cuda.synchronize()
            row["first_s"] = round(time.perf_counter() - start, 2)
            out = (out[0] if isinstance(out, tuple) else out).float().view_as(want)
            row["error"] = float((out - want).abs().max())
            used.append(run)
            graphs[who] = captured(run)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
    times = replay_us(graphs, rounds, wait=True)
    for who, row in rows.items():
        if who in times:
            us = sorted(times[who])[rounds // 2]
            row |= {"us": round(us, 2), "tflops": round(case.flops / us / 1e6, 1)}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--backends", default="fa3")
    parser.add_argument("--peers", nargs="?", const="", help="measure them too; folders to import them from, with ':'")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out")
    args = parser.parse_args()
    sys.path += filter(None, (args.peers or "").split(":"))
    for name in args.cases.split(","):
        for row in measure(name, CASES[name](), args.backends.split(","), args.peers is not None, args.rounds):
            line = json.dumps(row)
            print(line, flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(line + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
