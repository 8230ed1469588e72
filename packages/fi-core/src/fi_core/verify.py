"""Compares installed packages with their indexes, their RECORD, the installed sources and, if asked, with a rebuild."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import fi_core
from fi_core import aot
from fi_core.runtime import files
from fi_core.runtime.build import compiler, record, sources
from fi_core.runtime.resolve import store
from fi_core.runtime.resolve.provider import EMPTY, Provider, providers, span_of

DISTRIBUTIONS = ("fi-core", "fi-kernels", "fi-jit-cache", "fi-cubin", "fi-bench")
INDEX = "index.json"


class Problem(NamedTuple):
    """`problem`: missing, digest (bytes differ from the index), record (from RECORD), source, flags, compiler, stray (a
    file that nothing lists) or version. `file`: of an artifact in an archive, that and its name.
    """

    package: str
    file: str
    problem: str
    expected: str
    found: str


class Checked(NamedTuple):
    """A package, the number of files that were compared, and what is wrong. `note`: what could not be compared."""

    name: str
    version: str
    files: int
    problems: list[Problem]
    note: str = ""


def packages(*, deep: bool = False) -> list[Checked]:
    """Every installed package of fi, FI_CUBIN_DIR, and the store; nothing is changed and nothing is compiled.

    deep: also unpack each binary, and compare its digest, compiler and target.
    """
    known = {provider.name: provider for provider in providers()}
    checked = [_distribution(name, known.pop(name, None), deep) for name in DISTRIBUTIONS]
    checked += [_folder(provider, deep) for provider in known.values()]
    entries = store.entries()
    damaged = [(entry, store.problem(entry.path)) for entry in entries]
    problems = [Problem("store", entry.key, "digest", "its manifest", why) for entry, why in damaged if why]
    return [*(found for found in checked if found), Checked("store", str(store.SCHEMA), len(entries), problems)]


def _distribution(name: str, provider: Provider | None, deep: bool) -> Checked | None:
    """An installed distribution; None if it is not installed."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    folder = Path(str(distribution.locate_file(name.replace("-", "_"))))
    listed = {Path(str(distribution.locate_file(path))): path for path in distribution.files or ()}
    problems = list(_versions(name, distribution))
    if not any(place.is_relative_to(folder) for place in listed):
        return Checked(name, distribution.version, 0, problems, "it runs from a source tree: no RECORD lists its files")
    for place, path in listed.items():
        if path.hash is None or path.suffix == ".pyc":
            continue
        if not place.is_file():
            problems.append(Problem(name, str(path), "missing", "a file", ""))
            continue
        digest = hashlib.new(path.hash.mode, files.content(place)).digest()
        value = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if value != path.hash.value:
            problems.append(Problem(name, str(path), "record", path.hash.value, value))
    for place in sorted(folder.rglob("*")):
        if place.is_file() and place not in listed and "__pycache__" not in place.parts:
            problems.append(Problem(name, place.relative_to(folder.parent).as_posix(), "stray", "no file", "a file"))
    count = len(listed)
    if provider:
        stray = {problem.file for problem in problems if problem.problem == "stray"}
        more = [p for p in _binaries(provider, deep) if not (p.problem == "stray" and _below(folder, p.file) in stray)]
        problems += more
    return Checked(name, distribution.version, count, problems)


def _below(folder: Path, file: str) -> str:
    """The name that a file of a package's data has in RECORD."""
    return f"{folder.name}/data/{file}"


def _folder(provider: Provider, deep: bool) -> Checked:
    """A folder of binaries without RECORD: FI_CUBIN_DIR, or a provider of another name."""
    version = str(_index(provider).get("version", ""))
    note = "there is no RECORD: its index alone is compared"
    return Checked(provider.name, version, len(provider.artifacts), list(_binaries(provider, deep)), note)


def _versions(name: str, distribution: metadata.Distribution) -> Iterator[Problem]:
    if distribution.version != fi_core.__version__:
        yield Problem(name, "METADATA", "version", fi_core.__version__, distribution.version)
    tags = re.findall(r"manylinux_(\d+)_(\d+)_(\w+)", distribution.read_text("WHEEL") or "")
    here = platform.libc_ver()[1] or "0"
    for major, minor, machine in tags:
        if machine != platform.machine():
            yield Problem(name, "WHEEL", "version", machine, platform.machine())
        if (int(major), int(minor)) > tuple(map(int, here.split(".")[:2])):
            yield Problem(name, "WHEEL", "version", f"glibc {major}.{minor}", f"glibc {here}")


