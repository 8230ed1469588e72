"""The schedule of batch decode that the CPU planner writes: every KV tile once, in few splits with their partials."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families.paged import numbers_of
from fi_core.attention.ops import decode as ops

CPU = torch.device("cpu")
KV_TILE = ops.KV_TILE
HEADER, WORDS = 12, 8  # words of the header, and of the start of a work range


class WorkTile(NamedTuple):
    range: int
    order: int  # in which the tile scheduler hands out the ranges
    q_tile: int
    request: int
    begin: int  # KV tiles
    end: int
    split_idx: int
    num_splits: int
    partial: int


def tiles_of(kv_len: int, q_len: int, window_left: int) -> tuple[int, int]:
    first = max(0, kv_len - q_len - window_left) // KV_TILE if window_left >= 0 else 0
    end = -(-kv_len // KV_TILE)
    return min(first, end), end


def walk(buffers: ops.Buffers, batch: int, q_len: int, window_left: int) -> list[WorkTile]:
    """The work tiles of all ranges, read from the buffer as decode_schedule.h reads it."""
    words, num_ctas, num_ranges = buffers.schedule.tolist(), buffers.num_ctas, buffers.num_ranges
    q_tiles, batch_size, chunk, chunks, _, groups, static, dynamic, next_dynamic = words[:9]
    assert (batch_size, next_dynamic) == (batch, 0)
    per_group = static + dynamic
    assert groups * static <= num_ctas and groups * per_group <= num_ranges
    starts = [words[HEADER + i * WORDS : HEADER + (i + 1) * WORDS] for i in range(num_ranges + 1)]
    at = HEADER + (num_ranges + 1) * WORDS
    requests = [words[at + 4 * b : at + 4 * b + 4] for b in range(batch)]
    found = []
    for index in range(num_ranges):
        i = index % per_group
        order = index // per_group * static + i if i < static else index // per_group + i * groups
        q_tile, request, tile, leader, num_splits, kv_len, first_page, _ = starts[index]
        last_q_tile, last_request, last_tile, _, last_splits, *_ = starts[index + 1]
        while (q_tile, request, tile) < (last_q_tile, last_request, last_tile) or (
            (q_tile, request) < (last_q_tile, last_request)
        ):
            assert [kv_len, first_page] == requests[request][:2]
            first, end = tiles_of(kv_len, q_len, window_left)
            last = (q_tile, request) == (last_q_tile, last_request)
            stop = last_tile if last else end
            if chunk:
                stop = min(stop, (tile // chunk + 1) * chunk)
                split_idx = tile // chunk - first // chunk
                count = (end - 1) // chunk - first // chunk + 1 if end > first else 1
                base = q_tile * chunks + requests[request][3]
                partial = base + split_idx
            else:
                begins = tile == first
                here = index if begins else leader
                split_idx, count = index - here, num_splits if not begins else last_splits if last else 1
                partial = 2 * here + 2 * split_idx if split_idx else 2 * here + 1
            found.append(WorkTile(index, order, q_tile, request, tile, stop, split_idx, count, partial))
            tile = stop
            if tile >= end:
                request += 1
                if request == batch:
                    q_tile, request = q_tile + 1, 0
                if q_tile < q_tiles:
                    kv_len, first_page = requests[request][:2]
                    tile = tiles_of(kv_len, q_len, window_left)[0]
                else:
                    tile = 0
    return found


def planned(
    lengths: list[int], q_tiles: int, split_kv: int = 0, q_len: int = 1, window_left: int = -1, page_size: int = 16
) -> tuple[list[WorkTile], ops.Buffers]:
    pages = [-(-n // page_size) for n in lengths]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([n - (p - 1) * page_size if p else 7 for n, p in zip(lengths, pages)], dtype=torch.int32)
    buffers = ops.allocate(CPU, ops.buffer_sizes(CPU, len(lengths), q_tiles, split_kv, sum(pages) * page_size), 8)
    buffers.schedule.fill_(-1)
    ops.decode_plan(
        buffers.schedule,
        indptr,
        last,
        None,
        page_size,
        q_tiles,
        **numbers_of(buffers),
        q_len=q_len,
        window_left=window_left,
    )
    return walk(buffers, len(lengths), q_len, window_left), buffers


def check(
    tiles: list[WorkTile], buffers: ops.Buffers, lengths: list[int], q_tiles: int, q_len: int, window: int
) -> None:
    by_request: dict[tuple[int, int], list[WorkTile]] = defaultdict(list)
    for s in tiles:
        by_request[s.q_tile, s.request].append(s)
    every = {(q_tile, b) for q_tile in range(q_tiles) for b in range(len(lengths))}
    assert set(by_request) == every, "every request, also one without keys"
    partials = []
    for (_, request), splits in by_request.items():
        first, end = tiles_of(lengths[request], q_len, window)
        assert [s.split_idx for s in splits] == list(range(len(splits))), "splits are in the order of position"
        assert {s.num_splits for s in splits} == {len(splits)}
        edges = [(s.begin, s.end) for s in splits]
        assert edges[0][0] == first and edges[-1][1] == end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
        assert all(a < b for a, b in edges) or first == end
        if len(splits) > 1:
            partials += [s.partial for s in splits]
    assert len(set(partials)) == len(partials) and all(0 <= s < buffers.partials.shape[0] for s in partials)
    offset = HEADER + (buffers.num_ranges + 1) * WORDS + 4 * len(lengths)
    counters = buffers.schedule[offset:]
    assert len(counters) >= buffers.partials.shape[0] and (counters == 0).all(), "one counter per partial"


@settings(max_examples=150)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 400), st.integers(0, 40_000)), min_size=1, max_size=40),
    q_tiles=st.sampled_from([1, 2, 3, 5, 8, 32, 63, 64, 65, 200]),
    split_kv=st.sampled_from([0, -1, 1, 4, 7, 64]),
    q_len=st.integers(1, 5),
    window=st.one_of(st.just(-1), st.integers(0, 5000)),
    page_size=st.sampled_from([1, 7, 16, 64]),
)
def test_every_kv_tile_is_in_one_split_and_partials_are_distinct(
    lengths: list[int], q_tiles: int, split_kv: int, q_len: int, window: int, page_size: int
) -> None:
    tiles, buffers = planned(lengths, q_tiles, split_kv, q_len, window, page_size)
    check(tiles, buffers, lengths, q_tiles, q_len, window)
    if split_kv < 0:
        assert {s.num_splits for s in tiles} == {1}


@pytest.mark.parametrize("batch", [1, 4096, 5000])
def test_large_batches(batch: int) -> None:
    lengths = [(b * 7919) % 300 for b in range(batch)]
    tiles, buffers = planned(lengths, 2)
    check(tiles, buffers, lengths, 2, 1, -1)


def work_of_ctas(tiles: list[WorkTile], num_ctas: int) -> list[int]:
    """KV tiles of each CTA, if all are equally fast and a work tile costs two KV tiles more."""
    ranges: dict[tuple[int, int], int] = defaultdict(int)
    for s in tiles:
        ranges[s.order, s.range] += s.end - s.begin + 2
    done = [0] * num_ctas
    for key in sorted(ranges):
        heapq.heapreplace(done, done[0] + ranges[key])
    return done


@pytest.mark.parametrize("lengths", [[8192], [8192] * 16, [100, 8000, 3, 60_000], [128] * 500])
def test_work_is_balanced(lengths: list[int]) -> None:
    tiles, buffers = planned(lengths, 8)
    total = 8 * sum(-(-n // KV_TILE) + 2 for n in lengths)
    assert max(work_of_ctas(tiles, buffers.num_ctas)) <= 1.1 * total / buffers.num_ctas + 3


def test_large_batches_have_many_small_ranges_at_the_end() -> None:
    tiles, buffers = planned([8192] * 128, 8)
    sizes_by_order: dict[int, int] = defaultdict(int)
    for s in tiles:
        sizes_by_order[s.order] += s.end - s.begin
    sizes = [sizes_by_order[order] for order in sorted(sizes_by_order)]
    assert len(sizes) >= 3 * buffers.num_ctas
    assert max(sizes[-buffers.num_ctas :]) < sizes[0] / 8


def test_equal_requests_that_fill_the_ctas_are_not_split() -> None:
    tiles, buffers = planned([1024] * 16, 8)
    assert {s.num_splits for s in tiles} == {1}
    assert set(work_of_ctas(tiles, buffers.num_ctas)) == {2 * (1024 // KV_TILE + 2)}


def test_equal_requests_are_not_split_to_keep_a_few_ctas_busy() -> None:
    tiles, _ = planned([1024] * 80, 3)  # 21 CTAs per query tile, of which 20 compute 4 requests each
    assert {s.num_splits for s in tiles} == {1}


def test_requests_of_similar_length_are_split_alike_and_short_requests_not_at_all() -> None:
    tiles, buffers = planned([4096 + i for i in range(1, 6)], 3)
    each = buffers.num_ctas // (5 * 3)
    assert {(s.num_splits, s.end - s.begin) for s in tiles} <= {(each, n) for n in (65 // each, -(-65 // each))}
    tiles, _ = planned([500] * 3, 2)
    assert {s.num_splits for s in tiles} == {1}


def test_chunks_of_a_request_do_not_depend_on_its_neighbours() -> None:
    def chunks(lengths: list[int], request: int) -> list[tuple[int, int, int, int, int]]:
        tiles, _ = planned(lengths, 4, split_kv=8)
        return sorted((s.q_tile, s.begin, s.end, s.split_idx, s.num_splits) for s in tiles if s.request == request)

    assert chunks([3000], 0) == chunks([5, 3000, 70_000], 1) == chunks([3000] * 30, 29)


def test_a_length_beyond_the_pages_is_refused() -> None:
    """The rest of its keys would be left out. 2^31 - 1 are all."""
    q_tiles = 2
    buffers = ops.allocate(CPU, ops.buffer_sizes(CPU, 3, q_tiles), 8)
    kv_len = torch.tensor([2**31 - 1, 5, 0], dtype=torch.int64)
    ops.decode_plan(buffers.schedule, None, None, kv_len, 16, q_tiles, **numbers_of(buffers), pages_per_request=10)
    check(walk(buffers, 3, 1, -1), buffers, [160, 5, 0], q_tiles, 1, -1)
    for wrong in (161, -3):
        kv_len[2] = wrong
        with pytest.raises(ValueError, match=rf"kv_len must be in 0\.\.160, .* of request 2; got {wrong}"):
            ops.decode_plan(
                buffers.schedule, None, None, kv_len, 16, q_tiles, **numbers_of(buffers), pages_per_request=10
            )


def test_no_pages_is_no_length_whatever_the_last_page_has() -> None:
    tiles, _ = planned([0, 10, 0], 1)
    assert [(s.begin, s.end) for s in tiles] == [(0, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 0}, "page_size must be positive"),
        ({"q_tiles": 0}, "q_tiles must be positive"),
        ({"q_len": 0}, "q_len must be positive"),
        ({"kv_len": None}, "kv_len or last_page_len must be given"),
        ({"kv_len": torch.ones(3, dtype=torch.float32)}, "kv_len must be int32 or uint32 or int64"),
        ({"kv_len": torch.ones(99, dtype=torch.int32)}, "schedule must have"),
    ],
)
def test_bad_arguments(change: dict[str, object], words: str) -> None:
    buffers = ops.allocate(CPU, ops.buffer_sizes(CPU, 3, 2), 8)
    good = {"kv_len": torch.ones(3, dtype=torch.int32), "page_size": 16, "q_tiles": 2, "q_len": 1} | change
    error = TypeError if "int32" in words else ValueError
    with pytest.raises(error, match=words):
        ops.decode_plan(buffers.schedule, None, None, pages_per_request=1, **good, **numbers_of(buffers))
