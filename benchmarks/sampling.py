"""Sampling beside FlashInfer in one process: GPU and host time as JSON lines, and the choices of tuning side by side.

python benchmarks/sampling.py [--only TEXT] [--out FILE] [--iters N] [--variants] [--compile-peers]; needs a CUDA
device. FlashInfer is measured where it is installed and has the kernel prebuilt: compiling one takes it minutes, so a
row says which are missing unless --compile-peers. Time: median of CUDA-graph replays between two events, the L2 flushed
by a 256 MB memset before each, sides interleaved. `copy` is torch.neg over as many bytes as the case must move. An
empty kernel is the first row: its time is inside every other one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from sides import Sides, gpu_us, host_us

import fi_core
from fi_core.launch.kernel import bind
from fi_core.sampling import ops
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit
from fi_core.spec.target import cuda_target

RANDOM = {"seed": 1, "offset": 2}
# Which entry is built otherwise: its threads, and its config, of which the first is blocks on an SM.
VARIANTS = {
    "stream 1024x1": ("sample_stream", 1024, (1,)),
    "stream 512x3": ("sample_stream", 512, (3,)),
    "softmax 1024x1": ("softmax_cluster", 1024, (1, 3)),
}


@functools.cache
def variant(name: str, threads: int, config: tuple[int, ...]) -> dict[tuple[object, ...], Callable[..., None]]:
    """What `sample` calls where an entry of the cluster kernel is built like this; kept, as graphs refer to it."""

    def changed(entry: Entry) -> Entry:
        if not entry.name.startswith(name):
            return entry
        body = entry.body.replace(f" {entry.threads}>", f" {threads}>")
        return Entry(f"{name}_variant", body, threads, config, 0, config[0])

    def unit(axes: Axes) -> Unit:
        base = ops._cluster_unit(axes)
        return base._replace(entries=tuple(map(changed, base.entries)))

    impl = ops.SAMPLE.impl("cluster")
    return bound(dataclasses.replace(ops.SAMPLE, impls=(Impl("cluster", impl.constraints, unit),)), "cluster")


@functools.cache
def implementation(name: str) -> dict[tuple[object, ...], Callable[..., None]]:
    return bound(ops.SAMPLE, name)


def bound(op: Op, impl: str) -> dict[tuple[object, ...], Callable[..., None]]:
    dtypes = {torch.float32: "f32", torch.bfloat16: "bf16"}
    target = cuda_target(*torch.cuda.get_device_capability())
    return {(0, dtype): bind(op.spec(target, {"dtype": short}, impl)).call for dtype, short in dtypes.items()}


def within(call: Callable[[], object], calls: dict[tuple[object, ...], Callable[..., None]]) -> Callable[[], object]:
    """The call, by these kernels."""

    def run() -> object:
        before, ops.sample._calls = ops.sample._calls, calls
        try:
            return call()
        finally:
            ops.sample._calls = before

    return run


def functions(logits: torch.Tensor, probs: torch.Tensor) -> dict[str, Callable[[object], Callable[[], object]]]:
    """Calls by name, of fi_core or of flashinfer.sampling."""
    k = torch.full((logits.shape[0],), 50, dtype=torch.int32, device="cuda")
    p = torch.full((logits.shape[0],), 0.9, device="cuda")
    return {
        "softmax": lambda m: lambda: m.softmax(logits),
        "sampling_from_logits": lambda m: lambda: m.sampling_from_logits(logits, **RANDOM),
        "sampling_from_probs": lambda m: lambda: m.sampling_from_probs(probs, **RANDOM),
        "top_k50": lambda m: lambda: m.top_k_sampling_from_probs(probs, 50, **RANDOM),
        "top_p0.9": lambda m: lambda: m.top_p_sampling_from_probs(probs, 0.9, **RANDOM),
        "min_p0.05": lambda m: lambda: m.min_p_sampling_from_probs(probs, 0.05, **RANDOM),
        "top_k50_top_p0.9_logits": lambda m: lambda: m.top_k_top_p_sampling_from_logits(logits, 50, 0.9, **RANDOM),
        "top_k50_top_p0.9_by_row": lambda m: lambda: m.top_k_top_p_sampling_from_probs(probs, k, p, **RANDOM),
        "top_k_renorm50": lambda m: lambda: m.top_k_renorm_probs(probs, 50),
        "top_p_renorm0.9": lambda m: lambda: m.top_p_renorm_probs(probs, 0.9),
        "top_k_mask50": lambda m: lambda: m.top_k_mask_logits(logits, 50),
    }  # type: ignore[attr-defined]


def cases() -> Iterator[tuple[str, Callable[[object], Callable[[], object]], torch.Tensor]]:
    for rows, vocab, spread in ((64, 128256, 1.0), (1, 128256, 1.0), (256, 128256, 1.0), (64, 128256, 5.0)):
        logits = torch.randn(rows, vocab, device="cuda") * spread
        probs = torch.softmax(logits, -1)
        for name, call in functions(logits, probs).items():
            if (rows != 256 and spread == 1.0) or name.startswith(("top_k50_top", "softmax", "top_p0.9", "sampling_")):
                yield f"{name} {rows}x{vocab} s{spread:g}", call, logits


def flashinfer_sampling(compiles: bool) -> ModuleType | None:
    """FlashInfer's sampling functions, which compile what is not prebuilt, or raise at once."""
    os.environ.setdefault("FI_JIT", "on")  # ours: the next variable would turn it off, too
    if not compiles:
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    try:
        return importlib.import_module("flashinfer.sampling")
    except ImportError:
        return None


