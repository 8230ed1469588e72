"""How the ranks of a group exchange Python objects, over torch.distributed or what the caller brings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed

__all__ = ["CommBackend", "MnnvlConfig", "OneRank", "TorchDistBackend", "all_ranks_agree"]


class CommBackend(ABC):
    """The ranks of a group, with mpi4py's names; engines derive their own."""

    @abstractmethod
    def Get_rank(self) -> int:
        """This process's rank."""

    @abstractmethod
    def Get_size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def allgather(self, data: Any) -> Any:
        """The objects of all ranks, by rank."""

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """The object of rank `root`."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def Split(self, color: int, key: int) -> Any:
        """The group of the ranks with the same color, ordered by key."""


class TorchDistBackend(CommBackend):
    """The ranks of a process group of torch.distributed.

    Args:
        group: the group; None is the world.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group

    def Get_rank(self) -> int:
        return self._dist.get_rank(self._group)

    def Get_size(self) -> int:
        return self._dist.get_world_size(self._group)

    def allgather(self, data: Any) -> tuple[Any, ...]:
        gathered: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered)

    def bcast(self, data: Any, root: int = 0) -> Any:
        """The object of rank `root` of the group."""
        held = [data]
        self._dist.broadcast_object_list(held, group=self._group, group_src=root)
        return held[0]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """The group of the ranks with the same color, in the order of ranks, which torch takes instead of the keys.

        Every rank of the world must call it.
        """
        mine = (color, self._dist.get_rank())
        world: list[Any] = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(world, (self._ranks(), mine))
        found = self
        for ranks in dict.fromkeys(ranks for ranks, _ in world):
            members = [given for theirs, given in world if theirs == ranks]
            for wanted in sorted({c for c, _ in members}):
                chosen = sorted(rank for c, rank in members if c == wanted)
                group = self._dist.new_group(chosen)
                if mine[1] in chosen:
                    found = TorchDistBackend(group)
        return found

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        self._dist.all_reduce(tensor, group=self._group)

    def _ranks(self) -> tuple[int, ...]:
        return tuple(self._dist.get_process_group_ranks(self._group or self._dist.group.WORLD))


class OneRank(CommBackend):
    """The group of one rank, which needs no torch.distributed."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return (data,)

    def bcast(self, data: Any, root: int = 0) -> Any:
        return data

    def barrier(self) -> None:
        return

    def Split(self, color: int, key: int) -> OneRank:
        return self


@dataclass
class MnnvlConfig:
    """How the ranks of a group share memory.

    Args:
        comm_backend: exchanges the handles; None: torch.distributed's world.
        allocation_granularity, fabric_page_size: accepted; memory is shared by CUDA IPC, which has no such sizes.
    """

    comm_backend: CommBackend | None = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


def ranks_of(config: MnnvlConfig | None) -> CommBackend:
    """What exchanges the handles, by default torch.distributed's world. Raises ValueError where there is neither."""
    import torch.distributed as dist

    if config is not None and config.comm_backend is not None:
        return config.comm_backend
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "mnnvl_config: MnnvlConfig(comm_backend=...) is required where torch.distributed has no process group; "
            "call torch.distributed.init_process_group for its world"
        )
    return TorchDistBackend()


def all_ranks_agree(comm: CommBackend, local: bool) -> bool:
    """Whether `local` is true on every rank of the group; every rank must call it."""
    return all(comm.allgather(bool(local)))
