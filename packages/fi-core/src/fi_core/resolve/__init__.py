"""Finds the files of a spec: prebuilt by an installed package, else built before, else compiled now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fi_core.build import compiler, diagnose, ninja, sources
from fi_core.env import env
from fi_core.errors import MissingKernelError
from fi_core.resolve import store
from fi_core.resolve.provider import Provider, note, providers
from fi_core.spec.op import Artifact, Spec

_WAIT_SECONDS = 0.7  # R1: a compile that takes longer announces itself


class Found(NamedTuple):
    """A file and where it came from: a provider's name, "store" or "jit"."""

    path: Path
    origin: str


def alternatives(artifact: Artifact) -> tuple[Artifact, ...]:
    """The artifact, and for a device binary the same unit built for older targets that run here."""
    if artifact.kind != "cubin":
        return (artifact,)
    native = str(artifact.target)
    return tuple(
        artifact._replace(
            name=artifact.name.removesuffix(native) + str(t), target=t, source=artifact.source.replace(native, str(t))
        )
        for t in artifact.target.compatible()
    )


class Answer(NamedTuple):
    """What a provider says about an artifact: its file, or why it has none that fits."""

    provider: Provider
    path: Path | None
    why: str


def answers(artifact: Artifact) -> Iterator[Answer]:
    """What each installed package says, best first; those without such artifacts say nothing."""
    choices = alternatives(artifact)
    for choice in choices:
        for provider in providers():
            path, why = provider.find(choice)
            if path or why:
                yield Answer(provider, path, why)
    for provider in providers():
        if provider.holds(artifact.kind) and not any(choice.id in provider.artifacts for choice in choices):
            yield Answer(provider, None, f"has no {artifact.id}")


def prebuilt(artifact: Artifact) -> Iterator[Found]:
    """What the installed packages have of it, best first; why one has nothing that fits is logged once."""
    for provider, path, why in answers(artifact):
        if path:
            yield Found(path, provider.name)
        else:
            note(provider.name, why)


def where(artifact: Artifact) -> Found | None:
    """Where it would come from now if nothing may be compiled; logs nothing and leaves no trace in the store."""
    for provider, path, _ in answers(artifact):
        if path:
            return Found(path, provider.name)
    directory = store.peek(compiler.key(artifact))
    return Found(directory / artifact.file, "store") if directory else None


class _Announcement:
    """Says on stderr that a compile is under way, if it is not over within a moment."""

    def __init__(self, name: str) -> None:
        self._timer = threading.Timer(_WAIT_SECONDS, lambda: diagnose.logger().info("compiling %s ...", name))
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def built(artifact: Artifact) -> Found:
    """From the store, else compiled now.

    Raises MissingKernelError if FI_JIT=off and the store has none, CompileError if a compiler refuses.
    """
    key = compiler.key(artifact)
    directory = store.lookup(key)
    if directory:
        return Found(directory / artifact.file, "store")
    if env.jit == "off":
        raise MissingKernelError.of(artifact)
    diagnose.log_to_file()
    if env.jit == "warn":
        diagnose.logger().warning("%s is not prebuilt: compiling it", artifact.name)
    with _Announcement(artifact.name):
        directory, now = store.get_or_build(key, lambda d: compiler.compile_artifact(artifact, d))
    return Found(directory / artifact.file, "jit" if now else "store")


def find(artifact: Artifact, known: Iterable[Found] | None = None) -> Iterator[Found]:
    """Every place that has the artifact, in order of preference; the last one compiles it if it must.

    known: what `prebuilt` says, for a caller who has asked already.
    """
    yield from prebuilt(artifact) if known is None else known
    yield built(artifact)


def prepare(specs: Iterable[Spec], *, progress: bool | None = None, rebuild: bool = False) -> int:
    """Builds what of the specs is neither prebuilt nor in the store, through one ninja file; returns how many files.

    `progress` None prints a line per file only on a terminal. Raises CompileError of the first unit that fails.
    """
    return build_missing((a for spec in specs for a in sources.artifacts(spec)), progress=progress, rebuild=rebuild)


def build_missing(artifacts: Iterable[Artifact], *, progress: bool | None = None, rebuild: bool = False) -> int:
    """`prepare` for the files themselves."""
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
    import tempfile

    def build_in(root: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".tmp-batch-", dir=root, ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            ninja.write(artifacts, scratch)
            ninja.run(scratch, progress, env.jit_prebuild_max_jobs)
            for key in map(compiler.key, artifacts):
                store.lookup(key)  # sets a damaged entry aside
                store.publish(root, key, lambda d, key=key: shutil.copytree(scratch / key, d, dirs_exist_ok=True))  # type: ignore[misc]

    store.in_first_root(build_in)
