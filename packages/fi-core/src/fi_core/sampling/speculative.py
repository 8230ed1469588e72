"""Speculative decoding: verifies a chain of draft tokens against the target model's probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.sampling import ops, trace
from fi_core.sampling.arguments import randomness
from fi_core.utils import int32_index

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
    """Accepts draft tokens in order until one is rejected, then draws the next token.

    This is speculative sampling (Leviathan et al. 2022, arXiv:2211.17192). Draft token i is accepted if
    `u * draft_probs[i, token] < target_probs[i, token]`, with u uniform in (0, 1]. At the first rejected token i, a
    token is drawn in proportion to `max(target_probs[i] - draft_probs[i], 0)`, or to `target_probs[i]` if that is zero
    everywhere. After n accepted tokens, one is drawn in proportion to `target_probs[n]`.

    Args:
        draft_probs: `[batch, n, vocab]`, copied to fp32.
        draft_token_ids: `[batch, n]`, int32 or int64. A token outside the vocabulary is rejected.
        target_probs: `[batch, n + 1, vocab]`, copied to fp32.
        maybe_output_accepted_token_num: int32 `[batch]`, to which `accepted` is added. None: a new tensor of zeros.
        maybe_output_emitted_draft_token_num: int32 `[batch]`, to which `emitted` is added. None: a new tensor of zeros.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by n + 1 per request.
        seed: an int, or an int64 or uint64 tensor `[1]` or `[batch]`; given together with offset. A tensor with one
            element per request makes the draw independent of the position in the batch.
        offset: like seed.

    Returns:
        tokens: int32 `[batch, n + 1]`: the accepted tokens, the drawn one, then -1. The drawn one is -1 if its row has
            no probability.
        accepted: int32 `[batch]`, how many draft tokens pass the test on their own.
        emitted: int32 `[batch]`, how many draft tokens precede the first rejected one.

    Raises:
        ValueError: a shape, stride or device is wrong, or seed and offset do not go together.
        TypeError: a dtype is wrong.
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
    seed_value, offset_value, seed, offset = randomness(seed, offset, generator, draft_probs, batch, batch * (n + 1))
    tokens = draft_probs.new_empty(batch, n + 1, dtype=torch.int32)
    counts = [
        draft_probs.new_zeros(batch, dtype=torch.int32) if given is None else given
        for given in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    ]
    ops.chain_speculative(
        tokens,
        counts[0],
        counts[1],
        draft_probs=draft_probs.float().contiguous(),
        draft_token_ids=draft_token_ids
        if draft_token_ids.is_floating_point()
        else int32_index(draft_token_ids).int().contiguous(),
        target_probs=target_probs.float().contiguous(),
        seed=seed,
        seed_value=seed_value,
        offset=offset,
        offset_value=offset_value,
    )
    return tokens, counts[0], counts[1]
