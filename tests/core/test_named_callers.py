"""An error about a shape names the function that was called, whoever finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core

X = torch.zeros(3, 64)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mm_bf16", (X.bfloat16(), X.bfloat16()), "mm_bf16: b must have shape [k, n] with k = 64; got [3, 64]"),
        ("single_prefill_with_kv_cache", (X, X, X), "single_prefill_with_kv_cache: q must have shape [qo_len, "),
        (
            "single_decode_with_kv_cache",
            (X[None], X, X),
            "single_decode_with_kv_cache: q must have shape [num_qo_heads, ",
        ),
        ("sampling_from_probs", (X[0],), "sampling_from_probs: probs: shape [rows, vocab] is required; got [64]"),
        ("rmsnorm", (X, X[0, :32]), "rmsnorm: weight must have shape [d] with d = 64; got [32]"),
    ],
)
def test_a_shape_error_names_the_function(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        getattr(fi_core, name)(*arguments)
    assert str(error.value).startswith(message)
