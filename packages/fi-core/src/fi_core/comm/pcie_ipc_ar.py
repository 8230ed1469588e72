"""All-reduce over memory that the ranks of a host share by CUDA IPC, with FlashInfer's names for GPUs on PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fi_core.comm import ops
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.workspace import CommWorkspace, device_of, rotation_bytes, shots_of
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = ["PcieIpcAllReduceWorkspace", "PcieIpcLaunchConfig"]

_PACK = 16  # bytes that a thread moves at once
_THREADS = 512
_PROFILES = (None, "rootcplx", "pcieswitch")


@dataclass(frozen=True)
class PcieIpcLaunchConfig:
    """How a message is reduced: a pure function of its bytes and of the number of ranks.

    Args:
        blocks: the most CTAs.
        threads: of a CTA.
        variant: 0: each rank sends all of its message to all others (one shot); 1: a reduce-scatter and an all-gather.
    """

    blocks: int
    threads: int
    variant: int


class PcieIpcAllReduceWorkspace:
    """Memory for all-reduce on the ranks of one host whose GPUs access each other's memory, over PCIe or NVLink.

    Making one, `prepare`, `tune` and `destroy` are collective. All ranks make the same calls in the same order, on one
    stream of each rank. A rank that another waits for in vain fails after `timeout` seconds.

    Args:
        group: the ranks, a group of torch.distributed.
        max_numel: elements of the largest message; a multiple of 16 bytes.
        dtype: bf16 or fp16; messages of either fit.
        max_blocks: the most CTAs of a launch.
        profile: "rootcplx", "pcieswitch" or None, FlashInfer's labels of how GPUs are connected; it has no effect.
        tune_batches: batch sizes that `tune` reports; powers of two up to max_numel if None.
        tune_cache: a file of FlashInfer's measurements; not read, because the form follows from the size.
        device: None: the current CUDA device, or the CPU where there is none.
        timeout: seconds that a call waits for another rank before it fails.

    Raises:
        ValueError: a number or label does not fit, the group has more than 8 ranks, or memory is lacking.
        TypeError: dtype is another.
        RuntimeError: The GPUs cannot access each other.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        max_numel: int,
        dtype: torch.dtype | None = None,
        max_blocks: int = 128,
        profile: str | None = None,
        tune_batches: Sequence[int] | None = None,
        tune_cache: str | None = None,
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        import torch

        self._dtypes = (torch.bfloat16, torch.float16)
        dtype = dtype or torch.bfloat16
        if dtype not in self._dtypes:
            raise TypeError(f"dtype must be torch.bfloat16 or torch.float16; got {dtype}")
        if max_numel <= 0 or max_numel * dtype.itemsize % _PACK:
            raise ValueError(f"max_numel must be a positive multiple of {_PACK // dtype.itemsize}; got {max_numel}")
        if max_blocks <= 0:
            raise ValueError(f"max_blocks must be positive; got {max_blocks}")
        if profile not in _PROFILES:
            raise ValueError(f"profile must be 'rootcplx', 'pcieswitch' or None; got {profile!r}")
        self.group, self.max_numel, self.max_blocks = group, max_numel, max_blocks
        self.elem_size, self.profile = dtype.itemsize, profile or ""
        self.device, ranks = device_of(device), TorchDistBackend(group)
        self._tune_batches = None if tune_batches is None else tuple(map(int, tune_batches))
        size = rotation_bytes(max_numel * dtype.itemsize, _PACK, ranks.Get_size())
        self._memory: CommWorkspace | None = CommWorkspace(self.device, ranks, size, 0, timeout)
        self.rank, self.world_size = self._memory.rank, self._memory.world_size
        self._stream: int | None = None

    @property
    def handle(self) -> int:
        """The address of this rank's memory. Raises RuntimeError if it is freed."""
        if self._memory is None:
            raise RuntimeError("handle: the workspace has been destroyed")
        return self._memory.buffer.data_ptr()

    def _keep_stream(self) -> None:
        """Raises RuntimeError on another stream than that of the first call; a capture only records."""
        import torch

        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if self._stream not in (None, stream):
            raise RuntimeError(
                "all_reduce: a workspace serves one stream; make another one for this stream, or call rebind_stream() "
                "after the work of the first has completed"
            )
        self._stream = stream

    def rebind_stream(self) -> None:
        """Lets the next call come from another stream; the caller knows that the work of the first has completed."""
        self._stream = None

    def launch_config(self, inp: torch.Tensor) -> PcieIpcLaunchConfig | None:
        """How `all_reduce` computes a tensor; None if it does not. The same on all ranks.

        Raises:
            ValueError: inp is on another device.
        """
        if inp.device != self.device:
            raise ValueError(f"inp must be on the device of the workspace, {self.device}; got {inp.device}")
        if self._memory is None or inp.dtype not in self._dtypes or not inp.is_contiguous() or inp.dim() == 0:
            return None
        return self._config(inp.numel())

    def _config(self, numel: int) -> PcieIpcLaunchConfig | None:
        size = numel * self.elem_size
        if not 0 < numel <= self.max_numel or size % _PACK:
            return None
        return PcieIpcLaunchConfig(self.max_blocks, _THREADS, shots_of(size, self.world_size, None) - 1)

    def tuned_launch_config(self, inp: torch.Tensor) -> PcieIpcLaunchConfig | None:
        """`launch_config`: the form follows from the size."""
        return self.launch_config(inp)

    def supports(self, inp: torch.Tensor) -> bool:
        """Whether `all_reduce` computes a tensor: contiguous, bf16 or fp16, a multiple of 16 bytes, not too large.

        Raises:
            ValueError: inp is on another device.
        """
        return self.launch_config(inp) is not None

    @fi_api
    def all_reduce(
        self,
        inp: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        config: PcieIpcLaunchConfig | None = None,
        enable_pdl: bool = False,
    ) -> torch.Tensor:
        """Sums a tensor over the ranks, in fp32 in the order of ranks: all ranks have the same bits.

        Args:
            inp: a tensor that `supports` accepts.
            out: like inp; allocated if None.
            config: that of `launch_config`, or None.
            enable_pdl: programmatic dependent launch.

        Returns:
            out.

        Raises:
            ValueError: inp, out or config does not fit.
            RuntimeError: another stream than that of the first call, or an earlier call has failed.
        """
        import torch

        known = self.launch_config(inp)
        if known is None or self._memory is None:
            raise ValueError(
                f"inp must be a tensor that supports() accepts; got {inp.dtype} of shape {list(inp.shape)} for at most "
                f"{self.max_numel} elements"
            )
        if config not in (None, known):
            raise ValueError(f"config must be {known}, that of launch_config(inp), or None; got {config}")
        self._keep_stream()
        out = torch.empty_like(inp) if out is None else out
        ops.all_reduce(
            inp, **self._memory.shared, out=out, shots=known.variant + 1, ctas=known.blocks, enable_pdl=enable_pdl
        )
        return out

    def prepare(
        self, shapes: Sequence[tuple[int, int]], *, dtype: torch.dtype | None = None
    ) -> dict[tuple[int, int], PcieIpcLaunchConfig | None]:
        """Loads the kernels of tensors `[batch, hidden]`, so that a CUDA graph can capture them. Collective.

        Args:
            shapes: (batch, hidden), the same on all ranks.
            dtype: bf16 or fp16; None is bf16.

        Returns:
            How each is computed; None for one that is not.
        """
        import torch

        found: dict[tuple[int, int], PcieIpcLaunchConfig | None] = {}
        for batch, hidden in shapes:
            found[int(batch), int(hidden)] = config = self._config(batch * hidden)
            if config is not None:
                self.all_reduce(torch.zeros(batch, hidden, dtype=dtype or torch.bfloat16, device=self.device))
        return found

    def tune(
        self,
        hiddens: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        cache: str | None = None,
        tune_group: torch.distributed.ProcessGroup | None = None,
        warmup: int = 10,
        repeat: int = 50,
    ) -> dict[tuple[int, int], PcieIpcLaunchConfig]:
        """Says how tensors of hidden sizes are computed, and loads their kernels; nothing is measured. Collective.

        Args:
            hiddens: columns of the tensors.
            dtype: bf16 or fp16; None is bf16.
            cache, warmup, repeat: of measurements; no effect.
            tune_group: a group of the same number of ranks, or None.

        Returns:
            `{(hidden, batch): config}` for tune_batches.

        Raises:
            ValueError: no size is computed, or tune_group has another number of ranks.
        """
        if tune_group is not None and TorchDistBackend(tune_group).Get_size() != self.world_size:
            raise ValueError(f"tune_group must have {self.world_size} ranks, as the workspace")
        found: dict[tuple[int, int], PcieIpcLaunchConfig] = {}
        for hidden in map(int, hiddens):
            batches = self._tune_batches or [1 << i for i in range((self.max_numel // max(hidden, 1)).bit_length())]
            known = self.prepare([(batch, hidden) for batch in batches], dtype=dtype)
            found |= {(hidden, batch): config for (batch, _), config in known.items() if config is not None}
        if not found:
            raise ValueError(
                f"hiddens must have a size of which max_numel, {self.max_numel}, holds a row; got {hiddens}"
            )
        return found

    def destroy(self) -> None:
        """Frees the memory; collective. A second call does nothing."""
        if self._memory is not None:
            self._memory.destroy()
        self._memory = None

    def __enter__(self) -> PcieIpcAllReduceWorkspace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.destroy()
