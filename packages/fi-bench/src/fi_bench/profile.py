"""`fi-bench profile`: one call of a case under Nsight Compute or Nsight Systems, and nothing else."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence

from fi_bench import parsing
from fi_bench.console import say
from fi_bench.errors import FAILED, OK, UsageError
from fi_bench.parsing import Parser, underscored

_TOOLS = {
    "ncu": "ncu --profile-from-start off --set full --force-overwrite -o",
    "nsys": "nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true -o",
}


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="fi-bench profile",
        description="Print and run the profiler command for a case; the flags are those of a run, with one backend.",
    )
    parser.add_argument("--tool", choices=tuple(_TOOLS), default="ncu")
    parser.add_argument("--report", default="fi_bench_profile", help="name of the report file")
    parser.add_argument("--print_only", action="store_true", help="do not run it")
    parser.add_argument("--once", action="store_true", help="warm-up, then one call; the profiler runs this")
    args, rest = parser.parse_known_args(underscored(words))
    lines = parsing.read_lines(rest)
    points = [point for line in lines for point in line.points]
    if len(points) != 1 or not points[0].backends or len(points[0].backends) != 1:
        raise UsageError("profile needs flags that name one case and one backend")
    if args.once:
        return _once(points[0])
    command = [*_TOOLS[args.tool].split(), args.report, sys.executable, "-m", "fi_bench", "profile", "--once", *rest]
    print(shlex.join(command), flush=True)
    if args.print_only:
        return OK
    if shutil.which(args.tool) is None:
        say("ERROR", f"{args.tool} is not on PATH; it comes with the CUDA toolkit (Nsight)")
        return FAILED
    return OK if subprocess.run(command, check=False).returncode == 0 else FAILED


def _once(args: Namespace) -> int:
    """Three calls outside, one inside the profiler's range."""
    import torch

    from fi_bench import backends, cases
    from fi_bench.errors import SkipError
    from fi_bench.runner import device_of, marked

    found = cases.find(args.routine)
    if found is None:
        raise UsageError(f"fi-core has no {args.routine} yet")
    try:
        device = device_of(args, args.backends)
        runner = backends.bind(backends.canonical(args.backends[0], found.family)[0], found, device)
    except SkipError as skip:
        raise UsageError(str(skip)) from None
    generator = torch.Generator(device).manual_seed(args.random_seed)
    inputs = found.make(args, torch.device(device), generator)
    on_gpu = device == "cuda"
    with runner.context():
        call = runner.prepare(inputs)
        for _ in range(3):
            call(inputs)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        with marked(f"{args.routine} {runner.name}", on_gpu):
            call(inputs)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    return OK
