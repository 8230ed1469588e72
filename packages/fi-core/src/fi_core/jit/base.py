"""JitSpec: a named set of files that are compiled and loaded together; the registry of this process's specs."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fi_core.compat.compilation_context import CompilationContext
from fi_core.jit.env import GENERATED
from fi_core.runtime.build import compiler, ninja
from fi_core.runtime.env import env
from fi_core.runtime.launch.kernel import load_module
from fi_core.runtime.resolve import answers, build_missing, store, where
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.target import CPU, Target

OLDEST = 80  # the first compute capability that any implementation takes


@functools.cache
def context() -> CompilationContext:
    return CompilationContext()


logger = logging.getLogger("fi_core.jit")  # of builds; `runtime.build.diagnose` sets it up


def default_targets() -> tuple[Target, ...]:
    """Returns the architectures of FI_CUDA_ARCH_LIST, else of the visible GPUs; the CPU if there is none."""
    return context().targets() or (CPU,)


def check_cuda_arch() -> None:
    """Checks that there is an architecture to compile device code for. It queries the driver again if none was found.

    Raises:
        RuntimeError: There is no architecture from sm_80 on.
    """
    if not context().TARGET_CUDA_ARCHS:
        context.cache_clear()
    targets = context().targets()
    if not any(target.capability >= OLDEST for target in targets):
        found = ", ".join(map(str, targets)) or "no GPU"
        raise RuntimeError(
            f"device code needs a target from sm_{OLDEST} on, found {found}: set FI_CUDA_ARCH_LIST, such as 9.0a"
        )


@dataclass(frozen=True)
class JitSpec(ABC):
    """A set of files that are compiled and loaded together.

    Compiled files lie in the content-addressed store. A property that describes one library describes the first host
    module.

    Args:
        name: the URI, one per compile-time configuration; also the name of the folder below generated/.
        artifacts: the files to find or compile.
        created_at: time of creation.
    """

    name: str
    artifacts: tuple[Artifact, ...]
    created_at: datetime = field(default_factory=datetime.now, compare=False, kw_only=True)

    @property
    def host(self) -> Artifact:
        return next(artifact for artifact in self.artifacts if artifact.kind != "cubin")

    @property
    def sources(self) -> list[Path]:
        """The translation units; write_ninja() creates those of device code."""
        return [compiler.unit_path(a, self.build_dir / compiler.key(a)) for a in self.artifacts]

    @property
    def extra_cflags(self) -> list[str]:
        return list(self.host.flags)

    @property
    def extra_ldflags(self) -> list[str]:
        """Those of `gen_jit_spec`; modules of operators have none."""
        return []

    @property
    def extra_include_dirs(self) -> list[Path]:
        """The include folders besides those of fi-kernels and tvm-ffi: of sources, then as given."""
        return [Path(place) for place in self.host.includes]

    @property
    def extra_cuda_cflags(self) -> list[str]:
        return list(next((a.flags for a in self.artifacts if a.kind == "cubin"), ()))

    @property
    def build_dir(self) -> Path:
        return env.cache_dir / GENERATED / self.name

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    @property
    def is_ninja_generated(self) -> bool:
        return self.ninja_path.exists()

    @property
    def jit_library_path(self) -> Path:
        """The path of the library in the store, whether or not it is compiled."""
        key = compiler.key(self.host)
        return (store.peek(key) or store.roots()[0] / key) / self.host.file

    @property
    def aot_path(self) -> Path | None:
        """The matching library of an installed package, or None."""
        return next((answer.found.path for answer in answers(self.host) if answer.found), None)

    @property
    def is_aot(self) -> bool:
        """Whether installed packages contain all files."""
        return all(any(answer.found for answer in answers(a)) for a in self.artifacts)

    @property
    def is_compiled(self) -> bool:
        """Whether all files exist, installed or in the store, so that nothing has to be compiled."""
        return all(where(artifact) for artifact in self.artifacts)

    @property
    def lock_path(self) -> Path:
        """The lock of the library's compilation; a process that cannot have it compiles without it."""
        return store.roots()[0] / f".lock-{compiler.key(self.host)}"

    def get_library_path(self) -> Path:
        return self.aot_path or self.jit_library_path

    def get_library_paths(self) -> list[Path]:
        """The paths of all files, host modules and device binaries; where a file is missing, the one it will have."""
        root = store.roots()[0]
        found = {artifact: where(artifact) for artifact in self.artifacts}
        return [at.path if at else root / compiler.key(artifact) / artifact.file for artifact, at in found.items()]

    def write_ninja(self) -> None:
        """Writes build.ninja and the units of device code, for inspection or for a manual run of `ninja`."""
        ninja.write(self.artifacts, self.build_dir)

    def get_compile_commands(self) -> list[dict[str, str]]:
        """Returns the entries of compile_commands.json; write_ninja() creates the units that they name."""
        return ninja.compile_commands(self.artifacts, self.build_dir)

    def build(self, verbose: bool | None = None, need_lock: bool = False) -> None:
        """Compiles the files that are neither installed nor in the store.

        Args:
            verbose: whether to show progress; None lets the environment decide.
            need_lock: accepted for compatibility; builds need no lock.

        Raises:
            MissingJITCacheError: FI_JIT=off forbids compiling.
            CompileError: A compiler fails.
        """
        build_missing(self.artifacts, progress=verbose)

    @abstractmethod
    def load(self) -> Any:
        """Returns the functions of the compiled files.

        Raises:
            FileNotFoundError: A file is not compiled.
        """

    def try_load(self) -> Any:
        """Returns the functions of the compiled files, as `load`; None if a file is not compiled."""
        return self.load() if self.is_compiled else None

    def build_and_load(self) -> Any:
        self.build()
        return self.load()

    def _load_modules(self) -> list[Any]:
        """Loads the host modules. Device binaries must exist, but are loaded when a kernel is bound."""
        found = {artifact: where(artifact) for artifact in self.artifacts}
        for artifact, place in found.items():
            if place is None:
                raise FileNotFoundError(f"{self.name}: {artifact.file} is not built; call build() or build_and_load()")
        return [load_module(place) for artifact, place in found.items() if place and artifact.kind != "cubin"]


