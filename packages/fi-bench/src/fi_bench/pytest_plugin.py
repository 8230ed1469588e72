"""The pytest fixture `fi_bench`: times a case inside a test and returns its records."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

Measure = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def fi_bench() -> Measure:
    """`fi_bench("--routine rmsnorm --batch_size 8 --hidden_size 4096 --backends cpu torch --refcheck")`.

    Returns one record per backend and point, in order, as the JSONL file would hold them; a mismatch, a failure or a
    skip is an AssertionError that names it.
    """

    def measure(line: str) -> list[dict[str, Any]]:
        from fi_bench import parsing
        from fi_bench.runner import CaseRun

        records: list[dict[str, Any]] = []
        for parsed in parsing.read_lines(shlex.split(line)):
            for point in parsed.points:
                CaseRun(point, "pytest", 0, records.append).run()
        for found in records:
            what = f"{found['routine']} {found['backend']}: {found['status']} {found.get('reason', '')}"
            assert found["status"] == "ok", what.rstrip()
        return records

    return measure
