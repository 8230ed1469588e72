"""User modules: a C++ host entry compiled against the headers of fi-kernels, with optional device code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_core.jit import base
from fi_core.runtime.build.driver import driver
from fi_core.runtime.build.sources import joined as unit_of
from fi_core.runtime.launch.kernel import bind_artifacts
from fi_core.runtime.launch.operator import Operator
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Entry, Op
from fi_core.runtime.spec.target import CPU, Target, cuda_target

HOST_SUFFIXES = (".cc", ".cpp", ".cxx")
_GENCODE = re.compile(r"-gencode=arch=compute_\w+,code=sm_(\d+[af]?)")


@dataclass(frozen=True)
class UserModule(base.JitSpec):
    """One host module, with one device binary per target. `load` returns the tvm-ffi module."""

    entries: tuple[Entry, ...] = ()
    adapter: Callable[[Any], Any] | None = None
    ldflags: tuple[str, ...] = ()  # the last flags of the host module

    @property
    def extra_cflags(self) -> list[str]:
        return list(self.host.flags[: len(self.host.flags) - len(self.ldflags)])

    @property
    def extra_ldflags(self) -> list[str]:
        return list(self.ldflags)

    def load(self) -> Any:
        (module,) = self._load_modules()
        return self.adapter(module) if self.adapter else module

    def bind(self, device: int = 0, *, arguments: str | None = None) -> Callable[..., Any]:
        """Returns the module's FI_FUNCTION entry as a function, and compiles the module if necessary.

        Args:
            device: index of the GPU, for a module with device code.
            arguments: the arguments of the entry as a torch.library schema that marks what is written, as in
                "Tensor(a!) out, Tensor x, float a=1.0". With it the function takes them by position or name, and
                torch.compile and torch.export see it as `torch.ops.fi_core.jit_<name>`. Without it the function takes
                positions only, and torch does not see it.

        Raises:
            ValueError: device is not the index of a visible GPU; arguments is not a schema, or not that of an earlier
                bind of this name.
        """
        call = self._bind_entry(device)
        if arguments is None:
            return call
        if not self.name.isidentifier():
            raise ValueError(f"arguments: a torch operator needs a name that is an identifier; got {self.name!r}")
        known = _declared.get(self.name)
        if known is None:
            known = _declared[self.name] = _Declared(Op(f"jit_{self.name}", "jit", (), arguments))
        elif known.op.arguments != arguments:
            raise ValueError(f"arguments: {self.name} is declared as {known.op.arguments!r}; got {arguments!r}")
        known.calls["cuda" if len(self.artifacts) > 1 else "cpu", device if len(self.artifacts) > 1 else None] = call
        return known.function

    def _bind_entry(self, device: int) -> Callable[..., Any]:
        images = [artifact for artifact in self.artifacts if artifact.kind == "cubin"]
        if not images:
            return bind_artifacts(self.name, (self.host,), (), 0).run
        found = driver()
        gpus = found.gpus if found else ()
        if not 0 <= device < len(gpus):
            raise ValueError(f"device: must be the index of one of {len(gpus)} visible GPUs; got {device}")
        image = _image(self.name, cuda_target(*gpus[device].capability), images[0])
        return bind_artifacts(self.name, (self.host, image), self.entries, device).run


class _Declared(Operator):
    """The torch operator of a user's module; its entry is bound for each device by `bind`."""

    def __init__(self, op: Op) -> None:
        self.calls: dict[tuple[str, int | None], Callable[..., Any]] = {}  # by type and index of a device
        super().__init__(op)
        self.choices.append(None)  # its calls have no Choice

    def _first_call(self, *values: Any) -> int:
        device = next(value.device for value in values if hasattr(value, "device"))
        if (device.type, device.index) not in self.calls:
            places = ", ".join("the CPU" if kind == "cpu" else f"GPU {index}" for kind, index in self.calls)
            raise ValueError(f"{self.op.name}: tensors must be on {places}, where it is bound; call bind for others")
        self.calls[device.type, device.index](*values)
        return 0


_declared: dict[str, _Declared] = {}  # a name is one torch operator in a process


def _image(name: str, target: Target, like: Artifact) -> Artifact:
    return like._replace(name=f"{name}_{target}", target=target)


