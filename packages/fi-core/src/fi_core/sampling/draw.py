"""Draws a token from each row of probabilities or logits, with any combination of filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.runtime.returns import with_valid
from fi_core.sampling import ops, trace
from fi_core.sampling.arguments import Arguments, randomness, require_no_nan, result_dtypes, row_arguments, rows_of

if TYPE_CHECKING:
    import torch


_RETRIES = 32  # FlashInfer's random numbers per filtered row, so that generators advance equally


def _draw(
    input: torch.Tensor,
    name: str,
    increment: int,
    indices: torch.Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
    return_valid: bool,
    parameters: Mapping[str, torch.Tensor | float],
    joint: bool = False,
    adjustments: Arguments | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row, or for each of `indices`; the generator advances by `increment` per output."""
    token_dtype, flag_dtype = result_dtypes()
    input, rows = rows_of(input, name)
    if check_nan:
        require_no_nan(input, name)
    if indices is None:
        batch, dtype = rows, token_dtype
    else:
        if indices.ndim != 1:
            raise ValueError(f"indices: shape [batch] is required; got {list(indices.shape)}")
        batch, dtype = indices.shape[0], indices.dtype
    arguments = row_arguments(parameters, rows) if parameters else {}
    arguments["seed_value"], arguments["offset_value"], seed, offset = randomness(
        seed, offset, generator, input, batch, batch * increment
    )
    if seed is not None:
        arguments.update(seed=seed, offset=offset)
    out = input.new_empty(batch, dtype=dtype)
    valid = input.new_empty(batch, dtype=flag_dtype) if return_valid else None
    if adjustments:
        arguments.update(adjustments)
    ops.sample(out, input, name == "logits", joint, valid, indices=indices, **arguments)
    return out if valid is None else (out, valid)


def _given(**parameters: torch.Tensor | float | None) -> dict[str, torch.Tensor | float]:
    return {name: value for name, value in parameters.items() if value is not None}


def _is_joint(filter_apply_order: str) -> bool:
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(f'Invalid filter_apply_order: {filter_apply_order!r}; "top_k_first" or "joint" is required')
    return filter_apply_order == "joint"


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
    """Draws a token from each row with the probabilities `softmax(logits)`, which are not written.

    Args:
        logits: `[rows, vocab]`, fp32, fp16 or bf16.
        indices: `[batch]`, int32 or int64: output i is drawn from row `indices[i]`. None: one output per row.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by vocab per output, as if a number were drawn for every element; under CUDA graph capture by 4 per
            call and replay, and each replay draws anew. A capture needs `graph.register_generator_state(generator)`.
        check_nan: whether to raise ValueError if logits contains NaN. The check synchronises with the device.
        seed: an int, or an int64 or uint64 tensor `[1]` or `[batch]`; given together with offset. A tensor with one
            element per output makes the draw independent of the position in the batch.
        offset: like seed.

    Returns:
        samples: `[batch]` of the dtype of indices, int32 without indices.

    Raises:
        ValueError: a shape, stride, device or parameter range is wrong, or seed and offset do not go together.
        TypeError: a dtype is wrong, or a parameter is neither a number nor a tensor.
    """
    vocab = logits.shape[-1] if logits.ndim else 0
    return _draw(logits, "logits", vocab, indices, generator, check_nan, seed, offset, False, {})  # type: ignore[return-value]


@with_valid
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
    """Draws a token from each row with probability `probs_j / sum_i probs_i`.

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; rows need not sum to one.
        indices: `[batch]`, int32 or int64: output i is drawn from row `indices[i]`. None: one output per row.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by 1 per output.
        check_nan: whether to raise ValueError if probs contains NaN. The check synchronises with the device.
        seed: an int, or an int64 or uint64 tensor `[1]` or `[batch]`; given together with offset. A tensor with one
            element per output makes the draw independent of the position in the batch.
        offset: like seed.
        return_valid: whether to return also which rows had a token of nonzero probability.

    Returns:
        samples: `[batch]` of the dtype of indices, int32 without indices. With return_valid the tuple (samples, valid):
            valid is bool `[batch]`, False where no token had probability and the sample is 0.

    Raises:
        ValueError: a shape, stride, device or parameter range is wrong, or seed and offset do not go together.
        TypeError: a dtype is wrong, or a parameter is neither a number nor a tensor.
    """
    return _draw(probs, "probs", 1, indices, generator, check_nan, seed, offset, return_valid, {})


@with_valid
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
    """Draws a token from the top-p (nucleus) set of each row (Holtzman et al. 2019, arXiv:1904.09751).

    The set contains the elements with less than top_p of the row's sum above them: the smallest set of largest elements
    that reaches it, and all elements equal to its last.

    Other arguments, results and errors are those of `sampling_from_probs`. The generator advances by 32 per output.

    Args:
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
    """
    return _draw(probs, "probs", _RETRIES, indices, generator, check_nan, seed, offset, return_valid, {"top_p": top_p})


@with_valid
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
    """Draws a token from the k largest elements of each row and all elements equal to the k-th largest.

    Other arguments, results and errors are those of `sampling_from_probs`. The generator advances by 32 per output.

    Args:
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
    """
    return _draw(probs, "probs", _RETRIES, indices, generator, check_nan, seed, offset, return_valid, {"top_k": top_k})


