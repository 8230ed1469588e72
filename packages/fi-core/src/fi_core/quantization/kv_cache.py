"""Keys and values of an NVFP4 cache in 16 bits: rows, or the pages of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.observe.subject import leaves
from fi_core.quantization import ops
from fi_core.quantization.fp4_quantization import fp4_quantize
from fi_core.quantization.layout import SfLayout, bytes_of
from fi_core.runtime.tensors import check_apart
from fi_core.utils import _unpack_paged_kv_cache, ceil_div

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_BLOCK = 16


def _dequantize(values: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[.., k]` of packed values `[.., k / 2]` and e4m3 bytes `[.., k / 16]`."""
    import torch

    shape = (*values.shape[:-1], 2 * values.shape[-1])
    kept = dtype if dtype is torch.bfloat16 else torch.float32
    out = torch.empty(shape, dtype=kept, device=values.device).view(-1, shape[-1])
    if out.numel():
        matrix, rows = (x.contiguous().view(-1, x.shape[-1]) for x in (values, scales))
        ops.block_dequantize(
            out,
            matrix,
            rows,
            factor,
            block_size=_BLOCK,
            scale_format=ops.E4M3_SCALE,
            layout=SfLayout.layout_linear.value,
        )
    return out.to(dtype).view(shape)


def _checked(name: str, values: torch.Tensor, scales_name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales as bytes; raises unless both fit."""
    import torch

    if values.dtype is not torch.uint8:
        raise TypeError(f"{name}: uint8, two values a byte, is required; got {values.dtype}")
    scales = bytes_of(scales_name, scales, "float8_e4m3fn")
    want = (*values.shape[:-1], values.shape[-1] // 8)
    if values.shape[-1] % 8 or tuple(scales.shape) != want:
        raise ValueError(
            f"{scales_name}: shape [.., k / 16] is required for {name} [.., k / 2]; got {list(scales.shape)} and "
            f"{list(values.shape)}"
        )
    return scales


def _factor(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    import torch

    return torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(1)


@fi_api
def nvfp4_kv_quantize(input: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows to NVFP4 with scales in rows, so that `value = e2m1 * block scale * global_scale`.

    Args:
        input: `[m, k]`, bf16 or fp16, k a multiple of 16.
        global_scale: `[1]`, fp32, on the device of input; conventionally `max(abs(input)) / (448 * 6)`.

    Returns:
        fp4_output: `[m, k / 2]`, uint8, two values a byte, the even one in the lower half.
        block_scales: `[m, k / 16]`, the bytes of e4m3 scales as uint8.

    Raises:
        ValueError: A shape or device does not fit.
        TypeError: A dtype does not fit.
    """
    if input.ndim != 2 or input.shape[1] % _BLOCK:
        raise ValueError(f"input must have shape [m, k], k divisible by {_BLOCK}; got {list(input.shape)}")
    values, scales = fp4_quantize(
        input, global_scale, _BLOCK, is_sf_swizzled_layout=False, is_global_scale_inversed=True
    )
    return values, scales.view(input.shape[0], input.shape[1] // _BLOCK)


@fi_api
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes `e2m1 * block scale * global_scale` for scales in rows.

    Args:
        fp4_data: `[.., k / 2]`, uint8: two values a byte, the even one in the lower half; k is a multiple of 16.
        block_scales: `[.., k / 16]`, e4m3 or its bytes as uint8.
        global_scale: fp32, one element.
        output_dtype: bf16 or fp16; None means bf16.

    Returns:
        `[.., k]`.

    Raises:
        ValueError: A shape or output_dtype does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    import torch

    dtype = output_dtype or torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"output_dtype: bfloat16 or float16 is required; got {dtype}")
    scales = _checked("fp4_data", fp4_data, "block_scales", block_scales)
    if global_scale.numel() != 1:
        raise ValueError(f"global_scale: one element is required; got {list(global_scale.shape)}")
    return _dequantize(fp4_data, scales, _factor(global_scale, fp4_data.device), dtype)


@fi_api
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes the keys and values of requests from an NVFP4 cache into dense tensors; later positions stay as they are.

    Args:
        paged_kv_cache, kv_cache_sf: as of `nvfp4_quantize_append_paged_kv_cache`.
        block_tables: `[batch, pages of a request or more]`, int32 or int64.
        seq_lens: `[batch]`, int32 or int64, at most max_len.
        k_scale, v_scale: the factor of all keys and of all values: a number, or a tensor of one element.
        output_k, output_v: `[batch, max_len, num_heads, head_dim]`, bf16 or fp16.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError: A shape does not fit; on the CPU also a page that is not in the cache.
        TypeError: A dtype does not fit.
        KeyError: kv_layout is unknown.
    """
    import torch

    if any(isinstance(scale, torch.Tensor) and scale.numel() != 1 for scale in (k_scale, v_scale)):
        raise ValueError("k_scale and v_scale must be scalar tensors, or numbers; got a tensor of another size")
    caches = _unpack_paged_kv_cache(paged_kv_cache, kv_layout), _unpack_paged_kv_cache(kv_cache_sf, kv_layout)
    read = dict(leaves("paged_kv_cache", paged_kv_cache)) | dict(leaves("kv_cache_sf", kv_cache_sf))
    read |= {"block_tables": block_tables, "seq_lens": seq_lens, "k_scale": k_scale, "v_scale": v_scale}
    check_apart({"output_k": output_k, "output_v": output_v}, read)
    for name, scale, out, values, scales in zip("kv", (k_scale, v_scale), (output_k, output_v), *caches):
        title = f"{name} of paged_kv_cache"
        scales = _checked(title, values, f"{name} of kv_cache_sf", scales)
        heads, page_size = values.shape[1:3] if kv_layout == "HND" else values.shape[2:0:-1]
        batch, max_len = out.shape[:2]
        if tuple(out.shape[2:]) != (heads, 2 * values.shape[-1]) or seq_lens.shape != (batch,):
            raise ValueError(
                f"output_{name}: shape [batch, max_len, {heads}, {2 * values.shape[-1]}] is required with seq_lens "
                f"[batch]; got {list(out.shape)} and {list(seq_lens.shape)}"
            )
        pages = ceil_div(max_len, page_size)
        if block_tables.shape[0] != batch or block_tables.shape[1] < pages:
            raise ValueError(
                f"block_tables column count insufficient: [{batch}, {pages}] or wider is required for {max_len} tokens "
                f"in pages of {page_size}; got {list(block_tables.shape)}"
            )
        if not out.numel():
            continue
        token = torch.arange(max_len, device=out.device)
        kept = token < seq_lens[:, None]
        found = block_tables.long()[:, token // page_size]
        if out.device.type == "cpu" and bool((kept & ((found < 0) | (found >= len(values)))).any()):
            raise ValueError(f"block_tables must name pages of the cache, 0 to {len(values) - 1}; got another one")
        at = found.clamp(0, len(values) - 1), token % page_size
        packed, codes = ((x.transpose(1, 2) if kv_layout == "HND" else x)[at] for x in (values, scales))
        dense = _dequantize(packed, codes, _factor(scale, out.device), out.dtype)
        out.copy_(torch.where(kept[..., None, None], dense, out))
