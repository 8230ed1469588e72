"""`fi-core exec`: a command in which `import flashinfer` is fi, and the command `flashinfer` is `fi-core`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shlex
import shutil
import sys
from pathlib import Path

from fi_core.cli.report import Report, UsageError
from fi_core.compat.alias import SITE
from fi_core.runtime import files
from fi_core.runtime.env import env


def run(args: argparse.Namespace) -> Report:
    """Replaces this process by the command."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("a command is required, such as fi-core exec -- vllm serve MODEL")
    places = env.with_places(SITE, _programs())
    if shutil.which(command[0], path=places["PATH"]) is None:
        raise UsageError(f"no command {command[0]!r} is found")
    os.execvpe(command[0], command, places)


def _programs() -> Path:
    """The folder of the program `flashinfer`. It names this Python, so it is written where it is missing; a store that
    cannot be written leaves the command out.
    """
    text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fi_core "$@"\n'
    program = env.cache_dir / "programs" / hashlib.sha256(text.encode()).hexdigest()[:16] / "flashinfer"
    if not program.exists():
        with contextlib.suppress(OSError):
            whole = program.with_name(f".{os.getpid()}")  # another process may start the program meanwhile
            files.write(whole, text)
            whole.chmod(0o700)
            whole.replace(program)
    return program.parent
