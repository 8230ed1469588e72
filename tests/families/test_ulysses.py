"""Exchanges of context parallelism: shards of sequence and heads, and merged partial attention, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from families.harness import assert_close
from families.ranks import run_ranks
from fi_core import comm

PLACES = [
    pytest.param(4, "cpu"),
    pytest.param(2, "one gpu", marks=pytest.mark.gpu),
    pytest.param(4, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
]
BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_exchanges(world: int, device: str) -> None:
    run_ranks(_check_exchanges, world, device)


def _check_exchanges(rank: int, world: int, device: torch.device) -> None:
    for backend in ("auto", "nvlink", "nccl") if device.type == "cpu" else ("auto", "nvlink"):
        for dtype, width in ((BF16, 64), (F32, 3)):  # rows of any bytes
            _check_heads(rank, world, device, backend, dtype, width)
    _check_refusals(world, device)
    if device.type == "cuda" or not torch.cuda.is_available():
        _check_merge(rank, world, device)


def _check_heads(rank: int, world: int, device: torch.device, backend: str, dtype: torch.dtype, width: int) -> None:
    """Every rank knows the whole tensor, so that it knows its part of it."""
    batch, length, heads = 2, 5, 3
    whole = torch.randn(batch, world * length, world * heads, width, generator=torch.Generator().manual_seed(width))
    whole = whole.to(device, dtype)
    tokens = whole[:, rank * length : (rank + 1) * length].contiguous()
    own = whole[:, :, rank * heads : (rank + 1) * heads].contiguous()
    options: dict[str, Any] = {"max_elems": 3 * tokens.numel(), "dtype": dtype, "device": device}
    with comm.UlyssesCommunicator(backend=backend, **options) as ulysses:
        assert ulysses.backend == ("nccl" if backend == "nccl" else "nvlink")
        assert ulysses.fallback_reason is None
        room = ulysses.create_workspace()
        for workspace in (None, room):
            assert torch.equal(ulysses.scatter_heads(tokens, workspace=workspace), own)
            assert torch.equal(ulysses.gather_heads(own, workspace=workspace), tokens)
        out = torch.empty_like(own)
        assert ulysses.scatter_heads(tokens, out=out) is out
        assert torch.equal(out, own)
        merged = torch.zeros_like(tokens)
        for offset, count in ((0, 2), (2, 1)):
            band = {"head_offset": offset, "head_count": count}
            qkv = ulysses.scatter_qkv_head_chunk(tokens, 2 * tokens, 3 * tokens, **band)
            part = own[:, :, offset : offset + count]
            assert torch.equal(qkv, torch.cat([part, 2 * part, 3 * part], -1))
            ulysses.gather_output_head_chunk(part.contiguous(), local_heads=heads, head_offset=offset, out=merged)
        assert torch.equal(merged, tokens)
    with pytest.raises(RuntimeError, match="the communicator has been closed"):
        ulysses.scatter_heads(tokens)


def _check_refusals(world: int, device: torch.device) -> None:
    ulysses = comm.UlyssesCommunicator(max_elems=64 * world, dtype=BF16, device=device)
    x = torch.zeros(1, 1, world, 8, dtype=BF16, device=device)
    for wrong, words in (
        (x.float(), "x must be a contiguous tensor of torch.bfloat16 and 4 dimensions"),
        (x[..., :0], "x must have 1 to max_elems"),
        (torch.zeros(1, 9, world, 8, dtype=BF16, device=device), "x must have 1 to max_elems"),
        (torch.zeros(1, 1, world + 1, 4, dtype=BF16, device=device), f"x must have heads that {world} ranks share"),
    ):
        with pytest.raises(ValueError, match=words):
            ulysses.scatter_heads(wrong)
    with pytest.raises(ValueError, match="out must be a contiguous tensor"):
        ulysses.scatter_heads(x, out=x[..., :4])
    with pytest.raises(ValueError, match="backend must be 'auto', 'nvlink' or 'nccl'; got 'ring'"):
        comm.UlyssesCommunicator(max_elems=64, dtype=BF16, backend="ring")
    with pytest.raises(ValueError, match="max_elems must be an integer"):
        comm.UlyssesWorkspace(max_elems=0, dtype=BF16)
    ulysses.close()


def _check_merge(rank: int, world: int, device: torch.device) -> None:
    """The sum weighted by the softmax of the lse, in either base; rows without keys do not count."""
    generator = torch.Generator().manual_seed(rank)
    o = torch.randn(3, 2, world, 64, generator=generator)
    lse = torch.randn(3, 2, world, generator=generator) * 4
    lse[0] = -torch.inf if rank else lse[0]
    lse[1, 0] = -torch.inf
    o[1, 0] = torch.nan
    workspace = comm.decode_cp_a2a_lse_reduce_create_workspace(3, 2, world, 64, BF16, dist.group.WORLD)
    every_o, every_lse = ([torch.empty_like(x) for _ in range(world)] for x in (o, lse))
    dist.all_gather(every_o, o)
    dist.all_gather(every_lse, lse)
    mine = torch.stack([x[:, :, rank].to(BF16) for x in every_o]).double()
    logarithms = torch.stack([x[:, :, rank] for x in every_lse]).double()
    given = o.to(device, BF16), lse.to(device), workspace, rank, world
    for mode, base in (("base2", 2.0), ("basee", torch.e)):
        weights = base ** (logarithms - logarithms.amax(0))
        weights = (weights / weights.sum(0)).nan_to_num(0.0)
        want = torch.where(weights.unsqueeze(-1) > 0, mine * weights.unsqueeze(-1), 0.0).sum(0)
        got = comm.decode_cp_a2a_lse_reduce(*given, lse_mode=mode)
        assert got.dtype is BF16
        assert (got[1, 0] == 0).all()
        assert_close(got, want)
    with pytest.raises(ValueError, match="lse_mode must be 'base2' or 'basee'; got 'base10'"):
        comm.decode_cp_a2a_lse_reduce(*given, lse_mode="base10")
    with pytest.raises(ValueError, match="partial_lse must have shape"):
        comm.decode_cp_a2a_lse_reduce(given[0], given[1][..., :1], *given[2:])
    with pytest.raises(ValueError, match=f"cp_size must be that of the group, {world}; got {world + 1}"):
        comm.decode_cp_a2a_lse_reduce_create_workspace(3, 2, world + 1, 64, BF16, dist.group.WORLD)
