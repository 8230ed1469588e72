"""Host modules as they are shipped: no warning, no dependency but tvm-ffi and the compiler's own, few exported symbols.

That they compile for aarch64 is checked with the wheel for it, in tests/packaging/test_aarch64.py.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fi_core.aot import artifacts
from fi_core.runtime.build import compiler, sources, toolchain
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.artifact import Artifact, Text

pytestmark = pytest.mark.slow
HOST = artifacts(("cpu", "cuda"))
IMAGES = artifacts(("cubin",))
DEVICE = list({a.source.includes: a for a in IMAGES if isinstance(a.source, Text)}.values())  # one unit of each header
# What a Linux with a C++ compiler's run-time libraries and fi-core's dependencies has.
LIBRARIES = {"libtvm_ffi", "libstdc++", "libm", "libgcc_s", "libgomp", "libc", "ld-linux-x86-64", "ld-linux-aarch64"}


def by_name(artifact: Artifact) -> str:
    return artifact.name


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("artifact", HOST, ids=by_name)
def test_no_warning(artifact: Artifact) -> None:
    """-Wall and -Wextra, as it is built: optimisers find more than a check of the syntax."""
    assert {"-Wall", "-Wextra"} <= set(compiler.flags(artifact))
    log = built(artifact).path.with_suffix(".log")
    assert not log.exists(), log.read_text()


@pytest.mark.parametrize("artifact", HOST, ids=by_name)
def test_what_it_needs_and_exports(artifact: Artifact) -> None:
    path = built(artifact).path
    dynamic = run("readelf", "-dW", path)
    needed = {name.split(".so")[0] for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)}
    assert needed <= LIBRARIES, "the driver is found by dlopen, torch is used from Python only"
    assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", dynamic)
    symbols = re.findall(r"^\S+ (?!U)\w (\w+)", run("nm", "-D", "--defined-only", path), re.MULTILINE)
    exported = {"bind", "call", "follow", "forget", "learn", "plan", "request", "run"}
    named = {name.removeprefix("__tvm_ffi_") for name in symbols if not name.startswith("_Z")}
    assert named - {"steps"} == exported  # steps: of those with FI_STEPS
    assert str(sources.root()).encode() not in path.read_bytes(), "the same bytes wherever the tree lies"


@pytest.mark.parametrize("artifact", [*HOST, *DEVICE], ids=by_name)
def test_the_closure_is_what_the_compiler_reads(artifact: Artifact, tmp_path: Path) -> None:
    """A header that the preprocessor opens and the key does not know would make a stale file."""
    for header in ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h"):
        (tmp_path / header).touch()  # the preprocessor need not see into them
    generated, unit = tmp_path / "generated", tmp_path / "unit.cc"
    sources.write_headers(artifact, generated)
    unit.write_text(sources.text(artifact))
    flags = [f for f in compiler.flags(artifact) if f.startswith(("-D", "-std", "-fopenmp"))]
    places = [
        f"-I{sources.include_dir()}",
        f"-isystem{toolchain.tvm_ffi_root() / 'include'}",
        f"-I{tmp_path}",
        f"-I{generated}",
    ]
    listing = run("c++", "-M", *flags, *places, unit)
    roots = [f"{folder.as_posix()}/" for folder in (sources.include_dir(), generated)]
    words = listing.replace("\\\n", " ").split()
    read = {word.removeprefix(root) for root in roots for word in words if word.startswith(root)}
    assert read and read <= set(sources.headers(artifact))
