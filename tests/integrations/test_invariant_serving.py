"""Batch-invariant serving: a request has the same tokens and logits, bit by bit, in any order of arrival."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serving

pytestmark = pytest.mark.filterwarnings("ignore")
REQUESTS, NEW, ARRIVALS = 64, 5, 20


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, initializer_range=0.08, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)


def served(net: Any, seed: int, batch_invariant: bool) -> tuple[list[serving.Request], int]:
    """The requests after they were served in an order, at times, with a budget and pages that are drawn; and how often
    one was preempted.
    """
    fixed, rng = Random(0), Random(seed)
    requests = [
        serving.Request(
            [fixed.randrange(256) for _ in range(fixed.choice((1, 3, 17, 40, 90)))], NEW,
            temperature=fixed.choice((0.0, 0.8)), top_p=0.9, seed=i, logits=[],
        )
        for i in range(REQUESTS)
    ]  # fmt: skip
    order = rng.sample(requests, len(requests))
    for request in order:
        request.arrival = rng.randrange(40)
    pages = rng.choice(((8, 16), (60, 16), (25, 4)))  # of 16 or 4 tokens; 100 tokens are few enough to preempt
    scheduler = serving.Scheduler(*pages, rng.choice((16, 50, 128)), rng.choice((3, 8, 16)))
    serving.Engine(serving.Llama(net, 200), scheduler, batch_invariant=batch_invariant).serve(order)
    return requests, scheduler.preemptions


def test_64_requests_have_the_same_bits_in_any_order_of_20(net: Any) -> None:
    first, preempted = served(net, 0, True)
    for seed in range(1, ARRIVALS):
        requests, preemptions = served(net, seed, True)
        preempted += preemptions
        for one, other in zip(first, requests):
            assert one.generated == other.generated and len(one.generated) == NEW
            assert one.logits and other.logits and len(one.logits) == len(other.logits)
            for a, b in zip(one.logits, other.logits):
                assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    assert preempted > 0, "a preempted request computes its tokens again"


def test_drafts_change_no_bit(net: Any) -> None:
    """Drawn tokens and their logits are those without drafts, of which two of three are right."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in (40, 3, 17)]
    runs: list[list[serving.Request]] = []
    for drafts in (0, 3):
        requests = [serving.Request(p, 12, 0.8, 0.9, i, logits=[]) for i, p in enumerate(prompts)]

        def draft(request: serving.Request, own: list[serving.Request] = requests) -> list[int]:
            begin = len(request.generated)
            tokens = (runs[0][own.index(request)].generated + [0] * 3)[begin : begin + 3]
            return [*tokens[:2], (tokens[2] + 1) % 256]

        scheduler = serving.Scheduler(16, 16, 32, 3, drafts)
        engine = serving.Engine(
            serving.Llama(net, 200), scheduler, batch_invariant=True, draft=draft if drafts else None
        )
        engine.serve(requests)
        runs.append(requests)
    assert len(engine.times) <= 3 + 12 // 3
    for one, other in zip(*runs):
        assert one.generated == other.generated and one.logits and other.logits
        assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))


def test_a_cuda_graph_is_refused(net: Any) -> None:
    scheduler = serving.Scheduler(20, 16, 64, 4)
    with pytest.raises(ValueError, match="cuda_graph: False is required with batch_invariant"):
        serving.Engine(serving.Llama(net, 200), scheduler, cuda_graph=True, batch_invariant=True)
    with pytest.raises(ValueError, match=r"draft: a function is required with 1 drafts a step; got None"):
        serving.Engine(serving.Llama(net, 200), serving.Scheduler(20, 16, 64, 4, drafts=1))
