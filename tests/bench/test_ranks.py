"""Collectives in `fi-bench`: several processes of this host, one row for all; a rank that dies costs the row."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from fi_bench import record
from fi_bench.cli import main

REDUCE = "--routine allreduce_fusion --num_tokens 5 --hidden_size 128 --device cpu"
EXCHANGE = "--routine moe_a2a_dispatch_combine --num_tokens 9 --hidden_size 128 --num_experts 12 --top_k 3 --device cpu"


@pytest.mark.parametrize("line", [f"{REDUCE} --pattern ar_residual_rmsnorm --ranks 2", f"{EXCHANGE} --ranks 3"])
def test_ranks_are_started_checked_and_timed(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.jsonl"
    more = f"--backends cpu torch --num_iters 4 --validate --output_path {out} -v"
    assert main([*line.split(), *more.split()]) == 0
    said = capsys.readouterr().out
    assert said.count("[PERF] ") == said.count("refcheck ok") == 2, "one line a backend, not a rank"
    rows = record.read(out)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert {row["params"]["ranks"] for row in rows} == {int(line[-1])}
    outputs = len({d["output"] for d in rows[0]["refcheck"]["outputs"]})
    assert len(rows[0]["refcheck"]["outputs"]) == outputs * int(line[-1]), "of every rank"
    assert all(len(row["samples_ns"]) == 4 for row in rows)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (f"{REDUCE} --ar_backend mnnvl", "--ar_backend must be auto or trtllm"),
        (f"{EXCHANGE} --ranks 5", "--num_experts must be a multiple of --ranks (5), got 12"),
        (f"{EXCHANGE} --real_math", "the case has no --real_math"),
    ],
)
def test_what_a_collective_does_not_take_is_said(line: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), "--backends", "cpu"]) == 1
    assert word in capsys.readouterr().out


def test_a_wrong_result_of_the_ranks_ends_the_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process of the group asks for the sum alone where the residual and the norm are checked."""
    wrong = "from fi_bench.cases import comm\ncomm._PATTERNS['ar_residual_rmsnorm'] = 0\n"
    (tmp_path / "sitecustomize.py").write_text(wrong)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert main([*REDUCE.split(), "--pattern", "ar_residual_rmsnorm", "--backends", "cpu", "torch", "--refcheck"]) == 5
    said = capsys.readouterr().out
    assert "Output mismatch between backends" in said
    assert "[PERF]" not in said


def children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for found in lists for word in found.read_text().split()]


def kill_a_rank() -> None:
    """The first process that a process of this one starts for fi-bench."""
    for _ in range(600):
        time.sleep(0.1)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of processes that have just ended
            for worker in children(os.getpid()):
                for rank in children(worker):
                    if b"_rank" in Path(f"/proc/{rank}/cmdline").read_bytes().split(b"\0"):
                        os.kill(rank, signal.SIGKILL)
                        return


def test_a_rank_that_dies_costs_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killer = threading.Thread(target=kill_a_rank)
    killer.start()
    assert main([*REDUCE.split(), "--backends", "cpu", "--output_path", str(tmp_path / "r.jsonl")]) == 1
    killer.join()
    row = record.read(tmp_path / "r.jsonl")[0]
    assert row["status"] == "crashed"
    assert "[ERROR] cpu for routine allreduce_fusion: ended with exit code 1" in capsys.readouterr().out
