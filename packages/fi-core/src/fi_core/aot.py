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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target

KINDS = ("cpu", "cuda", "cubin")
# Bytes of the device binaries in an archive, unless one is larger: those of an op resemble each other. MB of the 309 of
# sm_90a, 37.9 unpacked, and ms of a core to unpack a file, on average and at most: alone 6.3, 1.0, 4; in archives of
# 1 MB 4.6, 4.5, 9, of 1.5 MB 4.2, 5.5, 11, of 2 MB 4.1, 7, 14, of a whole op 3.7, 17, 48.
ARCHIVE = 3 << 19
NOWHERE: Mapping[str, str | None] = {"commit": None, "tree": None}  # of a git repository; None: a tree with changes


def targets() -> tuple[Target, ...]:
    """The CPU, and the architectures of fi-cubin; FI_CUDA_ARCH_LIST names others, or fewer."""
    return (CPU, *map(parse_target, env.cuda_arch_list or PREBUILT_ARCHS))


def specs(op: Op, target: Target) -> Iterator[Spec]:
    """The op's prebuilt specs on a target: one for each implementation that supports a request of its grid or of a
    serving profile there, and is not slow for it, without duplicates. None of an op that FI_AOT_OPS leaves out.
    """
    if env.aot_ops and op.name not in env.aot_ops:
        return
    served = (call.of_layer(op) for call in profiles.shipped().get(op.name, ()))
    values = itertools.chain(op.grid(), *served)
    requests = (Request.of(op, target, given)._replace(batch_invariant=False) for given in values)
    yield from dict.fromkeys(spec for request in requests for spec in dispatch.specs(request, slow=False))


def grid(kinds: Collection[str] = KINDS, keep: Callable[[Spec], bool] = lambda spec: True) -> dict[Artifact, Spec]:
    """Every file of these kinds, and a spec that needs it. A host module serves all CUDA architectures of
    FI_AOT_MACHINE. keep: which specs are wanted.

    Raises ValueError if FI_AOT_OPS names an op that there is not.
    """
    unknown = sorted(set(env.aot_ops) - set(ops()))
    if unknown:
        raise ValueError(f"FI_AOT_OPS: names of ops are required, such as {min(ops())}; got {', '.join(unknown)}")
    every = (spec for op in ops().values() for target in targets() for spec in specs(op, target))
    found = files_of(spec for spec in every if keep(spec))
    host = Target("cpu", env.aot_machine)
    kept = {a if a.kind == "cubin" else a._replace(target=host): spec for a, spec in found.items() if a.kind in kinds}
    return dict(sorted(kept.items(), key=lambda item: item[0].id))


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
    directory: Path,
    kinds: Collection[str],
    progress: bool = False,
    origin: Mapping[str, str | None] = NOWHERE,
    keep: Callable[[Spec], bool] = lambda spec: True,
) -> list[Path]:
    """Compiles the grid into `directory`, with the index that `resolve.provider` reads; returns the files.

    The same sources and compilers give the same bytes, wherever the tree and the directory lie, and whether or not
    they come from the store. Raises CompileError of the first unit that fails, ValueError if a variable changes flags.
    """
    wanted = grid(kinds, keep)
    for target in targets():
        if "cubin" in kinds and target.kind == "cuda" and not any(a.target == target for a in wanted):
            print(f"{target}: nothing is built for it: no kernel supports it; sm_80 is the oldest", file=sys.stderr)
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
    """Writes the files and their index."""
    contents = {artifact: compiled[artifact].read_bytes() for artifact in wanted}
    places = _places(wanted, contents)

    def shipped(file: str) -> bytes:
        content = b"".join(contents[artifact] for artifact in places[file])
        return packed(content) if file.endswith(PACKED) else content

    written: list[Path] = []
    entries: dict[str, Any] = {}
    compilers: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(limit()) as threads:
        for file, content in zip(places, threads.map(shipped, places)):
            path = directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
            end = 0
            for artifact in places[file]:
                own = contents[artifact]
                begin, end = end, end + len(own)
                made_by, version = record.of_compiler(artifact), record.note(own).version
                name = f"{made_by['name']} {version}"
                compilers[name] = {"version": version, **made_by}
                entries[artifact.id] = {
                    "file": file,
                    "size": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "span": [begin, end] if file.endswith(PACKED) else None,
                    "unpacked_sha256": hashlib.sha256(own).hexdigest(),
                    "closure": sources.closure(artifact),
                    "flags": list(compiler.flags(artifact, shipped=True)),
                    "compiler": name,
                    **_declaration(artifact, wanted[artifact]),
                }
    head = {"version": fi_core.__version__, "schema": provider.SCHEMA, "abi": compiler.FFI_ABI, **origin}
    index = {artifact.id: entries[artifact.id] for artifact in wanted}
    text = json.dumps(head | {"compilers": compilers, "artifacts": index}, indent=1)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "index.json").write_text(text + "\n")
    return written


