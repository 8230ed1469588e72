"""RoPE with fp8 output, for attention with an fp8 KV cache; k and v can be written into pages in the same kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.rope import trace
from fi_core.rope.kernel_entries import RopeConfig, entries
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Implementation, Op, Unit, Values
from fi_core.utils import _unpack_paged_kv_cache

if TYPE_CHECKING:
    import torch


def _rope_quantize_unit(axes: Values) -> Unit:
    dtype, out = DTYPES[str(axes["dtype"])], DTYPES[str(axes["out"])]
    chosen = entries("rope_quantize", f"{dtype.device}, {out.device}", (16 // dtype.bytes, 1))
    return Unit("fi/rope/rope_quantize.cuh", "RopeQuantizeParams", chosen)


ROPE_QUANTIZE = Op(
    name="rope_quantize",
    family="rope",
    arguments="Tensor(a!) q_rope_out, Tensor q_rope, Tensor k_rope, Tensor cos_sin_cache, Tensor pos_ids, "
    "Tensor? q_nope=None, Tensor? k_nope=None, Tensor? v=None, Tensor(b!)? k_rope_out=None, "
    "Tensor(c!)? q_nope_out=None, Tensor(d!)? k_nope_out=None, Tensor(e!)? k_cache=None, Tensor(f!)? v_cache=None, "
    "Tensor? kv_indices=None, Tensor? kv_indptr=None, Tensor? batch_indices=None, Tensor? positions=None, "
    "bool is_neox=True, float quant_scale_q=1.0, float quant_scale_kv=1.0, int page_size=1, bool head_major=False, "
    "bool? enable_pdl=None",
    axes={"dtype": ("f16", "bf16"), "out": ("e4m3", "e5m2")},
    config=RopeConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _rope_quantize_unit)),
)


_rope_quantize = operator(ROPE_QUANTIZE)


def _fp8(dtype: torch.dtype | None, *outs: torch.Tensor | None) -> torch.dtype:
    """The dtype that the caller passes, else the dtype of the first output buffer, else e4m3."""
    for out in outs:
        if out is not None and out.dtype != (dtype := dtype or out.dtype):
            raise TypeError(f"quantize_dtype: all outputs must have one dtype, {dtype}; got {out.dtype}")
    if dtype is not None:
        return dtype
    import torch

    return torch.float8_e4m3fn


def _out(given: torch.Tensor | None, rope: torch.Tensor, nope: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The output buffer that the caller passes, else a new one like `nope`, else one with no columns."""
    if given is not None:
        return given
    return rope.new_empty((*rope.shape[:-1], 0) if nope is None else nope.shape, dtype=dtype)


