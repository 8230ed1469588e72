"""Runs commands of fi-core in this process, and the small op that the tests of them ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core import toy
from fi_core.cli import main
from fi_core.registry import ops
from fi_core.runtime.build import sources
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.target import Target

SMALL = "get_seq_lens"  # no axes, and compiled in a moment


def artifacts(target: Target) -> tuple[Artifact, ...]:
    """The files of the small op."""
    return sources.artifacts(toy.chosen(ops()[SMALL], target))


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.err = ""

    def __call__(self, *words: object, code: int = 0) -> str:
        """The output of a command, which must exit with `code`."""
        self.capsys.readouterr()
        got = main([str(word) for word in words])
        out, self.err = self.capsys.readouterr()
        assert got == code, out + self.err
        assert "\x1b" not in out
        return out

    def json(self, *words: object, code: int = 0) -> Any:
        """Its output with --json, parsed."""
        return json.loads(self(*words, "--json", code=code))
