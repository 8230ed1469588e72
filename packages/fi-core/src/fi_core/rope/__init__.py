"""Rotary position embedding (RoPE, arXiv:2104.09864) of q and k: by row, by position id, from a table, and to fp8.

Pair (a, b) of a head turns by phi: a cos(phi) - b sin(phi), b cos(phi) + a sin(phi), in fp32, rounded once. Pairs are
(i, i + rotary_dim / 2) (NeoX), or (2i, 2i + 1) if `interleave` (GPT-J); dimensions from rotary_dim on are copied.

Without a table phi = position * f_i with f_i = rope_theta^(-2i / rotary_dim) / rope_scale. Frequencies are fp64 and the
product is taken modulo one turn in 64-bit fixed point, so that cosine and sine are within 1.5e-7 of the exact ones at
any position below 2^24, and 1e-6 below 2^31 (phi rounded to fp32 is off by 0.03 at position 10^6).

Heads may be strided (slices of a fused qkv), the last dimension is contiguous; any even rotary_dim <= head_dim <= 2048.
Errors: ValueError (shape, stride, device, value) or TypeError (dtype), naming the argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.rope import trace
from fi_core.rope.quantize import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from fi_core.rope.unit import entries
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Impl, Op, Unit

if TYPE_CHECKING:
    import torch

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]


def _rope_unit(axes: Axes) -> Unit:
    dtype = DTYPES[str(axes["dtype"])]
    return Unit("fi/rope/rope.cuh", "RopeParams", entries("rope", dtype.device, 16 // dtype.bytes))


ROPE = Op(
    name="rope",
    family="rope",
    schema="(Tensor(a!) q_out, Tensor(b!) k_out, Tensor q, Tensor k, Tensor? pos_ids, Tensor? indptr, Tensor? offsets, "
    "Tensor? cos_sin_cache, int? head_dim, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, "
    "float low_freq_factor, float high_freq_factor, float old_context_len) -> ()",
    axes={"dtype": ("f16", "bf16", "f32")},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _rope_unit)),
)

_rope = Launcher(ROPE, lambda q_out, *_: (q_out.get_device(), q_out.dtype))


@fi_api(trace=trace.plain("apply_rope", ragged=True))
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated copies of q and k, whose rows are segments of consecutive positions.

    q: `[nnz, num_qo_heads, head_dim]`, k: `[nnz, num_kv_heads, head_dim]`, fp16, bf16 or fp32.
    indptr: `[segments + 1]`, offsets: `[segments]`, both int32 or both int64: row r of segment b, which is
    indptr[b] <= r < indptr[b + 1], is at position offsets[b] + r - indptr[b]. Rows of no segment are copied.
    rotary_dim: head_dim if None.
    """
    q_rope, k_rope = q.new_empty(q.shape), k.new_empty(k.shape)
    _rope(
        q_rope, k_rope, q, k, None, indptr, offsets, None, None, rotary_dim, interleave, rope_scale, rope_theta, 0, 0, 0
    )
    return q_rope, k_rope


@fi_api(trace=trace.plain("apply_rope_inplace", ragged=True, inplace=True))
def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope` written into q and k."""
    _rope(q, k, q, k, None, indptr, offsets, None, None, rotary_dim, interleave, rope_scale, rope_theta, 0, 0, 0)


@fi_api(trace=trace.llama31("apply_llama31_rope", ragged=True))
def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` with the frequencies of Llama 3.1: only long wavelengths are scaled.

    f' = (1 - s) f / rope_scale + s f, f = rope_theta^(-2i / rotary_dim),
    s = clamp(f old_context_len / (2 pi (high - low)) - low / (high - low), 0, 1), low and high the frequency factors.
    """
    q_rope, k_rope = q.new_empty(q.shape), k.new_empty(k.shape)
    _rope(
        q_rope, k_rope, q, k, None, indptr, offsets, None, None, rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip
    return q_rope, k_rope


@fi_api(trace=trace.llama31("apply_llama31_rope_inplace", ragged=True, inplace=True))
def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope` written into q and k."""
    _rope(
        q, k, q, k, None, indptr, offsets, None, None, rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


@fi_api(trace=trace.plain("apply_rope_pos_ids"))
def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated copies of q and k; pos_ids: `[nnz]`, int32 or int64, the position of each row. Else as `apply_rope`."""
    q_rope, k_rope = q.new_empty(q.shape), k.new_empty(k.shape)
    _rope(
        q_rope, k_rope, q, k, pos_ids, None, None, None, None, rotary_dim, interleave, rope_scale, rope_theta, 0, 0, 0
    )
    return q_rope, k_rope


@fi_api(trace=trace.plain("apply_rope_pos_ids_inplace", inplace=True))
def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids` written into q and k."""
    _rope(q, k, q, k, pos_ids, None, None, None, None, rotary_dim, interleave, rope_scale, rope_theta, 0, 0, 0)


@fi_api(trace=trace.llama31("apply_llama31_rope_pos_ids"))
def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope_pos_ids` with the frequencies of `apply_llama31_rope`."""
    q_rope, k_rope = q.new_empty(q.shape), k.new_empty(k.shape)
    _rope(
        q_rope, k_rope, q, k, pos_ids, None, None, None, None, rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip
    return q_rope, k_rope


@fi_api(trace=trace.llama31("apply_llama31_rope_pos_ids_inplace", inplace=True))
def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids` written into q and k."""
    _rope(
        q, k, q, k, pos_ids, None, None, None, None, rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


@fi_api(trace=trace.cached("apply_rope_with_cos_sin_cache"))
def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated copies of query and key, by angles from a table. NOTE: is_neox is the opposite of `interleave`.

    positions: `[nnz]`, int32 or int64.
    query: `[nnz, num_qo_heads * head_size]`, key: `[nnz, num_kv_heads * head_size]`, or with heads and head_size as two
    dimensions; fp16, bf16 or fp32.
    cos_sin_cache: `[max_position, rotary_dim]`, fp32 (else ValueError): the cosines of all pairs, then the sines.
    Rows whose position is not in the table become NaN.
    """
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    _rope(
        query_out,
        key_out,
        query,
        key,
        positions,
        None,
        None,
        cos_sin_cache,
        head_size,
        None,
        not is_neox,
        1,
        1,
        0,
        0,
        0,
    )
    return query_out, key_out


@fi_api(trace=trace.cached("apply_rope_with_cos_sin_cache_inplace", inplace=True))
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """`apply_rope_with_cos_sin_cache` written into query and key."""
    _rope(query, key, query, key, positions, None, None, cos_sin_cache, head_size, None, not is_neox, 1, 1, 0, 0, 0)
