"""Prebuilt artifacts of installed packages (entry points `fi.artifacts`), each checked against today's sources.

A provider is a directory with `index.json`: {"version", "schema", "abi", "commit", "tree", "compilers", "artifacts"}.
`compilers` maps ids to {"name", "version", "identity", "files": sha256 by name}. `artifacts` maps ids to {"file",
"size", "sha256", "span", "unpacked_sha256", "closure", "flags", "compiler", "op", "implementation", "axes"}; size and
sha256 are of the file, span is where the artifact lies in what it unpacks to, null for the whole.
What does not fit is a miss with one logged reason; it never raises and never breaks the import.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fi_core.runtime import files, trust
from fi_core.runtime.build import compiler, diagnose, sources
from fi_core.runtime.env import env
from fi_core.runtime.spec.artifact import Artifact

SCHEMA = 3  # of index.json
GROUP = "fi.artifacts"
ENV_NAME = "FI_CUBIN_DIR"
PACKAGES = ("fi_cubin", "fi_jit_cache")  # found by import in a plain checkout, where there are no entry points
LACKS = "has no "  # and the name of a file that the package does not ship
EMPTY = "it holds no artifacts (a source checkout builds none)"


class Prebuilt(NamedTuple):
    """A file of a package, its sha256, and the part of its content that is the artifact; None: all of it."""

    path: Path
    digest: str
    span: tuple[int, int] | None


class Provider(NamedTuple):
    name: str
    directory: Path
    artifacts: dict[str, Any]  # the index by artifact id
    refusal: str | None  # why nothing of it is used

    def holds(self, kind: str) -> bool:
        """Whether it has any artifact of this kind."""
        return any(name.startswith(f"{kind}/") for name in self.artifacts)

    def find(self, artifact: Artifact) -> tuple[Prebuilt | None, str]:
        """(file, "") or (None, reason); the reason is empty if it has no such artifact."""
        if self.refusal:
            return None, self.refusal
        if artifact.id not in self.artifacts:
            return None, ""
        entry = self.artifacts[artifact.id]
        entry = entry if isinstance(entry, dict) else {}
        file, closure, digest = map(entry.get, ("file", "closure", "sha256"))
        try:
            span = span_of(entry)
        except ValueError:
            file = span = None
        if not (isinstance(file, str) and isinstance(digest, str)) or "\0" in file:
            return None, f"its index says nothing usable of {artifact.id}"
        if os.path.isabs(file) or ".." in file.split("/"):
            return None, f"its index names a file outside the package: {file}"
        if closure != sources.closure(artifact):
            return None, f"{artifact.id} was built from other sources"
        if entry.get("flags") != list(compiler.flags(artifact, shipped=True)):
            return None, f"{artifact.id} was built with other flags"
        path = self.directory / file
        try:
            files.verified(path, digest).close()
        except OSError as error:
            return None, f"{file}: {error.strerror}"
        return Prebuilt(path, digest, span), ""


def span_of(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """The span of an index entry. Raises ValueError if it is none."""
    span = entry.get("span")
    if span is None:
        return None
    if not (isinstance(span, list) and len(span) == 2 and all(type(at) is int for at in span)):
        raise ValueError(f"a span is two numbers; got {span!r}")
    begin, end = span
    if not 0 <= begin <= end:
        raise ValueError(f"a span is in order; got {span}")
    return begin, end


def note(provider: str, reason: str) -> None:
    """Logs one reason once per process; below INFO if nothing is wrong with the package."""
    expected = reason == EMPTY or reason.startswith(LACKS)
    diagnose.once(logging.DEBUG if expected else logging.INFO, f"{provider} skipped: {reason}")


def _version() -> str:
    import fi_core

    return fi_core.__version__


def load_provider(name: str, directory: Path) -> Provider:
    try:
        if name == ENV_NAME:  # what is installed is as trusted as this module; a folder has to be judged
            trust.resolve(directory, trust.owner_of(directory))
        index = json.loads(files.content(directory / "index.json"))
        if not isinstance(index, dict) or not isinstance(index.get("artifacts"), dict):
            raise ValueError("index.json lists no artifacts")
    except FileNotFoundError:
        return Provider(name, directory, {}, f"no index.json in {directory}" if name == ENV_NAME else EMPTY)
    except (OSError, ValueError, RecursionError) as error:
        return Provider(name, directory, {}, f"unreadable index: {error}")
    refusal = None
    if index.get("version") != _version() and not env.disable_version_check:
        refusal = (
            f"its version {index.get('version')} is not that of fi-core, {_version()}: "
            f"pip install {name}=={_version()} (FI_DISABLE_VERSION_CHECK=1 overrides)"
        )
    elif index.get("schema") != SCHEMA or index.get("abi") != compiler.FFI_ABI:
        built, this = (index.get("abi"), index.get("schema")), (compiler.FFI_ABI, SCHEMA)
        refusal = f"built for {built[0]} schema {built[1]}, this is {this[0]} schema {this[1]}"
    return Provider(name, directory, {} if refusal else index["artifacts"], refusal)


@functools.cache
def providers() -> tuple[Provider, ...]:
    """FI_CUBIN_DIR, then installed packages, then packages importable from a checkout."""
    found: dict[str, Path] = {}
    if env.cubin_dir:
        found[ENV_NAME] = env.cubin_dir
    for point in metadata.entry_points(group=GROUP):
        try:
            found[point.dist.name if point.dist else point.name] = Path(point.load())
        except Exception as error:  # a broken companion package must not break this one
            note(point.name, f"{type(error).__name__}: {error}")
    for package in PACKAGES:
        name = package.replace("_", "-")
        spec = importlib.util.find_spec(package) if name not in found else None
        if spec and spec.origin:
            found[name] = Path(spec.origin).parent / "data"
    return tuple(load_provider(name, directory) for name, directory in found.items())
