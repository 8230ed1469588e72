"""How collectives over shared memory are launched, with FlashInfer's names for GPUs on PCIe: functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from fi_core.comm.workspace import MAX_WORLD, shots_of
from fi_core.runtime.env import env

__all__ = [
    "PCIE_IPC_CUSTOM_OP",
    "PcieIpcAllGatherLaunchConfig",
    "PcieIpcAllGatherVariant",
    "PcieIpcLaunchConfig",
    "PcieIpcReduceScatterLaunchConfig",
    "PcieIpcReduceScatterVariant",
    "PcieIpcVariant",
    "get_pcie_ipc_all_gather_launch_config",
    "get_pcie_ipc_launch_config",
    "get_pcie_ipc_reduce_scatter_launch_config",
    "pcie_ipc_default_cache_path",
]

PCIE_IPC_CUSTOM_OP = "flashinfer::pcie_ipc_all_reduce"  # the name of the all-reduce in FlashInfer's tuned tables
PACK_BYTES = 16  # that a thread moves at once
ALL_REDUCE_BLOCKS, SHARD_BLOCKS = 128, 64  # the most CTAs, where a caller says nothing
_THREADS = 512


class PcieIpcVariant(IntEnum):
    """Forms of FlashInfer's all-reduce. `launch_config` gives the first two; the others differ in the order of copies.

    UNSTAGED: each rank sends its whole message to all others (one shot). STAGED: a reduce-scatter, then an all-gather.
    """

    UNSTAGED = 0
    STAGED = 1
    STAGED_RING = 2
    FLAT_STAGED = 3
    COPY_ENGINE_RING = 4
    COPY_ENGINE_ISLAND = 5
    COPY_ENGINE_RING_MEMOP = 6


class PcieIpcAllGatherVariant(IntEnum):
    """Forms of FlashInfer's all-gather. `launch_config` gives FLAT_PUSH: each rank writes its shard to all others."""

    FLAT_PUSH = 0
    RECURSIVE_DOUBLING = 1
    COPY_ENGINE = 2


class PcieIpcReduceScatterVariant(IntEnum):
    """Forms of FlashInfer's reduce-scatter. `launch_config` gives FLAT_CYCLIC: each rank sums what all others send."""

    FLAT_CYCLIC = 0
    FLAT_ONE_PACK = 1
    TOPOLOGY_CYCLIC = 2
    TOPOLOGY_ONE_PACK = 3


@dataclass(frozen=True)
class PcieIpcLaunchConfig:
    """How a message is reduced: a pure function of its bytes and of the number of ranks.

    Args:
        blocks: the most CTAs.
        threads: of a CTA.
        variant: the form.
    """

    blocks: int
    threads: int
    variant: PcieIpcVariant


@dataclass(frozen=True)
class PcieIpcAllGatherLaunchConfig:
    """How shards are gathered; the fields are those of `PcieIpcLaunchConfig`."""

    blocks: int
    threads: int
    variant: PcieIpcAllGatherVariant


@dataclass(frozen=True)
class PcieIpcReduceScatterLaunchConfig:
    """How shards are reduced; the fields are those of `PcieIpcLaunchConfig`."""

    blocks: int
    threads: int
    variant: PcieIpcReduceScatterVariant


def _is_supported(world_size: int, numel: int, element_size: int, sizes: tuple[int, ...]) -> bool:
    """Whether a message of a rank consists of whole packs."""
    size = numel * element_size
    return 1 <= world_size <= MAX_WORLD and element_size in sizes and size > 0 and size % PACK_BYTES == 0


def get_pcie_ipc_launch_config(
    world_size: int, numel: int, elem_size: int, max_blocks: int = ALL_REDUCE_BLOCKS
) -> PcieIpcLaunchConfig | None:
    """How `PcieIpcAllReduceWorkspace.all_reduce` computes a message; None if it does not. The same on all ranks.

    Args:
        world_size: ranks, 1 to 8.
        numel: elements of the message: a multiple of 16 bytes, above 0.
        elem_size: bytes of an element, 2.
        max_blocks: the most CTAs, 1 or more.
    """
    if max_blocks < 1 or not _is_supported(world_size, numel, elem_size, (2,)):
        return None
    variant = PcieIpcVariant(shots_of(numel * elem_size, world_size, None) - 1)
    return PcieIpcLaunchConfig(max_blocks, _THREADS, variant)


def get_pcie_ipc_all_gather_launch_config(
    world_size: int,
    shard_numel: int,
    max_blocks: int = SHARD_BLOCKS,
    element_size: int = 2,
    ordered_4plus4: bool = False,
) -> PcieIpcAllGatherLaunchConfig | None:
    """How `PcieIpcAllGatherWorkspace.all_gather` moves a shard; None if it does not. The same on all ranks.

    Args:
        world_size: ranks, 1 to 8.
        shard_numel: elements of a rank: a multiple of 16 bytes, above 0.
        max_blocks: the most CTAs, 1 to 64.
        element_size: bytes of an element, 2 or 4.
        ordered_4plus4: whether ranks 0 to 3 and 4 to 7 are islands; the one form here does not depend on it.
    """
    if not 1 <= max_blocks <= SHARD_BLOCKS or not _is_supported(world_size, shard_numel, element_size, (2, 4)):
        return None
    return PcieIpcAllGatherLaunchConfig(max_blocks, _THREADS, PcieIpcAllGatherVariant.FLAT_PUSH)


def get_pcie_ipc_reduce_scatter_launch_config(
    world_size: int,
    shard_numel: int,
    max_blocks: int = SHARD_BLOCKS,
    element_size: int = 2,
    ordered_4plus4: bool = False,
) -> PcieIpcReduceScatterLaunchConfig | None:
    """How `PcieIpcReduceScatterWorkspace.reduce_scatter` sums a shard; None if it does not. The same on all ranks.

    Args:
        world_size, max_blocks, element_size, ordered_4plus4: as for `get_pcie_ipc_all_gather_launch_config`.
        shard_numel: elements of a rank's result: a multiple of 16 bytes, above 0.
    """
    if not 1 <= max_blocks <= SHARD_BLOCKS or not _is_supported(world_size, shard_numel, element_size, (2, 4)):
        return None
    return PcieIpcReduceScatterLaunchConfig(max_blocks, _THREADS, PcieIpcReduceScatterVariant.FLAT_CYCLIC)


def pcie_ipc_default_cache_path(world_size: int) -> str:
    """The path that FlashInfer's tuned table of a number of ranks would have here; fi writes and reads none.

    Args:
        world_size: ranks.
    """
    folder = env.autotune_cache_dir or env.cache_dir / "autotune"
    return str(folder / f"pcie_ipc_ws{world_size}.json")
