"""`fi-core show-config`, `fi-core collect-env`, and the facts of this machine that doctor shares; imports no torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import fi_core
from fi_core.cli import modules
from fi_core.cli.report import Report, section, size
from fi_core.compat.compilation_context import CompilationContext
from fi_core.jit.base import default_targets
from fi_core.runtime.build import compiler, toolchain
from fi_core.runtime.build.driver import driver
from fi_core.runtime.env import env
from fi_core.runtime.resolve import store
from fi_core.runtime.resolve.provider import Provider, providers

SIBLINGS = ("fi-kernels", "fi-jit-cache", "fi-cubin", "fi-bench")
OTHERS = (
    "apache-tvm-ffi",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "triton",
    "numpy",
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
NONE = "Not installed"


class Torch(NamedTuple):
    version: str
    cuda: str | None  # the CUDA it was built for


def torch_build() -> Torch | None:
    """The installed torch, read from its files without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        text = ""
    values = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE))
    return Torch(values.get("__version__") or version("torch") or "unknown", values.get("cuda"))


def version(name: str) -> str | None:
    """The version of an installed distribution, or of a sibling on sys.path."""
    if name in SIBLINGS:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        if spec and spec.origin and (file := Path(spec.origin).with_name("VERSION")).exists():
            return file.read_text().strip()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compilers() -> dict[str, str | None]:
    """Path and version of each compiler."""
    nvrtc, nvcc, cxx = toolchain.nvrtc(), toolchain.nvcc(), toolchain.cxx()
    return {
        "C++": f"{cxx} ({toolchain.cxx_identity().split(' Copyright')[0]})" if cxx else None,
        "NVRTC": f"{nvrtc.library} ({nvrtc.identity.split(':')[0]})" if nvrtc else None,
        "nvcc": f"{nvcc} ({toolchain.nvcc_identity()})" if nvcc else None,
    }


def describe(provider: Provider) -> str:
    return provider.refusal or f"{len(provider.artifacts)} files in {provider.directory}"


def _gpus() -> list[tuple[str, str]]:
    found = driver()
    if found is None:
        return [("NVIDIA driver", "none")]
    rows = [
        ("NVIDIA driver", f"for CUDA {found.version[0]}.{found.version[1]}"),
        ("GPUs", found.problem or str(len(found.gpus))),
    ]
    return rows + [
        (f"GPU {g.number}", f"{g.name} (compute capability {g.capability[0]}.{g.capability[1]})") for g in found.gpus
    ]


def _store() -> list[tuple[str, str]]:
    entries = store.entries()
    target = store.destination()
    return [
        ("Cache directory", str(env.cache_dir)),
        ("Compiled kernels go to", str(target) if target else "nowhere: no directory can be written"),
        ("Compiled here", f"{len(entries)} entries, {size(sum(entry.bytes for entry in entries))}"),
    ]


def _yes(value: object) -> str:
    return "Yes" if value else "No"


def _torch() -> list[tuple[str, str]]:
    torch = torch_build()
    found = driver()
    usable = bool(torch and torch.cuda and found and found.gpus)
    return [
        ("Torch version", torch.version if torch else NONE),
        ("CUDA of torch", (torch.cuda if torch else None) or "none"),
        ("CUDA runtime available", _yes(usable)),
    ]


def show_config(args: argparse.Namespace) -> Report:
    made_by = compilers()
    total = modules.counts(modules.states(default_targets()))
    sections: dict[str, list[tuple[str, Any]]] = {
        "Version Info": [
            ("fi-core version", fi_core.__version__),
            ("Commit", fi_core.__git_commit__),
            *((f"{n} version", version(n) or NONE) for n in SIBLINGS),
        ],
        "Torch Version Info": _torch(),
        "GPUs": _gpus(),
        "Environment Variables": [
            ("CUDA targets", ", ".join(map(str, CompilationContext().targets())) or "none"),
            ("CUDA_HOME", toolchain.cuda_home() or "not found"),
            *_environment().items(),
        ],
        "Compilers": [
            *((name, text or "not found") for name, text in made_by.items()),
            ("NVCC found", _yes(made_by["nvcc"])),
            ("Device code is compiled by", compiler.device_compiler()),
            ("FI_JIT", env.jit),
        ],
        "Prebuilt": [(provider.name, describe(provider)) for provider in providers()] or [("packages", "none")],
        "Cache": _store(),
        "Module Status": [
            ("Targets", ", ".join(map(str, default_targets()))),
            ("Total modules", total["total"]),
            ("compiled", total["compiled"]),
            ("Not compiled", total["not_compiled"]),
        ],
    }
    data = {title: dict(rows) for title, rows in sections.items()}
    return Report(data, [line for title, rows in sections.items() for line in section(title, rows)])


Sections = Mapping[str, Mapping[str, Any]]


def facts() -> dict[str, dict[str, Any]]:
    """What a bug report needs to know of this machine, by section and name; secrets are hidden."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "System": {
            "Platform": platform.platform(),
            "CPU": _cpu(),
            "Cores usable": len(os.sched_getaffinity(0)),
            "Memory": size(memory),
            "Python": f"{platform.python_version()} ({sys.executable})",
        },
        "Packages": {
            "fi-core": f"{fi_core.__version__} ({Path(fi_core.__file__).parent})",
            "commit": fi_core.__git_commit__,
            **{name: version(name) or NONE for name in (*SIBLINGS, *OTHERS)},
        },
        "Torch": dict(_torch()),
        "GPUs": dict(_gpus()),
        "Compilers": {name: text or "not found" for name, text in compilers().items()},
        "Prebuilt": {provider.name: describe(provider) for provider in providers()},
        "Cache": dict(_store()),
        "Environment": _environment(),
    }


def fact_lines(sections: Sections) -> list[str]:
    """A heading for each section, and a line for each fact."""
    lines = ["### fi environment report"]
    for title, rows in sections.items():
        width = max((len(name) for name in rows), default=0)
        lines += ["", f"==== {title} ====", *(f"{name.ljust(width)} : {value}" for name, value in rows.items())]
    return lines


def collect_env(args: argparse.Namespace) -> Report:
    found = facts()
    return Report(found, fact_lines(found))


def _environment() -> dict[str, str]:
    """The variables of fi that are set."""
    return {name: "(hidden)" if SECRET.search(name) else value for name, value in env.present().items()}


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()
