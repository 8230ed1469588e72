"""The reference's docstring parser: Google sections, and the older prose."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["docstrings"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


GOOGLE = """
RMSNorm over the last dimension.

A second paragraph, with a colon: it stays text.

Args:
    input: `[n, d]`, fp16 or bf16; rows may
        be strided.
    q, k: `[n, heads, d]`.
    **options: passed on.
Returns:
    out, or a tuple
    (out, lse).
Raises:
    ValueError: a shape does not fit.
    TypeError: a dtype does not fit.

After the sections.
"""


def test_google_sections(docstrings: ModuleType) -> None:
    parsed = docstrings.parse(GOOGLE, ["input", "q", "k", "options"])
    assert parsed.text == (
        "RMSNorm over the last dimension.\n\nA second paragraph, with a colon: it stays text.\n\nAfter the sections."
    )
    assert parsed.fields() == [
        ":param input: `[n, d]`, fp16 or bf16; rows may be strided.",
        ":param q: `[n, heads, d]`.",
        ":param k: `[n, heads, d]`.",
        ":param options: passed on.",
        ":returns: out, or a tuple (out, lse).",
        ":raises ValueError: a shape does not fit.",
        ":raises TypeError: a dtype does not fit.",
    ]


def test_google_section_of_a_method_is_indented_as_it_is_written(docstrings: ModuleType) -> None:
    parsed = docstrings.parse("Runs.\n\n    Args:\n        q: queries.\n\n    Returns:\n        out.\n", ["q"])
    assert (parsed.parameters, parsed.returns) == ([("q", "queries.")], "out.")


def test_prose(docstrings: ModuleType) -> None:
    doc = """`x / y` of each row; note: this is text.

    input: `[n, d]`; rows may be strided. weight: `[d]`, scale: fp32.
    eps: added
    to the mean.
    unknown: stays with eps.

    Returns out. Raises ValueError (shape, stride) or TypeError (dtype) naming the argument.
    """
    parsed = docstrings.parse(doc, ["input", "weight", "scale", "eps"])
    assert parsed.text == "`x / y` of each row; note: this is text."
    assert [name for name, _ in parsed.parameters] == ["input", "weight", "scale", "eps"]
    assert parsed.parameters[1] == ("weight", "`[d]`")
    assert parsed.fields()[3] == ":param eps: added to the mean. unknown: stays with eps."
    assert parsed.returns == "out."
    assert parsed.raises == [("ValueError", "shape, stride"), ("TypeError", "dtype")]


@pytest.mark.parametrize(
    ("doc", "raises"),
    [
        ("Text. Raises ValueError or TypeError naming the argument.", ["ValueError", "TypeError"]),
        ("Text.\n\nRaises UnsupportedError if nothing takes it.", ["UnsupportedError"]),
        ("What this raises is text.", []),
    ],
)
def test_raises_in_a_sentence(docstrings: ModuleType, doc: str, raises: list[str]) -> None:
    assert [kind for kind, _ in docstrings.parse(doc, []).raises] == raises
