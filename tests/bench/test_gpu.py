"""On a GPU: timers agree, cold is cold, clocks are read, a fault costs a row, equal is SAME, slower is SLOWER."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.test_cases import CASES, SMALL
from fi_bench import case, measure, record, stats
from fi_bench.case import Inputs
from fi_bench.cases import norm
from fi_bench.cli import main
from fi_bench.measure import Measurement, Options, loops
from fi_bench.measure import device as measure_device

pytestmark = pytest.mark.gpu

HAS_CUPTI = importlib.util.find_spec("cupti") is not None
TIMERS = {"cupti": {}, "graph_events": {"cupti": False}, "events": {"cupti": False, "graph": False}}


def timed(call: object, inputs: Inputs, nbytes: int, **options: object) -> Measurement:
    where = torch.device("cuda", torch.cuda.current_device())
    return measure.measure(call, inputs, nbytes, where, Options(**options))  # type: ignore[arg-type]


def median_us(found: Measurement) -> float:
    return statistics.median(found.samples_ns) / 1e3


@pytest.mark.sm90
@pytest.mark.parametrize(("m", "implementation"), [(16, "wgmma_small_m_sm90"), (8192, "wgmma_sm90")])
def test_auto_names_the_implementation_that_ran(
    m: int, implementation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"--routine gemm_fp8_nt_groupwise --backends auto --m {m} --n 4096 --k 7168 --num_iters 3"
    assert main(line.split()) == 0
    assert f"[PERF] auto({implementation})" in capsys.readouterr().out


def need(timer: str) -> None:
    if timer == "cupti" and not HAS_CUPTI:
        pytest.skip("cupti-python is not installed")


@pytest.mark.parametrize(("size", "tolerance"), [(12000, 0.02), (2048, 0.15)], ids=["200us", "5us"])
def test_timers_agree_or_warn(size: int, tolerance: float) -> None:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = Inputs(a=a, b=b, out=torch.empty_like(a))
    found = {}
    for timer, options in TIMERS.items():
        m = timed(lambda x: torch.add(x.a, x.b, out=x.out), inputs, 6 * size * size, cache="warm", **options)
        if timer != "cupti" or HAS_CUPTI:  # where it is installed it must be what runs
            assert m.timer == timer, m.timer_reason
            found[timer] = m
    print({timer: median_us(m) for timer, m in found.items()})
    truth = median_us(found["cupti" if HAS_CUPTI else "graph_events"])
    for timer, m in found.items():
        assert abs(median_us(m) / truth - 1) <= tolerance or any("gaps before and after" in w for w in m.warnings), (
            timer
        )


def test_cupti_separates_busy_time_from_gaps() -> None:
    need("cupti")
    x = torch.randn(1 << 24, device="cuda")
    m = timed(lambda x: (x.a.mul_(1.0), x.a.mul_(1.0)), Inputs(a=x), 16 << 24)
    assert [k["name"] for k in m.kernels] == [m.kernels[0]["name"]] * 2
    for span, busy in zip(m.samples_ns, m.sum_ns, strict=True):
        assert 0.8 * span < busy <= span


@pytest.mark.parametrize("flush", ["write", "read"])
@pytest.mark.parametrize("timer", TIMERS)
def test_a_cold_cache_is_slower_than_a_warm_one(timer: str, flush: str) -> None:
    need(timer)
    n = torch.cuda.get_device_properties(0).L2_cache_size // 8
    inputs = Inputs(source=torch.randn(n // 4, device="cuda"), out=torch.empty(n // 4, device="cuda"))
    times = {}
    for cache in ("cold", "warm"):
        m = timed(lambda x: x.out.copy_(x.source), inputs, 2 * n, cache=cache, flush=flush, **TIMERS[timer])
        assert m.cache.verified
        assert m.cache.footprint_bytes >= 2 * m.cache.cache_bytes or cache == "warm"
        times[cache] = median_us(m)
    assert times["cold"] > 1.15 * times["warm"]


@pytest.mark.parametrize("timer", TIMERS)
def test_the_clock_is_read_and_plausible(timer: str) -> None:
    need(timer)
    x = torch.randn(1 << 22, device="cuda")
    m = timed(lambda x: x.a.mul_(1.0), Inputs(a=x), 8 << 22, **TIMERS[timer])
    assert len(m.sm_mhz) == len(m.samples_ns)
    assert all(200 < mhz < 4000 for mhz in m.sm_mhz)
    assert max(m.sm_mhz) < 1.3 * statistics.median(m.sm_mhz)
    assert m.clocks["after"]["sm_mhz"] > 0
    assert m.host_ns is not None
    assert 0 < m.host_ns < 1e6


@pytest.mark.parametrize("timer", TIMERS)
def test_the_regime_follows_the_duration_or_the_option(timer: str) -> None:
    need(timer)
    short, long = torch.randn(1 << 20, device="cuda"), torch.randn(1 << 30, device="cuda")
    for x, asked, regime in (
        (short, "auto", "burst"),
        (short, "sustained", "sustained"),
        (long, "auto", "sustained"),
        (long, "burst", "burst"),
    ):
        m = timed(lambda x: x.a.mul_(1.0), Inputs(a=x), 8 * x.numel(), cache="warm", regime=asked, num_iters=5,
                  **TIMERS[timer])  # fmt: skip
        assert m.regime == regime


def test_memory_is_read_at_least_as_fast_as_it_is_copied() -> None:
    x = torch.randn(1 << 28, device="cuda")
    mark = torch.zeros(1, dtype=torch.int32, device="cuda")
    eagerly = {"cupti": False, "graph": False}  # in a graph, copy_ is a memcpy node, which is slower
    own = measure_device.kernels(torch.device("cuda", torch.cuda.current_device()))
    read = timed(lambda x: own.read(x.a, x.out), Inputs(a=x, out=mark), 4 << 28, cache="warm", **eagerly)
    copy = timed(lambda x: x.b.copy_(x.a), Inputs(a=x, b=torch.empty_like(x)), 8 << 28, cache="warm", **eagerly)
    assert median_us(read) < 0.6 * median_us(copy)


def test_a_call_that_synchronises_gives_a_warning() -> None:
    x = torch.randn(1 << 20, device="cuda")
    m = timed(lambda x: x.a.sum().item(), Inputs(a=x), 4 << 20, cupti=False, graph=False, num_iters=3)
    assert any("waits for the GPU" in w for w in m.warnings)


def test_a_captured_walk_keeps_the_tensors_that_it_reads() -> None:
    x = torch.ones(1024, device="cuda")
    replay, seen = loops.walk([functools.partial(x.mul_, 2.0)]), weakref.ref(x)
    del x
    replay()
    assert seen() is not None


PEERS = [(c, backend) for c in CASES for backend in ("auto", "torch", *c.peers)]


@pytest.mark.parametrize(("found", "backend"), PEERS, ids=[f"{c.routine} {b}" for c, b in PEERS])
def test_every_backend_is_right_or_skips_with_a_reason(
    found: case.Case, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        f"--routine {found.routine} {SMALL[found.family]} --num_iters 3 --refcheck --device cuda --backends {backend}"
    )
    main([*line.split(), "--output_path", str(tmp_path / "r.jsonl")])
    (row,) = record.read(tmp_path / "r.jsonl")
    assert row["status"] in ("ok", "skipped"), row.get("reason") or row["refcheck"]
    if row["status"] == "ok":
        if HAS_CUPTI:  # else small inputs may not fill the cache, and what copies from the host makes no graph
            assert row["timer"] == "cupti", row["timer_reason"]
            assert row["cache_state"] == "cold"
        assert row["clocks"]["sm_mhz_mean"] > 200
        assert row["env"]["gpu_uuid"]
    else:
        print(row["reason"])
        assert backend != "torch" or found.family.endswith("_comm")  # which need two GPUs


def test_a_wrong_result_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: Inputs) -> torch.Tensor:
        out = torch.nn.functional.rms_norm(x.input, x.weight.shape, x.weight, x.eps)
        out[3, 7] += 1
        return out

    cases = tuple(dataclasses.replace(c, torch=wrong) if c.routine == "rmsnorm" else c for c in norm.CASES)
    monkeypatch.setattr(norm, "CASES", cases)
    line = "--routine rmsnorm --batch_size 8 --hidden_size 256 --backends torch --refcheck --device cuda"
    assert main(line.split()) == 5
    out = capsys.readouterr().out
    assert "1 / 2048" in out
    assert "worst at [3, 7]" in out
    assert "[PERF]" not in out


# What a process of these tests has beside fi-bench: a routine whose kernel faults, and one whose work is SLOWED.
PLUGIN = """
import ctypes, dataclasses, os
from fi_bench import derived
from fi_bench.cases import norm

