"""The custom all-reduce with vLLM's names: a handle over buffers that the caller shares between the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.comm import ops
from fi_core.comm.memory import CudaRTLibrary, bytes_at, fill_empty, is_shared
from fi_core.comm.workspace import HEADER, MAX_WORLD, ROTATIONS, shots_of
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = [
    "vllm_all_reduce",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
]

_ROTATION_BYTES = 8 << 20  # a larger message takes several launches


class _Handle:
    """What a handle stands for."""

    def __init__(self, addresses: list[int], rank: int, device: torch.device) -> None:
        import torch

        self.rank, self.world_size = rank, len(addresses)
        runtime = CudaRTLibrary()
        for source, address in enumerate(addresses):
            kind, holder = runtime.cudaPointerGetAttributes(address)
            if kind != 2 or (source == rank and holder != device.index):
                raise ValueError(
                    f"ipc_tensors: for rank {source} an address of memory of {device if source == rank else 'a GPU'} "
                    f"is required; got {address:#x}"
                )
        self.buffer = bytes_at(addresses[rank], vllm_meta_size(), device)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        self.status = torch.zeros(4, dtype=torch.int32, device="cpu", pin_memory=True)
        if not is_shared(addresses):
            fill_empty(self.buffer)


handles: dict[int, _Handle] = {}


def _handle(fa: int) -> _Handle:
    found = handles.get(fa)
    if found is None:
        raise ValueError(f"fa: a handle of vllm_init_custom_ar that is not disposed of is required; got {fa}")
    return found


def vllm_meta_size() -> int:
    """Bytes that the shared buffer of each rank must have for the exchange itself."""
    return HEADER + ROTATIONS * _ROTATION_BYTES


def vllm_init_custom_ar(ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool) -> int:
    """Makes a handle for all-reduce over buffers of `create_shared_buffer`; over other memory, a barrier must follow.

    Args:
        ipc_tensors: the address of each rank's buffer of `vllm_meta_size()` bytes or more.
        rank_data: a tensor on the device of this rank; only its device is used.
        rank: this rank.
        full_nvlink: must be true: the GPUs access each other's memory.

    Returns:
        The handle.

    Raises:
        ValueError: The number of ranks or the rank is out of range, an address is not of the memory of the device,
            rank_data is not on a CUDA device, or full_nvlink is false.
        TypeError: ipc_tensors is no list of integers, or rank_data no tensor.
    """
    import torch

    if not isinstance(ipc_tensors, (list, tuple)) or not all(type(address) is int for address in ipc_tensors):
        raise TypeError(f"ipc_tensors: a list of addresses, which are integers, is required; got {ipc_tensors!r:.80}")
    if not 1 <= len(ipc_tensors) <= MAX_WORLD:
        raise ValueError(f"ipc_tensors: 1 to {MAX_WORLD} addresses are required; got {len(ipc_tensors)}")
    for address in ipc_tensors:
        if not 0 < address < 2**63 or address % 16:
            raise ValueError(f"ipc_tensors: addresses that are multiples of 16 are required; got {address:#x}")
    if not isinstance(rank_data, torch.Tensor):
        raise TypeError(f"rank_data: a tensor is required; got {type(rank_data).__name__}")
    if rank_data.device.type != "cuda":
        raise ValueError(f"rank_data: a tensor on a CUDA device is required; got {rank_data.device}")
    if type(rank) is not int or not 0 <= rank < len(ipc_tensors):
        raise ValueError(f"rank: 0 to {len(ipc_tensors) - 1} is required; got {rank!r}")
    if not full_nvlink:
        raise ValueError("full_nvlink: true is required, because ranks write to each other's memory; got False")
    fa = max(handles, default=0) + 1
    handles[fa] = _Handle(list(ipc_tensors), rank, rank_data.device)
    return fa


def vllm_dispose(fa: int) -> None:
    """Forgets a handle; the buffers stay the caller's. Raises ValueError for an unknown one."""
    _handle(fa)
    del handles[fa]


def vllm_register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Accepts the addresses of the ranks' buffers; inputs are sent from where they are, so none is needed.

    Raises:
        ValueError: fa, or not one address for each rank.
    """
    world = _handle(fa).world_size
    if not isinstance(fake_ipc_ptrs, (list, tuple)) or len(fake_ipc_ptrs) != world:
        raise ValueError(f"fake_ipc_ptrs: {world} addresses are required; got {fake_ipc_ptrs!r:.80}")


@fi_api
def vllm_all_reduce(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    reg_buffer: int,
    reg_buffer_sz_bytes: int,
    num_ctas: int,
) -> None:
    """Sums `inp` over the ranks into `out`, in fp32 in the order of ranks: all ranks have the same bits.

    Args:
        fa: of `vllm_init_custom_ar`.
        inp: fp16, bf16 or fp32, contiguous, a multiple of 16 bytes.
        out: shape and dtype of inp.
        reg_buffer, reg_buffer_sz_bytes: accepted; inp is not copied to a registered buffer first.
        num_ctas: the most CTAs to launch; 0: by the size of the message.

    Raises:
        ValueError: fa, a shape or an address does not fit.
        TypeError: A dtype does not fit.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    h = _handle(fa)
    shots = shots_of(inp.numel() * inp.element_size(), h.world_size, None)
    ops.all_reduce(
        inp,
        workspace=h.buffer,
        peers=h.peers,
        status=h.status,
        rank=h.rank,
        rotation_bytes=_ROTATION_BYTES,
        out=out,
        shots=shots,
        ctas=num_ctas if num_ctas > 0 else None,
    )


def vllm_get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """The handles and offsets of buffers that graphs have captured: none, because any address can be captured."""
    _handle(fa)
    return [], []


def vllm_register_graph_buffers(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
    """Accepts what `vllm_get_graph_buffer_ipc_meta` returned on each rank. Raises ValueError for an unknown handle."""
    _handle(fa)
