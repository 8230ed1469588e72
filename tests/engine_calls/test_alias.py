"""`import flashinfer` is fi where it was asked for, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from house.tree import PYTHONPATH

EXEC = [sys.executable, "-m", "fi_core", "exec", "--", sys.executable]


def run(command: list[str], text: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process with no other flashinfer in reach."""
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    places = {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": PYTHONPATH}
    return subprocess.run([*command, "-c", text], env=keep | places | more, cwd=home, capture_output=True, text=True)


def output(command: list[str], text: str, home: Path, **more: str) -> str:
    done = run(command, text, home, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


IDENTITY = """
import importlib.metadata, importlib.util, sys
spec = importlib.util.find_spec("flashinfer")
import flashinfer
versions = {importlib.metadata.version(name) for name in ("flashinfer-python", "flashinfer_python", "flashinfer-cubin")}
assert spec and versions == {flashinfer.__version__}, versions
assert tuple(map(int, flashinfer.__version__.split(".")[:3])) >= (0, 7, 2)
assert "torch" not in sys.modules, "nothing loads before it is used"
import flashinfer.decode, flashinfer.norm as norm, fi_core.decode
assert flashinfer.decode is fi_core.decode and norm is sys.modules["fi_core.norm"]
assert fi_core.decode.__spec__.name == fi_core.decode.__name__ == "fi_core.decode"
assert flashinfer.BatchDecodeWithPagedKVCacheWrapper is fi_core.BatchDecodeWithPagedKVCacheWrapper
assert flashinfer.rmsnorm is flashinfer.norm.rmsnorm is fi_core.rmsnorm
from flashinfer.version import __git_version__, __version__
assert (__version__, __git_version__) == (flashinfer.__version__, fi_core.__git_version__)
print(flashinfer.__file__)
"""


def test_a_command_and_its_children(tmp_path: Path) -> None:
    child = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {IDENTITY!r}], text=True))"
    for text in (IDENTITY, child):
        assert output(EXEC, text, tmp_path).strip().endswith("flashinfer/__init__.py")


def test_inside_a_process(tmp_path: Path) -> None:
    text = f"import fi_core.compat; fi_core.compat.install(); fi_core.compat.install()\n{IDENTITY}"
    assert output([sys.executable], text, tmp_path).strip().endswith("flashinfer/__init__.py")


def test_nothing_is_active_unless_asked_for(tmp_path: Path) -> None:
    text = "import fi_core.decode, fi_core.compat, importlib.util; print(importlib.util.find_spec('flashinfer'))"
    assert output([sys.executable], text, tmp_path) == "None\n"


def test_it_wins_over_an_installed_flashinfer(tmp_path: Path) -> None:
    (tmp_path / "site" / "flashinfer").mkdir(parents=True)
    (tmp_path / "site" / "flashinfer" / "__init__.py").write_text("raise RuntimeError('the other one')\n")
    places = f"{PYTHONPATH}{os.pathsep}{tmp_path / 'site'}"
    assert "fi_core" in output(EXEC, IDENTITY, tmp_path, PYTHONPATH=places)
    text = "import sys, types; sys.modules['flashinfer'] = types.ModuleType('flashinfer')\n"
    done = run([sys.executable], f"{text}import fi_core.compat; fi_core.compat.install()", tmp_path)
    assert "is imported already; call install() before the first import" in done.stderr


def test_patches_reach_fi(tmp_path: Path) -> None:
    text = """
import unittest.mock, flashinfer, flashinfer.fi_trace, fi_core
with unittest.mock.patch("flashinfer.rmsnorm", 3):
    assert fi_core.rmsnorm == 3
assert fi_core.rmsnorm is flashinfer.rmsnorm != 3
flashinfer.mine = 5
assert fi_core.mine == 5
del flashinfer.mine
assert not hasattr(fi_core, "mine")
assert flashinfer.fi_trace is fi_core.fi_trace, "the module does not hide the function"
from flashinfer.fi_trace import fi_trace
from flashinfer.trace import TraceTemplate
from flashinfer.api_logging import flashinfer_api
assert flashinfer.jit.gemm.gen_gemm_module is flashinfer.jit.gen_gemm_module
assert flashinfer.trace.templates.norm.rmsnorm_trace is fi_core.trace.templates.rmsnorm_trace
from flashinfer.jit.core import gen_jit_spec, logger
from flashinfer.jit.cpp_ext import run_ninja
from flashinfer.jit.gemm.core import gen_gemm_sm90_module
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module
from flashinfer.jit.attention.modules import gen_batch_prefill_module
from flashinfer.autotuner.autotuner import AutoTuner
assert AutoTuner is flashinfer.autotuner.AutoTuner
assert {"rmsnorm", "__version__"} <= {*dir(flashinfer)}
"""
    assert output(EXEC, text, tmp_path) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "a command is required, such as fi-core exec -- vllm"), (["--", "nosuch"], "no command")],
)
def test_wrong_commands(words: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fi_core", "exec", *words]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_the_command_flashinfer_is_there(tmp_path: Path) -> None:
    """In the command and in what it starts; without a store that can be written the rest works."""
    given = {"HOME": str(tmp_path), "PYTHONPATH": PYTHONPATH, "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "fi_core", "exec", "--"]
    for words in (["flashinfer", "list-modules"], ["sh", "-c", "flashinfer list-modules"]):
        done = subprocess.run([*command, *words], env=given, capture_output=True, text=True)
        assert done.stdout.startswith("Available compilation modules:"), done.stderr
    nowhere = given | {"FI_CACHE_DIR": "/dev/null/store"}
    assert subprocess.run([*command, "true"], env=nowhere).returncode == 0


def test_modules_run_as_programs(tmp_path: Path) -> None:
    command = [*EXEC, "-m", "flashinfer.collect_env"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert done.stdout.startswith("### fi environment report"), done.stderr
