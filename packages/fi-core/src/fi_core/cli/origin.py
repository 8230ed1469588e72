"""Where a file comes from, before a call needs it: nothing is compiled and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fi_core.cli.report import paint
from fi_core.runtime.build import compiler
from fi_core.runtime.env import env
from fi_core.runtime.resolve import answers, kept, misses
from fi_core.runtime.spec.artifact import Artifact


class Origin(NamedTuple):
    """The origin of a file, and the places that do not have it: (who, reason)."""

    artifact: Artifact
    text: str
    path: Path | None
    ready: bool  # a call gets it
    misses: list[tuple[str, str]]

    def data(self) -> dict[str, Any]:
        return {
            "file": self.artifact.file,
            "kind": self.artifact.kind,
            "from": self.text,
            "path": str(self.path) if self.path else None,
            "ready": self.ready,
            "misses": [{"from": who, "why": why} for who, why in self.misses],
        }


def describe_file(origin: Origin) -> list[str]:
    place = f" {origin.path}" if origin.path else ""
    lines = [f"    {origin.artifact.file}: {origin.text if origin.ready else paint(origin.text, 'red')}{place}"]
    return [*lines, *(f"      {who}: {why}" for who, why in origin.misses)]


def origin(artifact: Artifact) -> Origin:
    """The file that a call would use, looking in each place in order without changing anything."""
    missed: list[tuple[str, str]] = []
    for provider, found, why in answers(artifact):
        if found:
            return Origin(artifact, provider.name, found.path, True, missed)
        if (provider.name, why) not in missed:  # it was asked for each target that fits
            missed.append((provider.name, why))
    missed = misses(artifact)
    directory = kept(artifact)
    if directory:
        packages = [miss for miss in missed if miss[0] != "store"]
        return Origin(artifact, "store", directory / artifact.file, True, packages)
    made_by = compiler.program(artifact)
    if env.jit == "off":
        return Origin(artifact, "nowhere: FI_JIT=off forbids to compile it", None, False, missed)
    if made_by is None:
        missing = "CUDA compiler" if artifact.kind == "cubin" else "C++ compiler"
        return Origin(artifact, f"nowhere: there is no {missing} (see fi-core doctor)", None, False, missed)
    return Origin(artifact, f"would compile with {made_by}", None, True, missed)
