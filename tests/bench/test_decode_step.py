"""benchmarks/decode_step.py: a step of each kind of model runs, and its bytes are those of its weights and cache."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("decode_step", "stream", "turns"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("decode_step")


def test_bytes_of_dense_models_and_of_chosen_experts(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = script.Model(2, 256, 4, 2, 64, 128, 500)
    sparse = script.Model(2, 256, 4, 2, 64, 128, 500, experts=16, top_k=2, qk_norm=False)
    monkeypatch.setattr(script, "MODELS", {"dense": dense, "sparse": sparse})
    words = ["--models", "dense", "sparse", "--device", "cpu", "--batches", "1,3", "--lengths", "100"]
    assert script.main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cache = 2 * 100 * 2 * 2 * 64  # layers, tokens, K and V, heads, dimensions
    shared, expert = 2 * 256 * (8 * 64 + 4 * 64) + 500 * 256, 3 * 128 * 256
    assert [row["bytes"] // 2 for row in rows[:2]] == [shared + 2 * expert + n * cache for n in (1, 3)]
    router = 2 * 16 * 256
    assert rows[2]["bytes"] // 2 == shared + router + 2 * 2 * expert + cache
    experts, rest = divmod(rows[3]["bytes"] // 2 - shared - router - 3 * cache, expert)
    assert 2 * 2 <= experts <= 2 * 6 and rest == 0
