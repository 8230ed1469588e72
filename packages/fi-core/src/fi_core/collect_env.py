"""`python -m fi_core.collect_env` describes this machine for a bug report, as `fi-core collect-env` does."""

from __future__ import annotations

import sys
from typing import Any

from fi_core.cli import main
from fi_core.cli.machine import Sections, fact_lines, facts

__all__ = ["collect_env_info", "format_report", "main"]


def collect_env_info() -> dict[str, dict[str, Any]]:
    """What a bug report needs to know of this machine, by section and name, without secrets."""
    return facts()


def format_report(report: Sections) -> str:
    """The report of `collect_env_info` as text, as `main` prints it."""
    return "\n".join(fact_lines(report))


if __name__ == "__main__":
    sys.exit(main(["collect-env", *sys.argv[1:]]))
