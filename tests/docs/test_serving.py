"""The scheduler of the serving example: budget, pages, preemption."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    """Of the examples, with prefix_cache.py beside it."""
    for name in ("serving", "prefix_cache"):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look there
        spec.loader.exec_module(module)
    yield sys.modules["serving"]
    del sys.modules["serving"], sys.modules["prefix_cache"]


LENGTHS = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 20))


@settings(max_examples=60)
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
        assert sorted(owned + scheduler.pages.free) == list(range(pages))
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


@settings(max_examples=60)
@given(
    requests=st.lists(LENGTHS, min_size=1, max_size=8),
    pages=st.integers(14, 40),
    drafts=st.integers(0, 2),
    num_prefixes=st.integers(0, 3),
    rng=st.randoms(use_true_random=False),
)
def test_prefix_scheduler(
    serving: ModuleType,
    requests: list[tuple[int, int, int]],
    pages: int,
    drafts: int,
    num_prefixes: int,
    rng: Random,
) -> None:
    """Prompts are of one kind, so many begin alike. Whatever holds of the drafts: every page and slot is counted, no
    slot that one request reads or keeps is written by another, and what a prefix is has been computed.
    """
    budget = rng.randint(3 * (1 + drafts), 50)
    scheduler = sys.modules["prefix_cache"].PrefixScheduler(
        pages, 4, budget, 3, drafts=drafts, block=8, num_prefixes=num_prefixes
    )
    todo = sorted((serving.Request([0] * n, new, arrival=at) for n, new, at in requests), key=lambda r: r.arrival)
    for request in todo:
        scheduler.add(request)
    for step in range(2000):
        for r in scheduler.running:
            r.drafts = [0] * drafts if r.cached == len(r.tokens) - 1 else []
        chunks = scheduler.schedule(step)
        states, prefixes = scheduler.states, list(scheduler.prefixes.values())
        assert set(states) == set(scheduler.running) and len(prefixes) <= num_prefixes
        owned = [page for kept in (*scheduler.running, *prefixes) for page in kept.pages]
        assert [owned.count(page) for page in range(pages)] == scheduler.pages.users
        kept = [scheduler.zeros, *(prefix.slot for prefix in prefixes)]
        kept += [s.shared for s in states.values() if s.shared is not None]
        written = [
            slot for r, s in states.items() for slot in (*s.own, *[scheduler.targets.get(r)]) if slot is not None
        ]
        assert len(set(written)) == len(written) and not set(written) & set(kept)
        assert [(kept + written).count(slot) for slot in range(len(scheduler.slots.users))] == scheduler.slots.users
        assert all(s.last in (*s.own, s.shared, scheduler.zeros) for s in states.values())
        for request, length in chunks:
            guesses, missing, request.drafts = len(request.drafts), request.missing, []
            right = min(rng.randint(0, guesses), request.max_new_tokens - len(request.generated) - 1)
            scheduler.computed(request, length - guesses + right)
            assert (len(request.pages) - 1) * 4 < request.cached + guesses <= len(request.pages) * 4 + guesses
            if length == missing:
                request.tokens += [0] * (1 + right)
                if len(request.generated) == request.max_new_tokens:
                    scheduler.finish(request)
        if not scheduler.waiting and not scheduler.running:
            break
    assert [len(r.generated) for r in todo] == [r.max_new_tokens for r in todo]
    scheduler.clear()
    assert sorted(scheduler.pages.free) == list(range(pages))
    assert sorted([*scheduler.slots.free, scheduler.zeros]) == list(range(len(scheduler.slots.users)))


def test_scheduler_refuses_what_never_fits(serving: ModuleType) -> None:
    scheduler = serving.Scheduler(4, 16, 32, max_running=8)
    scheduler.add(serving.Request([0] * 60, 4))
    with pytest.raises(ValueError, match="request: from 1 token to 4 pages are required; got 5"):
        scheduler.add(serving.Request([0] * 60, 5))
    with pytest.raises(ValueError, match="token_budget: at least max_running, 8, is required; got 7"):
        serving.Scheduler(4, 16, 7, max_running=8)
    with pytest.raises(ValueError, match="token_budget: at least max_running, 8 times 3, is required; got 23"):
        serving.Scheduler(4, 16, 23, max_running=8, drafts=2)
    with pytest.raises(ValueError, match="block: a multiple of the page size, 16, is required; got 24"):
        sys.modules["prefix_cache"].PrefixScheduler(4, 16, 7, 2, block=24)
