"""fi_core.comm: which rank does what, and how ranks exchange objects."""

from __future__ import annotations

import pytest
import torch

from families.ranks import run_ranks
from fi_core.comm import (
    CommBackend,
    Mapping,
    MnnvlConfig,
    MoeAlltoAll,
    TorchDistBackend,
    compute_fp4_swizzled_layout_sf_size,
)
from fi_core.comm.dcp_alltoall import decode_cp_a2a_allocate_mnnvl_workspace
from fi_core.comm.mnnvl import OneRank, all_ranks_agree


def test_the_example_of_two_stages() -> None:
    """8 ranks, 4 of tensor parallelism and 2 stages: neighbours share a layer."""
    ranks = [Mapping(8, rank, 8, tp_size=4, pp_size=2) for rank in range(8)]
    assert [m.tp_rank for m in ranks] == [0, 1, 2, 3] * 2
    assert [m.pp_rank for m in ranks] == [0] * 4 + [1] * 4
    assert ranks[5].tp_group == [4, 5, 6, 7] and ranks[5].pp_group == [1, 5] and ranks[5].cp_group == [5]
    assert ranks[0].is_first_pp_rank() and ranks[7].is_last_pp_rank() and ranks[5].prev_pp_rank() == 1
    assert ranks[1].pp_layers(5) == [0, 1, 2] and ranks[6].pp_layers(5) == [3, 4]
    assert not ranks[0].is_multi_node() and Mapping(16, 9, tp_size=16).node_rank == 1
    assert Mapping(16, 9, tp_size=16).local_rank == 1


def test_groups_divide_the_ranks() -> None:
    """Every dimension's groups are a partition, and its rank is the place in the group."""
    for rank in range(16):
        m = Mapping(16, rank, tp_size=8, cp_size=2, moe_cluster_size=2, moe_ep_size=2, cp_config={"type": "ring"})
        assert m.moe_cluster_group[m.moe_cluster_rank] == m.moe_ep_group[m.moe_ep_rank] == rank and m.moe_tp_size == 2
        assert (m.moe_tp_rank * 2 + m.moe_ep_rank) * 2 + m.moe_cluster_rank == m.tp_rank and m.has_moe_cluster()
        assert Mapping.from_dict(m.to_dict()) == m
        m = Mapping(16, rank, tp_size=4, cp_size=2, pp_size=2, moe_ep_size=2, moe_tp_size=2)
        for group, place in (
            (m.tp_group, m.tp_rank), (m.cp_group, m.cp_rank), (m.pp_group, m.pp_rank),
            (m.moe_ep_group, m.moe_ep_rank), (m.moe_tp_group, m.moe_tp_rank),
        ):  # fmt: skip
            assert group[place] == rank
            assert len(set(group)) == len(group)
        assert m.rank == m.pp_rank * 8 + m.cp_rank * 4 + m.tp_rank
        assert m.moe_tp_rank * 2 + m.moe_ep_rank == m.tp_rank
    assert m.has_tp() and m.has_cp() and m.has_pp() and m.has_moe_ep() and m.has_moe_tp() and not m.has_moe_cluster()
    assert Mapping(4, 3, tp_size=4, moe_ep_size=4).ep_experts(8) == [6, 7]
    assert Mapping(4, 3, tp_size=4, enable_attention_dp=True).dp_size == 4
    assert Mapping(4, 1, tp_size=4) == Mapping(4, 1, tp_size=4) != Mapping(4, 2, tp_size=4)
    assert len({Mapping(4, 1, tp_size=4), Mapping(4, 1, tp_size=4)}) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "tp_size": 4}, r"world_size: tp_size \* pp_size \* cp_size is required; got 8 and 4 \* 1"),
        ({"world_size": 4, "tp_size": 4, "rank": 4}, "rank: 0 to world_size - 1, 3, is required; got 4"),
        ({"world_size": 4, "tp_size": 4, "moe_ep_size": 3}, "moe_tp_size: .* must be tp_size, 4; got 1"),
        ({"world_size": 4, "tp_size": 4, "moe_ep_size": 0}, "moe_ep_size: 1 or more, or -1, is required; got 0"),
        ({"world_size": 4, "tp_size": 4, "attn_tp_size": 3}, "attn_tp_size: .* must be tp_size . cp_size, 4"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mapping(**sizes)


def _exchange(rank: int, world: int, device: torch.device) -> None:
    ranks: CommBackend = TorchDistBackend()
    assert (ranks.Get_rank(), ranks.Get_size()) == (rank, 3)
    assert ranks.allgather(rank * 10) == (0, 10, 20)
    assert ranks.bcast({"from": rank}, 1) == {"from": 1}
    assert all_ranks_agree(ranks, True) and not all_ranks_agree(ranks, rank != 2)
    half = ranks.Split(rank % 2, rank)
    assert half.allgather(rank) == ((0, 2) if rank % 2 == 0 else (1,))
    assert half.bcast(rank, 0) == rank % 2
    ranks.barrier()


def test_ranks_exchange_objects() -> None:
    run_ranks(_exchange, 3, "cpu")


def test_config_and_sizes() -> None:
    assert MnnvlConfig(comm_backend=None, fabric_page_size=1 << 29, allocation_granularity=0) == MnnvlConfig()
    assert compute_fp4_swizzled_layout_sf_size(129, 5) == 256 * 8
    assert torch.distributed.is_available()


def test_workspaces_of_exchanges_name_what_gives_the_ranks() -> None:
    mapping = Mapping(world_size=2, rank=0, cp_size=2)
    with pytest.raises(ValueError, match=r"mnnvl_config: .* call torch\.distributed\.init_process_group"):
        decode_cp_a2a_allocate_mnnvl_workspace(mapping)
    with pytest.raises(ValueError, match=r"mnnvl_config: .* call torch\.distributed\.init_process_group"):
        MoeAlltoAll(Mapping(world_size=2, rank=0, tp_size=2, moe_ep_size=2), 8, 2, 8, hidden_size=64, device="cpu")


def test_a_refused_dispatch_sends_nothing() -> None:
    """The next dispatch needs no combine before; and a workspace may be destroyed twice."""
    config, ids = MnnvlConfig(OneRank()), torch.zeros(3, 1, dtype=torch.int32)
    exchange = MoeAlltoAll(Mapping(), 4, 1, 4, hidden_size=64, mnnvl_config=config, device="cpu")
    with pytest.raises(ValueError, match="expert_id_payload_index: required with invalid_token_expert_id"):
        exchange.dispatch(ids, [ids], 4, invalid_token_expert_id=-1)
    (received,) = exchange.dispatch(ids, [ids], 4, invalid_token_expert_id=-1, expert_id_payload_index=0)
    assert received.flatten().tolist() == [0, 0, 0, -1]
    exchange.destroy()
    exchange.destroy()


def test_a_mapping_as_a_dict() -> None:
    mapping = Mapping(16, 9, tp_size=4, pp_size=4, moe_ep_size=2)
    assert Mapping.from_dict(mapping.to_dict()) == mapping and mapping.to_dict()["moe_tp_size"] == 2
    assert (mapping.get_node_rank(9), mapping.get_local_rank(9)) == (mapping.node_rank, mapping.local_rank) == (1, 1)
    assert mapping.is_second_last_pp_rank() and not Mapping(16, 13, tp_size=4, pp_size=4).is_second_last_pp_rank()
