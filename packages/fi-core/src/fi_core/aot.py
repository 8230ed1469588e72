"""Builds the content of the binary packages: every op's grid, into a folder with an index. Needs no torch and no GPU.

The build hooks of fi-cubin and fi-jit-cache run `python -m fi_core.aot OUT cubin` and `... OUT cpu cuda`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import fi_core
from fi_core.compat.compilation_context import parse_target
from fi_core.registry import ops
from fi_core.runtime import dispatch
from fi_core.runtime.build import compiler, sources
from fi_core.runtime.dispatch import Request
from fi_core.runtime.env import env
from fi_core.runtime.files import PACKED, packed
from fi_core.runtime.resolve import build_all, run_all, store
from fi_core.runtime.resolve.pool import limit
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target

KINDS = ("cpu", "cuda", "cubin")


def targets() -> tuple[Target, ...]:
    """The CPU, and the architectures of fi-cubin; FI_CUDA_ARCH_LIST names others, or fewer."""
    return (CPU, *map(parse_target, env.cuda_arch_list or PREBUILT_ARCHS))


def specs(op: Op, target: Target) -> Iterator[Spec]:
    """The op's prebuilt grid on a target: a spec for each implementation that supports a request there, without
    duplicates.
    """
    requests = (Request.of(op, target, values) for values in op.grid())
    yield from dict.fromkeys(spec for request in requests for spec in dispatch.specs(request))


def artifacts(kinds: Collection[str] = KINDS) -> list[Artifact]:
    """Every file of these kinds, each once. A host module serves all CUDA architectures of FI_AOT_MACHINE."""
    all_specs = (spec for op in ops().values() for target in targets() for spec in specs(op, target))
    host = Target("cpu", env.aot_machine)
    every = (a if a.kind == "cubin" else a._replace(target=host) for spec in all_specs for a in sources.artifacts(spec))
    found = dict.fromkeys(a for a in every if a.kind in kinds)
    return sorted(found, key=lambda a: a.id)


@contextlib.contextmanager
def _compiled(wanted: Sequence[Artifact], progress: bool) -> Iterator[dict[Artifact, Path]]:
    """The compiled files: made in a scratch folder, or with FI_AOT_STORE in the store."""
    if env.aot_store:
        missing = [artifact for artifact in wanted if store.peek(compiler.key(artifact)) is None]
        if missing:
            build_all(missing, progress)
        folders = {artifact: store.peek(compiler.key(artifact)) for artifact in wanted}
        yield {artifact: folder / artifact.file for artifact, folder in folders.items() if folder}
        return
    with tempfile.TemporaryDirectory(prefix="fi-prebuilt-") as scratch:
        places = {artifact: Path(scratch) / compiler.key(artifact) for artifact in wanted}
        for place in places.values():
            place.mkdir()
        run_all(((a, functools.partial(compiler.compile_artifact, a, place)) for a, place in places.items()), progress)
        yield {artifact: place / artifact.file for artifact, place in places.items()}


def build(directory: Path, kinds: Collection[str], progress: bool = False) -> list[Path]:
    """Compiles the artifacts into `directory`, with the index that `resolve.provider` reads; returns the files.

    Device binaries are packed; host modules are not, since the dynamic loader takes files.

    The same sources and compilers give the same bytes, wherever the tree and the directory lie, and whether or not
    they come from the store. Raises CompileError of the first unit that fails, ValueError if FI_SANITIZE is set.
    """
    if env.sanitize:
        raise ValueError("FI_SANITIZE: a package ships modules without sanitizers; unset it")
    index, files = {}, []
    wanted = artifacts(kinds)
    with _compiled(wanted, progress) as compiled, concurrent.futures.ThreadPoolExecutor(limit()) as threads:

        def shipped(artifact: Artifact) -> bytes:
            content = compiled[artifact].read_bytes()
            return packed(content) if artifact.kind == "cubin" else content

        for artifact, content in zip(wanted, threads.map(shipped, wanted)):
            name = artifact.file + (PACKED if artifact.kind == "cubin" else "")
            path = directory / str(artifact.target) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            files.append(path)
            index[artifact.id] = {
                "file": path.relative_to(directory).as_posix(),
                "closure": sources.closure(artifact),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    head = {
        "version": fi_core.__version__,
        "schema": compiler.SCHEMA,
        "abi": compiler.FFI_ABI,
        "compiler": {a.kind: compiler.identity(a) for a in wanted},
    }
    (directory / "index.json").write_text(json.dumps(head | {"artifacts": index}, indent=1) + "\n")
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fi_core.aot", description="Compiles what a binary package ships.")
    parser.add_argument("out", type=Path, help="folder for the files and index.json")
    parser.add_argument("kinds", nargs="+", choices=KINDS, metavar="kind", help=", ".join(KINDS))
    given = parser.parse_args(arguments)
    files = build(given.out, given.kinds, progress=sys.stderr.isatty())
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
