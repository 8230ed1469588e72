"""Collectives over the GPUs of a host, fused with what follows them; which rank does what, and how ranks agree."""

from __future__ import annotations

from fi_core.comm.dcp_alltoall import AllToAllWorkspace, decode_cp_a2a_workspace_size
from fi_core.comm.dcp_lse_reduce import (
    decode_cp_a2a_lse_reduce,
    decode_cp_a2a_lse_reduce_create_workspace,
    decode_cp_a2a_lse_reduce_workspace_size,
)
from fi_core.comm.fusion import (
    AllReduceFusionPattern,
    QuantizationSFLayout,
    allreduce_fusion,
    compute_fp4_swizzled_layout_sf_size,
    reduce_scatter_fusion,
)
from fi_core.comm.hosts import HierarchicalWorkspace, create_allreduce_fusion_workspace
from fi_core.comm.mapping import Mapping
from fi_core.comm.memory import CudaRTLibrary, create_shared_buffer, free_shared_buffer
from fi_core.comm.mnnvl import CommBackend, MnnvlConfig, TorchDistBackend
from fi_core.comm.moe_alltoall import (
    MoeAlltoAll,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from fi_core.comm.pcie_ipc_ar import PcieIpcAllReduceWorkspace, PcieIpcLaunchConfig
from fi_core.comm.trtllm_ar import (
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_lamport_initialize,
    trtllm_lamport_initialize_all,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from fi_core.comm.trtllm_custom_ar import (
    AllReduceFusionOp,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    trtllm_create_ipc_workspace_for_all_reduce,
    trtllm_custom_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce,
)
from fi_core.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace
from fi_core.comm.ulysses import (
    UlyssesBackendDecision,
    UlyssesBackendError,
    UlyssesCommunicator,
    UlyssesWorkspace,
)
from fi_core.comm.ulysses_head_chunk import merge_ulysses_output_head_chunk, pack_ulysses_qkv_head_chunk
from fi_core.comm.vllm_ar import (
    vllm_all_reduce,
    vllm_dispose,
    vllm_get_graph_buffer_ipc_meta,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
    vllm_register_graph_buffers,
)
from fi_core.comm.workspace import AllReduceFusionWorkspace, TRTLLMAllReduceFusionWorkspace

__all__ = [
    "MNNVLAllReduceFusionWorkspace",
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "AllToAllWorkspace",
    "CommBackend",
    "CudaRTLibrary",
    "HierarchicalWorkspace",
    "Mapping",
    "MnnvlConfig",
    "MoeAlltoAll",
    "PcieIpcAllReduceWorkspace",
    "PcieIpcLaunchConfig",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "TorchDistBackend",
    "UlyssesBackendDecision",
    "UlyssesBackendError",
    "UlyssesCommunicator",
    "UlyssesWorkspace",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
    "create_shared_buffer",
    "decode_cp_a2a_lse_reduce",
    "decode_cp_a2a_lse_reduce_create_workspace",
    "decode_cp_a2a_lse_reduce_workspace_size",
    "decode_cp_a2a_workspace_size",
    "free_shared_buffer",
    "merge_ulysses_output_head_chunk",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
    "pack_ulysses_qkv_head_chunk",
    "reduce_scatter_fusion",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_custom_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
    "vllm_all_reduce",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
]
