"""Tensor parallelism with batch invariance: a row-parallel product has the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch

import fi_core
from families.ranks import run_ranks
from fi_core import comm

PARTS, TOKENS, N, K = 4, 17, 64, 512
ALL_REDUCE = comm.AllReduceFusionPattern.kAllReduce


def row_parallel(x: torch.Tensor, weight: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """`x @ weight.T` in fp32 of k columns that are shared out: this rank's, in PARTS / world parts, and the others'.

    An all-reduce of all parts brings each part as it is, since the other ranks add zeros; their sum has one order.
    """
    parts = torch.zeros(PARTS, len(x), len(weight), device=x.device)
    own = PARTS // world
    for i, (a, b) in enumerate(zip(x.chunk(own, 1), weight.chunk(own, 1))):
        parts[rank * own + i] = fi_core.mm_bf16(a.contiguous(), b.contiguous().T, out_dtype=torch.float32)
    if world > 1:
        flat = parts.view(PARTS * len(x), len(weight))
        workspace = comm.create_allreduce_fusion_workspace(
            max_token_num=len(flat), hidden_dim=len(weight), dtype=torch.float32, device=x.device
        )
        parts = comm.allreduce_fusion(flat, workspace, ALL_REDUCE).view_as(parts)
        workspace.destroy()
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _compare(rank: int, world: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, K, generator=generator).bfloat16().to(device) for rows in (TOKENS, N))
    x[0] = 0.0
    columns = slice(rank * K // world, (rank + 1) * K // world)
    with fi_core.batch_invariant():
        alone = row_parallel(x, weight, 0, 1)
        shared = row_parallel(x[:, columns], weight[:, columns], rank, world)
        row = row_parallel(x[2:3, columns], weight[:, columns], rank, world)
    assert torch.equal(alone.view(torch.int32), shared.view(torch.int32))
    assert torch.equal(row.view(torch.int32), shared[2:3].view(torch.int32)), "alone and in a batch"
    torch.testing.assert_close(alone.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)
    whole = fi_core.mm_bf16(x, weight.T, out_dtype=torch.float32)
    assert not torch.equal(whole, alone), "a product of all k has other bits"


@pytest.mark.parametrize(
    ("world", "device"),
    [
        (2, "cpu"),
        (4, "cpu"),
        pytest.param(2, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
        pytest.param(4, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
    ],
)
def test_a_row_parallel_product_has_the_bits_of_one_rank(world: int, device: str) -> None:
    run_ranks(_compare, world, device)
