"""The schedule of batch decode, as its CPU form writes it: every tile once, in few parts, which find each other."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_core.decode import ops

CPU = torch.device("cpu")
TILE, HEADER, WORDS = ops.TILE, 12, 8  # words of the header, and of a range


class Segment(NamedTuple):
    range: int
    taken: int  # ranges are taken in this order
    unit: int
    request: int
    begin: int
    end: int
    part: int
    parts: int
    slot: int


def tiles_of(kv_len: int, q_len: int, window_left: int) -> tuple[int, int]:
    first = max(0, kv_len - q_len - window_left) // TILE if window_left >= 0 else 0
    end = -(-kv_len // TILE)
    return min(first, end), end


def walk(buffers: ops.Buffers, batch: int, q_len: int, window_left: int) -> list[Segment]:
    """What a kernel makes of the buffer, by the rules of schedule.h."""
    words, blocks, ranges = buffers.schedule.tolist(), buffers.blocks, buffers.ranges
    units, batch_size, chunk, chunks, _, groups, first_ranges, later, taken = words[:9]
    assert (batch_size, taken) == (batch, 0)
    of_group = first_ranges + later
    assert groups * first_ranges <= blocks and groups * of_group <= ranges
    starts = [words[HEADER + i * WORDS : HEADER + (i + 1) * WORDS] for i in range(ranges + 1)]
    at = HEADER + (ranges + 1) * WORDS
    requests = [words[at + 4 * b : at + 4 * b + 4] for b in range(batch)]
    found = []
    for index in range(ranges):
        i = index % of_group
        taken = index // of_group * first_ranges + i if i < first_ranges else index // of_group + i * groups
        unit, request, tile, leader, parts, kv_len, first_page, _ = starts[index]
        last_unit, last_request, last_tile, _, last_parts, *_ = starts[index + 1]
        while (unit, request, tile) < (last_unit, last_request, last_tile) or (
            (unit, request) < (last_unit, last_request)
        ):
            assert [kv_len, first_page] == requests[request][:2]
            first, end = tiles_of(kv_len, q_len, window_left)
            last = (unit, request) == (last_unit, last_request)
            stop = last_tile if last else end
            if chunk:
                stop = min(stop, (tile // chunk + 1) * chunk)
                part = tile // chunk - first // chunk
                count = (end - 1) // chunk - first // chunk + 1 if end > first else 1
                base = unit * chunks + requests[request][3]
                slot = base + part
            else:
                begins = tile == first
                here = index if begins else leader
                part, count = index - here, parts if not begins else last_parts if last else 1
                slot = 2 * here + 2 * part if part else 2 * here + 1
            found.append(Segment(index, taken, unit, request, tile, stop, part, count, slot))
            tile = stop
            if tile >= end:
                request += 1
                if request == batch:
                    unit, request = unit + 1, 0
                if unit < units:
                    kv_len, first_page = requests[request][:2]
                    tile = tiles_of(kv_len, q_len, window_left)[0]
                else:
                    tile = 0
    return found


def planned(
    lengths: list[int], units: int, split: int = 0, q_len: int = 1, window_left: int = -1, page_size: int = 16
) -> tuple[list[Segment], ops.Buffers]:
    pages = [-(-n // page_size) for n in lengths]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([n - (p - 1) * page_size if p else 7 for n, p in zip(lengths, pages)], dtype=torch.int32)
    buffers = ops.allocate(CPU, ops.sizes(CPU, len(lengths), units, split, sum(pages) * page_size), 8)
    buffers.schedule.fill_(-1)
    ops.plan(buffers, indptr, last, None, page_size, units, q_len=q_len, window_left=window_left)
    return walk(buffers, len(lengths), q_len, window_left), buffers


def check(
    segments: list[Segment], buffers: ops.Buffers, lengths: list[int], units: int, q_len: int, window: int
) -> None:
    items: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for s in segments:
        items[s.unit, s.request].append(s)
    assert set(items) == {(u, b) for u in range(units) for b in range(len(lengths))}, "every item, also without keys"
    slots = []
    for (_, request), parts in items.items():
        first, end = tiles_of(lengths[request], q_len, window)
        assert [s.part for s in parts] == list(range(len(parts))), "parts are in the order of position"
        assert {s.parts for s in parts} == {len(parts)}
        edges = [(s.begin, s.end) for s in parts]
        assert edges[0][0] == first and edges[-1][1] == end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
        assert all(a < b for a, b in edges) or first == end
        if len(parts) > 1:
            slots += [s.slot for s in parts]
    assert len(set(slots)) == len(slots) and all(0 <= s < buffers.workspace.shape[0] for s in slots)
    offset = HEADER + (buffers.ranges + 1) * WORDS + 4 * len(lengths)
    counters = buffers.schedule[offset:]
    assert len(counters) >= buffers.workspace.shape[0] and (counters == 0).all(), "one of each slot"


@settings(max_examples=150, deadline=None, database=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 400), st.integers(0, 40_000)), min_size=1, max_size=40),
    units=st.sampled_from([1, 2, 3, 5, 8, 32, 63, 64, 65, 200]),
    split=st.sampled_from([0, -1, 1, 4, 7, 64]),
    q_len=st.integers(1, 5),
    window=st.one_of(st.just(-1), st.integers(0, 5000)),
    page_size=st.sampled_from([1, 7, 16, 64]),
)
def test_every_tile_is_in_one_part_and_parts_find_each_other(
    lengths: list[int], units: int, split: int, q_len: int, window: int, page_size: int
) -> None:
    segments, buffers = planned(lengths, units, split, q_len, window, page_size)
    check(segments, buffers, lengths, units, q_len, window)
    if split < 0:
        assert {s.parts for s in segments} == {1}


@pytest.mark.parametrize("batch", [1, 4096, 5000])
def test_large_batches(batch: int) -> None:
    lengths = [(b * 7919) % 300 for b in range(batch)]
    segments, buffers = planned(lengths, 2)
    check(segments, buffers, lengths, 2, 1, -1)


def shares(segments: list[Segment], blocks: int) -> list[int]:
    """Tiles of each block, if all are equally fast and a segment takes as long as two tiles more."""
    ranges: dict[tuple[int, int], int] = defaultdict(int)
    for s in segments:
        ranges[s.taken, s.range] += s.end - s.begin + 2
    done = [0] * blocks
    for key in sorted(ranges):
        heapq.heapreplace(done, done[0] + ranges[key])
    return done


@pytest.mark.parametrize("lengths", [[8192], [8192] * 16, [100, 8000, 3, 60_000], [128] * 500])
def test_work_is_balanced(lengths: list[int]) -> None:
    segments, buffers = planned(lengths, 8)
    total = 8 * sum(-(-n // TILE) + 2 for n in lengths)
    assert max(shares(segments, buffers.blocks)) <= 1.1 * total / buffers.blocks + 3


def test_ranges_become_small_where_there_is_much_to_do() -> None:
    segments, buffers = planned([8192] * 128, 8)
    tiles: dict[int, int] = defaultdict(int)
    for s in segments:
        tiles[s.taken] += s.end - s.begin
    sizes = [tiles[taken] for taken in sorted(tiles)]
    assert len(sizes) >= 3 * buffers.blocks
    assert max(sizes[-buffers.blocks :]) < sizes[0] / 8


def test_uniform_requests_are_not_cut_where_they_divide_evenly() -> None:
    segments, buffers = planned([1024] * 16, 8)
    assert {s.parts for s in segments} == {1}
    assert set(shares(segments, buffers.blocks)) == {2 * (1024 // TILE + 2)}


def test_equal_requests_are_not_cut_where_few_blocks_must_idle_for_it() -> None:
    segments, _ = planned([1024] * 80, 3)  # 21 blocks a unit, of which 20 take 4 requests each
    assert {s.parts for s in segments} == {1}


def test_requests_of_one_length_are_cut_alike_and_short_ones_not_at_all() -> None:
    segments, buffers = planned([4096 + i for i in range(1, 6)], 3)
    each = buffers.blocks // (5 * 3)
    assert {(s.parts, s.end - s.begin) for s in segments} <= {(each, n) for n in (65 // each, -(-65 // each))}
    segments, _ = planned([500] * 3, 2)
    assert {s.parts for s in segments} == {1}


def test_chunks_of_a_request_do_not_depend_on_its_neighbours() -> None:
    def chunks(lengths: list[int], request: int) -> list[tuple[int, int, int, int, int]]:
        segments, _ = planned(lengths, 4, split=8)
        return sorted((s.unit, s.begin, s.end, s.part, s.parts) for s in segments if s.request == request)

    assert chunks([3000], 0) == chunks([5, 3000, 70_000], 1) == chunks([3000] * 30, 29)


def test_a_length_is_limited_to_the_pages() -> None:
    units = 2
    buffers = ops.allocate(CPU, ops.sizes(CPU, 3, units), 8)
    kv_len = torch.tensor([1_000_000, 5, -3], dtype=torch.int64)
    ops.plan(buffers, None, None, kv_len, 16, units, pages_per_request=10)
    check(walk(buffers, 3, 1, -1), buffers, [160, 5, 0], units, 1, -1)


def test_no_pages_is_no_length_whatever_the_last_page_has() -> None:
    segments, _ = planned([0, 10, 0], 1)
    assert [(s.begin, s.end) for s in segments] == [(0, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 0}, "page_size must be positive"),
        ({"units": 0}, "units must be positive"),
        ({"q_len": 0}, "q_len must be positive"),
        ({"kv_len": None}, "kv_len or last_page_len must be given"),
        ({"kv_len": torch.ones(3, dtype=torch.float32)}, "kv_len must be int32 or uint32 or int64"),
        ({"kv_len": torch.ones(99, dtype=torch.int32)}, "schedule must have"),
    ],
)
def test_bad_arguments(change: dict[str, object], words: str) -> None:
    buffers = ops.allocate(CPU, ops.sizes(CPU, 3, 2), 8)
    good = {"kv_len": torch.ones(3, dtype=torch.int32), "page_size": 16, "units": 2, "q_len": 1} | change
    error = TypeError if "int32" in words else ValueError
    with pytest.raises(error, match=words):
        ops.plan(buffers, None, None, pages_per_request=1, **good)  # type: ignore[arg-type]
