"""The schedule of batch prefill that the CPU planner writes: every work tile once, the longest first."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_core.attention.ops import prefill as ops

REQUESTS = st.lists(
    st.tuples(st.integers(0, 600), st.one_of(st.integers(0, 700), st.integers(0, 40_000))), min_size=0, max_size=30
)


INT32_MAX = 2**31 - 1
HEADER = ops.schedule_words(0, 0, 1)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def visible_keys(row: int, qo_len: int, kv_len: int, causal: bool, window_left: int) -> tuple[int, int]:
    """The keys [first, end) that a row attends to."""
    position = kv_len - qo_len + row
    first = 0 if window_left < 0 else min(max(position - window_left, 0), kv_len)
    return first, min(max(position + 1, 0), kv_len) if causal else kv_len


@settings(max_examples=150)
@given(
    requests=REQUESTS,
    tokens=st.sampled_from([1, 3, 16, 48, 128]),
    page_size=st.sampled_from([1, 7, 16, 64]),
    causal=st.booleans(),
    window_left=st.one_of(st.just(-1), st.integers(0, 5000)),
    given_lens=st.booleans(),
)
def test_every_tile_is_listed_once_and_long_tiles_first(
    requests: list[tuple[int, int]], tokens: int, page_size: int, causal: bool, window_left: int, given_lens: bool
) -> None:
    batch = len(requests)
    pages = [-(-kv // page_size) for _, kv in requests]
    rows = list(itertools.accumulate((qo for qo, _ in requests), initial=0))
    begins = list(itertools.accumulate(pages, initial=0))
    last = int32([kv - (n - 1) * page_size if n else 7 for (_, kv), n in zip(requests, pages)])
    kv_len = int32([kv for _, kv in requests]) if given_lens else None
    schedule = torch.full((ops.schedule_words(batch, rows[-1], tokens) + 6,), -1, dtype=torch.int32)
    ops.prefill_plan(
        schedule, int32(rows), int32(begins), None if given_lens else last, kv_len, batch, tokens, page_size=page_size,
        causal=causal, window_left=window_left,
    )  # fmt: skip
    words = schedule.tolist()
    found = [tuple(words[HEADER + 4 * b : HEADER + 4 * b + 4]) for b in range(batch)]
    assert found == [(rows[b], qo, begins[b], kv) for b, (qo, kv) in enumerate(requests)]
    at = HEADER + 4 * batch
    tiles = [tuple(words[i : i + 2]) for i in range(at, at + 2 * words[0], 2)]
    assert sorted(tiles) == [(b, t) for b, (qo, _) in enumerate(requests) for t in range(-(-qo // tokens))]
    assert words[1:3] == [0, 0] and set(words[at + 2 * words[0] :]) <= {-1}, "words behind the tiles are not written"

    def work(tile: tuple[int, ...]) -> int:
        qo, kv = requests[tile[0]]
        first, after = tile[1] * tokens, min((tile[1] + 1) * tokens, qo)
        keys = (
            visible_keys(after - 1, qo, kv, causal, window_left)[1],
            visible_keys(first, qo, kv, causal, window_left)[0],
        )
        return -(-keys[0] // 128) - keys[1] // 128

    works = [work(tile) for tile in tiles]
    assert works == sorted(works, reverse=True)


@pytest.mark.parametrize(("request_", "kv_len", "most"), [(0, 33, 32), (1, 5, 0), (2, -4, 48)])
def test_a_length_beyond_the_pages_is_refused(request_: int, kv_len: int, most: int) -> None:
    """The rest of its keys would be left out. 2^31 - 1 are all."""
    schedule = torch.zeros(ops.schedule_words(3, 9, 128), dtype=torch.int32)
    lengths = int32([32, 0, INT32_MAX])
    tables = int32([0, 3, 6, 9]), int32([0, 2, 2, 5]), None, lengths
    ops.prefill_plan(schedule, *tables, 3, 128, page_size=16)
    assert schedule[HEADER : HEADER + 12].view(3, 4)[:, 3].tolist() == [32, 0, 48]
    lengths[request_] = kv_len
    with pytest.raises(ValueError, match=rf"kv_len must be in 0\.\.{most}, .* of request {request_}; got {kv_len}"):
        ops.prefill_plan(schedule, *tables, 3, 128, page_size=16)


def test_a_short_schedule_is_refused() -> None:
    """Tiles beyond the capacity of the schedule would be left out."""
    schedule = torch.full((ops.schedule_words(2, 128, 128) + 8,), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="qo_indptr must need at most 3 tiles of 128 rows"):
        ops.prefill_plan(schedule[:-8], int32([0, 128, 2000]), int32([0, 500, 2500]), None, None, 2, 128)
    assert set(schedule[-8:].tolist()) == {-1}
