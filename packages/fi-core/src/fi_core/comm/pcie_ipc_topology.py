"""How the GPUs of a group are connected over PCIe, and the label that FlashInfer gives it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fi_core.comm.memory import CudaRTLibrary
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.workspace import device_of

if TYPE_CHECKING:
    import torch

__all__ = ["PcieIpcProfileDecision", "PcieIpcRankTopology", "probe_pcie_ipc_rank_topology", "resolve_pcie_ipc_profile"]

_ROOT, _SWITCH = "rootcplx-noswitch", "pcieswitch-pairs"
PROFILES = {"rootcplx": _ROOT, _ROOT: _ROOT, "pcieswitch": _SWITCH, _SWITCH: _SWITCH}
_DEVICES = Path("/sys/bus/pci/devices")


@dataclass
class PcieIpcRankTopology:
    """What a rank knows of its GPU.

    Args:
        rank: of the group.
        hostname: of the rank.
        device_index: of the GPU in the process; -1: a CPU.
        device_uuid: of the GPU.
        peer_switch_local: for each other GPU that the process sees, by its UUID: whether one PCIe switch joins both.
        pair_errors: what has failed, by UUID.
        probe_error: what has failed before that.
    """

    rank: int
    hostname: str = ""
    device_index: int = -1
    device_uuid: str = ""
    peer_switch_local: dict[str, bool] = field(default_factory=dict)
    pair_errors: dict[str, str] = field(default_factory=dict)
    probe_error: str | None = None


@dataclass(frozen=True)
class PcieIpcProfileDecision:
    """The label of a group, and why it has it."""

    profile: str
    reason: str


def device_uuid(index: int) -> str:
    """The UUID of a CUDA device of this process."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _root_port(bus_id: str) -> str:
    """The port of the root complex above a device: the first below the bridge in its path of sysfs."""
    path = (_DEVICES / bus_id.lower()).resolve()
    parts = path.parts
    return "/".join(parts[: next(i for i, part in enumerate(parts) if part.startswith("pci")) + 2])


def probe_pcie_ipc_rank_topology(rank: int, device: torch.device | None = None) -> PcieIpcRankTopology:
    """Looks at this rank's GPU and the others that the process sees; what fails is written down, not raised.

    One switch joins two GPUs that are below the same port of the root complex, as /sys/bus/pci has it.

    Args:
        rank: of the group.
        device: None: the current CUDA device, or the CPU where there is none.
    """
    found = PcieIpcRankTopology(rank)
    try:
        found.hostname = socket.gethostname()
        own = device_of(device)
        if own.type == "cpu":
            return found
        import torch

        found.device_index = torch.cuda.current_device() if own.index is None else own.index
        found.device_uuid = device_uuid(found.device_index)
        cuda = CudaRTLibrary()
        port = _root_port(cuda.cudaDeviceGetPCIBusId(found.device_index))
        for other in range(torch.cuda.device_count()):
            if other == found.device_index:
                continue
            uuid = device_uuid(other)
            try:
                found.peer_switch_local[uuid] = _root_port(cuda.cudaDeviceGetPCIBusId(other)) == port
            except Exception as error:
                found.pair_errors[uuid] = f"{type(error).__name__}: {error}"
    except Exception as error:
        found.probe_error = f"{type(error).__name__}: {error}"
    return found


def resolve_pcie_ipc_profile(
    group: torch.distributed.ProcessGroup, requested: str | None = None, device: torch.device | None = None
) -> PcieIpcProfileDecision:
    """The label of a group, the same on all ranks; collective. No collective here depends on it.

    Args:
        group: the ranks, a group of torch.distributed.
        requested: "rootcplx", "pcieswitch" or their long forms, which are taken as they are; None: ranks look.
        device: None: the current CUDA device, or the CPU where there is none.

    Returns:
        profile: "pcieswitch-pairs" if a switch joins two GPUs of the group, else "rootcplx-noswitch"; and the reason.

    Raises:
        ValueError: requested is another word, or not the same on all ranks.
    """
    ranks = TorchDistBackend(group)
    words = ranks.allgather(requested)
    if any(word is not None and word not in PROFILES for word in words) or len(set(words)) > 1:
        raise ValueError(f"requested must be the same on all ranks, None or one of {', '.join(PROFILES)}; got {words}")
    if requested is not None:
        return PcieIpcProfileDecision(PROFILES[requested], "it is asked for")
    probes: list[PcieIpcRankTopology] = list(ranks.allgather(probe_pcie_ipc_rank_topology(ranks.Get_rank(), device)))
    members = {probe.device_uuid for probe in probes}
    for probe in probes:
        joined = [uuid for uuid, local in probe.peer_switch_local.items() if local and uuid in members]
        if joined:
            return PcieIpcProfileDecision(_SWITCH, f"a PCIe switch joins rank {probe.rank}'s GPU and {joined[0]}")
    failed = [f"rank {probe.rank}: {probe.probe_error}" for probe in probes if probe.probe_error]
    return PcieIpcProfileDecision(_ROOT, "; ".join(["no rank sees a PCIe switch between two GPUs", *failed]))
