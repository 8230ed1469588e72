"""Times the collectives of fi_core.comm beside NCCL and torch's symmetric memory, on the GPUs of a host.

torchrun --nproc-per-node 2 -m fi_bench.collectives [--only TEXT] [--dtypes bfloat16,float32] [--forms] [--layers]
    [--json FILE]

--forms adds all-reduce in one shot and in two; --layers adds layers of DeepSeek-V3's fp8 experts, spread over the
ranks: dispatch, experts, combine. Of cases in another dtype than bf16 the name ends with it.

The time of a call is the median over replays of a CUDA graph of 20 calls, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OPS = ("all_to_all",)  # of fi_core; it has no case
_SIZES = ((1, 4096), (8, 4096), (32, 7168), (128, 7168), (512, 7168), (2048, 8192), (8192, 8192))
_MOE_TOKENS = (1, 16, 128, 1024)
_LAYER_TOKENS = (8, 128, 1024, 4096, 8192)
_CALLS, _REPLAYS = 20, 15

Routine = tuple[str, str, Callable[[], Any]]  # case, provider, call


def microseconds(call: Callable[[], Any]) -> float:
    """The time of a call; collective."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    times = []
    for _ in range(_REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _shots(case: str, x: torch.Tensor, workspace: Any) -> Iterator[Routine]:
    """Both forms of all-reduce, whatever the size of the message."""
    from fi_core import comm

    out = torch.empty_like(x)
    yield case, "fi, one shot", lambda: comm.allreduce_fusion(x, workspace, 0, output=out, use_oneshot=True)
    yield case, "fi, two shot", lambda: comm.allreduce_fusion(x, workspace, 0, output=out, use_oneshot=False)


def _sums(tokens: int, hidden: int, dtype: torch.dtype, forms: bool) -> Iterator[Routine]:
    """All-reduce alone, and with a residual and a norm, in another dtype than bf16."""
    from fi_core import comm

    workspace = comm.create_allreduce_fusion_workspace(max_token_num=tokens, hidden_dim=hidden, dtype=dtype)
    x, residual, out, normed = (torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(4))
    weight = torch.rand(hidden, device="cuda").to(dtype)
    name = f"{tokens}x{hidden} {str(dtype).removeprefix('torch.')}"
    yield f"all_reduce {name}", "fi", lambda: comm.allreduce_fusion(x, workspace, 0, output=out)
    yield f"all_reduce {name}", "nccl", lambda: dist.all_reduce(out)
    if forms:
        yield from _shots(f"all_reduce {name}", x, workspace)
    after: dict[str, Any] = {"residual_in": residual, "residual_out": out, "norm_out": normed, "rms_gamma": weight}
    case = f"all_reduce + add + rmsnorm {name}"
    yield case, "fi", lambda: comm.allreduce_fusion(x, workspace, 1, **after)
    workspace.destroy()


def _reductions(tokens: int, hidden: int, forms: bool) -> Iterator[Routine]:
    from torch.distributed import _symmetric_memory as symmetric

    from fi_core import comm

    workspace = comm.create_allreduce_fusion_workspace(max_token_num=tokens, hidden_dim=hidden, dtype=torch.bfloat16)
    x, residual = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, normed = torch.empty_like(x), torch.empty_like(x)
    weight = torch.rand(hidden, device="cuda", dtype=torch.bfloat16)
    case = f"all_reduce {tokens}x{hidden}"
    yield case, "fi", lambda: comm.allreduce_fusion(x, workspace, 0, output=out)
    yield case, "nccl", lambda: dist.all_reduce(out)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    shared = symmetric.empty(x.numel(), device=x.device, dtype=x.dtype)
    symmetric.rendezvous(shared, group)
    shared.zero_()
    ops = torch.ops.symm_mem
    yield case, "symm one-shot", lambda: ops.one_shot_all_reduce_out(shared, "sum", group, out.view(-1))
    yield case, "symm two-shot", lambda: ops.two_shot_all_reduce_(shared, "sum", group)
    if forms:
        yield from _shots(case, x, workspace)
    case = f"all_reduce + add + rmsnorm {tokens}x{hidden}"
    fused: dict[str, Any] = {"residual_in": residual, "residual_out": out, "norm_out": normed, "rms_gamma": weight}
    yield case, "fi", lambda: comm.allreduce_fusion(x, workspace, 1, **fused)

    def nccl_and_torch() -> None:
        dist.all_reduce(out)
        residual.add_(out)
        torch.nn.functional.rms_norm(residual, (hidden,), weight, 1e-6)

    yield case, "nccl + torch", nccl_and_torch
    quantized = torch.empty(tokens, hidden, device="cuda", dtype=torch.float8_e4m3fn)
    scales = torch.empty(tokens, 1, device="cuda")
    packed = torch.empty(hidden // 512, -(-tokens // 4) * 4, device="cuda", dtype=torch.int32)[:, :tokens].t()
    case = f"all_reduce + add + rmsnorm + fp8 {tokens}x{hidden}"
    given: dict[str, Any] = {**fused, "norm_out": None, "quant_out": quantized}
    yield case, "fi, a scale", lambda: comm.allreduce_fusion(x, workspace, 2, **given)
    yield case, "fi, rows", lambda: comm.allreduce_fusion(x, workspace, 10, scale_out=scales, **given)
    yield case, "fi, groups", lambda: comm.allreduce_fusion(x, workspace, 8, scale_out=packed, **given)
    top_k = 8
    rows = torch.randn(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
    positions = torch.randperm(tokens * top_k, device="cuda").int().view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device="cuda")
    experts: dict[str, Any] = {
        "expanded_idx_to_permuted_idx": positions,
        "expert_scale_factor": weights,
        "shared_expert_output": x,
    }
    case = f"finalize of {top_k} experts + all_reduce + add + rmsnorm {tokens}x{hidden}"
    yield case, "fi", lambda: comm.allreduce_fusion(rows, workspace, 7, **fused, **experts)

    def torch_and_nccl() -> None:
        torch.sum(rows[positions] * weights[..., None].to(rows.dtype), 1, out=out)
        out.add_(x)
        nccl_and_torch()

    yield case, "torch + nccl", torch_and_nccl
    workspace.destroy()


def _slices(tokens: int, hidden: int) -> Iterator[Routine]:
    """Sequence parallelism: reduce-scatter, the norm of a slice, all-gather."""
    from fi_core import comm

    world, device = dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    workspace = comm.create_allreduce_fusion_workspace(max_token_num=tokens, hidden_dim=hidden, dtype=torch.bfloat16)
    gathering = comm.AllToAllWorkspace(device, comm.TorchDistBackend())
    x, out = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    residual, own, normed = (
        torch.randn(tokens // world, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    weight = torch.rand(hidden, device="cuda", dtype=torch.bfloat16)
    given: dict[str, Any] = {"residual_in": residual, "residual_out": residual, "norm_out": normed, "rms_gamma": weight}

    def scatter_norm_gather() -> None:
        comm.reduce_scatter_fusion(x, workspace, 1, **given)
        gathering.all_gather(normed, out.view(world, -1, hidden))

    def of_nccl() -> None:
        dist.reduce_scatter_tensor(own, x)
        residual.add_(own)
        dist.all_gather_into_tensor(out, torch.nn.functional.rms_norm(residual, (hidden,), weight, 1e-6))

    shape = f"{tokens}x{hidden}"
    yield f"reduce_scatter {shape}", "fi", lambda: comm.reduce_scatter_fusion(x, workspace, output=own)
    yield f"reduce_scatter {shape}", "nccl", lambda: dist.reduce_scatter_tensor(own, x)
    yield f"all_gather {shape}", "fi", lambda: gathering.all_gather(own, out.view(world, -1, hidden))
    yield f"all_gather {shape}", "nccl", lambda: dist.all_gather_into_tensor(out, own)
    yield f"reduce_scatter + add + rmsnorm + all_gather {shape}", "fi", scatter_norm_gather
    yield f"reduce_scatter + add + rmsnorm + all_gather {shape}", "nccl + torch", of_nccl
    gathering.destroy()
    workspace.destroy()


def _all_to_all(tokens: int, hidden: int) -> Iterator[Routine]:
    from fi_core import comm

    workspace = comm.AllToAllWorkspace(torch.device("cuda", torch.cuda.current_device()), comm.TorchDistBackend())
    x = torch.randn(
        dist.get_world_size(), tokens * hidden // dist.get_world_size(), device="cuda", dtype=torch.bfloat16
    )
    out = torch.empty_like(x)
    yield f"all_to_all {tokens}x{hidden}", "fi", lambda: workspace.all_to_all(x, out)
    yield f"all_to_all {tokens}x{hidden}", "nccl", lambda: dist.all_to_all_single(out, x)
    workspace.destroy()


def _experts(tokens: int) -> Iterator[Routine]:
    from fi_core import comm

    hidden, top_k, experts, world = 7168, 8, 128, dist.get_world_size()
    mapping = comm.Mapping(world, dist.get_rank(), tp_size=world, moe_ep_size=world)
    exchange = comm.MoeAlltoAll(mapping, tokens, top_k, experts, hidden_size=hidden)
    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    padded = torch.randn(world, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    received = torch.empty_like(padded)

    def dispatch_and_combine() -> None:
        exchange.dispatch(chosen, [x, chosen], tokens)
        results = exchange.get_combine_payload_tensor_in_workspace(tokens, hidden, x.dtype)
        exchange.combine(results, tokens, payload_in_workspace=True, output=out)

    def two_all_to_alls() -> None:
        dist.all_to_all_single(received, padded)
        dist.all_to_all_single(padded, received)

    yield f"moe dispatch + combine {tokens}x{hidden}", "fi", dispatch_and_combine
    yield f"moe dispatch + combine {tokens}x{hidden}", "nccl, padded", two_all_to_alls
    exchange.destroy()


def _layer(tokens: int) -> Iterator[Routine]:
    """A layer of DeepSeek-V3's experts in fp8 blocks over the ranks, and its exchange alone."""
    from fi_core import comm
    from fi_core.fused_moe import cutlass_fused_moe

    hidden, width, top_k, experts = 7168, 2048, 8, 256
    rank, world = dist.get_rank(), dist.get_world_size()
    mapping = comm.Mapping(world, rank, tp_size=world, moe_ep_size=world)
    exchange = comm.MoeAlltoAll(mapping, tokens, top_k, experts, hidden_size=hidden)

    def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.full((experts // world, rows // 128, columns // 128), columns**-0.5, device="cuda")
        return drawn.expand(experts // world, rows, columns).contiguous(), scales

    (up, up_scales), (down, down_scales) = weights(2 * width, hidden), weights(hidden, width)
    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    share = torch.rand(tokens, top_k, device="cuda")
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def exchanged(computes: bool) -> None:
        received, ids, shares = exchange.dispatch(
            chosen, [x, chosen, share], tokens, invalid_token_expert_id=-1, expert_id_payload_index=1
        )
        results = exchange.get_combine_payload_tensor_in_workspace(tokens, hidden, x.dtype)
        if computes:
            cutlass_fused_moe(
                received.view(-1, hidden),
                ids.view(-1, top_k),
                shares.view(-1, top_k),
                up,
                down,
                x.dtype,
                quant_scales=[up_scales, down_scales],
                ep_size=world,
                ep_rank=rank,
                output=results.view(-1, hidden),
                use_deepseek_fp8_block_scale=True,
            )
        exchange.combine(results, tokens, payload_in_workspace=True, output=out)

    shape = f"{tokens}x{hidden}, 256 experts"
    yield f"moe dispatch + combine {shape}", "fi", lambda: exchanged(False)
    yield f"moe dispatch + fp8 experts + combine {shape}", "fi", lambda: exchanged(True)
    exchange.destroy()


def warm_up(seconds: float = 2.0) -> None:
    """Computes until the clocks are up: calls in the first seconds take 10 to 30 % longer (H200)."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.mm(x, x)
        torch.cuda.synchronize()


def routines(dtypes: tuple[torch.dtype, ...], forms: bool, layers: bool) -> Iterator[Routine]:
    """Every case, in an order that is the same on all ranks."""
    for dtype in dtypes:
        for tokens, hidden in _SIZES if dtype is not torch.bfloat16 else ():
            yield from _sums(tokens, hidden, dtype, forms)
    for tokens, hidden in _SIZES if torch.bfloat16 in dtypes else ():
        yield from _reductions(tokens, hidden, forms)
        yield from _all_to_all(tokens, hidden)
        if tokens % dist.get_world_size() == 0:
            yield from _slices(tokens, hidden)
    for tokens in _MOE_TOKENS:
        yield from _experts(tokens)
    for tokens in _LAYER_TOKENS if layers else ():
        yield from _layer(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(prog="fi_bench.collectives", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each case and provider")
    parser.add_argument("--dtypes", default="bfloat16", help="of all-reduce, comma separated")
    parser.add_argument("--forms", action="store_true", help="also all-reduce in one shot and in two")
    parser.add_argument("--layers", action="store_true", help="also layers of fp8 experts over the ranks")
    options = parser.parse_args()
    dtypes = tuple(getattr(torch, name) for name in options.dtypes.split(","))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    warm_up()
    rows = []
    for case, provider, call in routines(dtypes, options.forms, options.layers):
        if options.only not in case:
            continue
        row = {"case": case, "provider": provider, "ranks": dist.get_world_size(), "us": round(microseconds(call), 2)}
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"{row['us']:9.2f} us  {case}  {provider}", flush=True)
    if options.json and dist.get_rank() == 0:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
