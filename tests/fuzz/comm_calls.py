"""Small valid calls of the collectives, by the only rank of a group on the CPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from families.harness import rand
from fi_core import comm
from fi_core.comm import (
    dcp_alltoall,
    mixed_comm,
    moe_alltoall,
    quantized_allreduce,
    trtllm_ar,
    trtllm_custom_ar,
    vllm_ar,
)
from fi_core.comm.mnnvl import MnnvlConfig, OneRank
from fi_core.comm.workspace import CommWorkspace, TRTLLMAllReduceFusionWorkspace

Call = tuple[Callable[..., Any], dict[str, Any]]
CPU, BF16 = torch.device("cpu"), torch.bfloat16
MOST = 8  # tokens


def _rows() -> torch.Tensor:
    return rand(3, 64, dtype=BF16, device="cpu")


def _chosen() -> torch.Tensor:
    return torch.tensor([[0, 3], [-1, 4], [2, 2]], dtype=torch.int32)


def _sizes() -> dict[str, Any]:
    return {
        "mapping": comm.Mapping(1, 0, tp_size=1, moe_ep_size=1), "max_num_tokens": MOST, "top_k": 2, "num_experts": 4,
        "hidden_size": 64, "mnnvl_config": MnnvlConfig(comm_backend=OneRank()), "device": CPU, "timeout": 20.0,
    }  # fmt: skip


def _after(before: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, before each call of which the exchange gets into the state that it needs."""

    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        before()
        return function(*given, **options)

    return call


def _exchange() -> tuple[comm.MoeAlltoAll, Callable[[], None], Callable[[], None]]:
    """An exchange, what forgets its dispatch, and what makes one."""
    exchange, chosen, x = comm.MoeAlltoAll(**_sizes()), _chosen(), _rows()

    def forget() -> None:
        exchange.exchange.rows = None

    def dispatch() -> None:
        forget()
        exchange.dispatch(chosen, [x], MOST)

    return exchange, forget, dispatch


def _init() -> Call:
    return comm.MoeAlltoAll.__init__, {"self": object.__new__(comm.MoeAlltoAll), **_sizes()}


def _dispatch() -> Call:
    exchange, forget, _ = _exchange()
    return _after(forget, comm.MoeAlltoAll.dispatch), {
        "self": exchange, "token_selected_experts": _chosen(), "input_payloads": [_rows(), _chosen()],
        "runtime_max_tokens_per_rank": MOST, "invalid_token_expert_id": -1, "expert_id_payload_index": 1,
    }  # fmt: skip


def _combine() -> Call:
    exchange, _, dispatch = _exchange()
    payload = rand(1, MOST, 64, dtype=BF16, device="cpu")
    return _after(dispatch, comm.MoeAlltoAll.combine), {
        "self": exchange, "payload": payload, "runtime_max_tokens_per_rank": MOST,
    }  # fmt: skip


def _of_group(exchange: comm.MoeAlltoAll) -> dict[str, Any]:
    return {
        "workspace": exchange.workspace,
        "metainfo": moe_alltoall.moe_a2a_initialize(exchange.workspace, 0, 1, MOST),
        "runtime_max_tokens_per_rank": MOST, "ep_rank": 0, "ep_size": 1, "top_k": 2,
    }  # fmt: skip


def _plain_dispatch() -> Call:
    exchange, forget, _ = _exchange()
    given = {"token_selected_experts": _chosen(), "input_payloads": [_rows()], **_of_group(exchange), "num_experts": 4}
    return _after(forget, moe_alltoall.moe_a2a_dispatch), given


def _plain_combine() -> Call:
    exchange, _, dispatch = _exchange()
    payload = rand(1, MOST, 64, dtype=BF16, device="cpu")
    return _after(dispatch, moe_alltoall.moe_a2a_combine), {
        "payload": payload, "local_num_tokens": 3, **_of_group(exchange), "combine_payload_offset": 1024,
    }  # fmt: skip


