"""What README and docs say is tried: Python blocks run, commands parse, messages are those of the sources."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fi_core.cli.arguments import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if not p.parts[-2].startswith("_"))]
PAGES += [*sorted((ROOT / "packages").glob("*/README.md")), ROOT / "benchmarks" / "README.md"]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages; "" is a fence without one."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in fences if language in languages]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)  # code may look like a link
PYTHON = [page for page in PAGES if blocks(page, "python")]
COMMANDS = [
    pytest.param(line, id=f"{name(page)}: {line}")
    for page in PAGES
    for block in blocks(page, "sh", "")
    for line in re.findall(r"^(?:\w+=\S+ )*(fi-core .*)", block, re.MULTILINE)
]


@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_runs(page: Path) -> None:
    scope: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, name(page), "exec"), scope)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_one(line: str) -> None:
    args = parser().parse_args(shlex.split(line, comments=True)[1:])
    assert args.run, "a group of commands is not a command"


def test_there_are_snippets() -> None:
    assert {ROOT / "README.md", ROOT / "docs/guides/quickstart.md", ROOT / "docs/guides/caching.md"} <= set(PYTHON)
    assert len(COMMANDS) > 8


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
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", FENCE.sub("", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert wrong == []
