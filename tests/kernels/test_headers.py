"""Every header compiles alone, with warnings as errors; host sources also compile for aarch64 (Grace hosts)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fi_kernels
from fi_core.build import compiler, nvrtc, toolchain

INCLUDE = fi_kernels.ROOT / "include"
HOST = sorted(INCLUDE.rglob("*.h"))
DEVICE = sorted(INCLUDE.rglob("*.cuh"))
CSRC = sorted((fi_kernels.ROOT / "csrc").rglob("*.cc"))
CROSS = "aarch64-linux-gnu-g++"
STRICT = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


def name(path: Path) -> str:
    return path.relative_to(fi_kernels.ROOT).as_posix()


def compile_host(cxx: str, kind: str, source: Path, out: Path) -> None:
    flags = [*compiler.HOST_FLAGS, *compiler.KIND_FLAGS[kind], *STRICT, f"-I{INCLUDE}"]
    flags = [flag for flag in flags if flag != "-shared" and not flag.startswith("-Wl,")]
    system = f"-isystem{toolchain.tvm_ffi_root() / 'include'}"
    done = subprocess.run([cxx, *flags, system, "-c", str(source), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def cross_compiler() -> str:
    found = shutil.which(CROSS)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"{CROSS} is missing: apt-get install g++-aarch64-linux-gnu")
    if found is None:
        pytest.skip(f"{CROSS} is not installed (Debian: g++-aarch64-linux-gnu)")
    return found


def unit_of(header: Path, folder: Path) -> Path:
    """A translation unit that includes one header, twice: a missing guard shows too."""
    unit = folder / "unit.cc"
    unit.write_text(f'#include "{header.relative_to(INCLUDE).as_posix()}"\n' * 2)
    return unit


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("header", HOST, ids=name)
def test_host_header_compiles_alone(header: Path, kind: str, tmp_path: Path) -> None:
    compile_host(toolchain.cxx() or "c++", kind, unit_of(header, tmp_path), tmp_path / "unit.o")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("source", CSRC, ids=name)
def test_host_source_compiles_for_aarch64(source: Path, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "unit.o"
    compile_host(cross_compiler(), kind, source, out)
    assert out.read_bytes()[18:20] == b"\xb7\x00", "e_machine of an ELF object for AArch64"


def targets_of(header: Path) -> list[str]:
    """The suffix rule: `_sm90` needs sm_90a, no suffix means every target of the library."""
    suffix = re.search(r"_sm(\d+)$", header.stem)
    return [f"sm_{suffix[1]}a"] if suffix and int(suffix[1]) >= 90 else ["sm_80", "sm_90a", "sm_100a", "sm_120a"]


@pytest.mark.parametrize("header", DEVICE, ids=name)
def test_device_header_compiles_alone(header: Path) -> None:
    include = f'#include "{header.relative_to(INCLUDE).as_posix()}"\n'
    for target in targets_of(header):
        options = [f"-arch={target}", *compiler.DEVICE_FLAGS, f"-I{INCLUDE}"]
        assert nvrtc.compile_cubin(include * 2, header.stem, options).image[:4] == b"\x7fELF"


def test_there_are_headers_of_each_kind() -> None:
    assert HOST
    assert DEVICE
    assert CSRC
