"""benchmarks/README.md: its tables are those of the code, its example prints what it shows."""

from __future__ import annotations

import re
import shlex

import pytest

import benchmark_page
from fi_bench import backends, cases, catalog, presets
from fi_bench.cli import VERBS, main
from fi_bench.flags import GENERAL

ROOT = benchmark_page.PAGE.parents[1]
TEXT = benchmark_page.PAGE.read_text()
OF_TORCHRUN = {"nproc_per_node", "json", "dtypes", "forms", "layers"}  # and of fi_bench.collectives
LINE = re.compile(r"^\[(INFO|VERBOSE|VVERBOSE|PERF)\] ([\w.()\[\]]+(?: \w+)?)", re.M)


def test_the_tables_are_those_of_the_code() -> None:
    """`python tools/benchmark_page.py` writes them."""
    assert set(benchmark_page.TABLES) == {found[2] for found in benchmark_page.MARKED.finditer(TEXT)}
    assert benchmark_page.filled(TEXT) == TEXT


def test_the_matrix_names_every_routine_and_flag() -> None:
    for routine in catalog.FAMILY_OF:
        assert f"`{routine}`" in TEXT
        for flag in catalog.family_of(routine).flags:
            assert f"`--{flag.name}`" in TEXT


def test_a_backend_that_the_matrix_offers_for_the_cpu_runs_there() -> None:
    for found in cases.every():
        for name, places in backends.offered(found).items():
            if "CPU" in places:
                assert backends.bind(name, found, "cpu").name == name


def test_the_example_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = re.search(r"```bash\n(python [^`]*)```\n\nprints\n\n```none\n([^`]*)```", TEXT)
    assert found is not None
    assert main([*shlex.split(found[1].replace("\\\n", ""))[2:], "--num_iters", "2"]) == 0
    assert LINE.findall(found[2]) == LINE.findall(capsys.readouterr().out)
    assert len(LINE.findall(found[2])) > 20


@pytest.mark.parametrize("page", ["docs/guides/benchmark.md", "packages/fi-bench/README.md", "benchmarks/README.md"])
def test_pages_name_flags_presets_and_routines_that_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text()
    known = {flag.name for family in catalog.FAMILIES.values() for flag in family.flags}
    known |= {flag.name for flag in GENERAL} | OF_TORCHRUN
    wrappers = set(re.findall(r"`(\w+Wrapper|BatchAttention)`", text))
    known |= {flag.name for routine in wrappers for flag in catalog.family_of(routine).flags}
    for verb, run in VERBS.items():
        if not verb.startswith("_") and verb != "run":
            with pytest.raises(SystemExit):
                run(["-h"])
    helps = capsys.readouterr().out
    shown = {word.replace("-", "_") for word in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
    assert sorted(word for word in shown - known if f"--{word}" not in helps) == []
    assert [name for name in re.findall(r"--preset ([\w-]+)", text) if name not in presets.names()] == []
