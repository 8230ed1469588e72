"""Binds a spec: loads its host module, passes it the device binary, and records the origin of both."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from fi_core.runtime.build import sources
from fi_core.runtime.invariance import follow
from fi_core.runtime.resolve import Found, aside, find, first_usable, start
from fi_core.runtime.resolve.checks import checks_contents
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Entry, Op, Spec

_modules: dict[Any, Any] = {}  # loaded host modules by path: one per op and device kind
_open_files: list[int] = []  # descriptors of their files


class Kernel(NamedTuple):
    """A kernel that a host module has bound, and its address there. run: launches it for the values of a call, past all
    choices; a rehearsed kernel tells what it would launch. origins: of each file.
    """

    bound: Any
    name: str
    origins: dict[str, Found]
    run: Callable[..., str | None]


def load_module(found: Found) -> Any:
    """The tvm-ffi module of a host artifact, loaded once, through the open file whose content was verified.

    tvm_ffi.load_module takes paths that end in .so; the function below it takes a format. The file stays open: its path
    names the library for debuggers, and a second one of that name would be taken for it, so no number is used twice.
    """
    if found.path not in _modules:
        import tvm_ffi

        with found.opened() as file:
            number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(_open_files, default=2) + 1)
        _open_files.append(number)
        load, keep = map(tvm_ffi.get_global_func, ("ffi.Module.load_from_file.so", "ffi.ModuleGlobalsAdd"))
        module = load(f"/proc/{os.getpid()}/fd/{number}", "so")
        keep(module)  # code in use is not unloaded when the process ends
        follow(module)
        _modules[found.path] = module
    return _modules[found.path]


def bind(spec: Spec, device: int = 0) -> Kernel:
    """Resolves the spec and binds it to a device index (of CUDA; all devices of one architecture share the result).

    Raises:
        MissingKernelError: FI_JIT=off and the kernel is not prebuilt.
        CompileError: a compiler rejects the unit.
        RuntimeError: the driver rejects a binary that was compiled here.
    """
    unit = spec.unit()
    return bind_artifacts(spec.name, sources.artifacts(spec), unit.entries if unit else (), device)


def host_module(op: Op, kind: str) -> Any:
    """The host module of an op for "cpu" or "cuda" tensors. Raises what `bind` raises."""
    return first_usable(sources.host_module(op, kind), load_module)[0]


@functools.cache
def rehearsed_module(op: Op, kind: str) -> Any:
    """The host module of an op, which is not added to the store if it is neither installed nor there."""
    with aside(sources.host_module(op, kind)) as found:
        return load_module(found)


def _bind(module: Any, name: str, origins: dict[str, Found], image: Sequence[Any], entries: Sequence[Entry]) -> Kernel:
    """A kernel of a host module. image: the device binary and its capability, device, multiprocessors and shared_limit;
    empty on a CPU.
    """
    words = (w for e in entries for w in (e.name, e.threads, e.shared_bytes, len(e.config), *map(int, e.config)))
    bound = module["bind"](name, checks_contents("cuda" if image else "cpu"), *image, len(entries), *words)
    return Kernel(bound, name, origins, functools.partial(module["run"], bound))


def bind_artifacts(name: str, artifacts: Sequence[Artifact], entries: Sequence[Entry], device: int) -> Kernel:
    """Binds a host module, the first artifact, and the device binary, the second artifact if there is one, with its
    entries.
    """
    host, *images = artifacts
    if not images:
        module, found = first_usable(host, load_module)
        return _bind(module, name, {"host": found}, (), ())
    (image,), places = images, find(*images)
    start([host])  # both compilers at once: a cold first call costs the slower one
    places = chain([next(places)], places)
    module, found = first_usable(host, load_module)

    def use(file: Found) -> Kernel:
        given = file.content(), image.target.capability, device, 0, 0
        return _bind(module, name, {"host": found, "cubin": file}, given, entries)

    return first_usable(image, use, places)[0]  # type: ignore[no-any-return]


@functools.cache
def rehearse(spec: Spec, multiprocessors: int, shared_limit: int, entries: tuple[Entry, ...] = ()) -> Kernel:
    """A CUDA spec bound without a device: calls compute their launches and do not launch them.

    Calls take tensors on the CPU, whose contents are not read. A host module that is neither installed nor in the store
    is compiled for this process alone.

    Args:
        spec: a CUDA spec.
        multiprocessors, shared_limit: of the rehearsed device; the latter in bytes of a CTA.
        entries: of a user's variant, in place of those of the spec.
    """
    unit = spec.unit()
    assert unit is not None, f"{spec}: only a CUDA spec can be rehearsed"
    image = None, spec.target.capability, 0, multiprocessors, shared_limit
    return _bind(rehearsed_module(spec.op, "cuda"), spec.name, {}, image, entries or unit.entries)
