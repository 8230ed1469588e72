"""Speculative decoding: verification of a chain of draft tokens against the target's probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.sampling import ops, trace
from fi_core.sampling.arguments import randomness

if TYPE_CHECKING:
    import torch


@fi_api(trace=trace.CHAIN_SPECULATIVE)
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepts draft tokens in order until one fails, and draws the next (Leviathan et al. 2022, arXiv:2211.17192).

    draft_probs: `[batch, n, vocab]`, draft_token_ids: int32 or int64 `[batch, n]`, target_probs: `[batch, n + 1,
    vocab]`. Token i is accepted if `u * draft_probs[i, token] < target_probs[i, token]`, u uniform in (0, 1]; at the
    first that is not, a token is drawn in proportion to `max(target_probs[i] - draft_probs[i], 0)` (to target_probs[i]
    if nothing is left), after n accepted ones in proportion to target_probs[n]. A token outside of the vocabulary is
    not accepted. Counts are added to the two tensors if given, int32 `[batch]`.

    Returns (tokens int32 `[batch, n + 1]`: accepted ones, the drawn one, then -1, and -1 also for a draw from a row
    without probability; accepted: those that pass on their own, emitted: those before the first that fails; int32
    `[batch]`). Raises ValueError or TypeError naming the argument.
    """
    import torch

    for name, value, ndim in (
        ("draft_probs", draft_probs, 3),
        ("draft_token_ids", draft_token_ids, 2),
        ("target_probs", target_probs, 3),
    ):
        if value.ndim != ndim:
            raise ValueError(f"{name}: {ndim} dimensions are required; got shape {list(value.shape)}")
    batch, n = draft_token_ids.shape
    random = randomness(seed, offset, generator, draft_probs, batch, batch * (n + 1))
    tokens = draft_probs.new_empty((batch, n + 1), dtype=torch.int32)
    counts = [
        draft_probs.new_zeros(batch, dtype=torch.int32) if given is None else given
        for given in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    ]
    ops.chain_speculative(
        tokens,
        *counts,
        draft_probs.float().contiguous(),
        draft_token_ids.int().contiguous() if not draft_token_ids.is_floating_point() else draft_token_ids,
        target_probs.float().contiguous(),
        *random,
    )
    return tokens, counts[0], counts[1]
