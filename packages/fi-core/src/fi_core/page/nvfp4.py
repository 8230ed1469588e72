"""Appending to a paged KV cache in NVFP4: e2m1 values with an e4m3 scale per 16 elements, quantized on the way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from fi_core.observe.log import fi_api
from fi_core.page import nvfp4_trace as trace
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values
from fi_core.utils import _unpack_paged_kv_cache, int32_index

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _Config(NamedTuple):
    aligned: bool  # rows start at multiples of a vector of each tensor


def _unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype = DTYPES[axes["dtype"]].device
    entries = tuple(
        Entry(f"append_nvfp4_{name}", f"append_nvfp4_rows<{dtype}, {str(aligned).lower()}>", 256, _Config(aligned))
        for name, aligned in (("vectors", True), ("elements", False))
    )
    return Unit("fi/page/append_nvfp4_kv_cache.cuh", "Nvfp4AppendParams", entries)


APPEND_NVFP4_KV_CACHE = Op(
    name="append_nvfp4_kv_cache",
    family="page",
    arguments="Tensor append_key, Tensor append_value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scales, "
    "Tensor(d!)? v_scales=None, Tensor? slot_mapping=None, Tensor? batch_indices=None, Tensor? positions=None, "
    "Tensor? kv_indices=None, Tensor? kv_indptr=None, Tensor? kv_last_page_len=None, float k_scale=1.0, "
    "float v_scale=1.0, Tensor? k_device_scale=None, Tensor? v_device_scale=None, bool head_major=False",
    axes={"dtype": ("f16", "bf16")},
    config=_Config,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _unit)),
)

_append = operator(APPEND_NVFP4_KV_CACHE)


def _factor(name: str, scale: float | torch.Tensor, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """A global scale as (number, tensor on the device)."""
    if scale is None:
        raise TypeError(f"{name}: a number or a tensor is required; got None")
    if not isinstance(scale, (int, float)):
        if scale.device == device or scale.device.type != "cpu" or scale.numel() != 1:
            return 1.0, scale
        scale = float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name}: a positive, finite factor is required; got {scale}")
    return float(scale), None


def _quantize(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str,
    **tables: torch.Tensor,
) -> None:
    k_cache, v_cache = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    k_scales, v_scales = _unpack_paged_kv_cache(kv_cache_sf, kv_layout)
    k_number, k_tensor = _factor("k_scale", k_scale, append_key.device)
    v_number, v_tensor = _factor("v_scale", v_scale, append_key.device)
    _append(
        append_key,
        append_value,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scales=k_scales,
        v_scales=v_scales,
        k_scale=k_number,
        v_scale=v_number,
        k_device_scale=k_tensor,
        v_device_scale=v_tensor,
        head_major=kv_layout == "HND",
        **tables,
    )


@fi_api(trace=trace.append)
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantizes new K and V rows to NVFP4 and writes them into the pages of their requests, in place.

    A block of 16 elements becomes 16 e2m1 values and one e4m3 scale, with `value = e2m1 * scale * k_scale` (or
    v_scale): the bits of `nvfp4_quantize` with a global scale of `1 / k_scale`. Attention takes both caches, with
    `kv_cache_sf`, and the same k_scale and v_scale. Rows find their pages as in `append_paged_kv_cache`.

    Args:
        append_key: `[nnz, num_heads, head_dim]`, fp16 or bf16, head_dim a multiple of 16. Any strides, with the last
            dimension contiguous.
        append_value: `[nnz, num_heads, v_head_dim]`, as append_key.
        batch_indices: `[nnz]`, int32, the request of each row.
        positions: `[nnz]`, int32, the position of each row in its request.
        paged_kv_cache: `[pages, 2, page_size, num_heads, head_dim / 2]` ("NHD") or `[pages, 2, num_heads, page_size,
            head_dim / 2]` ("HND"), or a tuple (k_cache, v_cache) without the axis of size 2; uint8, two values a byte,
            the even one in the lower half.
        kv_cache_sf: the scales, e4m3 or its bytes as uint8, with head_dim / 16 instead of head_dim / 2.
        kv_indices: `[num_indices]`, int32, the pages of all requests after the append.
        kv_indptr: `[batch_size + 1]`, int32, the offsets of the requests in kv_indices.
        kv_last_page_len: `[batch_size]`, int32, tokens in the last page of each request.
        k_scale, v_scale: the factor of all keys and of all values, positive and finite: a number, or a tensor of one
            element: fp32 on the device, which a CUDA graph reads again, or on the host. Conventionally
            `max(abs(key)) / (448 * 6)`.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError: A shape, stride, device or factor does not fit. A page, position or offset is out of range, on
            the CPU; on CUDA with FI_CHECK=1 at import, which synchronizes.
        TypeError: A dtype does not fit.
        KeyError: kv_layout is unknown, or a cache is neither a tensor nor a tuple.
    """
    _quantize(
        append_key,
        append_value,
        paged_kv_cache,
        kv_cache_sf,
        k_scale,
        v_scale,
        kv_layout,
        batch_indices=int32_index(batch_indices),
        positions=int32_index(positions),
        kv_indices=int32_index(kv_indices),
        kv_indptr=int32_index(kv_indptr),
        kv_last_page_len=int32_index(kv_last_page_len),
    )