def fault(x):
    from fi_bench.measure.device import kernels
    own = kernels(x.input.device)
    own._launch("fi_bench_mark", own._blocks, ctypes.c_void_p(64))  # a store to address 64

def negate(x):
    import torch
    n = int(x.out.numel() / 2 * float(os.environ.get("SLOWED", "1"))) >> 20 << 20
    torch.neg(x.input.view(-1)[:n], out=x.out.view(-1)[:n])
    return x.out

TORCH = {"gemma_rmsnorm": fault, "gelu_and_mul": negate}
norm.CASES = tuple(
    dataclasses.replace(c, torch=TORCH.get(c.routine, c.torch)) for c in (*norm.CASES, derived.case("gelu_and_mul"))
)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "sitecustomize.py").write_text(PLUGIN)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "plugin"), *filter(None, sys.path)])}


@pytest.mark.parametrize("more", ["", "--isolate"], ids=["one process", "isolate"])
def test_an_illegal_access_costs_one_row(more: str, tmp_path: Path, environment: dict[str, str]) -> None:
    shape = "--batch_size 64 --hidden_size 1024 --num_iters 5"
    listed, out = tmp_path / "list.txt", tmp_path / "r.jsonl"
    listed.write_text(
        f"--routine rmsnorm --backends torch {shape}\n"
        f"--routine gemma_rmsnorm --backends torch cuda {shape}\n"
        f"--routine fused_add_rmsnorm --backends cuda {shape}\n"
    )
    command = [sys.executable, "-m", "fi_bench", "--testlist", str(listed), "--output_path", str(out), *more.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [(r["routine"], r["backend"], r["status"]) for r in record.read(out)]
    assert rows == [
        ("rmsnorm", "torch", "ok"),
        ("gemma_rmsnorm", "torch", "failed"),
        ("gemma_rmsnorm", "cuda", "ok"),
        ("fused_add_rmsnorm", "cuda", "ok"),
    ], done.stdout + done.stderr
    assert "illegal memory access" in record.read(out)[1]["reason"]


# Eight cases from 2 us to 0.3 ms, bound by memory, by arithmetic and by latency.
SAME = [
    "--routine rmsnorm --backends cuda --batch_size 1,16384 --hidden_size 4096",
    "--routine silu_and_mul --backends cuda --batch_size 1024 --hidden_size 14336",
    "--routine apply_rope_pos_ids --backends cuda --batch_size 1 --seq_len 512 --num_qo_heads 32 --num_kv_heads 8 "
    "--head_dim 128",
    "--routine append_paged_kv_cache --backends cuda --batch_size 64 --s_qo 1 --s_kv 1024",
    "--routine single_decode_with_kv_cache --backends auto --s_kv 8192 --num_qo_heads 32 --num_kv_heads 8",
    "--routine mm_bf16 --backends cublas --m 64,2048 --n 4096 --k 4096",
]
SLOWED = "--routine gelu_and_mul --backends torch --batch_size 32768 --hidden_size 8192"


@pytest.mark.slow  # alone on the GPU
def test_equal_is_same_five_percent_is_slower_and_processes_agree(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five processes a side in turns; the sides differ in one case, whose kernel does 5 % more work in B.

    Noise may leave an equal case undecided, which asks for more processes: five more a side decide it.
    """
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    listed, a, b = tmp_path / "list.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    sides = ["--python_a", f"env SLOWED=1 {sys.executable}", "--python_b", f"env SLOWED=1.05 {sys.executable}"]

    def compared(lines: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
        listed.write_text("\n".join(lines))
        flags = ["--testlist", str(listed), "--num_iters", "100"]
        assert main(["compare", str(a), str(b), "--format", "json", *sides, "--", *flags]) == 0
        return {(c["routine"], c["case"]): c for c in json.loads(capsys.readouterr().out)["cases"]}

    first = compared([*SAME, SLOWED])
    (slowed,) = [verdict for (routine, _), verdict in first.items() if routine == "gelu_and_mul"]
    assert slowed["verdict"] == "SLOWER", slowed
    equal = {case: verdict for case, verdict in first.items() if verdict is not slowed}
    assert len(equal) == 8
    wrong = [verdict for verdict in equal.values() if verdict["verdict"] in ("FASTER", "SLOWER")]
    assert not wrong, wrong
    undecided = {routine for (routine, _), verdict in equal.items() if verdict["verdict"] == "AMBIGUOUS"}
    if undecided:
        more = compared([line for line in SAME if line.split()[1] in undecided])
        equal = {case: more[case] for case in equal}
    keep = os.environ.get("FI_BENCH_KEEP")  # a folder for the rows, to look at them afterwards
    if keep:
        for file in (a, b):
            shutil.copy(file, keep)
    wrong = [verdict for verdict in equal.values() if verdict["verdict"] != "SAME"]
    assert not wrong, wrong

    centres: dict[tuple[str, str, str], list[float]] = {}
    for file in (a, b):
        for r in record.read(file):
            centres.setdefault((file.name, r["routine"], r["case_key"]), []).append(stats.midmean(r["samples_ns"]))
    apart = {}
    for key, found in centres.items():
        middle = statistics.median(found)
        worst = max(abs(ns / middle - 1) for ns in found)
        assert len(found) >= 5
        if worst > (0.02 if middle < 10_000 else 0.01):
            apart[key] = [round(ns) for ns in found]
    assert not apart, apart


def test_a_checkout_is_as_fast_as_itself(tmp_path: Path) -> None:
    """`compare-trees` on the device: every metric is there, both sides agree to the bit, and nothing is far from 1."""
    out, root = tmp_path / "trees.jsonl", str(Path(__file__).resolve().parents[2])
    main(["compare-trees", root, root, "--preset", "tiny", "--device", "cuda", "--output_path", str(out)])
    head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert head["device"] == "cuda"
    assert {row["status"] for row in rows} == {"ok"}, rows
    metrics = {name: {row["metric"] for row in rows if row["case"] == name} for name in ("norm", "decode", "sampling")}
    assert metrics["norm"] == metrics["sampling"] == {"device", "host run"}
    assert metrics["decode"] == {"device", "host run", "host plan"}
    assert all(row["same_inputs"] and row["same_outputs"] for row in rows)
    device = [row["ratio"] for row in rows if row["metric"] == "device"]
    assert all(0.9 < ratio < 1.1 for ratio in device), device
