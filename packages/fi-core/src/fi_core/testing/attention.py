"""Counts operations and bytes of attention, by the rules of FlashInfer's benchmark."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _lengths(values: Any) -> list[int]:
    """Flattens a tensor, array or sequence to a list of ints, whose sums are exact (a float32 dot product is not)."""
    if hasattr(values, "flatten"):
        values = values.flatten().tolist()
    return [int(v) for v in values]


def _itemsize(dtype: torch.dtype | None) -> int:
    return 2 if dtype is None else dtype.itemsize  # None is bfloat16


def _tera_per_second(count: int, time: float) -> float:
    """A count of operations or bytes per time in milliseconds; 0.0 if the time is NaN."""
    return 0.0 if math.isnan(time) else count / time / 1e9


def attention_flops(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Counts the floating-point operations of q k^T and p v; of a causal mask, the keys that it keeps, with half of the
    diagonal.

    Args:
        batch_size: number of requests.
        qo_seqlen: query tokens of each request.
        kv_seqlen: key tokens of each request.
        head_dim_qk: head dimension of q and k.
        head_dim_vo: head dimension of v and the output.
        num_qo_heads: query heads.
        causal: whether the mask is causal, aligned to the last key.

    Raises:
        ValueError: qo_seqlen > kv_seqlen.
    """
    if qo_seqlen > kv_seqlen:
        raise ValueError(f"qo_seqlen must be at most kv_seqlen ({kv_seqlen}), got {qo_seqlen}")
    lengths = [qo_seqlen] * batch_size, [kv_seqlen] * batch_size
    return attention_flops_with_actual_seq_lens(*lengths, head_dim_qk, head_dim_vo, num_qo_heads, causal)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q: Any,
    actual_seq_lens_kv: Any,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Counts as `attention_flops` does, with a length per request.

    Args:
        actual_seq_lens_q: query tokens of each request, a tensor or sequence.
        actual_seq_lens_kv: key tokens of each request, a tensor or sequence.
        head_dim_qk: head dimension of q and k.
        head_dim_vo: head dimension of v and the output.
        num_qo_heads: query heads.
        causal: whether the mask is causal, aligned to the last key.

    Raises:
        ValueError: The mask is causal and a request has more query tokens than keys.
    """
    pairs = 0
    for b, (q, kv) in enumerate(zip(_lengths(actual_seq_lens_q), _lengths(actual_seq_lens_kv), strict=True)):
        if causal and q > kv:
            raise ValueError(f"actual_seq_lens_q must be at most actual_seq_lens_kv ({kv}) in request {b}, got {q}")
        pairs += q * (2 * kv - q if causal else 2 * kv)
    return pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_tflops_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    time: float,
) -> float:
    """Computes TFLOP/s of one call: `attention_flops / time`; 0.0 if the time is NaN.

    Args:
        batch_size: number of requests.
        qo_seqlen: query tokens of each request.
        kv_seqlen: key tokens of each request.
        head_dim_qk: head dimension of q and k.
        head_dim_vo: head dimension of v and the output.
        num_qo_heads: query heads.
        causal: whether the mask is causal, aligned to the last key.
        time: milliseconds.
    """
    flops = attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return _tera_per_second(flops, time)


def attention_tflops_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: Any,
    actual_seq_lens_kv: Any,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    ms: float,
) -> float:
    """Computes as `attention_tflops_per_sec` does, with a length per request.

    Args:
        actual_seq_lens_q: query tokens of each request, a tensor or sequence.
        actual_seq_lens_kv: key tokens of each request, a tensor or sequence.
        head_dim_qk: head dimension of q and k.
        head_dim_vo: head dimension of v and the output.
        num_qo_heads: query heads.
        causal: whether the mask is causal, aligned to the last key.
        ms: milliseconds.
    """
    flops = attention_flops_with_actual_seq_lens(
        actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal
    )
    return _tera_per_second(flops, ms)


def attention_tb_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype | None = None,
    k_dtype: torch.dtype | None = None,
    v_dtype: torch.dtype | None = None,
    o_dtype: torch.dtype | None = None,
) -> float:
    """Computes TB/s of one call that reads q, k and v once and writes the output once; 0.0 if the time is NaN.

    Args:
        batch_size: number of requests.
        qo_seqlen: query tokens of each request.
        kv_seqlen: key tokens of each request.
        head_dim_qk: head dimension of q and k.
        head_dim_vo: head dimension of v and the output.
        num_qo_heads: query heads.
        num_kv_heads: key heads.
        time: milliseconds.
        q_dtype: dtype of q; bfloat16 if None.
        k_dtype: dtype of k; bfloat16 if None.
        v_dtype: dtype of v; bfloat16 if None.
        o_dtype: dtype of the output; bfloat16 if None.
    """
    return attention_tb_per_sec_with_actual_seq_lens(
        [qo_seqlen] * batch_size,
        [kv_seqlen] * batch_size,
        head_dim_qk,
        head_dim_vo,
        num_qo_heads,
        num_kv_heads,
        time,
        q_dtype,
        k_dtype,
        v_dtype,
        o_dtype,
    )


def attention_tb_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: Any,
    actual_seq_lens_kv: Any,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype | None = None,
    k_dtype: torch.dtype | None = None,
    v_dtype: torch.dtype | None = None,
    o_dtype: torch.dtype | None = None,
) -> float:
    """Computes as `attention_tb_per_sec` does, with a length per request.

    Args:
        actual_seq_lens_q: query tokens of each request, a tensor or sequence.
        actual_seq_lens_kv: key tokens of each request, a tensor or sequence.
        head_dim_qk: head dimension of q and k.
        head_dim_vo: head dimension of v and the output.
        num_qo_heads: query heads.
        num_kv_heads: key heads.
        time: milliseconds.
        q_dtype: dtype of q; bfloat16 if None.
        k_dtype: dtype of k; bfloat16 if None.
        v_dtype: dtype of v; bfloat16 if None.
        o_dtype: dtype of the output; bfloat16 if None.
    """
    q_rows, kv_rows = sum(_lengths(actual_seq_lens_q)), sum(_lengths(actual_seq_lens_kv))
    q_bytes = head_dim_qk * _itemsize(q_dtype) + head_dim_vo * _itemsize(o_dtype)
    kv_bytes = head_dim_qk * _itemsize(k_dtype) + head_dim_vo * _itemsize(v_dtype)
    return _tera_per_second(q_rows * num_qo_heads * q_bytes + kv_rows * num_kv_heads * kv_bytes, time)
