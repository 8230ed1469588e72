"""benchmarks/several_gpus.py: its parts pass on a CPU, one that fails is named, and limits are fitted to times."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "several_gpus", raising=False)
    for name, value in {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}.items():
        monkeypatch.setenv(name, value)
    return importlib.import_module("several_gpus")


def test_results_on_a_cpu(script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.test_comm, "_check_all", _nothing)
    assert script.main(["--device", "cpu", "--ranks", "4", "--parts", "results,replays,times"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["part"], row["ranks"]) == ("results", 4) and "error" not in row


def _nothing(rank: int, world: int, device: Any) -> None:
    """The tests check it."""


def test_a_part_that_fails_is_named(script: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The other parts still run, and rows that were measured are kept."""

    def parts(world: int, on_cpu: bool, kept: list[dict[str, Any]], left: Any) -> dict[str, Any]:
        return {"results": lambda: 1 / 0, "times": lambda: kept.append({"ranks": world})}

    script.parts_of = parts
    output = tmp_path / "rows.jsonl"
    assert script.main(["--ranks", "4,8", "--output_path", str(output)]) == 1
    rows = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert [(row["part"], row["ranks"]) for row in rows] == [
        ("results", 4), ("times", 4), ("results", 8), ("times", 8),
    ]  # fmt: skip
    assert all(("ZeroDivisionError" in row.get("error", "")) is (row["part"] == "results") for row in rows)
    assert [json.loads(line)["ranks"] for line in output.read_text().splitlines()] == [4, 8]
    assert script.main(["--seconds", "-1", "--ranks", "4", "--parts", "times"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "no time is left"


def test_limits_are_fitted_to_times(script: Any) -> None:
    """The limit loses least over all messages, by the better of the dtypes of a size; other rows do not count."""
    us = {8192: (4.0, 6.0), 131072: (7.0, 7.5), 1048576: (30.0, 20.0)}
    rows = [
        {"ranks": 4, "case": f"all_reduce 1x{size // 2}", "provider": f"fi, {form} shot", "us": time}
        for size, pair in us.items()
        for form, time in zip(("one", "two"), pair)
    ]
    rows += [
        {"ranks": 4, "case": "all_reduce 1x2048 float32", "provider": "fi, one shot", "us": 9.0},
        {"ranks": 4, "case": "all_reduce 1x4096", "provider": "nccl", "us": 1.0},
        {"ranks": 4, "case": "all_gather 1x4096", "provider": "fi, one shot", "us": 1.0},
    ]
    (found,) = script.fitted(rows)
    assert (found["ranks"], found["one_shot_bytes"], found["two_shot_from_bytes"]) == (4, 131072, 1048576)
    assert [size for size, *_ in found["messages"]] == [8192, 131072, 1048576]
