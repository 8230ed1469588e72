"""The workspace of all-reduce: memory that the ranks share, and what a call needs to know about the group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from fi_core.comm.memory import SharedMemory
from fi_core.comm.mnnvl import CommBackend, TorchDistBackend
from fi_core.runtime.errors import BackendSupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["AllReduceFusionWorkspace", "TRTLLMAllReduceFusionWorkspace"]

Found = TypeVar("Found")

HEADER = 4096  # kCommHeader of fi/comm/workspace.h
ROTATIONS = 3
MAX_WORLD = 8
_MOST_SECONDS = 1 << 31

# The largest message, in bytes, that is sent in one shot, by the number of ranks. With two ranks both forms send the
# same bytes, and one shot has one hop less.
_ONE_SHOT_BYTES = {1: 2**62, 2: 2**62, 3: 512 << 10, 4: 512 << 10}
_ONE_SHOT_BYTES_OF_MORE = 128 << 10
# A larger message takes several launches.
_MAX_ROTATION_BYTES = 128 << 20


def shots_of(message_bytes: int, world_size: int, use_oneshot: bool | None) -> int:
    """1 or 2: the form in which a message is sent."""
    if use_oneshot is not None:
        return 1 if use_oneshot else 2
    return 1 if message_bytes <= _ONE_SHOT_BYTES.get(world_size, _ONE_SHOT_BYTES_OF_MORE) else 2


def rotation_bytes(message_bytes: int, row_bytes: int, world_size: int) -> int:
    """Bytes of the workspace that one launch fills, for messages up to this size; a multiple of 16."""
    rows = -(-message_bytes // row_bytes)
    one_shot = (world_size - 1) * min(message_bytes, _ONE_SHOT_BYTES.get(world_size, _ONE_SHOT_BYTES_OF_MORE))
    two_shot = ((world_size - 1) * -(-rows // world_size) + rows) * row_bytes if world_size > 2 else 0
    least = 2 * world_size * max(row_bytes, 65536)  # a row in either form, or a CTA's part of a flat message
    return -(-max(min(max(one_shot, two_shot), _MAX_ROTATION_BYTES), least) // 16) * 16


def current_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_of(device: torch.device | None) -> torch.device:
    """The device, by default the current one. Raises ValueError for what names none."""
    import torch

    if device is None:
        return current_device()
    try:
        if isinstance(device, (str, torch.device)):
            return torch.device(device)
    except RuntimeError:
        pass
    raise ValueError(f"device: a device of torch is required; got {device!r}")


def check_backend(backend: str) -> None:
    """Raises BackendSupportedError for another than "trtllm"."""
    if backend != "trtllm":
        raise BackendSupportedError(f"backend: 'trtllm' is required; got {backend!r}")


def check_group(comm_backend: CommBackend, rank: int | None, size: int | None, rank_name: str, size_name: str) -> None:
    """Raises ValueError unless rank and size are the group's; None agrees."""
    for name, given, found in ((rank_name, rank, comm_backend.Get_rank()), (size_name, size, comm_backend.Get_size())):
        if given is not None and given != found:
            raise ValueError(f"{name}: {found}, that of the group, is required; got {given}")