def measured(sides: Sides, iters: int) -> dict[str, object]:
    found: dict[str, object] = {}
    working: Sides = {}
    for side, call in sides.items():
        try:
            call()
            torch.cuda.synchronize()
            working[side] = call
        except Exception as error:  # a peer without this kernel must not lose the row
            found[side] = f"{type(error).__name__}: {error}"[:200]
    for side, samples in gpu_us(working, iters).items():
        found[side] = round(statistics.median(samples), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write JSON lines here too")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--variants", action="store_true", help="other shapes of the kernel beside the chosen one")
    parser.add_argument("--compile-peers", action="store_true", help="let FlashInfer compile what is not prebuilt")
    args = parser.parse_args()
    peer_functions = flashinfer_sampling(args.compile_peers)
    source, target = (torch.randn(256 * 128256, device="cuda") for _ in range(2))
    one = torch.ones(1, device="cuda")
    empty = statistics.median(gpu_us({"neg": lambda: torch.neg(one, out=one)}, args.iters)["neg"])
    rows: list[dict[str, object]] = [
        {"case": "one element", "us": round(empty, 2), "gpu": torch.cuda.get_device_name()}
    ]
    print(json.dumps(rows[0]), flush=True)
    for name, call, data in cases():
        if args.only not in name:
            continue
        elements = data.numel() if name.startswith(("softmax", "top_k_r", "top_p_r", "top_k_m")) else data.numel() // 2
        a, b = source[:elements], target[:elements]
        sides: Sides = {"fi_core": call(fi_core), "copy": lambda a=a, b=b: torch.neg(a, out=b)}
        if peer_functions is not None:
            sides["flashinfer"] = call(peer_functions)
        if args.variants:
            sides |= {v: within(sides["fi_core"], variant(*choice)) for v, choice in VARIANTS.items()}
            sides["cuda"] = within(sides["fi_core"], implementation("cuda"))
        row: dict[str, object] = {"case": name, **measured(sides, args.iters)}
        row["host_us"] = round(host_us(sides["fi_core"]), 2)
        ours, peer = row.get("fi_core"), row.get("flashinfer")
        if isinstance(ours, float) and isinstance(peer, float):
            row["ratio"] = round(ours / peer, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main()
