"""`fi-bench run` end to end on the CPU: lines, rows, exit codes, isolation, resuming."""

from __future__ import annotations

import csv
import dataclasses
import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_bench import backends, case, parsing, record, schedule
from fi_bench.cases import norm
from fi_bench.cli import main
from fi_bench.measure import Cache, Measurement
from fi_bench.runner import CaseRun
from fi_core.testing import l2

RMS = ["--routine", "rmsnorm", "--batch_size", "8", "--hidden_size", "256", "--num_iters", "6", "--dry_run_iters", "1"]
DECODE = ["--routine", "single_decode_with_kv_cache", "--s_kv", "64", "--num_qo_heads", "4", "--num_kv_heads", "2"]
GEMM = ["--routine", "gemm_fp8_nt_groupwise", "--m", "4", "--n", "128", "--k", "128", "--num_iters", "3"]
PERF = re.compile(
    r"^\[PERF\] (\S+) *:: median time \d+\.\d{3,} ms; std \d+\.\d{3,} ms; achieved tflops \d+\.\d{3,} TFLOPs/sec; "
    r"achieved tb_per_sec \d+\.\d{3,} TB/sec$",
    re.M,
)


def replace_case(monkeypatch: pytest.MonkeyPatch, routine: str, **changes: Any) -> None:
    cases = tuple(dataclasses.replace(c, **changes) if c.routine == routine else c for c in norm.CASES)
    monkeypatch.setattr(norm, "CASES", cases)


@pytest.mark.parametrize("line", [RMS, DECODE], ids=["rmsnorm", "single_decode"])
def test_a_checked_run_prints_results_and_details(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line, "--backends", "cpu", "torch", "--refcheck", "-vv"]) == 0
    out = capsys.readouterr().out
    assert PERF.findall(out) == ["cpu", "torch"]
    assert "[INFO] args = Namespace(routine='" in out
    assert "[INFO] Running test" in out
    assert re.search(r"\[VVERBOSE\] \w+\.shape = torch\.Size", out)
    assert "refcheck ok" in out


