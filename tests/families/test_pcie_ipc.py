"""The all-reduce with FlashInfer's names for GPUs on PCIe, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from families.ranks import run_ranks
from fi_core import comm

PLACES = [
    pytest.param(2, "cpu"),
    pytest.param(2, "one gpu", marks=pytest.mark.gpu),
    pytest.param(2, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
    pytest.param(8, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]),
]
BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_all_reduce(world: int, device: str) -> None:
    run_ranks(_check_sums, world, device)
    run_ranks(_check_refusals, world, device)


def workspace(device: torch.device, numel: int, **options: Any) -> comm.PcieIpcAllReduceWorkspace:
    assert dist.group.WORLD is not None
    return comm.PcieIpcAllReduceWorkspace(dist.group.WORLD, numel, device=device, timeout=20.0, **options)


def _check_sums(rank: int, world: int, device: torch.device) -> None:
    """Both forms, in bf16 and fp16; small integers have exact sums. Calls after prepare and tune are the same."""
    with workspace(device, 1 << 20, max_blocks=16, tune_batches=[1, 4]) as shared:
        assert (shared.rank, shared.world_size) == (rank, world)
        configs = shared.tune([512, 1024], tune_group=dist.group.WORLD)
        assert set(configs) == {(hidden, batch) for hidden in (512, 1024) for batch in (1, 4)}
        assert shared.prepare([(3, 64), (4096, 4096)], dtype=F16)[4096, 4096] is None
        for shape, dtype in (((3, 64), BF16), ((8,), F16), ((1024, 1024), BF16), ((700, 1024), F16)):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randint(0, 16, shape, generator=generator).to(device, dtype)
            total = x.cpu().double()
            dist.all_reduce(total)
            out = torch.empty_like(x)
            config = shared.launch_config(x)
            assert shared.supports(x)
            assert config == shared.tuned_launch_config(x)
            assert shared.all_reduce(x, out=out, config=config) is out
            assert torch.equal(out.cpu().double(), total)
            assert torch.equal(shared.all_reduce(x), out)
    with pytest.raises(RuntimeError, match="handle: the workspace has been destroyed"):
        shared.handle.bit_length()
    assert not shared.supports(x)
    shared.destroy()


def _check_refusals(rank: int, world: int, device: torch.device) -> None:
    shared = workspace(device, 64)
    x = torch.ones(8, 8, dtype=BF16, device=device)
    for other in (x.float(), x.mT[:, :4], x.view(-1)[:7], torch.ones(9, 8, dtype=BF16, device=device), x[:0]):
        assert not shared.supports(other)
    for call, words in (
        (lambda: shared.all_reduce(x.float()), "inp must be a tensor that supports.. accepts; got torch.float32"),
        (lambda: shared.all_reduce(x, config=comm.PcieIpcLaunchConfig(1, 32, 5)), "config must be PcieIpcLaunchConfig"),
        (lambda: shared.supports(x.to("meta")), "inp must be on the device of the workspace"),
        (lambda: shared.tune([128]), "hiddens must have a size of which max_numel, 64, holds a row"),
        (lambda: workspace(device, 63), "max_numel must be a positive multiple of 8; got 63"),
        (lambda: workspace(device, 64, max_blocks=0), "max_blocks must be positive; got 0"),
        (
            lambda: workspace(device, 64, profile="fabric"),
            "profile must be 'rootcplx', 'rootcplx-noswitch', 'pcieswitch'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"dtype must be torch\.bfloat16 or torch\.float16; got torch\.float32"):
        workspace(device, 64, dtype=torch.float32)
    if device.type == "cuda":
        shared.all_reduce(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            with pytest.raises(RuntimeError, match="a workspace serves one stream"):
                shared.all_reduce(x)
            shared.rebind_stream()
            assert (shared.all_reduce(x) == world).all()
            torch.cuda.synchronize()
    shared.destroy()
