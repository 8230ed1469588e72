"""Sampling in CUDA graphs: seeds on the device, and new tokens from the generator in each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.harness import impls, using
from families.sampling_reference import normal_logits
from fi_core.sampling import sample_from_logits
from fi_core.sampling.ops import sample

REPLAYS, ROWS, TOKENS = 1000, 64, 16
CALLS: dict[str, Callable[..., Any]] = {
    "logits": lambda probs, **r: fi_core.sampling_from_logits(probs.log(), **r),
    "probs": lambda probs, **r: fi_core.sampling_from_probs(probs, **r),
    "min_p": lambda probs, **r: fi_core.min_p_sampling_from_probs(probs, 0.5, **r),
    "top_p": lambda probs, **r: fi_core.top_p_sampling_from_probs(probs, 0.99, **r),
    "top_k": lambda probs, **r: fi_core.top_k_sampling_from_probs(probs, TOKENS, **r),
    "both": lambda probs, **r: fi_core.top_k_top_p_sampling_from_probs(probs, TOKENS, 0.99, **r),
    "both_logits": lambda probs, **r: fi_core.top_k_top_p_sampling_from_logits(probs.log(), TOKENS, 0.99, **r),
    "step": lambda probs, **r: sample_from_logits(probs.log(), temperature=0.7, **r)[0],
    "chain": lambda probs, **r: fi_core.chain_speculative_sampling(
        probs.new_empty(ROWS, 0, TOKENS), probs.new_empty(ROWS, 0, dtype=torch.int32), probs[:, None], **r
    )[0][:, 0],
}


def assert_independent(first: torch.Tensor, second: torch.Tensor) -> None:
    """Pearson's chi-squared of pairs of tokens: each pair is equally likely (six sigma)."""
    counts = torch.bincount((first.flatten() * TOKENS + second.flatten()).long(), minlength=TOKENS**2).double()
    mean, degrees = first.numel() / TOKENS**2, TOKENS**2 - 1
    chi_squared = float(((counts - mean) ** 2 / mean).sum())
    assert abs(chi_squared - degrees) < 6 * (2 * degrees) ** 0.5, chi_squared


@pytest.mark.gpu
@pytest.mark.parametrize("explicit", [False, True], ids=["default", "registered"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_replay_draws_anew(name: str, explicit: bool) -> None:
    """Tokens are uniform and independent over replays, rows and the calls of a graph; a seed repeats them."""
    generator = torch.Generator(device="cuda") if explicit else None
    source = {"generator": generator} if explicit else {}
    probs = torch.full((ROWS, TOKENS), 1 / TOKENS, device="cuda")
    CALLS[name](probs, **source)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        tokens = [CALLS[name](probs, **source) for _ in range(2)]
    torch.cuda.synchronize()  # torch writes the seed known at capture on the stream of the capture, without waiting

    def replays(count: int) -> torch.Tensor:
        (generator or torch.cuda.default_generators[torch.cuda.current_device()]).manual_seed(11)
        history = torch.empty(count, 2, ROWS, dtype=torch.int32, device="cuda")
        for row in history:
            graph.replay()
            torch.stack(tokens, out=row)
        return history

    drawn = replays(REPLAYS)
    assert_independent(drawn[1:], drawn[:-1])
    assert_independent(drawn[:, 0], drawn[:, 1])
    assert_independent(drawn[..., 1:], drawn[..., :-1])
    assert torch.equal(replays(3), drawn[:3])


@pytest.mark.gpu
def test_a_generator_must_be_registered() -> None:
    probs = torch.full((ROWS, TOKENS), 1 / TOKENS, device="cuda")
    generator = torch.Generator(device="cuda")
    fi_core.sampling_from_probs(probs, generator=generator)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        copy = probs.clone()  # a graph must not be empty
        with pytest.raises(ValueError, match="register_generator_state"):
            fi_core.sampling_from_probs(copy, generator=generator)


def test_a_seed_on_the_device_takes_the_offset_as_a_number(device: str) -> None:
    """What a captured call passes to the kernel: one seed for all rows, of which each draws on its own."""
    x = normal_logits(1, 5000, device).softmax(-1).expand(64, -1).contiguous()
    out = [torch.empty(64, dtype=torch.int32, device=device) for _ in range(2)]
    for impl in impls("sample", device):
        with using("sample", impl):
            sample(out[0], x, seed=torch.tensor([9], device=device))
            sample(out[1], x, seed_value=9)
        assert torch.equal(*out) and out[0].unique().numel() > 40


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cluster", "cuda"])
def test_graphs_read_seeds_on_the_device(impl: str) -> None:
    if impl not in impls("sample", "cuda"):
        pytest.skip(f"{impl} does not run on this device")
    x = normal_logits(5, 128256, "cuda", scale=2.0)
    seed, offset = torch.zeros(5, dtype=torch.int64, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda")
    p = torch.full((5,), 0.9, device="cuda")
    with using("sample", impl):
        sample_from_logits(x, seed=seed, offset=offset, top_p=p)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            tokens, valid = sample_from_logits(x, seed=seed, offset=offset, top_p=p)
        for step in range(4):
            seed.fill_(step)
            offset.copy_(torch.arange(5) * step)
            p.fill_(0.5 + 0.1 * step)
            graph.replay()
            want, _ = sample_from_logits(x, seed=seed.clone(), offset=offset.clone(), top_p=p.clone())
            assert torch.equal(tokens, want) and bool(valid.all())
