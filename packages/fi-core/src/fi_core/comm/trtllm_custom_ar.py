"""The custom all-reduce with TensorRT-LLM's names, whose workspace is lists of addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.comm import fusion
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.trtllm_ar import rows_of
from fi_core.comm.workspace import TRTLLMAllReduceFusionWorkspace, check_group
from fi_core.norm import fused_add_rmsnorm, rmsnorm
from fi_core.observe.log import fi_api
from fi_core.runtime.tensors import check_apart, check_writable

if TYPE_CHECKING:
    import torch

__all__ = [
    "AllReduceFusionOp",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "trtllm_create_ipc_workspace_for_all_reduce",
    "trtllm_custom_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
]


class AllReduceStrategyType:
    """How a message is sent; plain integers, as TensorRT-LLM's. NCCL, UB and LOWPRECISION are not served."""

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6


class AllReduceStrategyConfig:
    """Bits of TensorRT-LLM's kernels; they are accepted and change nothing."""

    USE_MEMCPY = 1
    PUSH_MODE = 2


class AllReduceFusionOp:
    """What follows the sum; plain integers, as TensorRT-LLM's. The others are patterns of `allreduce_fusion`."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = 6
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = 7
    MOE_ALLREDUCE_RESIDUAL_RMS_NORM = 8
    MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM = 9


_USE_ONESHOT = {
    AllReduceStrategyType.MIN_LATENCY: None,
    AllReduceStrategyType.AUTO: None,
    AllReduceStrategyType.ONESHOT: True,
    AllReduceStrategyType.TWOSHOT: False,
}
_SERVED = (AllReduceFusionOp.NONE, AllReduceFusionOp.RESIDUAL_RMS_NORM, AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM)
_MOST_RANKS = 64
_BUFFERS = 7  # lists of addresses of a workspace
workspaces: dict[tuple[int, ...], TRTLLMAllReduceFusionWorkspace] = {}  # by the ranks' addresses


def trtllm_create_ipc_workspace_for_all_reduce(
    rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    group: torch.distributed.ProcessGroup | None = None,
) -> list[list[int]]:
    """Allocates the workspace of `trtllm_custom_all_reduce`; collective.

    Args:
        rank, tp_size: this rank and the number of ranks, as of the group.
        max_token_num, hidden_dim: the largest message, of up to 32 bits an element.
        group: the ranks; None: the world.

    Returns:
        Seven lists of the ranks' addresses. They are equal: one buffer of each rank serves all purposes.

    Raises:
        ValueError: rank or tp_size is not that of the group.
        RuntimeError: The GPUs cannot access each other.
    """
    import torch

    comm = TorchDistBackend(group)
    check_group(comm, rank, tp_size, "rank", "tp_size")
    workspace = TRTLLMAllReduceFusionWorkspace(tp_size, rank, max_token_num, hidden_dim, torch.float32, comm)
    addresses = workspace.shared["peers"].tolist()
    workspaces[tuple(addresses)] = workspace
    return [list(addresses) for _ in range(_BUFFERS)]


def trtllm_destroy_ipc_workspace_for_all_reduce(
    workspace: list[list[int]], group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Frees a workspace; collective.

    Args:
        workspace: of `trtllm_create_ipc_workspace_for_all_reduce`.
        group: accepted; the workspace knows its group.

    Raises:
        ValueError: workspace is not of trtllm_create_ipc_workspace_for_all_reduce, or is freed.
    """
    try:
        known = workspaces.pop(tuple(workspace[0]))
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            "workspace: the lists of trtllm_create_ipc_workspace_for_all_reduce, not yet freed, are required"
        ) from None
    known.destroy()


def _workspace_of(peer_comm_buffer_ptrs: torch.Tensor, rank: int, size: int) -> TRTLLMAllReduceFusionWorkspace:
    import torch

    if (
        not isinstance(peer_comm_buffer_ptrs, torch.Tensor)
        or peer_comm_buffer_ptrs.dtype != torch.int64
        or peer_comm_buffer_ptrs.device.type != "cpu"
    ):
        raise TypeError("peer_comm_buffer_ptrs: an int64 tensor on the CPU is required")
    addresses = peer_comm_buffer_ptrs.flatten()[:_MOST_RANKS].tolist()  # a view may have any number of elements
    found = workspaces.get(tuple(addresses)) if peer_comm_buffer_ptrs.numel() == len(addresses) else None
    if found is None:
        raise ValueError(
            "peer_comm_buffer_ptrs: addresses of trtllm_create_ipc_workspace_for_all_reduce, not freed, are required"
        )
    if (rank, size) != (found.rank, found.world_size):
        raise ValueError(
            f"tp_rank, tp_size: {found.rank} and {found.world_size} of the workspace are required; "
            f"got {rank} and {size}"
        )
    return found


def _check_options(bias: torch.Tensor | None, strategy_code: int, fusion_op_code: int) -> None:
    if bias is not None:
        raise ValueError("bias: None is required; add it to the residual")
    if strategy_code not in _USE_ONESHOT:
        raise ValueError(f"strategy_code: one of {sorted(_USE_ONESHOT)} is required; got {strategy_code!r}")
    if fusion_op_code not in _SERVED:
        raise ValueError(f"fusion_op_code: one of {_SERVED} is required; got {fusion_op_code!r}")


