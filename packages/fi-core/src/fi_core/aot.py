"""Builds the content of the binary packages: every op's grid, into a folder with an index. Needs no torch and no GPU.

The build hooks of fi-cubin and fi-jit-cache run `python -m fi_core.aot OUT cubin` and `... OUT cpu cuda`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fi_core
from fi_core import profiles
from fi_core.compat.compilation_context import parse_target
from fi_core.registry import ops
from fi_core.runtime import dispatch
from fi_core.runtime.build import compiler, record, sources
from fi_core.runtime.dispatch import Request
from fi_core.runtime.env import env
from fi_core.runtime.files import PACKED, packed
from fi_core.runtime.resolve import build_all, provider, run_all, store
from fi_core.runtime.resolve.pool import limit
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target

KINDS = ("cpu", "cuda", "cubin")
NOWHERE: Mapping[str, str | None] = {"commit": None, "tree": None}  # of a git repository; None: a tree with changes


def targets() -> tuple[Target, ...]:
    """The CPU, and the architectures of fi-cubin; FI_CUDA_ARCH_LIST names others, or fewer."""
    return (CPU, *map(parse_target, env.cuda_arch_list or PREBUILT_ARCHS))


def specs(op: Op, target: Target) -> Iterator[Spec]:
    """The op's prebuilt specs on a target: one for each implementation that supports a request of its grid or of a
    serving profile there, without duplicates.
    """
    values = itertools.chain(op.grid(), profiles.shipped().get(op.name, ()))
    requests = (Request.of(op, target, given) for given in values)
    yield from dict.fromkeys(spec for request in requests for spec in dispatch.specs(request))


def grid(kinds: Collection[str] = KINDS) -> dict[Artifact, Spec]:
    """Every file of these kinds, and a spec that needs it. A host module serves all CUDA architectures of
    FI_AOT_MACHINE.
    """
    found = files_of(spec for op in ops().values() for target in targets() for spec in specs(op, target))
    host = Target("cpu", env.aot_machine)
    every = {a if a.kind == "cubin" else a._replace(target=host): spec for a, spec in found.items() if a.kind in kinds}
    return dict(sorted(every.items(), key=lambda item: item[0].id))


def artifacts(kinds: Collection[str] = KINDS) -> list[Artifact]:
    """Every file of these kinds, each once."""
    return list(grid(kinds))


def files_of(wanted: Iterable[Spec]) -> dict[Artifact, Spec]:
    """The files of specs, each with the first spec that needs it."""
    found: dict[Artifact, Spec] = {}
    for spec in wanted:
        for artifact in sources.artifacts(spec):
            found.setdefault(artifact, spec)
    return found


@contextlib.contextmanager
def _compiled(wanted: Sequence[Artifact], progress: bool) -> Iterator[dict[Artifact, Path]]:
    """The compiled files: made in a scratch folder, or with FI_AOT_STORE in the store."""
    if env.aot_store:
        yield _stored(wanted, progress)
        return
    with tempfile.TemporaryDirectory(prefix="fi-prebuilt-") as scratch:
        places = {artifact: Path(scratch) / compiler.key(artifact) for artifact in wanted}
        for place in places.values():
            place.mkdir()
        run_all(((a, functools.partial(compiler.compile_artifact, a, place)) for a, place in places.items()), progress)
        yield {artifact: place / artifact.file for artifact, place in places.items()}


def build(
    directory: Path, kinds: Collection[str], progress: bool = False, origin: Mapping[str, str | None] = NOWHERE
) -> list[Path]:
    """Compiles the grid into `directory`, with the index that `resolve.provider` reads; returns the files.

    The same sources and compilers give the same bytes, wherever the tree and the directory lie, and whether or not
    they come from the store. Raises CompileError of the first unit that fails, ValueError if a variable changes flags.
    """
    wanted = grid(kinds)
    check_flags(wanted)
    with _compiled(list(wanted), progress) as compiled:
        return _write(directory, wanted, compiled, origin)


def export(directory: Path, wanted: Iterable[Spec], progress: bool = False) -> list[Path]:
    """The files of specs, from the store or compiled into it, as a folder for FI_CUBIN_DIR; returns the files.

    Raises:
        ValueError: the folder holds something, or a variable changes flags.
        CompileError: the first unit that fails.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"--output: a folder that is missing or empty is required; got {directory}, which holds files")
    found = files_of(wanted)
    check_flags(found)
    return _write(directory, found, _stored(list(found), progress), NOWHERE)


