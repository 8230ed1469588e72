"""Which backend a group of Ulysses context parallelism takes, from how its GPUs reach each other."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fi_core.comm.memory import CudaRTLibrary
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.pcie_ipc_topology import device_uuid
from fi_core.comm.workspace import device_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "ULYSSES_BACKENDS",
    "UlyssesBackendDecision",
    "UlyssesBackendError",
    "UlyssesRankTopology",
    "decide_ulysses_backend",
    "probe_ulysses_rank_topology",
    "resolve_ulysses_backend",
]

ULYSSES_BACKENDS = ("auto", "nvlink", "nccl")
SUPPORTED_WORLD_SIZES = (2, 4, 6, 8)
_ATOMICS = 3  # cudaDevP2PAttrNativeAtomicSupported, which NVLink has and PCIe has not (CUDA runtime API)
Backend = Literal["nvlink", "nccl"]


class UlyssesBackendError(RuntimeError):
    """backend="nvlink" is asked for where the ranks do not share memory."""


@dataclass(frozen=True)
class UlyssesBackendDecision:
    """The backend of a communicator, and why.

    Args:
        backend: "nvlink" (memory that the ranks share) or "nccl" (`all_to_all_single` of the group).
        reason: in words.
    """

    backend: Backend
    reason: str


@dataclass
class UlyssesRankTopology:
    """What a rank knows of its GPU.

    Args:
        rank: of the group.
        hostname: of the rank.
        device_index: of the GPU in the process; -1: a CPU.
        device_uuid, pci_bus_id: of the GPU.
        peer_p2p: for each other GPU that the process sees, by its UUID: whether this one can access its memory.
        peer_nvlink: the same: whether that goes over NVLink.
        pair_errors: what has failed, by UUID.
        probe_error: what has failed before that.
    """

    rank: int
    hostname: str = ""
    device_index: int = -1
    device_uuid: str = ""
    pci_bus_id: str = ""
    peer_p2p: dict[str, bool] = field(default_factory=dict)
    peer_nvlink: dict[str, bool] = field(default_factory=dict)
    pair_errors: dict[str, str] = field(default_factory=dict)
    probe_error: str | None = None


def probe_ulysses_rank_topology(device: torch.device | str | int | None, rank: int) -> UlyssesRankTopology:
    """Looks at this rank's GPU and the others that the process sees; what fails is written down, not raised.

    Args:
        device: None: the current CUDA device, or the CPU where there is none.
        rank: of the group.
    """
    found = UlyssesRankTopology(rank)
    try:
        import torch

        found.hostname = socket.gethostname()
        own = device_of(torch.device("cuda", device) if isinstance(device, int) else device)  # type: ignore[arg-type]
        if own.type == "cpu":
            return found
        cuda = CudaRTLibrary()
        found.device_index = torch.cuda.current_device() if own.index is None else own.index
        found.device_uuid = device_uuid(found.device_index)
        found.pci_bus_id = cuda.cudaDeviceGetPCIBusId(found.device_index)
        for other in range(torch.cuda.device_count()):
            if other == found.device_index:
                continue
            uuid = device_uuid(other)
            try:
                found.peer_p2p[uuid] = torch.cuda.can_device_access_peer(found.device_index, other)
                found.peer_nvlink[uuid] = bool(cuda.cudaDeviceGetP2PAttribute(_ATOMICS, found.device_index, other))
            except Exception as error:
                found.pair_errors[uuid] = f"{type(error).__name__}: {error}"
    except Exception as error:
        found.probe_error = f"{type(error).__name__}: {error}"
    return found


def _obstacle(topologies: Sequence[UlyssesRankTopology], supported_world_sizes: Sequence[int]) -> str:
    """Why the ranks do not exchange over NVLink; "" if they do."""
    if len(topologies) not in supported_world_sizes:
        return f"{len(topologies)} ranks; {', '.join(map(str, supported_world_sizes))} are required"
    failed = [f"rank {t.rank}: {t.probe_error}" for t in topologies if t.probe_error]
    if failed:
        return "; ".join(failed)
    hosts = sorted({t.hostname for t in topologies})
    if len(hosts) > 1 or not hosts[0]:
        return f"one host is required; got {hosts}"
    if all(t.device_index < 0 and not t.device_uuid for t in topologies):
        return ""  # CPUs of a host share memory
    uuids = [t.device_uuid for t in topologies]
    if len(set(uuids)) < len(uuids) or not all(uuids):
        return f"a GPU for each rank is required; got {uuids}"
    for one, other in itertools.permutations(topologies, 2):
        uuid = other.device_uuid
        if uuid in one.pair_errors:
            return f"ranks {one.rank} and {other.rank}: {one.pair_errors[uuid]}"
        for known, word in ((one.peer_p2p, "access the memory of"), (one.peer_nvlink, "reach over NVLink")):
            if not known.get(uuid, False):
                return f"the GPU of rank {one.rank} is not known to {word} that of rank {other.rank}"
    return ""


def decide_ulysses_backend(
    requested: str,
    topologies: Sequence[UlyssesRankTopology],
    supported_world_sizes: Sequence[int] = SUPPORTED_WORLD_SIZES,
) -> UlyssesBackendDecision:
    """The backend that follows from what all ranks know: a pure function. What is not known counts as no.

    Args:
        requested: "auto", "nvlink" or "nccl".
        topologies: of all ranks.
        supported_world_sizes: numbers of ranks that may take "nvlink".

    Raises:
        ValueError: requested is another word.
        UlyssesBackendError: "nvlink" is asked for, and the ranks cannot take it.
    """
    if requested not in ULYSSES_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(ULYSSES_BACKENDS)}; got {requested!r}")
    if requested == "nccl":
        return UlyssesBackendDecision("nccl", "it is asked for")
    obstacle = _obstacle(topologies, supported_world_sizes)
    if not obstacle:
        return UlyssesBackendDecision("nvlink", "each rank reaches all others over NVLink, or is a CPU of the host")
    if requested == "nvlink":
        raise UlyssesBackendError(f"backend 'nvlink': {obstacle}")
    return UlyssesBackendDecision("nccl", obstacle)


def resolve_ulysses_backend(
    backend: str = "auto",
    group: torch.distributed.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
) -> UlyssesBackendDecision:
    """The backend of a group by FlashInfer's rule, the same on all ranks; collective. Nothing is allocated.

    `UlyssesCommunicator(backend="auto")` shares memory wherever the ranks can, over PCIe and among 3, 5 and 7 ranks
    too. Its results do not depend on the backend.

    Args:
        backend: "auto", "nvlink" or "nccl", the same on all ranks.
        group: the ranks; None: the world of torch.distributed.
        device: None: the current CUDA device, or the CPU where there is none.

    Raises:
        ValueError: backend is another word, or not the same on all ranks.
        UlyssesBackendError: "nvlink" is asked for, and the ranks cannot take it.
    """
    ranks = TorchDistBackend(group)
    words = ranks.allgather(backend)
    if len(set(words)) > 1:
        raise ValueError(f"backend must be the same on all ranks; got {words}")
    if backend not in ("auto", "nvlink"):
        return decide_ulysses_backend(backend, [])
    return decide_ulysses_backend(backend, list(ranks.allgather(probe_ulysses_rank_topology(device, ranks.Get_rank()))))
