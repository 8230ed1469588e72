"""The generated reference covers everything public."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fi_core
from fi_core.registry import ops
from fi_core.runtime.env import env
from fi_core.runtime.spec.target import PREBUILT_ARCHS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate() -> Iterator[ModuleType]:
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


@pytest.fixture(scope="module")
def functions(generate: ModuleType) -> str:
    return "".join([*map(generate.family_page, generate.families()), generate.library()])


def test_functions(functions: str) -> None:
    """Every public function has a docstring, and one directive with its signature."""
    names = [name for name in fi_core.__all__ if not name.startswith("__")]
    found = re.findall(r"````\{py:(?:function|class)\} (fi_core\.[\w.]+)\(", functions)
    assert [name for name in names if found.count(f"fi_core.{name}") != 1] == []
    assert "````{py:method} fi_core.BatchDecodeWithPagedKVCacheWrapper.run(q: torch.Tensor, " in functions
    assert "````{py:property} fi_core.BatchDecodeWithPagedKVCacheWrapper.resolved_backend\n" in functions
    empty = re.findall(r"````\{py:\w+\} (\S+?)\(.*\n(?:\n)*````", functions)
    assert empty == []


def test_the_support_matrix_lists_every_public_name(generate: ModuleType) -> None:
    page = generate.support_matrix()
    modules = (*generate.families(), *generate.LIBRARY)
    names = [place for module in modules for place, _ in generate.members(module)]
    assert len(names) > 250
    assert [name for name in names if f"<{name}>`" not in page] == []


def test_every_target_says_what_has_been_done_with_it(generate: ModuleType) -> None:
    """From the registry and the names of the files of results; a card that nobody knows is an error."""
    import support

    page = generate.targets()
    rows = {row.split(" | ")[0].lstrip("| "): row.split(" | ") for row in page.splitlines() if row.startswith("| ")}
    assert rows.keys() >= {"CPU", *(f"sm_{arch}" for arch in PREBUILT_ARCHS)}
    ran = {name for name, cells in rows.items() if cells[-1].startswith("yes")}
    assert ran == {"CPU", "sm_90a"}
    assert sum(n for arch in (*support.GPUS, "cpu") for n in support.results(arch).values()) == len(
        list(support.RESULTS.glob("*.jsonl"))
    )
    assert set(support.GPUS) == set(PREBUILT_ARCHS)


def test_parameters_are_lists(functions: str) -> None:
    entry = functions.split("````{py:function} fi_core.rmsnorm(")[1].split("````")[0]
    for line in (":param input: ", ":param weight: ", ":returns: ", ":raises ValueError: ", ":raises TypeError: "):
        assert f"\n{line}" in entry


def test_every_family_has_a_page(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of public names is a family, also one that nothing else names, or shown with the library functions."""
    assert {*generate.families(), *generate.LIBRARY} == set(fi_core._MODULES)
    index = (ROOT / "docs" / "reference" / "index.md").read_text() + generate.functions()
    listed = set(re.findall(r"^(?:_generated/)?([a-z]+[\w-]*)$", index, re.MULTILINE))
    assert listed == {name.removesuffix(".md") for name in generate.PAGES}
    monkeypatch.setitem(fi_core._MODULES, "new_family", ())
    assert "new_family" in generate.families() and generate.title("new_family") == "New family"


def test_support_matrix(generate: ModuleType) -> None:
    """A function shows the op that it launches, and the implementations of that op on the CPU, sm_80 and sm_90."""
    page = generate.support_matrix()
    lines = [line for line in page.splitlines() if line.startswith("|") and "`" in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    by_name = {row[0].split("`")[1].split(" ")[0]: row for row in rows if row[0].startswith("{py:obj}")}
    assert by_name["rmsnorm"][1:3] == ["`rmsnorm`", "`cpu`"]
    assert by_name["fused_add_rmsnorm"][1] == "`rmsnorm`" and by_name["silu_and_mul"][1] == "`act_and_mul`"
    decode = by_name["BatchDecodeWithPagedKVCacheWrapper"]
    assert decode[1:3] == ["`batch_decode`", "`cpu`"]
    assert decode[4].count("`") > decode[3].count("`") > 2, "Hopper has one more implementation"
    shown = {row[1].strip("`") for row in rows}
    assert set(ops()) - shown == set(), "an op that no public function launches"
    kernels = [name for name in fi_core._HOME if fi_core._HOME[name] in ("norm", "rope", "activation", "page", "topk")]
    assert [name for name in kernels if name not in by_name and name != "TopKTieBreak"] == []


def test_ops(generate: ModuleType) -> None:
    page = generate.ops()
    assert [op for op in ops() if f"\n### {op}\n" not in page] == []
    row = next(line for line in page.splitlines() if line.startswith("| `rmsnorm` |"))
    assert row.count("(") == 6, "the CPU and five architectures"


def test_command_line(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = generate.command_line()
    for command in ("doctor", "why", "prebuild", "cache prune", "replay"):
        assert f"\n## fi-core {command}\n" in page


def test_environment(generate: ModuleType) -> None:
    page = generate.environment()
    assert [row.name for row in env.table() if f"`{row.name}`" not in page] == []


def test_signature_keeps_the_quotes_of_defaults(functions: str) -> None:
    """A postponed annotation is shown without quotes, a default as it is written."""
    entry = functions.split("````{py:class} fi_core.BatchDecodeWithPagedKVCacheWrapper(")[1].splitlines()[0]
    assert entry.startswith("float_workspace_buffer: torch.Tensor, kv_layout: str = 'NHD', ")
    assert "(self" not in functions


def test_purpose_is_the_first_sentence(generate: ModuleType) -> None:
    def call(x: int) -> None:
        """Draws from the top-p set (Holtzman et al. 2019). More about it.

        Args:
            x: a number.
        """

    assert generate.first_sentence(call) == "Draws from the top-p set (Holtzman et al. 2019)."
