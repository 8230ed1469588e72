"""The launches of linear attention without a GPU: which kernels run for few and many states, and their grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fi_core.linear_attention.mamba_ops import SSD_COMBINED
from fi_core.linear_attention.ops import CHUNK_GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.launch.kernel import rehearse
from fi_core.runtime.machine import Launch, launches
from fi_core.runtime.spec.target import Target
from kernels.mock_driver import in_order

SHARED = {"80": 163 * 1024, "86": 99 * 1024, "90a": 227 * 1024}


def prefill(arch: str, sequences: int, heads: int, channel: bool, segment: int = 0) -> tuple[Launch, ...]:
    """Of sequences of 1024 tokens and heads of 128, on a device of 132 SMs."""
    tokens, dim = 1024 * sequences, 128
    gate = "channel" if channel else "head"
    choice = choose(Request.of(CHUNK_GATED_DELTA_RULE, Target("cuda", arch), {"gate": gate}))
    kernel = rehearse(choice.spec, 132, SHARED[arch])
    x = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {
        "out": x, "q": x, "k": x, "v": x, "cu_seqlens": torch.empty(sequences + 1, dtype=torch.int32), "scale": 1.0,
        "g": torch.empty(tokens, heads, *([dim] if channel else [])), "segment_tokens": segment,
    }  # fmt: skip
    return launches(kernel.run(*in_order(CHUNK_GATED_DELTA_RULE, arguments)))


def columns(launch: Launch) -> int:
    return int(launch.entry.rpartition("_")[2])


@pytest.mark.parametrize(
    ("arch", "channel", "few", "many"),
    [
        ("90a", False, (64, 2), (64, 2)),
        ("90a", True, (64, 2), (128, 1)),
        ("80", False, (32, 1), (64, 1)),
        ("80", True, (32, 1), (64, 1)),
        ("86", False, (32, 1), (32, 1)),
        ("86", True, (32, 1), (64, 1)),
    ],
)
def test_a_cta_has_as_many_columns_as_fit(
    arch: str, channel: bool, few: tuple[int, int], many: tuple[int, int]
) -> None:
    for (sequences, heads), expected in (((1, 4), few), ((8, 32), many)):
        prepare, states = prefill(arch, sequences, heads, channel)
        assert prepare.entry == "prepare_chunks"
        assert (columns(states), states.cluster) == expected
        assert states.grid[0] == sequences * heads * 128 // columns(states)
        assert max(prepare.shared_bytes, states.shared_bytes) <= SHARED[arch]
        assert prepare.grid[0] == 17 * sequences * heads


def test_segments_are_mapped_and_carried() -> None:
    for channel in (False, True):
        entries = [launch.entry for launch in prefill("90a", 1, 4, channel, 256)]
        assert entries == ["prepare_chunks", "map_segments", "carry_states", "chunk_states_64"]


def update(state: torch.dtype, **changes: Any) -> Launch:
    """Of 2 requests with 3 heads of 38 rows, on a device of 132 SMs."""
    short = {torch.float32: "f32", torch.float16: "f16", torch.int16: "i16", torch.int8: "i8"}[state]
    choice = choose(Request.of(SELECTIVE_STATE_UPDATE, Target("cuda", "90a"), {"state": short}))
    kernel = rehearse(choice.spec, 132, SHARED["90a"])
    x, shared = torch.empty(2, 3, 38, dtype=torch.bfloat16), torch.empty(2, 1, 128, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {
        "out": x, "state": torch.empty(2, 3, 38, 128, dtype=state), "x": x, "dt": torch.empty(2, 3, 1).expand(2, 3, 38),
        "A": torch.empty(3, 1, 1).expand(3, 38, 128), "B": shared, "C": shared,
    }  # fmt: skip
    [launch] = launches(kernel.run(*in_order(SELECTIVE_STATE_UPDATE, arguments | changes)))
    return launch


def test_states_whose_numbers_are_of_elements() -> None:
    """A warp has a row: 3 heads of 2 requests with 10 CTAs of 4 rows each."""
    assert update(torch.float32).entry != "selective_state_update_elements"
    scale, seed = torch.empty(2, 3, 38), torch.empty(1, dtype=torch.int64)
    for launch in (
        update(torch.float32, dt=torch.empty(2, 3, 38)),
        update(torch.float32, A=torch.empty(3, 38, 128)),
        update(torch.float32, D=torch.empty(3, 38)),
        update(torch.float32, dt_bias=torch.empty(3, 38)),
        update(torch.float16, rand_seed=seed),
        update(torch.int16, state_scale=scale),
        update(torch.int8, state_scale=scale),
    ):
        assert (launch.entry, launch.grid[0]) == ("selective_state_update_elements", 2 * 3 * 10)


@pytest.mark.parametrize(
    ("sequences", "heads", "groups", "kept", "expected"),
    [
        (1, 80, 1, False, ("ssd_states_2_4", 2)),
        (12, 80, 1, False, ("ssd_states_2_2", 2)),
        (12, 80, 1, True, ("ssd_states_checkpoints_2_2", 2)),
        (1, 3, 3, False, ("ssd_states_checkpoints_1_2", 1)),
    ],
)
def test_ctas_of_mamba_prefill_copy_for_each_other(
    sequences: int, heads: int, groups: int, kept: bool, expected: tuple[str, int]
) -> None:
    """Where two heads have a group; with more stages where no SM gets two CTAs."""
    kernel = rehearse(choose(Request.of(SSD_COMBINED, Target("cuda", "90a"), {})).spec, 132, SHARED["90a"])
    x, b = (torch.empty(1, 128, n, size, dtype=torch.bfloat16) for n, size in ((heads, 64), (groups, 128)))
    arguments: dict[str, Any] = {
        "out": x, "x": x.clone(), "dt": torch.empty(1, 128, heads), "A": torch.empty(heads), "B": b, "C": b,
        "cu_seqlens": torch.empty(sequences + 1, dtype=torch.int32),
    }  # fmt: skip
    if kept:
        slots = torch.empty(sequences, dtype=torch.int32)
        arguments |= {"checkpoint_token_indices": slots, "checkpoint_state_slots": slots.clone()}
        arguments["checkpoint_states"] = torch.empty(1, heads, 64, 128)
    prepare, states = launches(kernel.run(*in_order(SSD_COMBINED, arguments)))
    assert prepare.entry == "ssd_prepare"
    assert (states.entry, states.cluster) == expected
    assert states.grid[0] == sequences * heads
