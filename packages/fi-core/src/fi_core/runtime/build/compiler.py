"""The compile command of an artifact, the identity of its inputs, and running it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from fi_core.runtime import files
from fi_core.runtime.build import diagnose, nvrtc, sources, toolchain
from fi_core.runtime.env import env, for_child
from fi_core.runtime.errors import CompileError
from fi_core.runtime.spec.artifact import Artifact, Text

SCHEMA = 1  # of store entries
FFI_ABI = "tvm-ffi-0.1"

HOST_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wl,--build-id=none")
# -fno-trapping-math and -fno-math-errno let loops with selects and sqrt vectorise; no flag here changes results.
KIND_FLAGS = {
    "cpu": ("-DFI_CUDA=0", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    "cuda": ("-DFI_CUDA=1", "-O1"),  # a launcher is checks and one driver call: -O2 compiles 0.3 s longer for nothing
}
DEVICE_FLAGS = ("-std=c++17",)
# The groups of FI_DELAYS, as fi/cuda/ptx/delay.cuh has them.
DELAYS = {"arrivals": 1, "waits": 2, "waited": 4, "copies": 8, "barriers": 16, "counters": 32, "patience": 64}
# What ptxas says when it makes the products of a warpgroup wait for each other. Such a kernel has other races than the
# one that ships; that a wait ends is the same in both.
SERIALISED = re.compile("C75(?:08|12)[^\n]*")


def _debug() -> bool:
    return env.jit_verbose if env.jit_debug is None else env.jit_debug


def sanitizer_flags() -> tuple[str, ...]:
    """The flags of FI_SANITIZE. A report names the line. -O0 compiles in two thirds of the time of -Og; the clones of a
    function for x86-64 levels are one source, and are compiled once.
    """
    chosen = env.sanitize
    extra = ("-O0", "-DFI_NO_CLONES", "-g1", "-fno-omit-frame-pointer")
    return (f"-fsanitize={','.join(chosen)}", *extra) if chosen else ()


def flags(artifact: Artifact, *, shipped: bool = False) -> tuple[str, ...]:
    """The flags that shape the output (search paths are not among them). shipped: without those of the environment, as
    packages are built.
    """
    if artifact.kind == "cubin":
        extra = () if shipped else (*_device_extra(), *env.extra_cudaflags)
        return (f"-arch={artifact.target}", *DEVICE_FLAGS, *extra, *artifact.flags)
    debug = ("-O0", "-g") if _debug() else ()
    ours = isinstance(artifact.source, str) and not Path(artifact.source).is_absolute()
    return (
        *HOST_FLAGS,
        *(("-Wextra",) if ours else ()),  # what it finds in a user's module is the user's choice
        *KIND_FLAGS[artifact.kind],
        *(() if shipped else (*debug, *sanitizer_flags(), *env.extra_cflags, *env.extra_ldflags)),
        *artifact.flags,
    )


def _device_extra() -> tuple[str, ...]:
    delays = (f"-DFI_DELAYS={DELAYS[env.delays]}",) if env.delays else ()
    return (*delays, *(("-G",) if _debug() else ("-lineinfo",) if env.jit_lineinfo else ()))


def _search(artifact: Artifact, directory: Path) -> list[str]:
    """The include paths; generated headers are in the directory of the unit."""
    generated = (directory,) if artifact.headers else ()
    return [f"-I{place}" for place in (*sources.include_dirs(artifact), *generated)]


def identity(artifact: Artifact) -> str:
    """The compiler and its headers: NVRTC and nvcc generate different machine code from one source."""
    if artifact.kind != "cubin":
        return f"{toolchain.cxx_identity(artifact.target.arch)} tvm-ffi {toolchain.tvm_ffi_version()}"
    if device_compiler() == "nvcc":
        return f"nvcc {toolchain.nvcc_identity()}"
    found = toolchain.nvrtc()
    return found.identity if found else "none"


def device_compiler() -> str:
    """ "nvrtc" or "nvcc": as FI_CUDA_COMPILER says, else NVRTC where it is installed."""
    if env.cuda_compiler == "nvcc" or (toolchain.nvrtc() is None and toolchain.nvcc()):
        return "nvcc"
    return "nvrtc"


def program(artifact: Artifact) -> str | None:
    """The compiler that would build the artifact, or None."""
    if artifact.kind != "cubin":
        return toolchain.cxx(artifact.target.arch)
    if device_compiler() == "nvcc":
        return toolchain.nvcc()
    found = toolchain.nvrtc()
    return str(found.library) if found else None


def _hash(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _inputs(artifact: Artifact) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "artifact": artifact.id,
        "closure": sources.closure(artifact),
        "flags": flags(artifact),
        "abi": FFI_ABI,
    }


def inputs(artifact: Artifact) -> str:
    """The identity of everything that decides the artifact but its compiler."""
    return _hash(_inputs(artifact))


def key(artifact: Artifact) -> str:
    """The content-addressed name: everything that decides the bytes, nothing else."""
    return f"{artifact.name}-{_hash(_inputs(artifact) | {'compiler': identity(artifact)})[:24]}"


def unit_path(artifact: Artifact, directory: Path) -> Path:
    """Where the translation unit is read from: `directory` for rendered units, its own place for others."""
    if isinstance(artifact.source, Text):
        return directory / f"{artifact.name}.{'cu' if artifact.kind == 'cubin' else 'cc'}"
    return sources.root() / artifact.source


def command(artifact: Artifact, directory: Path) -> list[str]:
    """The compiler's command line; run in any directory, it writes `directory / artifact.file`."""
    unit, out, search = unit_path(artifact, directory), directory / artifact.file, _search(artifact, directory)
    if artifact.kind == "cubin":
        if device_compiler() == "nvrtc":
            return [sys.executable, "-m", "fi_core.runtime.build.nvrtc", str(unit), str(out), *search, *flags(artifact)]
        compiler = toolchain.nvcc()
        if compiler is None:
            raise CompileError("no CUDA compiler found", hint=diagnose.NO_DEVICE_COMPILER)
        ccbin = [f"-ccbin={env.cc}"] if env.cc else []
        threads = [f"--threads={env.nvcc_threads}"] if env.nvcc_threads > 1 else []
        return [
            *env.nvcc_launcher,
            compiler,
            "-cubin",
            "-O3",
            *ccbin,
            *threads,
            *flags(artifact),
            *search,
            "-o",
            str(out),
            str(unit),
        ]
    machine = artifact.target.arch
    try:
        compilers = toolchain.cxx_words(machine)
    except FileNotFoundError as error:
        raise CompileError(
            f"no C++ compiler found (looked for {str(error)!r})", hint=diagnose.NO_HOST_COMPILER
        ) from None
    ffi = toolchain.tvm_ffi_root()
    prefix_maps = (f"-ffile-prefix-map={sources.root()}=fi_kernels", f"-ffile-prefix-map={ffi}=tvm_ffi")
    return [
        *env.cxx_launcher,
        *compilers,
        *prefix_maps,
        f"-ffile-prefix-map={directory}=generated",
        *search,
        f"-isystem{ffi / 'include'}",
        "-o",
        str(out),
        str(unit),
        *flags(artifact),
        # Libraries among the flags come last. A module names the library, also where it is linked with an empty one.
        f"-L{toolchain.tvm_ffi_libraries(machine)}",
        "-Wl,--no-as-needed",
        "-ltvm_ffi",
    ]


