"""`compare-trees`: two checkouts in turns; a slower case, a failing case and a dead process cost one row each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fi_bench.cli import main
from fi_bench.trees import interleave

ROOT = Path(__file__).resolve().parents[2]
# What the checkout under test does differently: rmsnorm waits, silu_and_mul raises, gelu_and_mul kills its process.
DIFFERENCE = """

import dataclasses, os, signal, time

from fi_bench import derived


def _late(call):
    def run(f, x):
        time.sleep(0.001)
        return call(f, x)
    return run


def _broken(f, x):
    raise RuntimeError("no such kernel")


def _deadly(f, x):
    os.kill(os.getpid(), signal.SIGKILL)


_CALLS = {"rmsnorm": _late(CASES[0].call), "silu_and_mul": _broken, "gelu_and_mul": _deadly}
CASES = tuple(
    dataclasses.replace(c, call=_CALLS.get(c.routine, c.call))
    for c in (*CASES, derived.case("silu_and_mul"), derived.case("gelu_and_mul"))
)
"""
LINES = """\
--routine rmsnorm --batch_size 4 --hidden_size 64 --case_tag norm
--routine silu_and_mul --batch_size 4 --hidden_size 64 --case_tag silu
--routine gelu_and_mul --batch_size 4 --hidden_size 64 --case_tag gelu
--routine BatchDecodeWithPagedKVCacheWrapper --backends auto --batch_size 2 --s_kv 20 --num_qo_heads 4 \
--num_kv_heads 2 --head_dim_qk 64 --page_size 16 --case_tag decode
"""


def checkout(folder: Path) -> Path:
    """Links to the packages of this checkout."""
    (folder / "packages").mkdir(parents=True)
    for package in (ROOT / "packages").iterdir():
        (folder / "packages" / package.name).symlink_to(package)
    return folder


def changed(folder: Path) -> Path:
    """A checkout whose fi-bench is a copy with the difference."""
    tree = checkout(folder)
    (tree / "packages" / "fi-bench").unlink()
    shutil.copytree(ROOT / "packages" / "fi-bench" / "src", tree / "packages" / "fi-bench" / "src")
    cases = tree / "packages" / "fi-bench" / "src" / "fi_bench" / "cases"
    with (cases / "norm.py").open("a") as file:
        file.write(DIFFERENCE)
    return tree


def test_two_checkouts_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old, new = checkout(tmp_path / "old"), changed(tmp_path / "new")
    listed, out = tmp_path / "cases.txt", tmp_path / "trees.jsonl"
    listed.write_text(LINES)
    words = ["compare-trees", str(old), str(new), "--testlist", str(listed), "--rounds", "5", "--device", "cpu"]
    assert main([*words, "--output_path", str(out)]) == 3
    shown = capfd.readouterr().out
    head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert head["old"]["fi_core"].startswith(str(old))
    assert head["new"]["fi_bench"].startswith(str(new))
    found = {(row["case"], row["metric"]): row for row in rows}
    assert set(found) == {("norm", "cpu"), ("silu", ""), ("gelu", ""), ("decode", "cpu"), ("decode", "host plan")}
    norm = found["norm", "cpu"]
    assert norm["verdict"] == "SLOWER"
    assert norm["ratio"] > 2
    assert len(norm["old_ns"]) == len(norm["new_ns"]) == 5
    assert all(row["same_inputs"] and row["same_outputs"] for row in rows if row["status"] == "ok")
    assert found["silu", ""]["reason"] == "NEW: RuntimeError: no such kernel"
    assert found["gelu", ""]["reason"] == "NEW: exit code -9"
    assert "norm rmsnorm" in shown
    assert "[ERROR] silu silu_and_mul: NEW: RuntimeError: no such kernel" in shown


def row(old: list[float], new: list[float]) -> dict[str, object]:
    return {"status": "ok", **interleave.ratios(old, new)}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ([1.0] * 9, "SAME"),
        ([1.05] * 9, "SLOWER"),
        ([0.95] * 9, "FASTER"),
        ([1.01] * 9, "SAME"),
        ([0.9, 1.2, 1.3, 0.8, 1.1, 1.0, 1.4, 0.9, 1.1], "AMBIGUOUS"),
        ([1.0, 1.03, 1.0, 1.03, 1.0, 1.03, 1.0, 1.03, 1.0], "AMBIGUOUS"),
    ],
)
def test_verdicts(new: list[float], verdict: str) -> None:
    assert interleave.verdict(row([1.0] * 9, new), 0.02) == verdict


def test_drift_that_hits_both_sides_cancels() -> None:
    old = [1.0 + 0.1 * i for i in range(9)]
    assert interleave.verdict(row(old, [1.05 * x for x in old]), 0.02) == "SLOWER"


def test_a_side_imports_its_own_packages(tmp_path: Path) -> None:
    side = interleave.Side("OLD", checkout(tmp_path / "tree"))
    try:
        hello = side.ask(do="hello")
    finally:
        side.stop()
    assert Path(hello["fi_core"]).is_relative_to(tmp_path)
    assert Path(hello["fi_bench"]).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["/nowhere", "."], "/nowhere: not a checkout"),
        ([str(ROOT), str(ROOT), "--rounds", "2"], "--rounds must be at least 5"),
        ([str(ROOT), str(ROOT), "--preset", "tinny"], "did you mean 'tiny'?"),
        ([str(ROOT), str(ROOT), "--preset", "tiny", "--only", "zzz"], "leaves no case"),
    ],
)
def test_bad_use_is_one_line(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-trees", *words]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1