@fi_api(trace=trace.slots)
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """`nvfp4_quantize_append_paged_kv_cache` where each row names its slot.

    The arguments that are not listed, and the errors, are those of that function.

    Args:
        slot_mapping: int32 or int64, contiguous; row i goes to slot `slot_mapping[i] % page_size` of page
            `slot_mapping[i] // page_size`. Rows with a negative slot are skipped, as are rows without a slot and slots
            without a row: engines pad either.
    """
    if slot_mapping.ndim == 1 and len(slot_mapping) != len(append_key) == len(append_value):
        rows = min(len(slot_mapping), len(append_key))
        append_key, append_value, slot_mapping = append_key[:rows], append_value[:rows], slot_mapping[:rows]
    _quantize(
        append_key, append_value, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout, slot_mapping=slot_mapping
    )


@fi_api(trace=trace.MLA)
def nvfp4_quantize_append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    ckv_sf_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    ckv_scale: float,
    kpe_scale: float,
) -> None:
    """Quantizes new compressed KV rows to NVFP4 and rope keys to e4m3, and writes them into the pages, in place (MLA).

    A block of 16 elements of append_ckv becomes 16 e2m1 values and one e4m3 scale, with
    `value = e2m1 * scale * ckv_scale`, and an element of append_kpe one e4m3 value, with `value = e4m3 * kpe_scale`,
    which saturates. Rows find their pages as in `append_paged_kv_cache`.

    Args:
        append_ckv: `[nnz, head_dim_ckv]`, fp16 or bf16; head_dim_ckv is a multiple of 16 (512 in arXiv:2405.04434).
        append_kpe: `[nnz, head_dim_kpe]`, dtype of append_ckv, after the rotation; a multiple of 16 (64 there).
        batch_indices: `[nnz]`, int32, the request of each row.
        positions: `[nnz]`, int32, the position of each row in its request.
        ckv_cache: `[pages, page_size, head_dim_ckv / 2]`, uint8, two values a byte, the even one in the lower half.
        ckv_sf_cache: `[pages, page_size, head_dim_ckv / 16]`, e4m3.
        kpe_cache: `[pages, page_size, head_dim_kpe]`, e4m3.
        kv_indices: `[num_indices]`, int32, the pages of all requests after the append.
        kv_indptr: `[batch_size + 1]`, int32, the offsets of the requests in kv_indices.
        kv_last_page_len: `[batch_size]`, int32, tokens in the last page of each request.
        ckv_scale: the factor of all latents, a positive, finite number.
        kpe_scale: the factor of all rope keys, likewise.

    Raises:
        ValueError: A shape, stride, device or factor does not fit. A page, position or offset is out of range, on
            the CPU; on CUDA with FI_CHECK=1 at import, which synchronizes.
        TypeError: A dtype does not fit.
    """
    ckv_number, ckv_tensor = _factor("ckv_scale", ckv_scale, append_ckv.device)
    kpe_number, kpe_tensor = _factor("kpe_scale", kpe_scale, append_ckv.device)
    _append(
        append_ckv.unsqueeze(1),
        append_kpe.unsqueeze(1),
        k_cache=ckv_cache.unsqueeze(2),
        v_cache=kpe_cache.unsqueeze(2),
        k_scales=ckv_sf_cache.unsqueeze(2),
        batch_indices=int32_index(batch_indices),
        positions=int32_index(positions),
        kv_indices=int32_index(kv_indices),
        kv_indptr=int32_index(kv_indptr),
        kv_last_page_len=int32_index(kv_last_page_len),
        k_scale=ckv_number,
        v_scale=kpe_number,
        k_device_scale=ckv_tensor,
        v_device_scale=kpe_tensor,
    )
