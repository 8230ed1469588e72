"""What every file keeps to: its length, its first line, its name, and what it must not mention."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from house.tree import CORE, KERNELS, PACKAGES, ROOT, files, files_of, parse, relative

CODE = {".py", ".h", ".cuh", ".cc", ".cu"}
SOURCES = [path for path in files() if path.suffix in CODE]
TEXTS = [path for path in files() if path.suffix not in {".png", ".svg", ".ico"} and path.name != "LICENSE"]


def test_no_file_is_over_500_lines() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_every_file_says_what_it_is() -> None:
    """The first line is a sentence: a docstring, or a comment in C++."""
    wrong = []
    for path in SOURCES:
        if path.suffix == ".py":
            first = (ast.get_docstring(parse(path)) or "").split("\n\n")[0]
        else:
            lines = [line for line in path.read_text().splitlines() if line.strip()]
            first = next((line for line in lines if not line.startswith("#!")), "")
            first = first if re.match(r"\s*(//|/\*)", first) else ""
        if len(first.split()) < 3:
            wrong.append(relative(path))
    assert not wrong, "\n".join(wrong)


# Codenames, version suffixes, and names that say nothing; models belong in bench cases.
BANNED = re.compile(
    r"(^|[_-])(v\d+|new|old|legacy|misc|stuff|cake|prims|b12x|tgv|xqa|msa|bgmv|monomoe"
    r"|llama\d*|qwen\d*|deepseek|mixtral|mistral|kimi|glm\d*)($|[_-])|^.+_core$"
)


def test_no_banned_name() -> None:
    wrong = []
    for path in files():
        top = next((folder for folder in PACKAGES.values() if path.is_relative_to(folder)), ROOT)
        for part in path.relative_to(top).with_suffix("").parts:
            if BANNED.search(part) and not part.startswith("__"):
                wrong.append(f"{relative(path)}: {part}")
    assert not wrong, "\n".join(wrong)


def test_common_stands_once_per_family() -> None:
    folders = [path.parent for path in SOURCES if path.stem == "common"]
    assert sorted({f for f in folders if folders.count(f) > 1}) == []


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a path of one machine", r"(?<![\w.$}/~*])/(work|root|tmp)/"),
        (
            "the host of a package registry",
            r"pypi\.(org|nvidia)|pythonhosted\.|download\.pytorch\.|npmjs\.|deb\.debian\.",
        ),
        ("an open end", r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b"),
    ],
)
def test_nothing_mentions(what: str, pattern: str) -> None:
    wrong = [
        f"{relative(path)}:{number}: {what}: {match.group()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := re.search(pattern, line))
    ]
    assert not wrong, "\n".join(wrong)


def _reads_environment(tree: ast.AST) -> list[int]:
    """Lines with os.environ, os.getenv and similar functions, or imports of them."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}:
            found.append(node.lineno)
    return found


def test_environment_is_read_in_one_place() -> None:
    owner = CORE / "runtime" / "env.py"
    assert _reads_environment(parse(owner)), "runtime/env.py reads os.environ"
    python = [p for folder in PACKAGES.values() for p in files_of(folder, ".py") if p != owner]
    wrong = [f"{relative(path)}:{line}" for path in python for line in _reads_environment(parse(path))]
    native = [p for p in files_of(KERNELS, *CODE) if re.search(r"\bgetenv\b", p.read_text())]
    assert wrong + [relative(path) for path in native] == []


def test_version_and_licence_are_the_same_everywhere() -> None:
    version = (ROOT / "VERSION").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version)
    assert {name: (folder / "VERSION").read_text() for name, folder in PACKAGES.items()} == dict.fromkeys(
        PACKAGES, version
    )
    assert version.strip() in (ROOT / "CHANGELOG.md").read_text()
    licence = (ROOT / "LICENSE").read_bytes()
    projects = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
    assert len(projects) == len(PACKAGES)
    assert [p.name for p in projects if (p / "LICENSE").read_bytes() != licence] == []


def test_packages_are_typed() -> None:
    assert [name for name, folder in PACKAGES.items() if not (folder / "py.typed").exists()] == []


def _pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"\b([a-z][a-z0-9-]+)==([0-9][0-9.]*)", text))


def test_pre_commit_runs_the_pinned_tools() -> None:
    hooks = _pins((ROOT / ".pre-commit-config.yaml").read_text())
    pinned = _pins((ROOT / "pyproject.toml").read_text() + (ROOT / "noxfile.py").read_text())
    assert {"ruff", "clang-format", "mypy"} <= set(hooks)
    assert {name: version for name, version in hooks.items() if pinned.get(name) != version} == {}


def test_links_stay_inside() -> None:
    """The links of the tree (VERSION, lockstep.py) point into it."""
    links = [path for path in (ROOT / "packages").rglob("*") if path.is_symlink()]
    assert links
    assert [relative(p) for p in links if not Path(p.resolve()).is_relative_to(ROOT) or not p.exists()] == []
