"""The all-reduce functions with TensorRT-LLM's names, which take raw pointers instead of a workspace object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.comm import fusion
from fi_core.comm.memory import bytes_at
from fi_core.comm.mnnvl import CommBackend, TorchDistBackend
from fi_core.comm.workspace import TRTLLMAllReduceFusionWorkspace, check_backend, current_device, find_by_address
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = [
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]

workspaces: dict[int, TRTLLMAllReduceFusionWorkspace] = {}  # by the address of the tensor of pointers


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    create_metadata: bool = False,
    comm_backend: CommBackend | None = None,
    use_symm_dev_mem: bool = False,
) -> tuple[Any, ...]:
    """Allocates the workspace of `trtllm_allreduce_fusion`; collective.

    Args:
        tp_rank, tp_size: this rank and the number of ranks, as of the group.
        max_token_num, hidden_dim: the largest message.
        use_fp32_lamport: messages are fp32; else of 16 bits.
        group: the ranks; None: the world.
        create_metadata: also return a dict of the sizes, for the `metadata` of calls.
        comm_backend: the group, as an object; takes the place of `group`.
        use_symm_dev_mem: accepted; the memory is always shared by CUDA IPC.

    Returns:
        ipc_handles, a list with the list of the ranks' addresses, for the destruction; workspace_tensor, int64 on the
        device, the same addresses, which calls take; and the metadata if asked for.

    Raises:
        ValueError: tp_rank or tp_size is not that of the group.
        RuntimeError: The GPUs cannot access each other.
    """
    import torch

    comm = comm_backend or TorchDistBackend(group)
    dtype = torch.float32 if use_fp32_lamport else torch.bfloat16
    workspace = TRTLLMAllReduceFusionWorkspace(tp_size, tp_rank, max_token_num, hidden_dim, dtype, comm)
    peers = workspace.shared["peers"]
    tensor = peers.to(workspace.buffer.device)
    workspaces[tensor.data_ptr()] = workspace
    workspace.workspace_tensor = tensor
    workspace.ipc_handles = [peers.tolist()]
    if not create_metadata:
        return workspace.ipc_handles, tensor
    return workspace.ipc_handles, tensor, workspace.metadata


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: list[list[int]], group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Frees a workspace; collective.

    Args:
        workspace: the ipc_handles of its creation.
        group: accepted; the workspace knows its group.

    Raises:
        ValueError: workspace is not of trtllm_create_ipc_workspace_for_all_reduce_fusion, or is freed.
    """
    for address, known in workspaces.items():
        if known.ipc_handles == workspace:
            del workspaces[address]
            known.destroy()
            return
    raise ValueError(
        "workspace: ipc_handles of trtllm_create_ipc_workspace_for_all_reduce_fusion, not yet freed, is required"
    )


def _workspace(workspace_ptrs: torch.Tensor, world_rank: int, world_size: int) -> TRTLLMAllReduceFusionWorkspace:
    workspace = find_by_address(workspaces, workspace_ptrs, "workspace_ptrs")
    if workspace is None:
        raise ValueError("workspace_ptrs: the workspace_tensor of a workspace that is not destroyed is required")
    if (world_rank, world_size) != (workspace.rank, workspace.world_size):
        raise ValueError(
            f"world_rank, world_size: {workspace.rank} and {workspace.world_size} of the workspace are required; got "
            f"{world_rank} and {world_size}"
        )
    return workspace


def rows_of(name: str, tensor: torch.Tensor | None, rows: int, width: int) -> torch.Tensor | None:
    """A tensor that may be flat as `[rows, width]`. Raises ValueError if it has other elements."""
    if tensor is None:
        return None
    try:
        return tensor.view(rows, width)
    except (RuntimeError, TypeError):  # the latter for a flag as a number
        raise ValueError(
            f"{name}: {rows} x {width} contiguous elements are required; got shape {list(tensor.shape)}"
        ) from None


