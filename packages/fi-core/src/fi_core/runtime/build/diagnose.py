"""What a user sees of a failed compile: the first line that matters, a hint, and where the whole output is."""

from __future__ import annotations

import errno
import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from fi_core.runtime import files
from fi_core.runtime.env import env
from fi_core.runtime.errors import CompileError

LOG_FILE = "fi_jit.log"
USER_TEXT = "variant_decl"  # what compilers are told that the text of a user's attention variant is called
NO_HOST_COMPILER = "install a C++ compiler (g++), or the prebuilt modules: pip install fi-jit-cache"
NO_DEVICE_COMPILER = (
    "install NVRTC (pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, part of CUDA builds of torch), "
    "or the prebuilt binaries: pip install fi-cubin"
)
_HINTS = (
    (r"NVRTC was not found|libnvrtc", NO_DEVICE_COMPILER),
    (
        r"invalid value for --gpu-architecture|Unsupported gpu architecture",
        "this CUDA compiler is older than the GPU: upgrade it",
    ),
    (
        r"(cannot open source file|error:) \"?flashinfer/[\w/]+\.cuh|could not open source file \"flashinfer/",
        "headers are fi/...: docs/guides/custom-attention.md lists what has taken the place of FlashInfer's",
    ),
    (
        r"cannot open source file|No such file or directory",
        "a header is missing: reinstall fi-kernels and the CUDA headers",
    ),
    (
        r"unsupported GNU version",
        "nvcc refuses this host compiler: set CC to an older g++, or use FI_CUDA_COMPILER=nvrtc",
    ),
    (r"[Kk]illed|out of memory|cannot allocate", "the compiler ran out of memory: set MAX_JOBS=1"),
    (r"cannot find -ltvm_ffi", "apache-tvm-ffi is broken: pip install --force-reinstall 'apache-tvm-ffi>=0.1.9,<0.2'"),
)
_MORE = 5  # lines about the text of a user
_ERROR_LINE = re.compile(r"(fatal )?error\b|not found|No space|[Kk]illed", re.IGNORECASE)


@functools.cache
def logger() -> logging.Logger:
    """The build log: stderr from FI_LOGGING_LEVEL on, and all of it in fi_jit.log below FI_CACHE_DIR."""
    log = logging.getLogger("fi_core.jit")
    level = log.level or env.logging_level.upper()  # fi_core.utils.set_log_level may have come first
    log.setLevel(logging.DEBUG)
    log.propagate = False
    form = logging.Formatter("%(asctime)s - %(levelname)s - %(filename)s:%(lineno)d - %(name)s: %(message)s")
    stream = logging.StreamHandler()
    stream.setLevel(level)
    stream.setFormatter(form)
    log.addHandler(stream)
    return log


@functools.cache
def once(level: int, message: str) -> None:
    """Logs a message that this process has not logged yet."""
    logger().log(level, message)


def build_log() -> Path:
    """The log of builds, whether or not there is one."""
    return env.cache_dir / LOG_FILE


@functools.cache
def log_to_file() -> Path | None:
    """Opens the log file; called when something is about to be built, so that a process that only loads writes nothing.

    Returns its path, or None where none can be written.
    """
    path = build_log()
    try:
        files.make(path.parent)
        handler = files.log_handler(path)
    except OSError as error:
        once(logging.INFO if error.errno == errno.EPERM else logging.DEBUG, f"no build log: {error}")
        return None
    handler.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(name)s: %(message)s"))
    logger().addHandler(handler)
    return path


def failure(name: str, command: Sequence[str], output: str) -> CompileError | OSError:
    """The error for a failed compile; the command and all its output go to the log file.

    A full disk is an OSError: the store then tries its next root.
    """
    path = log_to_file()
    logger().debug("FAILED %s\n%s\n%s", name, " ".join(command), output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    full = next((line for line in lines if "No space left on device" in line), None)
    if full:
        return OSError(errno.ENOSPC, full)
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    of_user = [line for line in dict.fromkeys(errors) if line.startswith(USER_TEXT)]
    first = next(iter(of_user or errors or lines), "the compiler said nothing")
    hint = next((text for pattern, text in _HINTS if re.search(pattern, output)), None)
    return CompileError(f"building {name} failed: {first}", hint=hint, log_path=path, more=of_user[1:_MORE])
