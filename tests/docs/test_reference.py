"""The generated reference covers everything public."""

from __future__ import annotations

import importlib.util
import re
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
    """Every public function has a docstring, and a directive with its signature."""
    page = generate.functions()
    names = [name for name in fi_core.__all__ if not name.startswith("__")]
    found = re.findall(r"````\{py:(?:function|class)\} fi_core\.(\w+)\(", page)
    assert sorted(set(names) - set(found)) == []
    assert "````{py:method} fi_core.BatchDecodeWithPagedKVCacheWrapper.run(q: torch.Tensor, " in page
    assert "````{py:property} fi_core.BatchDecodeWithPagedKVCacheWrapper.resolved_backend\n" in page
    empty = re.findall(r"````\{py:\w+\} (\S+?)\(.*\n(?:\n)*````", page)
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