@dataclass(frozen=True)
class JitSpecStatus:
    """The state of a spec, for module listings."""

    name: str
    created_at: datetime
    is_compiled: bool
    library_path: Path | None
    sources: list[Path]
    needs_device_linking: bool = False  # never: host and device code are not linked

    @property
    def status(self) -> str:
        return "Compiled" if self.is_compiled else "Not Compiled"


class JitSpecRegistry:
    """The specs of this process, by name."""

    def __init__(self) -> None:
        self._specs: dict[str, JitSpec] = {}

    def register(self, spec: JitSpec) -> None:
        self._specs[spec.name] = spec

    def get_all_specs(self) -> dict[str, JitSpec]:
        return dict(self._specs)

    def get_spec_status(self, name: str) -> JitSpecStatus | None:
        spec = self._specs.get(name)
        return status(spec) if spec else None

    def get_all_statuses(self) -> list[JitSpecStatus]:
        return [status(spec) for spec in self._specs.values()]

    def get_stats(self) -> dict[str, int]:
        compiled = sum(spec.is_compiled for spec in self._specs.values())
        return {"total": len(self._specs), "compiled": compiled, "not_compiled": len(self._specs) - compiled}


jit_spec_registry = JitSpecRegistry()


def status(spec: JitSpec) -> JitSpecStatus:
    compiled = spec.is_compiled
    return JitSpecStatus(
        spec.name, spec.created_at, compiled, spec.get_library_path() if compiled else None, spec.sources
    )


def build_jit_specs(specs: Iterable[JitSpec], verbose: bool = False, skip_prebuilt: bool = True) -> None:
    """Compiles the missing files of all specs in one parallel build.

    Args:
        specs: the specs.
        verbose: whether to show progress.
        skip_prebuilt: whether files that exist are not compiled again.

    Raises:
        TypeError: An element is not a JitSpec.
        MissingJITCacheError: FI_JIT=off forbids compiling.
        CompileError: A compiler fails.
    """
    wanted = list(specs)
    for spec in wanted:
        if not isinstance(spec, JitSpec):
            raise TypeError(f"specs: every element must be a JitSpec; got {type(spec).__name__}")
    build_missing((a for s in wanted for a in s.artifacts), progress=verbose or None, rebuild=not skip_prebuilt)


def clear_cache_dir() -> None:
    """Removes all compiled files from the store. Installed packages and generated/ are not removed."""
    store.clear()
