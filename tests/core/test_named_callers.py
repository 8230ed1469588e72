"""An error about an argument begins with the function that was called, whoever finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from fi_core.errors import UnknownWordError

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
        (
            "single_decode_with_kv_cache",
            (X, X, X, "HDN"),
            "single_decode_with_kv_cache: kv_layout: allowed are NHD, HND",
        ),
        ("BatchDecodeWithPagedKVCacheWrapper", (X, "HDN"), "BatchDecodeWithPagedKVCacheWrapper: kv_layout: allowed"),
    ],
)
def test_an_error_names_the_function(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, UnknownWordError)) as error:
        getattr(fi_core, name)(*arguments)
    assert str(error.value).startswith(message)
