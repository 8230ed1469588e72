"""A release may not be slower than the last one on any named shape, and its changelog shows the comparison."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import speeds

    yield speeds
    for name in ("speeds", "results", "records"):
        sys.modules.pop(name, None)


@pytest.fixture
def tree(speeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of version 1.1.0 with the release 1.0.0 of what is measured."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.1.0 - 2026-02-28\n\n- It.\n\n## 1.0.0 - 2026-01-31\n")
    (tmp_path / "VERSION").write_text("1.1.0\n")
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / "1.0.0.jsonl").write_text(speeds.as_text(speeds.measured()))
    monkeypatch.setattr(speeds, "ROOT", tmp_path)
    monkeypatch.setattr(speeds, "RELEASES", tmp_path / "releases")
    monkeypatch.setattr(speeds, "CHANGELOG", tmp_path / "CHANGELOG.md")
    return tmp_path


def plant(speeds: Any, monkeypatch: pytest.MonkeyPatch, case: str, times: float, peers: float = 1.0) -> Any:
    """What is measured, with one shape that takes so many times as long, and its peers so many."""
    found = speeds.measured()
    (shape,) = (shape for shape in found if shape.case == case)
    old = found[shape]
    found[shape] = speeds.Result(case, old.fi * times, {name: us * peers for name, us in old.peers.items()})
    monkeypatch.setattr(speeds, "measured", lambda: found)
    return shape


def test_no_named_shape_is_slower_than_in_the_last_release(speeds: Any) -> None:
    """Nor has one gone. Slower or fewer results need a reason, and a release that says so."""
    newest = max((path.stem for path in speeds.RELEASES.glob("*.jsonl")), key=lambda v: [*map(int, v.split("."))])
    old = speeds.kept(newest)
    assert len(old) > 700 and len({shape.family for shape in old}) > 15
    assert list(speeds.problems(old, speeds.measured())) == []


def test_equal_times_pass(speeds: Any, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file and the table of the version are written, and a second run finds them."""
    assert speeds.main(["check"]) == 1
    assert capsys.readouterr().out.count("run `python docs/speeds.py`") == 2
    assert speeds.main([]) == 0
    assert speeds.main(["check"]) == 0
    assert "beside 1.0.0" in capsys.readouterr().out
    text = (tree / "CHANGELOG.md").read_text()
    head, speed, last = re.split("### Speed\n|## 1.0.0", text)
    assert head.endswith("\n\n- It.\n\n") and speed.endswith("<!-- end -->\n\n") and last == " - 2026-01-31\n"
    assert "| family | shapes | over the fastest peer | least of them | over 1.0.0 | least of them |" in text
    assert (tree / "releases" / "1.1.0.jsonl").read_text() == (tree / "releases" / "1.0.0.jsonl").read_text()


@pytest.mark.parametrize("case", ["gdn decode b1", "mixtral bf16 T16", "b128 kv4k h128", "ragged 4096 x 32768"])
def test_a_slower_shape_keeps_a_version_from_its_release(
    case: str, speeds: Any, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names shape and both times; the table shows it as the least of its family."""
    shape = plant(speeds, monkeypatch, case, 1.03)
    assert speeds.main([]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{shape.family}: {case}: 1.030 of the last release's time (") and "beside 1.0.0" in last
    assert f"0.97x, {case} |" in (tree / "CHANGELOG.md").read_text()
    assert speeds.main(["check"]) == 1


def test_what_differs_by_the_card_passes(speeds: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm card slows the peers as well; a difference of 2 % is that of two machines; less time is none."""
    for times, peers in ((1.2, 1.19), (1.02, 1.0), (0.9, 0.8), (0.5, 1.0)):
        with monkeypatch.context() as patch:
            plant(speeds, patch, "mixtral bf16 T16", times, peers)
            assert list(speeds.problems(speeds.kept("1.0.0"), speeds.measured())) == [], (times, peers)


def test_a_shape_that_is_not_measured_any_more(speeds: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = speeds.measured()
    gone = next(iter(found))
    left = {shape: result for shape, result in found.items() if shape != gone}
    assert list(speeds.problems(found, left)) == [f"{gone.family}: {gone.case}: is no longer measured"]
    new = {**found, speeds.Shape(gone.family, "another"): found[gone]}
    assert list(speeds.problems(found, new)) == []


def test_the_release_before_is_that_of_the_lower_version(speeds: Any, tree: Path) -> None:
    for version in ("0.9.0", "0.10.0", "1.1.0", "2.0.0"):
        (tree / "releases" / f"{version}.jsonl").write_text("")
    assert [speeds.last(v) for v in ("0.9.0", "0.10.0", "0.11.0", "1.1.0", "1.2.0")] == [
        None, "0.9.0", "0.10.0", "1.0.0", "1.1.0",
    ]  # fmt: skip


def test_a_changelog_without_a_section_of_the_version(speeds: Any) -> None:
    with pytest.raises(ValueError, match=r"'## 1\.0\.0 - YYYY-MM-DD' is required: run `nox -s changelog`"):
        speeds.filled("# Changelog\n", "1.0.0", "")