@with_valid
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
    """Draws a token from the elements with at least min_p times the row's largest probability (arXiv:2407.01082).

    Other arguments, results and errors are those of `sampling_from_probs`.

    Args:
        min_p: a number from 0 to 1, or a tensor `[rows]`; 0: no filter.
    """
    return _draw(probs, "probs", 1, indices, generator, check_nan, seed, offset, return_valid, {"min_p": min_p})


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
    """Draws a token that passes top-k and top-p with the probabilities `softmax(logits)`, which are not written.

    Other arguments, results and errors are those of `sampling_from_logits`. The generator advances by 32 per output.

    Args:
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
        filter_apply_order: "top_k_first": top_p is a share of the sum of the top-k elements; "joint": of the whole row.
    """
    return _draw(  # type: ignore[return-value]
        logits,
        "logits",
        _RETRIES,
        indices,
        generator,
        check_nan,
        seed,
        offset,
        False,
        {"top_k": top_k, "top_p": top_p},
        _is_joint(filter_apply_order),
    )


@with_valid
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
    """Draws a token that passes the filters of `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.

    Other arguments, results and errors are those of `sampling_from_probs`. The generator advances by 32 per output.

    Args:
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
        filter_apply_order: "top_k_first": top_p is a share of the sum of the top-k elements; "joint": of the whole row.
    """
    return _draw(
        probs,
        "probs",
        _RETRIES,
        indices,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
        {"top_k": top_k, "top_p": top_p},
        _is_joint(filter_apply_order),
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
    """Draws a token from each row of logits in one kernel.

    The steps are, in this order: penalties, bias, bitmask, temperature, filters, draw.

    The repetition penalty divides the logit of a seen token if it is positive and multiplies it otherwise (Keskar et
    al. 2019, arXiv:1909.05858). A generated token then loses `frequency_penalty * count + presence_penalty`.

    Args:
        logits: `[batch, vocab]`, fp32, fp16 or bf16; not modified. With a bias, a bitmask or penalties, other dtypes
            than fp32 are copied to fp32.
        temperature: a number, or a float tensor `[batch]`, 0 or more. None: 1. 0, and a negative element of a tensor,
            takes the first of the largest logits. A row whose temperature is NaN gives token 0, which is not valid.
        top_k: an integer, or an integer tensor `[batch]`; None, -1, 0, or at least vocab: no filter.
        top_p: a number from 0 to 1, or a tensor `[batch]`; None or 1: no filter, 0: the largest element.
        min_p: a number from 0 to 1, or a tensor `[batch]`; None or 0: no filter.
        bias: fp32 `[vocab]` or `[batch, vocab]`, added to the logits. None: no bias.
        bitmask: int32 `[batch, ceil(vocab / 32)]`; token t is allowed if bit t % 32 of word t / 32 is set. None: all
            tokens are allowed.
        seen_token_ids: int32 `[batch, slots]`, the tokens of prompt and output, each once; -1 in free slots. Required
            with a penalty.
        seen_token_counts: int32 `[batch, slots]`, how often each seen token was generated; 0: it is in the prompt only.
            Required with frequency_penalty or presence_penalty.
        repetition_penalty: a number, or a tensor `[batch]`; None: no penalty.
        frequency_penalty: like repetition_penalty.
        presence_penalty: like repetition_penalty.
        filter_apply_order: "top_k_first": top_p is a share of the sum of the top-k elements; "joint": of the whole row.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by 32 per row.
        seed: an int, or an int64 or uint64 tensor `[1]` or `[batch]`; given together with offset. A tensor with one
            element per row makes the draw independent of the position in the batch.
        offset: like seed.

    Returns:
        tokens: int32 `[batch]`; 0 where no token was allowed.
        valid: bool `[batch]`; False where no token was allowed.

    Raises:
        ValueError: a shape, stride, device or parameter range is wrong, a penalty has no seen tokens or counts, or seed
            and offset do not go together.
        TypeError: a dtype is wrong, or a parameter is neither a number nor a tensor.
    """
    logits, rows = rows_of(logits, "logits")
    adjustments: Arguments = {}
    penalties = _given(
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty
    )
    if penalties and seen_token_ids is None:
        raise ValueError("seen_token_ids: required where there is a penalty")
    if bias is not None or bitmask is not None or seen_token_ids is not None:
        logits = logits.float()
        adjustments = row_arguments(penalties, rows)
        adjustments.update(bias=bias, bitmask=bitmask, seen=seen_token_ids, seen_count=seen_token_counts)
        adjustments["adjusted"] = logits.new_empty(*logits.shape)  # used where rows are not cached in shared memory
    if seen_token_counts is None and (frequency_penalty is not None or presence_penalty is not None):
        raise ValueError("seen_token_counts: required for frequency_penalty and presence_penalty")
    filters = _given(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return _draw(  # type: ignore[return-value]
        logits,
        "logits",
        _RETRIES,
        None,
        generator,
        False,
        seed,
        offset,
        True,
        filters,
        joint=_is_joint(filter_apply_order),
        adjustments=adjustments,
    )