def _partial_attention() -> Call:
    workspace = dcp_alltoall.AllToAllWorkspace(CPU, OneRank())
    dcp_alltoall.workspaces[workspace.buffer.data_ptr()] = workspace
    return dcp_alltoall.decode_cp_a2a_alltoall, {
        "partial_o": rand(3, 1, 64, dtype=BF16, device="cpu"), "softmax_stats": torch.ones(3, 1, 2),
        "workspace": workspace.buffer, "cp_rank": 0, "cp_size": 1,
    }  # fmt: skip


def _all_reduce() -> Call:
    workspace = TRTLLMAllReduceFusionWorkspace(1, 0, MOST, 64, BF16, OneRank(), device=CPU, timeout=20.0)
    pointers = workspace.shared["peers"]
    trtllm_ar.workspaces[pointers.data_ptr()] = workspace
    x = _rows()
    missing = ("allreduce_out", "quant_out", "scale_out", "scale_factor", "layout_code")
    return trtllm_ar.trtllm_allreduce_fusion, {
        "allreduce_in": x.view(-1), "world_size": 1, "world_rank": 0, "token_num": 3, "hidden_dim": 64,
        "workspace_ptrs": pointers, "launch_with_pdl": True, "trigger_completion_at_end": True, "fp32_acc": False,
        "pattern_code": 1, "use_oneshot": True, **dict.fromkeys(missing), "residual_in": _rows(),
        "residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x),
        "rms_gamma": torch.ones(64, dtype=BF16), "rms_eps": 1e-5, "metadata": {"buffer_size": workspace.max_bytes},
    }  # fmt: skip


def _scatter() -> Call:
    """With scales of groups, whose quantization has the most outputs."""
    workspace, x = TRTLLMAllReduceFusionWorkspace(1, 0, MOST, 64, BF16, OneRank(), device=CPU, timeout=20.0), _rows()
    scales = torch.zeros(1, 4, dtype=torch.int32)[:, :3].t()
    return comm.reduce_scatter_fusion, {
        "input": x, "workspace": workspace, "pattern": 9, "residual_in": _rows(), "residual_out": torch.empty_like(x),
        "norm_out": torch.empty_like(x), "quant_out": torch.empty(3, 64, dtype=torch.float8_e4m3fn),
        "scale_out": scales, "rms_gamma": torch.ones(64, dtype=BF16), "block_quant_group_size": 32,
    }  # fmt: skip


def _gather() -> Call:
    workspace = dcp_alltoall.AllToAllWorkspace(CPU, OneRank())
    x = _rows()
    return dcp_alltoall.AllToAllWorkspace.all_gather, {"self": workspace, "input": x, "out": torch.empty_like(x)[None]}


def _of_experts(pattern: int) -> Call:
    """A pattern of experts, with scales of fp32."""
    workspace, x = TRTLLMAllReduceFusionWorkspace(1, 0, MOST, 64, BF16, OneRank(), device=CPU, timeout=20.0), _rows()
    results = rand(2, 3, 64, dtype=BF16, device="cpu")
    given = {
        6: {
            "input": x, "moe_reduction_device_num_experts": 2, "moe_reduction_scale_input": torch.ones(2, 3),
            "moe_reduction_active_experts_token_input": results, "moe_reduction_token_input": _rows(),
        },
        12: {
            "input": results.view(6, 64), "expanded_idx_to_permuted_idx": torch.arange(6, dtype=torch.int32).view(3, 2),
            "expert_scale_factor": torch.ones(3, 2), "shared_expert_output": _rows(), "scale_factor": torch.ones(1),
        },
    }[pattern]  # fmt: skip
    return comm.allreduce_fusion, {
        "workspace": workspace, "pattern": pattern, "residual_in": _rows(), "rms_gamma": torch.ones(64, dtype=BF16),
        "residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x), **given,
    }  # fmt: skip


