"""Times fi's products, experts and MLA interleaved with the peers of a measuring pack, and streams of the same bytes.

The pack is a folder with duel.py, gemm.py and moe.py, which hold the peers and the cases. A row of the result is one
implementation of one case, as in results/h200-gemm.jsonl. Cases of which the file has fi's row are left out, so a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from stream import Read, forms

_BEGIN = time.time()
os.environ.setdefault("FI_JIT", "on")  # the pack turns off FlashInfer's compiler by a variable that fi reads, too
NAMES = {
    "ours": "fi",
    "cublas": "cuBLAS",
    "cublas_loop": "cuBLAS, loop",
    "bmm": "torch.bmm",
    "vllm_cutlass": "CUTLASS",
    "deepgemm": "DeepGEMM",
    "deepgemm_mn": "DeepGEMM, arranged scales",
    "deepgemm_masked": "DeepGEMM masked",
    "deepgemm_counts": "DeepGEMM, host counts",
    "fi_sm90": "FlashInfer",
    "fi_cublas": "FlashInfer",
    "fi_cutlass": "FlashInfer",
    "vllm_triton": "vLLM Triton",
    "grouped_mm": "torch._grouped_mm",
}
Makes = dict[str, Callable[[], Callable[[], Any]]]
_E4M3 = torch.float8_e4m3fn
_DEVICE = "cuda"
_FP4_SHAPE = 16, 28672, 8192
_MLA_CASES = ((64, 8192, "bf16"), (64, 8192, "e4m3"), (1, 32768, "bf16"), (8, 1024, "bf16"))


def gemm(case: str, a: Any, b: Any, sa: Any = None, sb: Any = None, offs: Any = None) -> Makes:
    """fi's call of a case of the pack's gemm.py, with what it allocates made beforehand."""
    import fi_core as fi
    from fi_core.gemm.ops import gemm as product

    kind = case.split()[1]
    out = a.new_empty(*a.shape[:-1], b.shape[-2], dtype=torch.bfloat16)
    if kind == "bmm":
        if b.dtype is _E4M3:
            return {"ours": lambda: lambda: fi.gemm.bmm_fp8(a, b.mT, sa, sb, torch.bfloat16, out)}
        return {"ours": lambda: lambda: fi.gemm.bmm_bf16(a, b.mT, out)}
    if offs is not None:
        indptr = torch.nn.functional.pad(offs, (1, 0))
        if sa is None:
            return {"ours": lambda: lambda: fi.grouped_mm_bf16(a, b, indptr, out)}
        if kind == "rowwise":
            return {"ours": lambda: lambda: (product(out, a, b, sa, sb, m_indptr=indptr), out)[1]}
        groups = fi.gemm.group_gemm_fp8_nt_groupwise
        return {"ours": lambda: lambda: groups(a, b, sa, sb, indptr, scale_major_mode="K", out=out)}
    if sa is None:
        return {"ours": lambda: lambda: fi.gemm.mm_bf16(a, b.mT, out=out)}
    if kind == "tensorwise":
        return {"ours": lambda: lambda: fi.gemm.mm_fp8(a, b, sa, out=out)}
    if kind == "rowwise":
        rows = sa.flatten(), sb.flatten()
        return {"ours": lambda: lambda: fi.gemm.mm_fp8(a, b, out=out, a_scale=rows[0], b_scale=rows[1])}
    return {"ours": lambda: lambda: fi.gemm.gemm_fp8_nt_groupwise(a, b, sa, sb, "K", out=out)}


def gemm_streams(case: str, a: Any, b: Any, sa: Any = None, sb: Any = None, offs: Any = None) -> Makes:
    if " bmm " in case or offs is not None or a.shape[0] > 128:
        return {}
    out = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    scales = [Read(s) for s in (sa, sb) if s is not None and s.numel() >= 4 and s.is_contiguous()]
    made = forms([Read(b), Read(a), *scales], out)
    if "rowwise" in case or "groupwise" in case:  # as many bytes as with one scale, but for 0.1 %
        made = {name: made[name] for name in ("stream",)}
    return made


_swapped: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # the model of the last case only


def _up_first(w1: Any, s1: Any) -> tuple[Any, Any]:
    """The weights of fc1 with the linear projection before the gate."""
    key = w1.data_ptr(), w1.shape, w1.dtype
    if key not in _swapped:
        _swapped.clear()
        torch.cuda.empty_cache()
        swapped = w1.new_empty(w1.shape)
        half = w1.shape[1] // 2
        swapped[:, :half], swapped[:, half:] = w1[:, half:], w1[:, :half]
        _swapped[key] = swapped, None if s1 is None else torch.cat(s1.chunk(2, 1)[::-1], 1)
    return _swapped[key]


def moe(
    case: str,
    x: Any,
    w1: Any,
    w2: Any,
    s1: Any,
    s2: Any,
    topk_weights: Any,
    topk_ids: Any,
    expert_map: Any,
    num_experts: int,
) -> Makes:
    """fi's call of a case of the pack's moe.py."""
    from fi_core.fused_moe import cutlass_fused_moe

    def make() -> Callable[[], Any]:
        first, scale = _up_first(w1, s1)
        out = torch.empty_like(x)
        scales = [] if s1 is None else [scale, s2]
        return lambda: cutlass_fused_moe(
            x, topk_ids, topk_weights, first, w2, torch.bfloat16, scales, output=out,
            ep_size=num_experts // w1.shape[0], ep_rank=0, use_deepseek_fp8_block_scale=s1 is not None,
        )  # fmt: skip

    return {"ours": make}


def moe_streams(case: str, x: Any, w1: Any, w2: Any, s1: Any, s2: Any, topk_ids: Any, **_: Any) -> Makes:
    """The weights of the experts that a token of this rank chose, in the order of the experts."""
    if x.shape[0] > 64:
        return {}
    hit = sorted(e for e in set(topk_ids.flatten().tolist()) if e < w1.shape[0])
    reads = [Read(w, hit) for w in (w1, w2, s1, s2) if w is not None and w[0].numel() >= 4]
    return forms([*reads, Read(x)], torch.zeros_like(x))


def compiling(scripts: Sequence[str], few_tokens: bool) -> threading.Thread:
    """A thread that compiles the kernels of the pack's scripts, or those of few tokens."""
    from fi_core.ahead import prepare
    from fi_core.registry import load
    from fi_core.runtime.dispatch import Request, choose
    from fi_core.runtime.machine import target_of

    target = target_of(torch.device("cuda", 0))
    bf16 = {"a": "bf16", "b": "bf16"}
    rows, blocks = ({"a": "e4m3", "b": "e4m3", "scales": scales} for scales in ("rows", "blocks"))
    weights, any_m = ("bf16", "e4m3"), 129
    wanted: list[tuple[str, str, dict[str, Any]]] = []  # the longest first
    if "moe" in scripts and not few_tokens:
        wanted += [("fused_moe", "moe_gated_gemm", {"x": w}) for w in weights]
        groups = any_m, 64, 32, 16
        wanted += [("gemm", "gemm", {**form, "tiles": "groups", "m": m}) for m in groups for form in (bf16, blocks)]
        wanted += [("fused_moe", "moe_activation", {"out": w}) for w in weights]
    if "moe" in scripts:
        wanted += [("fused_moe", "moe_experts", {"weight": w, "tokens": t}) for t in (8, 16, 32, 64) for w in weights]
        wanted += [("fused_moe", "moe_gather", {"quantizes": quantizes}) for quantizes in (False, True)]
        wanted += [("fused_moe", op, {}) for op in ("moe_sort", "moe_finalize")]
    if "gemm" in scripts:
        of_groups = () if few_tokens else (any_m, 64, 16)
        tiles = [*(("batched", m) for m in (any_m, 64, 32, 16, 8)), *(("groups", m) for m in of_groups)]
        wanted += [("gemm", "gemm", {**form, "tiles": t, "m": m}) for t, m in tiles for form in (bf16, rows, blocks)]
    if few_tokens:
        wanted += [("attention", "batch_mla", {"q": "bf16", "kv": kv, "rows": "narrow"}) for kv in weights]
        wanted += [("attention", "mla_plan", {}), ("gemm", "gemm_few_bits", {"block": 16, "m": 16})]
        wanted += [("quantization", "block_quantize", {"out": "e2m1", "block": 16, "scale": "e4m3"})]
    specs = []
    for family, name, values in wanted:
        op = load(family)[name].op
        known = {field: value for field, value in values.items() if field in op.fields}  # of trees of any age
        specs.append(choose(Request.of(op, target, known)).spec)
    thread = threading.Thread(target=prepare, args=(list(dict.fromkeys(specs)),))
    thread.start()
    return thread


