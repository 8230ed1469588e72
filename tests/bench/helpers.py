"""Records as a run would write them, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fi_bench import parsing, record, stats


def made(
    line: str = "--routine rmsnorm --batch_size 4 --hidden_size 64",
    backend: str = "cpu",
    median_ns: float = 1000.0,
    trial: int = 0,
    run_id: str = "r",
    timestamp: str = "2026-01-01T00:00:00Z",
    **more: Any,
) -> dict[str, Any]:
    """One measured record."""
    args = parsing.parse(line.split())
    params = record.parameters(args)
    key = record.case_key(args.routine, args)
    samples = [median_ns * f for f in (0.99, 1.0, 1.0, 1.01, 1.0, 1.0)]
    found = {
        "schema_version": record.SCHEMA_VERSION,
        "record_id": record.record_id(run_id, key, backend, trial),
        "run_id": run_id,
        "trial": trial,
        "timestamp": timestamp,
        "case_key": key,
        "routine": args.routine,
        "backend": backend,
        "resolved_backend": backend,
        "params": params,
        "args": {k: v for k, v in vars(args).items() if k not in params},
        "repro": f"fi-bench {line}",
        "device": "cpu",
        "env": {
            "cpu": "test cpu",
            "threads": 2,
            "fi_core": "0",
            "commit": None,
            "cuda": None,
            "packages": {"torch": "2"},
        },
        "status": "ok",
        "timer": "wall",
        "regime": "sustained",
        "cache": {"asked": "warm", "how": "none", "copies": 1},
        "cache_state": "warm",
        "clocks": {},
        "warnings": [],
        "samples_ns": samples,
        "stats": stats.summary(samples),
        "work": {"flops": 5 * 4 * 64, "bytes": 4 * 4 * 64},
        "derived": {"tflops": 1280 / median_ns / 1e3, "tb_per_sec": 1024 / median_ns / 1e3},
    }
    return {**found, **more}


def trials(medians: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    return [made(median_ns=m, trial=i, **more) for i, m in enumerate(medians)]


def write(path: Any, records: Sequence[dict[str, Any]]) -> str:
    sink = record.Sink(str(path))
    for r in records:
        sink.write(r)
    return str(path)
