"""Tables and charts of the README and of docs/performance show the numbers of benchmarks/results."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def charts() -> Iterator[ModuleType]:
    """docs/charts.py, whose import needs no matplotlib; it puts docs/ on the path, for docs/results.py."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("charts", ROOT / "docs" / "charts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    sys.modules.pop("results", None)


def test_tables_equal_the_data(charts: ModuleType) -> None:
    pages = charts.results.pages()
    names = [name for page in pages for _, name, _, _ in charts.results.MARKED.findall(page.read_text())]
    assert sorted(names) == sorted(charts.results.TABLES), "each table stands on one page"
    assert ROOT / "README.md" in pages
    stale = [page.name for page in pages if charts.results.filled(page.read_text()) != page.read_text()]
    assert not stale, f"run `nox -s charts`: {stale}"


def test_every_table_of_results_is_generated(charts: ModuleType) -> None:
    """No number of docs/performance is typed by hand: what looks like a table stands in a marker."""
    for page in sorted((ROOT / "docs" / "performance").glob("*.md")):
        rest = charts.results.MARKED.sub("", page.read_text())
        assert not re.findall(r"^\|.*", rest, re.MULTILINE), f"{page.name}: give the table to docs/results.py"


def test_every_result_file_is_used() -> None:
    """By a table, or by a page or note that says what it is."""
    folder = ROOT / "benchmarks" / "results"
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    scripts = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.py")))
    read = {f"h200-{name}.jsonl" for name in re.findall(r'(?:rows|beside|_beside)\("([\w-]+)"', scripts)}
    unused = [path.name for path in sorted(folder.iterdir()) if path.name not in text and path.name not in read]
    assert not unused, "name it on a page, or delete it"


def test_a_changed_number_is_noticed(charts: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    first = re.search(r"\*\*(\d+\.\d+)x\*\*", text)
    assert first
    wrong = text.replace(first[0], "**9.99x**", 1)
    assert charts.results.filled(wrong) == text


def test_charts_equal_the_data(charts: ModuleType) -> None:
    """An SVG says in its description what it shows."""
    for name, numbers in charts.descriptions().items():
        text = (charts.FOLDER / f"{name}.svg").read_text()
        found = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
        assert found and html.unescape(found[1]) == numbers, f"{name}.svg: run `nox -s charts`"


def test_summary_counts_what_is_slower(charts: ModuleType) -> None:
    """The README's table hides no case: each file's rows with a peer are counted, and the worst one is shown."""
    results = charts.results
    by_name = {family.name: family.results for family in results.families()}
    drawn = by_name["decode attention"]
    assert len(drawn) == sum(
        row["who"] == "auto" for name in ("decode-grid", "decode-large") for row in results.rows(name)
    )
    assert len(by_name["top-k"]) == len(results.rows("topk"))
    worst = min(result.speedup for result in drawn)
    row = next(line for line in results.summary().splitlines() if line.startswith("| decode attention"))
    assert f"| {worst:.2f}x .. " in row
    assert row.endswith(f" {sum(r.best / r.fi < 1 / 1.02 for r in drawn)} |")


def test_speedup_is_over_the_fastest_peer(charts: ModuleType) -> None:
    result = charts.results.Result("case", 10.0, {"slow": 30.0, "fast": 20.0})
    assert result.speedup == 2.0
    assert charts.colour(2.0) == charts.FASTER
    assert charts.colour(1.01) == charts.EQUAL
    assert charts.colour(0.9) == charts.SLOWER
