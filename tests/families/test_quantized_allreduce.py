"""All-reduce with an e4m3 payload, on several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from families.ranks import run_ranks
from fi_core.comm.quantized_allreduce import quantized_all_reduce

PLACES = [
    pytest.param(2, "cpu"),
    pytest.param(2, "one gpu", marks=pytest.mark.gpu),
    pytest.param(4, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
]
BF16 = torch.bfloat16


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_sums(world: int, device: str) -> None:
    run_ranks(_check, world, device)


def _gather(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.cpu())
    return found


def _check(rank: int, world: int, device: torch.device) -> None:
    """Small integers of which each group holds the largest are exact; others are within two steps of e4m3."""
    group = dist.group.WORLD
    assert group is not None
    for shape, scale_group in (((64, 1024), 256), ((5, 8), 256), ((1000,), 16), ((8,), 256)):
        generator = torch.Generator().manual_seed(rank)
        x = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) * 8).to(device, BF16)
        out = torch.empty_like(x)
        assert quantized_all_reduce(x, group, scale_group=scale_group, output=out) is out
        parts = torch.stack([part.double().view(-1) for part in _gather(x)])
        total, own = parts.sum(0), out.cpu().double().view(-1)
        first = parts.abs().sum(0) / 16 + parts.abs().amax() * 2**-9  # of what is sent
        bound = first + (total.abs() + first) / 16 + (total.abs().amax() * 2**-9) + total.abs() * 2**-8
        assert ((own - total).abs() <= bound).all()
        assert all(torch.equal(part, out.cpu()) for part in _gather(out))
    if world == 2:
        x = torch.randint(0, 8, (3, 256), generator=torch.Generator().manual_seed(rank)).to(device, BF16)
        x[:, ::16] = 7
        total = torch.stack(_gather(x)).sum(0)
        assert torch.equal(quantized_all_reduce(x, group, scale_group=16).cpu(), total)
    assert quantized_all_reduce(x[:0], group).shape == (0, *x.shape[1:])
    for wrong, words in (
        ({"inp": x.float()}, "inp must be bfloat16, contiguous and a multiple of 8 elements; got torch.float32"),
        ({"inp": x.reshape(-1)[:7]}, "inp must be bfloat16, contiguous and a multiple of 8 elements"),
        ({"inp": x, "scale_group": 0}, "scale_group must be positive; got 0"),
        ({"inp": x, "output": x.float()}, "output must be torch.bfloat16 of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            quantized_all_reduce(group=group, **wrong)  # type: ignore[arg-type]
