"""Verification of draft tokens: distribution over all outcomes, counts, special rows, every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import impls, using
from families.sampling_reference import assert_distribution

NAN = float("nan")


def rows(batch: int, n: int, vocab: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns draft_probs, draft_token_ids and target_probs; many drafts are accepted."""
    generator = torch.Generator().manual_seed(seed + vocab)
    target = (torch.randn(batch, n + 1, vocab, generator=generator) * 1.5).softmax(-1)
    draft = (target[:, :n].log() + 0.7 * torch.randn(batch, n, vocab, generator=generator)).softmax(-1)
    tokens = (
        torch.multinomial(draft.reshape(-1, vocab), 1, generator=generator).reshape(batch, n)
        if n
        else target[:, :0, 0].long()
    )
    return draft.to(device), tokens.int().to(device), target.to(device)


def outcomes(draft: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Returns the probability of each row of output tokens, by enumeration in fp64."""
    n, vocab = draft.shape
    draft, target = draft.double(), target.double()
    found: dict[tuple[int, ...], float] = {}
    reach, prefix = 1.0, ()
    for i in range(n + 1):
        if i < n:
            token = int(tokens[i])
            accept = min(1.0, float(target[i, token] / draft[i, token]))
            rest = (target[i] - draft[i]).clamp(min=0)
            stop = reach * (1 - accept)
        else:
            rest, stop = target[i], reach
        rest = rest / rest.sum() if rest.sum() else rest
        for t in range(vocab):
            if stop * float(rest[t]) > 0:
                found[(*prefix, t, *[-1] * (n - i))] = stop * float(rest[t])
        if i < n:
            reach, prefix = reach * accept, (*prefix, token)
    return found


@pytest.mark.parametrize("n", [1, 3])
def test_distribution_of_outcomes(n: int, device: str) -> None:
    draws, vocab = 1 << 20, 5
    draft, tokens, target = rows(1, n, vocab, device, seed=n)
    want = outcomes(draft[0].cpu(), tokens[0], target[0].cpu())
    places = {outcome: i for i, outcome in enumerate(want)}
    for impl in impls("chain_speculative", device):
        with using("chain_speculative", impl):
            got, accepted, emitted = fi_core.chain_speculative_sampling(
                draft.expand(draws, -1, -1),
                tokens.expand(draws, -1),
                target.expand(draws, -1, -1),
                seed=5,
                offset=0,
            )
            kinds, counts = got.cpu().unique(dim=0, return_counts=True)
            samples = torch.repeat_interleave(torch.tensor([places[tuple(k)] for k in kinds.tolist()]), counts)
            assert_distribution(samples, torch.tensor(list(want.values()), dtype=torch.float64))
            assert torch.equal(emitted, (got >= 0).sum(-1).int() - 1)
            assert (accepted >= emitted).all()
            rates = (target[0, :n].gather(1, tokens.T.long()) / draft[0].gather(1, tokens.T.long())).clamp(max=1)
            assert abs(float(accepted.double().mean()) - float(rates.sum())) < 5e-3 * n


@pytest.mark.parametrize("vocab", [1, 33, 5001, 128256])
@pytest.mark.parametrize("n", [0, 1, 4, 40])
def test_every_implementation_gives_the_same_tokens(vocab: int, n: int, device: str) -> None:
    if n * vocab > 1_000_000:
        n = 7
    draft, tokens, target = rows(4, n, vocab, "cpu")
    seeds = torch.arange(4) + 9
    want = fi_core.chain_speculative_sampling(draft, tokens, target, seed=seeds, offset=seeds)
    on_device = [t.to(device) for t in (draft, tokens, target)]
    s = seeds.to(device)
    for impl in impls("chain_speculative", device):
        with using("chain_speculative", impl):
            got = fi_core.chain_speculative_sampling(*on_device, seed=s, offset=s)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want))
            again = fi_core.chain_speculative_sampling(*(t[2:3] for t in on_device), seed=s[2:3], offset=s[2:3])
            assert all(torch.equal(a, b[2:3]) for a, b in zip(again, got))


def test_counts_accumulate(device: str) -> None:
    draft, tokens, target = rows(3, 4, 50, device)
    accepted = torch.tensor([10, 20, 30], dtype=torch.int32, device=device)
    emitted = accepted * 10
    _, a, e = fi_core.chain_speculative_sampling(draft, tokens, target, accepted, emitted, seed=1, offset=1)
    assert a is accepted and e is emitted
    _, fresh_a, fresh_e = fi_core.chain_speculative_sampling(draft, tokens, target, seed=1, offset=1)
    assert (accepted - fresh_a).tolist() == [10, 20, 30] and (emitted - fresh_e).tolist() == [100, 200, 300]


def test_special_rows(device: str) -> None:
    one_hot = torch.eye(4, device=device)
    for impl in impls("chain_speculative", device):
        with using("chain_speculative", impl):

            def run(draft: Any, tokens: list[int], target: Any, seed: int = 0) -> list[int]:
                ids = torch.tensor([tokens], device=device)
                return list(
                    fi_core.chain_speculative_sampling(draft[None], ids, target[None], seed=seed, offset=0)[0][
                        0
                    ].tolist()
                )

            same = one_hot[[1, 2]]
            assert run(same, [1, 2], one_hot[[1, 2, 3]]) == [1, 2, 3], "all accepted"
            assert run(same, [1, 2], one_hot[[0, 2, 3]]) == [0, -1, -1], "first rejected"
            assert run(same, [1, 9], one_hot[[1, 2, 3]]) == [1, 2, -1], "a token out of range, and a zero residual"
            assert run(same * 0, [1, 2], one_hot[[1, 2, 3]]) == [1, 2, 3], "draft without probability"
            assert run(same, [1, 2], one_hot[[1, 2, 3]] * NAN) == [-1, -1, -1], "target without probability"
            bad = one_hot[[1, 2, 3]].clone()
            bad[2] = 0
            assert run(same, [1, 2], bad) == [1, 2, -1]


def test_generator_and_errors(device: str) -> None:
    draft, tokens, target = rows(2, 3, 20, device)
    generator = torch.Generator(device=device).manual_seed(4)
    first = fi_core.chain_speculative_sampling(draft, tokens, target, generator=generator)
    if device == "cuda":
        assert generator.get_offset() == 8  # type: ignore[attr-defined]
        again = fi_core.chain_speculative_sampling(draft, tokens.long(), target.double(), seed=4, offset=0)
        assert torch.equal(first[0], again[0])
    with pytest.raises(ValueError, match=r"target_probs must have shape"):
        fi_core.chain_speculative_sampling(draft, tokens, target[:, 1:], seed=0, offset=0)
    with pytest.raises(ValueError, match="draft_probs: 3 dimensions"):
        fi_core.chain_speculative_sampling(draft[0], tokens, target, seed=0, offset=0)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match="maybe_output_accepted_token_num must be int32"):
        fi_core.chain_speculative_sampling(draft, tokens, target, wrong, seed=0, offset=0)
    with pytest.raises(ValueError, match="seed and offset"):
        fi_core.chain_speculative_sampling(draft, tokens, target, seed=1)
    empty = fi_core.chain_speculative_sampling(draft[:0], tokens[:0], target[:0], seed=0, offset=0)
    assert empty[0].shape == (0, 4)
