"""Counts the instructions that order memory in each kernel entry of a unit, by its PTX.

`python tests/kernels/census.py` writes census.json beside it anew. A change of the file belongs to a change of a
kernel: a fence, arrival, wait or barrier that came or went is a line of its diff.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fi_core.aot import specs
from fi_core.registry import ops
from fi_core.runtime.build import compiler, sources, toolchain
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import Target

KEPT = Path(__file__).with_suffix(".json")
TARGET = Target("cuda", "90a")
KINDS = {
    "proxy fence": r"fence\.proxy\.async",
    "arrival": r"mbarrier\.arrive(?!\.expect)|cp\.async\.mbarrier\.arrive",
    "expected bytes": r"mbarrier\.arrive\.expect_tx",
    "wait": r"mbarrier\.(?:try|test)_wait",
    "CTA barrier": r"\bbar(?:rier)?\.(?:sync|red|cta)",
    "warp barrier": r"bar\.warp\.sync",
    "cluster barrier": r"barrier\.cluster",
    "bulk copy": r"cp\.async\.bulk",
    "release or acquire": r"(?:atom|red|ld|st)\.(?:acq_rel|release|acquire)|fence\.acq_rel|membar",
}
BLOCK = "fi/cuda/ptx/mbarrier_sm90.cuh"  # what units include whose warps hand shared memory to each other
Census = Mapping[str, Mapping[str, int]]


def units() -> dict[str, Spec]:
    """Every unit of the packages that hands shared memory over by mbarriers."""
    every = (spec for op in ops().values() for spec in specs(op, TARGET))
    found = [spec for spec in every if BLOCK in sources.headers(sources.artifacts(spec)[1])]
    return {spec.name: spec for spec in sorted(found, key=lambda spec: spec.name)}


def sample() -> dict[str, Spec]:
    """The first of each implementation of an op."""
    first: dict[tuple[str, str], Spec] = {}
    for spec in units().values():
        first.setdefault((spec.op.name, spec.implementation), spec)
    return {spec.name: spec for spec in first.values()}


def of_ptx(text: str) -> Census:
    """The counts of each kernel entry; a kind that does not occur is left out."""
    found = {}
    for part in re.split(r"\.visible \.entry |\.entry ", text)[1:]:  # inline assembly has braces of its own
        name, _, body = part.partition("(")
        counts = {kind: len(re.findall(pattern, body)) for kind, pattern in KINDS.items()}
        found[name] = {kind: count for kind, count in counts.items() if count}
    return found


def ptx(spec: Spec) -> str:
    """The PTX of a unit, by nvcc. ptxas does not run."""
    _, artifact = sources.artifacts(spec)
    nvcc = toolchain.nvcc()
    assert nvcc, "nvcc is required: pip install 'fi-core[nvcc]'"
    with tempfile.TemporaryDirectory(prefix="fi-census-") as folder:
        compiler.write_unit(artifact, Path(folder))
        unit, out = compiler.unit_path(artifact, Path(folder)), Path(folder) / "unit.ptx"
        flags = [flag for flag in compiler.flags(artifact, shipped=True) if not flag.startswith("--split-compile")]
        line = [nvcc, "-ptx", *flags, f"-I{sources.include_dir()}", str(unit), "-o", str(out)]
        subprocess.run(line, check=True, capture_output=True)
        return out.read_text()


def kept_census() -> dict[str, Census]:
    found: dict[str, Census] = json.loads(KEPT.read_text())
    return found


def as_text(counted: Mapping[str, Census]) -> str:
    """JSON with a line for each kernel entry."""
    units = []
    for name, entries in counted.items():
        lines = (f"  {json.dumps(entry)}: {json.dumps(counts)}" for entry, counts in entries.items())
        units.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(units) + "\n}\n"


if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        counted = dict(zip(units(), map(of_ptx, threads.map(ptx, units().values()))))
    KEPT.write_text(as_text(counted))
    print(f"{KEPT}: {sum(map(len, counted.values()))} kernel entries", file=sys.stderr)
