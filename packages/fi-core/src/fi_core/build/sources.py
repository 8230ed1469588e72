"""The fi-kernels tree: rendering of device units and the content hash of everything a unit reaches."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from fi_core.spec.op import Artifact, Spec
from fi_core.spec.target import CPU

_INCLUDE = re.compile(rb'^\s*#\s*include\s*"(fi/[^"]+)"', re.MULTILINE)


@functools.cache
def root() -> Path:
    """The directory of fi-kernels' sources."""
    import fi_kernels

    return Path(fi_kernels.ROOT)


def include_dir() -> Path:
    return root() / "include"


@functools.cache
def _template():  # type: ignore[no-untyped-def]
    import jinja2

    loader = jinja2.FileSystemLoader(root() / "templates")
    options = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True, "trim_blocks": True}
    return jinja2.Environment(loader=loader, **options).get_template("unit.cu.jinja")


def artifacts(spec: Spec) -> tuple[Artifact, ...]:
    """The files a spec needs: its host module and, on CUDA, its device binary."""
    if spec.target.kind == "cpu":
        return (Artifact(f"{spec.op.name}_cpu", "cpu", CPU, spec.op.source),)
    unit = spec.unit()
    assert unit is not None, f"{spec}: a CUDA implementation has a unit"
    text = _template().render(spec=str(spec), unit=unit)
    return (
        Artifact(f"{spec.op.name}_cuda", "cuda", CPU, spec.op.source),
        Artifact(spec.name, "cubin", spec.target, text),
    )


def text(artifact: Artifact) -> str:
    """The translation unit."""
    return artifact.source if artifact.kind == "cubin" else (root() / artifact.source).read_text()


@functools.cache
def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), tuple(m.decode() for m in _INCLUDE.findall(content))


def headers(artifact: Artifact) -> dict[str, str]:
    """Every project header the unit reaches, transitively, with its sha256."""
    todo = [m.decode() for m in _INCLUDE.findall(text(artifact).encode())]
    seen: dict[str, str] = {}
    while todo:
        name = todo.pop()
        if name not in seen:
            seen[name], nested = _read(include_dir() / name)
            todo.extend(nested)
    return seen


def closure(artifact: Artifact) -> str:
    """sha256 over the unit and its headers: what a prebuilt must have been made from to be used."""
    digest = hashlib.sha256(text(artifact).encode())
    for name, content in sorted(headers(artifact).items()):
        digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()
