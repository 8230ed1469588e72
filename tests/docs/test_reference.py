"""The generated reference covers everything public, and the demo shows what it claims."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fi_core
from fi_core.env import env
from fi_core.registry import ops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions(generate: ModuleType) -> None:
    """Every public function has a docstring, and a directive with its signature; every class one without."""
    page = generate.functions()
    names = [name for name in fi_core.__all__ if not name.startswith("__")]
    kinds = {name: "class" if isinstance(getattr(fi_core, name), type) else "function" for name in names}
    ends = {"class": "\n", "function": "("}
    assert [n for n, kind in kinds.items() if f"{{py:{kind}}} fi_core.{n}{ends[kind]}" not in page] == []
    empty = re.findall(r"````\{py:function\} (\S+?)\(.*\n(?:\n)*````", page)
    assert empty == []


def test_ops(generate: ModuleType) -> None:
    page = generate.ops()
    assert [op for op in ops() if f"\n### {op}\n" not in page] == []
    row = next(line for line in page.splitlines() if line.startswith("| `rmsnorm` |"))
    assert row.count("cuda (") == 5 and row.count("cpu (") == 1


def test_command_line(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = generate.command_line()
    for command in ("doctor", "why", "prebuild", "cache prune", "replay"):
        assert f"\n## fi-core {command}\n" in page


def test_environment(generate: ModuleType) -> None:
    page = generate.environment()
    assert [row.name for row in env.table() if f"`{row.name}`" not in page] == []


def test_demo() -> None:
    """A decoder block on the bytes of a text, every op checked; what is no text is refused in one line."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    refused = subprocess.run([*command, str(ROOT / "missing")], capture_output=True, text=True)
    assert refused.returncode == 1
    assert re.fullmatch(r"FILE: a text is required; .*No such file.*\n", refused.stderr)
    done = subprocess.run([*command, str(ROOT / "LICENSE")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "17 calls checked; all are right." in done.stdout
    for op in ("rmsnorm", "single_prefill_with_kv_cache", "single_decode_with_kv_cache", "merge_state", "silu_and_mul"):
        assert re.search(rf"^{op} .* ms .* us .*(jit|store|fi-\w+|kernel of a line above)", done.stdout, re.MULTILINE)
