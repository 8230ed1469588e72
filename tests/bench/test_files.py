"""Files of the command line that are none: each is one line of error before anything is measured, never a hang."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from fi_bench import calibrate, cli, record
from fi_bench.errors import USAGE

RMSNORM = ["--routine", "rmsnorm", "--batch_size", "2", "--hidden_size", "64", "--device", "cpu"]
TREES = ["compare-trees", "old", "new", "--preset", "tiny"]


@pytest.mark.parametrize(
    "words",
    [
        [*RMSNORM, "--output_path", ""],
        [*RMSNORM, "--output_path", "/dev/full"],
        [*RMSNORM, "--timeout", "nan"],
        [*RMSNORM, "--timeout", "inf"],
        ["--testlist", "/dev/zero"],
        ["startup", "--device", "cpu", "--output_path", ""],
        ["startup", "--device", "cpu", "--output_path", "/dev/full"],
        [*TREES, "--output_path", "/dev/full"],
        [*TREES, "--seconds", "nan"],
        ["calibrate", "--device", "cpu", "--output", "/dev/full"],
        ["calibrate", "--device", "cpu", "--output", "."],
        ["report", "/dev/zero"],
        ["gate", "/dev/zero"],
        ["compare", "/dev/zero", "/dev/zero"],
        ["rerun", "x", "/dev/full"],
    ],
    ids=" ".join,
)
@pytest.mark.timeout(60)
def test_one_line_and_no_measurement(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "measure_ceilings", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("fi_bench.startup.first_calls", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("fi_bench.trees.interleave._greeted", lambda *_: pytest.fail("started"))
    assert cli.main(words) == USAGE
    out = capsys.readouterr()
    (line,) = (out.out + out.err).strip().splitlines()
    assert (words[-2] if words[-2].startswith("--") else words[-1]) in line


def test_results_may_come_through_a_pipe(tmp_path: Path) -> None:
    fifo = tmp_path / "results.jsonl"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_text(json.dumps({"schema_version": -1}) + "\n"))
    writer.start()
    with pytest.raises(Exception, match="not a record of schema"):
        record.read(fifo)
    writer.join()
