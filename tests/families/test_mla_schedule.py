"""The schedules that mla_plan writes: each KV tile is in one work range, and each partial has a slot of its own."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from fi_core.attention.ops import mla
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.target import Target

KV_TILE, WORK_TILE_COST, CHUNK_TILES = 64, 4, 8  # kMlaKvTile, kMlaWorkTileCost, kMlaChunkTiles
FINE_TILES = 2  # kMlaFineTiles
MAX_RANGES = 132


class Start(NamedTuple):
    """MlaRangeStart of mla_schedule.h."""

    request: int
    q_tile: int
    kv_tile: int
    leader: int
    num_splits: int
    q_tiles: int
    item_cost: int
    unused: int
    kv_len: int
    first_page: int
    qo_begin: int
    qo_len: int

    @property
    def position(self) -> tuple[int, int, int]:
        return self.request, self.q_tile, self.kv_tile


class Work(NamedTuple):
    begin: int
    end: int
    range: int
    slot: int  # of its partial


def chunks(kv_len: int, tiles: int = CHUNK_TILES) -> int:
    return max(1, -(-kv_len // (tiles * KV_TILE)))


class Schedule(NamedTuple):
    starts: list[Start]
    cut_tiles: int


def plan(
    lengths: Sequence[int], qo_lens: Sequence[int], heads: int, rows: int, ranges: int, slots: int | None = None
) -> list[Start]:
    """The starts of the ranges, and behind them the end of the last one. slots: of fixed splits."""
    return planned(lengths, qo_lens, heads, rows, ranges, slots).starts


def planned(
    lengths: Sequence[int],
    qo_lens: Sequence[int],
    heads: int,
    rows: int,
    ranges: int,
    slots: int | None = None,
    fine: bool = False,
) -> Schedule:
    """The schedule of wide q tiles; with fine splits that of narrow ones."""
    size = mla.Sizes(MAX_RANGES, ranges, ranges, 1)
    schedule = torch.full((2, mla.words_of(size, len(lengths)) // 2), 0x55555555, dtype=torch.int32)
    qo_indptr = torch.tensor([0, *itertools.accumulate(qo_lens)], dtype=torch.int32)
    kv_indptr = torch.tensor([0, *itertools.accumulate(-(-n // KV_TILE) for n in lengths)], dtype=torch.int32)
    mla.mla_plan(
        schedule, torch.tensor(lengths, dtype=torch.int32), KV_TILE, heads, MAX_RANGES, ranges, ranges, rows, rows,
        qo_indptr, kv_indptr, fixed_splits=slots is not None, workspace_floats=(slots or 0) * rows * 514,
        fine_splits=fine,
    )  # fmt: skip
    made, of_chunk = schedule[0 if fine else 1], FINE_TILES if fine else CHUNK_TILES
    count, cut_tiles, most, cost = made[:4].tolist()
    assert count <= ranges and cut_tiles in ((of_chunk, CHUNK_TILES) if slots is not None else (1,))
    arrivals = made[4 + 12 * (MAX_RANGES + 1) : 4 + 16 * (MAX_RANGES + 1)]
    assert not arrivals.any(), "no split has arrived"
    starts = [Start(*x) for x in made[4 : 4 + 12 * (MAX_RANGES + 1)].view(-1, 12).tolist()][: count + 1]
    costs = [
        chunks(kv, of_chunk) * of_chunk if slots is not None else -(-kv // KV_TILE) + WORK_TILE_COST for kv in lengths
    ]
    items = [(-(-n * heads // rows), cost) for n, cost in zip(qo_lens, costs)]
    assert cost == sum(a * b for a, b in items) and most == max(s.num_splits for s in starts)
    assert [s.position for s in starts] == sorted(s.position for s in starts)
    return Schedule(starts, cut_tiles)


def work_of(starts: Sequence[Start], items: Sequence[int], tiles: Sequence[int]) -> dict[tuple[int, int], list[Work]]:
    """The work tiles of each item (request, q tile)."""
    found: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for g, (begin, end) in enumerate(itertools.pairwise(starts)):
        for request, q_tile in ((b, t) for b in range(len(items)) for t in range(items[b])):
            first = begin.kv_tile if (request, q_tile) == begin.position[:2] else 0
            last = end.kv_tile if (request, q_tile) == end.position[:2] else tiles[request]
            if begin.position[:2] <= (request, q_tile) and (request, q_tile, first) < end.position:
                found[request, q_tile].append(Work(first, last, g, 2 * g + (first == 0)))
    return found


def test_a_rehearsed_device_leaves_its_grid_to_itself() -> None:
    with Rehearsal(Target("cuda", "90a"), 132, 227 << 10):
        assert mla.sizes(torch.device("cpu"), 24).max_ranges == 132
    assert mla.sizes(torch.device("cpu"), 24).max_ranges == 64


@pytest.mark.parametrize("seed", range(40))
def test_every_kv_tile_has_one_range(seed: int) -> None:
    draw = random.Random(seed)
    heads, rows = draw.choice(((8, 16), (16, 16), (40, 64), (128, 128)))
    ranges, batch = draw.choice((1, 7, 66, 132)), draw.randint(1, 12)
    lengths = [draw.choice((0, draw.randint(1, 100), draw.randint(1, 9000))) for _ in range(batch)]
    if seed % 4 == 0:
        lengths = lengths[:1] * batch
    qo_lens = [draw.choice((0, 1, 3)) if seed % 3 == 0 else 1 for _ in range(batch)]
    starts = plan(lengths, qo_lens, heads, rows, ranges)
    tiles = [-(-n // KV_TILE) for n in lengths]
    items = [-(-n * heads // rows) for n in qo_lens]
    work = work_of(starts, items, tiles)
    assert work.keys() == {(b, t) for b in range(batch) for t in range(items[b])}
    for (request, q_tile), parts in work.items():
        assert parts[0].begin == 0 and parts[-1].end == tiles[request]
        assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
        inside = [s for s in starts if s.position[:2] == (request, q_tile) and s.kv_tile > 0]
        leader = parts[0].range
        assert [(s.leader, s.num_splits) for s in inside] == [(leader, len(parts))] * len(inside)
        assert [p.slot for p in parts] == [2 * leader + 1, *(2 * (leader + i) for i in range(1, len(parts)))]
    slots = [p.slot for parts in work.values() if len(parts) > 1 for p in parts]
    assert len(slots) == len(set(slots)) and all(0 <= s < 2 * ranges for s in slots)


@pytest.mark.parametrize("seed", range(40))
def test_fixed_splits_cut_at_chunks_and_have_slots(seed: int) -> None:
    """A range has whole chunks; where the workspace has too few slots for all chunks, it has whole items."""
    draw = random.Random(seed)
    heads, rows = draw.choice(((16, 16), (16, 64), (128, 128)))
    ranges, batch = draw.choice((7, 66, 132)), draw.randint(1, 12)
    lengths = [draw.choice((0, draw.randint(1, 100), draw.randint(1, 40000))) for _ in range(batch)]
    qo_lens = [draw.choice((0, 1, 3)) if seed % 3 == 0 else 1 for _ in range(batch)]
    slots = draw.choice((2 * ranges, 10_000))
    starts = plan(lengths, qo_lens, heads, rows, ranges, slots)
    tiles, items = [-(-n // KV_TILE) for n in lengths], [-(-n * heads // rows) for n in qo_lens]
    work = work_of(starts, items, tiles)
    total = sum(count * chunks(n) for count, n in zip(items, lengths))
    assert work.keys() == {(b, t) for b in range(batch) for t in range(items[b])}
    for (request, _), parts in work.items():
        assert parts[0].begin == 0 and parts[-1].end == tiles[request]
        assert all(a.end == b.begin and a.end % CHUNK_TILES == 0 for a, b in itertools.pairwise(parts))
        assert total <= slots or len(parts) == 1


@pytest.mark.parametrize("seed", range(60))
def test_fine_splits_cut_at_their_chunks_and_each_range_has_work(seed: int) -> None:
    """CTAs of a split item wait for each other, so no two cuts of an item may be one."""
    draw = random.Random(seed)
    ranges, batch = draw.choice((7, 66, 132)), draw.randint(1, 40)
    lengths = [draw.choice((0, draw.randint(1, 100), draw.randint(1, 9000))) for _ in range(batch)]
    if seed % 4 == 0:
        lengths = [draw.randint(1, 9000)] * batch
    qo_lens = [draw.choice((0, 1, 3)) if seed % 3 == 0 else 1 for _ in range(batch)]
    slots = draw.choice((2 * ranges, 1 << 20))
    starts, cut_tiles = planned(lengths, qo_lens, 16, 16, ranges, slots, fine=True)
    tiles, items = [-(-n // KV_TILE) for n in lengths], qo_lens
    work = work_of(starts, items, tiles)
    total = sum(count * chunks(n, FINE_TILES) for count, n in zip(items, lengths))
    assert work.keys() == {(b, t) for b in range(batch) for t in range(items[b])}
    for (request, q_tile), parts in work.items():
        assert parts[0].begin == 0 and parts[-1].end == tiles[request]
        assert all(a.end == b.begin and a.end % cut_tiles == 0 for a, b in itertools.pairwise(parts))
        assert total <= slots or len(parts) == 1
        inside = [s for s in starts if s.position[:2] == (request, q_tile) and s.kv_tile > 0]
        assert [(s.leader, s.num_splits) for s in inside] == [(parts[0].range, len(parts))] * len(inside)
        assert [p.range for p in parts] == list(range(parts[0].range, parts[0].range + len(parts)))


def test_equal_requests_are_not_split_where_whole_ones_fill_the_ranges() -> None:
    starts = plan([4096] * 128, [1] * 128, 128, 128, 66)
    assert len(starts) == 65 and all(s.kv_tile == 0 for s in starts), "64 ranges of two requests"


def test_one_request_is_split_into_equal_ranges() -> None:
    starts = plan([32768], [1], 16, 16, 132)
    assert len(starts) == 129 and {b.kv_tile - a.kv_tile for a, b in itertools.pairwise(starts[:-1])} == {4}


@pytest.mark.parametrize(("batch", "kv_len", "ranges", "each"), [
    (1, 4096, 8, 1), (1, 65536, 128, 1), (1, 131072, 132, 2), (8, 4096, 64, 1), (32, 4096, 132, 2), (128, 4096, 128, 8),
])  # fmt: skip
def test_fixed_splits_fill_an_h200(batch: int, kv_len: int, ranges: int, each: int) -> None:
    """Chunks of the longest range, with the 34 MiB that a workspace has without them."""
    starts = plan([kv_len] * batch, [1] * batch, 16, 64, 132, slots=264)
    assert len(starts) == ranges + 1
    ends = [s.request * chunks(kv_len) + s.kv_tile // CHUNK_TILES for s in starts]
    assert max(b - a for a, b in itertools.pairwise(ends)) == each


@pytest.mark.parametrize(("batch", "kv_len", "ranges", "each", "cut_tiles"), [
    (1, 4096, 32, 1, 2), (8, 4096, 128, 2, 2), (16, 4096, 128, 4, 8), (32, 4096, 128, 8, 8), (24, 4096, 128, 6, 2),
    (128, 4096, 128, 32, 8), (1, 131072, 128, 8, 8),
])  # fmt: skip
def test_fine_splits_fill_an_h200(batch: int, kv_len: int, ranges: int, each: int, cut_tiles: int) -> None:
    """Fine chunks of the longest range, and where items are cut: between those of 512 tokens where that is as fast."""
    starts, found = planned([kv_len] * batch, [1] * batch, 16, 16, 132, slots=1 << 20, fine=True)
    ends = [s.request * chunks(kv_len, FINE_TILES) + s.kv_tile // FINE_TILES for s in starts]
    assert (len(starts) - 1, max(b - a for a, b in itertools.pairwise(ends)), found) == (ranges, each, cut_tiles)


def test_without_lengths_requests_have_what_their_pages_hold() -> None:
    batch, pages, size = 70, 33, mla.Sizes(MAX_RANGES, MAX_RANGES, MAX_RANGES, 1)
    schedules = []
    for lengths in (None, torch.full((batch,), pages * KV_TILE, dtype=torch.int32)):
        schedule = torch.full((2, mla.words_of(size, batch) // 2), 0x55555555, dtype=torch.int32)
        mla.mla_plan(
            schedule, lengths, KV_TILE, 128, MAX_RANGES, 132, 66, 16, 128, pages_per_request=pages, batch_size=batch
        )  # fmt: skip
        schedules.append(schedule)
    assert torch.equal(*schedules)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 66, 1025, 3000])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("slots", "fine"), [(None, False), (264, False), (1 << 20, False), (1 << 20, True)])
def test_the_device_plans_as_the_cpu_does(batch: int, uniform: bool, slots: int | None, fine: bool) -> None:
    draw = random.Random(batch)
    lengths = [4096] * batch if uniform else [draw.choice((0, 64, draw.randint(1, 9000))) for _ in range(batch)]
    qo_lens = [1] * batch if uniform else [draw.choice((0, 1, 3)) for _ in range(batch)]
    size = mla.Sizes(MAX_RANGES, MAX_RANGES, MAX_RANGES, 1)
    schedules = []
    for device in ("cpu", "cuda"):
        schedule = torch.full((2, mla.words_of(size, batch) // 2), 0x55555555, dtype=torch.int32, device=device)
        pages = [0, *itertools.accumulate(-(-n // KV_TILE) for n in lengths)]
        tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (
            lengths, [0, *itertools.accumulate(qo_lens)], pages
        )]  # fmt: skip
        mla.mla_plan(schedule, tables[0], KV_TILE, 128, MAX_RANGES, 132, 66, 16, 128, *tables[1:],
                     fixed_splits=slots is not None, workspace_floats=(slots or 0) * 128 * 514,
                     fine_splits=fine)  # fmt: skip
        schedules.append(schedule.cpu())
    assert torch.equal(*schedules)