@fi_api
def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: torch.Tensor | None,
    residual_in: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """As `allreduce_fusion`, on a workspace of `trtllm_create_ipc_workspace_for_all_reduce_fusion`.

    Args:
        allreduce_in: `[token_num, hidden_dim]`, or flat.
        world_size, world_rank: of the workspace.
        token_num, hidden_dim: the shape of the message.
        workspace_ptrs: the workspace_tensor of its creation.
        pattern_code: of `AllReduceFusionPattern`.
        allreduce_out, residual_out, norm_out, quant_out, scale_out: the outputs of the pattern; flat ones are accepted.
        metadata: of the creation; the message is checked against it.
        launch_with_pdl, trigger_completion_at_end, fp32_acc, use_oneshot, residual_in, rms_gamma, rms_eps,
            scale_factor, layout_code, block_quant_group_size: as for `allreduce_fusion`.
        weight_bias: as there; None: 0.

    Raises:
        ValueError: workspace_ptrs is of no workspace, or the message does not fit it.
        TypeError: A dtype does not fit, or a tensor that the pattern needs is missing.
        RuntimeError: As for `allreduce_fusion`.
    """
    workspace = _workspace(workspace_ptrs, world_rank, world_size)
    needed = token_num * hidden_dim * allreduce_in.element_size()
    if metadata is not None and "buffer_size" not in metadata:
        raise ValueError(f"metadata: what the creation of the workspace returned is required; got {metadata}")
    if metadata is not None and needed > metadata["buffer_size"]:
        held = metadata["buffer_size"]
        raise ValueError(f"token_num, hidden_dim: at most {held} bytes fit the workspace; got {needed}")

    def rows(name: str, tensor: torch.Tensor | None, width: int = hidden_dim) -> torch.Tensor | None:
        return rows_of(name, tensor, token_num, width)

    given = rows("allreduce_in", allreduce_in)
    assert given is not None
    fusion.allreduce_fusion(
        given,
        workspace,
        pattern_code,
        launch_with_pdl,
        trigger_completion_at_end,
        output=rows("allreduce_out", allreduce_out),
        residual_out=rows("residual_out", residual_out),
        norm_out=rows("norm_out", norm_out),
        quant_out=rows("quant_out", quant_out, hidden_dim // 2 if pattern_code in (3, 5) else hidden_dim),
        scale_out=scale_out,
        residual_in=rows("residual_in", residual_in),
        rms_gamma=rms_gamma,
        rms_eps=1e-6 if rms_eps is None else rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        use_oneshot=use_oneshot,
        fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=weight_bias or 0.0,
    )


@fi_api
def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    scale_factor: torch.Tensor | float | None,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: torch.Tensor,
    moe_reduction_active_experts_token_input: torch.Tensor,
    moe_reduction_token_input: torch.Tensor | None,
    layout_code: int | None,
    moe_allreduce_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """As `allreduce_fusion` with kMoEReductionARResidualRMSNorm.

    Args:
        world_size, world_rank, workspace_ptrs: as for `trtllm_allreduce_fusion`.
        token_num, hidden_dim: the shape of the message; tensors may be flat.
        moe_reduction_scale_input: `[moe_reduction_device_num_experts, token_num]`, or flat.
        moe_allreduce_out: None; the sum without the residual is not kept.
        weight_bias: as for `allreduce_fusion`; None: 0.
        backend: "trtllm".
        launch_with_pdl, residual_in, rms_gamma, rms_eps, scale_factor, moe_reduction_device_num_experts,
            moe_reduction_active_experts_token_input, moe_reduction_token_input, layout_code, residual_out, norm_out,
            quant_out, scale_out: as for `allreduce_fusion`.

    Raises:
        BackendSupportedError: backend is another.
        ValueError: A size or tensor does not fit, or moe_allreduce_out is a tensor.
        TypeError: A dtype does not fit, or a tensor is missing.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    import torch

    check_backend(backend)
    workspace = _workspace(workspace_ptrs, world_rank, world_size)
    if moe_allreduce_out is not None:
        raise ValueError("moe_allreduce_out: None is required; the sum without the residual is not kept")
    residual = rows_of("residual_in", residual_in, token_num, hidden_dim)
    assert residual is not None
    fp4 = quant_out is not None and quant_out.dtype == torch.uint8
    fusion.allreduce_fusion(
        residual,
        workspace,
        fusion.AllReduceFusionPattern.kMoEReductionARResidualRMSNorm,
        launch_with_pdl,
        residual_out=rows_of("residual_out", residual_out, token_num, hidden_dim),
        norm_out=rows_of("norm_out", norm_out, token_num, hidden_dim),
        quant_out=rows_of("quant_out", quant_out, token_num, hidden_dim // 2 if fp4 else hidden_dim),
        scale_out=scale_out,
        residual_in=residual,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        moe_reduction_device_num_experts=moe_reduction_device_num_experts,
        moe_reduction_scale_input=rows_of(
            "moe_reduction_scale_input", moe_reduction_scale_input, moe_reduction_device_num_experts, token_num
        ),
        moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
        moe_reduction_token_input=rows_of(
            "moe_reduction_token_input", moe_reduction_token_input, token_num, hidden_dim
        ),
        weight_bias=weight_bias or 0.0,
    )


@fi_api
def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: torch.Tensor,
    residual_in: torch.Tensor,
    norm_weight: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    norm_out: torch.Tensor,
    residual_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: torch.Tensor | None,
    expert_scale_factor: torch.Tensor | None,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """As `allreduce_fusion` with kMoEFinalizeARResidualRMSNorm.

    Args:
        allreduce_in: `[..., hidden]`, contiguous: the results of experts.
        norm_weight, eps: rms_gamma and rms_eps of `allreduce_fusion`.
        quant_out, scale_out: None; `allreduce_fusion` with kMoEFinalizeARResidualRMSNormFP8Quant quantizes.
        workspace_ptrs, world_rank, world_size: as for `trtllm_allreduce_fusion`.
        residual_in, expanded_idx_to_permuted_idx, norm_out, residual_out, launch_with_pdl, shared_expert_output,
            expert_scale_factor: as for `allreduce_fusion`.
        routed_scaling_factor: None or 1; others are part of expert_scale_factor.
        weight_bias: as there; None: 0.
        backend: "trtllm".

    Raises:
        BackendSupportedError: backend is another.
        ValueError: A size or tensor does not fit, or quant_out, scale_out or routed_scaling_factor is given.
        TypeError: A dtype does not fit, or a tensor is missing.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    for name, given in (("quant_out", quant_out), ("scale_out", scale_out)):
        if given is not None:
            raise ValueError(f"{name}: None is required; allreduce_fusion with a pattern of experts quantizes")
    if routed_scaling_factor not in (None, 1):
        raise ValueError(
            f"routed_scaling_factor: None or 1 is required; got {routed_scaling_factor}; multiply expert_scale_factor"
        )
    check_backend(backend)
    fusion.allreduce_fusion(
        allreduce_in,
        _workspace(workspace_ptrs, world_rank, world_size),
        fusion.AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
        launch_with_pdl,
        residual_out=residual_out,
        norm_out=norm_out,
        residual_in=residual_in,
        rms_gamma=norm_weight,
        rms_eps=eps,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=expert_scale_factor,
        shared_expert_output=shared_expert_output,
        weight_bias=weight_bias or 0.0,
    )


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: torch.dtype) -> None:
    """Fills memory of the current CUDA device with -0, as buffers of a caller's own exchange need.

    Args:
        buffer_ptr: the address.
        size: number of elements.
        dtype: of the elements, a floating-point type.
    """
    bytes_at(buffer_ptr, size * dtype.itemsize, current_device()).view(dtype).fill_(-0.0)


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: torch.dtype
) -> None:
    """`trtllm_lamport_initialize` of three buffers."""
    for pointer in (buffer_0_ptr, buffer_1_ptr, buffer_2_ptr):
        trtllm_lamport_initialize(pointer, size, dtype)
