"""What keeps a tree from being released, and what the five packages say of themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
from clean_site import ROOT

CHANGELOG = "# Changelog\n\n<!-- releases -->\n\n## 1.2.0 - 2026-01-31\n\n### Added\n\n- One thing.\n"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import release

    return release


def test_a_tree_that_can_be_released(release: Any) -> None:
    for tags in ([], ["v1.2.0"]):
        assert list(release.problems("1.2.0", CHANGELOG, "", tags, [])) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"changes": " M README.md"}, r"changes that are not committed: +M README\.md"),
        ({"version": "1.3.0", "tags": []}, r"'## 1\.3\.0 - YYYY-MM-DD' is required .* got '1\.2\.0 - 2026-01-31'"),
        (
            {"changelog": CHANGELOG.replace("2026-01-31", "soon")},
            r"'## 1\.2\.0 - YYYY-MM-DD' is required .* got '1\.2\.0 - ",
        ),
        ({"changelog": CHANGELOG.replace("## 1.2.0", "## Unreleased\n\n## 1.2.0")}, "got 'Unreleased'"),
        ({"pending": ["+a.moe.md"]}, r"new version into VERSION, .* run `nox -s changelog`, which moves \+a\.moe\.md"),
        ({"tags": ["v1.1.0"]}, "HEAD has the tag v1.1.0; VERSION says v1.2.0"),
    ],
)
def test_what_keeps_a_tree_from_it(release: Any, change: dict[str, Any], reason: str) -> None:
    given = {"version": "1.2.0", "changelog": CHANGELOG, "changes": "", "tags": ["v1.2.0"], "pending": [], **change}
    (line,) = release.problems(**given)
    assert re.search(reason, line), line


def test_pending_changes_of_a_new_version_ask_for_its_section_alone(release: Any) -> None:
    section, pending = release.problems("1.3.0", CHANGELOG, "", [], ["+a.moe.md"])
    assert "is required as its first section" in section and "changes/: run `nox -s changelog`" in pending


def test_a_pending_change_is_of_a_family_of_the_changelog() -> None:
    """towncrier leaves out a file of another type."""
    known = set(re.findall(r'directory = "(\w+)", name =', (ROOT / "pyproject.toml").read_text()))
    named = [path.name for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    wrong = [name for name in named if not ((m := re.fullmatch(r"\+[\w-]+\.(\w+)\.md", name)) and m[1] in known)]
    assert known >= {"attention", "moe", "removed"} and wrong == []


def test_the_five_packages_say_the_same_of_themselves() -> None:
    """Everything before the dynamic fields but name and description: licence, author, Python, classifiers."""
    said = set()
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        text = path.read_text().partition("[project]\n")[2].partition("dynamic =")[0]
        said.add(re.sub(r'^(name|description) = ".*"\n', "", text, flags=re.MULTILINE))
        for word in (
            "authors =",
            'license = "Apache-2.0"',
            "license-files =",
            "requires-python =",
            "readme =",
            "keywords =",
        ):
            assert word in text, path
    (text,) = said
    supported = re.findall(r"Python :: (3\.\d+)", text)
    assert supported == sorted(supported, key=lambda v: int(v[2:])) and f'">={supported[0]}"' in text
    for word in ("Environment :: GPU :: NVIDIA CUDA", "Typing :: Typed", "Operating System :: POSIX :: Linux"):
        assert word in text


def test_the_policy_says_who_supports_what() -> None:
    security, support = (ROOT / "SECURITY.md").read_text(), (ROOT / "docs/concepts/support.md").read_text()
    for alias in (ROOT / "packages/fi-core/src/fi_core/compat/site").glob("*.dist-info"):
        assert f"`{alias.name.partition('-')[0]}`" in security, "scanners take it for a package"
    core = (ROOT / "packages/fi-core/pyproject.toml").read_text()
    for pattern, row in (
        (r"torch>=([\d.]+)", "| torch | {} and newer"),
        (r'requires-python = ">=([\d.]+)"', "| Python | {}"),
    ):
        found = re.search(pattern, core)
        assert found and row.format(found[1]) in support


def test_the_readme_and_the_changelog_say_which_cards_have_run() -> None:
    """Those with results; binaries for other targets are compiled alone, as docs/support.py tells of each target."""
    cards = {path.name.partition("-")[0].upper() for path in (ROOT / "benchmarks/results").glob("*.jsonl")}
    for page in ("README.md", "CHANGELOG.md"):
        (said,) = re.findall(r"have run on\s([\w\s]+?)\salone", (ROOT / page).read_text())
        assert set(said.split()) - {"and"} == cards - {"ZEN5"}, page  # a processor
