"""`fi-core replay`: replays dumped calls and prints a verdict for each."""

from __future__ import annotations

import argparse

from fi_core.cli.report import Report, paint
from fi_core.observe.replay import replay_sequence
from fi_core.runtime.build.driver import driver


def _printable(text: str) -> str:
    """The text with escapes for control characters: names and reprs of a dump must not steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def run(args: argparse.Namespace) -> Report:
    found = driver()
    device = args.device or ("cuda" if found and found.gpus else "cpu")
    calls, lines = [], []
    for result in replay_sequence(args.dir, device):
        error, match = result.get("execution_error"), bool(result.get("comparison_match"))
        verdict = "error" if error else "passed" if match else "mismatch"
        calls.append({"dump_dir": result["dump_dir"], "verdict": verdict, "error": error})
        text = f"Error: {error}" if error else verdict.capitalize()
        lines.append(f"{_printable(result['dump_dir'])}: {paint(_printable(text), 'green' if match else 'red')}")
    passed = sum(call["verdict"] == "passed" for call in calls)
    failed = len(calls) - passed
    summary = {"passed": passed, "failed": failed}
    return Report(
        {"calls": calls, "summary": summary},
        [*lines, f"Summary: {passed} passed, {failed} failed/mismatch"],
        ok=not failed,
    )
