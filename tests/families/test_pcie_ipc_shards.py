"""All-gather and reduce-scatter with FlashInfer's names for GPUs on PCIe, and the product of gathered rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from families.harness import assert_close
from families.ranks import run_ranks
from fi_core import comm
from fi_core.runtime.errors import BackendSupportedError

PLACES = [
    pytest.param(3, "cpu"),
    pytest.param(2, "one gpu", marks=pytest.mark.gpu),
    pytest.param(2, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
    pytest.param(8, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_shards(world: int, device: str) -> None:
    run_ranks(_check_shards, world, device)


def _check_shards(rank: int, world: int, device: torch.device) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in (BF16, F16, F32):
        options: dict[str, Any] = {"dtype": dtype, "device": device, "timeout": 20.0}
        gathers = comm.PcieIpcAllGatherWorkspace(group, 1 << 19, **options)
        reduces = comm.PcieIpcReduceScatterWorkspace(group, 1 << 19, max_blocks=8, **options)
        with gathers, reduces:
            for rows, hidden in ((1, 8), (5, 64), (500, 1024)):
                _check_call(rank, world, device, dtype, gathers, reduces, rows, hidden)
            _check_refusals(world, device, gathers, reduces)
        assert not gathers.supports(torch.ones(1, 8, dtype=dtype, device=device))
    _check_product(rank, world, device)
    _check_topology(rank, world, device)


def _check_call(
    rank: int, world: int, device: torch.device, dtype: torch.dtype, gathers: comm.PcieIpcAllGatherWorkspace,
    reduces: comm.PcieIpcReduceScatterWorkspace, rows: int, hidden: int,
) -> None:  # fmt: skip
    """Every rank knows the tensors of all ranks; small integers have exact sums."""
    whole = torch.randint(0, 16, (world, world * rows, hidden), generator=torch.Generator().manual_seed(rows))
    whole = whole.to(device, dtype)
    own = slice(rank * rows, (rank + 1) * rows)
    shard = whole[0, own].contiguous()
    assert gathers.supports(shard)
    assert torch.equal(gathers.all_gather(shard, config=gathers.launch_config(shard)), whole[0])
    out = torch.empty_like(whole[0])
    assert gathers.all_gather(shard, out=out) is out
    assert torch.equal(out, whole[0])
    x = whole[rank]
    want = whole.double().sum(0)[own]
    assert reduces.launch_config(x) == reduces.tuned_launch_config(x) is not None
    assert torch.equal(reduces.reduce_scatter(x).double(), want)
    into = torch.empty_like(shard)
    assert reduces.reduce_scatter(x, out=into) is into
    assert torch.equal(into.double(), want)


def _check_refusals(
    world: int, device: torch.device, gathers: comm.PcieIpcAllGatherWorkspace,
    reduces: comm.PcieIpcReduceScatterWorkspace,
) -> None:  # fmt: skip
    dtype, group = gathers.dtype, dist.group.WORLD
    x = torch.ones(2 * world, 8, dtype=dtype, device=device)
    other = torch.float64
    for shard in (
        x.to(other),
        x.mT[:, :4],
        x.view(-1),
        x[:0],
        x[:, 1:],
        torch.ones(1 << 16, 16, device=device).to(dtype),
    ):
        assert not gathers.supports(shard)
    assert reduces.supports(x) and (world == 1 or not reduces.supports(x[:1]))
    for call, words in (
        (lambda: gathers.all_gather(x.to(other)), r"inp must be a tensor that supports\(\) accepts: contiguous"),
        (lambda: gathers.all_gather(x, out=x), "out must be contiguous .* of shape"),
        (lambda: reduces.reduce_scatter(x, out=x[:2]), "out must not overlap inp; got memory of both"),
        (lambda: gathers.all_gather(x, config=comm.PcieIpcAllGatherLaunchConfig(1, 32, 1)), "config must be Pcie"),
        (lambda: gathers.tune([1 << 20]), "hiddens must have a size of which max_numel, 524288, holds a row"),
        (lambda: comm.PcieIpcAllGatherWorkspace(group, 64, max_blocks=65, device=device), "max_blocks must be 1 to 64"),
        (
            lambda: comm.PcieIpcAllGatherWorkspace(group, 63, device=device),
            "max_numel must be a positive multiple of 8",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert set(gathers.tune([8, 1 << 18])) == {(8, 1 << i) for i in range(17)} | {(1 << 18, 1), (1 << 18, 2)}


def _check_product(rank: int, world: int, device: torch.device) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype, m, k in ((BF16, 5, 24), (F16, 3, 7)):
        draw = torch.Generator().manual_seed(k)
        rows = torch.randn(world * m, k, generator=draw).to(device, dtype)
        w = torch.randn(world, k, 16, generator=draw).to(device, dtype)[rank]
        inp = rows[rank * m : (rank + 1) * m].contiguous()
        assert_close(comm.all_gather_matmul(inp, w, group), rows.double() @ w.double())
    with pytest.raises(BackendSupportedError, match="backend must be 'auto': the others are for Blackwell; got 'cake'"):
        comm.all_gather_matmul(inp, w, group, backend="cake")
    with pytest.raises(ValueError, match=r"inp must be contiguous \[m, k\] and w \[k, n\]"):
        comm.all_gather_matmul(inp, w.mT, group)


def _check_topology(rank: int, world: int, device: torch.device) -> None:
    group = dist.group.WORLD
    assert group is not None
    probe = comm.probe_pcie_ipc_rank_topology(rank, device)
    assert (probe.rank, probe.probe_error, bool(probe.hostname)) == (rank, None, True)
    decision = comm.resolve_pcie_ipc_profile(group, device=device)
    assert decision.profile in ("rootcplx-noswitch", "pcieswitch-pairs") and decision.reason
    assert comm.resolve_pcie_ipc_profile(group, "pcieswitch").profile == "pcieswitch-pairs"
    with pytest.raises(ValueError, match="requested must be the same on all ranks, None or one of rootcplx"):
        comm.resolve_pcie_ipc_profile(group, "pcieswitch" if rank else None)
    found = comm.resolve_ulysses_backend("auto", device=device)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, found)
    assert gathered == [found] * world
    assert comm.resolve_ulysses_backend("nccl").backend == "nccl"
    with pytest.raises(ValueError, match="backend must be the same on all ranks"):
        comm.resolve_ulysses_backend("auto" if rank else "nccl")
    with pytest.raises(ValueError, match="backend must be one of auto, nvlink, nccl; got 'ib'"):
        comm.resolve_ulysses_backend("ib")


def gpus(world: int, **changes: Any) -> list[comm.UlyssesRankTopology]:
    """Ranks of a host with a GPU each, all of which reach each other over NVLink."""
    ids = [f"GPU-{i}" for i in range(world)]
    found = []
    for rank, own in enumerate(ids):
        peers = {other: True for other in ids if other != own}
        topology = comm.UlyssesRankTopology(rank, "host", rank, own, f"0000:0{rank}:00.0", dict(peers), dict(peers))
        for name, change in changes.items():
            if rank == world - 1:
                setattr(topology, name, change)
        found.append(topology)
    return found


@pytest.mark.parametrize(
    ("topologies", "words"),
    [
        (gpus(3), "3 ranks; 2, 4, 6, 8 are required"),
        (gpus(2, hostname="other"), "one host is required"),
        (gpus(2, device_uuid="GPU-0"), "a GPU for each rank is required"),
        (gpus(2, probe_error="no driver"), "rank 1: no driver"),
        (gpus(4, peer_p2p={}), "GPU of rank 3 is not known to access the memory of that of rank 0"),
        (gpus(4, peer_nvlink={"GPU-0": False}), "GPU of rank 3 is not known to reach over NVLink that of rank 0"),
        (gpus(2, pair_errors={"GPU-0": "broken"}), "ranks 1 and 0: broken"),
    ],
)
def test_what_keeps_ranks_from_nvlink(topologies: list[comm.UlyssesRankTopology], words: str) -> None:
    """auto falls back to NCCL with the reason; nvlink is refused with it."""
    assert comm.decide_ulysses_backend("auto", gpus(len(topologies) + len(topologies) % 2)).backend == "nvlink"
    decision = comm.decide_ulysses_backend("auto", topologies)
    assert decision.backend == "nccl" and words in decision.reason
    with pytest.raises(comm.UlyssesBackendError, match=f"backend 'nvlink': .*{words}"):
        comm.decide_ulysses_backend("nvlink", topologies)


def test_launch_configurations() -> None:
    """Functions of sizes, and None for what is not computed."""
    assert comm.get_pcie_ipc_launch_config(8, 1 << 10, 2) == comm.PcieIpcLaunchConfig(128, 512, comm.PcieIpcVariant(0))
    large = comm.get_pcie_ipc_launch_config(8, 1 << 20, 2, max_blocks=4)
    assert large == comm.PcieIpcLaunchConfig(4, 512, comm.PcieIpcVariant.STAGED)
    assert comm.get_pcie_ipc_launch_config(9, 1 << 10, 2) is comm.get_pcie_ipc_launch_config(2, 7, 2) is None
    for config in (comm.get_pcie_ipc_all_gather_launch_config, comm.get_pcie_ipc_reduce_scatter_launch_config):
        found = config(4, 1024, element_size=4)
        assert found is not None and found.blocks == 64 and found.variant == 0
        assert config(4, 3) is config(4, 8, max_blocks=65) is config(4, 8, element_size=1) is config(9, 8) is None
    assert comm.pcie_ipc_default_cache_path(4).endswith("autotune/pcie_ipc_ws4.json")


def test_rank_masks() -> None:
    assert comm.moe_a2a_active_rank_mask([0, 3, 63], 64).tolist() == [1 | 8 | 1 << 63]
    with pytest.raises(ValueError, match=r"active_ranks must be 0 to ep_size - 1, ep_size 1 to 64; got \[4\] and 4"):
        comm.moe_a2a_active_rank_mask([4], 4)


def test_strided_memory() -> None:
    x = torch.arange(24, dtype=torch.int16)
    view = comm.pack_strided_memory(x.data_ptr() + 4, 4, 12, 4, torch.int16, -1)
    assert view.tolist() == [[2, 3], [8, 9], [14, 15], [20, 21]]
    view += 100
    assert x[2] == 102
    with pytest.raises(
        ValueError, match=r"segment_size must be at least 1 and a multiple of 4, of torch\.float32; got 6"
    ):
        comm.pack_strided_memory(x.data_ptr(), 6, 12, 1, torch.float32, -1)
