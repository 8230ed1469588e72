"""Every header compiles alone, with warnings as errors."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import fi_kernels
from fi_core.registry import ops
from fi_core.runtime.build import compiler, nvrtc, sources, toolchain
from fi_core.runtime.env import env
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.target import CPU
from kernels.kept import kept
from kernels.test_host_code import run

pytestmark = pytest.mark.slow
INCLUDE = fi_kernels.ROOT / "include"
OPS = {fi_kernels.ROOT / op.source: op for op in ops().values()}
HOST = sorted(INCLUDE.rglob("*.h"))
DEVICE = sorted(INCLUDE.rglob("*.cuh"))
BY_KIND = r"\bFI_CUDA\b|\b_?(?i:openmp|omp)\b"  # what compiler.KIND_FLAGS decide of a syntax check
STRICT = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


def name(path: Path) -> str:
    return path.relative_to(fi_kernels.ROOT).as_posix()


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the generated headers of all ops."""
    folder = tmp_path_factory.mktemp("generated")
    for op in OPS.values():
        sources.write_headers(sources.host_module(op, "cuda"), folder)
    return folder


def artifact(unit: Path) -> Artifact:
    return Artifact(unit.stem, "cuda", CPU, str(unit), headers=tuple(map(sources.generated_header, OPS.values())))


def closure(unit: Path) -> str:
    """sha256 over a unit and every header of the project that it reaches, generated ones too."""
    return sources.closure(artifact(unit))


def reached(unit: Path, generated: Path) -> str:
    """The text of every header of the project that a unit reaches."""
    paths = (folder / header for header in sources.headers(artifact(unit)) for folder in (INCLUDE, generated))
    return "\n".join(path.read_text() for path in paths if path.exists())


def check_alone(unit: Path, kind: str, generated: Path) -> None:
    """The unit compiles without a warning; the answer is kept by content."""
    places = [f"-I{INCLUDE}", f"-I{generated}", f"-isystem{toolchain.tvm_ffi_root() / 'include'}"]
    flags = ["-std=c++17", *compiler.KIND_FLAGS[kind], *STRICT, "-fsyntax-only"]
    versions = [toolchain.cxx_identity(), toolchain.tvm_ffi_version()]
    said = kept("header", closure(unit), *flags, *versions, ask=lambda: run(*env.cxx, *flags, *places, unit))
    assert said == ""


def unit_of(header: Path, folder: Path) -> Path:
    """A translation unit that includes one header, twice: a missing guard shows too."""
    unit = folder / "unit.cc"
    unit.write_text(f'#include "{header.relative_to(INCLUDE).as_posix()}"\n' * 2)
    return unit


@pytest.mark.parametrize("header", HOST, ids=name)
def test_host_header_compiles_alone(header: Path, tmp_path: Path, generated: Path) -> None:
    """For each kind of module; once if nothing that it reaches asks for the kind, as with two in three."""
    unit = unit_of(header, tmp_path)
    for kind in ("cpu", "cuda") if re.search(BY_KIND, reached(unit, generated)) else ("cpu",):
        check_alone(unit, kind, generated)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_generated_headers_compile_alone_and_together(kind: str, tmp_path: Path, generated: Path) -> None:
    every = tmp_path / "every.cc"
    every.write_text("".join(f'#include "{op.header}"\n' * 2 for op in OPS.values()))
    check_alone(every, kind, generated)
    largest = max(OPS.values(), key=lambda op: len(op.arguments))
    alone = tmp_path / f"{largest.name}.cc"
    alone.write_text(f'#include "{largest.header}"\n')
    check_alone(alone, kind, generated)


def targets_of(header: Path) -> list[str]:
    """The suffix rule: `_sm90` needs sm_90a, no suffix every target: the oldest and the tuned one."""
    suffix = re.search(r"_sm(\d+)$", header.stem)
    return [f"sm_{suffix[1]}a"] if suffix and int(suffix[1]) >= 90 else ["sm_80", "sm_90a"]


@pytest.mark.parametrize("header", DEVICE, ids=name)
def test_device_header_compiles_alone(header: Path, tmp_path: Path) -> None:
    unit, found = unit_of(header, tmp_path), toolchain.nvrtc()
    assert found, "NVRTC is missing: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"

    def compile_for(target: str) -> str:
        options = [f"-arch={target}", *compiler.DEVICE_FLAGS, f"-I{INCLUDE}"]
        image, said = nvrtc.compile_cubin(unit.read_text(), header.stem, options)
        assert image[:4] == b"\x7fELF"
        return said

    for target in targets_of(header):
        decided_by = (closure(unit), target, *compiler.DEVICE_FLAGS, found.identity)
        assert kept("header", *decided_by, ask=functools.partial(compile_for, target)) == ""


def test_there_are_headers_of_each_kind() -> None:
    assert HOST
    assert DEVICE
