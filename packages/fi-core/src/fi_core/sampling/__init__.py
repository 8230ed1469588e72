"""Sampling of tokens from probabilities or logits: filters by k, p and min-p, in one read of each row.

Rules of all functions. Rows are `[rows, vocab]` in fp32, fp16 or bf16, contiguous in the last dimension (other float
types are copied to fp32). A parameter is a number for all rows or a 1-D tensor with one element a row. `indices`
(int32 or int64 `[batch]`) draws output i from row indices[i]; a row that is not there gives no token.

Thresholds are exact: ties at one are all kept. Sums are of integers (a probability over the row's largest, to 2^-31;
in a draw from all of a row over the largest of 512 tokens, to 2^-27), so drawn tokens and kept sets are the same for
any batch, position, device and implementation. Any content is allowed: NaN has no probability, +inf takes it all, and a
row where nothing has probability gives token 0 and, with `return_valid`, False.

Random numbers are Philox4x32-10 (Salmon et al. 2011), 64 bits each: key = seed, counter = (offset, output row), the
row's i-th with i / 2 in the upper half of the row's 64 bits. A row takes one; with top-p alone, from one half on, it
draws from all of the row until a token is in the kept set, at most 16 times, and then from that set. Where seed or
offset is a tensor with one element a row, the row is left out of the counter: a request then draws the same token
wherever it stands in a batch. `deterministic` is taken for compatibility: results always are.

Errors name the argument: ValueError (shape, stride, device, a parameter out of range, seed and offset that do not go
together, NaN with `check_nan`) or TypeError (dtype, a parameter that is neither a number nor a tensor).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from fi_core.observe.log import fi_api
from fi_core.sampling import ops, trace
from fi_core.sampling.arguments import (
    count_per_row,
    float_per_row,
    get_seed_and_offset,
    native,
    per_row,
    randomness,
    require_no_nan,
)
from fi_core.sampling.speculative import chain_speculative_sampling

if TYPE_CHECKING:
    import torch

__all__ = [
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

_ZERO, _ONE, _NO_K = (None, 0.0), (None, 1.0), (None, 0)  # parameters that change nothing, as the op takes them
_UNSEEDED = (None, 0, None, 0)
_UNCHANGED = (None, None, None, None, *_ONE, *_ZERO, *_ZERO)  # bias, bitmask, seen, seen_count, three penalties
_RETRIES = 32  # FlashInfer's share of random numbers for a row of the filters: generators move on alike


def _rows(x: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """The rows as kernels read them, and how many they are."""
    if x.ndim != 2:
        raise ValueError(f"{name}: shape [rows, vocab] is required; got {list(x.shape)}")
    return native(x, name), x.shape[0]


def _filters(temperature: Any, top_k: Any, top_p: Any, min_p: Any, rows: int) -> tuple[object, ...]:
    return (
        *(_ONE if temperature is _ONE else float_per_row(temperature, "temperature", rows)),
        *(_NO_K if top_k is _NO_K else count_per_row(top_k, "top_k", rows)),
        *(_ONE if top_p is _ONE else per_row(top_p, "top_p", rows, 1.0, 0.0, 1.0)),
        *(_ZERO if min_p is _ZERO else per_row(min_p, "min_p", rows, 0.0, 0.0, 1.0)),
    )


def _tokens(
    input: torch.Tensor,
    name: str,
    increment: int,
    indices: torch.Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
    return_valid: bool = False,
    top_k: Any = _NO_K,
    top_p: Any = _ONE,
    min_p: Any = _ZERO,
    joint: bool = False,
    temperature: Any = _ONE,
    adjusted: torch.Tensor | None = None,
    changes: tuple[object, ...] = _UNCHANGED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row, or each of `indices`; the generator moves on by `increment` a token."""
    import torch

    input, rows = _rows(input, name)
    if check_nan:
        require_no_nan(input, name)
    if indices is None:
        batch, dtype = rows, torch.int32
    else:
        if indices.ndim != 1:
            raise ValueError(f"indices: shape [batch] is required; got {list(indices.shape)}")
        batch, dtype = indices.shape[0], indices.dtype
    random = randomness(seed, offset, generator, input, batch, batch * increment)
    out = input.new_empty(batch, dtype=dtype)
    valid = input.new_empty(batch, dtype=torch.bool) if return_valid else None
    ops.sample(
        out,
        valid,
        adjusted,
        input,
        indices,
        *_filters(temperature, top_k, top_p, min_p, rows),
        *random,
        *changes,
        ops.DRAW_TOKEN,
        name == "logits",
        joint,
    )
    return out if valid is None else (out, valid)


