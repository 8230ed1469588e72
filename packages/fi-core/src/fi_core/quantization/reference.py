"""Exact references of the quantization functions, by exact arithmetic and tables of values instead of bit tricks."""

from __future__ import annotations


def e2m1(y, negative):  # type: ignore[no-untyped-def]
    """The codes of the nearest values, of two equally near ones the even code; two codes a byte."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=y.device)
    distance = (y.double().abs().nan_to_num(nan=6.0, posinf=6.0).clamp(max=6)[..., None] - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    code = (nearest * torch.tensor([2, 1] * 4, device=y.device)).argmax(-1) + 8 * negative
    return (code[..., ::2] + 16 * code[..., 1::2]).byte()


def block_amax(blocks):  # type: ignore[no-untyped-def]
    return blocks.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)


def swizzled(scales, tile_rows):  # type: ignore[no-untyped-def]
    """Scales [rows, columns] in tiles of 4 columns and 128 or 8 rows; linear if tile_rows is 1."""
    import torch

    scales = scales.flatten(0, -2)
    if tile_rows == 1:
        return scales
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % tile_rows))
    inner = min(tile_rows, 32)
    shape = (padded.shape[0] // tile_rows, tile_rows // inner, inner, padded.shape[1] // 4, 4)
    quarters = padded.view(shape)
    return quarters.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def e4m3_scaled(x, block, global_scale):  # type: ignore[no-untyped-def]
    """e2m1 codes and e4m3 scales of a matrix, in the arithmetic of fp32 that NVFP4 defines."""
    import torch

    blocks = x.float().unflatten(-1, (-1, block))
    wanted = global_scale * (block_amax(blocks) * (1.0 / torch.tensor(6.0, device=x.device)))
    scale = wanted.clamp(-448, 448).where(~wanted.isnan(), float("nan")).to(torch.float8_e4m3fn)  # the positive NaN
    factor = torch.where(scale.float() == 0, 0.0, 1 / (scale.float() / global_scale))
    return e2m1((blocks * factor[..., None]).flatten(-2), x.float().signbit()), scale.view(torch.uint8)


def exponents(amax, limit):  # type: ignore[no-untyped-def]
    """The biased exponents of the smallest powers of two that are at least amax / limit, in 0 ... 254."""
    import torch

    mantissa, exponent = torch.frexp(amax.double() / limit)
    rounded = torch.where(mantissa > 0.5, exponent, exponent - 1) + 127
    rounded = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, rounded))
    return rounded.clamp(0, 254).int()


def fp4_reference(  # type: ignore[no-untyped-def]
    input,
    global_scale=None,
    sf_vec_size=16,
    sf_use_ue8m0=False,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
    is_global_scale_inversed=False,
):
    import torch

    columns = input.stride(-2) == 1 and input.stride(-1) != 1  # its transpose is quantized
    input = input.mT if columns else input
    tile_rows = (8 if is_sf_8x4_layout else 128) if is_sf_swizzled_layout else 1
    if sf_use_ue8m0:
        blocks = input.float().unflatten(-1, (-1, sf_vec_size))
        exponent = exponents(block_amax(blocks), 6.0)
        q = e2m1(
            (blocks.double() / torch.exp2(exponent.double() - 127)[..., None]).flatten(-2), input.float().signbit()
        )
        sf = swizzled(exponent.byte(), tile_rows)
        return (q.mT, sf.mT) if columns else (q, sf)
    scale = torch.ones(1, device=input.device) if global_scale is None else global_scale
    q, scales = e4m3_scaled(input, sf_vec_size, 1 / scale if is_global_scale_inversed else scale)
    sf = swizzled(scales, tile_rows)
    return (q.mT, sf.mT) if columns else (q, sf)


def nvfp4_reference(a, a_global_sf, sfLayout=None, do_shuffle=False, sf_vec_size=16):  # type: ignore[no-untyped-def]
    import torch

    q, scales = e4m3_scaled(a, sf_vec_size, a_global_sf)
    if do_shuffle:
        rows = torch.arange(a.shape[0], device=a.device).view(-1, 8, 4).transpose(1, 2).reshape(-1)
        q, scales = q[rows], scales[rows]
    return q, swizzled(scales, (128, 8, 1)[sfLayout.value if sfLayout else 0])


def mxfp4_reference(a, sfLayout=None):  # type: ignore[no-untyped-def]
    import torch

    blocks = a.float().unflatten(-1, (-1, 32))
    exponent = exponents(block_amax(blocks), 6.0)
    q = e2m1((blocks.double() / torch.exp2(exponent.double() - 127)[..., None]).flatten(-2), a.float().signbit())
    return q, swizzled(exponent.byte(), (128, 8, 1)[sfLayout.value if sfLayout else 0])


def silu_reference(input, global_scale, sf_vec_size=16, is_sf_swizzled_layout=True, is_sf_8x4_layout=False):  # type: ignore[no-untyped-def]
    gate, up = input.double().chunk(2, dim=-1)
    x = (gate * gate.sigmoid() * up).to(input.dtype)
    q, scales = e4m3_scaled(x, sf_vec_size, global_scale)
    return q, swizzled(scales, (8 if is_sf_8x4_layout else 128) if is_sf_swizzled_layout else 1)


def batched_reference(a, a_global_sf, sf_vec_size=16):  # type: ignore[no-untyped-def]
    import torch

    found = [e4m3_scaled(x, sf_vec_size, a_global_sf) for x in a]
    return torch.stack([q for q, _ in found]), torch.stack([swizzled(s, 128).flatten() for _, s in found])


def grouped_reference(a, mask, a_global_sf):  # type: ignore[no-untyped-def]
    import torch

    found = [e4m3_scaled(x, 16, a_global_sf[i : i + 1]) for i, x in enumerate(a)]
    for (_, scale), valid in zip(found, mask.tolist()):
        scale[max(valid, 0) :] = 0
    q, scales = torch.stack([q for q, _ in found]), torch.stack([swizzled(s, 128) for _, s in found])
    tiles = scales.view(torch.float8_e4m3fn).view(len(a), scales.shape[1] // 128, -1, 32, 4, 4)
    return q.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def mxfp8(x, width):  # type: ignore[no-untyped-def]
    """e4m3 values, padded with zeros to `width`, and the exponents of their scales."""
    import torch

    blocks = torch.nn.functional.pad(x.float(), (0, width - x.shape[-1])).unflatten(-1, (-1, 32))
    exponent = exponents(block_amax(blocks), 448.0)
    q = blocks.double() / torch.exp2(exponent.double() - 127)[..., None]
    return q.clamp(-448, 448).float().to(torch.float8_e4m3fn).flatten(-2), exponent.byte()


def mxfp8_reference(input, is_sf_swizzled_layout=True, alignment=32, sf_swizzle_layout=None):  # type: ignore[no-untyped-def]
    layout = sf_swizzle_layout.value if sf_swizzle_layout else 0 if is_sf_swizzled_layout else 2
    q, exponent = mxfp8(input, -(-input.shape[-1] // alignment) * alignment)
    return q, swizzled(exponent, (128, 8, 1)[layout]).flatten()


def mxfp8_grouped_reference(a, mask):  # type: ignore[no-untyped-def]
    import torch

    found = [mxfp8(x, -(-a.shape[-1] // 128) * 128) for x in a]
    for (_, scale), valid in zip(found, mask.tolist()):
        scale[max(valid, 0) :] = 0
    q, scales = torch.stack([q for q, _ in found]), torch.stack([swizzled(s, 128) for _, s in found])
    tiles = scales.view(len(a), scales.shape[1] // 128, -1, 32, 4, 4)
    return q.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def group_reference(x, group_size, eps=1e-10, dst_dtype=None, column_major_scales=False, scale_ue8m0=False):  # type: ignore[no-untyped-def]
    import torch

    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    info = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    groups = x.float().unflatten(-1, (-1, group_size))
    amax = block_amax(groups).clamp(min=eps)
    if scale_ue8m0:
        scale = torch.exp2(exponents(amax, info.max).float() - 127)
    else:
        scale = (amax.double() / info.max).float()  # in fp32, torch on CUDA multiplies by the reciprocal
    q = (groups / scale[..., None]).flatten(-2)
    q = q.nan_to_num(nan=0.0).round() if dtype == torch.int8 else q
    return q.clamp(info.min, info.max).to(dtype), scale


def interleave_reference(unswizzled_sf):  # type: ignore[no-untyped-def]
    import torch

    matrices = unswizzled_sf if unswizzled_sf.ndim == 3 else unswizzled_sf[None]
    return torch.cat([swizzled(x, 128).flatten() for x in matrices])


def linear(scales, rows, columns, tile_rows):  # type: ignore[no-untyped-def]
    """The scales [rows, columns] that are stored in tiles of 128 or 8 rows, or linear (1)."""
    if tile_rows == 1:
        return scales.reshape(rows, columns)
    padded_rows, padded_columns = -(-rows // tile_rows) * tile_rows, -(-columns // 4) * 4
    inner = min(tile_rows, 32)
    tiles = scales.reshape(padded_rows // tile_rows, padded_columns // 4, inner, tile_rows // inner, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)[:rows, :columns]


def e2m1_values(packed):  # type: ignore[no-untyped-def]
    import torch

    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device=packed.device)[codes]


def powers(codes):  # type: ignore[no-untyped-def]
    import torch

    return torch.where(codes == 255, float("nan"), torch.exp2(codes.double() - 127))


def to_float_reference(  # type: ignore[no-untyped-def]
    e2m1_tensor,
    ufp8_scale_tensor,
    global_scale_tensor=None,
    sf_vec_size=16,
    ufp8_type=1,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
):
    import torch

    x, tile_rows = e2m1_values(e2m1_tensor), (8 if is_sf_8x4_layout else 128) if is_sf_swizzled_layout else 1
    scales = linear(ufp8_scale_tensor, x.shape[0], x.shape[1] // sf_vec_size, tile_rows)
    scales = scales.contiguous().view(torch.float8_e4m3fn).double() if ufp8_type else powers(scales)
    scale = 1.0 if global_scale_tensor is None else global_scale_tensor.double()
    return x.double() * scales.repeat_interleave(sf_vec_size, -1) * scale


def mxfp4_dequantize_reference(a_fp4, a_sf, sfLayout=None):  # type: ignore[no-untyped-def]
    x = e2m1_values(a_fp4)
    scales = linear(a_sf, x.shape[0], x.shape[1] // 32, (128, 8, 1)[sfLayout.value if sfLayout else 0])
    return x.double() * powers(scales).repeat_interleave(32, -1)


def host_reference(weight, scale, group_size=32):  # type: ignore[no-untyped-def]
    scales = powers(scale).reshape(weight.shape[0], 2 * weight.shape[1] // group_size)
    return e2m1_values(weight).double() * scales.repeat_interleave(group_size, -1)


def mxfp8_host_reference(input, scale_tensor, is_sf_swizzled_layout=True, sf_swizzle_layout=None):  # type: ignore[no-untyped-def]
    import torch

    layout = sf_swizzle_layout.value if sf_swizzle_layout else 0 if is_sf_swizzled_layout else 2
    scales = linear(scale_tensor, input.shape[0], input.shape[1] // 32, (128, 8, 1)[layout])
    values = input.contiguous().view(torch.float8_e4m3fn).double()
    return values * powers(scales).repeat_interleave(32, -1)
