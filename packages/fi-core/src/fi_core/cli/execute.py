"""`fi-core exec`: a command in which `import flashinfer` is fi."""

from __future__ import annotations

import argparse
import os
import shutil

from fi_core.cli.report import Report, UsageError
from fi_core.compat.alias import SITE
from fi_core.runtime.env import env


def run(args: argparse.Namespace) -> Report:
    """Replaces this process by the command."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("a command is required, such as fi-core exec -- vllm serve MODEL")
    if shutil.which(command[0]) is None:
        raise UsageError(f"no command {command[0]!r} is found")
    os.execvpe(command[0], command, env.with_module_path(SITE))
