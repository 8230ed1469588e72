"""Finds the files of a spec: prebuilt by an installed package, else compiled before, else compiled now."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from fi_core.runtime import files
from fi_core.runtime.build import compiler, diagnose, ninja, sources
from fi_core.runtime.env import env
from fi_core.runtime.errors import MissingKernelError
from fi_core.runtime.resolve import store
from fi_core.runtime.resolve.provider import Provider, note, providers
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Spec

_WAIT_SECONDS = 0.7  # R1: a compile that takes longer announces itself


class Found(NamedTuple):
    """A file, its origin (a provider's name, "store" or "jit") and the sha256 that it must have when it is opened."""

    path: Path
    origin: str
    digest: str

    def opened(self) -> IO[bytes]:
        """The verified file. Raises OSError if it is gone or differs."""
        return files.verified(self.path, self.digest)


def alternatives(artifact: Artifact) -> tuple[Artifact, ...]:
    """The artifact, and for a device binary the same unit built for older targets that run here."""
    if artifact.kind != "cubin":
        return (artifact,)
    native = str(artifact.target)
    return tuple(
        artifact._replace(name=artifact.name.removesuffix(native) + str(t), target=t)
        for t in artifact.target.compatible()
    )


class Answer(NamedTuple):
    """The answer of a provider for an artifact: its file, or the reason why none fits."""

    provider: Provider
    found: Found | None
    why: str


def answers(artifact: Artifact) -> Iterator[Answer]:
    """The answers of the installed packages, best first; packages without such artifacts give none.

    Packages ship plain host modules, so FI_SANITIZE has them all compiled here.
    """
    if env.sanitize and artifact.kind != "cubin":
        return
    choices = alternatives(artifact)
    for choice in choices:
        for provider in providers():
            file, why = provider.find(choice)
            if file or why:
                yield Answer(provider, Found(file.path, provider.name, file.digest) if file else None, why)
    for provider in providers():
        if provider.holds(artifact.kind) and not any(choice.id in provider.artifacts for choice in choices):
            yield Answer(provider, None, f"has no {artifact.id}")


def prebuilt(artifact: Artifact) -> Iterator[Found]:
    """The file of each installed package that has one, best first. The reason of each other package is logged once."""
    for provider, found, why in answers(artifact):
        if found:
            yield found
        else:
            note(provider.name, why)


def where(artifact: Artifact) -> Found | None:
    """Where the artifact is now, without compiling; logs nothing and does not change the store."""
    found = next((answer.found for answer in answers(artifact) if answer.found), None)
    directory = None if found else store.peek(compiler.key(artifact))
    return _stored(directory, artifact, "store") if directory else found


def _stored(directory: Path, artifact: Artifact, origin: str) -> Found | None:
    """The artifact in an entry of the store; None if another process has removed the entry."""
    path = directory / artifact.file
    with contextlib.suppress(OSError):
        return Found(path, origin, store.digest(path))
    return None


class _Announcement:
    """Logs that a compile is in progress, if it takes longer than a moment."""

    def __init__(self, name: str) -> None:
        self._timer = threading.Timer(_WAIT_SECONDS, lambda: diagnose.logger().info("compiling %s ...", name))
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def built(artifact: Artifact) -> Found:
    """The artifact from the store, else compiled now.

    Raises:
        MissingKernelError: FI_JIT=off and the store does not have it.
        CompileError: a compiler rejects it.
    """
    key = compiler.key(artifact)
    directory = store.lookup(key)
    found = _stored(directory, artifact, "store") if directory else None
    if found:
        return found
    if env.jit == "off":
        raise MissingKernelError.of(artifact)
    diagnose.log_to_file()
    if env.jit == "warn":
        diagnose.logger().warning("%s is not prebuilt: compiling it", artifact.name)
    with _Announcement(artifact.name):
        while True:  # until no other process removes it at once
            directory, now = store.get_or_build(key, lambda d: compiler.compile_artifact(artifact, d))
            found = _stored(directory, artifact, "jit" if now else "store")
            if found:
                return found


@contextlib.contextmanager
def aside(artifact: Artifact) -> Iterator[Found]:
    """The artifact where it is, else compiled into a temporary folder for the block; the store is not changed.

    Raises:
        MissingKernelError: FI_JIT=off and it is not found.
        CompileError: a compiler rejects it.
    """
    found = where(artifact)
    if found:
        yield found
        return
    if env.jit == "off":
        raise MissingKernelError.of(artifact)
    with tempfile.TemporaryDirectory(prefix="fi-aside-") as folder:
        compiler.compile_artifact(artifact, Path(folder))
        path = Path(folder) / artifact.file
        yield Found(path, "jit", hashlib.sha256(files.content(path)).hexdigest())


def find(artifact: Artifact, known: Iterable[Found] | None = None) -> Iterator[Found]:
    """Every place that has the artifact, in order of preference; the last one compiles it if necessary.

    known: the result of `prebuilt`, if the caller has it.
    """
    yield from prebuilt(artifact) if known is None else known
    yield built(artifact)


def prepare(specs: Iterable[Spec], *, progress: bool | None = None, rebuild: bool = False) -> int:
    """Builds the files of the specs that are neither prebuilt nor in the store, through one ninja file.

    Args:
        specs: what to build.
        progress: print a line per file; None: only on a terminal.
        rebuild: also build files that exist.

    Returns:
        The number of files.

    Raises:
        CompileError: the first unit that fails.
        MissingKernelError: FI_JIT=off.
    """
    return build_missing((a for spec in specs for a in sources.artifacts(spec)), progress=progress, rebuild=rebuild)


def build_missing(artifacts: Iterable[Artifact], *, progress: bool | None = None, rebuild: bool = False) -> int:
    """`prepare` for artifacts."""
    import sys

    missing = [a for a in dict.fromkeys(artifacts) if rebuild or (next(prebuilt(a), None) or where(a)) is None]
    if not missing:
        return 0
    if env.jit == "off":
        raise MissingKernelError.of(missing[0])
    start = time.perf_counter()
    diagnose.log_to_file()
    build_all(missing, sys.stderr.isatty() if progress is None else progress)
    diagnose.logger().debug("prepared %d files in %.1f s", len(missing), time.perf_counter() - start)
    return len(missing)


def build_all(artifacts: Sequence[Artifact], progress: bool) -> None:
    """Compiles all in a scratch directory of the store and publishes each."""
    import shutil

    def build_in(root: Path) -> None:
        with store.scratch(root) as scratch:
            ninja.write(artifacts, scratch)
            ninja.run(scratch, progress, env.jit_prebuild_max_jobs)
            for key in map(compiler.key, artifacts):
                store.lookup(key)  # sets a damaged entry aside
                store.publish(root, key, lambda d, key=key: shutil.copytree(scratch / key, d, dirs_exist_ok=True))  # type: ignore[misc]

    store.in_first_root(build_in)
