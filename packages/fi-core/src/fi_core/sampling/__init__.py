"""Samples tokens from probabilities or logits, filtered by top-k, top-p and min-p, in one read of each row.

These rules hold for every function of the module.

Rows: `[rows, vocab]`, fp32, fp16 or bf16, contiguous in the last dimension, 1 <= vocab <= 2^19. Other float dtypes are
copied to fp32. A parameter such as `top_p` is one number for all rows, or a 1-D tensor with one element per row. With
`indices` (int32 or int64 `[batch]`), output i is drawn from row `indices[i]`; an index out of range gives token 0,
which is not valid.

Thresholds are exact, and all elements equal to a threshold are kept. Sums are integer sums: the weight of an element is
its probability over the row maximum, to 2^-31. A draw from the whole row uses the maximum of a tile of 512 tokens
instead, to 2^-27. Drawn tokens and kept sets are therefore the same for any batch, position, device and implementation.

Any content is allowed. NaN has no probability, +inf has all of it. A row without any probability gives token 0, and
with `return_valid` False.

Random numbers are Philox4x32-10 (Salmon et al. 2011) with 64 bits each. The key is the seed; the counter consists of
the offset and the output row, with i / 2 in the upper half of the row's 64 bits for the row's i-th number. A row takes
one number. Top-p alone, from one half on, uses rejection sampling: it draws from the whole row until a token is in the
top-p set, at most 16 times, and then from that set. If seed or offset is a tensor with one element per row, the counter
omits the row, so a request draws the same token at any position of a batch.

`deterministic` is accepted for compatibility; results are always deterministic.

Errors name the argument. ValueError: shape, stride, device, a parameter out of range, seed without offset or of another
kind, NaN with `check_nan`. TypeError: dtype, or a parameter that is neither a number nor a tensor.
"""

from __future__ import annotations

from fi_core.sampling.arguments import get_seed_and_offset
from fi_core.sampling.draw import (
    min_p_sampling_from_probs,
    sample_from_logits,
    sampling_from_logits,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)
from fi_core.sampling.renorm import (
    softmax,
    top_k_mask_logits,
    top_k_renorm_prob,
    top_k_renorm_probs,
    top_p_renorm_prob,
    top_p_renorm_probs,
)
from fi_core.sampling.slab import cake_top_k_top_p_sampling_from_probs
from fi_core.sampling.speculative import chain_speculative_sampling

__all__ = [
    "cake_top_k_top_p_sampling_from_probs",
    "chain_speculative_sampling",
    "get_seed_and_offset",
    "min_p_sampling_from_probs",
    "sample_from_logits",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]
