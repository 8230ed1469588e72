"""Kept answers of slow tools: asked once for the same content, again for other content or a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.kept import kept


class Tool:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        return f"answer\nnumber {self.asked}"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "cache"))
    return Tool()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "gates").iterdir())


def test_what_decides_the_answer_is_asked_about_once(tool: Tool, tmp_path: Path) -> None:
    first = kept("question", "a", b"b", ask=tool)
    assert first == "answer\nnumber 1"
    assert kept("question", "a", b"b", ask=tool) == first
    for other in (("question", "a", "c"), ("question", "ab"), ("question", "", "ab"), ("another", "a", "b")):
        assert kept(*other, ask=tool) != first
    assert tool.asked == 5
    assert len(files(tmp_path)) == 5


@pytest.mark.parametrize("damage", [b"", b"half", b"\xff\xfe", b"0" * 64 + b"\nanswer"])
def test_a_damaged_answer_is_asked_for_again(tool: Tool, tmp_path: Path, damage: bytes) -> None:
    kept("question", "a", ask=tool)
    (path,) = files(tmp_path)
    path.write_bytes(damage)
    assert kept("question", "a", ask=tool) == "answer\nnumber 2"
    assert kept("question", "a", ask=tool) == "answer\nnumber 2"


def test_a_failure_is_not_kept(tool: Tool, tmp_path: Path) -> None:
    def fail() -> str:
        raise AssertionError("warning")

    for _ in range(2):
        with pytest.raises(AssertionError, match="warning"):
            kept("question", "a", ask=fail)
    assert kept("question", "a", ask=tool) == "answer\nnumber 1"


def test_without_a_place_to_write_it_asks(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert kept("question", "a", ask=tool) == "answer\nnumber 1"
    assert kept("question", "a", ask=tool) == "answer\nnumber 2"
