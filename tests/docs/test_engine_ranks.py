"""tools/engine_ranks.py starts engines on several ranks, and compares what they have served with the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import engine_ranks as tool


class LLM:
    """Generates the tokens of a request's prompt, and on several ranks another third token of each second request."""

    def __init__(self, **given: Any) -> None:
        self.ranks = given["tensor_parallel_size"]
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def generate(self, given: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        found = []
        for number, prompt in enumerate(given):
            tokens = prompt["prompt_token_ids"][:4]
            if self.ranks > 1 and number % 2:
                tokens[2] = 101
            logprobs = [{token: SimpleNamespace(logprob=-0.25 * self.ranks)} for token in tokens]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)]))
        return found


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process, of which those of 8 ranks do not start."""
    module = ModuleType("vllm")
    vars(module).update(LLM=LLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)

    def started(words: list[str], kernels: str, place: Path) -> dict[str, Any]:
        if "--ranks=8" in words:
            raise subprocess.CalledProcessError(1, "python")
        assert tool.main([*words, "--serve", str(place)]) == 0
        found: dict[str, Any] = json.loads(place.read_text())
        return found

    monkeypatch.setattr(tool, "started", started)


def test_ranks_are_compared_with_one(vllm: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["model", "--ranks", "1,2,8", "--requests", "6", "--out", str(out)]
    assert tool.main(words) == 1, "8 ranks have not started"
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["ranks"], row["kernels"]) for row in rows] == [
        (n, kernels) for n in (1, 2, 8) for kernels in ("own", "plugin")
    ]
    assert all(
        (row["same_requests"], row["before_difference"], row["logprobs_apart"]) == (6, 1.0, 0) for row in rows[:2]
    )
    assert all((row["same_requests"], row["of"]) == (3, 6) for row in rows[2:4])
    assert all((row["before_difference"], row["logprobs_apart"]) == (0.75, 0.25) for row in rows[2:4])
    assert all("error" in row for row in rows[4:])


def test_only_the_plugin_is_chosen_by_options() -> None:
    own, plugin = (tool.engine("model", 4, kernels) for kernels in ("own", "plugin"))
    assert plugin == own | {"attention_backend": "CUSTOM", "ir_op_priority": tool.NORMS}
    assert own["tensor_parallel_size"] == 4
