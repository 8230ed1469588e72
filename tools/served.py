"""Makes the calls of every serving profile with FI_JIT=off on kernels of built wheels: `python tools/served.py dist`.

It unpacks the wheels of a folder into an empty place, with an empty store and no program on the path, so that nothing
but what they ship can serve. On a GPU (--device cuda) or a CPU each call runs and is compared with the reference of its
description. With the name of a target, such as sm_90a, no GPU is needed: calls are rehearsed, that is the host modules
of the wheels compute each launch, and each device binary is bound to the driver.

Exit code 0: every call is served and right, by kernels of the wheels alone. 1: one is not. 2: usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from delays import part

TESTS = Path(__file__).resolve().parents[1] / "tests"
if __name__ == "__main__":
    sys.path.append(str(TESTS))
SEED = 7
SHIPPED = {"fi-cubin", "fi-jit-cache"}
H200 = (132, 227 << 10)  # SMs, and bytes of shared memory of a CTA
OUTSIDE = "is not of the wheels"


def chosen(models: list[str], functions: list[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each call once: the first model and options that make it, function and sizes. Empty lists: all."""
    from core.serving_calls import served

    known = set[str]()
    for (name, dtype, kv, page), calls in served().items():
        for function, sizes in calls:
            key = json.dumps((function, sizes), sort_keys=True)
            if key not in known and (not models or name in models) and (not functions or function in functions):
                known.add(key)
                yield f"{name} {dtype} kv {kv or dtype} page {page}", function, sizes


def run(function: str, sizes: Mapping[str, Any], device: str) -> dict[str, str]:
    """Runs a call; AssertionError if it differs from the reference. A drawn token has none. Returns loaded kernels."""
    import torch

    from families.test_descriptions import check
    from fi_core.registry import described, loaded_kernels

    found = described(function)
    if found is None:
        raise LookupError(f"no description of {function}")
    template = found.template
    arguments = template.sample(device=device, generator=SEED, nasty=False, **sizes)
    want = template.expected(arguments) if template.reference is not None else None
    got = template.results(arguments, found.call(arguments))
    if want is not None:
        check(template, got, template.where_written(arguments, got, want))
    if device == "cuda":
        torch.cuda.synchronize()
    return loaded_kernels()


def rehearse(function: str, sizes: Mapping[str, Any], target: str) -> dict[str, str]:
    """Computes the launches of a call for a target, and binds each kernel that it chooses. Returns these kernels."""
    from fi_core.observe.draw import Outline
    from fi_core.registry import described
    from fi_core.runtime.launch.kernel import bind
    from fi_core.runtime.machine import Rehearsal
    from fi_core.runtime.spec.target import Target

    found = described(function)
    if found is None or found.template.make is None:
        raise LookupError(f"no description of {function}")
    with Rehearsal(Target("cuda", target.removeprefix("sm_")), *H200) as rehearsal:
        found.call(found.template.make(Outline(), **sizes))
    specs = {choice.spec for choice, _ in rehearsal.calls if not choice.spec.op.is_composite}
    return {spec.name: " + ".join(file.origin for file in bind(spec).origins.values()) for spec in specs}


def serve(args: Namespace) -> int:
    """In the unpacked wheels: makes the calls, and says what served them."""
    import fi_core
    from fi_core.ahead import compiled_files
    from fi_core.registry import load
    from fi_core.runtime.resolve.provider import providers

    load()
    make = run if args.device in ("cuda", "cpu") else rehearse
    start, findings, count, kernels = time.monotonic(), 0, 0, dict[str, str]()

    def finding(text: str) -> None:
        nonlocal findings
        findings += 1
        print(text, flush=True)

    for folder in (Path(fi_core.__file__).parent, *(provider.directory for provider in providers())):
        if not folder.is_relative_to(args.folder):
            finding(f"{folder}: {OUTSIDE}")
    number, of = args.part
    for place, function, sizes in itertools.islice(chosen(args.models, args.functions), number - 1, None, of):
        count += 1
        try:
            kernels |= make(function, sizes, args.device)
        except Exception as error:  # whatever it is, this call is not served
            what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            finding(f"{place}: {function} {dict(sizes)}: {what}")
        if not count % 20:
            print(f"{count} calls, {findings} findings, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    for name, origin in kernels.items():
        if not set(origin.split(" + ")) <= SHIPPED:
            finding(f"{name}: loaded from {origin}")
    for file in compiled_files():
        finding(f"{file}: was compiled")
    served = f"{count} calls on {args.device}, {len(kernels)} kernels, {time.monotonic() - start:.0f} s"
    print(f"{served}: {findings} findings")
    return int(bool(findings) or not count)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with wheels of the packages, as `nox -s wheels` leaves them in dist")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or the name of a target (cuda)")
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="of tests/core/serving_calls.py (all)")
    parser.add_argument("--functions", nargs="+", default=[], metavar="FUNCTION", help="limit the calls to these (all)")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="the K-th of N parts of the calls")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.serve:
        return serve(args)
    wheels = sorted(args.folder.glob("*.whl"))
    if not wheels:
        parser.error(f"folder: a folder with wheels is required; got {args.folder}, which holds none")
    with tempfile.TemporaryDirectory(prefix="fi-served-") as scratch:
        site, store, programs = (Path(scratch) / name for name in ("site", "store", "programs"))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        programs.mkdir()
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))  # the rest may hold torch
        places = {"PYTHONPATH": path, "PATH": str(programs), "FI_CACHE_DIR": str(store), "FI_JIT": "off"}
        line = [sys.executable, "-B", __file__, str(site), "--serve", f"--device={args.device}"]
        line.append(f"--part={args.part[0]}/{args.part[1]}")
        for name in ("models", "functions"):
            line += [f"--{name}", *getattr(args, name)] if getattr(args, name) else []
        done = subprocess.run(line, env=os.environ | places, cwd=scratch, check=False)
        left = [path for path in store.rglob("*") if path.is_file()] if store.exists() else []
    if left:
        print(f"the store holds {len(left)} files: {left[0].name}")
    return done.returncode or int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
