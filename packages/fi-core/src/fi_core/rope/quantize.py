"""RoPE with fp8 output, for attention on fp8 caches: q and k are rotated and converted, k and v may go into pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.env import env
from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.page import check_append
from fi_core.rope import trace
from fi_core.rope.unit import entries
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Impl, Op, Unit
from fi_core.utils import _unpack_paged_kv_cache

if TYPE_CHECKING:
    import torch

_CHECK = env.check  # read once: calls pay nothing for it


def _rope_quantize_unit(axes: Axes) -> Unit:
    dtype, out = DTYPES[str(axes["dtype"])], DTYPES[str(axes["out"])]
    chosen = entries("rope_quantize", f"{dtype.device}, {out.device}", 16 // dtype.bytes)
    return Unit("fi/rope/rope_quantize.cuh", "RopeQuantizeParams", chosen)


ROPE_QUANTIZE = Op(
    name="rope_quantize",
    family="rope",
    schema="(Tensor q_rope, Tensor k_rope, Tensor? q_nope, Tensor? k_nope, Tensor? v, Tensor cos_sin_cache, "
    "Tensor pos_ids, Tensor(a!) q_rope_out, Tensor(b!)? k_rope_out, Tensor(c!)? q_nope_out, Tensor(d!)? k_nope_out, "
    "Tensor(e!)? k_cache, Tensor(f!)? v_cache, Tensor? kv_indices, Tensor? kv_indptr, Tensor? batch_indices, "
    "Tensor? positions, bool is_neox, float quant_scale_q, float quant_scale_kv, int page_size, bool head_major, "
    "bool? enable_pdl) -> ()",
    axes={"dtype": ("f16", "bf16"), "out": ("e4m3", "e5m2")},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _rope_quantize_unit)),
)


def _key(q_rope: torch.Tensor, *rest: torch.Tensor) -> tuple[int, torch.dtype, torch.dtype]:
    return q_rope.get_device(), q_rope.dtype, rest[6].dtype  # that of q_rope_out


_rope_quantize = Launcher(ROPE_QUANTIZE, _key)


def _fp8(dtype: torch.dtype | None, *outs: torch.Tensor | None) -> torch.dtype:
    """The dtype asked for, else that of the first output given, else e4m3."""
    for out in outs:
        if out is not None and out.dtype != (dtype := dtype or out.dtype):
            raise TypeError(f"quantize_dtype: all outputs must have one dtype, {dtype}; got {out.dtype}")
    if dtype is not None:
        return dtype
    import torch

    return torch.float8_e4m3fn


def _out(given: torch.Tensor | None, rope: torch.Tensor, nope: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The output given, else a new one like `nope`, else one without columns."""
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
    """q and k as fp8: `rotate(x_rope) * scale` and `x_nope * scale`, in fp32, rounded once; the cast saturates.

    q_rope: `[nnz, num_qo_heads, rotary_dim]`, q_nope: `[nnz, num_qo_heads, no_rope_dim]`, fp16 or bf16.
    k_rope, k_nope: the same with num_kv_heads (MHA, GQA), or `[nnz, *]` (MLA). A nope that is None has no columns.
    cos_sin_cache: `[max_position, rotary_dim]`, fp32 (else ValueError): cosines, then sines. pos_ids: `[nnz]`, int32 or
    int64; a position outside the table gives NaN. quant_scale_q, quant_scale_kv: MULTIPLIED (norms divide).
    Outputs: allocated where None; else they may be slices of larger tensors, with the last dimension contiguous.
    quantize_dtype: float8_e4m3fn or float8_e5m2; None means that of the first output given, else e4m3.
    backend: "cuda" or "cutile", which FlashInfer tells apart; one kernel here.

    Returns (q_rope_out, k_rope_out, q_nope_out, k_nope_out).
    """
    if backend not in ("cuda", "cutile"):
        raise ValueError(f"backend must be 'cuda' or 'cutile'; got {backend!r}")
    dtype = _fp8(quantize_dtype, q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    q_rope_out, k_rope_out = _out(q_rope_out, q_rope, q_rope, dtype), _out(k_rope_out, k_rope, k_rope, dtype)
    q_nope_out, k_nope_out = _out(q_nope_out, q_rope, q_nope, dtype), _out(k_nope_out, k_rope, k_nope, dtype)
    _rope_quantize(
        q_rope, k_rope, q_nope, k_nope, None, cos_sin_cache, pos_ids, q_rope_out, k_rope_out, q_nope_out, k_nope_out,
        None, None, None, None, None, None, is_neox, quant_scale_q, quant_scale_kv, 1, False, enable_pdl,
    )  # fmt: skip
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
    """`rope_quantize_fp8` by its name for MLA: k_rope `[nnz, rotary_dim]`, k_nope `[nnz, no_rope_dim]`."""
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip


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
    """`rope_quantize_fp8` whose k goes into a paged fp8 cache, and v * quant_scale_kv beside it, in one kernel.

    GQA: k_rope, k_nope, v `[nnz, num_kv_heads, *]`; paged_kv_cache = (k_cache, v_cache), each
    `[pages, page_size, num_kv_heads, head_dim]` (NHD) or `[pages, num_kv_heads, page_size, head_dim]` (HND), fp8; a
    row of K is [rope | nope]. MLA: k_rope, k_nope `[nnz, *]`, v None; paged_kv_cache = (ckv_cache, kpe_cache), each
    `[pages, page_size, *]`; nope goes to the first, rope to the second. Strides are free but for the last dimension.

    Row i is token positions[i] of request b = batch_indices[i]: slot positions[i] % page_size of page
    kv_indices[kv_indptr[b] + positions[i] // page_size]. Rows with batch_indices < 0 are not appended (q is still
    converted). Each of the five index tensors is int32 or int64. The other arguments: see `rope_quantize_fp8`.

    Returns (q_rope_out, q_nope_out). Raises KeyError for another kv_layout, ValueError or TypeError for what does not
    fit. With FI_CHECK=1 at import, also ValueError for page ids, positions and offsets out of range, which waits for
    the device.
    """
    if v is not None:
        k_cache, v_cache = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    elif isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2:
        k_cache, v_cache = paged_kv_cache
    else:
        raise TypeError(
            "paged_kv_cache: a tuple (ckv_cache, kpe_cache) is required where v is None; "
            f"got {type(paged_kv_cache).__name__}"
        )
    if _CHECK:
        check_append(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[0], page_size)
    dtype = _fp8(quantize_dtype, q_rope_out, q_nope_out, k_cache)
    q_rope_out, q_nope_out = _out(q_rope_out, q_rope, q_rope, dtype), _out(q_nope_out, q_rope, q_nope, dtype)
    _rope_quantize(
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, q_rope_out, None, q_nope_out, None, k_cache, v_cache,
        kv_indices, kv_indptr, batch_indices, positions, is_neox, quant_scale_q, quant_scale_kv, page_size,
        kv_layout == "HND", enable_pdl,
    )  # fmt: skip
    return q_rope_out, q_nope_out
