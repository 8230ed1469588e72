"""The command lines of FlashInfer's guides as they are written, with the script and the sample list that they name."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.test_cases import SMALL
from bench.test_parsing import COMMANDS, SEED_LINES
from fi_bench import backends, cases, catalog, parsing, record
from fi_bench.cli import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAMPLES = (BENCHMARKS / "samples" / "sample_testlist.txt").read_text().splitlines()
STARTED = [line for line in COMMANDS if line.startswith("python")]
MY_BENCHMARKS = "\n".join(line for line in COMMANDS if line not in STARTED)
BRIEF = "--num_iters 2 --dry_run_iters 0"
NEEDS = re.compile(
    r"^\[WARNING\] (\S+) for routine \w+ is not supported on this CPU: backend '\S+' does not run on --device cpu: "
    r"it needs a GPU of compute capability .*; --backends cpu runs the same case\. Skipping\.$",
    re.M,
)


def small(line: str) -> str:
    """The same case with small sizes: the last of two equal flags wins."""
    routine = parsing.parse(shlex.split(line.partition(".py ")[2] or line)).routine
    family = catalog.family_of(routine).name
    more = {"attention": "--head_dim_vo 16", "moe": "--num_experts 32"}.get(family, "")
    return f"{line} {SMALL[family]} {more} {'--s_qo 1' if 'Decode' in routine else ''} {BRIEF}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script, and with the lists where the guides have them; the samples have small sizes."""
    folder = tmp_path / "benchmarks"
    (folder / "samples").mkdir(parents=True)
    (folder / "flashinfer_benchmark.py").symlink_to(BENCHMARKS / "flashinfer_benchmark.py")
    samples = [small(line) for line in SAMPLES if line.startswith("--")]
    (folder / "samples" / "sample_testlist.txt").write_text("\n".join(samples))
    (tmp_path / "my_benchmarks.txt").write_text(MY_BENCHMARKS)
    (folder / "my.txt").write_text(MY_BENCHMARKS)
    monkeypatch.setattr(sys, "path", ["folder of the script", *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


def run(line: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a line in the folder that it is written for; returns the exit code."""
    _, script, *words = shlex.split(line)
    monkeypatch.chdir(checkout if "/" in script else checkout / "benchmarks")
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("line", STARTED)
def test_each_line_runs_or_says_what_it_needs(
    line: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)[2:]
    listed = "--testlist" in words
    asked = () if listed else parsing.parse(words).backends or ()
    runs = "samples" in line or (not listed and (not asked or "auto" in asked))
    code = run(f"{line} {BRIEF}" if listed else small(line) if runs else line, checkout, monkeypatch)
    said = capsys.readouterr().out
    assert ("[PERF] " in said) == runs
    assert ("[ERROR] No backends to test. Exiting." in said) == (listed or not runs)
    assert code == (0 if runs and not listed else 1)
    needy = NEEDS.findall(said)
    assert listed or needy == [name for name in asked if name != "auto"]
    assert said.count("Skipping.") == len(needy), "another reason than the GPU"
    if listed:  # what did not run has a row too, with its reason
        rows = record.read(words[words.index("--output_path") + 1])
        assert {row["status"] for row in rows} == ({"ok", "skipped"} if runs else {"skipped"})


def test_the_samples_have_a_line_of_each_routine() -> None:
    listed = [parsing.parse(shlex.split(line)).routine for line in SAMPLES if line.startswith("--")]
    ready = [r for r in catalog.FAMILY_OF if (found := cases.find(r)) is not None and backends.exists(found)]
    assert set(listed) == set(ready)


@pytest.mark.parametrize("line", SEED_LINES)
def test_each_line_is_checked_on_the_cpu(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{small(line)} --backends cpu --refcheck -v")) == 0
    assert "refcheck ok" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.slow  # alone on the GPU
@pytest.mark.parametrize("line", SEED_LINES)
def test_each_line_is_checked_on_a_gpu(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is written: each backend is right, or says which package it needs. The largest takes 110 GB."""
    code = main([*shlex.split(line), "--refcheck", "--num_iters", "5", "-v"])
    said = capsys.readouterr().out
    if "OutOfMemoryError" in said and torch.cuda.get_device_properties(0).total_memory < 130 << 30:
        pytest.skip("needs a larger GPU")
    assert code == 0, said
    skips = re.findall(r"is not supported on .*: (.*) Skipping\.", said)
    assert "refcheck ok" in said and [skip for skip in skips if "pip install" not in skip] == []


def test_the_script_needs_no_install_and_neither_do_its_workers() -> None:
    line = "flashinfer_benchmark.py --routine rmsnorm --backends cpu --batch_size 4 --hidden_size 64 --isolate " + BRIEF
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *line.split()], cwd=BENCHMARKS, env=bare, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "[PERF] cpu" in done.stdout
