"""`fi-bench startup`: the first call of a function, with an empty kernel store and with a warm one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fi_core
from fi_bench import startup
from fi_bench.cli import main
from fi_bench.startup.calls import arguments


def test_a_warm_store_makes_the_first_call_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "startup.jsonl"
    assert main(["startup", "--device", "cpu", "--only", "segment_packbits", "--output_path", str(out)]) == 0
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["function"], row["device"]) == ("segment_packbits", "cpu")
    assert row["cold_s"] > 2 * row["warm_s"] > 0, "the first process compiles"
    assert "segment_packbits" in capsys.readouterr().out


def test_a_call_that_fails_is_a_row_with_its_reason() -> None:
    row = startup.first_calls("no_such_function", "cpu")
    assert "KeyError" in row["reason"]
    assert "cold_s" not in row


def test_a_call_without_an_end_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_MOST_SECONDS", 0.01)
    assert startup.first_calls("packbits", "cpu")["reason"] == "not done after 0.01 s"


def test_names_lead_to_public_functions(capsys: pytest.CaptureFixture[str]) -> None:
    for name in arguments("cpu"):
        function = fi_core
        for word in name.split("."):
            function = getattr(function, word)
        assert callable(function)
    assert main(["startup", "--device", "cpu", "--only", "zzz"]) == 2
    assert "leaves no function" in capsys.readouterr().err
