"""tools/engine_invariance.py compares two servings of an engine, whose stand-in here counts what it has served."""

from __future__ import annotations

import types
from typing import Any

import pytest

import engine_invariance as tool


class Engine:
    """Generates two tokens of each request, whose logprobs follow the number of its neighbours where it is asked to."""

    def __init__(self, follows_the_batch: bool) -> None:
        self.follows, self.waiting = follows_the_batch, list[tuple[str, list[int]]]()

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.waiting.append((request_id, prompt["prompt_token_ids"]))

    def step(self) -> list[Any]:
        served, self.waiting = self.waiting[:3], self.waiting[3:]

        def output(request_id: str, prompt: list[int]) -> Any:
            logprob = -len(prompt) / 7 * (1 + 1e-16 * (1 << len(served)) * self.follows)
            steps = [{token: types.SimpleNamespace(logprob=logprob)} for token in prompt[:2]]
            one = types.SimpleNamespace(token_ids=prompt[:2], logprobs=steps)
            return types.SimpleNamespace(request_id=request_id, finished=True, outputs=[one])

        return [output(*one) for one in served]


@pytest.mark.parametrize("follows", [False, True])
def test_a_logprob_that_follows_the_batch_is_found(follows: bool) -> None:
    found, engine = tool.requests(12, 100, (4, 40)), Engine(follows)
    runs = [tool.serve(engine, lambda number: None, tool.arrivals(found, seed), seed) for seed in (1, 2)]
    row = tool.differences(*runs)
    assert (row["requests"], row["tokens"], row["tokens_differ"]) == (12, 24, 0)
    assert (row["logprobs_differ"] > 0) is follows and (row["requests_differ"] > 0) is follows


def test_each_request_arrives_once_in_another_order() -> None:
    found = tool.requests(64, 100, (1, 9))
    first, second = ([request for step in tool.arrivals(found, seed) for request in step] for seed in (1, 2))
    assert first != second and sorted(first) == sorted(second) == found
