"""Binds a spec: loads its host module, hands it the device binary, and remembers where both came from."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from fi_core.build import sources
from fi_core.resolve import Found, built, find, prebuilt
from fi_core.resolve.provider import note
from fi_core.spec.op import Artifact, Spec

_modules: dict[Any, Any] = {}  # loaded host modules by path: one per op and device kind


class Kernel(NamedTuple):
    """A launchable spec. `call` is the tvm-ffi function; `origins` says which file came from where."""

    call: Callable[..., None]
    spec: Spec
    origins: dict[str, Found]


def _load(found: Found) -> Any:
    if found.path not in _modules:
        import tvm_ffi

        _modules[found.path] = tvm_ffi.load_module(str(found.path))
    return _modules[found.path]


def _first(artifact: Artifact, use: Callable[[Found], Any]) -> tuple[Any, Found]:
    """The first place whose file can be used; a file that is refused is a miss with one logged reason."""
    refusal: Exception | None = None
    for found in find(artifact):
        try:
            return use(found), found
        except (RuntimeError, OSError) as error:
            if found.origin in ("store", "jit"):
                raise
            refusal = error
            note(found.origin, f"{artifact.id}: {error}")
    raise RuntimeError(f"{artifact.id} could not be loaded: {refusal}")


def bind(spec: Spec, device: int = 0) -> Kernel:
    """Resolves the spec and binds it for a device index (of CUDA; all devices of one architecture share the result).

    Raises MissingKernelError, CompileError, or RuntimeError when the driver refuses what was compiled here.
    """
    host, *images = sources.artifacts(spec)
    if not images:
        call, found = _first(host, lambda f: _load(f)["bind"](spec.op.name, spec.name))
        return Kernel(call, spec, {"host": found})
    (image,) = images
    if next(prebuilt(host), None) is None and next(prebuilt(image), None) is None:
        with ThreadPoolExecutor(1) as pool:  # both compilers at once: a cold first call costs the slower one
            other = pool.submit(built, host)
            built(image)
            other.result()
    module, host_found = _first(host, _load)
    unit = spec.unit()
    assert unit is not None
    entries = [w for e in unit.entries for w in (e.name, e.threads, e.shared_bytes, len(e.config), *e.config)]

    def use(found: Found) -> Callable[..., None]:
        content = found.path.read_bytes()
        return module["bind"](spec.op.name, spec.name, content, spec.target.capability, device, *entries)  # type: ignore[no-any-return]

    call, image_found = _first(image, use)
    return Kernel(call, spec, {"host": host_found, "cubin": image_found})
