"""The rows that tools/engine_results.py makes of a run of an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import engine_results

TIMES = {"graph_ms_median": 2.0, "gap_ms_median": 0.5, "step_ms_median": 2.5}
HOST = {"A build decode": [10.0, 8], "A build mixed": [50.0, 2], "B build decode": [4.0, 24], "B build mixed": [5.0, 6]}


def test_rows_of_a_run() -> None:
    """A step's host time is that of all its builders; engines that only check and unknown models have no row."""
    lines: list[dict[str, Any]] = [
        {"tag": "pl-deep", "kind": "latency", "batch": 16, "host_us": HOST, **TIMES},
        {"tag": "fa-deep", "kind": "bench", "seed": 3, "tok_s": 1000},
        {"tag": "pl-deep", "kind": "profile", "window": "mixed:0", "steps": 4, "busy_ms": 10.0},
        {"tag": "pl-deep", "kind": "profile", "window": "decode:0", "steps": 16, "busy_ms": 1.0},
        {"tag": "pl-dense", "seconds": {}},
        {"tag": "pl-other", "kind": "bench", "seed": 0, "tok_s": 5},
    ]
    first, second, third = engine_results.rows(lines)
    assert first == {
        "model": "16 layers of Qwen3-8B, bf16", "kernels": "plugin", "vllm": "0.24.0", "batch": 16, "graph_ms": 2.0,
        "gap_ms": 0.5, "step_ms": 2.5, "build_decode_us": 22.0, "build_mixed_us": 65.0,
    }  # fmt: skip
    assert (second["kernels"], second["sampling"], second["tok_s"]) == ("own", "top-k and top-p", 1000)
    assert (third["traced"], third["busy_ms"]) == ("prompts", 2.5)


def test_a_run_replaces_the_rows_of_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, summary = tmp_path / "results.jsonl", tmp_path / "summary.jsonl"
    model = {"model": engine_results.MODELS["deep"], "kernels": "plugin"}
    kept = [model | {"batch": 1, "graph_ms": 9.0}, {"engine": "another"}]
    results.write_text("".join(json.dumps(x) + "\n" for x in [model | {"batch": 16, "graph_ms": 9.0}, *kept]))
    summary.write_text(json.dumps({"tag": "pl-deep", "kind": "latency", "batch": 16, "host_us": HOST, **TIMES}))
    monkeypatch.setattr(engine_results, "RESULTS", results)
    monkeypatch.setattr(engine_results.results, "pages", list)
    engine_results.main([str(summary)])
    other, first, new = map(json.loads, results.read_text().splitlines())
    assert [first, other] == kept and new["graph_ms"] == 2.0
