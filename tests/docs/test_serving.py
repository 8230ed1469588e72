"""The scheduler of the serving example: budget, pages, preemption."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("serving", EXAMPLES / "serving.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serving"]


LENGTHS = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 20))


@settings(max_examples=60, deadline=None, database=None)
@given(requests=st.lists(LENGTHS, min_size=1, max_size=8), pages=st.integers(13, 30), budget=st.integers(3, 50))
def test_scheduler(serving: ModuleType, requests: list[tuple[int, int, int]], pages: int, budget: int) -> None:
    """Whatever comes: steps within the budget, pages with one owner, nobody who generates waits, everybody finishes."""
    scheduler = serving.Scheduler(pages, 4, budget, max_running=3)
    todo = sorted((serving.Request([0] * n, new, arrival=at) for n, new, at in requests), key=lambda r: r.arrival)
    for request in todo:
        scheduler.add(request)
    for step in range(2000):
        waited = [r for r in scheduler.running if len(r.tokens) == r.cached + 1]
        chunks = scheduler.schedule(step)
        assert len(chunks) <= 3 and sum(chunk.length for chunk in chunks) <= budget
        owned = [page for request in scheduler.running for page in request.pages]
        assert sorted(owned + scheduler.free) == list(range(pages))
        served = [chunk.request for chunk in chunks]
        assert all(r in served or r in scheduler.waiting for r in waited)
        for request, length in chunks:
            assert request.arrival <= step and 0 < length <= len(request.tokens) - request.cached
            request.cached += length
            assert (len(request.pages) - 1) * 4 < request.cached <= len(request.pages) * 4
            if request.cached == len(request.tokens):
                request.tokens.append(0)
                if len(request.generated) == request.max_new_tokens:
                    scheduler.finish(request)
        if not scheduler.waiting and not scheduler.running:
            break
        assert chunks or scheduler.waiting[0].arrival > step, "nothing moves"
    assert [len(r.generated) for r in todo] == [r.max_new_tokens for r in todo]


def test_scheduler_refuses_what_never_fits(serving: ModuleType) -> None:
    scheduler = serving.Scheduler(4, 16, 32, max_running=8)
    scheduler.add(serving.Request([0] * 60, 4))
    with pytest.raises(ValueError, match="request: from 1 token to 4 pages are required; got 5"):
        scheduler.add(serving.Request([0] * 60, 5))
    with pytest.raises(ValueError, match="token_budget: at least max_running, 8, is required; got 7"):
        serving.Scheduler(4, 16, 7, max_running=8)
