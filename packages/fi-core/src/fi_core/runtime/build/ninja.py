"""Build files for people and editors: build.ninja and compile_commands.json. Nothing here runs them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fi_core.runtime import files
from fi_core.runtime.build import compiler
from fi_core.runtime.spec.artifact import Artifact


def _escape(word: str) -> str:
    return word.replace("$", "$$")


def write(artifacts: Sequence[Artifact], directory: Path) -> Path:
    """Writes units and a build.ninja whose targets are `directory/<key>/<file>`; unchanged files are left alone."""
    lines = ["ninja_required_version = 1.5", "rule compile", "  command = $command", "  description = $name", ""]
    for artifact in artifacts:
        place = directory / compiler.key(artifact)
        files.make(place)
        compiler.write_unit(artifact, place)
        command = shlex.join(compiler.command(artifact, place))
        inputs = compiler.unit_path(artifact, place)
        lines += [
            f"build {_escape(str(place / artifact.file)).replace(' ', '$ ').replace(':', '$:')}: compile "
            f"{_escape(str(inputs)).replace(' ', '$ ').replace(':', '$:')}",
            f"  command = {_escape(command)}",
            f"  name = {artifact.name} [{artifact.target}]",
            "",
        ]
    path = directory / "build.ninja"
    files.write_if_new(path, "\n".join(lines))
    return path


def compile_commands(artifacts: Sequence[Artifact], directory: Path) -> list[dict[str, str]]:
    """The content of compile_commands.json for editors: host modules, and the units that `write` rendered."""
    entries = []
    for artifact in artifacts:
        place = directory / compiler.key(artifact)
        unit = compiler.unit_path(artifact, place)
        entries.append(
            {"directory": str(place), "command": shlex.join(compiler.command(artifact, place)), "file": str(unit)}
        )
    return entries
