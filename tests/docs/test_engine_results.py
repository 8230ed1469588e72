"""The rows that tools/engine_results.py makes of a run of an engine."""

from __future__ import annotations

from typing import Any

import engine_results

TIMES = {"graph_ms_median": 2.0, "gap_ms_median": 0.5, "step_ms_median": 2.5}
HOST = {"A build decode": [10.0, 8], "A build mixed": [50.0, 2], "B build decode": [4.0, 24], "B build mixed": [5.0, 6]}


def test_rows_of_a_run() -> None:
    """A step's host time is that of all its builders; engines that only check and unknown models have no row."""
    lines: list[dict[str, Any]] = [
        {"tag": "pl-deep", "kind": "latency", "batch": 16, "host_us": HOST, **TIMES},
        {"tag": "fa-deep", "kind": "bench", "seed": 3, "tok_s": 1000},
        {"tag": "pl-deep", "kind": "profile", "busy_ms": 1.0},
        {"tag": "pl-dense", "seconds": {}},
        {"tag": "pl-other", "kind": "bench", "seed": 0, "tok_s": 5},
    ]
    first, second = engine_results.rows(lines)
    assert first == {
        "model": "16 layers of Qwen3-8B, bf16", "kernels": "plugin", "vllm": "0.24.0", "batch": 16, "graph_ms": 2.0,
        "gap_ms": 0.5, "step_ms": 2.5, "build_decode_us": 22.0, "build_mixed_us": 65.0,
    }  # fmt: skip
    assert (second["kernels"], second["sampling"], second["tok_s"]) == ("own", "top-k and top-p", 1000)
