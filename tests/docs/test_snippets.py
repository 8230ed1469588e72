"""What README and docs say is tried: Python blocks run, commands parse, messages are those of the sources."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fi_bench import backends, cli, parsing
from fi_bench.cases import find
from fi_core.cli.arguments import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if not p.parts[-2].startswith("_"))]
PAGES += [*sorted((ROOT / "packages").glob("*/README.md")), ROOT / "benchmarks" / "README.md"]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages; "" is a fence without one."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in fences if language in languages]


def joined(block: str) -> list[str]:
    """The lines of a block, those that end in a backslash with the next one."""
    return block.replace("\\\n", " ").splitlines()


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
FENCED = [line for page in PAGES for block in blocks(page, "sh", "bash", "") for line in joined(block)]
BENCH = re.compile(r"(?:fi-bench|python3? (?:-m fi_bench|(?:benchmarks/)?flashinfer_benchmark\.py)) (.*)")
BENCHMARKS = sorted({found[1] for line in FENCED if (found := BENCH.match(line))})


@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_runs(page: Path) -> None:
    scope: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, name(page), "exec"), scope)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_one(line: str) -> None:
    args = parser().parse_args(shlex.split(line, comments=True)[1:])
    assert args.run, "a group of commands is not a command"


def check_run(words: list[str]) -> None:
    """The flags of a run parse, and the case has each backend that they name."""
    if "--testlist" in words or "-h" in words or "--help" in words:
        return
    for point in (point for line in parsing.read_lines(words) for point in line.points):
        case = find(point.routine)
        assert case is not None
        offered = backends.offered(case)
        assert [
            name for name in point.backends or () if name not in offered and not name.startswith("flashinfer")
        ] == []


@pytest.mark.parametrize("line", BENCHMARKS)
def test_benchmark_command_is_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)
    if words[0].startswith("-"):
        check_run(words)
        return
    at = words.index("--") if "--" in words else len(words)
    with pytest.raises(SystemExit):
        cli.VERBS[words[0]](["-h"])
    shown = capsys.readouterr().out
    assert [word for word in words[1:at] if word.startswith("--") and word not in shown] == []
    if words[at + 1 :]:
        check_run(words[at + 1 :])


def test_there_are_snippets() -> None:
    assert {ROOT / "README.md", ROOT / "docs/guides/quickstart.md", ROOT / "docs/guides/caching.md"} <= set(PYTHON)
    assert len(COMMANDS) > 8 and len(BENCHMARKS) > 15


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
