"""Binds a spec: loads its host module, hands it the device binary, and remembers where both came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, NamedTuple

from fi_core.build import sources
from fi_core.resolve import Found, built, find, prebuilt
from fi_core.resolve.provider import note
from fi_core.spec.op import Artifact, Entry, Spec

_modules: dict[Any, Any] = {}  # loaded host modules by path: one per op and device kind


class Kernel(NamedTuple):
    """A launchable spec. `call` is the tvm-ffi function; `origins` says which file came from where."""

    call: Callable[..., None]
    spec: Spec
    origins: dict[str, Found]


def load_module(found: Found) -> Any:
    """The tvm-ffi module of a host artifact, loaded once."""
    if found.path not in _modules:
        import tvm_ffi

        _modules[found.path] = tvm_ffi.load_module(str(found.path))
    return _modules[found.path]


def _peek(places: Iterator[Found]) -> tuple[bool, Iterable[Found]]:
    """Whether there is any, and all of them: each further one costs reading a file."""
    head = list(islice(places, 1))
    return bool(head), chain(head, places)


def _first(artifact: Artifact, known: Iterable[Found], use: Callable[[Found], Any]) -> tuple[Any, Found]:
    """The first place whose file can be used; a prebuilt file that is refused is a miss with one logged reason."""
    for found in find(artifact, known):
        try:
            return use(found), found
        except (RuntimeError, OSError) as error:
            if found.origin in ("store", "jit"):
                raise RuntimeError(f"{artifact.id} could not be loaded from {found.path}: {error}") from error
            note(found.origin, f"{artifact.id}: {error}")
    raise AssertionError("the last place to look is what is built here")


def bind(spec: Spec, device: int = 0) -> Kernel:
    """Resolves the spec and binds it for a device index (of CUDA; all devices of one architecture share the result).

    Raises MissingKernelError, CompileError, or RuntimeError when the driver refuses what was compiled here.
    """
    unit = spec.unit()
    entries = unit.entries if unit else ()
    call, origins = bind_artifacts(spec.op.name, spec.name, sources.artifacts(spec), entries, device)
    return Kernel(call, spec, origins)


def bind_artifacts(
    op: str, name: str, artifacts: Sequence[Artifact], entries: Sequence[Entry], device: int
) -> tuple[Callable[..., None], dict[str, Found]]:
    """Binds a host module, the first artifact, with the device binary and its entries if a second one follows."""
    host, *images = artifacts
    has_host, hosts = _peek(prebuilt(host))
    if not images:
        call, found = _first(host, hosts, lambda f: load_module(f)["bind"](op, name))
        return call, {"host": found}
    (image,) = images
    has_cubin, cubins = _peek(prebuilt(image))
    if not has_host and not has_cubin:
        with ThreadPoolExecutor(1) as pool:  # both compilers at once: a cold first call costs the slower one
            other = pool.submit(built, host)
            cubins, hosts = [built(image)], [other.result()]
    module, host_found = _first(host, hosts, load_module)
    words = [w for e in entries for w in (e.name, e.threads, e.shared_bytes, len(e.config), *e.config)]

    def use(found: Found) -> Callable[..., None]:
        content = found.path.read_bytes()
        return module["bind"](op, name, content, image.target.capability, device, *words)  # type: ignore[no-any-return]

    call, image_found = _first(image, cubins, use)
    return call, {"host": host_found, "cubin": image_found}
