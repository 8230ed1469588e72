"""All-reduce over tensor-parallel ranks with all-gather or reduce-scatter over data-parallel ones, in and across hosts.

The messages go through torch.distributed, in one collective of all ranks or in one for each axis.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from fi_core.comm.workspace import device_of
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from fi_core.comm.mnnvl import CommBackend

__all__ = ["MixedCommHandler", "MixedCommMode", "MixedCommOp", "ParallelInfo", "run_mixed_comm"]

_TUNED_BYTES = tuple(8192 << 4 * i for i in range(4))  # 8 KB to 32 MB of input
_REPEATS = 5  # of a measured mode


class MixedCommOp(IntEnum):
    """A collective. The rows of all data-parallel ranks are gathered, or scattered in their order."""

    ALLREDUCE = 0
    ALLGATHER = 1
    REDUCESCATTER = 2
    ALLREDUCE_ALLGATHER = 3
    REDUCESCATTER_ALLREDUCE = 4


class MixedCommMode(IntEnum):
    """How a collective is sent. Here NCCL stands for the backend of the process group; the fused modes are refused."""

    FUSED_OPT_WAITS_MC = 0
    FUSED_OPT_WAITS_UC = 1
    FUSED_OPT_BYTES1_MC = 2
    FUSED_OPT_BYTES1_UC = 3
    FUSED_OPT_BYTES2_MC = 4
    FUSED_OPT_BYTES2_UC = 5
    NCCL_ONE = 6
    NCCL_TP_DP = 7
    AUTOTUNE = 8


def _split(name: str, size: int, tp: int | None, dp: int | None) -> tuple[int, int]:
    """The sizes of both axes of ranks; None follows from the other. Raises ValueError unless their product is size."""
    tp = (size // dp if dp else size) if tp is None else tp
    dp = size // tp if dp is None and tp else dp or 0
    if tp < 1 or dp < 1 or tp * dp != size:
        raise ValueError(f"{name}_tp_size * {name}_dp_size must be {name}_size = {size}; got {tp} * {dp}")
    return tp, dp


class ParallelInfo:
    """The place of a rank in the grid of tensor- (tp) and data-parallel (dp) ranks, in a host (local) and across.

    Ranks of a host follow each other; in each level tensor-parallel ranks do. A size of one axis that is None follows
    from the other; both None: all ranks are tensor-parallel.
    """

    def __init__(
        self,
        world_rank: int,
        world_size: int,
        local_rank: int,
        local_size: int,
        inter_rank: int,
        inter_size: int,
        local_tp_size: int | None,
        local_dp_size: int | None,
        inter_tp_size: int | None,
        inter_dp_size: int | None,
    ) -> None:
        if world_rank != inter_rank * local_size + local_rank or not 0 <= local_rank < local_size:
            raise ValueError(
                f"world_rank must be inter_rank * local_size + local_rank = {inter_rank * local_size + local_rank}; "
                f"got {world_rank}"
            )
        if world_size != inter_size * local_size:
            raise ValueError(
                f"world_size must be inter_size * local_size = {inter_size * local_size}; got {world_size}"
            )
        self.world_rank, self.world_size = world_rank, world_size
        self.local_rank, self.local_size, self.inter_rank, self.inter_size = (
            local_rank,
            local_size,
            inter_rank,
            inter_size,
        )
        self.local_tp_size, self.local_dp_size = _split("local", local_size, local_tp_size, local_dp_size)
        self.inter_tp_size, self.inter_dp_size = _split("inter", inter_size, inter_tp_size, inter_dp_size)
        self.tp_size, self.dp_size = (
            self.local_tp_size * self.inter_tp_size,
            self.local_dp_size * self.inter_dp_size,
        )
        self.tp_rank, self.dp_rank = self.place(world_rank)
        self.use_tp, self.use_dp = self.tp_size > 1, self.dp_size > 1
        self.use_mixed, self.use_inter = self.use_tp and self.use_dp, inter_size > 1

    def place(self, rank: int) -> tuple[int, int]:
        """The tensor- and the data-parallel rank of a rank of the world."""
        inter, local = divmod(rank, self.local_size)
        (local_dp, local_tp), (inter_dp, inter_tp) = (
            divmod(local, self.local_tp_size),
            divmod(inter, self.inter_tp_size),
        )
        return inter_tp * self.local_tp_size + local_tp, inter_dp * self.local_dp_size + local_dp

    def groups(self, axis: int) -> list[list[int]]:
        """The ranks of each group of tensor- (0) or data-parallel (1) ranks, each in the order of its axis."""
        found: dict[int, list[int]] = {}
        for rank in sorted(range(self.world_size), key=lambda rank: self.place(rank)[axis]):
            found.setdefault(self.place(rank)[1 - axis], []).append(rank)
        return [found[key] for key in sorted(found)]


class MixedCommHandler:
    """The process groups of a grid of ranks, and the modes that are faster on it; collective.

    Args:
        world_rank, world_size, local_rank, local_size, inter_rank, inter_size, local_tp_size, local_dp_size,
            inter_tp_size, inter_dp_size: as for `ParallelInfo`.
        dtype: fp16 or bf16.
        device: of the tensors.
        grid_size, max_block_size, min_block_size, min_num_steps, ib_enable_ibgda, should_init_nvshmem: FlashInfer's
            choice of a launch and of its transport; no effect.
        use_autotune: both modes of a grid with both axes are measured here, for inputs of 8 KB to 32 MB.

    Raises:
        ValueError: sizes and ranks do not fit.
        TypeError: dtype does not fit.
        RuntimeError: torch.distributed has no process group.
    """

    @fi_api
    def __init__(
        self,
        world_rank: int,
        world_size: int,
        local_rank: int,
        local_size: int,
        inter_rank: int,
        inter_size: int,
        local_tp_size: int | None,
        local_dp_size: int | None,
        inter_tp_size: int | None,
        inter_dp_size: int | None,
        dtype: torch.dtype,
        device: torch.device,
        grid_size: int | None = None,
        max_block_size: int | None = None,
        min_block_size: int = 256,
        min_num_steps: int = 4,
        ib_enable_ibgda: bool = True,
        should_init_nvshmem: bool = True,
        use_autotune: bool = True,
    ) -> None:
        import torch
        import torch.distributed as dist

        if dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"dtype must be float16 or bfloat16; got {dtype}")
        self.para_info = ParallelInfo(
            world_rank,
            world_size,
            local_rank,
            local_size,
            inter_rank,
            inter_size,
            local_tp_size,
            local_dp_size,
            inter_tp_size,
            inter_dp_size,
        )
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed must have a process group: call init_process_group first")
        if (dist.get_rank(), dist.get_world_size()) != (world_rank, world_size):
            raise ValueError(
                f"world_rank and world_size must be those of torch.distributed, {dist.get_rank()} and "
                f"{dist.get_world_size()}; got {world_rank} and {world_size}"
            )
        self.dtype, self.device, self.use_autotune = dtype, device_of(device), use_autotune
        self._groups: list[Any] = [None, None]  # the ProcessGroup of each axis; None: the world
        if self.para_info.use_mixed:
            for axis in range(2):
                for ranks in self.para_info.groups(axis):
                    group = dist.new_group(ranks)
                    if world_rank in ranks:
                        self._groups[axis] = group
        self._chosen: dict[MixedCommOp, list[MixedCommMode]] = {}
        if use_autotune:
            self.run_autotune()

    def get_valid_op_list(self) -> list[MixedCommOp]:
        """The collectives of this grid."""
        if self.para_info.use_mixed:
            return [MixedCommOp.ALLREDUCE_ALLGATHER, MixedCommOp.REDUCESCATTER_ALLREDUCE]
        return [MixedCommOp.ALLGATHER, MixedCommOp.REDUCESCATTER] if self.para_info.use_dp else [MixedCommOp.ALLREDUCE]

    def get_valid_mode_list(self) -> list[MixedCommMode]:
        """The modes of this grid."""
        both = [MixedCommMode.NCCL_TP_DP] if self.para_info.use_mixed else []
        return [MixedCommMode.NCCL_ONE, *both, *([MixedCommMode.AUTOTUNE] if self.use_autotune else [])]

    def run_autotune(self) -> None:
        """Measures the modes of a grid with both axes; collective."""
        import torch
        import torch.distributed as dist

        modes = [mode for mode in self.get_valid_mode_list() if mode is not MixedCommMode.AUTOTUNE]
        for op in self.get_valid_op_list():
            self._chosen[op] = [modes[0]] * len(_TUNED_BYTES)
            for i, size in enumerate(_TUNED_BYTES if len(modes) > 1 else ()):
                x = torch.zeros(self.para_info.dp_size, size // 2 // self.para_info.dp_size, dtype=self.dtype)
                times = torch.tensor([self._seconds(op, x.to(self.device), mode) for mode in modes])
                times = times.to(self.device)
                dist.all_reduce(times)  # all ranks choose the same
                self._chosen[op][i] = modes[int(times.argmin())]

    def _seconds(self, op: MixedCommOp, x: torch.Tensor, mode: MixedCommMode) -> float:
        import torch

        def now() -> float:
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            return time.perf_counter()

        self.communicate(op, x, mode)
        begin = now()
        for _ in range(_REPEATS):
            self.communicate(op, x, mode)
        return now() - begin

    def select_autotune_mode(self, op: MixedCommOp, x_in: torch.Tensor) -> MixedCommMode:
        """The mode that was faster for the measured size next below, or the smallest."""
        size = x_in.numel() * x_in.element_size()
        return self._chosen[op][max(0, sum(size >= tuned for tuned in _TUNED_BYTES) - 1)]

    def communicate(self, op: MixedCommOp, x: torch.Tensor, mode: MixedCommMode) -> torch.Tensor:
        """The result of a collective, without checks."""
        import torch
        import torch.distributed as dist

        info, (tp, dp) = self.para_info, self._groups
        gathers = op in (MixedCommOp.ALLGATHER, MixedCommOp.ALLREDUCE_ALLGATHER)
        if mode is MixedCommMode.NCCL_ONE and info.use_mixed:
            parts = [torch.empty_like(x) for _ in range(info.world_size)]
            dist.all_gather(parts, x.contiguous())
            by_dp: list[list[torch.Tensor]] = [[] for _ in range(info.dp_size)]
            for rank, part in enumerate(parts):
                by_dp[info.place(rank)[1]].append(part)
            if gathers:
                return torch.cat([torch.stack(own).float().sum(0) for own in by_dp]).to(x.dtype)
            return torch.stack([p.chunk(info.dp_size)[info.dp_rank] for p in parts]).float().sum(0).to(x.dtype)
        if gathers:
            x = self._summed(x, tp) if info.use_tp else x.contiguous()
            parts = [torch.empty_like(x) for _ in range(info.dp_size)]
            dist.all_gather(parts, x, group=dp)
            return torch.cat(parts)
        if not info.use_dp:
            return self._summed(x, tp)
        if x.is_cuda and dist.get_backend(dp) == "gloo":  # which scatters tensors of the CPU only
            out = self._summed(x, dp).chunk(info.dp_size)[info.dp_rank].contiguous()
        else:
            out = torch.empty_like(x.chunk(info.dp_size)[0])
            dist.reduce_scatter_tensor(out, x.contiguous(), group=dp)
        return self._summed(out, tp) if info.use_tp else out

    @staticmethod
    def _summed(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    def init_virtual_memory(self) -> None:
        """Raises NotImplementedError: there is no memory besides that of torch.distributed."""
        raise NotImplementedError("init_virtual_memory: not needed, messages go through torch.distributed")

    def init_nvshmem(self) -> None:
        """Raises NotImplementedError: torch.distributed reaches the other hosts."""
        raise NotImplementedError("init_nvshmem: not needed, messages go through torch.distributed")

    def checkpoint_prepare(self) -> None:
        """Raises NotImplementedError: process groups do not survive a checkpoint of the process."""
        raise NotImplementedError("checkpoint_prepare: not supported, call shutdown before the checkpoint")

    def checkpoint_restore(self, comm_backend: CommBackend) -> None:
        """Raises NotImplementedError: process groups do not survive a checkpoint of the process."""
        raise NotImplementedError("checkpoint_restore: not supported, make another handler after the checkpoint")

    def shutdown(self) -> None:
        """Ends the groups of both axes; collective. A second call does nothing."""
        import torch.distributed as dist

        for axis, group in enumerate(self._groups):
            if group is not None:
                dist.destroy_process_group(group)
            self._groups[axis] = None


@fi_api
def run_mixed_comm(
    op: MixedCommOp,
    handler: MixedCommHandler,
    x_in: torch.Tensor,
    x_out: torch.Tensor | None = None,
    mode: MixedCommMode | None = None,
) -> torch.Tensor:
    """Runs a collective on the grid of a handler; all ranks call it with inputs of the same shape.

    Args:
        op: with both axes ALLREDUCE_ALLGATHER or REDUCESCATTER_ALLREDUCE; else ALLREDUCE, or ALLGATHER and
            REDUCESCATTER.
        handler: the ranks.
        x_in: `[rows, ..]` of two or more dimensions, the handler's dtype and device; to scatter, rows is a multiple of
            dp_size.
        x_out: `[rows * dp_size, ..]` of a gather, `[rows / dp_size, ..]` of a scatter, else `[rows, ..]`; allocated if
            None.
        mode: None: the one that was faster where the handler has measured, else NCCL_TP_DP with both axes and NCCL_ONE.

    Returns:
        x_out. NCCL_ONE with both axes sums in fp32; other sums are those of the process group.

    Raises:
        ValueError: op or mode is not of this grid, or a shape, dtype or device does not fit.
    """
    info = handler.para_info
    for name, given, valid in (("op", op, handler.get_valid_op_list()), ("mode", mode, handler.get_valid_mode_list())):
        if given is not None and given not in valid:
            raise ValueError(f"{name} must be one of {[v.name for v in valid]} on this grid of ranks; got {given!r}")
    if x_in.ndim < 2 or x_in.dtype is not handler.dtype or x_in.device != handler.device:
        raise ValueError(
            f"x_in must be {handler.dtype} of two or more dimensions on {handler.device}; got {x_in.dtype} "
            f"{list(x_in.shape)} on {x_in.device}"
        )
    rows = x_in.shape[0]
    if op in (MixedCommOp.REDUCESCATTER, MixedCommOp.REDUCESCATTER_ALLREDUCE):
        if rows % info.dp_size:
            raise ValueError(f"x_in must have a multiple of dp_size = {info.dp_size} rows; got {list(x_in.shape)}")
        rows //= info.dp_size
    else:
        rows *= info.dp_size
    shape: tuple[Any, ...] = (rows, *x_in.shape[1:])
    if x_out is not None and (x_out.shape, x_out.dtype, x_out.device) != (shape, x_in.dtype, x_in.device):
        raise ValueError(
            f"x_out must be {x_in.dtype} of shape {list(shape)} on {x_in.device}; got {x_out.dtype} "
            f"{list(x_out.shape)} on {x_out.device}"
        )
    if x_out is not None and any(step == 0 and size > 1 for step, size in zip(x_out.stride(), x_out.shape)):
        raise ValueError(f"x_out must have memory of its own for each element; got strides {list(x_out.stride())}")
    if mode is None:
        both = MixedCommMode.NCCL_TP_DP if info.use_mixed else MixedCommMode.NCCL_ONE
        mode = MixedCommMode.AUTOTUNE if handler.use_autotune else both
    if mode is MixedCommMode.AUTOTUNE:
        mode = handler.select_autotune_mode(op, x_in)
    found = handler.communicate(op, x_in, mode)
    return found if x_out is None else x_out.copy_(found)
