"""The record of a build in the index of a package: the compiler, its files' digests, and the note in a binary."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from fi_core.runtime.build import compiler, sources, toolchain
from fi_core.runtime.spec.artifact import Artifact

# ptxas writes its version and the architecture into .note.nv.tkinfo, GCC and clang their version into .comment.
_DEVICE = re.compile(rb"\0ptxas\0Cuda compilation tools, release [\d.]+, V([\d.]+)\0.*?-arch (\w+) ", re.DOTALL)
_HOST = re.compile(rb"(GCC: \([^)\0]*\) [^\0]+|[^\0]*clang version [^\0]+)\0")
_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file; 190 is CUDA
_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")  # the CUDA headers that device code includes


class Note(NamedTuple):
    """The compiler version and the target that a binary names; "" where it names none."""

    version: str
    target: str


def note(content: bytes) -> Note:
    """The note of an unpacked device binary or host module."""
    machine = int.from_bytes(content[18:20], "little") if content.startswith(b"\x7fELF") else 0
    found = (_DEVICE if machine == 190 else _HOST).search(content) if machine else None
    version = found[1].decode(errors="replace") if found else ""
    if machine == 190:
        return Note(version, found[2].decode(errors="replace") if found else "")
    return Note(version, _MACHINES.get(machine, ""))


@functools.cache
def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _folder(path: Path) -> str:
    """sha256 over the names and contents of the headers below a folder."""
    digest = hashlib.sha256()
    for header in sorted(path.rglob("*.h")):
        digest.update(f"{header.relative_to(path).as_posix()}\0{_sha256(header)}\0".encode())
    return digest.hexdigest()


def _cuda_headers(include: Path) -> dict[str, str]:
    """sha256 of each CUDA header that device code reaches."""
    return {name: _sha256(include / name) for name in sources.reached(_HEADERS, include)}


def of_compiler(artifact: Artifact) -> dict[str, Any]:
    """The compiler of an artifact on this machine: `name`, `identity` as in keys of the store, and the sha256 of each
    file that decides its output. Paths are left out.
    """
    return _of_compiler(artifact.kind == "cubin", artifact.target.arch, compiler.identity(artifact))


@functools.cache
def _of_compiler(is_device: bool, arch: str, identity: str) -> dict[str, Any]:
    if not is_device:
        program = toolchain.cxx(arch)
        used = [Path(program)] if program else []
        used += [path] if (path := toolchain.cxx_program("cc1plus", arch)) else []
        digests = {path.name: _sha256(path) for path in used}
        headers = {"tvm-ffi include": _folder(toolchain.tvm_ffi_root() / "include")}
        return {"name": "c++", "identity": identity, "files": digests | headers}
    found = toolchain.nvrtc()
    if compiler.device_compiler() == "nvrtc" and found:
        used = [found.library, *([found.builtins] if found.builtins else [])]
        headers = _cuda_headers(found.include)
        return {"name": "nvrtc", "identity": identity, "files": {p.name: _sha256(p) for p in used} | headers}
    nvcc, home = toolchain.nvcc(), toolchain.cuda_home()
    digests = {Path(nvcc).name: _sha256(Path(nvcc))} if nvcc else {}
    programs = [home / "bin/ptxas", home / "nvvm/bin/cicc"] if home else []
    digests |= {path.name: _sha256(path) for path in programs if path.is_file()}
    headers = _cuda_headers(home / "include") if home else {}
    return {"name": "nvcc", "identity": identity, "files": digests | headers}
