"""Helpers of the sampling tests: rows with exact sums, sets of allowed tokens in fp64, and a chi-square test."""

from __future__ import annotations

import math

import torch

from fi_core.sampling.trace import _thresholds

INF, NAN = math.inf, math.nan
allowed = _thresholds


def dyadic(rows: int, vocab: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns multiples of 2^-20 below 2^-8 with many ties; their integer sums and fp64 sums are exact and equal."""
    generator = torch.Generator().manual_seed(seed + rows * 31 + vocab)
    spread = torch.randint(0, 9, (rows, 1), generator=generator)
    units = torch.randint(0, 256, (rows, vocab), generator=generator) >> (spread - 1).clamp(min=0)
    units[torch.arange(rows), torch.randint(0, vocab, (rows,), generator=generator)] = 200
    return (units * 2.0**-16).to(dtype).to(device)


def normal_logits(rows: int, vocab: int, device: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rows * 31 + vocab)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(device)


def assert_distribution(samples: torch.Tensor, probs: torch.Tensor) -> None:
    """Checks draws against probabilities `[vocab]` (fp64, need not sum to one) by a chi-square test, five sigma."""
    probs = probs.double().cpu() / probs.double().sum().cpu()
    counts = torch.bincount(samples.cpu().long(), minlength=len(probs)).double()
    assert len(counts) == len(probs)
    assert not counts[probs == 0].any(), "a token without probability was drawn"
    expected = probs * len(samples)
    common = expected >= 10
    rest = float(counts[~common].sum()), float(expected[~common].sum())
    statistic = float(((counts - expected) ** 2 / expected)[common].sum())
    if rest[1] >= 10:
        statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    freedom = max(int(common.sum()) - (rest[1] < 10), 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 12, f"chi-square {statistic:.1f} for {freedom}"


def adversarial(vocab: int, device: str, logits: bool, dtype: torch.dtype) -> tuple[torch.Tensor, list[set[int]]]:
    """Returns rows with extreme content, and the set of tokens that each may give; empty if none."""
    zero = -INF if logits else 0.0
    big, tiny = (3e38, -3e38) if logits else (3e38, 1e-45)

    def row(fill: float, **at: float) -> torch.Tensor:
        x = torch.full((vocab,), fill)
        for place, value in at.items():
            x[{"first": 0, "mid": vocab // 2, "last": vocab - 1}[place]] = value
        return x

    rows = [
        row(NAN),
        row(zero),
        row(NAN, mid=0.5),
        row(zero, last=NAN, mid=1.0),
        row(0.25, mid=INF),
        row(0.25, first=INF, last=INF),
        row(zero, last=0.75),
        row(zero, first=tiny),
        row(tiny),
        row(0.125),
        row(big),
        row(zero, first=big, last=big),
        row(-0.0, mid=1e-40),
        row(-1e-40, mid=0.0),
        row(-1.0, mid=0.5),
        row(1e-45, mid=1e-38),
    ]
    stacked = torch.stack(rows).to(dtype)
    return stacked.to(device), [_drawable_tokens(r, logits) for r in stacked.double()]


def _drawable_tokens(row: torch.Tensor, logits: bool) -> set[int]:
    """Returns the tokens of a row whose probability is at least 2^-31 of the largest."""
    x = row.where(~row.isnan(), -INF)
    top = x.max()
    if top == (-INF if logits else 0.0) or (top < 0 and not logits):
        return set()
    near = x == top if top == INF else (x >= top - 21.4) & (x > -INF) if logits else (x > 0) & (x >= top * 2.0**-31)
    return set(near.nonzero()[:, 0].tolist())