@fi_api(trace=trace.quantize)
def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotates the rope parts of q and k and quantizes all parts to fp8: `rotate(x_rope) * scale` and `x_nope * scale`.

    The arithmetic is in fp32 with one rounding; the cast saturates. Output buffers may be slices of larger tensors,
    with the last dimension contiguous.

    Args:
        q_rope: `[nnz, num_qo_heads, rotary_dim]`, fp16 or bf16.
        k_rope: `[nnz, num_kv_heads, rotary_dim]` (MHA, GQA) or `[nnz, rotary_dim]` (MLA), dtype of q_rope.
        q_nope: `[nnz, num_qo_heads, no_rope_dim]`, dtype of q_rope. None means no columns.
        k_nope: `[nnz, num_kv_heads, no_rope_dim]` or `[nnz, no_rope_dim]` (MLA). None means no columns.
        cos_sin_cache: `[max_position, rotary_dim]`, fp32: the cosines of all pairs, then the sines.
        pos_ids: `[nnz]`, int32 or int64, the position of each row. A position outside the cache gives NaN.
        is_neox: whether pairs are `(i, i + rotary_dim / 2)`; else `(2 i, 2 i + 1)`.
        quantize_dtype: float8_e4m3fn or float8_e5m2. None means the dtype of the first output buffer, else e4m3.
        quant_scale_q: factor of q before the cast. NOTE: it multiplies; the scale of the norms divides.
        quant_scale_kv: factor of k before the cast.
        q_rope_out: fp8, shape of q_rope. Allocated if None.
        k_rope_out: fp8, shape of k_rope. Allocated if None.
        q_nope_out: fp8, shape of q_nope. Allocated if None.
        k_nope_out: fp8, shape of k_nope. Allocated if None.
        enable_pdl: programmatic dependent launch.
        backend: "cuda" or "cutile", the names of FlashInfer's kernels; both run the same kernel here.

    Returns:
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out).

    Raises:
        ValueError: A shape, stride, device or backend does not fit, or cos_sin_cache is not fp32.
        TypeError: Another dtype does not fit.
    """
    if backend not in ("cuda", "cutile"):
        raise ValueError(f"backend must be 'cuda' or 'cutile'; got {backend!r}")
    dtype = _fp8(quantize_dtype, q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    q_rope_out, k_rope_out = _out(q_rope_out, q_rope, q_rope, dtype), _out(k_rope_out, k_rope, k_rope, dtype)
    q_nope_out, k_nope_out = _out(q_nope_out, q_rope, q_nope, dtype), _out(k_nope_out, k_rope, k_nope, dtype)
    _rope_quantize(
        q_rope_out,
        q_rope,
        k_rope,
        cos_sin_cache,
        pos_ids=pos_ids,
        q_nope=q_nope,
        k_nope=k_nope,
        k_rope_out=k_rope_out,
        q_nope_out=q_nope_out,
        k_nope_out=k_nope_out,
        is_neox=is_neox,
        quant_scale_q=quant_scale_q,
        quant_scale_kv=quant_scale_kv,
        enable_pdl=enable_pdl,
    )
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


@fi_api(trace=trace.MLA_QUANTIZE)
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotates and quantizes q and k of MLA: `rope_quantize_fp8` under FlashInfer's name for MLA.

    Args:
        q_rope: `[nnz, num_qo_heads, rotary_dim]`, fp16 or bf16.
        k_rope: `[nnz, rotary_dim]`, dtype of q_rope.
        q_nope: `[nnz, num_qo_heads, no_rope_dim]`, dtype of q_rope. None means no columns.
        k_nope: `[nnz, no_rope_dim]`, dtype of q_rope. None means no columns.
        cos_sin_cache: `[max_position, rotary_dim]`, fp32: the cosines of all pairs, then the sines.
        pos_ids: `[nnz]`, int32 or int64, the position of each row.
        is_neox: whether pairs are `(i, i + rotary_dim / 2)`; else `(2 i, 2 i + 1)`.
        quantize_dtype: as for `rope_quantize_fp8`.
        quant_scale_q: factor of q before the cast.
        quant_scale_kv: factor of k before the cast.
        q_rope_out: fp8, shape of q_rope. Allocated if None.
        k_rope_out: fp8, shape of k_rope. Allocated if None.
        q_nope_out: fp8, shape of q_nope. Allocated if None.
        k_nope_out: fp8, shape of k_nope. Allocated if None.
        enable_pdl: programmatic dependent launch.

    Returns:
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out).
    """
    return rope_quantize_fp8(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cos_sin_cache=cos_sin_cache,
        pos_ids=pos_ids,
        is_neox=is_neox,
        quantize_dtype=quantize_dtype,
        quant_scale_q=quant_scale_q,
        quant_scale_kv=quant_scale_kv,
        q_rope_out=q_rope_out,
        k_rope_out=k_rope_out,
        q_nope_out=q_nope_out,
        k_nope_out=k_nope_out,
        enable_pdl=enable_pdl,
    )


