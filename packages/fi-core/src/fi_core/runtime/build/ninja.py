"""Many artifacts at once: one ninja file, jobs by memory, one progress line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fi_core.runtime import files
from fi_core.runtime.build import compiler, diagnose
from fi_core.runtime.env import env, for_child
from fi_core.runtime.spec.artifact import Artifact

BYTES_PER_JOB = 2 << 30  # R21: a unit must not need more


def jobs() -> int:
    """Compile jobs at once: MAX_JOBS, else by cores and memory."""
    if env.max_jobs:
        return env.max_jobs
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_JOB))


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


def run(directory: Path, progress: bool, max_jobs: int | None = None) -> None:
    """Runs the ninja file of `write`. Raises CompileError of the first unit that fails."""
    import ninja

    # pyright takes `ninja` for this file.
    program = Path(ninja.BIN_DIR) / "ninja"  # pyright: ignore[reportAttributeAccessIssue]
    line = [str(program), "-C", str(directory), f"-j{max_jobs or jobs()}"]
    pipe, child = subprocess.PIPE, for_child(TMPDIR=str(directory))
    with subprocess.Popen(line, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=child) as process:
        assert process.stdout is not None
        output = []
        live = progress and sys.stderr.isatty()
        for text in process.stdout:
            output.append(text)
            if progress and text.startswith("["):
                sys.stderr.write(f"\r\x1b[K{text.rstrip()}" if live else text)
                sys.stderr.flush()
        if live:
            sys.stderr.write("\r\x1b[K")
    if process.returncode:
        whole = "".join(output)
        failed = next((t.split("FAILED: ", 1)[1].strip() for t in output if "FAILED: " in t), "a unit")
        after = whole.split("FAILED: ", 1)[-1]
        raise diagnose.failure(Path(failed.split()[-1]).name, line, "\n".join(after.splitlines()[2:]) or whole)


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