def test_a_missing_cupti_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In FlashInfer's words; each row keeps it."""
    told = "CUPTI is not installed. Try 'pip install -U cupti-python'. Falling back to CUDA events."

    def measured(call: object, inputs: object, work_bytes: int, device: object, options: object) -> Measurement:
        return Measurement([1e3] * 6, "events", Cache("warm"), warnings=[told])

    monkeypatch.setattr("fi_bench.runner.measure", measured)
    monkeypatch.setattr("fi_bench.runner._said", set())
    assert main([*RMS, "--backends", "cpu", "torch"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"[WARNING] {told}\n") == out.count("Falling back") == 1


@pytest.mark.parametrize("routine", ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"])
def test_details_of_attention_are_those_of_flashinfer(routine: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--routine {routine} --backends cpu --batch_size 2 --s_kv 40 --page_size 16 --num_iters 2 -vv"
    assert main([*line.split(), "--num_qo_heads", "4", "--num_kv_heads", "2", "--head_dim_qk", "64"]) == 0
    said = dict(re.findall(r"^\[VVERBOSE\] (\S+) = (.*)$", capsys.readouterr().out, re.M))
    assert said["gpu_name"] == "none: CPU"
    assert float(said["scale"]) == 0.125
    assert said["q.shape"] == "torch.Size([2, 4, 64])"
    assert said["actual_seq_lens_kv.flatten()"].startswith("tensor([40, 40]")
    if "Paged" in routine:
        assert (said["num_pages_per_seq"], said["total_num_pages"]) == ("3", "6")
        assert said["kv_cache.shape"] == "(torch.Size([6, 16, 2, 64]), torch.Size([6, 16, 2, 64]))"
        assert said["kv_cache.stride()"] == "((2048, 128, 64, 1), (2048, 128, 64, 1))"
        assert said["block_tables.shape"] == "torch.Size([2, 3])"


def test_a_call_of_seconds_is_sampled_a_few_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fi_bench.measure import wall

    monkeypatch.setattr(wall, "_MOST_SECONDS", 1e-4)
    assert main([*RMS, "--backends", "torch", "--num_iters", "30", "--dry_run_iters", "9"]) == 0
    assert re.search(r"torch: \d of 30 samples were taken, because a call takes", capsys.readouterr().out)


def test_the_perf_line_is_that_of_flashinfer(capsys: pytest.CaptureFixture[str]) -> None:
    from fi_bench.console import perf

    perf("fa2", 0.1451, 0.0018, 125.3, 1.87)
    assert capsys.readouterr().out == (
        "[PERF] fa2            :: median time 0.145 ms; std 0.002 ms; achieved tflops 125.300 TFLOPs/sec; "
        "achieved tb_per_sec 1.870 TB/sec\n"
    )
    perf("cpu", 0.0001234, 0.0, 0.000012, 0.0005)
    assert capsys.readouterr().out == (
        "[PERF] cpu            :: median time 0.000123 ms; std 0.000 ms; achieved tflops 0.0000120 TFLOPs/sec; "
        "achieved tb_per_sec 0.001 TB/sec\n"
    ), "what is not zero does not read 0.000"


def test_testlist_rows_skips_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "sample.txt"
    listed.write_text(
        "## decode\n"
        "--routine BatchMLAPagedAttentionWrapper --backends fa2 --page_size 16 --batch_size 2 --s_kv 64 "
        "--num_qo_heads 4 --num_kv_heads 4 --head_dim_ckv 512 --head_dim_kpe 64\n\n"
        "--routine bmm_fp8 --backends cudnn cutlass --batch_size 2 --m 1 --n 16 --k 16\n"
        f"{' '.join(RMS)} --backends cpu torch cutlass --case_tag 'a, b'\n"
    )
    out_csv = tmp_path / "out.csv"
    code = main(["--testlist", str(listed), "--output_path", str(out_csv), "--generate_repro_command", "--refcheck"])
    out = capsys.readouterr().out
    assert code == 1, "two cases that no backend could run"
    assert "[INFO] 3/3 a, b: rmsnorm batch_size=8 hidden_size=256" in out
    assert "[WARNING] fa2 for routine BatchMLAPagedAttentionWrapper is not supported on this CPU" in out
    assert "[WARNING] cutlass for routine rmsnorm is not supported on this CPU" in out
    assert "[INFO] To reproduce this test case, run the following command: fi-bench --routine rmsnorm" in out
    with out_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["routine"], r["backend"], r["case_tag"]) for r in rows] == [
        ("rmsnorm", b, "a, b") for b in ("cpu", "torch")
    ]
    assert all(float(r["median_time"]) > 0 and r["timer"] == "wall" and r["cache_state"] == "warm" for r in rows)
    statuses = {(r["routine"], r["backend"]): r["status"] for r in record.read(out_csv)}
    assert statuses["rmsnorm", "cutlass"] == statuses["bmm_fp8", "cudnn"] == "skipped", "skips are on record too"


def test_malformed_lines_are_reported_and_the_rest_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "l.txt"
    listed.write_text(f"--routine rmsnorn --batch_size 1\n{' '.join(RMS)} --backends torch\n")
    assert main(["--testlist", str(listed)]) == 2
    out = capsys.readouterr().out
    assert "[ERROR] Error: l.txt:1: unknown routine 'rmsnorn'; did you mean 'rmsnorm'?" in out
    assert PERF.search(out)
    listed.write_text(listed.read_text().replace("torch", "torch --fail_fast"))
    assert main(["--testlist", str(listed)]) == 2
    assert not PERF.search(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        ([*RMS, "--backends", "tarch"], 2, "unknown backend 'tarch'; did you mean 'torch'?"),
        (["--routine", "nope"], 2, "unknown routine"),
        (["rn"], 2, "unknown verb 'rn'; did you mean 'run'?"),
        (["bogus"], 2, "unknown verb 'bogus'; verbs are run, list, "),
        ([*RMS, "--backends", "torch", "--output_path", "/no/such/dir/x.csv"], 2, "cannot be written"),
        ([*RMS, "--backends", "torch", "--device", "cuda"], 1, "no CUDA device"),
        ([*RMS, "--backends", "mma_sm80"], 1, "no implementation 'mma_sm80'"),
        ([*DECODE, "--backends", "torch", "--random_actual_seq_len"], 1, "is for batch routines"),
        ([*DECODE, "--backends", "torch", "--batch_size", "2"], 1, "takes --batch_size 1, got 2"),
        ([*DECODE, "--backends", "cudnn"], 1, "it needs a GPU of compute capability 8.x, 9.x, 10.x, 11.x, 12.x; "),
        ([*GEMM, "--backends", "deepgemm"], 1, "pip install git+https://github.com/deepseek-ai/DeepGEMM.git"),
        (
            [*GEMM, "--backends", "cutlass"],
            1,
            "it needs a GPU of compute capability 8.0 and later; --backends cpu runs",
        ),
        (
            [*RMS, "--backends", "cutlass"],
            1,
            "10.x, 11.x, 12.x and flashinfer (pip install flashinfer-python); --backends",
        ),
        (
            ["--routine", "bmm_fp8", *["--m", "8", "--n", "64", "--k", "64", "--mma_sm", "3"]],
            2,
            "--mma_sm must be at most 2, got 3",
        ),
        ([*RMS, "--backends", "deepgemm"], 1, "deepgemm has no rmsnorm"),
    ],
)
def test_a_backend_that_cannot_run_prints_its_reason(
    words: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    said = capsys.readouterr()
    assert word in said.out + said.err
    assert "Traceback" not in said.out + said.err


def test_default_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    from fi_bench.runner import asked_backends

    decode = parsing.parse(["--routine", "BatchDecodeWithPagedKVCacheWrapper", *DECODE[2:]])
    gelu = parsing.parse(["--routine", "gelu_and_mul", "--batch_size", "1", "--hidden_size", "8"])
    assert asked_backends(gelu) == ["cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert asked_backends(gelu) == ["cuda"]
    assert asked_backends(decode) == ["auto"]
    monkeypatch.setattr(backends, "implementations", lambda found: ("cpu", "sm90"))
    assert asked_backends(gelu) == ["auto"]


def wrong(x: case.Inputs) -> torch.Tensor:
    out = norm.torch_plain(x)
    out[3, 7] += 1
    return out


def test_a_wrong_backend_fails_the_check_and_ends_the_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    replace_case(monkeypatch, "rmsnorm", torch=wrong)
    line = [*RMS, "--backends", "torch", "cpu", "--refcheck"]
    assert main([*line, "--output_path", str(tmp_path / "r.jsonl")]) == 5
    out = capsys.readouterr().out
    assert "[ERROR] Output mismatch between backends" in out
    assert "Output tensor mismatch between backends reference and torch: 1 / 2048 (0.05%) elements are different" in out
    assert "worst at [3, 7]" in out
    assert not PERF.search(out), "a wrong result is not timed, and the case ends"
    (kept,) = record.read(tmp_path / "r.jsonl")
    assert kept["status"] == "mismatch"
    assert kept["refcheck"]["worst_index"] == [3, 7]
    assert main([*line, "--allow_output_mismatch"]) == 0
    assert PERF.findall(capsys.readouterr().out) == ["torch", "cpu"]


def test_an_output_left_unwritten_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lazy(x: case.Inputs) -> torch.Tensor:
        x.out[1:] = norm.torch_plain(x)[1:]
        return x.out

    replace_case(monkeypatch, "rmsnorm", torch=lazy)
    assert main([*RMS, "--backends", "torch", "--refcheck"]) == 5
    assert "256 / 2048" in capsys.readouterr().out


def test_a_result_of_an_earlier_call_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Behind the timing the same memory has other values."""
    known: dict[int, torch.Tensor] = {}

    def remembering(x: case.Inputs) -> torch.Tensor:
        return known.setdefault(x.input.data_ptr(), norm.torch_plain(x))

    replace_case(monkeypatch, "rmsnorm", torch=remembering)
    assert main([*RMS, "--backends", "torch", "--refcheck", "--output_path", str(tmp_path / "r.jsonl")]) == 5
    assert "Output mismatch between backends" in capsys.readouterr().out
    (kept,) = record.read(tmp_path / "r.jsonl")
    assert (kept["status"], kept["refcheck"]["after"]) == ("mismatch", "mismatch")


def test_an_exception_costs_one_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(x: case.Inputs) -> None:
        raise RuntimeError("no such thing")

    replace_case(monkeypatch, "rmsnorm", torch=broken)
    assert main([*RMS, "--backends", "torch", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "Error running torch on rmsnorm: RuntimeError: no such thing" in out
    assert PERF.findall(out) == ["cpu"]


HOSTILE = """
import os, signal, sys, time
if "_child" in sys.orig_argv:
    from fi_bench import worker
    run = worker.CaseRun.run

    def hostile(self):
        if "torch_math" in self.args.backends:
            os.kill(os.getpid(), signal.SIGSEGV) if self.args.s_kv == 64 else time.sleep(60)
        run(self)

    worker.CaseRun.run = hostile
"""


def test_a_crash_and_a_hang_cost_one_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process of one backend dies in the first case and hangs in the second. Its start takes none of their time."""
    (tmp_path / "sitecustomize.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    out = tmp_path / "r.jsonl"
    line = [*DECODE, "--backends", "torch_math", "torch", "--num_iters", "3", "--output_path", str(out)]
    line[line.index("--s_kv") + 1] = "64,65"
    assert main([*line, "--timeout", "6"]) == 1
    statuses = [(r["params"]["s_kv"], r["backend"], r["status"]) for r in record.read(out)]
    assert statuses == [
        (64, "torch_math", "crashed"),
        (64, "torch", "ok"),
        (65, "torch_math", "timeout"),
        (65, "torch", "ok"),
    ]
    said = capfd.readouterr().out
    assert "killed by SIGSEGV" in said
    assert "not done after 6 s" in said
    assert main([*line, "--timeout", "6", "--resume", "--s_kv", "64"]) == 1
    assert [r["backend"] for r in record.read(out)][4:] == ["torch_math"], "what was ok is not run again"


def test_resume_of_a_finished_run_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*RMS, "--backends", "torch", "--output_path", str(tmp_path / "r.csv"), "--resume"]
    assert main(line) == 0
    before = (tmp_path / "r.jsonl").read_bytes()
    capsys.readouterr()
    assert main(line) == 0
    assert (tmp_path / "r.jsonl").read_bytes() == before
    assert not PERF.search(capsys.readouterr().out)


def test_trials_are_processes_in_alternating_order() -> None:
    lines = parsing.read_lines([*RMS, "--backends", "torch", "cpu", "--trials", "3"])
    jobs = list(schedule.jobs_of(lines, set()))
    assert [(job.trial, job.args.backends) for job in jobs] == [
        (0, ["torch", "cpu"]),
        (1, ["cpu", "torch"]),
        (2, ["torch", "cpu"]),
    ]


def test_a_trial_is_one_process(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    line = [*RMS, "--backends", "torch", "cpu", "--trials", "2", "--output_path", str(out)]
    line[line.index("--batch_size") + 1] = "4,8"
    assert main(line) == 0
    rows = record.read(out)
    assert [r["trial"] for r in rows] == [0] * 4 + [1] * 4
    pids = [{r["pid"] for r in rows if r["trial"] == trial} for trial in (0, 1)]
    assert len(pids[0]) == len(pids[1]) == 1
    assert pids[0] | pids[1] != pids[0]
    assert os.getpid() not in pids[0] | pids[1]


def test_a_lost_context_costs_one_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a row that breaks the context, the remaining rows are measured in another process."""
    out = tmp_path / "r.jsonl"

    def broken(x: case.Inputs) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    replace_case(monkeypatch, "rmsnorm", torch=broken)  # in this process only
    monkeypatch.setattr(CaseRun, "_context_is_lost", lambda self: True)
    line = [*RMS, "--backends", "torch", "cpu", "--output_path", str(out)]
    line[line.index("--batch_size") + 1] = "4,8"
    assert main(line) == 1
    rows = record.read(out)
    assert [(r["params"]["batch_size"], r["backend"], r["status"]) for r in rows] == [
        (4, "torch", "failed"), (4, "cpu", "ok"), (8, "torch", "ok"), (8, "cpu", "ok"),
    ]  # fmt: skip
    assert len({r["pid"] for r in rows[1:]}) == 1 != os.getpid()
    assert "the CUDA context of this process is lost" in capfd.readouterr().out


def test_a_record_holds_samples_cache_check_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "get_l2_cache_size", lambda where=None: 100_000)
    out = tmp_path / "r.jsonl"
    main([*RMS, "--backends", "cpu", "--refcheck", "--cache", "cold", "--output_path", str(out)])
    (r,) = record.read(out)
    assert len(r["samples_ns"]) == r["stats"]["n"] == 6
    assert r["timer"] == "wall"
    cache = r["cache"]
    assert (cache["how"], cache["verified"], r["cache_state"]) == ("rotate", True, "cold")
    assert cache["footprint_bytes"] >= 2 * cache["cache_bytes"]
    assert r["refcheck"]["status"] == "ok"
    assert {"max_abs", "max_rel", "rel_l2", "cosine", "mismatch_pct", "nan", "inf", "worst_index"} <= r[
        "refcheck"
    ].keys()
    assert {"fi_bench", "fi_core", "cpu", "threads", "python", "os", "packages", "cuda"} <= r["env"].keys()
    seconds = r["stats"]["median"] / 1e9
    assert r["derived"]["tb_per_sec"] == pytest.approx(r["work"]["bytes"] / seconds / 1e12)
    assert r["resolved_backend"] == "cpu"
    assert r["library"] == "fi_core"


def test_rerun_repeats_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.jsonl"
    main([*RMS, "--backends", "cpu", "torch", "--case_tag", "a b", "--output_path", str(out)])
    wanted = record.read(out)[1]
    capsys.readouterr()
    assert main(["rerun", wanted["record_id"], str(out), "--num_iters", "4"]) == 0
    said = capsys.readouterr().out
    assert PERF.findall(said) == ["torch"]
    assert "--case_tag 'a b'" in said
    assert main(["rerun", "zz", str(out)]) == 2


@pytest.mark.parametrize("format", ["table", "markdown", "csv", "json"])
def test_formats_at_the_end(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RMS, "--backends", "torch", "--format", format]) == 0
    out = capsys.readouterr().out
    start = {"table": "routine  case", "markdown": "| routine | case |", "csv": "routine,median_time,", "json": "[\n"}
    assert f"\n{start[format]}" in out


def test_colour_follows_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    main([*RMS, "--backends", "torch"])
    assert "\x1b[32m[PERF]" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main([*RMS, "--backends", "torch"])
    assert "\x1b" not in capsys.readouterr().out


def test_an_interrupt_keeps_finished_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(x: case.Inputs) -> None:
        raise KeyboardInterrupt

    replace_case(monkeypatch, "gemma_rmsnorm", torch=stop)
    listed = tmp_path / "l.txt"
    listed.write_text(
        "".join(f"{' '.join(RMS).replace('rmsnorm', n)} --backends torch\n" for n in ("rmsnorm", "gemma_rmsnorm"))
    )
    assert main(["--testlist", str(listed), "--output_path", str(tmp_path / "r.jsonl")]) == 130
    assert [r["routine"] for r in record.read(tmp_path / "r.jsonl")] == ["rmsnorm"]


def test_the_lines_of_several_cases_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RMS, "--backends", "torch"]
    words[words.index("--batch_size") + 1] = "2,16"
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("[INFO]", "[PERF]"))]
    assert lines[0] == "[INFO] 1/2 rmsnorm batch_size=2 hidden_size=256"
    assert lines[1].startswith("[PERF] torch")
    assert lines[2] == "[INFO] 2/2 rmsnorm batch_size=16 hidden_size=256"
    assert main([*RMS, "--backends", "torch"]) == 0
    assert "[INFO]" not in capsys.readouterr().out, "one case: its flags are on the command line"


def test_draw_takes_so_many_points_at_random(tmp_path: Path) -> None:
    def drawn(seed: str) -> list[int]:
        out = tmp_path / f"{seed}.jsonl"
        words = [*RMS, "--backends", "torch", "--draw", "3", "--random_seed", seed, "--output_path", str(out)]
        words[words.index("--batch_size") + 1] = "1:40"
        assert main(words) == 0
        return [r["params"]["batch_size"] for r in record.read(out)]

    first = drawn("1")
    assert len(set(first)) == 3
    assert first != drawn("2")
    lines = parsing.read_lines([*RMS, "--draw", "3"])
    assert [line.words for line in schedule.drawn_lines(lines, lines[0].points[0])] == [(*RMS, "--draw", "3")]


@pytest.mark.parametrize(
    "path", ["", ".", "/dev/full", "/dev/null", "/dev/full.jsonl/x.jsonl", "results.xlsx", "results"]
)
def test_an_output_that_is_no_file_is_one_line(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RMS, "--backends", "torch", "--output_path", path]) == 2
    said = capsys.readouterr()
    assert "--output_path" in said.err
    assert said.err.count("\n") == 1
    assert "[PERF]" not in said.out


def test_a_full_disk_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([*RMS, "--backends", "torch", "--output_path", str(tmp_path / "r.jsonl")]) == 1
    assert "r.jsonl: cannot be written (No space left on device)" in capsys.readouterr().err