@fi_api(trace=trace.quantize_append)
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates and quantizes q and k as `rope_quantize_fp8` does, and writes k and `v * quant_scale_kv` into pages.

    One kernel does both. Row i becomes token `t = positions[i]` of request `b = batch_indices[i]`: slot `t % page_size`
    of page `kv_indices[kv_indptr[b] + t // page_size]`. Rows with `batch_indices[i] < 0` are not appended; their q is
    still converted. A row of K is `[rope | nope]`. With MLA, nope goes to ckv_cache and rope to kpe_cache.

    Args:
        q_rope: `[nnz, num_qo_heads, rotary_dim]`, fp16 or bf16.
        k_rope: `[nnz, num_kv_heads, rotary_dim]` (MHA, GQA) or `[nnz, rotary_dim]` (MLA), dtype of q_rope.
        q_nope: `[nnz, num_qo_heads, no_rope_dim]`, dtype of q_rope. None means no columns.
        k_nope: `[nnz, num_kv_heads, no_rope_dim]` or `[nnz, no_rope_dim]` (MLA). None means no columns.
        v: `[nnz, num_kv_heads, v_head_dim]`, dtype of q_rope; None for MLA.
        cos_sin_cache: `[max_position, rotary_dim]`, fp32: the cosines of all pairs, then the sines.
        pos_ids: `[nnz]`, int32 or int64, the position of each row for the rotation.
        paged_kv_cache: (k_cache, v_cache), fp8, each `[pages, page_size, num_kv_heads, head_dim]` (NHD) or
            `[pages, num_kv_heads, page_size, head_dim]` (HND); for MLA (ckv_cache, kpe_cache), each
            `[pages, page_size, dim]`. Any strides, with the last dimension contiguous.
        kv_indices: `[num_indices]`, int32 or int64, the pages of all requests after the append.
        kv_indptr: `[batch_size + 1]`, int32 or int64, the offsets of the requests in kv_indices.
        batch_indices: `[nnz]`, int32 or int64, the request of each row.
        positions: `[nnz]`, int32 or int64, the position of each row in its request.
        is_neox: whether pairs are `(i, i + rotary_dim / 2)`; else `(2 i, 2 i + 1)`.
        quantize_dtype: float8_e4m3fn or float8_e5m2. None means the dtype of the first output buffer, else the cache's.
        quant_scale_q: factor of q before the cast.
        quant_scale_kv: factor of k and v before the cast.
        page_size: tokens per page.
        kv_layout: "NHD" or "HND".
        q_rope_out: fp8, shape of q_rope. Allocated if None.
        q_nope_out: fp8, shape of q_nope. Allocated if None.
        enable_pdl: programmatic dependent launch.

    Returns:
        (q_rope_out, q_nope_out).

    Raises:
        ValueError: A shape, stride or device does not fit, or cos_sin_cache is not fp32. A page, position
            or offset is out of range, on the CPU; on CUDA with FI_CHECK=1 at import, which synchronizes.
        TypeError: Another dtype does not fit, or paged_kv_cache is not a tuple for MLA.
        KeyError: kv_layout is unknown.
    """
    if v is not None:
        k_cache, v_cache = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    elif isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2:
        k_cache, v_cache = paged_kv_cache
    else:
        raise TypeError(
            "paged_kv_cache: a tuple (ckv_cache, kpe_cache) is required if v is None; "
            f"got {type(paged_kv_cache).__name__}"
        )
    dtype = _fp8(quantize_dtype, q_rope_out, q_nope_out, k_cache)
    q_rope_out, q_nope_out = _out(q_rope_out, q_rope, q_rope, dtype), _out(q_nope_out, q_rope, q_nope, dtype)
    _rope_quantize(
        q_rope_out,
        q_rope,
        k_rope,
        cos_sin_cache,
        pos_ids=pos_ids,
        q_nope=q_nope,
        k_nope=k_nope,
        v=v,
        q_nope_out=q_nope_out,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_indices=kv_indices,
        kv_indptr=kv_indptr,
        batch_indices=batch_indices,
        positions=positions,
        is_neox=is_neox,
        quant_scale_q=quant_scale_q,
        quant_scale_kv=quant_scale_kv,
        page_size=page_size,
        head_major=kv_layout == "HND",
        enable_pdl=enable_pdl,
    )
    return q_rope_out, q_nope_out
