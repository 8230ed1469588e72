"""All-reduce over memory that the ranks of a host share by CUDA IPC, with FlashInfer's names for GPUs on PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fi_core.comm import ops
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.pcie_ipc_policy import (
    ALL_REDUCE_BLOCKS,
    PACK_BYTES,
    PcieIpcLaunchConfig,
    get_pcie_ipc_launch_config,
)
from fi_core.comm.pcie_ipc_topology import PROFILES
from fi_core.comm.pcie_ipc_workspace import PcieIpcWorkspace
from fi_core.comm.workspace import CommWorkspace, rotation_bytes
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = ["PcieIpcAllReduceWorkspace"]


class PcieIpcAllReduceWorkspace(PcieIpcWorkspace):
    """Memory for all-reduce on the ranks of one host whose GPUs access each other's memory, over PCIe or NVLink.

    Making one, `prepare`, `tune` and `destroy` are collective. All ranks make the same calls in the same order, on one
    stream of each rank. A rank that another waits for in vain fails after `timeout` seconds.

    Args:
        group: the ranks, a group of torch.distributed.
        max_numel: elements of the largest message; a multiple of 16 bytes.
        dtype: bf16 or fp16; messages of either fit.
        max_blocks: the most CTAs of a launch.
        profile: a label of `resolve_pcie_ipc_profile`, or None; it has no effect.
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
        max_blocks: int = ALL_REDUCE_BLOCKS,
        profile: str | None = None,
        tune_batches: Sequence[int] | None = None,
        tune_cache: str | None = None,
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        import torch

        if profile is not None and profile not in PROFILES:
            raise ValueError(f"profile must be {', '.join(map(repr, PROFILES))} or None; got {profile!r}")
        dtypes = torch.bfloat16, torch.float16
        super().__init__(group, max_numel, dtype, dtypes, max_blocks, None, tune_batches, device)
        self.elem_size, self.profile = self.element_size, profile or ""
        size = rotation_bytes(max_numel * self.element_size, PACK_BYTES, self.world_size)
        self._memory: CommWorkspace | None = CommWorkspace(self.device, self._ranks, size, 0, timeout)

    def launch_config(self, inp: torch.Tensor) -> PcieIpcLaunchConfig | None:
        """How `all_reduce` computes a tensor; None if it does not. The same on all ranks.

        Raises:
            ValueError: inp is on another device.
        """
        return self._config(inp.numel()) if self._fits(inp) else None

    def _config(self, numel: int) -> PcieIpcLaunchConfig | None:
        if numel > self.max_numel:
            return None
        return get_pcie_ipc_launch_config(self.world_size, numel, self.element_size, self.max_blocks)

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
        self._keep_stream("all_reduce")
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
            known = self.prepare([(batch, hidden) for batch in self._batches(hidden)], dtype=dtype)
            found |= {(hidden, batch): config for (batch, _), config in known.items() if config is not None}
        if not found:
            raise ValueError(
                f"hiddens must have a size of which max_numel, {self.max_numel}, holds a row; got {hiddens}"
            )
        return found
