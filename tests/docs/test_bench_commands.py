"""Every `fi-bench ...` that README, docs, docstrings and messages show: it parses, and what needs no GPU runs."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from bench.helpers import made, trials, write
from bench.test_cases import SMALL
from docs.pages import lines
from fi_bench import backends, catalog, cli, parsing
from fi_bench.cases import find

COMMAND = re.compile(r"(?:fi-bench|python3? (?:-m fi_bench|(?:benchmarks/)?flashinfer_benchmark\.py)) (.*)")
SIZES = SMALL | {  # of routines by their description
    "attention.wrappers.batch_attention": "--batch_size 2 --kv_len 32 --num_prompts 1 --qo_len 4 --head_dim 64",
    "attention.wrappers.block_sparse": "--qo_len 128 --kv_len 128 --head_dim 64",
}
# Stand-ins of words in capitals; `...` are the sizes of a routine.
WORDS = {
    "X": "rmsnorm", "NAME": "rmsnorm", "ROUTINE": "rmsnorm", "[ROUTINE]": "rmsnorm", "VERB": "list", "FILE": "r.jsonl",
    "A": "r.jsonl@torch", "B": "r.jsonl@cuda", "FILE.toml": "rules.toml", "ID": made()["record_id"],
    "...": "rmsnorm --batch_size 4 --hidden_size 64", "{path}": "ceilings.json", "OLD": "old", "NEW": "new",
}  # fmt: skip
ELSEWHERE = ("calibrate", "startup", "compare-trees")  # have tests of their own in tests/bench


LINES = sorted({shown[1] for line in lines() if (shown := COMMAND.fullmatch(line))} - {"..."})
RUNS = [line for line in LINES if line.startswith("--routine") and "-h" not in line.split()]
# A verb alone names it, but `list` is a command.
VERBS = [line for line in LINES if line == "list" or (not line.startswith("-") and " " in line and " -- " not in line)]
VERBS = [line for line in VERBS if line.split()[0] not in ELSEWHERE]


def words_of(line: str) -> list[str]:
    return shlex.split(" ".join(WORDS.get(word, word) for word in re.sub(r" +#.*", "", line).split()))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the commands name."""
    monkeypatch.chdir(tmp_path)
    write("r.jsonl", [made(), *trials((2e3,) * 5, backend="torch"), *trials((1e3,) * 5, backend="cuda", run_id="s")])
    for name in ("results.jsonl", "baseline.jsonl"):
        Path(name).write_text(Path("r.jsonl").read_text())
    Path("rules.toml").write_text('baseline = "baseline.jsonl"\ncurrent = "results.jsonl"\nthreshold = 0.03\n')


@pytest.mark.parametrize("line", LINES)
def test_every_command_parses(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(line)
    if words[0].startswith("-") and not {"--testlist", "-h", "--help"} & set(words):
        for point in (point for found in parsing.read_lines(words) for point in found.points):
            case = find(point.routine)
            assert case is not None
            known = backends.offered(case)
            assert [b for b in point.backends or () if b not in known and not b.startswith("flashinfer")] == []
    elif not words[0].startswith("-"):
        own = words[: words.index("--")] if "--" in words else words
        with contextlib.suppress(SystemExit):
            cli.VERBS[words[0]](["-h"])
        shown = capsys.readouterr().out + parsing.family_parser(catalog.family_of("rmsnorm"), "rmsnorm").format_help()
        assert [word for word in own if word.startswith("--") and word not in shown] == []


@pytest.mark.parametrize("line", [*RUNS, "--preset tiny"])
def test_a_run_ends_or_says_what_it_needs(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At small sizes: without a GPU each backend is timed, or a line says that it needs one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = [*words_of(line), "--num_iters", "2", "--dry_run_iters", "0", "--trials", "1"]
    if "--routine" in words:
        words += SIZES[catalog.family_of(words[1]).name].split()
    code = cli.main(words)
    said = capsys.readouterr().out
    assert code == (0 if "[PERF] " in said else 1)
    skips = re.findall(r"is not supported on this CPU: (.*)", said)
    assert [skip for skip in skips if "needs a GPU of compute capability" not in skip] == []
    assert "[ERROR] Error" not in said


@pytest.mark.parametrize("line", [*VERBS, *(line for line in LINES if "-h" in line.split() or line == "--help")])
def test_a_verb_without_a_measurement_runs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"profile": "--print_only", "rerun": "--dry_run"}.get(line.split()[0], "").split()
    words = [*words_of(line), *more]
    if "-h" in words and not words[0].startswith("-"):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 0
    else:
        assert cli.main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("line", RUNS)
def test_a_run_ends_on_a_gpu(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is written."""
    assert cli.main([*words_of(line), "--num_iters", "5", "--trials", "1"]) in (0, 1)
    assert "[ERROR] Error" not in capsys.readouterr().out


def test_there_are_commands() -> None:
    assert len(RUNS) > 10
    assert len(VERBS) > 8
