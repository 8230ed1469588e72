"""Prebuilt packages for tests: folders that FI_CUBIN_DIR names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import fi_core
from fi_core.runtime.build import compiler, sources
from fi_core.runtime.resolve import provider
from fi_core.runtime.spec.artifact import Artifact


def pack(directory: Path, files: Mapping[Artifact, bytes], **head: object) -> Path:
    """Writes the files and the index that `resolve.provider` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = {}
    for artifact, content in files.items():
        (directory / artifact.file).write_bytes(content)
        listed[artifact.id] = {
            "file": artifact.file,
            "closure": sources.closure(artifact),
            "flags": list(compiler.flags(artifact, shipped=True)),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    index = {"version": fi_core.__version__, "schema": provider.SCHEMA, "abi": compiler.FFI_ABI, "artifacts": listed}
    (directory / "index.json").write_text(json.dumps(index | head))
    return directory