def gen_jit_spec(
    name: str,
    sources: Sequence[str | Path],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Iterable[str | Path] | None = None,
    needs_device_linking: bool = False,
    post_load_adapter: Callable[[Any], Any] | None = None,
    embedded_cubin_factory: Any = None,
    use_fast_math: bool = True,
    extra_cuda_cflags_by_source: Mapping[str | Path, Sequence[str]] | None = None,
    *,
    entries: Sequence[Entry] = (),
) -> UserModule:
    """Describes a user module; it compiles nothing.

    Args:
        name: the module's name; it names files.
        sources: C++ files, at least one, and .cu files. The C++ files are compiled as one unit, in this order; they can
            include the headers of fi-kernels ("fi/host/function.h"); FI_CUDA is 1 in them if there is a .cu file.
            The .cu files are one unit too, compiled separately, into one binary per target.
        extra_cflags: more flags of the C++ compiler.
        extra_cuda_cflags: more flags of the CUDA compiler. `-gencode=` flags name the targets; without them the targets
            are those of CompilationContext.
        extra_ldflags: more flags of the linker.
        extra_include_paths: more include folders.
        needs_device_linking: without effect: device code is one unit, so there is nothing to link.
        post_load_adapter: called with the loaded module; `load` returns its result.
        embedded_cubin_factory: must be None; binaries are compiled from the sources.
        use_fast_math: whether device code is compiled with -use_fast_math.
        extra_cuda_cflags_by_source: more flags of the CUDA compiler for a .cu file. As device code is one unit, all .cu
            files must have the same.
        entries: the `__global__` functions of the .cu file, which the host entry finds in `kernel.entries` (`body` is
            not used).

    Returns:
        The module, registered in `jit_spec_registry`.

    Raises:
        ValueError: name, sources, embedded_cubin_factory or extra_cuda_cflags_by_source does not fit.
        RuntimeError: There is device code but no target.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"name: must have letters, digits and _.- only, because it names files; got {name!r}")
    if embedded_cubin_factory is not None:
        raise ValueError("embedded_cubin_factory: must be None; give the source of the kernels as a .cu file")
    paths = [Path(source).resolve() for source in sources]
    host, device = _split(paths)
    includes = tuple(str(Path(path).resolve()) for path in extra_include_paths or ())
    own_flags = _flags_of_all(device, extra_cuda_cflags_by_source or {})
    device_flags = [*(["-use_fast_math"] if use_fast_math else []), *(extra_cuda_cflags or ()), *own_flags]
    folders = {side: tuple(dict.fromkeys(str(path.parent) for path in side)) for side in (host, device)}
    artifacts = [
        Artifact(
            f"{name}_{'cuda' if device else 'cpu'}",
            "cuda" if device else "cpu",
            CPU,
            unit_of(name, host),
            (*(extra_cflags or ()), *(extra_ldflags or ())),
            (*folders[host], *includes),
        )
    ]
    if device:
        targets = [Target("cuda", match[1]) for flag in device_flags if (match := _GENCODE.fullmatch(flag))]
        if not targets:
            base.check_cuda_arch()
            targets = [target for target in base.context().targets() if target.capability >= base.OLDEST]
        flags = tuple(flag for flag in device_flags if not _GENCODE.fullmatch(flag))
        unit = Artifact(name, "cubin", targets[0], unit_of(name, device), flags, (*folders[device], *includes))
        artifacts += [_image(name, target, unit) for target in targets]
    spec = UserModule(name, tuple(artifacts), tuple(entries), post_load_adapter, tuple(extra_ldflags or ()))
    base.jit_spec_registry.register(spec)
    return spec


def _flags_of_all(paths: Sequence[Path], by_source: Mapping[str | Path, Sequence[str]]) -> tuple[str, ...]:
    """The flags of the device unit, which are those of each of its files."""
    given = {Path(path).resolve(): tuple(flags) for path, flags in by_source.items()}
    wrong = [path.name for path in given if path not in paths]
    found = {given.get(path, ()) for path in paths}
    if wrong or len(found) > 1:
        what = f"{', '.join(wrong)} is no .cu file of sources" if wrong else "files have different flags"
        raise ValueError(f"extra_cuda_cflags_by_source: the same flags for all .cu files are required; {what}")
    return found.pop() if found else ()


def _split(paths: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns the host sources and the device sources."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"sources: {path} is not a file")
    host = tuple(path for path in paths if path.suffix in HOST_SUFFIXES)
    device = tuple(path for path in paths if path.suffix == ".cu")
    if device and not host:
        raise ValueError(
            f"sources: a .cu file is compiled into a device binary, without host code; got {device[0].name} alone. Put "
            "what checks and launches into a .cc file, as docs/guides/adding-an-op.md shows at its end"
        )
    if not host or len(host) + len(device) != len(paths):
        raise ValueError(
            f"sources: at least one C++ file ({', '.join(HOST_SUFFIXES)}), and else .cu files, are required; got "
            f"{', '.join(path.name for path in paths) or 'none'}"
        )
    return host, device