def _trtllm_experts(reduction: bool) -> Call:
    """TensorRT-LLM's functions for the patterns of experts."""
    _, given = _of_experts(6 if reduction else 12)
    workspace = given["workspace"]
    pointers = workspace.shared["peers"]
    trtllm_ar.workspaces[pointers.data_ptr()] = workspace
    kept = {"residual_in", "residual_out", "norm_out", *(name for name in given if name.startswith("moe_"))}
    group = {"world_size": 1, "world_rank": 0, "workspace_ptrs": pointers, "launch_with_pdl": False}
    if reduction:
        missing = ("scale_factor", "layout_code", "moe_allreduce_out", "quant_out", "scale_out")
        return trtllm_ar.trtllm_moe_allreduce_fusion, {
            **group, "token_num": 3, "hidden_dim": 64, "rms_gamma": given["rms_gamma"], "rms_eps": 1e-5,
            **{name: value for name, value in given.items() if name in kept}, **dict.fromkeys(missing),
        }  # fmt: skip
    kept |= {"expanded_idx_to_permuted_idx", "shared_expert_output", "expert_scale_factor"}
    return trtllm_ar.trtllm_moe_finalize_allreduce_fusion, {
        **group, "allreduce_in": given["input"], "norm_weight": given["rms_gamma"], "eps": 1e-5, "quant_out": None,
        "scale_out": None, "routed_scaling_factor": None,
        **{name: value for name, value in given.items() if name in kept},
    }  # fmt: skip


def _trtllm_custom() -> Call:
    workspace = TRTLLMAllReduceFusionWorkspace(1, 0, MOST, 64, BF16, OneRank(), device=CPU, timeout=20.0)
    pointers, x = workspace.shared["peers"], _rows()
    trtllm_custom_ar.workspaces[tuple(pointers.tolist())] = workspace
    others = ("peer_barrier_ptrs_in", "peer_barrier_ptrs_out", "bias")
    return trtllm_custom_ar.trtllm_custom_all_reduce, {
        "inp": x, "out": torch.empty_like(x), "tp_size": 1, "tp_rank": 0, "token_num": 3, "fusion_op_code": 3,
        "strategy_code": 3, "config_code": 0, "launch_with_pdl": False, "flag_value": 1,
        "peer_comm_buffer_ptrs": pointers, **dict.fromkeys(others), "residual": _rows(),
        "weight": torch.ones(64, dtype=BF16), "weight_pre_residual_norm": torch.ones(64, dtype=BF16), "eps": 1e-5,
        "intermediate_buffer": torch.empty_like(x),
        **dict.fromkeys(f"lamport_peer_comm_buffer_ptrs_{index}" for index in range(3)),
    }  # fmt: skip


def _custom_all_reduce() -> Call:
    """With a handle of the CPU, which `vllm_init_custom_ar` does not make."""
    workspace = CommWorkspace(CPU, OneRank(), vllm_ar._ROTATION_BYTES, 0, 20.0)
    shared = {name: workspace.shared[name] for name in ("peers", "status", "rank")}
    handles: dict[int, Any] = vllm_ar.handles
    handles[1] = SimpleNamespace(buffer=workspace.buffer, world_size=1, kept=workspace, **shared)
    x = _rows()
    return vllm_ar.vllm_all_reduce, {
        "fa": 1, "inp": x, "out": torch.empty_like(x), "reg_buffer": 0, "reg_buffer_sz_bytes": 0, "num_ctas": 16,
    }  # fmt: skip


CALLS: dict[str, Callable[[], Call]] = {
    "exchange": _init, "dispatch": _dispatch, "combine": _combine, "dispatch of a workspace": _plain_dispatch,
    "combine of a workspace": _plain_combine, "partial attention": _partial_attention, "all-reduce": _all_reduce,
    "custom all-reduce": _custom_all_reduce, "reduce-scatter": _scatter, "all-gather": _gather,
    "sum of experts": lambda: _of_experts(6), "finalize": lambda: _of_experts(12),
    "TensorRT-LLM's all-reduce": _trtllm_custom, "TensorRT-LLM's sum of experts": lambda: _trtllm_experts(True),
    "TensorRT-LLM's finalize": lambda: _trtllm_experts(False),
}  # fmt: skip


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, which ends with the call."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        quantized_allreduce.workspaces.clear()
        dist.destroy_process_group()


