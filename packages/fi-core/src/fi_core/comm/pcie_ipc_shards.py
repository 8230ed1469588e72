"""All-gather and reduce-scatter over memory that ranks of a host share, with FlashInfer's names for GPUs on PCIe."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from fi_core.comm import ops
from fi_core.comm.dcp_alltoall import AllToAllWorkspace
from fi_core.comm.pcie_ipc_policy import (
    PACK_BYTES,
    SHARD_BLOCKS,
    PcieIpcAllGatherLaunchConfig,
    PcieIpcReduceScatterLaunchConfig,
    get_pcie_ipc_all_gather_launch_config,
    get_pcie_ipc_reduce_scatter_launch_config,
)
from fi_core.comm.pcie_ipc_workspace import PcieIpcWorkspace
from fi_core.comm.workspace import CommWorkspace, rotation_bytes
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = ["PcieIpcAllGatherWorkspace", "PcieIpcReduceScatterWorkspace"]

Config = TypeVar("Config", PcieIpcAllGatherLaunchConfig, PcieIpcReduceScatterLaunchConfig)


class _ShardWorkspace(PcieIpcWorkspace, Generic[Config]):
    """What both workspaces of shards do."""

    ordered_4plus4 = False
    ordered_4plus4_reason = "not looked at: the form of a call does not depend on islands of GPUs"
    placement_fingerprint = ""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        max_numel: int,
        dtype: torch.dtype | None = None,
        max_blocks: int = SHARD_BLOCKS,
        tune_batches: Sequence[int] | None = None,
        tune_cache: str | None = None,
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        import torch

        dtypes = torch.bfloat16, torch.float16, torch.float32
        super().__init__(group, max_numel, dtype, dtypes, max_blocks, SHARD_BLOCKS, tune_batches, device)
        self._dtypes = (self.dtype,)
        self._memory = self._allocate(timeout)

    @abstractmethod
    def _allocate(self, timeout: float) -> CommWorkspace: ...

    @abstractmethod
    def _shard(self, inp: torch.Tensor) -> int | None:
        """Elements of the shard of a call; None if inp has none for each rank."""

    @abstractmethod
    def _config(self, shard_numel: int) -> Config | None: ...

    def launch_config(self, inp: torch.Tensor) -> Config | None:
        """How a call computes a tensor; None if it does not. The same on all ranks.

        Raises:
            ValueError: inp is on another device.
        """
        shard = self._shard(inp) if self._fits(inp) and inp.dim() == 2 and inp.data_ptr() % PACK_BYTES == 0 else None
        return None if shard is None or shard > self.max_numel else self._config(shard)

    def tuned_launch_config(self, inp: torch.Tensor) -> Config | None:
        """`launch_config`: there is one form."""
        return self.launch_config(inp)

    def supports(self, inp: torch.Tensor) -> bool:
        """Whether a call computes a tensor.

        Raises:
            ValueError: inp is on another device.
        """
        return self.launch_config(inp) is not None

    def _checked(
        self, call: str, inp: torch.Tensor, out: torch.Tensor | None, config: Config | None, rows: Callable[[int], int]
    ) -> torch.Tensor:
        """out, allocated if it is None; rows: of out, from those of inp."""
        known = self.launch_config(inp)
        if known is None:
            raise ValueError(
                f"inp must be a tensor that supports() accepts: contiguous {self.dtype} of two dimensions, aligned to "
                f"{PACK_BYTES} bytes, with shards of such a multiple and at most {self.max_numel} elements; got "
                f"{inp.dtype} of shape {list(inp.shape)}"
            )
        if config not in (None, known):
            raise ValueError(f"config must be {known}, that of launch_config(inp), or None; got {config}")
        self._keep_stream(call)
        shape = (rows(inp.shape[0]), inp.shape[1])
        if out is None:
            return inp.new_empty(shape)
        if (out.shape, out.dtype, out.device) != (shape, inp.dtype, inp.device) or not out.is_contiguous():
            raise ValueError(
                f"out must be contiguous {inp.dtype} of shape {list(shape)} on {inp.device}; got {out.dtype} of shape "
                f"{list(out.shape)} on {out.device}"
            )
        if out.data_ptr() % PACK_BYTES:
            raise ValueError(f"out must be aligned to {PACK_BYTES} bytes; got address {out.data_ptr():#x}")
        first, second = sorted(((inp.data_ptr(), inp.nbytes), (out.data_ptr(), out.nbytes)))
        if first[0] + first[1] > second[0]:
            raise ValueError("out must not overlap inp; got memory of both")
        return out

    def tune(
        self, hiddens: Sequence[int], *, cache: str | None = None, warmup: int = 10, repeat: int = 50
    ) -> dict[tuple[int, int], Config]:
        """Says how shards of hidden sizes are moved; nothing is measured. Collective in FlashInfer, not here.

        Args:
            hiddens: columns of the tensors.
            cache, warmup, repeat: of measurements; no effect.

        Returns:
            `{(hidden, batch): config}` for tune_batches.

        Raises:
            ValueError: no size is computed.
        """
        found: dict[tuple[int, int], Config] = {}
        for hidden in map(int, hiddens):
            for batch in self._batches(hidden):
                config = self._config(hidden * batch) if hidden * batch <= self.max_numel else None
                if config is not None:
                    found[hidden, batch] = config
        if not found:
            raise ValueError(
                f"hiddens must have a size of which max_numel, {self.max_numel}, holds a row; got {hiddens}"
            )
        return found


class PcieIpcAllGatherWorkspace(_ShardWorkspace[PcieIpcAllGatherLaunchConfig]):
    """Memory for `all_gather`, of shards `[local_rows, hidden]` to `[ranks * local_rows, hidden]`.

    Making one is collective. All ranks make the same calls in the same order, on one stream of each rank.

    Args:
        group: the ranks, a group of torch.distributed, 1 to 8 of one host.
        max_numel: elements of the largest shard; a multiple of 16 bytes.
        dtype: bf16, fp16 or fp32, of all tensors; None is bf16.
        max_blocks: 1 to 64, the most CTAs of a reduce-scatter; an all-gather has one for each rank and 4 KB.
        tune_batches: rows of shards that `tune` reports; powers of two up to max_numel if None.
        tune_cache: a file of FlashInfer's measurements; not read, because there is one form.
        device: None: the current CUDA device, or the CPU where there is none.
        timeout: seconds that a call waits for another rank before it fails.

    Attributes:
        ordered_4plus4: False: no form depends on islands of GPUs.
        ordered_4plus4_reason: that in words.
        placement_fingerprint: "": no measurement depends on the place of GPUs.

    Raises:
        ValueError: a number does not fit, the group has more than 8 ranks, or memory is lacking.
        TypeError: dtype is another.
        RuntimeError: The GPUs cannot access each other.
    """

    def _allocate(self, timeout: float) -> AllToAllWorkspace:
        return AllToAllWorkspace(self.device, self._ranks, timeout)

    def _shard(self, inp: torch.Tensor) -> int | None:
        return inp.numel()

    def _config(self, shard_numel: int) -> PcieIpcAllGatherLaunchConfig | None:
        return get_pcie_ipc_all_gather_launch_config(self.world_size, shard_numel, self.max_blocks, self.element_size)

    @fi_api
    def all_gather(
        self, inp: torch.Tensor, *, out: torch.Tensor | None = None, config: PcieIpcAllGatherLaunchConfig | None = None
    ) -> torch.Tensor:
        """Gives every rank the shards of all, in the order of ranks.

        Args:
            inp: `[local_rows, hidden]`, a tensor that `supports` accepts.
            out: `[ranks * local_rows, hidden]`, apart from inp; allocated if None.
            config: that of `launch_config`, or None.

        Returns:
            out.

        Raises:
            ValueError: inp, out or config does not fit.
            RuntimeError: another stream than that of the first call, or an earlier call has failed.
        """
        out = self._checked("all_gather", inp, out, config, lambda rows: rows * self.world_size)
        assert isinstance(self._memory, AllToAllWorkspace)
        self._memory.all_gather(inp, out.view(self.world_size, *inp.shape))
        return out


class PcieIpcReduceScatterWorkspace(_ShardWorkspace[PcieIpcReduceScatterLaunchConfig]):
    """Memory for `reduce_scatter`: of `[ranks * local_rows, hidden]` to shards `[local_rows, hidden]`.

    Arguments, attributes and errors are those of `PcieIpcAllGatherWorkspace`; max_numel is of a shard.
    """

    def _allocate(self, timeout: float) -> CommWorkspace:
        message = self.world_size * self.max_numel * self.element_size
        return CommWorkspace(self.device, self._ranks, rotation_bytes(message, PACK_BYTES, self.world_size), 0, timeout)

    def _shard(self, inp: torch.Tensor) -> int | None:
        return inp.numel() // self.world_size if inp.shape[0] % self.world_size == 0 else None

    def _config(self, shard_numel: int) -> PcieIpcReduceScatterLaunchConfig | None:
        return get_pcie_ipc_reduce_scatter_launch_config(
            self.world_size, shard_numel, self.max_blocks, self.element_size
        )

    @fi_api
    def reduce_scatter(
        self,
        inp: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        config: PcieIpcReduceScatterLaunchConfig | None = None,
    ) -> torch.Tensor:
        """Sums a tensor over the ranks, in fp32 in the order of ranks, and keeps this rank's shard of the sum.

        Args:
            inp: `[ranks * local_rows, hidden]`, a tensor that `supports` accepts. Rank r keeps rows r * local_rows to
                (r + 1) * local_rows.
            out: `[local_rows, hidden]`, apart from inp; allocated if None.
            config: that of `launch_config`, or None.

        Returns:
            out.

        Raises:
            ValueError: inp, out or config does not fit.
            RuntimeError: another stream than that of the first call, or an earlier call has failed.
        """
        out = self._checked("reduce_scatter", inp, out, config, lambda rows: rows // self.world_size)
        assert self._memory is not None
        ops.all_reduce(inp, **self._memory.shared, out=out, scatter=True, ctas=self.max_blocks)
        return out
