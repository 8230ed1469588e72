"""The fi-kernels tree: rendering of device units and the content hash of everything a unit reaches."""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from fi_core.spec.op import Artifact, Spec, Unit
from fi_core.spec.target import CPU

_INCLUDE = re.compile(rb'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


@functools.cache
def root() -> Path:
    """The directory of fi-kernels' sources."""
    import fi_kernels

    return Path(fi_kernels.ROOT)


def include_dir() -> Path:
    return root() / "include"


def include_dirs(artifact: Artifact) -> tuple[Path, ...]:
    """Where the headers of a unit are looked for, the compiler's own places apart."""
    return (include_dir(), *map(Path, artifact.includes))


def artifacts(spec: Spec) -> tuple[Artifact, ...]:
    """The files a spec needs: its host module and, on CUDA, its device binary."""
    if spec.target.kind == "cpu":
        return (Artifact(f"{spec.op.name}_cpu", "cpu", CPU, spec.op.source),)
    unit = spec.unit()
    assert unit is not None, f"{spec}: a CUDA implementation has a unit"
    return (
        Artifact(f"{spec.op.name}_cuda", "cuda", CPU, spec.op.source),
        Artifact(spec.name, "cubin", spec.target, render(str(spec), unit), unit.flags),
    )


def render(title: str, unit: Unit) -> str:
    """The text of a device unit: for each entry a `__global__` function that calls the template it instantiates."""
    variant = f"{unit.variant}\n" if unit.variant else ""
    more = ", const __grid_constant__ fi::Variant::Arguments arguments" if unit.variant else ""
    arguments = ", arguments" if unit.variant else ""
    text = f'// {title}\n{variant}#include "{unit.header}"\n'
    for entry in unit.entries:
        bounds = f"{entry.threads}, {entry.blocks_per_sm}" if entry.blocks_per_sm else f"{entry.threads}"
        text += f"""
extern "C" __global__ void __launch_bounds__({bounds})
{entry.name}(const __grid_constant__ fi::{unit.params} params{more}) {{
  fi::{entry.body}(params{arguments});
}}
"""
    return text


def text(artifact: Artifact) -> str:
    """The translation unit."""
    return artifact.source if artifact.rendered else (root() / artifact.source).read_text()


def _includes(content: bytes) -> tuple[str, ...]:
    return tuple(m.decode() for m in _INCLUDE.findall(content))


@functools.cache
def _read(path: Path, *_state: int) -> tuple[str, tuple[str, ...]]:
    """sha256 and includes of a header, once for each state of the file."""
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), _includes(content)


def _locate(name: str, includer: str, places: Iterable[Path]) -> tuple[str, Path] | None:
    """An included file, beside its includer or below one of the places; None for headers of the system."""
    for choice in (posixpath.normpath(posixpath.join(posixpath.dirname(includer), name)), name):
        for place in places:
            if (place / choice).is_file():
                return choice, place / choice
    return None


def headers(artifact: Artifact) -> dict[str, str]:
    """Every project header the unit reaches, transitively, with its sha256."""
    places = include_dirs(artifact)
    todo = [(name, "") for name in _includes(text(artifact).encode())]
    seen: dict[str, str] = {}
    while todo:
        found = _locate(*todo.pop(), places)
        if found and found[0] not in seen:
            name, path = found
            state = path.stat()
            seen[name], nested = _read(path, state.st_mtime_ns, state.st_size)
            todo.extend((other, name) for other in nested)
    return seen


def closure(artifact: Artifact) -> str:
    """sha256 over the unit and its headers: what a prebuilt must have been made from to be used."""
    digest = hashlib.sha256(text(artifact).encode())
    for name, content in sorted(headers(artifact).items()):
        digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()
