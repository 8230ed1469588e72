"""Compilers of user modules under FlashInfer's names: the CUDA toolkit, and a run of ninja on a written build file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from fi_core.runtime.build import toolchain

__all__ = ["get_cuda_path", "get_cuda_version", "is_cuda_version_at_least", "run_ninja"]
_NO_TOOLKIT = "no CUDA compiler found: install a CUDA toolkit and set CUDA_HOME, or pip install nvidia-cuda-nvrtc"


def get_cuda_path() -> str:
    """The root of the CUDA toolkit, as CUDA_HOME, nvcc on PATH or /usr/local/cuda name it.

    Raises:
        RuntimeError: there is none; NVRTC, which needs no toolkit, may still compile.
    """
    home = toolchain.cuda_home()
    if home is None:
        raise RuntimeError(_NO_TOOLKIT)
    return str(home)


def get_cuda_version() -> tuple[int, int]:
    """The version of the CUDA compiler, (13, 0): of NVRTC where it is installed, else of nvcc.

    Raises:
        RuntimeError: there is neither.
    """
    found = toolchain.nvrtc()
    text = found.identity if found else toolchain.nvcc_identity()
    match = re.search(r"\.so\.(\d+)\.(\d+)", text) or re.search(r"cuda_(\d+)\.(\d+)", text)
    if match is None:
        raise RuntimeError(_NO_TOOLKIT)
    return int(match[1]), int(match[2])


def is_cuda_version_at_least(version_str: str) -> bool:
    """Whether the CUDA compiler has a version, such as "12.8", or a later one.

    Raises:
        RuntimeError: there is no CUDA compiler.
    """
    return get_cuda_version() >= tuple(int(part) for part in version_str.split(".")[:2])


def run_ninja(workdir: Path, ninja_file: Path, verbose: bool = False) -> None:
    """Runs ninja on a file that `JitSpec.write_ninja` wrote; what it makes lies beside that file, not in the store.

    Args:
        workdir: the folder to run in.
        ninja_file: the file.
        verbose: whether to print the command lines and what compilers say.

    Raises:
        RuntimeError: a command fails, or ninja is not installed.
    """
    line = ["ninja", *(["-v"] if verbose else []), "-C", str(Path(workdir).resolve()), "-f", str(ninja_file)]
    try:
        done = subprocess.run(line, text=True, check=False, capture_output=not verbose)
    except FileNotFoundError:
        raise RuntimeError("ninja is not installed: pip install ninja, or call JitSpec.build()") from None
    if done.returncode:
        raise RuntimeError(f"ninja failed on {ninja_file}:\n{done.stdout or ''}{done.stderr or ''}")
