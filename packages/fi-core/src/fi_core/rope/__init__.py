"""Rotary position embedding (RoPE, arXiv:2104.09864) of q and k: by segment, position id or cos_sin cache, and to fp8.

A pair (a, b) of a head is rotated by an angle phi: (a cos(phi) - b sin(phi), b cos(phi) + a sin(phi)), in fp32 with one
rounding. Pairs are (i, i + rotary_dim / 2) (NeoX), or (2 i, 2 i + 1) if `interleave` (GPT-J). Dimensions from
rotary_dim on are copied.

Without a cos_sin cache, phi = position * f_i with f_i = rope_theta^(-2 i / rotary_dim) / rope_scale. Frequencies are
fp64, and the product is computed modulo one revolution in 64-bit fixed point. Cosine and sine are therefore within
1.5e-7 of the exact values at positions below 2^24, and within 1e-6 below 2^31 (a phi rounded to fp32 is off by 0.03 at
position 10^6).

Heads may be strided (slices of a fused qkv); the last dimension is contiguous. Any even rotary_dim <= head_dim <= 2048
works. Errors are ValueError (shape, stride, device, value) or TypeError (dtype), and name the argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.observe.log import fi_api
from fi_core.rope import trace
from fi_core.rope.kernel_entries import RopeConfig, entries
from fi_core.rope.qk_rmsnorm import fused_qk_rmsnorm_rope as fused_qk_rmsnorm_rope
from fi_core.rope.quantize import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Implementation, Op, Unit, Values
from fi_core.utils import _unpack_paged_kv_cache

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


def _rope_unit(axes: Values) -> Unit:
    dtype = DTYPES[str(axes["dtype"])]
    vec = 16 // dtype.bytes
    normed = "norm_rope_append" if axes["append"] else "norm_rope"
    function, sizes = (normed, (vec,)) if axes["norm"] else ("rope", (vec, 1))
    return Unit("fi/rope/rope.cuh", "RopeParams", entries(function, dtype.device, sizes))


ROPE = Op(
    name="rope",
    family="rope",
    arguments="Tensor(a!) q_out, Tensor(b!) k_out, Tensor(a) q, Tensor(b) k, Tensor? pos_ids=None, "
    "Tensor? indptr=None, Tensor? offsets=None, Tensor? cos_sin_cache=None, int? head_dim=None, int? rotary_dim=None, "
    "bool interleave=False, float rope_scale=1.0, float rope_theta=10000.0, float low_freq_factor=0.0, "
    "float high_freq_factor=0.0, float old_context_len=0.0, Tensor? q_weight=None, Tensor? k_weight=None, "
    "float eps=1e-06, Tensor? v=None, Tensor(c!)? k_cache=None, Tensor(d!)? v_cache=None, Tensor? slot_mapping=None",
    axes={"dtype": ("f16", "bf16", "f32"), "norm": (False, True), "append": (False, True)},
    config=RopeConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _rope_unit)),
    prebuilt=tuple({"dtype": dtype} for dtype in ("f16", "bf16", "f32")),
)

_rope = operator(ROPE)


def _rotate(
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor | None,
    indptr: torch.Tensor | None,
    offsets: torch.Tensor | None,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float = 0.0,
    high_freq_factor: float = 0.0,
    old_context_len: float = 0.0,
) -> None:
    """Rotates by angles of a formula: that of RoPE, or with the last three arguments that of Llama 3.1."""
    _rope(
        q_out,
        k_out,
        q,
        k,
        pos_ids=pos_ids,
        indptr=indptr,
        offsets=offsets,
        rotary_dim=rotary_dim,
        interleave=interleave,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        old_context_len=old_context_len,
    )


def _rotated(q: torch.Tensor, k: torch.Tensor, *angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    _rotate(q_rope, k_rope, q, k, *angles)
    return q_rope, k_rope


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
    """Rotates q and k, whose rows are segments of consecutive positions (RoPE, arXiv:2104.09864).

    Row r of segment b, `indptr[b] <= r < indptr[b + 1]`, has position `offsets[b] + r - indptr[b]`. Rows outside all
    segments are copied. The angle of pair i is `position * rope_theta^(-2 i / rotary_dim) / rope_scale`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q.
        indptr: `[segments + 1]`, int32 or int64, the first row of each segment.
        offsets: `[segments]`, dtype of indptr, the position of each segment's first row.
        rotary_dim: number of rotated dimensions; head_dim if None.
        interleave: whether pairs are `(2 i, 2 i + 1)` (GPT-J); else `(i, i + rotary_dim / 2)` (NeoX).
        rope_scale: divides the frequencies.
        rope_theta: base of the frequencies.

    Returns:
        (q_rope, k_rope), new tensors with the shapes and dtype of q and k.
    """
    return _rotated(q, k, None, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)


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
    """Rotates q and k in place, as `apply_rope` does.

    Other arguments are those of `apply_rope`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32; rotated in place.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q; rotated in place.
    """
    _rotate(q, k, q, k, None, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)


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
    """Rotates q and k as `apply_rope` does, with the frequencies of Llama 3.1: only long wavelengths are scaled.

    The frequency of pair i is `(1 - s) f / rope_scale + s f` with `f = rope_theta^(-2 i / rotary_dim)` and
    `s = clamp(f old_context_len / (2 pi (high - low)) - low / (high - low), 0, 1)`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q.
        indptr: `[segments + 1]`, int32 or int64, the first row of each segment.
        offsets: `[segments]`, dtype of indptr, the position of each segment's first row.
        rotary_dim: number of rotated dimensions; head_dim if None.
        interleave: whether pairs are `(2 i, 2 i + 1)` (GPT-J); else `(i, i + rotary_dim / 2)` (NeoX).
        rope_scale: divides the frequencies of long wavelengths.
        rope_theta: base of the frequencies.
        low_freq_factor: `low` of the formula.
        high_freq_factor: `high` of the formula, greater than low.
        old_context_len: context length before scaling.

    Returns:
        (q_rope, k_rope), new tensors with the shapes and dtype of q and k.
    """
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return _rotated(q, k, None, indptr, offsets, rotary_dim, interleave, *scaling)


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
    """Rotates q and k in place, as `apply_llama31_rope` does.

    Other arguments are those of `apply_llama31_rope`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32; rotated in place.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q; rotated in place.
    """
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _rotate(q, k, q, k, None, indptr, offsets, rotary_dim, interleave, *scaling)


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
    """Rotates q and k, with the position of each row from pos_ids (RoPE, arXiv:2104.09864).

    The angle of pair i is `pos_ids[row] * rope_theta^(-2 i / rotary_dim) / rope_scale`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q.
        pos_ids: `[nnz]`, int32 or int64, the position of each row.
        rotary_dim: number of rotated dimensions; head_dim if None.
        interleave: whether pairs are `(2 i, 2 i + 1)` (GPT-J); else `(i, i + rotary_dim / 2)` (NeoX).
        rope_scale: divides the frequencies.
        rope_theta: base of the frequencies.

    Returns:
        (q_rope, k_rope), new tensors with the shapes and dtype of q and k.
    """
    return _rotated(q, k, pos_ids, None, None, rotary_dim, interleave, rope_scale, rope_theta)


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
    """Rotates q and k in place, as `apply_rope_pos_ids` does.

    Other arguments are those of `apply_rope_pos_ids`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32; rotated in place.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q; rotated in place.
    """
    _rotate(q, k, q, k, pos_ids, None, None, rotary_dim, interleave, rope_scale, rope_theta)


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
    """Rotates q and k as `apply_rope_pos_ids` does, with the frequencies of `apply_llama31_rope`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q.
        pos_ids: `[nnz]`, int32 or int64, the position of each row.
        rotary_dim: number of rotated dimensions; head_dim if None.
        interleave: whether pairs are `(2 i, 2 i + 1)` (GPT-J); else `(i, i + rotary_dim / 2)` (NeoX).
        rope_scale: divides the frequencies of long wavelengths.
        rope_theta: base of the frequencies.
        low_freq_factor: `low` of the formula of `apply_llama31_rope`.
        high_freq_factor: `high` of the formula of `apply_llama31_rope`, greater than low.
        old_context_len: context length before scaling.

    Returns:
        (q_rope, k_rope), new tensors with the shapes and dtype of q and k.
    """
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return _rotated(q, k, pos_ids, None, None, rotary_dim, interleave, *scaling)


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
    """Rotates q and k in place, as `apply_llama31_rope_pos_ids` does.

    Other arguments are those of `apply_llama31_rope_pos_ids`.

    Args:
        q: `[nnz, num_qo_heads, head_dim]`, fp16, bf16 or fp32; rotated in place.
        k: `[nnz, num_kv_heads, head_dim]`, dtype of q; rotated in place.
    """
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _rotate(q, k, q, k, pos_ids, None, None, rotary_dim, interleave, *scaling)


@fi_api(trace=trace.cached("apply_rope_with_cos_sin_cache"))
def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates query and key by the angles of a cos_sin cache (RoPE, arXiv:2104.09864).

    Rows with a position outside the cache become NaN.

    Args:
        positions: `[nnz]`, int32 or int64, the position of each row.
        query: `[nnz, num_qo_heads * head_size]` or `[nnz, num_qo_heads, head_size]`, fp16, bf16 or fp32.
        key: `[nnz, num_kv_heads * head_size]` or `[nnz, num_kv_heads, head_size]`, dtype of query.
        head_size: dimensions of a head.
        cos_sin_cache: `[max_position, rotary_dim]`, fp32: the cosines of all pairs, then the sines.
        is_neox: whether pairs are `(i, i + rotary_dim / 2)`; else `(2 i, 2 i + 1)`. NOTE: it is the opposite of
            `interleave`.

    Returns:
        (query_out, key_out), new tensors with the shapes and dtype of query and key.

    Raises:
        ValueError: A shape, stride or device does not fit, or cos_sin_cache is not fp32.
        TypeError: Another dtype does not fit.
    """
    if cos_sin_cache is None:
        raise TypeError("cos_sin_cache must be a torch.Tensor; got None")
    import torch

    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    _rope(
        query_out,
        key_out,
        query,
        key,
        pos_ids=positions,
        cos_sin_cache=cos_sin_cache,
        head_dim=head_size,
        interleave=not is_neox,
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
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    value: torch.Tensor | None = None,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None,
    slot_mapping: torch.Tensor | None = None,
    kv_layout: str = "NHD",
) -> None:
    """Rotates query and key in place, as `apply_rope_with_cos_sin_cache` does; with weights their heads are normalized
    first, in the same pass: `x / sqrt(mean(x^2) + eps) * weight` (RMSNorm, arXiv:1910.07467). With slot_mapping the
    pass writes the rotated key and the value into a paged cache, and key stays as it is.

    Args:
        positions: `[nnz]`, int32 or int64, the position of each row.
        query: `[nnz, num_qo_heads * head_size]` or `[nnz, num_qo_heads, head_size]`; rotated in place.
        key: `[nnz, num_kv_heads * head_size]` or `[nnz, num_kv_heads, head_size]`; rotated in place.
        head_size: dimensions of a head.
        cos_sin_cache: `[max_position, rotary_dim]`, fp32: the cosines of all pairs, then the sines.
        is_neox: whether pairs are `(i, i + rotary_dim / 2)`; else `(2 i, 2 i + 1)`.
        q_weight: `[head_size]`, dtype of query, of the norm of its heads; None: no norm. head_size is then a power of
            two of at most 512 (fp32 256), rotary_dim a multiple of 16, and on the GPU heads lie at multiples of 16
            bytes (not an argument of FlashInfer, nor are the next ones).
        k_weight: likewise of key; given with q_weight.
        eps: of the norms.
        value: like key.
        paged_kv_cache: keys and values, each `[pages, page_size, num_kv_heads, head_size]`, dtype of query; with HND
            `[pages, num_kv_heads, page_size, head_size]`.
        slot_mapping: `[nnz]`, int32 or int64: `page page_size + token` of each row; below 0: the row is not written.
            Given with q_weight.
        kv_layout: "NHD" or "HND", of paged_kv_cache.

    Raises:
        ValueError: as there, and weights that do not fit.
        TypeError: as there, or one of two weights, or one of slot_mapping, value and paged_kv_cache without the
            others or weights.
        KeyError: kv_layout is unknown.
    """
    if cos_sin_cache is None:
        raise TypeError("cos_sin_cache must be a torch.Tensor; got None")
    k_cache = v_cache = None
    if paged_kv_cache is not None:
        pages = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
        k_cache, v_cache = (x.transpose(1, 2) for x in pages) if kv_layout == "HND" else pages
    _rope(
        query,
        key,
        query,
        key,
        pos_ids=positions,
        cos_sin_cache=cos_sin_cache,
        head_dim=head_size,
        interleave=not is_neox,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        v=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
    )
