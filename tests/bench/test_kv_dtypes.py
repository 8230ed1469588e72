"""benchmarks/kv_dtypes.py: drawn shapes run over both caches, the same for the same seed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_drawn_shapes_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("kv_dtypes", "turns"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    script = importlib.import_module("kv_dtypes")
    found = []
    for _ in range(2):
        assert script.main(["--device", "cpu", "--cases", "4", "--seed", "3"]) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert found[0] == found[1] and [row["kind"] for row in found[0]] == ["decode", "prefill"] * 2
    assert all(row["finite"] for row in found[0])