def check_flags(wanted: Iterable[Artifact]) -> None:
    """Raises ValueError if the environment asks for other flags than packages have."""
    if env.sanitize:
        raise ValueError("FI_SANITIZE: a package ships modules without sanitizers; unset it")
    for artifact in wanted:
        other = set(compiler.flags(artifact)) - set(compiler.flags(artifact, shipped=True))
        if other:
            raise ValueError(
                f"a package ships binaries without {' '.join(sorted(other))}: unset FI_EXTRA_CFLAGS, FI_EXTRA_LDFLAGS, "
                "FI_EXTRA_CUDAFLAGS, FI_DELAYS, FI_JIT_DEBUG, FI_JIT_VERBOSE and FI_JIT_LINEINFO"
            )


def _stored(wanted: Sequence[Artifact], progress: bool) -> dict[Artifact, Path]:
    """The files in the store, which gets those that it lacks."""
    missing = [artifact for artifact in wanted if store.peek(compiler.key(artifact)) is None]
    if missing:
        build_all(missing, progress)
    folders = {artifact: store.peek(compiler.key(artifact)) for artifact in wanted}
    return {artifact: folder / artifact.file for artifact, folder in folders.items() if folder}


def _write(
    directory: Path, wanted: Mapping[Artifact, Spec], compiled: Mapping[Artifact, Path], origin: Mapping[str, Any]
) -> list[Path]:
    """Writes the files and their index. Device binaries are packed; host modules are not, since the dynamic loader
    takes files.
    """

    def shipped(artifact: Artifact) -> tuple[bytes, str, record.Note]:
        content = compiled[artifact].read_bytes()
        content_packed = packed(content) if artifact.kind == "cubin" else content
        return content_packed, hashlib.sha256(content).hexdigest(), record.note(content)

    written: list[Path] = []
    index: dict[str, Any] = {}
    compilers: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(limit()) as threads:
        for artifact, (content, unpacked, note) in zip(wanted, threads.map(shipped, wanted)):
            path = directory / str(artifact.target) / (artifact.file + (PACKED if artifact.kind == "cubin" else ""))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
            made_by = record.of_compiler(artifact)
            name = f"{made_by['name']} {note.version}"
            compilers[name] = {"version": note.version, **made_by}
            index[artifact.id] = {
                "file": path.relative_to(directory).as_posix(),
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "unpacked_sha256": unpacked,
                "closure": sources.closure(artifact),
                "flags": list(compiler.flags(artifact, shipped=True)),
                "compiler": name,
                **_declaration(artifact, wanted[artifact]),
            }
    head = {"version": fi_core.__version__, "schema": provider.SCHEMA, "abi": compiler.FFI_ABI, **origin}
    text = json.dumps(head | {"compilers": compilers, "artifacts": index}, indent=1)
    (directory / "index.json").write_text(text + "\n")
    return written


def _declaration(artifact: Artifact, spec: Spec) -> dict[str, Any]:
    """The part of an index entry from which `declared` finds the artifact again."""
    if artifact.kind != "cubin":
        return {"op": spec.op.name}
    return {"op": spec.op.name, "implementation": spec.implementation, "axes": dict(spec.axes)}


def declared(name: str, entry: Mapping[str, Any]) -> Artifact | None:
    """The artifact of an index entry as the ops declare it now; None if they declare none of this id."""
    op = ops().get(str(entry.get("op")))
    kind, _, rest = name.partition("/")
    machine = rest.partition("/")[0]
    if op is None:
        return None
    if kind != "cubin":
        artifact = sources.host_module(op, kind)._replace(target=Target("cpu", machine))
    else:
        target, axes = Target("cuda", machine.removeprefix("sm_")), entry.get("axes", {})
        try:
            spec = Spec(op, str(entry.get("implementation")), target, tuple(axes.items()))
            artifact = sources.artifacts(spec)[1]
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):  # an index is data
            return None
    return artifact if artifact.id == name else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fi_core.aot", description="Compiles what a binary package ships.")
    parser.add_argument("out", type=Path, help="folder for the files and index.json")
    parser.add_argument("kinds", nargs="+", choices=KINDS, metavar="kind", help=", ".join(KINDS))
    parser.add_argument("--origin", type=json.loads, default=NOWHERE, help='JSON of the index: {"commit", "tree"}')
    given = parser.parse_args(arguments)
    files = build(given.out, given.kinds, sys.stderr.isatty(), given.origin)
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
