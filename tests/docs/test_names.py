"""The table of FlashInfer's names: how a difference is found, and what the page says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fi_core
from fi_core.compat.lacking import parameters

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def names() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("names", DOCS / "names.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["names"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["names"]


@pytest.mark.parametrize(
    ("theirs", "ours", "how"),
    [
        ("a, b=1", "a, b=1, c=2", []),
        ("a, b=1", "self, a, *, b=1", ["`b` by keyword only"]),
        ("a, b", "b, a", ["`a` at place 2", "`b` at place 1"]),
        ("a, *, b", "a, **options", []),
        ("a, b", "a", ["`b` is missing"]),
        ("a=1", "a", ["`a` is required"]),
        ("a", "a, b", ["`b` is required"]),
        ("a=1", "a=2", ["`a` defaults to `2`"]),
        ("a='torch.bfloat16'", "a=None", []),
        ("self, a", "a", []),
    ],
)
def test_differences(names: ModuleType, theirs: str, ours: str, how: list[str]) -> None:
    assert names.differences(parameters(theirs), parameters(ours)) == how


def test_rows(names: ModuleType) -> None:
    """Every name has one row for each place, and its state."""
    rows = names.rows()
    by_name = {row.name: row for row in rows}
    assert len(by_name) == len(rows) > 400
    assert by_name["norm.rmsnorm"] == ("norm.rmsnorm", "same", "")
    assert by_name["prefill.trtllm_fmha_v2_prefill"].state == "differs"
    assert by_name["prims_ts.gemm.fp4_linear"].state == "Blackwell only"
    assert by_name["kda.recurrent_kda"].state == "not yet"
    lacking = [row for row in rows if row.state == "differs" and "`" in row.how and ("missing" in row.how)]
    assert lacking == [], "no parameter of FlashInfer is missing"


def test_every_public_function_has_a_row(names: ModuleType) -> None:
    """What fi exports at the top under FlashInfer's name is in the table, but for what only fi has."""
    ours = {"fi_trace", "loaded_kernels", "prepare", "supports", "sample_from_logits"}
    listed = {row.name.rpartition(".")[2] for row in names.rows()}
    missing = [n for n in fi_core.__all__ if not n.startswith("__") and n not in listed | ours]
    assert missing == []
