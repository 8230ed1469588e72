"""Collectives over the GPUs of a host, fused with what follows them; which rank does what, and how ranks agree."""

from __future__ import annotations

from fi_core.comm.all_gather_matmul import all_gather_matmul
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
from fi_core.comm.memory import CudaRTLibrary, create_shared_buffer, free_shared_buffer, pack_strided_memory
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
from fi_core.comm.moe_exchange import moe_a2a_active_rank_mask
from fi_core.comm.pcie_ipc_ar import PcieIpcAllReduceWorkspace
from fi_core.comm.pcie_ipc_policy import (
    PCIE_IPC_CUSTOM_OP,
    PcieIpcAllGatherLaunchConfig,
    PcieIpcAllGatherVariant,
    PcieIpcLaunchConfig,
    PcieIpcReduceScatterLaunchConfig,
    PcieIpcReduceScatterVariant,
    PcieIpcVariant,
    get_pcie_ipc_all_gather_launch_config,
    get_pcie_ipc_launch_config,
    get_pcie_ipc_reduce_scatter_launch_config,
    pcie_ipc_default_cache_path,
)
from fi_core.comm.pcie_ipc_shards import PcieIpcAllGatherWorkspace, PcieIpcReduceScatterWorkspace
from fi_core.comm.pcie_ipc_topology import (
    PcieIpcProfileDecision,
    PcieIpcRankTopology,
    probe_pcie_ipc_rank_topology,
    resolve_pcie_ipc_profile,
)
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
from fi_core.comm.ulysses import UlyssesCommunicator, UlyssesWorkspace
from fi_core.comm.ulysses_head_chunk import merge_ulysses_output_head_chunk, pack_ulysses_qkv_head_chunk
from fi_core.comm.ulysses_topology import (
    ULYSSES_BACKENDS,
    UlyssesBackendDecision,
    UlyssesBackendError,
    UlyssesRankTopology,
    decide_ulysses_backend,
    probe_ulysses_rank_topology,
    resolve_ulysses_backend,
)
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
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "AllToAllWorkspace",
    "CommBackend",
    "CudaRTLibrary",
    "HierarchicalWorkspace",
    "MNNVLAllReduceFusionWorkspace",
    "Mapping",
    "MnnvlConfig",
    "MoeAlltoAll",
    "PCIE_IPC_CUSTOM_OP",
    "PcieIpcAllGatherLaunchConfig",
    "PcieIpcAllGatherVariant",
    "PcieIpcAllGatherWorkspace",
    "PcieIpcAllReduceWorkspace",
    "PcieIpcLaunchConfig",
    "PcieIpcProfileDecision",
    "PcieIpcRankTopology",
    "PcieIpcReduceScatterLaunchConfig",
    "PcieIpcReduceScatterVariant",
    "PcieIpcReduceScatterWorkspace",
    "PcieIpcVariant",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "TorchDistBackend",
    "ULYSSES_BACKENDS",
    "UlyssesBackendDecision",
    "UlyssesBackendError",
    "UlyssesCommunicator",
    "UlyssesRankTopology",
    "UlyssesWorkspace",
    "all_gather_matmul",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
    "create_shared_buffer",
    "decide_ulysses_backend",
    "decode_cp_a2a_lse_reduce",
    "decode_cp_a2a_lse_reduce_create_workspace",
    "decode_cp_a2a_lse_reduce_workspace_size",
    "decode_cp_a2a_workspace_size",
    "free_shared_buffer",
    "get_pcie_ipc_all_gather_launch_config",
    "get_pcie_ipc_launch_config",
    "get_pcie_ipc_reduce_scatter_launch_config",
    "merge_ulysses_output_head_chunk",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
    "pack_strided_memory",
    "pack_ulysses_qkv_head_chunk",
    "pcie_ipc_default_cache_path",
    "probe_pcie_ipc_rank_topology",
    "probe_ulysses_rank_topology",
    "reduce_scatter_fusion",
    "resolve_pcie_ipc_profile",
    "resolve_ulysses_backend",
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