def _places(wanted: Mapping[Artifact, Spec], contents: Mapping[Artifact, bytes]) -> dict[str, list[Artifact]]:
    """The files, each with the artifacts whose contents lie in it one behind the other.

    Device binaries of an op and target share archives; host modules do not, since the dynamic loader takes files.
    """
    found: dict[str, list[Artifact]] = {}
    sizes: dict[str, int] = {}
    numbers: dict[str, int] = {}  # of the last archive of an op and target
    for artifact, spec in wanted.items():
        if artifact.kind != "cubin":
            found[f"{artifact.target}/{artifact.file}"] = [artifact]
            continue
        archives = f"{artifact.target}/{spec.op.name}"
        number, size = numbers.get(archives, 0), len(contents[artifact])
        if 0 < sizes.get(f"{archives}-{number}", 0) > ARCHIVE - size:
            number += 1
        name = f"{archives}-{number}"
        numbers[archives], sizes[name] = number, sizes.get(name, 0) + size
        found.setdefault(name + PACKED, []).append(artifact)
    return found


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


# FlashInfer's options: those that leave out kernels here, and what does so in place of the others.
_FAMILIES = {"add_comm": "comm", "add_moe": "fused_moe", "add_act": "activation"}
_ALWAYS = ("add_gemma", "add_oai_oss", "add_misc", "add_xqa")  # the kernels of these calls are those of other calls
_REPLACED = {
    "build_dir": "set FI_CACHE_DIR and FI_AOT_STORE=1: the store keeps what is compiled",
    "fa2_head_dim": "fi-core prebuild --model NAME --output DIR builds the head dims of a model",
    "fa3_head_dim": "fi-core prebuild --model NAME --output DIR builds the head dims of a model",
    "use_sliding_window": "every kernel takes any window",
    "use_logits_soft_cap": "packages hold the kernels with and without it",
}


def _switch(text: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"true or false is required; got {text!r}")
    return words[text.lower()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fi_core.aot", description="Compiles what a binary package ships.")
    parser.add_argument("out", nargs="?", type=Path, help="folder for the files and index.json")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"{', '.join(KINDS)}; all if none is given")
    parser.add_argument("--out-dir", type=Path, metavar="OUT", help="the folder, in place of `out`")
    parser.add_argument("--origin", type=json.loads, default=NOWHERE, help='JSON of the index: {"commit", "tree"}')
    sixteen, eight = (("float16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2"))
    parser.add_argument("--f16-dtype", nargs="+", choices=sixteen, help="no kernels of the other 16-bit dtype")
    parser.add_argument("--f8-dtype", nargs="+", choices=eight, help="no kernels of the other 8-bit dtype")
    for option, family in _FAMILIES.items():
        parser.add_argument(_flag(option), type=_switch, default=True, help=f"false: no kernels of {family}")
    for option in _ALWAYS:
        parser.add_argument(
            _flag(option), type=_switch, default=True, help="true; has no kernels of its own to leave out"
        )
    for option, instead in _REPLACED.items():
        parser.add_argument(_flag(option), nargs="*", help=f"refused: {instead}")
    return parser


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(arguments)
    values = vars(given)
    for option, instead in _REPLACED.items():
        if values[option] is not None:
            parser.error(f"{_flag(option)}: {instead}")
    for option in _ALWAYS:
        if not values[option]:
            parser.error(
                f"{_flag(option)}: there are no kernels of its own to leave out; fi-core prebuild --ops names ops"
            )
    if (given.out is None) == (given.out_dir is None):
        parser.error("out: a folder is required, once: OUT or --out-dir OUT")
    kinds = given.kinds or KINDS
    if not {*kinds} <= {*KINDS}:
        parser.error(f"kinds: {', '.join(KINDS)} are known; got {' '.join(kinds)}")
    families = {family for option, family in _FAMILIES.items() if not values[option]}
    dtypes = {"float16", "bfloat16"} - {*(given.f16_dtype or ("float16", "bfloat16"))}
    dtypes |= {"float8_e4m3fn", "float8_e5m2"} - {*(given.f8_dtype or ("float8_e4m3fn", "float8_e5m2"))}
    without = {short_name(f"torch.{dtype}") for dtype in dtypes}

    def keep(spec: Spec) -> bool:
        return spec.op.family not in families and without.isdisjoint(map(str, dict(spec.axes).values()))

    files = build(given.out or given.out_dir, kinds, sys.stderr.isatty(), given.origin, keep)
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
