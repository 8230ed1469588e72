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
    """A step's host time is that of all its builders, tokens/s the median of the batches of a kind; engines that only
    check and unknown models have no row.
    """
    lines: list[dict[str, Any]] = [
        {"tag": "pl-deep", "kind": "latency", "batch": 16, "host_us": HOST, **TIMES},
        *({"tag": "fa-deep", "kind": "bench", "seed": seed, "tok_s": 1000 + seed} for seed in (3, 5, 19)),
        {"tag": "fl-deep", "kind": "bench", "seed": 2, "tok_s": 900},
        {"tag": "pl-deep", "kind": "profile", "window": "mixed:0", "steps": 4, "busy_ms": 10.0},
        {"tag": "pl-deep", "kind": "profile", "window": "decode:0", "steps": 16, "busy_ms": 1.0},
        {"tag": "pl-dense", "seconds": {}},
        {"tag": "pl-other", "kind": "bench", "seed": 0, "tok_s": 5},
    ]
    first, second, third, fourth = engine_results.rows(lines)
    assert first == {
        "model": "16 layers of Qwen3-8B, bf16", "kernels": "plugin", "vllm": "0.24.0", "batch": 16, "graph_ms": 2.0,
        "gap_ms": 0.5, "step_ms": 2.5, "build_decode_us": 22.0, "build_mixed_us": 65.0,
    }  # fmt: skip
    assert (second["traced"], second["busy_ms"]) == ("prompts", 2.5)
    assert (third["kernels"], third["sampling"], third["tok_s"]) == ("own", "top-k and top-p", 1005)
    assert (fourth["kernels"], fourth["sampling"], fourth["tok_s"]) == ("FlashInfer", "greedy", 900)


def test_gains_over_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times divide the other way than tokens/s, and FlashInfer has a column where a run had it."""
    lines: list[dict[str, Any]] = [
        line
        for tag, ms, tok_s in (("fa-deep", 3.0, 1000), ("fl-deep", 4.0, 900), ("pl-deep", 2.0, 1500))
        for line in (
            {"tag": tag, "kind": "latency", "batch": 1, "host_us": HOST, **TIMES, "step_ms_median": ms},
            {"tag": tag, "kind": "bench", "seed": 0, "tok_s": tok_s},
        )
    ]
    found = [*engine_results.rows(lines)]
    monkeypatch.setattr(engine_results.results.layers, "rows", lambda name: found)
    _, _, step, tokens = engine_results.results.layers.stages_table().splitlines()
    cells = [[x.strip() for x in line.split("|")[4:-1]] for line in (step, tokens)]
    assert cells == [["2.00 ms", "1.50x", "2.00x", "2.00 ms", "1.00x"], ["1,500", "1.50x", "1.67x", "", ""]]


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
