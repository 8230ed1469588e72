"""Draws a token from each row of probabilities or logits, with any combination of filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.sampling import ops, trace
from fi_core.sampling.arguments import Arguments, randomness, require_no_nan, row_arguments, rows_of

if TYPE_CHECKING:
    import torch


_RETRIES = 32  # FlashInfer's random numbers per filtered row: generators advance alike


def _draw(
    input: torch.Tensor,
    name: str,
    increment: int,
    *,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
    return_valid: bool = False,
    joint: bool = False,
    adjustments: Arguments | None = None,
    parameters: Mapping[str, torch.Tensor | float] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row, or for each of `indices`; the generator advances by `increment` per output."""
    import torch

    input, rows = rows_of(input, name)
    if check_nan:
        require_no_nan(input, name)
    if indices is None:
        batch, dtype = rows, torch.int32
    else:
        if indices.ndim != 1:
            raise ValueError(f"indices: shape [batch] is required; got {list(indices.shape)}")
        batch, dtype = indices.shape[0], indices.dtype
    arguments = randomness(seed, offset, generator, input, batch, batch * increment)
    out = input.new_empty(batch, dtype=dtype)
    valid = input.new_empty(batch, dtype=torch.bool) if return_valid else None
    if parameters:
        arguments.update(row_arguments(parameters, rows))
    if adjustments:
        arguments.update(adjustments)
    ops.sample(out, input, valid=valid, indices=indices, logits=name == "logits", joint=joint, **arguments)
    return out if valid is None else (out, valid)


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
            advances by vocab per output, as if a number were drawn for every element.
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
    return _draw(
        logits, "logits", vocab, indices=indices, generator=generator, check_nan=check_nan, seed=seed, offset=offset
    )  # type: ignore[return-value]


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
    return _draw(
        probs,
        "probs",
        1,
        indices=indices,
        generator=generator,
        check_nan=check_nan,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
    )


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

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; rows need not sum to one.
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
        indices: `[batch]`, int32 or int64: output i is drawn from row `indices[i]`. None: one output per row.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by 32 per output.
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
    return _draw(
        probs,
        "probs",
        _RETRIES,
        indices=indices,
        generator=generator,
        check_nan=check_nan,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
        parameters={"top_p": top_p},
    )


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

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; rows need not sum to one.
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
        indices: `[batch]`, int32 or int64: output i is drawn from row `indices[i]`. None: one output per row.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by 32 per output.
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
    return _draw(
        probs,
        "probs",
        _RETRIES,
        indices=indices,
        generator=generator,
        check_nan=check_nan,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
        parameters={"top_k": top_k},
    )


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

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; rows need not sum to one.
        min_p: a number from 0 to 1, or a tensor `[rows]`; 0: no filter.
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
    return _draw(
        probs,
        "probs",
        1,
        indices=indices,
        generator=generator,
        check_nan=check_nan,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
        parameters={"min_p": min_p},
    )


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

    Args:
        logits: `[rows, vocab]`, fp32, fp16 or bf16.
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
        indices: `[batch]`, int32 or int64: output i is drawn from row `indices[i]`. None: one output per row.
        filter_apply_order: "top_k_first": top_p is a share of the sum of the top-k elements; "joint": of the whole row.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by 32 per output.
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
    return _draw(  # type: ignore[return-value]
        logits,
        "logits",
        _RETRIES,
        indices=indices,
        generator=generator,
        check_nan=check_nan,
        seed=seed,
        offset=offset,
        parameters={"top_k": top_k, "top_p": top_p},
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
    """Draws a token that passes the filters of `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.

    Args:
        probs: `[rows, vocab]`, fp32, fp16 or bf16; rows need not sum to one.
        top_k: an integer, or an integer tensor `[rows]`; -1, 0, or at least vocab: no filter.
        top_p: a number from 0 to 1, or a tensor `[rows]`; 1: no filter, 0: the largest element.
        indices: `[batch]`, int32 or int64: output i is drawn from row `indices[i]`. None: one output per row.
        filter_apply_order: "top_k_first": top_p is a share of the sum of the top-k elements; "joint": of the whole row.
        deterministic: accepted for compatibility; results are always deterministic.
        generator: the source of seed and offset if both are None; None: torch's default generator of the device. It
            advances by 32 per output.
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
    return _draw(
        probs,
        "probs",
        _RETRIES,
        indices=indices,
        generator=generator,
        check_nan=check_nan,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
        parameters={"top_k": top_k, "top_p": top_p},
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
    """Draws a token from each row of logits in one kernel.

    The steps are, in this order: penalties, bias, bitmask, temperature, filters, draw.

    The repetition penalty divides the logit of a seen token if it is positive and multiplies it otherwise (Keskar et
    al. 2019, arXiv:1909.05858). A generated token then loses `frequency_penalty * count + presence_penalty`.

    Args:
        logits: `[batch, vocab]`, fp32, fp16 or bf16; not modified. With a bias, a bitmask or penalties, other dtypes
            than fp32 are copied to fp32.
        temperature: a number, or a float tensor `[batch]`, 0 or more. None: 1. 0 takes the first of the largest logits.
            A row whose temperature is NaN gives token 0, which is not valid.
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
    penalties: dict[str, torch.Tensor | float] = {}
    if repetition_penalty is not None:
        penalties["repetition_penalty"] = repetition_penalty
    if frequency_penalty is not None:
        penalties["frequency_penalty"] = frequency_penalty
    if presence_penalty is not None:
        penalties["presence_penalty"] = presence_penalty
    if bias is not None or bitmask is not None or seen_token_ids is not None:
        logits = logits.float()
        adjustments = row_arguments(penalties, rows)
        adjustments.update(bias=bias, bitmask=bitmask, seen=seen_token_ids, seen_count=seen_token_counts)
        adjustments["adjusted"] = logits.new_empty(logits.shape)  # used where rows are not cached in shared memory
    elif penalties:
        raise ValueError("seen_token_ids: required where there is a penalty")
    if seen_token_counts is None and (frequency_penalty is not None or presence_penalty is not None):
        raise ValueError("seen_token_counts: required for frequency_penalty and presence_penalty")
    filters: dict[str, torch.Tensor | float] = {}
    if temperature is not None:
        filters["temperature"] = temperature
    if top_k is not None:
        filters["top_k"] = top_k
    if top_p is not None:
        filters["top_p"] = top_p
    if min_p is not None:
        filters["min_p"] = min_p
    return _draw(  # type: ignore[return-value]
        logits,
        "logits",
        _RETRIES,
        generator=generator,
        seed=seed,
        offset=offset,
        return_valid=True,
        joint=_is_joint(filter_apply_order),
        adjustments=adjustments,
        parameters=filters,
    )