def _merged_attention() -> Call:
    workspace = comm.decode_cp_a2a_lse_reduce_create_workspace(3, 4, 1, 64, BF16, dist.group.WORLD)
    return comm.decode_cp_a2a_lse_reduce, {
        "partial_o": rand(3, 4, 1, 64, dtype=BF16, device="cpu"), "partial_lse": torch.zeros(3, 4, 1),
        "workspace": workspace, "cp_rank": 0, "cp_size": 1,
    }  # fmt: skip


def _over_pcie() -> Call:
    workspace = comm.PcieIpcAllReduceWorkspace(dist.group.WORLD, 1024, device=CPU, timeout=20.0)
    x = _rows()
    return comm.PcieIpcAllReduceWorkspace.all_reduce, {"self": workspace, "inp": x, "out": torch.empty_like(x)}


def _shards(scatter: bool) -> Call:
    kind = comm.PcieIpcReduceScatterWorkspace if scatter else comm.PcieIpcAllGatherWorkspace
    workspace, x = kind(dist.group.WORLD, 1024, device=CPU, timeout=20.0), _rows()
    call = comm.PcieIpcReduceScatterWorkspace.reduce_scatter if scatter else comm.PcieIpcAllGatherWorkspace.all_gather
    return call, {"self": workspace, "inp": x, "out": torch.empty_like(x)}


def _gathered_product() -> Call:
    return comm.all_gather_matmul, {
        "inp": _rows(), "w": rand(_rows().shape[1], 16, dtype=BF16, device="cpu"), "group": dist.group.WORLD,
    }  # fmt: skip


def _quantized() -> Call:
    x = _rows()
    return quantized_allreduce.quantized_all_reduce, {
        "inp": x, "group": dist.group.WORLD, "scale_group": 16, "output": torch.empty_like(x),
    }  # fmt: skip


def _ulysses(gather: bool) -> Call:
    communicator = comm.UlyssesCommunicator(max_elems=1024, dtype=BF16, device=CPU)
    move = comm.UlyssesCommunicator.gather_heads if gather else comm.UlyssesCommunicator.scatter_heads
    return move, {"self": communicator, next(iter(_parameters(move))): rand(1, 3, 4, 8, dtype=BF16, device="cpu")}


def _parameters(method: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def _grid() -> dict[str, Any]:
    sizes = ("world_rank", "world_size", "local_rank", "local_size", "inter_rank", "inter_size")
    return {
        **dict(zip(sizes, (0, 1, 0, 1, 0, 1))), "local_tp_size": 1, "local_dp_size": 1, "inter_tp_size": 1,
        "inter_dp_size": None, "dtype": BF16, "device": CPU,
    }  # fmt: skip


def _handler() -> Call:
    init = mixed_comm.MixedCommHandler.__init__
    return init, {"self": object.__new__(mixed_comm.MixedCommHandler), **_grid()}


def _mixed() -> Call:
    x = _rows()
    return mixed_comm.run_mixed_comm, {
        "op": mixed_comm.MixedCommOp.ALLREDUCE, "handler": mixed_comm.MixedCommHandler(**_grid()), "x_in": x,
        "x_out": torch.empty_like(x),
    }  # fmt: skip


CALLS_OF_A_GROUP: dict[str, Callable[[], Call]] = {
    "merged attention": _merged_attention, "PCIe": _over_pcie, "quantized": _quantized,
    "all-gather over PCIe": lambda: _shards(False), "reduce-scatter over PCIe": lambda: _shards(True),
    "gathered product": _gathered_product,
    "scatter heads": lambda: _ulysses(False), "gather heads": lambda: _ulysses(True), "grid": _handler, "mixed": _mixed,
}  # fmt: skip
