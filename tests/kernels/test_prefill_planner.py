"""The planner of batch prefill on the CPU: the height of work tiles and the split-KV of the last ones."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_core.attention.ops import prefill as ops

CTAS = 132  # one per SM of an H200
TALL, SHORT = 48, 32  # tokens of tiles of 192 and of 128 rows with group size 4


class Planned(NamedTuple):
    num_tiles: int
    tile_tokens: int
    first_split: int  # work tiles, one per query tile and kv head, from this one on are split
    max_splits: int
    min_split_tiles: int  # kv tiles of a split
    kv_tiles: list[int]  # of each query tile, in order


def planned(
    lengths: list[tuple[int, int]], kv_heads: int = 8, max_partials: int = 1000, short: int = SHORT, causal: bool = True
) -> Planned:
    """The plan of requests of (qo_len, kv_len)."""
    batch = len(lengths)
    bounds = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths)]
    schedule = torch.full((ops.schedule_words(batch, int(bounds[0][-1]), SHORT),), -7, dtype=torch.int32)
    ops.prefill_plan(
        schedule,
        *bounds,
        None,
        None,
        batch,
        TALL,
        causal=causal,
        num_kv_heads=kv_heads,
        short_tile_tokens=short,
        max_partials=max_partials,
        num_ctas=CTAS,
    )
    num_tiles, next_work, ctas_done, tokens, first_split, max_splits, min_split_tiles, _ = schedule[:8].tolist()
    assert (next_work, ctas_done) == (0, 0)
    assert ops.requests(schedule, batch)[:, 1::2].tolist() == [list(x) for x in lengths]
    if max_partials:
        assert schedule[8 : ops.schedule_words(0, 0, 1)].eq(0).all(), "counters"
    listed = schedule[ops.schedule_words(batch, 0, 1) - 2 * batch :][: 2 * num_tiles].view(-1, 2).tolist()
    assert sorted(listed) == [[b, t] for b, (n, _) in enumerate(lengths) for t in range(-(-n // tokens))]
    kv_tiles = []
    for b, t in listed:
        n, kv = lengths[b]
        last = min((t + 1) * tokens, n) - 1
        kv_tiles.append(-(-(max(kv - n + last + 1, 0) if causal else kv) // 128))
    assert kv_tiles == sorted(kv_tiles, reverse=True)
    return Planned(num_tiles, tokens, first_split, max_splits, min_split_tiles, kv_tiles)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([(512, 512)], SHORT),  # 88 tall tiles leave a third of the CTAs idle
        ([(1024, 1024)], SHORT),  # 176 tall ones are two rounds, 256 short ones hardly more
        ([(1024, 1024)] * 16, TALL),
        ([(16384, 16384)], TALL),
        ([(512, 8192)] * 8, TALL),
    ],
)
def test_tile_height(lengths: list[tuple[int, int]], tokens: int) -> None:
    assert planned(lengths).tile_tokens == tokens
    assert planned(lengths, short=0).tile_tokens == TALL


def test_last_wave_is_split() -> None:
    """704 work tiles are 5 waves and 44 tiles, which 132 CTAs compute in three splits each."""
    plan = planned([(512, 8192)] * 8)
    assert (plan.num_tiles * 8, plan.first_split, plan.max_splits) == (704, 660, 3)
    assert plan.max_splits * plan.min_split_tiles >= plan.kv_tiles[660 // 8]


def test_few_tiles_are_split() -> None:
    plan = planned([(128, 32768)])
    work_tiles = plan.num_tiles * 8
    assert plan.first_split == 0 and work_tiles * plan.max_splits <= CTAS < work_tiles * (plan.max_splits + 1)


def test_one_long_request_among_short_ones() -> None:
    """The long request is split: one CTA would take longer than all CTAs take on average."""
    plan = planned([(100, 32768), *[(200, 200)] * 2], kv_heads=2)
    assert plan.first_split == 0 and plan.max_splits > 1
    assert plan.min_split_tiles >= plan.kv_tiles[4], "short requests are not split"


@pytest.mark.parametrize("lengths", [[(1024, 1024)] * 16, [(16384, 16384)], [(300, 900)], [(512, 512)]])
def test_short_tiles_are_not_split(lengths: list[tuple[int, int]]) -> None:
    """Merging partials would cost more than split-KV saves."""
    plan = planned(lengths)
    assert (plan.first_split, plan.max_splits) == (plan.num_tiles * 8, 1)


def test_no_split_without_room_for_partials() -> None:
    for max_partials in (0, 1, 100):
        plan = planned([(512, 8192)] * 8, max_partials=max_partials)
        assert (plan.first_split, plan.max_splits) == ((704, 1) if max_partials < 88 else (660, 2))


@settings(max_examples=150)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 2000), st.one_of(st.integers(0, 2000), st.integers(0, 100_000))),
        min_size=1,
        max_size=30,
    ),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    max_partials=st.sampled_from([0, 1, 7, 88, 300, 4000]),
    short=st.sampled_from([0, SHORT]),
    causal=st.booleans(),
)
def test_splits_cover_their_tile_and_fit_the_workspace(
    lengths: list[tuple[int, int]], kv_heads: int, max_partials: int, short: int, causal: bool
) -> None:
    """For any batch, every tile is listed once (`planned` checks it), and there are at most max_partials partials."""
    plan = planned(lengths, kv_heads, max_partials, short, causal)
    work_tiles = plan.num_tiles * kv_heads
    assert plan.tile_tokens in {TALL, short or TALL}
    if plan.max_splits == 1:
        assert plan.first_split == work_tiles
        return
    split = work_tiles - plan.first_split
    assert 0 < split <= 256 and 1 < plan.max_splits <= 16 and split * plan.max_splits <= max_partials
    assert plan.max_splits * plan.min_split_tiles >= plan.kv_tiles[plan.first_split // kv_heads], (
        "the first split tile is the longest"
    )