def _require(fusion_op_code: int, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{name}: a tensor is required by fusion_op_code {fusion_op_code}; got None")


@fi_api
def trtllm_custom_all_reduce(
    inp: torch.Tensor,
    out: torch.Tensor,
    tp_size: int,
    tp_rank: int,
    token_num: int,
    fusion_op_code: int,
    strategy_code: int,
    config_code: int,
    launch_with_pdl: bool,
    flag_value: int,
    peer_comm_buffer_ptrs: torch.Tensor,
    peer_barrier_ptrs_in: torch.Tensor | None,
    peer_barrier_ptrs_out: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    weight_pre_residual_norm: torch.Tensor | None,
    eps: float | None,
    intermediate_buffer: torch.Tensor | None,
    lamport_peer_comm_buffer_ptrs_0: torch.Tensor | None,
    lamport_peer_comm_buffer_ptrs_1: torch.Tensor | None,
    lamport_peer_comm_buffer_ptrs_2: torch.Tensor | None,
) -> None:
    """Sums `inp` over the ranks, in fp32 in their order, and computes what follows the sum.

    NONE: out = sum. RESIDUAL_RMS_NORM: intermediate = sum + residual, out = rmsnorm(intermediate, weight).
    RESIDUAL_RMS_PREPOST_NORM: intermediate = rmsnorm(sum, weight_pre_residual_norm) + residual, out as before.

    Args:
        inp: `[token_num, hidden]`, or flat; fp16, bf16 or fp32.
        out: like inp.
        tp_size, tp_rank: of the workspace.
        fusion_op_code: of `AllReduceFusionOp`.
        strategy_code: of `AllReduceStrategyType`.
        config_code, flag_value, peer_barrier_ptrs_in, peer_barrier_ptrs_out, lamport_peer_comm_buffer_ptrs_0,
            lamport_peer_comm_buffer_ptrs_1, lamport_peer_comm_buffer_ptrs_2: accepted; the workspace has what it needs.
        launch_with_pdl: programmatic dependent launch.
        peer_comm_buffer_ptrs: int64, on the CPU: the first list of `trtllm_create_ipc_workspace_for_all_reduce`.
        bias: must be None.
        residual, intermediate_buffer: like inp.
        weight, weight_pre_residual_norm: `[hidden]`, of the dtype of inp.
        eps: added to the mean of the squares; None: 1e-6.

    Raises:
        ValueError: A size, code, address or shape does not fit, or bias is a tensor.
        TypeError: A dtype does not fit, or a tensor is missing.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    workspace = _workspace_of(peer_comm_buffer_ptrs, tp_rank, tp_size)
    _check_options(bias, strategy_code, fusion_op_code)
    if type(token_num) is not int or token_num < 1 or inp.numel() % token_num:
        raise ValueError(f"token_num: a divisor of {inp.numel()}, the elements of inp, is required; got {token_num!r}")
    width = inp.numel() // token_num
    given = (("inp", inp), ("out", out), ("residual", residual), ("intermediate_buffer", intermediate_buffer))
    x, result, residual_in, intermediate = (rows_of(name, tensor, token_num, width) for name, tensor in given)
    assert x is not None and result is not None
    if intermediate is not None:
        check_writable("intermediate_buffer", intermediate)
    use_oneshot, epsilon = _USE_ONESHOT[strategy_code], 1e-6 if eps is None else eps
    if fusion_op_code == AllReduceFusionOp.RESIDUAL_RMS_NORM:
        pattern = fusion.AllReduceFusionPattern.kARResidualRMSNorm
        norm: Any = {"residual_in": residual_in, "rms_gamma": weight, "rms_eps": epsilon, "use_oneshot": use_oneshot}
        results: Any = {"residual_out": intermediate, "norm_out": result}
        fusion.allreduce_fusion(x, workspace, pattern, launch_with_pdl, **results, **norm)
        return
    if fusion_op_code != AllReduceFusionOp.NONE:
        norms = {"weight": weight, "weight_pre_residual_norm": weight_pre_residual_norm}
        _require(fusion_op_code, residual=residual_in, **norms)
        assert residual_in is not None
        if residual_in.data_ptr() == result.data_ptr():  # the sum is written before the residual is read
            residual_in = residual_in.clone()
        check_apart({"out": result}, {"residual": residual_in})
    fusion.allreduce_fusion(
        x, workspace, fusion.AllReduceFusionPattern.kAllReduce, launch_with_pdl, output=result, use_oneshot=use_oneshot
    )
    if fusion_op_code == AllReduceFusionOp.NONE:
        return
    assert residual_in is not None and weight is not None and weight_pre_residual_norm is not None
    rmsnorm(result, weight_pre_residual_norm, epsilon, out=result)
    intermediate = residual_in.clone() if intermediate is None else intermediate.copy_(residual_in)
    fused_add_rmsnorm(result, intermediate, weight, epsilon)
