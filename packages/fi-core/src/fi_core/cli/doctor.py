"""`fi-core doctor`: finds missing or broken software on this machine, with the command that repairs it."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import fi_core
from fi_core.cli import machine
from fi_core.cli.origin import origin
from fi_core.cli.report import Report, paint, size
from fi_core.jit.base import default_targets
from fi_core.jit.ops import specs_of
from fi_core.registry import ops
from fi_core.runtime.build import compiler, diagnose, sources, toolchain
from fi_core.runtime.build.driver import driver
from fi_core.runtime.env import env
from fi_core.runtime.resolve import store
from fi_core.runtime.resolve.provider import EMPTY, providers
from fi_core.runtime.spec.artifact import Artifact
from fi_core.utils import version_at_least

TORCH = ("2.10", None)
TVM_FFI = ("0.1.9", "0.2")  # at least, below
DRIVER = (12, 0)
LOW_DISK = 1 << 30
COLOURS = {"ok": "green", "note": "dim", "warn": "yellow", "FAIL": "red"}


class Finding(NamedTuple):
    """`level`: ok, note (nothing to do), warn (works, but), FAIL (something cannot run). `fix` is a command or two."""

    level: str
    what: str
    text: str
    fix: str = ""


def run(args: argparse.Namespace) -> Report:
    findings: list[Finding] = []
    for check, blockers in CHECKS.items():
        if not any(f.level == "FAIL" and f.what in blockers for f in findings):
            findings += check()
    failed, warned = (sum(f.level == level for f in findings) for level in ("FAIL", "warn"))
    lines = []
    for f in findings:
        lines.append(f"{paint(f.level.ljust(4), COLOURS[f.level])}  {f.what}: {f.text}")
        if f.fix:
            lines.append(f"      fix: {f.fix}")
    end = "All is well." if not failed + warned else f"{failed} to fix, {warned} to look at."
    data = {"ok": not failed, "findings": [f._asdict() for f in findings]}
    return Report(data, [*lines, "", end], ok=not failed)


def _settings() -> Iterator[Finding]:
    """Environment variables with invalid values, and misspelled ones (other software also has names with FI_)."""
    known = {name for row in env.table() for name in (row.name, *row.aliases)}
    for attribute in vars(type(env)):
        try:
            getattr(env, attribute)
        except ValueError as error:
            yield Finding("FAIL", "setting", str(error), f"unset {str(error).split(':')[0]}")
    for name in env.present().keys() - known:
        close = difflib.get_close_matches(name, known, 1, 0.8)
        if close:
            yield Finding("warn", "setting", f"{name} is not read; is {close[0]} meant?", f"unset {name}")


def _packages() -> Iterator[Finding]:
    yield Finding("ok", "fi-core", f"{fi_core.__version__}, Python {platform.python_version()} ({sys.executable})")
    if importlib.util.find_spec("fi_kernels") is None:
        yield Finding(
            "FAIL", "fi-kernels", "the kernel sources are missing", f"pip install fi-kernels=={fi_core.__version__}"
        )
    elif machine.version("fi-kernels") not in (fi_core.__version__, None):
        text = f"{machine.version('fi-kernels')} is not the version of fi-core, {fi_core.__version__}"
        yield Finding("FAIL", "fi-kernels", text, f"pip install fi-kernels=={fi_core.__version__}")
    torch = machine.torch_build()
    yield _version("torch", torch.version if torch else None, *TORCH)
    yield _version("apache-tvm-ffi", machine.version("apache-tvm-ffi"), *TVM_FFI)
    if importlib.util.find_spec("jinja2") is None:
        yield Finding("FAIL", "jinja2", "missing; units are rendered with it before they compile", "pip install jinja2")


def _version(name: str, found: str | None, least: str, below: str | None) -> Finding:
    wanted = f">={least}{f',<{below}' if below else ''}"
    if found is None:
        return Finding("FAIL", name, f"missing; {name}{wanted} is needed", f"pip install '{name}{wanted}'")
    if not version_at_least(found, least) or (below and version_at_least(found, below)):
        return Finding("FAIL", name, f"{found} does not fit; {name}{wanted} is needed", f"pip install '{name}{wanted}'")
    return Finding("ok", name, found)


def _gpus() -> Iterator[Finding]:
    found, torch = driver(), machine.torch_build()
    if found is None:
        yield Finding("note", "GPU", "there is no NVIDIA driver; ops run on the CPU")
        return
    text = f"for CUDA {found.version[0]}.{found.version[1]}"
    if found.problem:
        yield Finding(
            "FAIL", "NVIDIA driver", f"{text}; {found.problem}", "check that nvidia-smi works; reinstall the driver"
        )
        return
    if found.version < DRIVER:
        yield Finding("FAIL", "NVIDIA driver", f"{text}; 12.0 or later is needed", "upgrade the NVIDIA driver")
    if not found.gpus:
        yield Finding("note", "GPU", "the driver shows none (CUDA_VISIBLE_DEVICES?); ops run on the CPU")
        return
    for gpu in found.gpus:
        major, minor = gpu.capability
        text = f"{gpu.name}, compute capability {major}.{minor}"
        if major < 8:
            yield Finding("warn", f"GPU {gpu.number}", f"{text}: kernels need 8.0 or later")
        else:
            yield Finding("ok", f"GPU {gpu.number}", text)
    if torch and torch.cuda is None:
        yield Finding(
            "FAIL", "torch", f"{torch.version} is built without CUDA", "install a CUDA build of torch, as its site says"
        )


def _store() -> Iterator[Finding]:
    first, target = store.roots()[0], store.destination()
    why = store.refusal(first)
    if target is None:
        level = "FAIL" if env.jit != "off" else "note"
        yield Finding(
            level,
            "cache",
            f"no directory for compiled kernels can be written, {first} neither{f' ({why})' if why else ''}",
            "export FI_CACHE_DIR=DIRECTORY",
        )
        return
    if target != first:
        text = f"{first} is not used ({why})" if why else f"{first} cannot be written"
        yield Finding("warn", "cache", f"{text}; kernels go to {target}", "export FI_CACHE_DIR=DIRECTORY")
    place = next(path for path in (target, *target.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < LOW_DISK:
        yield Finding("warn", "cache", f"{size(free)} are left in {target}", "fi-core cache prune --max-bytes 100M")
    else:
        yield Finding("ok", "cache", f"{target}, {size(free)} free")
    damaged = [entry for entry in store.entries() if store.problem(entry.path)]
    if damaged:
        yield Finding("warn", "cache", f"{len(damaged)} damaged entries, which are not used", "fi-core clear-cache")


def _providers() -> Iterator[Finding]:
    for provider in providers():
        if provider.refusal == EMPTY:
            yield Finding("note", provider.name, EMPTY)
        elif provider.refusal:
            fix = f"pip install {provider.name}=={fi_core.__version__}" if provider.name.startswith("fi-") else ""
            yield Finding("FAIL", provider.name, f"not used: {provider.refusal}", fix)
        else:
            yield Finding("ok", provider.name, machine.describe(provider))


def _kernels() -> Iterator[Finding]:
    """Whether every file of the prebuilt grid is available: prebuilt, compiled before, or by a compiler."""
    targets = default_targets()
    files = list(dict.fromkeys(a for spec in specs_of(ops().values(), targets) for a in sources.artifacts(spec)))
    host = [artifact for artifact in files if artifact.kind != "cubin"]
    yield _obtainable("host modules", "C++ compiler", host, "apt-get install g++ (or: pip install fi-jit-cache)")
    device = [artifact for artifact in files if artifact.kind == "cubin"]
    if device:
        yield _obtainable("device binaries", "CUDA compiler", device, diagnose.NO_DEVICE_COMPILER)
    else:
        made_by = machine.compilers()
        text = made_by["NVRTC"] or made_by["nvcc"] or "there is none, and none is needed without a GPU"
        yield Finding("note", "CUDA compiler", text)
    if shutil.which("nvcc") and toolchain.nvcc() is None:
        yield Finding("note", "nvcc", "a program of that name has no CUDA toolkit around it; set CUDA_HOME")


def _obtainable(what: str, needed: str, files: list[Artifact], fix: str) -> Finding:
    found = [origin(artifact) for artifact in files]
    there = sum(o.path is not None for o in found)
    text = f"{there} of {len(files)} are there"
    if there == len(files):
        return Finding("ok", what, text)
    made_by = compiler.program(files[0])
    broken = toolchain.cxx_problem() if made_by and files[0].kind != "cubin" else None
    allowed = env.jit != "off"
    level = "FAIL" if allowed else "warn"
    text = text if allowed else f"{text}, FI_JIT=off forbids to compile the others"
    if made_by is None:
        return Finding(level, what, f"{text}, and there is no {needed} for the others", fix)
    if broken:
        return Finding(level, what, f"{text}, and {made_by} does not compile the others: {broken}", fix)
    if not allowed:
        return Finding(level, what, text, "FI_JIT=on fi-core prebuild")
    identity = compiler.identity(files[0]).split(" Copyright")[0].split(":")[0]
    return Finding("ok", what, f"{text}; {made_by} ({identity}) compiles the others on first use")


# Each check, and the findings whose failure prevents it.
CHECKS: dict[Callable[[], Iterator[Finding]], tuple[str, ...]] = {
    _settings: (),
    _packages: ("setting",),
    _gpus: ("setting",),
    _store: ("setting",),
    _providers: ("setting",),
    _kernels: ("setting", "fi-kernels", "apache-tvm-ffi"),
}
