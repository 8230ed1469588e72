"""What the planner of batch prefill chooses, on the CPU: the height of tiles, and how the last ones are split."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_core.prefill import ops

BLOCKS, TALL, SHORT = 132, 48, 32  # of an H200; tokens of tiles of 192 and 128 rows with 4 query heads a kv head


class Planned(NamedTuple):
    items: int
    tokens: int  # of a tile
    whole: int  # units before those that are split
    parts: int
    part_keys: int
    work: list[int]  # key tiles of each item, in order


def planned(
    lengths: list[tuple[int, int]], kv_heads: int = 8, slots: int = 1000, short: int = SHORT, causal: bool = True
) -> Planned:
    """The plan of requests of (qo_len, kv_len)."""
    batch = len(lengths)
    bounds = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths)]
    schedule = torch.full((ops.words(batch, int(bounds[0][-1]), SHORT),), -7, dtype=torch.int32)
    ops.plan(
        schedule, batch, TALL, *bounds, causal=causal, kv_heads=kv_heads, short_tokens=short, slots=slots, blocks=BLOCKS
    )
    items, following, done, tokens, whole, parts, part_keys, _ = schedule[:8].tolist()
    assert (following, done) == (0, 0)
    assert ops.requests(schedule, batch)[:, 1::2].tolist() == [list(x) for x in lengths]
    if slots:
        assert schedule[8 : ops.words(0, 0, 1)].eq(0).all(), "counters"
    listed = schedule[ops.words(batch, 0, 1) - 2 * batch :][: 2 * items].view(-1, 2).tolist()
    assert sorted(listed) == [[b, t] for b, (n, _) in enumerate(lengths) for t in range(-(-n // tokens))]
    work = []
    for b, t in listed:
        n, kv = lengths[b]
        last = min((t + 1) * tokens, n) - 1
        work.append(-(-(max(kv - n + last + 1, 0) if causal else kv) // 128))
    assert work == sorted(work, reverse=True)
    return Planned(items, tokens, whole, parts, part_keys, work)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([(512, 512)], SHORT),  # 88 tall tiles leave a third of the blocks idle
        ([(1024, 1024)], SHORT),  # 176 tall ones are two rounds, 256 short ones hardly more
        ([(1024, 1024)] * 16, TALL),
        ([(16384, 16384)], TALL),
        ([(512, 8192)] * 8, TALL),
    ],
)
def test_height(lengths: list[tuple[int, int]], tokens: int) -> None:
    assert planned(lengths).tokens == tokens
    assert planned(lengths, short=0).tokens == TALL


def test_last_round_is_split() -> None:
    """704 units are 5 rounds and 44 units, which 132 blocks share in three parts each."""
    plan = planned([(512, 8192)] * 8)
    assert (plan.items * 8, plan.whole, plan.parts) == (704, 660, 3)
    assert plan.parts * plan.part_keys >= plan.work[660 // 8]


def test_few_units_are_split() -> None:
    plan = planned([(128, 32768)])
    units = plan.items * 8
    assert plan.whole == 0 and units * plan.parts <= BLOCKS < units * (plan.parts + 1)


def test_one_long_request_among_short_ones() -> None:
    """It would take longer than all blocks need on average."""
    plan = planned([(100, 32768), *[(200, 200)] * 2], kv_heads=2)
    assert plan.whole == 0 and plan.parts > 1
    assert plan.part_keys >= plan.work[4], "short ones stay whole"


@pytest.mark.parametrize("lengths", [[(1024, 1024)] * 16, [(16384, 16384)], [(300, 900)], [(512, 512)]])
def test_short_tiles_stay_whole(lengths: list[tuple[int, int]]) -> None:
    """Merging would cost more than it brings."""
    plan = planned(lengths)
    assert (plan.whole, plan.parts) == (plan.items * 8, 1)


def test_nothing_is_split_without_room() -> None:
    for slots in (0, 1, 100):
        plan = planned([(512, 8192)] * 8, slots=slots)
        assert (plan.whole, plan.parts) == ((704, 1) if slots < 88 else (660, 2))


@settings(max_examples=150, deadline=None, database=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 2000), st.one_of(st.integers(0, 2000), st.integers(0, 100_000))),
        min_size=1,
        max_size=30,
    ),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    slots=st.sampled_from([0, 1, 7, 88, 300, 4000]),
    short=st.sampled_from([0, SHORT]),
    causal=st.booleans(),
)
def test_parts_cover_their_unit_and_have_room(
    lengths: list[tuple[int, int]], kv_heads: int, slots: int, short: int, causal: bool
) -> None:
    """Whatever a batch is: every tile is listed once (`planned` checks it), and parts are no more than the slots."""
    plan = planned(lengths, kv_heads, slots, short, causal)
    units = plan.items * kv_heads
    assert plan.tokens in {TALL, short or TALL}
    if plan.parts == 1:
        assert plan.whole == units
        return
    split = units - plan.whole
    assert 0 < split <= 256 and 1 < plan.parts <= 16 and split * plan.parts <= slots
    assert plan.parts * plan.part_keys >= plan.work[plan.whole // kv_heads], "no other of those is longer"
