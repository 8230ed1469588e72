"""compare and gate: verdicts by simulation, refusals, groups and rules."""

from __future__ import annotations

import fnmatch
import json
import random
import statistics
from pathlib import Path

import pytest

from bench.helpers import made, trials, write
from fi_bench import compare, presets, record
from fi_bench.cli import main
from fi_bench.gate import load


def processes(rng: random.Random, true: float, drift: float, n: int = 5) -> list[float]:
    """Medians of n processes: each has an offset of its own, and 30 samples with noise of 0.5 %."""
    found = []
    for _ in range(n):
        centre = true * (1 + rng.gauss(0, drift))
        found.append(statistics.median(centre * (1 + rng.gauss(0, 0.005)) for _ in range(30)))
    return found


@pytest.mark.parametrize("drift", [0.002, 0.005, 0.01, 0.02])
def test_equal_sides_are_seldom_called_different(drift: float) -> None:
    rng = random.Random(11)
    verdicts = [compare.judge(processes(rng, 100, drift), processes(rng, 100, drift)).verdict for _ in range(600)]
    assert sum(v in ("FASTER", "SLOWER") for v in verdicts) / 600 <= 0.05
    if drift <= 0.005:
        assert verdicts.count("SAME") / 600 >= 0.95


def test_a_true_three_percent_is_found() -> None:
    rng = random.Random(12)
    verdicts = [compare.judge(processes(rng, 100, 0.005), processes(rng, 103, 0.005)).verdict for _ in range(300)]
    assert verdicts.count("SLOWER") / 300 >= 0.9
    assert verdicts.count("FASTER") == 0
    more = [compare.judge(processes(rng, 100, 0.01, 15), processes(rng, 97, 0.01, 15)).verdict for _ in range(100)]
    assert more.count("FASTER") >= 80


def test_few_processes_are_never_enough() -> None:
    verdict = compare.judge([100.0] * 4, [200.0] * 9)
    assert verdict.verdict == "AMBIGUOUS"
    assert "--trials 5" in verdict.why


def test_below_the_threshold_is_never_a_difference() -> None:
    a, b = [100.0, 100.1, 100.2, 100.3, 100.4], [101.0, 101.1, 101.2, 101.3, 101.4]
    assert compare.judge(a, b).verdict == "SAME"
    assert compare.judge(a, b, threshold=0.005).verdict == "SLOWER"
    assert compare.judge(b, a, threshold=0.005).verdict == "FASTER"


def test_cycles_must_agree() -> None:
    a, b = [100.0 + i / 10 for i in range(5)], [110.0 + i / 10 for i in range(5)]
    assert compare.judge(a, b, (a, b)).verdict == "SLOWER"
    found = compare.judge(a, b, (a, a))
    assert found.verdict == "AMBIGUOUS"
    assert "clock" in found.why


NEAR = [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]
FAR = [1100.0, 1101.0, 1102.0, 1103.0, 1104.0]


def test_command_prints_verdicts_and_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = "--routine rmsnorm --batch_size 8 --hidden_size 64"
    a = write(tmp_path / "a.jsonl", [*trials(NEAR), *trials(NEAR, line=other)])
    b = write(tmp_path / "b.jsonl", [*trials(FAR), *trials(NEAR, line=other)])
    assert main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "SLOWER" in out
    assert "SAME" in out
    assert "1.049" in out, "geometric mean of 1.1 and 1.0"
    assert "expected false alarms" in out
    assert main(["compare", a, b, "--strict", "--threshold", "0.9"]) == 0


def test_two_backends_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f = write(tmp_path / "a.jsonl", [*trials(FAR, backend="torch"), *trials(NEAR)])
    assert main(["compare", f"{f}@torch", f"{f}@cpu"]) == 0
    assert "torch -> cpu" in (out := capsys.readouterr().out)
    assert "FASTER" in out