def _rewritten(
    input: torch.Tensor,
    name: str,
    output: int,
    dtype: torch.dtype | None = None,
    temperature: Any = _ONE,
    top_k: Any = _NO_K,
    top_p: Any = _ONE,
) -> torch.Tensor:
    """The rows renormalised or masked; dtype None: as kernels read them."""
    input, rows = _rows(input, name)
    out = input.new_empty(input.shape, dtype=dtype)
    filters = _filters(temperature, top_k, top_p, _ZERO, rows)
    ops.sample(out, None, None, input, None, *filters, *_UNSEEDED, *_UNCHANGED, output, name == "logits", False)
    return out


def _is_joint(filter_apply_order: str) -> bool:
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(f'Invalid filter_apply_order: {filter_apply_order!r}; "top_k_first" or "joint" is required')
    return filter_apply_order == "joint"


@fi_api(trace=trace.SOFTMAX)
def softmax(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """`softmax(logits / temperature)` of each row, in fp32: within 2e-6 relative, below 2^-126 about 0.

    temperature: None is 1; 0 gives equal probabilities (the greedy choice is the caller's). -inf has probability 0,
    +inf shares 1 with its like, NaN stays NaN and has no part in the sum; a row of -inf gives zeros.
    enable_pdl: taken for compatibility; programmatic dependent launch is on where the hardware has it.

    Returns fp32 `[rows, vocab]`. Raises ValueError (shape, device, a negative temperature) or TypeError.
    """
    import torch

    return _rewritten(logits, "logits", ops.RENORMALISE, torch.float32, _ONE if temperature is None else temperature)


@fi_api(trace=trace.SAMPLING_FROM_LOGITS)
def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """A token of each row, distributed as softmax(logits). Arguments as the module says; the generator moves on by
    batch * vocab, as where a number is drawn for every element.

    Returns `[batch]` of the dtype of indices, int32 without. Raises ValueError or TypeError naming the argument.
    """
    vocab = logits.shape[-1] if logits.ndim else 0
    return _tokens(logits, "logits", vocab, indices, generator, check_nan, seed, offset)  # type: ignore[return-value]


@fi_api(trace=trace.SAMPLING_FROM_PROBS)
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, with the odds of its elements; they need not sum to one.

    probs: `[rows, vocab]`, fp32, fp16 or bf16; the other arguments, and errors, are as the module says.

    Returns samples `[batch]` of the dtype of indices, int32 without; with return_valid (samples, bool `[batch]`): False
    where nothing had probability. Raises ValueError or TypeError naming the argument.
    """
    return _tokens(probs, "probs", 1, indices, generator, check_nan, seed, offset, return_valid)


@fi_api(trace=trace.TOP_P_SAMPLING)
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token among those with less than top_p of the row's sum above them (nucleus, arXiv:1904.09751): the smallest
    set of largest elements that reaches it, and all that tie with the last. top_p 1 keeps all, 0 the largest.

    top_p: a number from 0 to 1, or a tensor `[rows]`. The rest, results and errors as in `sampling_from_probs`.
    """
    return _tokens(probs, "probs", _RETRIES, indices, generator, check_nan, seed, offset, return_valid, top_p=top_p)


@fi_api(trace=trace.TOP_K_SAMPLING)
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token among the k largest, and all that tie with the last of them.

    top_k: an integer, or a tensor `[rows]` of them; -1, 0, or vocab and above keep all. The rest, results and errors as
    in `sampling_from_probs`.
    """
    return _tokens(probs, "probs", _RETRIES, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k)


@fi_api(trace=trace.MIN_P_SAMPLING)
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token with at least min_p of the largest probability (arXiv:2407.01082).

    min_p: a number from 0 to 1, or a tensor `[rows]`. The rest, results and errors as in `sampling_from_probs`.
    """
    return _tokens(probs, "probs", 1, indices, generator, check_nan, seed, offset, return_valid, min_p=min_p)


@fi_api(trace=trace.TOP_K_TOP_P_LOGITS)
def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """`top_k_top_p_sampling_from_probs` of softmax(logits), which is never written.

    logits: `[rows, vocab]`, fp32, fp16 or bf16. Returns samples `[batch]`; the rest and errors as there.
    """
    return _tokens(  # type: ignore[return-value]
        logits,
        "logits",
        _RETRIES,
        indices,
        generator,
        check_nan,
        seed,
        offset,
        top_k=top_k,
        top_p=top_p,
        joint=_is_joint(filter_apply_order),
    )


@fi_api(trace=trace.TOP_K_TOP_P_PROBS)
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token that passes both filters, those of `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.

    filter_apply_order: "top_k_first": top_p is a share of what the k largest sum to; "joint": of the whole row. The
    rest, results and errors as in `sampling_from_probs`.
    """
    return _tokens(
        probs,
        "probs",
        _RETRIES,
        indices,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
        top_k=top_k,
        top_p=top_p,
        joint=_is_joint(filter_apply_order),
    )


@fi_api(trace=trace.SAMPLE_FROM_LOGITS)
def sample_from_logits(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | float | None = None,
    top_k: torch.Tensor | int | None = None,
    top_p: torch.Tensor | float | None = None,
    min_p: torch.Tensor | float | None = None,
    bias: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    seen_token_ids: torch.Tensor | None = None,
    seen_token_counts: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | float | None = None,
    frequency_penalty: torch.Tensor | float | None = None,
    presence_penalty: torch.Tensor | float | None = None,
    filter_apply_order: str = "top_k_first",
    generator: torch.Generator | None = None,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From logits to tokens in one kernel: penalties, bias, mask, temperature, filters, draw, in this order.

    seen_token_ids: int32 `[batch, slots]`, tokens of prompt and output, each once, -1 in slots that are free;
    seen_token_counts: int32 of the same shape, how often each was generated (0: in the prompt alone). A seen logit is
    divided by repetition_penalty if it is positive and multiplied if not (arXiv:1909.05858); for a generated one,
    frequency_penalty * count + presence_penalty is subtracted. bias: fp32 `[vocab]` or `[batch, vocab]`, added.
    bitmask: int32 `[batch, ceil(vocab / 32)]`; token t is allowed where bit t % 32 of word t / 32 is set.
    temperature 0 takes the first of the largest logits. temperature, top_k, top_p, min_p and the penalties: numbers or
    tensors `[batch]`; None: not wanted. With a bias, a mask or penalties, logits that are not fp32
    are copied to it. The generator moves on by 32 a row.

    Returns (tokens int32 `[batch]`, valid bool `[batch]`): False, and token 0, where no token was allowed. Raises
    ValueError or TypeError naming the argument.
    """
    logits, rows = _rows(logits, "logits")
    adjusted: torch.Tensor | None = None
    changes: tuple[object, ...] = _UNCHANGED
    penalties = (repetition_penalty, frequency_penalty, presence_penalty)
    if bias is not None or bitmask is not None or seen_token_ids is not None:
        logits = logits.float()
        adjusted = logits.new_empty(logits.shape)  # used where rows are not kept on chip
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        numbers = [
            (None, default) if value is None else per_row(value, name, rows, default)
            for value, name, default in zip(penalties, names, (1.0, 0.0, 0.0))
        ]
        changes = (bias, bitmask, seen_token_ids, seen_token_counts, *chain.from_iterable(numbers))
    elif penalties != (None, None, None):
        raise ValueError("seen_token_ids: required where there is a penalty")
    if penalties[1:] != (None, None) and seen_token_counts is None:
        raise ValueError("seen_token_counts: required for frequency_penalty and presence_penalty")
    joint = _is_joint(filter_apply_order)
    return _tokens(  # type: ignore[return-value]
        logits,
        "logits",
        _RETRIES,
        None,
        generator,
        False,
        seed,
        offset,
        True,
        _NO_K if top_k is None else top_k,
        _ONE if top_p is None else top_p,
        _ZERO if min_p is None else min_p,
        joint,
        _ONE if temperature is None else temperature,
        adjusted,
        changes,
    )


@fi_api(trace=trace.TOP_P_RENORM)
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """The row over the sum of its top-p set (see `top_p_sampling_from_probs`), 0 outside of it; NaN stays NaN.

    is_deterministic: taken for compatibility. Returns fp32 `[rows, vocab]`. Raises ValueError or TypeError naming the
    argument.
    """
    import torch

    return _rewritten(probs, "probs", ops.RENORMALISE, torch.float32, top_p=top_p)


@fi_api(trace=trace.TOP_K_RENORM)
def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int, is_deterministic: bool = False) -> torch.Tensor:
    """The row over the sum of its k largest elements, ties included, 0 outside of them; NaN stays NaN.

    is_deterministic: taken for compatibility. Returns `[rows, vocab]` of the dtype of probs. Raises ValueError or
    TypeError naming the argument.
    """
    return _rewritten(probs, "probs", ops.RENORMALISE, top_k=top_k).to(probs.dtype)


@fi_api(trace=trace.TOP_K_MASK)
def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """The k largest logits of each row, ties included; the others are -inf, NaN stays NaN.

    Returns `[rows, vocab]` of the dtype of logits. Raises ValueError or TypeError naming the argument.
    """
    return _rewritten(logits, "logits", ops.MASK_OUT, top_k=top_k).to(logits.dtype)


top_k_renorm_prob, top_p_renorm_prob = top_k_renorm_probs, top_p_renorm_probs  # FlashInfer's older names
