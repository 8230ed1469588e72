"""benchmarks/beside_torch.py: every op that torch has is drawn beside it, and timed in turns."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_bench import cases, parsing
from fi_bench.catalog import family_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "beside_torch", raising=False)
    return importlib.import_module("beside_torch")


def test_every_op_with_a_torch_peer_is_drawn(script: Any) -> None:
    """An op that needs several ranks is left out; a new op fails until the preset has sizes for it."""
    has_peer = {
        case.routine
        for case in cases.every()
        if case.torch and not any(flag.name == "ranks" for flag in family_of(case.routine).flags)
    }
    assert len(has_peer) > 100
    assert [line for line in parsing.read_lines(["--preset", "cpu-grid"]) if line.error] == []
    drawn = script.points("cpu-grid", 1, 2, None)
    assert {point.routine for point in drawn} == has_peer
    again, other = script.points("cpu-grid", 1, 2, None), script.points("cpu-grid", 2, 2, None)
    assert drawn == again and drawn != other


def test_both_sides_are_timed_on_each_number_of_threads(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    output = tmp_path / "rows.jsonl"
    words = ["--routine", "rmsnorm", "--draw", "2", "--threads", "1", "2", "--seconds", "0.01"]
    try:
        script.main([*words, "--output", str(output)])
    finally:
        torch.set_num_threads(before)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["routine"], row["threads"]) for row in rows] == [("rmsnorm", 1), ("rmsnorm", 2)] * 2
    assert all(row["fi"] > 0 and row["torch"] > 0 and "hidden_size" in row["case"] for row in rows)
    assert capsys.readouterr().out.count("geometric mean") == 2
