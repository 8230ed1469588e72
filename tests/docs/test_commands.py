"""Every command line that README, docs, docstrings and messages show: run where no GPU, engine or hour is needed, else
checked word by word. Those of `fi-bench` are in test_bench_commands.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import ROOT, lines
from fi_core.cli import main
from fi_core.cli.arguments import parser
from fi_core.runtime.env import env
from fuzz.__main__ import options as fuzz_options

PROGRAM = re.compile(
    r"(?:\w+=\S+ )*(fi-core|nox|pip|python3?|pytest|torchrun|mpirun|vllm|flashinfer)((?: (?:-|\w|/|\.|\"|…).*)?)"
)
# What a sentence says of a program is no command: the program alone, or with a stand-in.
STAND_INS = {"COMMAND", "VERB", "...", "…", "<observability>", "<module>"}
LINES = {line: place for line, place in lines().items() if (m := PROGRAM.fullmatch(line)) and " " in line}
OWN = {line: place for line, place in LINES.items() if PROGRAM.fullmatch(line)[1] == "fi-core"}  # type: ignore[index]
ENGINES = {"vllm", "sglang.launch_server"}  # run by the card's scripts, and bound by tests/engine_calls
PACKAGES = {path.name for path in (ROOT / "packages").iterdir()}
TOOLS = {"nox", "flashinfer-python", *PACKAGES}


def shown(places: dict[str, str]) -> list[object]:
    return [pytest.param(line, id=f"{place}: {line}") for line, place in sorted(places.items())]


def words_of(line: str) -> list[str]:
    """The words of a command, without variables in front, each of which is known."""
    words = shlex.split(line)
    while "=" in words[0]:
        variable = words.pop(0).split("=")[0]
        assert variable == "PYTHONPATH" or variable in {n for row in env.table() for n in (row.name, *row.aliases)}
    return words


def runnable(words: list[str], folder: Path) -> list[str] | None:
    """The words of `fi-core` with real names for stand-ins and nothing to compile; None where another program runs."""
    if words[0] == "exec":
        return None
    module_or_op = "rmsnorm_cpu" if words[0] == "list-modules" else "rmsnorm"
    names = {"NAME": module_or_op, "/models/mine": str(folder), "/opt/fi-kernels": str(folder / "kernels"), "N": "1"}
    words = [names.get(word, word) for word in words if word not in (*STAND_INS, "key=value")]
    return [*words, "--list"] if words[0] == "prebuild" and "--list" not in words else words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands name: the configuration of a model, and a dump of a call."""
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dumped(folder: Path) -> Path:
    """The dump of a call by another process, as level 10 writes it."""
    variables = {"FI_LOGLEVEL": "10", "FI_DUMP_DIR": str(folder / "dumps"), "FI_LOGDEST": str(folder / "log.txt")}
    code = "import torch, fi_core; fi_core.rmsnorm(torch.randn(2, 8), torch.ones(8))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, check=True)
    return folder / "dumps"


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("line", shown(OWN))
def test_fi_core_runs(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """It ends with an answer, not with a complaint about its words."""
    words = words_of(line)[1:]
    if words[0] == "cache":
        request.getfixturevalue("empty_store")
    if words == ["prebuild", "--model"]:  # an option in a sentence
        words.append("llama-8b")
    if words[0] == "replay":
        words = ["replay", "--dir", str(dumped(folder))]
    own = runnable(words, folder)
    if own is None:
        assert parser().parse_args(words[: words.index("--") + 2] if "--" in words else [*words, "--", "x"]).run
    elif not own or own == ["why"] or parser().parse_args(own).run is None:
        assert main([*own, "--help"]) == 0, "a group of commands, or one that asks for a name"
    else:
        assert main(own) in (0, 1)  # 1: something is amiss on this machine
        out, err = capsys.readouterr()
        assert out.strip() and "Traceback" not in out + err


def sessions() -> dict[str, str]:
    """The sessions of nox, and their docstrings."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {f.name: ast.get_docstring(f) or "" for f in functions if "nox.session" in ast.unparse(f.decorator_list[0])}


def check_nox(words: list[str]) -> None:
    own, given = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    own = [word for word in own if word not in STAND_INS]
    chosen = [own[i + 1] for i, word in enumerate(own[:-1]) if word == "-s"]
    assert set(chosen) <= set(sessions())
    assert {word for word in own[1:] if word.startswith("-")} <= {"-s", "-l", "--no-venv", "--install-only"}
    if chosen == ["fuzz"]:
        fuzz_options(given)
    elif chosen == ["rebuild"]:
        assert set(given) - {"FOLDER"} - PACKAGES <= options_of("tools/rebuild.py")
    elif chosen == ["lint"]:
        assert given in ([], ["fix"])
    else:
        assert [word for word in given if "/" in word and not (ROOT / word).exists()] == []


def options_of(script: str) -> set[str]:
    return set(re.findall(r"\"(--[\w-]+)\"", (ROOT / script).read_text()))


def check_pip(words: list[str]) -> None:
    assert words[1] == "install"
    for word in words[2:]:
        if word.startswith("-"):
            assert word in ("--no-build-isolation", "-e", "--force-reinstall")
        elif "/" in word:
            assert (ROOT / word / "pyproject.toml").is_file()
        else:
            name, _, extra = word.rstrip("]").partition("[")
            assert name in TOOLS
            assert not extra or f"\n{extra} = [" in (ROOT / "packages" / name / "pyproject.toml").read_text()


def check_python(words: list[str]) -> None:
    if words[1:] == ["-m"]:
        return  # names an option
    if words[1] == "-m":
        module = words[2]
        if module in (*STAND_INS, *ENGINES, "build") or module.startswith("flashinfer."):
            return
        assert importlib.util.find_spec(module), module
        if module == "fi_core" and words[3:] and words[3] not in STAND_INS:
            assert parser().parse_args([words[3], *(["--", "x"] if words[3] == "exec" else [])]).run
        if module == "fi_core.aot":
            assert {word for word in words if word.startswith("--")} <= options_of(
                "packages/fi-core/src/fi_core/aot.py"
            )
    elif words[1] != "program.py":
        script = next(at for at in (ROOT / words[1], ROOT / "benchmarks" / words[1]) if at.is_file())
        given = {word for word in words[2:] if word.startswith("--")}
        assert script.name == "flashinfer_benchmark.py" or given <= options_of(str(script.relative_to(ROOT)))


def check_ranks(words: list[str]) -> None:
    """What starts ranks: its own words, then a module of this project, pytest or nothing."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        assert module == "multigpu" or importlib.util.find_spec(module)
    assert [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()] == []


CHECKS = {"nox": check_nox, "pip": check_pip, "python": check_python, "python3": check_python}
CHECKS |= dict.fromkeys(("pytest", "torchrun", "mpirun"), check_ranks)


@pytest.mark.parametrize("line", shown({line: place for line, place in LINES.items() if line not in OWN}))
def test_other_programs_get_words_that_exist(line: str) -> None:
    for command in line.split(" && "):
        words = words_of(command)
        if words[0] == "flashinfer":
            assert parser().parse_args(words[1:]).run
        elif words[0] in CHECKS:
            CHECKS[words[0]](words)
        else:
            assert words[0] in ENGINES, "say how it is checked"


def test_an_install_of_the_top_folder_says_what_to_install() -> None:
    """`pip install -e .` there, of FlashInfer's guides: setuptools would install an empty package."""
    settings = (ROOT / "pyproject.toml").read_text()
    backend = re.search(r'build-backend = "(\w+)"\nbackend-path = \["(\w+)"\]', settings)
    assert backend
    code = f"import {backend[1]}; {backend[1]}.build_editable('.')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / backend[2], capture_output=True, text=True)
    command = done.stderr.splitlines()[-1].strip()
    assert done.returncode == 1 and f"```\n{command}\n```" in (ROOT / "CONTRIBUTING.md").read_text()


def test_there_are_commands() -> None:
    assert len(OWN) > 25 and len(LINES) > 80
    assert {"demo", "tests", "wheels"} <= set(sessions())
