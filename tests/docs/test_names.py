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
from fi_core.compat.names import read

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
        ("a, *, b", "a, **options", ["`b` is hidden in ** of the function"]),
        ("a, b", "a", ["`b` is missing"]),
        ("a=1", "a", ["`a` is required"]),
        ("a", "a, b", ["`b` is required"]),
        ("a=1", "a=2", ["`a` defaults to `2`"]),
        ("a='torch.bfloat16'", "a=None", []),
        ("a='_UNSET'", "a=None", []),
        ("a='MAX_BLOCKS'", "a=128", []),
        ("a='NHD'", "a=None", ["`a` defaults to `None`"]),
        ("self, a", "a", []),
    ],
)
def test_differences(names: ModuleType, theirs: str, ours: str, how: list[str]) -> None:
    assert names.differences(parameters(theirs), parameters(ours)) == how


def test_rows(names: ModuleType) -> None:
    """Every name has one row, and its state."""
    rows = names.rows()
    by_name = {row.name: row for row in rows}
    assert len(by_name) == len(rows) > 1000
    assert by_name["rmsnorm"] == ("rmsnorm", "same", "")
    assert by_name["trtllm_fmha_v2_prefill"].state == "differs"
    assert by_name["gemm.fp4_linear"].state == "Blackwell only"


# It only falls: a change that makes parameters as FlashInfer's lowers it.
MOST_DIFFERENCES = 0


def test_parameters_are_those_of_flashinfer(names: ModuleType) -> None:
    """Each parameter of each public name at its place with its default; the rest is printed."""
    wrong = [f"{path}: {how}" for path, found in names.compared().items() for how in found]
    print("\n".join(wrong))
    assert len(wrong) <= MOST_DIFFERENCES, "\n".join(wrong)
    assert len(wrong) == MOST_DIFFERENCES, f"lower MOST_DIFFERENCES to {len(wrong)}"


def test_every_public_function_is_listed() -> None:
    """What fi exports at the top under FlashInfer's name is in the table, but for what only fi has."""
    ours = {
        "batch_invariant",
        "loaded_kernels",
        "prepare",
        "supports",
        "sample_from_logits",
        "top_k_renorm_prob",
        "top_p_renorm_prob",
    }
    listed = {entry.name for entry in read().values()}
    missing = [n for n in fi_core.__all__ if not n.startswith("__") and n not in listed | ours]
    assert missing == []
