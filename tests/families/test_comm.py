"""Collectives over processes: on CPUs, on one GPU and on several, every rank's result and its bits."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fi_core
from families.ranks import run_ranks
from fi_core import comm
from fi_core.comm import AllReduceFusionPattern as Pattern
from fi_core.comm import dcp_alltoall
from fi_core.comm.dcp_alltoall import (
    AllToAllWorkspace,
    decode_cp_a2a_allocate_mnnvl_workspace,
    decode_cp_a2a_alltoall,
    decode_cp_a2a_init_workspace,
)
from fi_core.comm.mnnvl import MnnvlConfig, OneRank

PLACES = [
    pytest.param(4, "cpu"),
    pytest.param(2, "one gpu", marks=pytest.mark.gpu),
    pytest.param(2, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
    pytest.param(4, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
    pytest.param(8, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _gather(x: torch.Tensor) -> list[torch.Tensor]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x.cpu())
    return found


def _workspace(device: torch.device, tokens: int, hidden: int, dtype: torch.dtype = BF16, timeout: float = 20.0) -> Any:
    return comm.create_allreduce_fusion_workspace(
        max_token_num=tokens, hidden_dim=hidden, dtype=dtype, device=device, timeout=timeout
    )


def _same_bits(*results: torch.Tensor) -> None:
    for result in results:
        own = result.cpu().view(torch.uint8)
        for other in _gather(own):
            assert torch.equal(own, other)


def _check_patterns(rank: int, world: int, device: torch.device) -> None:
    """Each pattern, in both forms, against the sum in fp32 and the norm in fp64."""
    hidden, eps = 256, 1e-5
    workspace = _workspace(device, 8, hidden, F32)
    shared = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(2 + rank)
    patterns = [(5, BF16, p) for p in (*range(6), *range(8, 12))]
    for tokens, dtype, pattern in [*patterns, (1, F16, 1), (8, F16, 0), (3, F32, 0), (3, F32, 1)]:
        x = torch.randn(tokens, hidden, generator=own).to(dtype)
        x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]) if pattern < 2 else 0.0
        x[0, 8:16] = -0.0
        residual = torch.randn(tokens, hidden, generator=shared).to(dtype)
        gamma = torch.rand(hidden, generator=shared).to(dtype)
        total = torch.zeros(tokens, hidden)
        for other in _gather(x):
            total += other.float()
        for one_shot in (True, False):
            if pattern == Pattern.kAllReduce:
                result = comm.allreduce_fusion(x.to(device), workspace, pattern, use_oneshot=one_shot)
                torch.testing.assert_close(result.cpu(), total.to(dtype), rtol=0, atol=0, equal_nan=True)
                _same_bits(result)
                continue
            s = (total + residual.float()).to(dtype)
            bias, inv_rms = float(dtype == BF16), (s.double().square().mean(-1, keepdim=True) + eps).rsqrt()
            norm, fp8 = s.double() * inv_rms * (gamma.double() + bias), pattern in (2, 4)
            scale = torch.tensor([0.05 if fp8 else 50.0], device=device)
            scales, residual_out = _scales(pattern, tokens, hidden, device), torch.empty_like(x, device=device)
            norm_out = None if pattern in (2, 3, 8, 10) else torch.empty_like(residual_out)
            result = comm.allreduce_fusion(
                x.to(device), workspace, pattern, residual_out=residual_out, norm_out=norm_out, scale_out=scales,
                residual_in=residual.to(device), rms_gamma=gamma.to(device), rms_eps=eps, scale_factor=scale,
                use_oneshot=one_shot, weight_bias=bias,
            )  # fmt: skip
            torch.testing.assert_close(residual_out.cpu(), s, rtol=0, atol=0, equal_nan=True)
            if norm_out is not None:
                torch.testing.assert_close(norm_out.cpu().double(), norm, rtol=1e-2, atol=1e-2, equal_nan=True)
                _same_bits(norm_out)
            if fp8:
                torch.testing.assert_close(result.cpu().double() * 0.05, norm, rtol=0.08, atol=0.08)
            elif pattern in (8, 9):
                groups = norm.to(dtype).double().view(tokens, 2, 128)
                exponents = (groups.abs().amax(-1) / 448).log2().ceil()
                stored = scales.t().contiguous().view(torch.uint8).view(tokens, 4)[:, :2].cpu().double() - 127
                assert ((stored - exponents).abs() <= (0 if pattern == 9 else 1)).all()
                got = result.cpu().double().view(tokens, 2, 128) * stored.exp2()[..., None]
                torch.testing.assert_close(got, groups, rtol=0.08, atol=0.02)
            elif pattern in (10, 11):
                torch.testing.assert_close(scales.cpu().double(), norm.abs().amax(1, True) / 448, rtol=1e-2, atol=0)
                torch.testing.assert_close(result.cpu().double() * scales.cpu(), norm, rtol=0.08, atol=0.02)
            elif pattern == Pattern.kARResidualRMSNormOutFP4Quant:
                quantized, expected = fi_core.fp4_quantize(norm_out, scale, 16, False, True)
                assert torch.equal(result.flatten(), quantized.view(torch.uint8).flatten())
                assert torch.equal(scales, expected.view(torch.uint8).flatten())
            _same_bits(residual_out, result)
    workspace.destroy()


def _scales(pattern: int, tokens: int, hidden: int, device: torch.device) -> torch.Tensor:
    """The scale_out of a pattern; that of groups has room for more tokens."""
    if pattern in (8, 9):
        return torch.zeros(1, tokens + 3, dtype=torch.int32, device=device)[:, :tokens].t()
    if pattern in (10, 11):
        return torch.zeros(tokens, 1, device=device)
    return torch.zeros(128 * hidden // 16, dtype=torch.uint8, device=device)


def _check_experts(rank: int, world: int, device: torch.device) -> None:
    """The patterns of experts have the bits of the pattern after them, of the weighted sum."""
    tokens, hidden, experts, top_k = 5, 256, 4, 3
    workspace = _workspace(device, 8, hidden)
    shared, own = torch.Generator(device).manual_seed(1), torch.Generator(device).manual_seed(2 + rank)
    draw = {"generator": own, "device": device}
    after: dict[str, Any] = {
        "residual_in": torch.randn(tokens, hidden, generator=shared, device=device).to(BF16),
        "rms_gamma": torch.rand(hidden, generator=shared, device=device).to(BF16),
    }
    added = torch.randn(tokens, hidden, **draw).to(BF16)
    active, scales = torch.randn(experts, tokens, hidden, **draw).to(BF16), torch.rand(experts, tokens, **draw)
    total = torch.einsum("eth,et->th", active.double(), scales.double()) + added
    expected = comm.allreduce_fusion(total.to(BF16), workspace, 1, **after)
    moe: dict[str, Any] = {
        "moe_reduction_device_num_experts": experts, "moe_reduction_scale_input": scales,
        "moe_reduction_active_experts_token_input": active, "moe_reduction_token_input": added,
    }  # fmt: skip
    result = comm.allreduce_fusion(added, workspace, Pattern.kMoEReductionARResidualRMSNorm, **after, **moe)
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    _same_bits(result)
    for dtype in (F32, BF16, F16):
        rows, weights = (
            torch.randn(tokens * top_k, hidden, **draw).to(BF16),
            torch.rand(tokens, top_k, **draw).to(dtype),
        )
        positions = torch.randperm(tokens * top_k, **draw).int().view(tokens, top_k)
        positions[0, 1] = -1
        chosen = rows[positions.clamp(0).long()].double() * (positions >= 0).double()[..., None]
        total = (chosen * weights.double()[..., None]).sum(1) + added
        moe = {
            "expanded_idx_to_permuted_idx": positions, "expert_scale_factor": weights, "shared_expert_output": added,
        }  # fmt: skip
        result = comm.allreduce_fusion(rows, workspace, Pattern.kMoEFinalizeARResidualRMSNorm, **after, **moe)
        expected = comm.allreduce_fusion(total.to(BF16), workspace, 1, **after)
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
        quantized = comm.allreduce_fusion(rows, workspace, 12, scale_factor=0.05, **after, **moe)
        torch.testing.assert_close(quantized.float() * 0.05, result.float(), rtol=0.08, atol=0.02)
        _same_bits(result, quantized)
    workspace.destroy()


def _check_scatter(rank: int, world: int, device: torch.device) -> None:
    """Slices of the sum, of its norm and of its quantized norm have the bits of all-reduce; gathered they are whole."""
    tokens, hidden = 4, 256
    workspace = _workspace(device, 32, hidden, F32)
    gathering = AllToAllWorkspace(device, comm.TorchDistBackend(), timeout=20.0)
    own = torch.Generator(device).manual_seed(2 + rank)
    for rows, dtype in ((tokens * world, BF16), (2000 * world, F16), (tokens * world, F32)):
        x, residual = (torch.randn(rows, hidden, generator=own, device=device).to(dtype) for _ in range(2))
        dist.broadcast(residual, 0)
        part = slice(rank * rows // world, (rank + 1) * rows // world)
        after: dict[str, Any] = {"rms_gamma": torch.ones(hidden, dtype=dtype, device=device)}
        scattered = comm.reduce_scatter_fusion(x, workspace)
        total = comm.allreduce_fusion(x, workspace, 0)
        assert torch.equal(scattered, total[part])
        gathered = torch.empty_like(x)
        gathering.all_gather(scattered, gathered.view(world, rows // world, hidden))
        assert torch.equal(gathered, total)
        for pattern in (1, 4) if dtype != F32 else (1,):
            mine = comm.reduce_scatter_fusion(x, workspace, pattern, residual_in=residual[part], **after)
            whole = comm.allreduce_fusion(x, workspace, pattern, residual_in=residual, **after)
            assert torch.equal(mine.view(torch.uint8), whole[part].view(torch.uint8))
    odd = torch.arange(48, dtype=torch.uint8, device=device) + rank
    everything = torch.empty(world, 48, dtype=torch.uint8, device=device)
    gathering.all_gather(odd, everything)
    assert torch.equal(everything - odd, everything[:, :1].expand(-1, 48) - odd[0])
    with pytest.raises(ValueError, match=f"input: rows for each of {world} ranks"):
        comm.reduce_scatter_fusion(x[1:], workspace)
    gathering.destroy()
    workspace.destroy()


def _check_hosts(rank: int, world: int, device: torch.device) -> None:
    """Two hosts of half of the ranks: every pattern after the sum over all of them."""
    hidden = 256
    workspace = comm.create_allreduce_fusion_workspace(
        max_token_num=8, hidden_dim=hidden, dtype=F32, device=device, gpus_per_node=world // 2, timeout=20.0
    )
    assert (workspace.rank, workspace.world_size, workspace.backend) == (rank, world, "hierarchical")
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)
    for shape, dtype in (((8, hidden), BF16), ((300, hidden), F16), ((8, hidden), F32), ((1, 8), BF16)):
        x = torch.randn(shape, generator=own).to(dtype)
        residual, gamma = (torch.randn(size, generator=shared).to(dtype) for size in (shape, shape[1]))
        total = torch.stack(_gather(x)).double().sum(0)
        result = comm.allreduce_fusion(x.to(device), workspace, 0)
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == F32 else {"rtol": 2e-2, "atol": 4e-2}
        torch.testing.assert_close(result.cpu().double(), total, **near)
        residual_out = torch.empty_like(result)
        normed = comm.allreduce_fusion(
            x.to(device), workspace, 1, residual_in=residual.to(device), residual_out=residual_out,
            rms_gamma=gamma.to(device),
        )  # fmt: skip
        s = total + residual
        torch.testing.assert_close(residual_out.cpu().double(), s, **near)
        norm = s * (s.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma
        torch.testing.assert_close(normed.cpu().double(), norm, **near)
        _same_bits(result, residual_out, normed)
    with pytest.raises(ValueError, match="workspace: the ranks of one host"):
        comm.reduce_scatter_fusion(result, workspace)
    workspace.destroy()
    with pytest.raises(ValueError, match="gpus_per_node: a divisor of 4"):
        comm.create_allreduce_fusion_workspace(
            max_token_num=8, hidden_dim=hidden, dtype=F32, device=device, gpus_per_node=3
        )


def _check_many_sizes(rank: int, world: int, device: torch.device) -> None:
    """Calls of drawn sizes and forms, one behind the other; some are larger than the workspace."""
    workspace = _workspace(device, 16, 512)
    sizes = torch.Generator().manual_seed(3)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(60):
        tokens, form = (int(torch.randint(1, limit, (), generator=sizes)) for limit in (2000, 3))
        x = torch.full((tokens, 512), float(step % 16 + rank), dtype=BF16, device=device)
        if device.type == "cuda" and (step + rank) % 7 == 0:
            torch.cuda._sleep(200000)
        result = comm.allreduce_fusion(x, workspace, 0, use_oneshot=form == 1)
        wrong += (result != step % 16 * world + sum(range(world))).any()
    assert wrong.item() == 0
    workspace.destroy()


def _check_moe(rank: int, world: int, device: torch.device) -> None:
    """Rows that arrive, in order, with their counts; results that come back, summed."""
    experts, top_k, hidden, most = 4 * world, 3, 64, 20
    mapping = comm.Mapping(world, rank, tp_size=world, moe_ep_size=world)
    exchange = comm.MoeAlltoAll(mapping, most, top_k, experts, hidden_size=2 * hidden, device=device, timeout=20.0)
    for step in range(5):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        tokens = (7 * step + 5 * rank) % most
        chosen = torch.rand(tokens, experts, generator=drawn).topk(top_k).indices.int()
        x = torch.randn(tokens, hidden, generator=drawn).to(BF16)
        odd = torch.randint(0, 255, (tokens, 5), generator=drawn, dtype=torch.uint8)
        payloads = [t.to(device) for t in (x, chosen, odd)]
        received = exchange.dispatch(payloads[1], payloads, most, invalid_token_expert_id=-1, expert_id_payload_index=1)
        counts = exchange.received_counts.tolist()
        results = exchange.get_combine_payload_tensor_in_workspace(most, hidden, BF16)
        results.fill_(float("nan"))
        for source, sent in enumerate(zip(*(_gather(t) for t in payloads))):
            here = (sent[1] // 4 == rank).any(1)
            assert counts[source] == int(here.sum())
            for got, values in zip(received, sent):
                assert torch.equal(got[source, : counts[source]].cpu(), values[here])
            assert (received[1][source, counts[source] :] == -1).all()
            results[source, : counts[source]] = received[0][source, : counts[source]] * (rank + 1)
        returned = exchange.combine(results, most, payload_in_workspace=True)
        expected = torch.zeros(tokens, hidden)
        for owner in range(world):
            expected += torch.where((chosen // 4 == owner).any(1, keepdim=True), (x * (owner + 1)).float(), 0.0)
        assert torch.equal(returned.cpu(), expected.to(BF16))
    with pytest.raises(ValueError, match="combine: a dispatch is required"):
        exchange.combine(results, most)
    exchange.destroy()


def _check_all_to_all(rank: int, world: int, device: torch.device) -> None:
    """Rows of several sizes; the largest takes several launches."""
    workspace = AllToAllWorkspace(device, comm.TorchDistBackend(), timeout=20.0)
    for words in (4, 36, 70000, 6000004):
        numbers = torch.arange(words, device=device, dtype=torch.int32)
        x = torch.stack([numbers + 1000 * (rank * world + to) for to in range(world)])
        out = torch.empty_like(x)
        workspace.all_to_all(x, out)
        assert torch.equal(out, torch.stack([numbers + 1000 * (source * world + rank) for source in range(world)]))
    workspace.destroy()


def _check_partial_attention(rank: int, world: int, device: torch.device) -> None:
    """Row j of rank i becomes row i of rank j, of both tensors."""
    workspace = decode_cp_a2a_allocate_mnnvl_workspace(comm.Mapping(world, rank, cp_size=world))
    decode_cp_a2a_init_workspace(workspace, rank, world)
    assert workspace.nbytes == comm.decode_cp_a2a_workspace_size(world)
    o, stats = torch.randn(3, world, 64, device=device).to(BF16), torch.randn(3, world, 2, device=device)
    o_out, stats_out = decode_cp_a2a_alltoall(o, stats, workspace, rank, world)
    for source, (theirs, their_stats) in enumerate(zip(_gather(o), _gather(stats))):
        assert torch.equal(o_out[:, source].cpu(), theirs[:, rank])
        assert torch.equal(stats_out[:, source].cpu(), their_stats[:, rank])


def test_partial_attention_of_any_width() -> None:
    """Statistics begin at a multiple of their size, also behind rows of odd bytes."""
    workspace = AllToAllWorkspace(torch.device("cpu"), OneRank())
    dcp_alltoall.workspaces[workspace.buffer.data_ptr()] = workspace
    o, stats = torch.randn(3, 1, 65).to(BF16), torch.randn(3, 1, 2)
    found = decode_cp_a2a_alltoall(o, stats, workspace.buffer, 0, 1, None, out := (o * 0, stats * 0))
    assert all(torch.equal(x, y) and y is z for x, y, z in zip((o, stats), found, out))
    workspace.destroy()


def test_a_mapping_is_that_of_ranks() -> None:
    with pytest.raises(TypeError, match="MoeAlltoAll: mapping must be a Mapping of fi_core; got a dict"):
        comm.MoeAlltoAll({}, 8, 2, 4)  # type: ignore[arg-type]


def _check_custom_all_reduce(rank: int, world: int, device: torch.device) -> None:
    """The sum, with a norm after it, and with one before and after the residual."""
    workspace = comm.trtllm_create_ipc_workspace_for_all_reduce(rank, world, 16, 64)
    pointers = [torch.tensor(addresses) for addresses in workspace]
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)
    x = torch.randn(4, 64, generator=own).to(BF16)
    residual, weights = torch.randn(4, 64, generator=shared).to(BF16), torch.rand(2, 64, generator=shared).to(BF16)
    total = torch.stack(_gather(x)).double().sum(0)

    def normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values * (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    before = normed(total, weights[0]) + residual
    expected = {0: (total, None), 1: (normed(total + residual, weights[1]), total + residual)}
    expected[3] = (normed(before, weights[1]), before)
    for op, (out, between) in expected.items():
        got, middle = (torch.empty(4 * 64, dtype=BF16, device=device) for _ in range(2))
        comm.trtllm_custom_all_reduce(
            x.to(device).view(-1), got, world, rank, 4, op, comm.AllReduceStrategyType.AUTO, 0, True, 1, *pointers[:1],
            *pointers[2:4], None, residual.to(device), weights[1].to(device), weights[0].to(device), 1e-5, middle,
            *pointers[4:],
        )  # fmt: skip
        torch.testing.assert_close(got.cpu().double().view(4, 64), out, rtol=2e-2, atol=3e-2)
        if between is not None:
            torch.testing.assert_close(middle.cpu().double().view(4, 64), between, rtol=2e-2, atol=3e-2)
        _same_bits(got)
    comm.trtllm_destroy_ipc_workspace_for_all_reduce(workspace)
    with pytest.raises(ValueError, match="workspace: the lists"):
        comm.trtllm_destroy_ipc_workspace_for_all_reduce(workspace)


def _check_other_names(rank: int, world: int, device: torch.device) -> None:
    """The functions with TensorRT-LLM's and vLLM's names."""
    handles, pointers, metadata = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, world, 16, 256, create_metadata=True
    )
    x = torch.full((4, 256), float(rank + 1), dtype=BF16, device=device)
    total, out = sum(range(1, world + 1)), torch.empty_like(x)

    def call(tokens: int) -> None:
        comm.trtllm_allreduce_fusion(
            x.view(-1), world, rank, tokens, 256, pointers, True, True, False, Pattern.kAllReduce, None, out.view(-1),
            None, None, None, None, None, None, None, None, None, metadata,
        )  # fmt: skip

    call(4)
    assert (out == total).all()
    after: dict[str, Any] = {"residual_in": x, "norm_out": out, "residual_out": torch.empty_like(x)}
    weight, ones = torch.ones(256, dtype=BF16, device=device), torch.ones(2, 4, device=device)
    experts, unused = torch.stack([x, x]), dict.fromkeys(("quant_out", "scale_out", "routed_scaling_factor"))
    comm.trtllm_moe_allreduce_fusion(
        world, rank, 4, 256, pointers, True, rms_gamma=weight, rms_eps=0.0, scale_factor=None, layout_code=None,
        moe_reduction_device_num_experts=2, moe_reduction_scale_input=ones.view(-1), quant_out=None, scale_out=None,
        moe_reduction_active_experts_token_input=experts.view(-1), moe_reduction_token_input=x, moe_allreduce_out=None,
        **after,
    )  # fmt: skip
    assert (after["residual_out"] == 3 * total + rank + 1).all() and (out == 1).all()
    comm.trtllm_moe_finalize_allreduce_fusion(
        experts, norm_weight=weight, expanded_idx_to_permuted_idx=torch.arange(8, device=device).int().view(4, 2),
        workspace_ptrs=pointers, launch_with_pdl=True, world_rank=rank, world_size=world, eps=0.0,
        weight_bias=1.0, shared_expert_output=None, expert_scale_factor=None, **unused, **after,
    )  # fmt: skip
    assert (after["residual_out"] == 2 * total + rank + 1).all() and (out == 2).all()
    with pytest.raises(ValueError, match="token_num, hidden_dim: at most 8192 bytes"):
        call(400)
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
    with pytest.raises(ValueError, match="workspace_ptrs"):
        call(4)
    _check_custom_all_reduce(rank, world, device)
    if device.type == "cpu":
        return
    with pytest.raises(ValueError, match="ipc_tensors: addresses that are multiples of 16"):
        comm.vllm_init_custom_ar([1] * world, x, rank, True)
    with pytest.raises(ValueError, match="ipc_tensors: for rank 0 an address of memory of"):
        comm.vllm_init_custom_ar([4096] * world, x, rank, True)
    buffers = comm.create_shared_buffer(comm.vllm_meta_size())
    fa = comm.vllm_init_custom_ar(buffers, x, rank, True)
    comm.vllm_register_buffer(fa, buffers)
    comm.vllm_all_reduce(fa, x, out.zero_(), 0, 0, 16)
    assert (out == total).all() and comm.vllm_get_graph_buffer_ipc_meta(fa) == ([], [])
    comm.vllm_dispose(fa)
    comm.free_shared_buffer(buffers)
    with pytest.raises(ValueError, match="fa: a handle"):
        comm.vllm_dispose(fa)


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_collectives(world: int, device: str) -> None:
    """All-reduce, reduce-scatter, all-to-all, MoE dispatch and combine; four ranks are also two hosts."""
    run_ranks(_check_all, world, device)


def _check_all(rank: int, world: int, device: torch.device) -> None:
    _check_patterns(rank, world, device)
    _check_experts(rank, world, device)
    _check_scatter(rank, world, device)
    _check_many_sizes(rank, world, device)
    _check_moe(rank, world, device)
    _check_all_to_all(rank, world, device)
    if world == 4:
        _check_hosts(rank, world, device)
    if device.type == "cpu" and torch.cuda.is_available():
        return  # what follows takes the CUDA device of a process that has one
    _check_partial_attention(rank, world, device)
    _check_other_names(rank, world, device)


def test_one_rank_keeps_its_rows(device: str) -> None:
    """A group of one rank needs no torch.distributed; a token without a valid expert goes nowhere."""
    config = MnnvlConfig(comm_backend=OneRank())
    mapping = comm.Mapping(1, 0, tp_size=1, moe_ep_size=1)
    exchange = comm.MoeAlltoAll(
        mapping, 8, 2, 4, hidden_size=64, mnnvl_config=config, device=torch.device(device), timeout=20.0
    )
    chosen = torch.tensor([[0, 3], [-1, 4], [2, 2]], dtype=torch.int32, device=device)
    x = torch.randn(3, 64).to(device, BF16)
    [received] = exchange.dispatch(chosen, [x], 8)
    assert torch.equal(received[0, :2], x[[0, 2]])
    assert torch.equal(exchange.combine(received, 8), x * torch.tensor([[1], [0], [1]], device=device))


def _fail(rank: int, world: int, device: torch.device, how: str) -> None:
    x = torch.ones(8, 64, dtype=BF16, device=device)
    patient, workspace = (_workspace(device, 8, 64, timeout=seconds) for seconds in (20.0, 1.0))
    for each in (patient, workspace):  # the first call loads the kernel
        comm.allreduce_fusion(x, each, 0)
        dist.barrier()
    if rank == 1 and how == "rank ends":
        os.kill(os.getpid(), signal.SIGKILL)
    x = x[:4] if rank == 1 else x
    other = "[02-9]" if rank == 1 else "1"
    message = f"workspace: rank {other} " + ("did not send" if how == "rank ends" else "called another collective")

    def calls() -> None:
        result = comm.allreduce_fusion(x, workspace, 0)  # CPUs raise here
        if how == "rank ends":
            assert result.isnan().all()
        torch.cuda.synchronize()
        comm.allreduce_fusion(x, workspace, 0)

    with pytest.raises(RuntimeError, match=message):
        calls()
    os._exit(0)  # a barrier would wait for the rank that has ended


@pytest.mark.parametrize("how", ["rank ends", "shapes differ"])
@pytest.mark.parametrize(("world", "device"), [(2, "cpu"), *(place for place in PLACES if place.values[1] == "gpus")])
def test_a_failure_names_the_rank(world: int, device: str, how: str) -> None:
    """The other ranks wait for the timeout and raise; nothing hangs."""
    run_ranks(_fail, world, device, how, killed=(1,) if how == "rank ends" else ())


def _replay(rank: int, world: int, device: torch.device, replays: int = 10000) -> None:
    """Graphs of several calls, whose replays start at different times on the ranks."""
    workspace = _workspace(device, 64, 4096)
    inputs = [torch.zeros(tokens, 4096, dtype=BF16, device=device) for tokens in (1, 64, 7, 300)]
    step, wrong = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def calls() -> None:
        step.add_(1)
        for index, x in enumerate(inputs):
            x.copy_(((step + index) % 50 + rank).to(BF16).expand_as(x))
            result = comm.allreduce_fusion(x, workspace, 0, use_oneshot=index != 2)
            wrong.add_((result != ((step + index) % 50) * world + sum(range(world))).any())

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    pauses = torch.Generator().manual_seed(rank)
    for _ in range(replays):
        if torch.rand((), generator=pauses) < 0.1:
            torch.cuda._sleep(int(torch.randint(0, 100000, (), generator=pauses)))
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0 and step.item() == replays + 1
    workspace.destroy()


@pytest.mark.gpu
@pytest.mark.multigpu
def test_ten_thousand_graph_replays_with_skew() -> None:
    """No result is wrong and no replay waits for ever."""
    run_ranks(_replay, 2, "gpus")
