"""Writes the provenance of a folder of wheels and sdists: an in-toto statement with SLSA's predicate, unsigned.

`python tools/provenance.py dist COMMAND...` writes dist/provenance.intoto.json, without a network. The publisher signs
it, or the digests that it holds; nothing in the repository signs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "provenance.intoto.json"
# The packages of the build environment that decide bytes of a wheel.
BUILDERS = ("hatchling", "build", "apache-tvm-ffi", "jinja2", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _program(*words: str) -> str:
    """The first line that a program prints; "" where there is none."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return ""


def _package(name: str) -> dict[str, Any] | None:
    """An installed package by its version and the digest of its RECORD, which lists the digest of each file."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    record = found.read_text("RECORD") or ""
    said = {"record_sha256": hashlib.sha256(record.encode()).hexdigest()}
    return {"uri": f"pkg:pypi/{name}@{found.version}", "annotations": said}


def statement(folder: Path, command: str) -> dict[str, Any]:
    """The statement about every wheel and sdist below a folder. It holds no time: a rebuild gives the same text."""
    built = sorted(path for pattern in ("*.whl", "*.tar.gz") for path in folder.rglob(pattern))
    if not built:
        raise FileNotFoundError(f"{folder}: a folder with wheels or sdists is required; it holds none")
    commit = git("rev-parse", "HEAD")
    image = {
        "distribution": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "c++": _program("g++", "--version"),
        "aarch64 c++": _program("aarch64-linux-gnu-g++", "--version"),
    }
    parameters = {
        "command": command,
        "commit": commit,
        "tree": git("rev-parse", "HEAD^{tree}"),
        "modified": bool(git("status", "--porcelain")),
        "architectures": os.environ.get("FI_CUDA_ARCH_LIST", "all"),
        "ops": os.environ.get("FI_AOT_OPS", "all"),
    }
    packages = [package for name in BUILDERS if (package := _package(name))]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in built],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:fi:build:nox",
                "externalParameters": parameters,
                "internalParameters": image,
                "resolvedDependencies": [{"uri": "git+file:.", "digest": {"gitCommit": commit}}, *packages],
            },
            "runDetails": {"builder": {"id": "urn:fi:builder:local"}},
        },
    }


def main() -> None:
    folder = Path(sys.argv[1])
    text = json.dumps(statement(folder, " ".join(sys.argv[2:])), indent=1) + "\n"
    (folder / NAME).write_text(text)
    print(f"{folder / NAME}: {len(json.loads(text)['subject'])} files")


if __name__ == "__main__":
    main()
