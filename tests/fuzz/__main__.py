"""`nox -s fuzz`: hostile calls of every public function under sanitizers. Prints each class of finding with a case."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SANITIZE, READY = "FI_SANITIZE", "FI_FUZZ_READY"
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048:quarantine_size_mb=32:"
    "malloc_context_size=3:detect_odr_violation=0:handle_abort=1:protect_shadow_gap=0",  # the last for CUDA's driver
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_WAIT_POLICY": "passive",
    "OMP_NUM_THREADS": "1",  # a process with a pool of threads cannot be forked; a worker may take two
    "CUDA_VISIBLE_DEVICES": "",  # no driver beside the address sanitizer: cuInit crashes on some machines
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "FI_JIT": "off",  # compilers do not run under the preloaded library
    "FI_CHECK": "1",  # also of signs; 0: contents are trusted
}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", description=__doc__)
    parser.add_argument("--metadata", type=int, default=600, help="cases of wrong dtypes, shapes, strides, kinds")
    parser.add_argument("--contents", type=int, default=450, help="cases of wrong indices, lengths, values")
    parser.add_argument("--each", type=int, default=400, help="cases of one argument changed in one of a list of ways")
    parser.add_argument("--numbers", type=int, default=220, help="calls with drawn sizes, judged by references in fp64")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--hours", type=float, help="cases of both kinds until that time is over")
    parser.add_argument("--case", action="append", default=[], metavar="KIND:SEED", help="this case alone, in full")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=20.0, help="processor seconds of one case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every class of outcome, with its cases")
    return parser.parse_args(arguments)


def _library(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


def prepare() -> None:
    """Compiles the modules with sanitizers, then starts this program again with their runtime loaded first."""
    from fi_core import aot
    from fi_core.runtime.build import toolchain
    from fi_core.runtime.env import env
    from fi_core.runtime.resolve import build_missing

    sanitizers = env.sanitize
    from fuzz.variant import specs

    start = time.monotonic()
    count = build_missing([*aot.artifacts(["cpu"]), *(spec.host for spec in specs())])
    print(f"compiled {count} modules in {time.monotonic() - start:.0f} s", flush=True)
    compiler = toolchain.cxx()
    assert compiler
    libraries = {"address": "libasan.so", "undefined": "libubsan.so"}
    preload = [_library(compiler, libraries[name]) for name in sanitizers] + [_library(compiler, "libstdc++.so.6")]
    environment = {**OPTIONS, **os.environ, READY: "1", "LD_PRELOAD": ":".join(preload)}
    os.execve(sys.executable, [sys.executable, "-m", "fuzz", *sys.argv[1:]], environment)


def names(given: argparse.Namespace, known: list[Any]) -> Iterator[str]:
    """The cases of a run with the scenarios that are known: as many as asked for, both random kinds mixed."""
    if given.case:
        yield from given.case
        return
    if given.each:
        from fuzz import each

        yield from (f"each:{number}" for number in each.numbers(known, given.each, given.seed))
    if given.hours is None:
        yield from (f"numbers:{number}" for number in range(given.seed, given.seed + given.numbers))
    for i in itertools.count(given.seed):
        at, endless = i - given.seed, given.hours is not None
        if at < given.metadata or endless:
            yield f"metadata:{i}"
        if at < given.contents or endless:
            yield f"contents:{i}"
        if endless:
            yield f"numbers:{i}"
        if not endless and at >= max(given.metadata, given.contents):
            return


def class_of(record: Record) -> str:
    """What findings of one cause have in common."""
    text = re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "N", record.get("text", ""))
    if record["outcome"] == "sanitizer":
        return f"sanitizer: {record.get('text', '')[-200:]}"
    where = record.get("where") or record.get("scenario", "")
    by = record.get("raised_by") or record.get("function", "")
    return f"{record['outcome']}: {by}: {record.get('error', '')} {where}: {text[:70]}"


class Summary:
    """Outcomes, and findings by class."""

    def __init__(self, live: bool) -> None:
        self.outcomes: Counter[str] = Counter()
        self.classes: dict[str, list[Record]] = {}
        self.start = self.shown = time.monotonic()
        self.live = live

    def add(self, record: Record) -> None:
        from fuzz.case import FINDINGS

        self.outcomes[record["outcome"]] += 1
        if record["outcome"] in (*FINDINGS, "broken case"):
            known = self.classes.setdefault(class_of(record), [])
            known.append(record)
            if len(known) == 1:
                print(
                    f"{record['outcome']}: {record.get('scenario', '')} [{record.get('change', '')[:160]}]", flush=True
                )
                print(f"    {record.get('error', '')} {record.get('text', '')[:240]}", flush=True)
                print(f"    nox -s fuzz -- --case {record['case']}", flush=True)
        self.progress(5.0 if self.live else 30.0)

    def progress(self, every: float) -> None:
        now = time.monotonic()
        if now - self.shown >= every:
            self.shown = now
            rate = self.count / (now - self.start)
            print(f"{self.count} cases, {rate:.0f} a second, {len(self.classes)} classes of findings", flush=True)

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())


def main() -> int:
    given = options()
    os.environ.setdefault(SANITIZE, "address,undefined")
    if not os.environ.get(READY):
        prepare()
    from fi_core.compat import compilation_context
    from fuzz import case, pool
    from fuzz.calls import scenarios
    from fuzz.variant import preload

    vars(compilation_context)["driver"] = lambda: None  # as CUDA_VISIBLE_DEVICES says
    preload()
    known = scenarios()
    summary = Summary(sys.stdout.isatty())
    end = None if given.hours is None else time.monotonic() + given.hours * 3600

    def done(record: Record) -> bool:
        summary.add(record)
        return end is None or time.monotonic() < end

    def work(name: str, announce: Callable[[Record], None]) -> Record:
        return case.run(name, known, announce)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # what is known by then is told
        pool.run(names(given, known), work, jobs=given.jobs, seconds=given.timeout, done=done)
    seconds = time.monotonic() - summary.start
    outcomes = ", ".join(f"{count} {name}" for name, count in summary.outcomes.most_common())
    findings = sum(map(len, summary.classes.values()))
    print(f"{summary.count} cases of {len(known)} scenarios in {seconds:.0f} s: {outcomes}")
    print(f"{findings} findings in {len(summary.classes)} classes")
    if given.json:
        given.json.write_text(json.dumps({"outcomes": summary.outcomes, "findings": summary.classes}, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