def write_unit(artifact: Artifact, directory: Path) -> None:
    """Writes a rendered unit and generated headers, only what differs (ninja looks at modification times)."""
    sources.write_headers(artifact, directory)
    if isinstance(artifact.source, Text):
        files.write_if_new(unit_path(artifact, directory), sources.text(artifact))


def compile_artifact(artifact: Artifact, directory: Path) -> None:
    """Makes `directory / artifact.file`. NVRTC runs in this process, the others as one subprocess.

    What the compiler had to say, if anything, is kept beside it in `<name>.log`. Raises CompileError with the first
    line that matters, a hint, and the path of the build log; OSError where the directory cannot be written.
    """
    start = time.perf_counter()
    write_unit(artifact, directory)
    if artifact.kind == "cubin" and device_compiler() == "nvrtc":
        try:
            image, said = nvrtc.compile_cubin(
                unit_path(artifact, directory).read_text(),
                artifact.name,
                [*_search(artifact, directory), *flags(artifact)],
            )
        except nvrtc.NvrtcError as error:
            raise diagnose.failure(artifact.name, ["nvrtc", *flags(artifact)], str(error)) from None
        (directory / artifact.file).write_bytes(image)
    else:
        line = command(artifact, directory)
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, cwd=directory, check=False, env=for_child(TMPDIR=str(directory))
            )  # the compiler's own files end with the directory, and need no room elsewhere
        except OSError as error:
            if error.filename != line[0]:
                raise
            raise CompileError(
                f"building {artifact.name} failed: {error}", hint=f"install {line[0]}, or unset what names it"
            ) from None
        said = done.stdout + done.stderr
        if done.returncode:
            raise diagnose.failure(artifact.name, line, said)
        if env.jit_verbose:
            diagnose.logger().info("%s\n%s", " ".join(line), said)
    if env.delays not in ("", "patience") and (serialised := SERIALISED.search(said)):
        raise CompileError(
            f"building {artifact.name} with FI_DELAYS={env.delays} makes ptxas serialise its products, which hides "
            f"races: {serialised[0]}",
            hint="take registers from the delay, or sites from its group",
        )
    if said.strip():
        (directory / f"{artifact.name}.log").write_text(said)
    diagnose.logger().debug("built %s for %s in %.2f s", artifact.name, artifact.target, time.perf_counter() - start)
