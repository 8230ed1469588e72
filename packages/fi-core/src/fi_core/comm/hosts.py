"""Makes workspaces of all-reduce. Hosts exchange over torch.distributed, the ranks of each over this library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.comm import ops
from fi_core.comm.dcp_alltoall import AllToAllWorkspace
from fi_core.comm.mnnvl import CommBackend, OneRank, TorchDistBackend
from fi_core.comm.workspace import TRTLLMAllReduceFusionWorkspace, check_group, device_of, shots_of

if TYPE_CHECKING:
    import torch

__all__ = ["HierarchicalWorkspace", "create_allreduce_fusion_workspace"]


def _on_host(
    max_token_num: int, hidden_dim: int, dtype: torch.dtype, device: torch.device, ranks: CommBackend, timeout: float
) -> TRTLLMAllReduceFusionWorkspace:
    size, rank = ranks.Get_size(), ranks.Get_rank()
    return TRTLLMAllReduceFusionWorkspace(
        size, rank, max_token_num, hidden_dim, dtype, ranks, device=device, timeout=timeout
    )


class _Hosts:
    """The ranks of several hosts, as groups of ranks of one host and groups of ranks with the same place in theirs.

    Takes the arguments of `HierarchicalWorkspace`.
    """

    def __init__(
        self,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        comm_backend: CommBackend,
        timeout: float,
        gpus_per_node: int,
    ) -> None:
        rank, size = comm_backend.Get_rank(), comm_backend.Get_size()
        if gpus_per_node < 1 or size % gpus_per_node:
            raise ValueError(
                f"gpus_per_node: a divisor of {size}, the number of ranks, is required; got {gpus_per_node}"
            )
        if not isinstance(comm_backend, TorchDistBackend):
            raise ValueError(
                "comm_backend: a TorchDistBackend is required, because hosts exchange over torch.distributed; "
                f"got {type(comm_backend).__name__}"
            )
        inside = comm_backend.Split(rank // gpus_per_node, rank)
        self.between = comm_backend.Split(rank % gpus_per_node, rank)
        self.reduction = _on_host(max_token_num, hidden_dim, dtype, device, inside, timeout)
        self.gathering = AllToAllWorkspace(device, inside, timeout)

    def sum(self, input: torch.Tensor) -> torch.Tensor:
        """The sum of `input` over all ranks, a new tensor.

        Every rank of a host sums a slice of its host's messages, exchanges the slice with the ranks of other hosts that
        have the same place, and gives the result to its host. A message that cannot be divided is summed whole. Sums
        are rounded inside a host, and by torch.distributed.
        """
        import torch

        ranks = self.reduction.world_size
        if not input.numel():
            return torch.empty_like(input)
        if input.numel() * input.element_size() % (16 * ranks):
            total = torch.empty_like(input)
            shots = shots_of(input.numel() * input.element_size(), ranks, None)
            ops.all_reduce(input, out=total, shots=shots, **self.reduction.shared)
            self.between.all_reduce(total)
            return total
        own = input.new_empty(input.numel() // ranks)
        ops.all_reduce(input, out=own, scatter=True, **self.reduction.shared)
        self.between.all_reduce(own)
        total = torch.empty_like(input)
        self.gathering.all_gather(own, total.view(ranks, -1))
        return total

    def destroy(self) -> None:
        """Frees the memory; collective."""
        self.reduction.destroy()
        self.gathering.destroy()


class HierarchicalWorkspace(TRTLLMAllReduceFusionWorkspace):
    """Memory for `allreduce_fusion` on the ranks of several hosts; `create_allreduce_fusion_workspace` makes it.

    What follows the sum is computed by every rank for itself, on a workspace of one rank.

    Args:
        max_token_num, hidden_dim, dtype, device, comm_backend, timeout: as of `TRTLLMAllReduceFusionWorkspace`.
        gpus_per_node: ranks of a host, which follow one another.

    Raises:
        ValueError: gpus_per_node does not divide the group, or the group is not of torch.distributed.
    """

    backend = "hierarchical"
    one_host = False

    def __init__(
        self,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        comm_backend: CommBackend,
        timeout: float = 300.0,
        *,
        gpus_per_node: int,
    ) -> None:
        self._hosts = _Hosts(max_token_num, hidden_dim, dtype, device, comm_backend, timeout, gpus_per_node)
        super().__init__(1, 0, max_token_num, hidden_dim, dtype, OneRank(), device=device, timeout=timeout)
        self.rank, self.world_size = comm_backend.Get_rank(), comm_backend.Get_size()

    def prepared(self, input: torch.Tensor, use_oneshot: bool | None) -> tuple[torch.Tensor, int]:
        """The sum over all ranks, for the workspace of one rank."""
        return self._hosts.sum(input), 1

    def destroy(self) -> None:
        """Frees the memory; collective."""
        self._hosts.destroy()
        super().destroy()


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: CommBackend | None = None,
    force_oneshot_support: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: object | None = None,
    device: torch.device | None = None,
    timeout: float = 300.0,
) -> TRTLLMAllReduceFusionWorkspace:
    """Allocates the workspace of `allreduce_fusion`; collective, with equal arguments on all ranks.

    Args:
        backend: "auto" or "trtllm": memory that the GPUs of a host share by CUDA IPC (CPUs: POSIX shared memory).
        world_size, rank: of the group; None: not checked.
        max_token_num, hidden_dim, dtype: the largest message.
        gpus_per_node: the ranks of a host, which follow one another; None: all. If the group has more, ranks exchange
            over this library inside a host, and over torch.distributed between hosts.
        comm_backend: the group, as an object; takes the place of `group`.
        force_oneshot_support: accepted; a message of any size can be sent in one shot.
        group: the ranks; None: the world of torch.distributed.
        device: where the tensors are; None: the current CUDA device, or the CPU where there is none.
        timeout: seconds that a call waits for another rank before it fails.
        top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert, add_residual, write_residual_output,
            apply_rms_norm, output_dtype, dynamic_fp8, write_norm_output, config: None; FlashInfer's backend
            "mnnvl-cutedsl" alone takes them.

    Raises:
        RuntimeError: backend is unknown, or the GPUs cannot access each other.
        ValueError: An argument is of another backend, a size is missing, world_size or rank is not the group's, or
            gpus_per_node does not divide it.
    """
    of_another = {
        "top_k": top_k, "rms_eps": rms_eps, "weight_bias": weight_bias, "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert, "add_residual": add_residual,
        "write_residual_output": write_residual_output, "apply_rms_norm": apply_rms_norm, "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8, "write_norm_output": write_norm_output, "config": config,
    }  # fmt: skip
    for name, value in of_another.items():
        if value is not None:
            raise ValueError(
                f"{name}: None is required, since backend 'mnnvl-cutedsl' alone takes it; got {value!r}; pass it to "
                "allreduce_fusion where that has it"
            )
    if backend not in ("auto", "trtllm"):
        raise RuntimeError(
            f"backend: 'auto' or 'trtllm' is required (this host has no multi-node NVLink); got {backend!r}"
        )
    comm_backend = comm_backend or TorchDistBackend(group)
    check_group(comm_backend, rank, world_size, "rank", "world_size")
    if max_token_num is None or hidden_dim is None or dtype is None:
        missing = "max_token_num" if max_token_num is None else "hidden_dim" if hidden_dim is None else "dtype"
        raise ValueError(f"{missing}: the size of the largest message is required; got None")
    device = device_of(device)
    if gpus_per_node is not None and gpus_per_node < comm_backend.Get_size():
        return HierarchicalWorkspace(
            max_token_num, hidden_dim, dtype, device, comm_backend, timeout, gpus_per_node=gpus_per_node
        )
    return _on_host(max_token_num, hidden_dim, dtype, device, comm_backend, timeout)
