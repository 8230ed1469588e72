"""What README and docs say is tried: Python blocks run, messages are those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import FENCE, PAGES, ROOT, blocks, name

PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_runs(page: Path) -> None:
    scope: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, name(page), "exec"), scope)


def test_there_are_snippets() -> None:
    assert {ROOT / "README.md", ROOT / "docs/guides/quickstart.md", ROOT / "docs/guides/caching.md"} <= set(PYTHON)


def test_messages_are_those_of_the_sources() -> None:
    """Each message of the troubleshooting table occurs in a source file."""
    table = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    sources = [
        p.read_text() for p in (ROOT / "packages").glob("*/src/**/*") if p.suffix in (".py", ".h", ".cuh", ".cc")
    ]
    # A message may go on in the next string literal of its statement.
    text = "\n".join(re.sub(r'"\s*\n\s*f?"', "", source) for source in sources)
    assert len(messages) > 12
    assert [message for message in messages if message not in text] == []


def test_links_lead_somewhere() -> None:
    """Relative links of README and of the packages' pages; Sphinx checks those of the docs."""
    wrong = [
        f"{name(page)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", FENCE.sub("", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert wrong == []
