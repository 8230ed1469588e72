"""The group, the memory and the stream of a workspace with FlashInfer's names for GPUs on PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.pcie_ipc_policy import PACK_BYTES
from fi_core.comm.workspace import CommWorkspace, device_of

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class PcieIpcWorkspace:
    """Memory of a group that serves one stream of each rank; making and destroying one is collective."""

    # FlashInfer's are properties, so that the class has them too.
    __slots__ = (
        "__dict__",
        "device",
        "dtype",
        "element_size",
        "group",
        "max_blocks",
        "max_numel",
        "rank",
        "world_size",
    )
    _memory: CommWorkspace | None

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        max_numel: int,
        dtype: torch.dtype | None,
        dtypes: tuple[torch.dtype, ...],
        max_blocks: int,
        most_blocks: int | None,
        tune_batches: Sequence[int] | None,
        device: torch.device | None,
    ) -> None:
        import torch

        self.dtype, self._dtypes = dtype or torch.bfloat16, dtypes
        if self.dtype not in dtypes:
            raise TypeError(f"dtype must be {' or '.join(map(str, dtypes))}; got {dtype}")
        if max_numel <= 0 or max_numel * self.dtype.itemsize % PACK_BYTES:
            raise ValueError(
                f"max_numel must be a positive multiple of {PACK_BYTES // self.dtype.itemsize}; got {max_numel}"
            )
        if max_blocks <= 0 or (most_blocks is not None and max_blocks > most_blocks):
            range_of = "positive" if most_blocks is None else f"1 to {most_blocks}"
            raise ValueError(f"max_blocks must be {range_of}; got {max_blocks}")
        self.group, self.max_numel, self.max_blocks = group, max_numel, max_blocks
        self.element_size = self.dtype.itemsize
        self.device, self._ranks = device_of(device), TorchDistBackend(group)
        self.rank, self.world_size = self._ranks.Get_rank(), self._ranks.Get_size()
        self._tune_batches = None if tune_batches is None else tuple(map(int, tune_batches))
        self._stream: int | None = None

    @property
    def handle(self) -> int:
        """The address of this rank's memory. Raises RuntimeError if it is freed."""
        if self._memory is None:
            raise RuntimeError("handle: the workspace has been destroyed")
        return self._memory.buffer.data_ptr()

    def _keep_stream(self, call: str) -> None:
        """Raises RuntimeError on another stream than that of the first call; a capture only records."""
        import torch

        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if self._stream not in (None, stream):
            raise RuntimeError(
                f"{call}: a workspace serves one stream; make another one for this stream, or call rebind_stream() "
                "after the work of the first has completed"
            )
        self._stream = stream

    def rebind_stream(self) -> None:
        """Lets the next call come from another stream; the caller knows that the work of the first has completed."""
        self._stream = None

    def _fits(self, inp: torch.Tensor) -> bool:
        """Whether a tensor has a form that a call computes; its size is not looked at.

        Raises:
            ValueError: inp is on another device.
        """
        if inp.device != self.device:
            raise ValueError(f"inp must be on the device of the workspace, {self.device}; got {inp.device}")
        return self._memory is not None and inp.dtype in self._dtypes and inp.is_contiguous() and inp.dim() > 0

    def _batches(self, hidden: int) -> Sequence[int]:
        """Batch sizes that `tune` reports for rows of a hidden size."""
        return self._tune_batches or [1 << i for i in range((self.max_numel // max(hidden, 1)).bit_length())]

    def destroy(self) -> None:
        """Frees the memory; collective. A second call does nothing."""
        if self._memory is not None:
            self._memory.destroy()
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.destroy()
