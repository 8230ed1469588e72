"""Finds compilers and headers without running or importing them; a missing one is None, not an exception."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from fi_core.runtime.env import env

# Where pip wheels put CUDA: cu13 wheels share one root; cu12 wheels have one per component.
_WHEEL_LAYOUTS = (("nvidia/cu13/lib", "nvidia/cu13/include"), ("nvidia/cuda_nvrtc/lib", "nvidia/cuda_runtime/include"))


class Nvrtc(NamedTuple):
    library: Path
    builtins: Path | None
    include: Path

    @property
    def identity(self) -> str:
        """Identifies the compiler without loading it: builtins have the full version in their file name."""
        named = self.builtins or self.library
        return f"{named.name}:{named.stat().st_size}:{self.library.stat().st_size}"


@functools.cache
def nvrtc() -> Nvrtc | None:
    """NVRTC and the CUDA headers: from the pip wheels that torch brings, else from a CUDA toolkit."""
    places = [(Path(p) / lib, Path(p) / inc) for p in sys.path for lib, inc in _WHEEL_LAYOUTS]
    home = cuda_home()
    if home:
        places += [
            (home / lib, home / "include") for lib in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
        ]
    for lib, include in places:
        libraries = sorted(lib.glob("libnvrtc.so.1[2-9]"))
        if libraries and (include / "cuda_bf16.h").exists():
            major = libraries[-1].name.rsplit(".", 1)[-1]
            builtins = [p for p in sorted(lib.glob(f"libnvrtc-builtins.so.{major}.*")) if p.name.count(".") == 3]
            return Nvrtc(libraries[-1], builtins[0] if builtins else None, include)
    return None


@functools.cache
def cuda_home() -> Path | None:
    """The root of a CUDA toolkit that has nvcc: CUDA_HOME, the pip toolchain, nvcc on PATH, /usr/local/cuda."""
    candidates = [env.cuda_home, *(Path(p) / "nvidia/cu13" for p in sys.path)]
    found = shutil.which("nvcc")
    if found:
        candidates.append(Path(found).resolve().parent.parent)
    candidates += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-1[2-9]*"), reverse=True)]
    for path in candidates:
        # A wrapper script named nvcc has no toolkit around it.
        if path and (path / "bin/nvcc").exists() and (path / "include/cuda.h").exists():
            return path
    return None


@functools.cache
def nvcc() -> str | None:
    home = cuda_home()
    return env.nvcc or (str(home / "bin/nvcc") if home else None)


MACHINE = platform.machine()


@functools.cache
def cxx(machine: str = MACHINE) -> str | None:
    """The path of the C++ compiler for a machine, or None: CXX, or a cross compiler by Debian's name."""
    return shutil.which(env.cxx[0] if machine == MACHINE else f"{machine}-linux-gnu-g++")


def cxx_words(machine: str = MACHINE) -> list[str]:
    """The first words of a C++ compile. Raises FileNotFoundError where there is no compiler."""
    path = cxx(machine)
    if path is None:
        raise FileNotFoundError(env.cxx[0] if machine == MACHINE else f"{machine}-linux-gnu-g++")
    return [path, *(env.cxx[1:] if machine == MACHINE else ())]


@functools.cache
def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join(done.stdout.split())


def cxx_identity(machine: str = MACHINE) -> str:
    """The version of the whole CXX: in "ccache g++" the program is only the launcher of the compiler."""
    path = cxx(machine)
    return f"{Path(path).name} {_output(*cxx_words(machine), '--version')}" if path else "none"


def cxx_program(name: str, machine: str = MACHINE) -> Path | None:
    """A program that the C++ compiler runs, such as cc1plus; None where it has none of that name."""
    found = Path(_output(*cxx_words(machine), f"-print-prog-name={name}")) if cxx(machine) else None
    return found if found and found.is_file() else None


def cxx_problem() -> str | None:
    """The reason why CXX does not compile a small C++17 unit, or None. It writes no file."""
    unit = "#include <cstdint>\n#if __cplusplus >= 201703L\nint fi_probe(std::int64_t x) { return x != 0; }\n#endif\n"
    line = [str(cxx()), *env.cxx[1:], "-std=c++17", "-x", "c++", "-S", "-o", "-", "-"]
    try:
        done = subprocess.run(line, input=unit, capture_output=True, text=True, check=False)
    except OSError as error:
        return error.strerror
    if done.returncode == 0 and "fi_probe" in done.stdout:
        return None
    said = [text.strip() for text in done.stderr.splitlines() if text.strip()]
    return said[0] if said else f"it exits with {done.returncode} and gives no code"


def nvcc_identity() -> str:
    path = nvcc()
    return _output(path, "--version").rsplit(" ", 1)[-1] if path else "none"


@functools.cache
def tvm_ffi_root() -> Path:
    """The tvm-ffi package, found without importing it (that would import torch)."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package apache-tvm-ffi is missing: pip install 'apache-tvm-ffi>=0.1.9,<0.2'")
    return Path(spec.origin).parent


@functools.cache
def tvm_ffi_libraries(machine: str = MACHINE) -> Path:
    """The folder of libtvm_ffi.so to link with. For another machine than this one the library is empty: a module needs
    its name, and finds the symbols when it is loaded.
    """
    if machine == MACHINE:
        return tvm_ffi_root() / "lib"
    folder = Path(tempfile.mkdtemp(prefix="fi-link-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libtvm_ffi.so"
    line = [*cxx_words(machine), "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-x", "c++", "-", "-o"]
    subprocess.run([*line, str(library)], input="", text=True, check=True)
    return folder


@functools.cache
def tvm_ffi_version() -> str:
    """The version of the headers that host modules include: "0.1.9"."""
    header = (tvm_ffi_root() / "include/tvm/ffi/c_api.h").read_text()
    return ".".join(re.findall(r"^#define TVM_FFI_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.MULTILINE))
