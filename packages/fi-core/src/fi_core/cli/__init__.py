"""The command line `fi-core`: runs one command and prints its report as lines or as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from fi_core.cli import arguments
from fi_core.cli.report import Report, UsageError

OK, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0 if all is well, 1 if it failed, 2 if it was called wrongly."""
    try:
        args = arguments.parser().parse_args(argv)
        if args.run is None:
            args.parser.print_help()
            return OK
        return _answer(args)
    except SystemExit as stop:  # argparse has printed its help or an error
        return stop.code if isinstance(stop.code, int) else USAGE
    except BrokenPipeError:  # the reader of a pipe left; what Python flushes at exit has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _answer(args: argparse.Namespace) -> int:
    module, _, function = args.run.partition(":")
    try:
        report: Report = getattr(importlib.import_module(f"fi_core.cli.{module}"), function)(args)
    except UsageError as error:
        parser: argparse.ArgumentParser = args.parser
        parser.error(str(error))
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # FiError, and errors of the system
        report = Report({"error": str(error)}, [], ok=False)
        print(f"fi-core: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(report.data, indent=2, default=str))
    else:
        for line in report.lines:
            print(line)
    sys.stdout.flush()
    return OK if report.ok else FAILED