def _index(provider: Provider) -> Mapping[str, Any]:
    try:
        found = json.loads(files.content(provider.directory / INDEX))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _binaries(provider: Provider, deep: bool) -> Iterator[Problem]:
    """What is wrong with the files of an index."""
    if provider.refusal:
        if provider.refusal != EMPTY:
            yield Problem(provider.name, INDEX, "version", "an index of this version", provider.refusal)
        return
    compilers = _index(provider).get("compilers")
    listed = {INDEX}
    compared: dict[tuple[str, object, object], list[tuple[str, object, object]]] = {}
    for name, entry in provider.artifacts.items():
        entry = entry if isinstance(entry, dict) else {}
        file = str(entry.get("file", name))
        listed.add(file)
        claim = file, entry.get("sha256"), entry.get("size")
        if claim not in compared:
            compared[claim] = list(_file(provider.directory / file, *claim[1:]))
            for problem in compared[claim]:
                yield Problem(provider.name, file, problem[0], *map(str, problem[1:]))
        for problem in _artifact(provider.directory / file, name, entry, compilers, deep and not compared[claim]):
            yield Problem(provider.name, _label(name, entry), problem[0], *map(str, problem[1:]))
    for place in sorted(provider.directory.rglob("*")):
        if place.is_file() and place.relative_to(provider.directory).as_posix() not in listed:
            yield Problem(provider.name, place.relative_to(provider.directory).as_posix(), "stray", "no file", "a file")


def _label(name: str, entry: Mapping[str, Any]) -> str:
    """The file of an artifact, and its name where the file holds several."""
    file = str(entry.get("file", name))
    return f"{file}/{name.rpartition('/')[2]}" if entry.get("span") else file


def _file(path: Path, sha256: object, size: object) -> Iterator[tuple[str, object, object]]:
    """(problem, expected, found) of a file."""
    try:
        content = files.content(path)
    except (OSError, ValueError) as error:  # ValueError: its name holds a zero byte
        yield "missing", "a file", getattr(error, "strerror", error)
        return
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256 or len(content) != size:
        yield "digest", f"{sha256} {size}", f"{digest} {len(content)}"


def _artifact(
    path: Path, name: str, entry: Mapping[str, Any], compilers: Any, deep: bool
) -> Iterator[tuple[str, object, object]]:
    """(problem, expected, found) of an artifact."""
    artifact = aot.declared(name, entry)
    if artifact is None:
        yield "source", "an artifact of an op", f"{name}, which no op declares"
    else:
        closure, flags = sources.closure(artifact), list(compiler.flags(artifact, shipped=True))
        if entry.get("closure") != closure:
            yield "source", closure, entry.get("closure")
        if entry.get("flags") != flags:
            yield "flags", flags, entry.get("flags")
    made_by = compilers.get(entry.get("compiler")) if isinstance(compilers, dict) else None
    if not isinstance(made_by, dict):
        yield "compiler", "a compiler of the index", entry.get("compiler")
        made_by = {}
    if not deep:
        return
    try:
        unpacked = files.unpacked(path, files.content(path), span_of(entry))
    except (OSError, ValueError) as error:
        yield "digest", "a file that can be unpacked", getattr(error, "strerror", error)
        return
    digest, note = hashlib.sha256(unpacked).hexdigest(), record.note(unpacked)
    if digest != entry.get("unpacked_sha256"):
        yield "digest", entry.get("unpacked_sha256"), digest
    if note.version != made_by.get("version"):
        yield "compiler", made_by.get("version"), note.version
    if artifact and note.target != str(artifact.target):
        yield "compiler", artifact.target, note.target


def rebuild(checked: list[Checked], count: int, seed: int) -> None:
    """Compiles `count` of the packaged binaries, drawn by a seed, and adds a problem for each whose bytes differ.

    Raises CompileError if there is no compiler, or it rejects the unit; ValueError if a variable changes flags.
    """
    by_name = {package.name: package for package in checked}
    choices = [(provider, name) for provider in providers() for name in provider.artifacts]
    for provider, name in random.Random(seed).sample(sorted(choices, key=lambda c: c[1]), min(count, len(choices))):
        entry = provider.artifacts[name]
        artifact = aot.declared(name, entry) if isinstance(entry, dict) else None
        if artifact is None:
            continue  # which `packages` has reported
        aot.check_flags([artifact])
        with tempfile.TemporaryDirectory(prefix="fi-rebuild-") as folder:
            compiler.compile_artifact(artifact, Path(folder))
            digest = hashlib.sha256(files.content(Path(folder) / artifact.file)).hexdigest()
        if digest == entry.get("unpacked_sha256"):
            continue
        theirs, ours = (
            _index(provider).get("compilers", {}).get(entry.get("compiler"), {}),
            record.of_compiler(artifact),
        )
        if all(theirs.get(field) == value for field, value in ours.items()):
            problem, expected = "digest", entry.get("unpacked_sha256")
        else:
            problem, expected, digest = "compiler", theirs.get("identity"), ours["identity"]
        label = _label(name, entry)
        by_name[provider.name].problems.append(Problem(provider.name, label, problem, str(expected), digest))
