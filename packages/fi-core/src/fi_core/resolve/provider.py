"""Prebuilt artifacts of installed packages (entry points `fi.artifacts`), each checked against today's sources.

A provider is a directory with `index.json`: {"version", "schema", "abi", "artifacts": {id: {"file", "closure", "sha256"}}}.
What does not fit is a miss with one logged reason; it never raises and never breaks the import.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fi_core.build import compiler, diagnose, sources
from fi_core.env import env
from fi_core.spec.op import Artifact

GROUP = "fi.artifacts"
PACKAGES = ("fi_cubin", "fi_jit_cache")  # found by import in a plain checkout, where there are no entry points


class Provider(NamedTuple):
    name: str
    directory: Path
    index: dict[str, Any]
    refusal: str | None  # why nothing of it is used

    def find(self, artifact: Artifact) -> tuple[Path | None, str]:
        """(file, "") or (None, why not)."""
        if self.refusal:
            return None, self.refusal
        entry = self.index.get("artifacts", {}).get(artifact.id)
        if entry is None:
            return None, f"has no {artifact.id}"
        if entry["closure"] != sources.closure(artifact):
            return None, f"{artifact.id} was built from other sources"
        path = self.directory / entry["file"]
        try:
            content = path.read_bytes()
        except OSError as error:
            return None, f"{entry['file']}: {error}"
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            return None, f"{entry['file']} does not match its digest"
        return path, ""


@functools.cache
def _once(message: str) -> None:
    diagnose.logger().info(message)


def note(provider: str, reason: str) -> None:
    """Logs one reason once per process."""
    _once(f"{provider} skipped: {reason}")


def _version() -> str:
    import fi_core

    return fi_core.__version__


def _load(name: str, directory: Path) -> Provider:
    try:
        index = json.loads((directory / "index.json").read_bytes())
        if not isinstance(index, dict):
            raise ValueError("index.json is not an object")
    except FileNotFoundError:
        return Provider(name, directory, {}, "it holds no artifacts (a source checkout builds none)")
    except (OSError, ValueError) as error:
        return Provider(name, directory, {}, f"unreadable index: {error}")
    refusal = None
    if index.get("version") != _version() and not env.disable_version_check:
        refusal = (
            f"its version {index.get('version')} is not that of fi-core, {_version()}: "
            f"pip install {name}=={_version()} (FI_DISABLE_VERSION_CHECK=1 overrides)"
        )
    elif index.get("schema") != compiler.SCHEMA or index.get("abi") != compiler.FFI_ABI:
        refusal = f"built for {index.get('abi')} schema {index.get('schema')}, this is {compiler.FFI_ABI} schema {compiler.SCHEMA}"
    return Provider(name, directory, index, refusal)


@functools.cache
def providers() -> tuple[Provider, ...]:
    """FI_CUBIN_DIR, then installed packages, then packages importable from a checkout."""
    found: dict[str, Path] = {}
    if env.cubin_dir:
        found["FI_CUBIN_DIR"] = env.cubin_dir
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
    return tuple(_load(name, directory) for name, directory in found.items())