@pytest.mark.parametrize(
    ("more", "word"),
    [({"timer": "events"}, "timer wall and events"), ({"cache_state": "cold"}, "cache warm and cold"),
     ({"env": {"cpu": "other"}}, "CPU test cpu and other")],
)  # fmt: skip
def test_unlike_sides_are_refused(
    more: dict[str, object], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a.jsonl", trials(NEAR)), write(tmp_path / "b.jsonl", trials(NEAR, **more))
    assert main(["compare", a, b]) == 2
    assert word in capsys.readouterr().err
    assert main(["compare", a, b, "--force"]) == 0


def test_nothing_in_common_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", [made()])
    b = write(tmp_path / "b.jsonl", [made("--routine rmsnorm --batch_size 9 --hidden_size 64")])
    assert main(["compare", a, b]) == 2
    assert "no measured case in common" in capsys.readouterr().err
    assert main(["compare", a, str(tmp_path / "none.jsonl")]) == 2


def test_wholly_before_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", trials(NEAR))
    b = write(tmp_path / "b.jsonl", trials(NEAR, timestamp="2026-02-01T00:00:00Z"))
    main(["compare", a, b])
    assert "wholly before" in capsys.readouterr().out


def test_both_sides_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in for Python records the calls and writes the rows of a run."""
    fake = tmp_path / "python.sh"
    a, b, log = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "log"
    for i, median in enumerate(NEAR):
        write(tmp_path / f"row{i}.jsonl", [made(median_ns=median, run_id=f"r{i}")])
    fake.write_text(
        f'#!/bin/sh\necho "$1 $2 $3 $4 $5" >> {log}\n'
        f'for last; do :; done\nn=$(grep -c "^$1" {log})\ncat {tmp_path}/row$((n - 1)).jsonl >> "$last"\n'
    )
    fake.chmod(0o755)
    sides = ["--python_a", f"{fake} A", "--python_b", f"{fake} B"]
    assert main(["compare", str(a), str(b), *sides, "--", "--routine", "rmsnorm"]) == 0
    assert "SAME" in capsys.readouterr().out
    lines = log.read_text().splitlines()
    assert "".join(line[0] for line in lines) == "ABBAABBAAB"
    assert {line[2:] for line in lines} == {"-m fi_bench run --routine"}
    assert main(["compare", str(a), str(b), *sides]) == 2
    assert main(["compare", str(a), str(b), "--python_a", "false", "--python_b", "false", "--", "--routine", "x"]) == 2
    assert "this command failed" in capsys.readouterr().err


def gate(tmp_path: Path, rules: str, current: list[record.Record], baseline: list[record.Record] | None = None) -> int:
    write(tmp_path / "now.jsonl", current)
    text = 'current = "now.jsonl"\n'
    if baseline is not None:
        write(tmp_path / "base.jsonl", baseline)
        text += 'baseline = "base.jsonl"\n'
    (tmp_path / "gate.toml").write_text(text + rules)
    return main(["gate", str(tmp_path / "gate.toml"), "--strict", "-v"])


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ("[[rule]]\nmax_us = 1.2", 0),
        ("[[rule]]\nmax_us = 0.9", 3),
        ("[[rule]]\nmin_tb_per_sec = 0.0005", 0),
        ("[[rule]]\nmin_tb_per_sec = 0.01", 3),
        ('[[rule]]\nbackend = "cpu"\nnot_slower_than = "torch"', 0),
        ('[[rule]]\nbackend = "torch"\nnot_slower_than = "cpu"', 3),
        ('[[rule]]\nbackend = "torch"\nnot_slower_than = "cpu"\nfactor = 1.2', 0),
        ('[[rule]]\nnot_slower_than = "nobody"', 4),
        ('[[rule]]\nroutine = "silu*"\nmax_us = 0.1\n[[rule]]\nroutine = "rms*"\nmax_us = 2', 0),
    ],
)
def test_gate_limits(rules: str, code: int, tmp_path: Path) -> None:
    assert gate(tmp_path, rules, [*trials(NEAR), *trials(FAR, backend="torch")]) == code


def test_gate_against_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, "threshold = 0.05", trials(FAR), trials(NEAR)) == 3
    assert "SLOWER" in capsys.readouterr().out
    for old in tmp_path.glob("*.jsonl"):
        old.unlink()
    assert gate(tmp_path, "threshold = 0.2", trials(FAR), trials(NEAR)) == 0
    for old in tmp_path.glob("*.jsonl"):
        old.unlink()
    assert gate(tmp_path, "", trials(NEAR, backend="torch"), trials(NEAR)) == 3, "a case that went missing"
    assert "no longer measured" in capsys.readouterr().out


def drawn(tag: str, times: list[float], backend: str, library: str) -> list[record.Record]:
    """Cases of one row each, with times in ns."""
    line = "--routine rmsnorm --hidden_size {} --case_tag {} --batch_size {}"
    return [
        r
        for i, time in enumerate(times, 1)
        for r in trials([time], line=line.format(len(tag), tag, i), backend=backend, library=library)
    ]


DRAWN = [
    *drawn("few", [100, 90, 120, 100], "cpu", "fi_core"),
    *drawn("few", [80, 90, 100, 100], "tuned", "fi_core"),
    *drawn("few", [100, 100, 100, 100], "torch", "torch"),
    *drawn("few", [125, 300, 300, 300], "cublas", "torch"),
    *drawn("many", [300, 300], "cpu", "fi_core"),
    *drawn("many", [100, 200], "torch", "torch"),
]


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ("geomean = 1.02\nworst = 1.2\np95 = 1.2", 0),  # (1 * 0.9 * 1.2 * 1) ** 0.25 = 1.019
        ("geomean = 1.01", 3),
        ("p95 = 1.19", 3),
        ("worst = 1.19", 3),
        ("regret = 1.113\nregret_p99 = 1.25", 0),  # (1.25 + 1 + 1.2 + 1) / 4
        ("regret = 1.112", 3),
        ("regret_p99 = 1.24", 3),
    ],
)
def test_gate_limits_cases_of_a_tag_together(
    rules: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, f'[[rule]]\ntag = "few"\nbackend = "cpu"\n{rules}', DRAWN) == code
    row = capsys.readouterr().out.splitlines()[-2]
    assert row.startswith("few cpu  4 ") and "1.019" in row and row.endswith("rmsnorm batch_size=3 hidden_size=3")


def test_gate_says_where_a_limit_has_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = '[[rule]]\ntag = "many"\nbackend = "cpu"\nworst = 3.0\nregret = 1.0'
    assert gate(tmp_path, rules, DRAWN) == 4
    assert "many cpu: regret no row to compare with, allowed is 1" in capsys.readouterr().out


def test_the_limits_of_products_name_the_tags_of_their_presets() -> None:
    """Every drawn form and every named product meets a rule of benchmarks/gemm.toml."""
    rules = load(Path(__file__).parents[2] / "benchmarks" / "gemm.toml")["rule"]
    lines = [line for name in ("gemm-grid", "gemm-named") for line in presets.preset_lines(name)]
    tags = {line[line.index("--case_tag") + 1] for line in lines}
    assert all(any(fnmatch.fnmatchcase(tag, rule["tag"]) for tag in tags) for rule in rules)
    assert {tag for tag in tags if not any(fnmatch.fnmatchcase(tag, rule["tag"]) for rule in rules)} == {
        "eight_ranks_bf16",
        "router_fp32_weights",
    }


@pytest.mark.parametrize(
    ("rules", "word"),
    [("treshold = 1", "did you mean 'threshold'?"), ("[[rule]]\nmax_us = 'x'", "wrong type"), ("= 3", "not TOML"),
     ("[[rule]]\nroutine='none'\nmax_us=1", "no rule applies")],
)  # fmt: skip
def test_gate_files_are_checked(rules: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, rules, trials(NEAR)) == 2
    assert word in capsys.readouterr().err


def test_cases_keep_the_order_of_the_first_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"--routine rmsnorm --batch_size {n} --hidden_size 64" for n in (4, 16, 128, 1)]
    a = write(tmp_path / "a.jsonl", [r for line in lines for r in trials(NEAR, line=line)])
    b = write(tmp_path / "b.jsonl", [r for line in reversed(lines) for r in trials(NEAR, line=line)])
    assert main(["compare", a, b, "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out.partition("\n[")[0])["cases"]
    assert [row["case"].split()[0] for row in shown] == [
        "batch_size=4",
        "batch_size=16",
        "batch_size=128",
        "batch_size=1",
    ]