def kept(out: Path) -> set[str]:
    """The cases of the file that fi has a row of; rows of other cases are removed."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {row["case"] for row in rows if row["peer"] == NAMES["ours"]}
    if not all(row["case"] in done for row in rows):
        out.write_text("".join(json.dumps(row) + "\n" for row in rows if row["case"] in done))
    return done


class Pack:
    """The pack's scripts, with fi and streams among the kernels of each case."""

    def __init__(self, folder: Path, out: Path, seconds: float, streams: bool, skip: Sequence[str]) -> None:
        sys.path.insert(0, str(folder))
        sys.argv = ["gemm.py", str(seconds)]
        self.duel: Any = importlib.import_module("duel")
        for name in ("peers_vllm", "flashinfer", "flashinfer.fused_moe"):  # while fi compiles
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self.folder, self.out, self.streams, self.skip = folder, out, streams, skip
        self.done, self.cut = kept(out), False
        self._turns, self._wanted = self.duel.duel, self.duel.wanted
        self.duel.duel, self.duel.wanted, self.duel.save = self.turns, self.wanted, lambda: None
        self.duel.ours = types.SimpleNamespace(gemm=self._gemm, moe=self._moe)

    def _gemm(self, case: str, **tensors: Any) -> Makes:
        return gemm(case, **tensors) | (gemm_streams(case, **tensors) if self.streams else {})

    def _moe(self, case: str, **tensors: Any) -> Makes:
        return moe(case, **tensors) | (moe_streams(case, **tensors) if self.streams else {})

    def wanted(self, case: str) -> bool:
        many = re.search(" T(256|1024|8192)$| bmm | grouped ", case)
        if case.removeprefix("moe ") in self.done or (self.streams and many):
            return False
        wanted = bool(self._wanted(case))
        self.cut |= not wanted and time.time() - _BEGIN > self.duel.LIMIT
        return wanted

    def alone(self, case: str, makes: Makes, size: int, **more: Any) -> None:
        """Times a case that no script of the pack has."""
        if case not in self.done:
            self.duel.NAME = "alone"
            self.turns(case, makes, by=size, **more)

    def turns(self, case: str, makes: Makes, *args: Any, **tensors: Any) -> Any:
        """Times a case and writes its rows at once."""
        if case.startswith("moe gemms"):
            return {}
        makes = {name: make for name, make in makes.items() if name not in self.skip}
        before = len(self.duel.rows)
        found = self._turns(case, makes, *args, **tensors)
        self.done.add(case.removeprefix("moe "))
        with self.out.open("a") as file:
            for row in self.duel.rows[before:]:
                name = NAMES.get(row["peer"], row["peer"])
                kept = {"case": case.removeprefix("moe "), "peer": name}
                kept |= {key: row[key] for key in ("us", "tflops", "tbs", "host_us")}
                if row["err"] is not None and not name.startswith(("stream", "nothing")):
                    kept["err"] = row["err"]
                file.write(json.dumps(kept) + "\n")
        return found

    def run(self, script: str, only: Sequence[str], until: float) -> types.ModuleType:
        """Runs the cases of a script whose names hold one of these texts; begins none after so many seconds."""
        self.duel.NAME, self.duel.ONLY, self.duel.LIMIT = script, list(only), until
        self.duel.t0 = _BEGIN
        spec = importlib.util.spec_from_file_location(f"pack_{script}", self.folder / f"{script}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def fp4(pack: Pack) -> None:
    """Few tokens and NVFP4 weights; no peer has them on Hopper, so cuBLAS has weights in bf16."""
    import fi_core as fi

    m, n, k = _FP4_SHAPE
    a = torch.randn(m, k, device=_DEVICE, dtype=torch.bfloat16)
    b = torch.randint(0, 256, (n, k // 2), device=_DEVICE, dtype=torch.uint8)
    scales = (torch.rand(n, k // 16, device=_DEVICE) + 0.5).to(_E4M3)
    dense = torch.randn(n, k, device=_DEVICE, dtype=torch.bfloat16)
    quantised, a_scales = fi.nvfp4_quantize(a, torch.ones(1, device=_DEVICE))
    out = torch.zeros(m, n, device=_DEVICE, dtype=torch.bfloat16)
    makes: Makes = {
        "ours": lambda: lambda: fi.gemm.mm_bf16_fp4(a, b, scales, out=out),
        "fi, mm_fp4": lambda: lambda: fi.gemm.mm_fp4(quantised, b.t(), a_scales, scales.t(), out=out),
        "cublas": lambda: lambda: torch.nn.functional.linear(a, dense),
        **forms([Read(b), Read(scales), Read(a)], torch.zeros_like(out)),
    }
    pack.alone(f"fp4 {m}x{n}x{k}", makes, n * k // 2 + n * k // 16 + 2 * m * (n + k), ref={})


def mla(pack: Pack) -> None:
    """Decode with 16 heads: the latent cache once."""
    import flashinfer

    import fi_core as fi

    workspace = torch.empty(512 << 20, device=_DEVICE, dtype=torch.uint8)
    for batch, kv_len, dtype in _MLA_CASES:
        case = f"mla b{batch} kv{kv_len // 1024}k h16" + (", e4m3 cache" if dtype == "e4m3" else "")
        pages = kv_len // 64
        q = torch.randn(batch, 16, 576, device=_DEVICE, dtype=torch.bfloat16)
        parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
        cache = torch.randn(batch * pages, 64, 576, device=_DEVICE, dtype=torch.bfloat16)
        if dtype == "e4m3":
            cache = cache.to(_E4M3)
        order = torch.randperm(batch * pages, device=_DEVICE).int()
        steps = torch.arange(batch + 1, device=_DEVICE, dtype=torch.int32)
        lengths = torch.full((batch,), kv_len, device=_DEVICE, dtype=torch.int32)

        def planned(
            wrapper: Any, backend: str, scales: dict[str, float],
            *, q: Any = q, cache: Any = cache, order: Any = order, steps: Any = steps, lengths: Any = lengths,
            parts: Any = parts, pages: int = pages,
        ) -> Callable[[], Any]:  # fmt: skip
            made = wrapper(workspace, backend=backend)
            made.plan(steps, steps * pages, order, lengths, 16, 512, 64, 64, False, 192**-0.5, q.dtype, cache.dtype)
            return lambda: made.run(*parts, cache[..., :512], cache[..., 512:], **scales)

        peer = functools.partial(planned, flashinfer.mla.BatchMLAPagedAttentionWrapper, "fa3", {})
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if dtype == "e4m3" else {}
        ours = functools.partial(planned, fi.mla.BatchMLAPagedAttentionWrapper, "auto", scales)
        makes: Makes = {"FlashInfer fa3": peer} if dtype == "bf16" else {}
        made = forms([Read(cache), Read(q)], torch.zeros(batch, 16, 512, device=_DEVICE, dtype=torch.bfloat16))
        size = cache.numel() * cache.element_size() + 2 * batch * 16 * (576 + 512)
        pack.alone(case, makes | {"ours": ours} | made, size)


def few_experts(pack: Pack, script: Any, seconds: float) -> None:
    """256 experts of 512 x 2048, top 8; without DeepGEMM, which would compile for this shape."""
    pack.duel.NAME, pack.duel.ONLY, pack.duel.LIMIT = "moe", [], seconds
    pack.skip = [*pack.skip, "deepgemm"]
    name = "e256-n512-k2048"
    script.MODELS[name] = 256, 256, 8, 2048, 512
    weights = functools.cache(lambda: script.weights(256, 2048, 512, True))
    for tokens in (1, 2, 4, 8):
        script.case(name, tokens, True, weights)


_SHAPES = ("64x2112x7168", "64x4096x7168", "128x7168x2048", "128x24576x1536")


def steps(pack: Pack, seconds: float, scripts: Sequence[str], only: Sequence[str]) -> Iterator[Callable[[], Any]]:
    """The cases in the order of their value."""
    if not pack.streams:
        yield from (functools.partial(pack.run, script, only, seconds) for script in scripts)
        return
    yield lambda: fp4(pack)
    yield lambda: mla(pack)
    first = [" 1x", " 16x", " 32x", *_SHAPES]
    yield lambda: pack.run("gemm", first, 0.5 * seconds)
    scripts_run: list[Any] = []
    yield lambda: scripts_run.append(pack.run("moe", [], 0.8 * seconds))
    yield lambda: few_experts(pack, scripts_run[0], seconds)
    if pack.cut:
        yield lambda: pack.run("gemm", first, seconds)
    yield lambda: pack.run("gemm", [" 4x", " 8x"], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="the folder of duel.py, gemm.py and moe.py")
    parser.add_argument("out", type=Path, help="the file that rows are added to")
    parser.add_argument("--seconds", type=float, default=40, help="after the start no case begins later")
    parser.add_argument("--streams", action="store_true", help="few tokens only, with streams of the same bytes")
    parser.add_argument("--scripts", nargs="*", default=["gemm", "moe"], help="of the pack, without --streams")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of cases, without --streams")
    parser.add_argument("--skip", nargs="*", help="peers to leave out; with --streams grouped_mm")
    args = parser.parse_args()
    compiler = compiling(args.scripts, args.streams)
    pack = Pack(args.pack, args.out, args.seconds, args.streams, args.skip or (["grouped_mm"] if args.streams else []))
    compiler.join()  # compilers on all cores would delay launches
    print(f"{time.time() - _BEGIN:.1f} s before the first case", flush=True)
    for step in steps(pack, args.seconds, args.scripts, args.only):
        try:
            step()
        except Exception as error:  # the next cases are others' kernels
            print("STOPPED", type(error).__name__, str(error)[:500], flush=True)
        print(f"{time.time() - _BEGIN:.1f} s", flush=True)


if __name__ == "__main__":
    main()
