"""Cases of block quantization and bit packing."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs
from fi_bench.cases.common import ceil_div
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def _sizes(p: Namespace) -> dict[str, Any]:
    return {"n": p.m * p.k, "bitorder": p.bitorder}


def _pack(rows: torch.Tensor, bitorder: str) -> torch.Tensor:
    """Bits along the last dimension to bytes, zero padded."""
    import torch

    padded = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[-1] % 8))
    shifts = torch.arange(8, device=rows.device, dtype=torch.uint8)
    weights = 1 << (7 - shifts if bitorder == "big" else shifts)
    packed: torch.Tensor = (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return packed


def _segments(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs segments of equal length."""
    import torch

    packed = _pack(x.x.view(x.m, x.k), x.bitorder).flatten()
    return packed, torch.arange(x.m + 1, dtype=torch.int32, device=x.x.device) * ceil_div(x.k, 8)


def _codes(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y as e2m1 with the signs of x, two values a byte; ties go to the even code."""
    import torch

    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=y.device)
    below = torch.nextafter(edges, torch.zeros_like(edges))
    edges[1::2] = below[1::2]  # where the upper code is even, the edge itself belongs to it
    codes = (torch.bucketize(y.abs(), edges) + 8 * x.signbit()).to(torch.uint8).unflatten(-1, (-1, 2))
    packed: torch.Tensor = codes[..., 0] | codes[..., 1] << 4
    return packed


def _stored(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Scales [..., rows, columns] in a layout."""
    import torch

    if layout == "linear":
        return scales
    tile, quarters = (128, 4) if layout == "128x4" else (8, 1)
    rows, columns = scales.shape[-2:]
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % tile))
    tiles: torch.Tensor = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, quarters, tile // quarters))
    return tiles.movedim((-2, -3, -4), (-4, -3, -2)).reshape(padded.shape)


def _power_of_two(amax: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponents of the scales as bytes, and the scales."""
    import torch

    exponents = torch.ceil(torch.log2(amax / limit)).clamp(-127, 127)
    return (exponents + 127).to(torch.uint8), torch.exp2(exponents)


def _torch_nvfp4(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    blocks = x.a.float().unflatten(-1, (-1, x.sf_vec_size))
    scales = (x.a_global_sf * (blocks.abs().amax(-1) * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
    factor = torch.where(scales.float() == 0, 0.0, 1 / (scales.float() / x.a_global_sf))
    codes, bytes = _codes((blocks * factor[..., None]).flatten(-2), x.a), scales.view(torch.uint8)
    if x.get("do_shuffle"):
        rows = torch.arange(x.a.shape[0], device=x.a.device).view(-1, 8, 4).mT.reshape(-1)
        codes, bytes = codes[rows], bytes[rows]
    layout = x.sfLayout.name.removeprefix("layout_") if "sfLayout" in x else "128x4"
    stored = _stored(bytes, layout)
    return codes, stored.flatten(1) if x.a.ndim == 3 else stored


def _torch_mxfp4(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.a.float().unflatten(-1, (-1, 32))
    bytes, scales = _power_of_two(blocks.abs().amax(-1), 6.0)
    codes = _codes((blocks / scales[..., None]).flatten(-2), x.a)
    return codes, _stored(bytes, x.sfLayout.name.removeprefix("layout_"))


def _torch_mxfp8(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    width = ceil_div(x.input.shape[-1], x.alignment) * x.alignment
    padded = torch.nn.functional.pad(x.input.float(), (0, width - x.input.shape[-1]))
    blocks = padded.unflatten(-1, (-1, 32))
    bytes, scales = _power_of_two(blocks.abs().amax(-1), 448.0)
    values = (blocks / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
    return values, _stored(bytes, "128x4" if x.is_sf_swizzled_layout else "linear").flatten()


def _torch_values(x: Inputs) -> torch.Tensor:
    """MXFP4 to fp32."""
    import torch

    codes = torch.stack((x.a_fp4 & 15, x.a_fp4 >> 4), -1).flatten(-2).int()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    values = table[codes & 7].copysign(7.5 - codes)
    rows, columns = values.shape[0], values.shape[1] // 32
    places = _places(rows, columns, x.sfLayout.name.removeprefix("layout_"), codes.device)
    scales = torch.exp2(x.a_sf.flatten()[places].float() - 127)
    return values * scales.repeat_interleave(32, -1)


def _places(rows: int, columns: int, layout: str, device: Any) -> torch.Tensor:
    """The offsets of scales [rows, columns] in a layout."""
    import torch

    r, s = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    c = ceil_div(columns, 4) * 4
    if layout == "128x4":
        return r // 128 * 128 * c + s // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + s % 4
    return r // 8 * 8 * c + s // 4 * 32 + r % 8 * 4 + s % 4 if layout == "8x4" else r * columns + s


def _unsupported(_: str, p: Namespace) -> str | None:
    return "--per_token_activation is not supported" if p.per_token_activation else None


def _quantizer(routine: str, torch: Callable[[Inputs], Any], *same: str) -> Case:
    """The check is exact: values and scales have the bits of the reference."""
    return described(
        f"quantization.{routine}",
        lambda p: sizes_of(p, *same, rows="m", columns="k", dtype="input_dtype"),
        None,
        torch,
        op="block_quantize",
        unsupported=_unsupported,
    )


CASES = (
    _quantizer("nvfp4_quantize", _torch_nvfp4, "sf_layout", "do_shuffle", "sf_vec_size", "global_scale"),
    _quantizer("nvfp4_batched_quantize", _torch_nvfp4, "batch_size", "sf_vec_size", "global_scale"),
    _quantizer("mxfp4_quantize", _torch_mxfp4, "sf_layout"),
    _quantizer("mxfp8_quantize", _torch_mxfp8, "is_sf_swizzled_layout", "alignment"),
    described(
        "quantization.mxfp4_dequantize",
        lambda p: sizes_of(p, "sf_layout", rows="m", columns="k"),
        None,
        _torch_values,
        op="block_dequantize",
    ),
    described(
        "quantization.block_scale_interleave",
        lambda p: {"batch_size": p.batch_size or 1, "rows": p.m, "columns": p.k // p.sf_vec_size},
        None,
        lambda x: _stored(x.unswizzled_sf, "128x4").flatten(),
        op="block_scale_interleave",
    ),
    described(
        "quantization.packbits",
        _sizes,
        lambda f, x: f(x.x, x.bitorder),
        lambda x: _pack(x.x, x.bitorder),
        op="packbits",
    ),
    described(
        "quantization.segment_packbits",
        lambda p: {**_sizes(p), "num_segments": p.m},
        lambda f, x: f(x.x, x.indptr, x.bitorder),
        _segments,
        add=lambda p, x: {"m": p.m, "k": p.k},
        op="packbits",
    ),
)
