"""run_mixed_comm: all-reduce over one axis of a grid of ranks, all-gather or reduce-scatter over the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from families.ranks import run_ranks
from fi_core.comm.mixed_comm import MixedCommHandler, MixedCommMode, MixedCommOp, ParallelInfo, run_mixed_comm

PLACES = [
    pytest.param("cpu"), pytest.param("one gpu", marks=pytest.mark.gpu),
]  # fmt: skip
Op, Mode = MixedCommOp, MixedCommMode


def test_places_of_ranks() -> None:
    """Two hosts of four: tp 2 in a host and 2 across, dp 2 in a host."""
    info = ParallelInfo(6, 8, 2, 4, 1, 2, 2, None, None, None)
    assert (info.local_tp_size, info.local_dp_size, info.inter_tp_size, info.inter_dp_size) == (2, 2, 2, 1)
    assert (info.tp_rank, info.tp_size, info.dp_rank, info.dp_size) == (2, 4, 1, 2)
    assert info.groups(0) == [[0, 1, 4, 5], [2, 3, 6, 7]] and info.groups(1) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(ValueError, match=r"local_tp_size \* local_dp_size must be local_size = 4; got 3 \* 1"):
        ParallelInfo(6, 8, 2, 4, 1, 2, 3, None, None, None)
    with pytest.raises(ValueError, match=r"world_rank must be inter_rank \* local_size \+ local_rank = 6; got 5"):
        ParallelInfo(5, 8, 2, 4, 1, 2, 2, None, None, None)


@pytest.mark.parametrize("device", PLACES)
def test_grid_of_both(device: str) -> None:
    run_ranks(_check, 4, device, 2, 2)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_one_axis(tp: int, dp: int) -> None:
    run_ranks(_check, 2, "cpu", tp, dp)


def handler_of(rank: int, world: int, device: torch.device, tp: int, dp: int, **options: Any) -> MixedCommHandler:
    dtype = options.pop("dtype", torch.bfloat16)
    return MixedCommHandler(rank, world, rank, world, 0, 1, tp, dp, None, None, dtype, device, **options)


def inputs(world: int, shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(world)]


def _check(rank: int, world: int, device: torch.device, tp: int, dp: int) -> None:
    """Every op in every mode, against sums in fp64 of what all ranks draw."""
    handler = handler_of(rank, world, device, tp, dp)
    place = {r: (r % tp, r // tp) for r in range(world)}
    xs = inputs(world, (2 * dp, 24), device)
    by_dp = [sum(xs[r].double() for r in range(world) if place[r][1] == d) for d in range(dp)]
    part = slice(2 * place[rank][1], 2 * place[rank][1] + 2)
    gathered, scattered = torch.cat(by_dp), sum(x.double() for x in xs)[part]
    want = {Op.ALLREDUCE: gathered, Op.ALLGATHER: gathered, Op.ALLREDUCE_ALLGATHER: gathered,
            Op.REDUCESCATTER: scattered, Op.REDUCESCATTER_ALLREDUCE: scattered}  # fmt: skip
    bound = sum(x.double().abs().max() for x in xs) * 2**-8 * world  # each sum is rounded to bf16
    for op in handler.get_valid_op_list():
        for mode in (*handler.get_valid_mode_list(), None):
            out = torch.full(want[op].shape, torch.nan, dtype=torch.bfloat16, device=device)
            assert run_mixed_comm(op, handler, xs[rank], out, mode) is out
            assert (out.double() - want[op]).abs().max() <= bound
            assert run_mixed_comm(op, handler, xs[rank], mode=mode).shape == want[op].shape
    valid = handler.get_valid_op_list()
    other = next(op for op in Op if op not in valid)
    long = torch.zeros(3, 24, dtype=torch.bfloat16, device=device)
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (other, xs[rank], {}, "op must be one of"),
        (valid[0], xs[rank], {"mode": Mode.FUSED_OPT_WAITS_MC}, "mode must be one of"),
        (valid[0], xs[rank].float(), {}, "x_in must be torch.bfloat16 of two or more dimensions"),
        (valid[0], xs[rank], {"x_out": long[:, 1:]}, "x_out must be torch.bfloat16 of shape"),
    ]  # fmt: skip
    if dp > 1:
        wrong.append((valid[1], long, {}, f"x_in must have a multiple of dp_size = {dp} rows"))
    for op, x, options, words in wrong:
        with pytest.raises(ValueError, match=words):
            run_mixed_comm(op, handler, x, **options)
    with pytest.raises(TypeError, match="dtype must be float16 or bfloat16"):
        handler_of(rank, world, device, tp, dp, dtype=torch.float32)
    untuned = handler_of(rank, world, device, tp, dp, use_autotune=False)
    assert Mode.AUTOTUNE not in untuned.get_valid_mode_list()
    assert torch.equal(run_mixed_comm(valid[0], untuned, xs[rank]).isfinite().all().cpu(), torch.tensor(True))
    dist.barrier()
    untuned.shutdown()
    untuned.shutdown()