def find_by_address(known: dict[int, Found], tensor: torch.Tensor, name: str) -> Found | None:
    """What is known of the address of a tensor. Raises TypeError for anything that has none."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"{name}: a dense tensor is required; got {type(tensor).__name__}")
    return known.get(tensor.data_ptr())


class CommWorkspace:
    """Memory that the ranks of a group share for one kind of collective.

    Calls on all ranks must come in the same order, on one stream of each rank at a time. Making one is collective.

    Args:
        device: a CUDA device, or the CPU.
        comm_backend: the group.
        rotation_bytes: of each of the three parts that calls use one after the other.
        more_bytes: behind them.
        timeout: seconds that a call waits for another rank before it fails.

    Raises:
        ValueError: The group has more than 8 ranks, or the system does not give the memory.
        RuntimeError: The GPUs cannot access each other.
    """

    def __init__(
        self, device: torch.device, comm_backend: CommBackend, rotation_bytes: int, more_bytes: int, timeout: float
    ) -> None:
        import torch

        self.rank, self.world_size = comm_backend.Get_rank(), comm_backend.Get_size()
        if self.world_size > MAX_WORLD:
            raise ValueError(f"group: 1 to {MAX_WORLD} ranks of one host are required; got {self.world_size}")
        if not 0 <= timeout <= _MOST_SECONDS:
            raise ValueError(f"timeout: 0 to {_MOST_SECONDS} seconds are required; got {timeout!r}")
        self.rotation_bytes = rotation_bytes
        self.more_offset = HEADER + ROTATIONS * rotation_bytes
        size = self.more_offset + more_bytes
        try:
            self.memory = SharedMemory(size, device, comm_backend)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"workspace_size_per_rank, or the sizes that it follows from: {size} bytes of shared memory are "
                f"required, which the system does not give ({error})"
            ) from error
        self.buffer = self.memory.tensor()
        peers = torch.tensor(self.memory.pointers, dtype=torch.int64, device="cpu")
        status = torch.zeros(4, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        # The arguments that every collective has.
        self.shared: dict[str, Any] = {
            "workspace": self.buffer,
            "peers": peers,
            "status": status,
            "rank": self.rank,
            "rotation_bytes": rotation_bytes,
            "timeout_ms": max(1, round(timeout * 1000)),
        }

    def checkpoint_prepare(self) -> None:
        """Raises NotImplementedError: shared memory does not survive a checkpoint of the process."""
        raise NotImplementedError("checkpoint_prepare: not supported, call destroy before the checkpoint")

    def checkpoint_restore(self, comm_backend: CommBackend) -> None:
        """Raises NotImplementedError: shared memory does not survive a checkpoint of the process."""
        raise NotImplementedError("checkpoint_restore: not supported, make another workspace after the checkpoint")

    def destroy(self) -> None:
        """Frees the memory; collective. A second call does nothing."""
        self.memory.close()
        self.shared.clear()
        self.__dict__.pop("buffer", None)


class AllReduceFusionWorkspace(ABC):
    """What `allreduce_fusion` needs to know of a group and its memory; `create_allreduce_fusion_workspace` makes one.

    Args:
        world_size, rank: of the group.
    """

    backend = ""  # its name, which a class gives
    one_host = True
    shared: dict[str, Any]

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank = world_size, rank

    @abstractmethod
    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether the workspace was made for this group size and for messages of `[num_tokens, hidden_dim]`."""

    @abstractmethod
    def prepared(self, input: torch.Tensor, use_oneshot: bool | None) -> tuple[torch.Tensor, int]:
        """What the ranks of this host reduce, and in how many shots."""

    @abstractmethod
    def destroy(self) -> None:
        """Frees the memory; collective."""


class TRTLLMAllReduceFusionWorkspace(CommWorkspace, AllReduceFusionWorkspace):
    """Memory for `allreduce_fusion` on the ranks of one host.

    Args:
        tp_size, tp_rank: of the group.
        max_token_num, hidden_dim, dtype: the largest message; dtype None is fp16.
        comm_backend: the group, as an object; takes the place of `group`.
        group: the ranks; None: the world of torch.distributed.
        device: None: the current CUDA device, or the CPU where there is none.
        timeout: seconds that a call waits for another rank before it fails.

    Raises:
        ValueError: tp_size or tp_rank is not that of the group, or the system does not give the memory.
        RuntimeError: The GPUs cannot access each other.
    """

    backend = "trtllm"
    workspace_tensor: torch.Tensor | None = None  # of the functions with TensorRT-LLM's names
    ipc_handles: list[list[int]] | None = None

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype | None = None,
        comm_backend: CommBackend | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        import torch

        ranks = comm_backend or TorchDistBackend(group)
        check_group(ranks, tp_rank, tp_size, "tp_rank", "tp_size")
        self.max_token_num, self.hidden_dim, self.dtype = max_token_num, hidden_dim, dtype or torch.float16
        self.max_bytes = max_token_num * hidden_dim * self.dtype.itemsize
        size = rotation_bytes(self.max_bytes, hidden_dim * self.dtype.itemsize, tp_size)
        CommWorkspace.__init__(self, device_of(device), ranks, size, 0, timeout)

    @property
    def metadata(self) -> dict[str, Any]:
        """What FlashInfer's workspaces say of themselves: the group, the largest message, and bytes of each part."""
        return {
            "tp_rank": self.rank,
            "tp_size": self.world_size,
            "max_token_num": self.max_token_num,
            "hidden_dim": self.hidden_dim,
            "use_fp32_lamport": self.dtype.itemsize == 4,
            "buffer_size": self.max_bytes,
            "flag_size": HEADER,
            "lamport_comm_size": self.rotation_bytes,
            "lamport_buffer_size": ROTATIONS * self.rotation_bytes,
            "control_flag_ptr": self.buffer.data_ptr(),
        }

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether the workspace was made for this group size and for messages of `[num_tokens, hidden_dim]`."""
        return tp_size == self.world_size and num_tokens * hidden_dim * dtype.itemsize <= self.max_bytes

    def prepared(self, input: torch.Tensor, use_oneshot: bool | None) -> tuple[torch.Tensor, int]:
        """What the ranks of this host reduce, and in how many shots."""
        return input, shots_of(input.numel() * input.element_size(), self.world_size, use_oneshot)
