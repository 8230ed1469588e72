"""Finds the files of a spec: prebuilt by an installed package, else compiled before, else compiled now."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from fi_core.runtime import files
from fi_core.runtime.build import compiler, diagnose
from fi_core.runtime.env import env
from fi_core.runtime.errors import MissingKernelError
from fi_core.runtime.resolve import store
from fi_core.runtime.resolve.pool import pool
from fi_core.runtime.resolve.provider import LACKS, Provider, note, providers
from fi_core.runtime.spec.artifact import Artifact

_ATTEMPTS = 5  # to open what was built, while other processes clear the store
_WAIT_SECONDS = 1.0  # R1: a compile that takes longer announces itself
compiled: list[str] = []  # the names of the files that this process has compiled for its calls, in order
_serving = threading.Event()


class Found(NamedTuple):
    """A file, its origin (a provider's name, "store" or "jit"), the sha256 that it must have when it is opened, and the
    part of its content that is the artifact; None: all of it.
    """

    path: Path
    origin: str
    digest: str
    span: tuple[int, int] | None = None

    def opened(self) -> IO[bytes]:
        """The verified file. Raises OSError if it is gone or differs."""
        return files.verified(self.path, self.digest)

    def content(self) -> bytes:
        """The bytes of the artifact, unpacked. Raises OSError if the file is gone, differs or cannot be unpacked."""
        with self.opened() as file:
            return files.unpacked(self.path, file.read(), self.span)


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

    Packages ship plain binaries: FI_SANITIZE has all host modules compiled here, FI_DELAYS all device binaries.
    """
    if env.delays if artifact.kind == "cubin" else env.sanitize:
        return
    choices = alternatives(artifact)
    for choice in choices:
        for provider in providers():
            file, why = provider.find(choice)
            if file or why:
                found = Found(file.path, provider.name, file.digest, file.span) if file else None
                yield Answer(provider, found, why)
    for provider in providers():
        if provider.holds(artifact.kind) and not any(choice.id in provider.artifacts for choice in choices):
            yield Answer(provider, None, f"{LACKS}{artifact.name}")


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
    directory = None if found else kept(artifact)
    return _stored(directory, artifact, "store") if directory else found


def kept(artifact: Artifact) -> Path | None:
    """The entry of the store that serves the artifact, or None; nothing is changed. Where it cannot be compiled, the
    entry of another compiler does: a store that was filled in an image with a compiler serves one without.
    """
    directory = store.peek(compiler.key(artifact))
    if directory is None and not _compiles(artifact):
        directory = store.peek_inputs(artifact.name, compiler.inputs(artifact))
    return directory


def _compiles(artifact: Artifact) -> bool:
    return env.jit != "off" and compiler.program(artifact) is not None


def misses(artifact: Artifact, unusable: Iterable[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """(place, reason) of each place that has no fitting file, as `fi-core why` and MissingKernelError tell it.
    unusable: of each package whose file failed to load.
    """
    # A package is asked for each target that fits, and may answer the same.
    found = [*unusable]
    found += dict.fromkeys((provider.name, why) for provider, file, why in answers(artifact) if not file)
    if not found:
        image = artifact.kind == "cubin"
        what, package = ("device binaries", "fi-cubin") if image else ("host modules", "fi-jit-cache")
        found.append(("prebuilt", f"no package with {what} is installed (pip install {package})"))
    complaints = [("store", why) for why in store.complaints(artifact.name)]
    return [*found, *(complaints or [("store", f"has no {compiler.key(artifact)}")])]


def _missing(artifact: Artifact, unusable: Iterable[tuple[str, str]] = ()) -> MissingKernelError:
    return MissingKernelError.of(artifact, misses(artifact, unusable))


def _stored(directory: Path, artifact: Artifact, origin: str) -> Found | None:
    """The artifact in an entry of the store; None if another process has removed the entry."""
    path = directory / artifact.file
    with contextlib.suppress(OSError):
        return Found(path, origin, store.digest(path))
    return None


class _Announcement:
    """Logs that a compile is awaited, if that takes longer than a moment; a process logs one line a second at most."""

    _last = -1e9  # time of the last line

    def __init__(self, name: str) -> None:
        self._name = name
        self._timer = threading.Timer(_WAIT_SECONDS, self._log)
        self._timer.daemon = True

    def _log(self) -> None:
        now = time.monotonic()
        if now - _Announcement._last >= 1.0:
            _Announcement._last = now
            others = pool().waiting() - 1
            diagnose.logger().info("compiling %s ...%s", self._name, f" and {others} more" if others > 0 else "")

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _in_store(artifact: Artifact) -> Found | None:
    """The artifact in the store. A damaged entry that nobody can build again stays where it is."""
    if _compiles(artifact):
        directory = store.lookup(compiler.key(artifact))
    else:
        directory = kept(artifact)
        if directory:
            store.touch(directory)
    return _stored(directory, artifact, "store") if directory else None


def _compiled(artifact: Artifact) -> Found:
    """The artifact from the store; if it is not there, compiled on this thread."""
    key = compiler.key(artifact)
    diagnose.log_to_file()
    if env.jit == "warn":
        diagnose.logger().warning("%s is not prebuilt: compiling it", artifact.name)
    while True:  # until no other process removes it at once
        directory, now = store.get_or_build(
            key, lambda d: compiler.compile_artifact(artifact, d), compiler.inputs(artifact)
        )
        found = _stored(directory, artifact, "jit" if now else "store")
        if found:
            if now:
                compiled.append(artifact.name)
            if now and _serving.is_set():
                diagnose.logger().warning("%s was compiled while serving", artifact.name)
            return found


def built(artifact: Artifact) -> Found:
    """The artifact from the store, else compiled now, or by the pool, where `start` has begun that.

    Raises:
        MissingKernelError: FI_JIT=off and the store does not have it.
        CompileError: a compiler rejects it.
    """
    found = _in_store(artifact)
    if found:
        return found
    if env.jit == "off":
        raise _missing(artifact)
    with _Announcement(artifact.name):
        found = pool().result(artifact, functools.partial(_compiled, artifact))
        assert isinstance(found, Found)
        return found


def warn_of_compiles(on: bool) -> None:
    """Whether a warning is logged for each file that is compiled from now on."""
    (_serving.set if on else _serving.clear)()


def wait_for_begun() -> None:
    """Waits for the compilers that `start` has begun; their errors surface where their files are needed."""
    pool().drain()


def missing(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """The artifacts, each once, that no installed package and no store has."""
    seen: set[Artifact] = set()
    for artifact in artifacts:
        if artifact not in seen and (next(prebuilt(artifact), None) or where(artifact)) is None:
            yield artifact
        seen.add(artifact)


def start(artifacts: Iterable[Artifact]) -> int:
    """Begins to compile, on other threads, what no package and no store has, and returns how many files that are.

    An error surfaces in the `built` of its artifact. With FI_JIT=off nothing is begun.
    """
    if env.jit == "off":
        return 0
    count = 0
    for artifact in missing(artifacts):  # the first compiles while others are looked for
        pool().start(artifact, functools.partial(_compiled, artifact))
        count += 1
    return count


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
        raise _missing(artifact)
    with tempfile.TemporaryDirectory(prefix="fi-aside-") as folder:
        compiler.compile_artifact(artifact, Path(folder))
        path = Path(folder) / artifact.file
        yield Found(path, "jit", hashlib.sha256(files.content(path)).hexdigest())


def find(artifact: Artifact) -> Iterator[Found]:
    """Every place that has the artifact, in order of preference; the last one compiles it if necessary."""
    yield from prebuilt(artifact)
    yield built(artifact)


def first_usable(
    artifact: Artifact, use: Callable[[Found], Any], places: Iterator[Found] | None = None
) -> tuple[Any, Found]:
    """What `use` makes of the first file that can be used, and that file.

    A prebuilt file that fails to load is skipped, and the reason is logged; one that another process removes from the
    store is built again.

    Raises:
        RuntimeError: none is left.
        MissingKernelError: none is left and FI_JIT=off; the text names what failed.
    """
    lost = RuntimeError(f"{artifact.id} could not be loaded")
    unusable: list[tuple[str, str]] = []
    try:
        for found in itertools.chain(places or find(artifact), (built(artifact) for _ in range(_ATTEMPTS))):
            try:
                return use(found), found
            except (RuntimeError, OSError) as error:
                if found.origin not in ("store", "jit"):
                    unusable.append((found.origin, f"{artifact.id}: {error}"))
                    note(*unusable[-1])
                    continue
                lost = RuntimeError(f"{artifact.id} could not be loaded from {found.path}: {error}")
                if isinstance(error, RuntimeError):
                    raise lost from error
    except MissingKernelError:
        raise _missing(artifact, unusable) from None
    raise lost


def build_missing(artifacts: Iterable[Artifact], *, progress: bool | None = None, rebuild: bool = False) -> int:
    """Builds the artifacts that neither a package nor the store has, in parallel.

    Args:
        artifacts: what to build.
        progress: print a line per file; None: only on a terminal.
        rebuild: also build files that exist.

    Returns:
        The number of files.

    Raises:
        CompileError: the first unit that fails.
        MissingKernelError: FI_JIT=off.
    """
    wanted = dict.fromkeys(artifacts) if rebuild else missing(artifacts)
    begin = time.perf_counter()
    count = build_all(_allowed(wanted), sys.stderr.isatty() if progress is None else progress, rebuild=rebuild)
    if count:
        diagnose.logger().debug("prepared %d files in %.1f s", count, time.perf_counter() - begin)
    return count


def _allowed(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """The artifacts; raises MissingKernelError at the first if FI_JIT=off."""
    for artifact in artifacts:
        if env.jit == "off":
            raise _missing(artifact)
        yield artifact


def build_all(artifacts: Iterable[Artifact], progress: bool, *, rebuild: bool = False) -> int:
    """Compiles all in parallel and publishes each in the store; returns their number. rebuild: also those that are
    there.
    """
    return run_all(((a, functools.partial(_rebuilt if rebuild else _compiled, a)) for a in artifacts), progress)


def _rebuilt(artifact: Artifact) -> Found:
    """The artifact, compiled now; a sound entry of the store stays."""
    key = compiler.key(artifact)
    directory = store.in_first_root(
        lambda root: store.publish(
            root, key, lambda d: compiler.compile_artifact(artifact, d), compiler.inputs(artifact)
        )
    )
    return Found(directory / artifact.file, "jit", store.digest(directory / artifact.file))


def run_all(works: Iterable[tuple[Artifact, Callable[[], Any]]], progress: bool) -> int:
    """Runs the works on the pool, the first while others are looked for, with a line for each that ends.

    Raises the first error, and drops what is left, also of other threads, which then run their works themselves.
    Returns the number of works.
    """
    futures = {pool().start(artifact, work): (artifact, work) for artifact, work in works}
    live = progress and sys.stderr.isatty()
    try:
        for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
            artifact, work = futures[future]
            pool().result(artifact, work if future.cancelled() else future.result)
            if progress:
                line = f"[{count}/{len(futures)}] {artifact.name} [{artifact.target}]"
                sys.stderr.write(f"\r\x1b[K{line}" if live else f"{line}\n")
                sys.stderr.flush()
    except BaseException:
        pool().drop()
        raise
    finally:
        if live:
            sys.stderr.write("\r\x1b[K")
    return len(futures)
