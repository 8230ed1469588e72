"""NVRTC through ctypes: device code compiled in this process, no toolkit and no host compiler. Also `python -m`."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fi_core.runtime.build import toolchain


class NvrtcError(RuntimeError):
    """NVRTC is missing or rejected the unit; the message is its log."""


class Cubin(NamedTuple):
    """A device binary, and the log of the compiler (usually empty)."""

    image: bytes
    log: str


@functools.cache
def _library() -> ctypes.CDLL:
    found = toolchain.nvrtc()
    if found is None:
        raise NvrtcError(
            "NVRTC was not found: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, or a CUDA build of torch"
        )
    if found.builtins:  # libnvrtc has no RUNPATH: its builtins must be in the process before it asks for them
        ctypes.CDLL(str(found.builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(found.library))


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def compile_cubin(source: str, name: str, options: Sequence[str]) -> Cubin:
    """Compiles one unit. `options` are nvcc-style; the CUDA headers' directory is added."""
    library, program = _library(), ctypes.c_void_p()
    found = toolchain.nvrtc()
    assert found is not None
    if found.library.name.endswith(".12"):  # which may not know how to use several threads
        options = [o for o in options if not o.startswith("--split-compile")]
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    words = [o.encode() for o in (*options, f"-I{found.include}")]
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    if status:
        raise NvrtcError(f"nvrtcCreateProgram: {library.nvrtcGetErrorString(status).decode()}")
    try:
        status = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        log = _text(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if status:
            raise NvrtcError(log or library.nvrtcGetErrorString(status).decode())
        return Cubin(_text(library, "CUBIN", program), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


if __name__ == "__main__":  # as build.ninja and compile_commands.json run it: UNIT OUT OPTIONS...
    unit, out = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        out.write_bytes(compile_cubin(unit.read_text(), unit.stem, sys.argv[3:]).image)
    except NvrtcError as error:
        sys.exit(str(error))
