"""Everything about this machine that a result depends on; each probe may fail without harm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from fi_bench import __version__

_PACKAGES = (
    "fi-core",
    "fi-kernels",
    "fi-jit-cache",
    "fi-cubin",
    "torch",
    "triton",
    "apache-tvm-ffi",
    "cupti-python",
    "nvidia-ml-py",
    "flashinfer-python",
    "flash-attn-3",
    "numpy",
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def fi_core_version() -> str:
    """From the source tree or the installed package, without importing it."""
    from importlib.util import find_spec

    spec = find_spec("fi_core")
    if spec is None or not spec.submodule_search_locations:
        return "not installed"
    file = Path(next(iter(spec.submodule_search_locations))) / "VERSION"
    return file.read_text(encoding="utf-8").strip() if file.exists() else _version("fi-core") or "unknown"


def _commit() -> str | None:
    """The commit of fi-core, with a + if it is of a checkout that has changes."""
    import fi_core

    here, commit = Path(fi_core.__file__).parent, fi_core.__git_commit__
    if commit == "unknown":
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:  # an installed package may lie in a repository of something else
        has_changes = git("rev-parse", "HEAD") == commit and git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        has_changes = False
    return commit[:12] + ("+" if has_changes else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    device = torch.device("cuda", torch.cuda.current_device())
    p = torch.cuda.get_device_properties(device)
    found = {
        "gpu": p.name,
        "gpu_uuid": str(p.uuid),
        "compute_capability": f"{p.major}.{p.minor}",
        "sm_count": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "gpu_memory_bytes": p.total_memory,
        "driver": _driver(),
    }
    return found


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is missing or refuses
        return None


def collect() -> dict[str, Any]:
    """One flat mapping; imports torch."""
    import torch

    found: dict[str, Any] = {
        "fi_bench": __version__,
        "fi_core": fi_core_version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "os": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    return found | _gpu()


def gpu_name() -> str | None:
    """The name of the GPU without spaces, as FlashInfer's benchmark prints it."""
    name = _gpu().get("gpu")
    return str(name).replace(" ", "_") if name else None
