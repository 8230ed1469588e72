"""The gate of delays: its command, its planted errors, and what a build with delays must not do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import delays
from fi_bench import parsing, sweep
from fi_core import batch_invariant
from fi_core.aot import specs
from fi_core.observe.draw import Outline
from fi_core.registry import described, ops
from fi_core.runtime.build import compiler, sources, toolchain
from fi_core.runtime.errors import CompileError
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.op import Spec
from kernels import census
from kernels.kept import kept
from kernels.test_device_code import SERIALISED
from planted import ERRORS

COMMAND = Path(delays.__file__)
# Kernel entries with mbarriers that no case runs, and why.
NOT_RUN = {
    ("all_to_all_bulk_sm90_sm_90a", "all_to_all"): "it needs several ranks",
    ("ssd_combined_dtype_bf16_width_128_dim_64_wgmma_sm90_sm_90a", "ssd_states_checkpoints_2_2"): (
        "no description keeps states between tokens; the entry is ssd_states_2_2 with more stores to global memory"
    ),
}


def test_every_case_can_be_read() -> None:
    lines = delays.read(delays.LINES)
    assert len(lines) > 40
    for line in lines:
        words = line.removeprefix("invariant ").split()
        if words[0] == "call":
            assert described(words[1]) and all("=" in word for word in words[2:]), line
        else:
            assert list(sweep.points(parsing.parse(words))), line


def rehearsed(line: str) -> set[tuple[str, str]]:
    """The units and kernel entries that a line launches on an H200, as far as a rehearsal tells."""
    words = line.removeprefix("invariant ")
    switch = contextlib.nullcontext() if words == line else batch_invariant()
    with Rehearsal(census.TARGET, 132, 227 << 10) as rehearsal, switch:
        if words.startswith("call "):
            for name, sizes in delays.calls(words):
                found = described(name)
                assert found and found.template.make, name
                found.call(found.template.make(Outline(), **sizes))
        else:
            for prepare in delays.points(words, "cpu"):
                call = prepare()
                call.run(call.inputs())
    return {(choice.spec.name, launch.entry) for choice, launched in rehearsal.calls for launch in launched or ()}


@pytest.mark.slow
def test_the_cases_run_every_entry() -> None:
    """Every kernel entry for Hopper in the packages whose warps hand shared memory over by mbarriers."""
    reached = set[tuple[str, str]]().union(*map(rehearsed, delays.read(delays.LINES)))
    waiting = {
        (unit, entry)
        for unit, entries in census.kept_census().items()
        for entry, counts in entries.items()
        if {"arrival", "expected bytes", "wait"} & set(counts)
    }
    assert waiting - reached == set(NOT_RUN)


def test_parts_are_all_of_the_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"call rmsnorm batch_size={n} hidden_size=64\n" for n in (1, 2, 3)))
    for part, count in (("1/2", 2), ("2/2", 1)):
        words = ["--device=cpu", "--groups", "waits", "--repeats=2", "--jobs=2", f"--lines={lines}", f"--part={part}"]
        assert delays.main(words) == 0
        assert f"{count} of {count} cases x 1 groups" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        delays.main(["--part=3/2"])
    assert "K/N with K from 1 to N is required; got '3/2'" in capsys.readouterr().err


def test_equal_runs_pass_and_a_case_that_does_not_run_fails(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    words = [sys.executable, COMMAND, "--device=cpu", "--groups=waits", "--repeats=2", "--jobs=2", f"--lines={lines}"]
    lines.write_text("--routine rmsnorm --batch_size 3 --hidden_size 64  # a comment\n")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 cases x 1 groups, 2 runs each" in done.stdout
    lines.write_text("--routine rmsnorm --batch_size 3 --hidden_size 64 --input_dtype fp8_e4m3\n")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not run: --routine rmsnorm" in done.stdout


def test_other_bits_and_failures_are_findings() -> None:
    plain = delays.Outcome(0, ("a", "a", "a"))
    assert delays.judged(plain, delays.Outcome(0, ("a", "a"))) == ""
    assert delays.judged(plain, delays.Outcome(0, ("a", "b"))) == "1 of 2 runs differ"
    assert "hangs" in delays.judged(plain, delays.Outcome(0, failure="no answer within 9 s: it hangs"))


def test_a_checksum_knows_places() -> None:
    import torch

    x = torch.arange(7, dtype=torch.bfloat16)
    y = x.clone()
    y[2], y[3] = x[3], x[2]
    z = x.clone()
    z[6] = -z[6]
    assert len({delays.checksum({"out": t}) for t in (x, y, z)}) == 3
    assert delays.checksum({"out": x}) == delays.checksum({"out": x.clone()})


def test_a_build_that_serialises_products_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kernel has other races than the one that ships."""
    spec = next(specs(ops()["get_seq_lens"], census.TARGET))
    _, artifact = sources.artifacts(spec)
    monkeypatch.setattr(sources, "text", lambda _: SERIALISED)
    monkeypatch.setattr(compiler, "SERIALISED", compiler.re.compile("C75[0-9][0-9][^\\n]*"))  # this one's is C7514
    monkeypatch.setenv("FI_CUDA_COMPILER", "nvrtc")
    monkeypatch.setenv("FI_DELAYS", "waits")
    with pytest.raises(CompileError, match="FI_DELAYS=waits makes ptxas serialise its products"):
        compiler.compile_artifact(artifact, tmp_path)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_a_planted_error_fits_its_kernel(error: delays.Any, tmp_path: Path) -> None:
    header = Path("fi") / error.header
    (tmp_path / header).parent.mkdir(parents=True)
    shutil.copy(sources.include_dir() / header, tmp_path / header)
    error.edit(tmp_path)
    assert (tmp_path / header).read_text() != (sources.include_dir() / header).read_text()


def _with_error(error: delays.Any) -> Spec:
    """A configuration for Hopper whose unit includes the header, in fp8 if the case of the error is."""
    found = (spec for op in ops().values() for spec in specs(op, census.TARGET))
    having = [spec for spec in found if f"fi/{error.header}" in sources.headers(sources.artifacts(spec)[1])]
    return min(having, key=lambda spec: ("e4m3" in spec.name) != any(word in error.line for word in ("fp8", "float8")))


@pytest.mark.slow
@pytest.mark.parametrize("error", [e for e in ERRORS if e.kind != "count"], ids=lambda error: error.name)
def test_the_census_sees_what_came_or_went(error: delays.Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but a count, which is an operand; delays cannot promise to show a fence."""
    spec = _with_error(error)
    _, artifact = sources.artifacts(spec)
    identity = (sources.closure(artifact), toolchain.nvcc_identity(), error.old, error.new)

    def edited() -> str:
        copy = tmp_path / "include"
        shutil.copytree(sources.include_dir(), copy)
        error.edit(copy)
        monkeypatch.setattr(sources, "include_dir", lambda: copy)
        return census.ptx(spec)

    whole = kept("ptx", spec.name, *identity[:2], ask=lambda: census.ptx(spec))
    assert census.of_ptx(kept("ptx", spec.name, *identity, ask=edited)) != census.of_ptx(whole)
