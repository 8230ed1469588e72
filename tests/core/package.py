"""Prebuilt packages and a mock driver for tests: folders that FI_CUBIN_DIR and LD_LIBRARY_PATH name."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import fi_core
from fi_core.build import compiler, sources
from fi_core.spec.op import Artifact


def pack(directory: Path, files: Mapping[Artifact, bytes], **head: object) -> Path:
    """Writes the files and the index that `resolve.provider` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = {}
    for artifact, content in files.items():
        (directory / artifact.file).write_bytes(content)
        listed[artifact.id] = {
            "file": artifact.file,
            "closure": sources.closure(artifact),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    index = {"version": fi_core.__version__, "schema": compiler.SCHEMA, "abi": compiler.FFI_ABI, "artifacts": listed}
    (directory / "index.json").write_text(json.dumps(index | head))
    return directory


def build_driver(library: Path) -> Path:
    """Compiles the mock of libcuda."""
    source = Path(__file__).with_name("mock_driver.cc")
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library
