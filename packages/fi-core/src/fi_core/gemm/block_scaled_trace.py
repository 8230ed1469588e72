"""Descriptions of the GEMM functions whose operands have block scales, with fp64 references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.gemm.trace import groups_of, sizes, template, tokens
from fi_core.observe.describe import with_sizes
from fi_core.observe.draw import Draw, dtype_of, nbytes
from fi_core.observe.trace import Scalar, Tensor, Work, options, sized, tensors
from fi_core.quantization.layout import SfLayout, scale_shape
from fi_core.quantization.reference import e2m1_values, linear, powers

_NAN_CODES = {16: 0x7F, 32: 0xFF}  # of scales, by block size


def _scaled_values(x, scales, block, tile_rows=128):  # type: ignore[no-untyped-def]
    """A matrix times its scales, which are linear if they have that shape and it is not the padded one."""
    import torch

    values = e2m1_values(x) if x.dtype == torch.uint8 else x
    rows, columns = values.shape[0], values.shape[1] // block
    padded = rows % tile_rows == 0 and columns % 4 == 0
    if tuple(scales.shape) == (rows, columns) and not padded:
        tile_rows = 1
    found = linear(scales.contiguous().view(torch.uint8), rows, columns, tile_rows)
    wide = found.contiguous().view(torch.float8_e4m3fn).double() if block == 16 else powers(found)
    return values.double() * wide.repeat_interleave(block, -1)


def _mm_fp4_reference(a, b, a_descale, b_descale, alpha=None, block_size=16, use_8x4_sf_layout=False):  # type: ignore[no-untyped-def]
    left = _scaled_values(a, a_descale, block_size, 8 if use_8x4_sf_layout else 128)
    out = left @ _scaled_values(b.t(), b_descale.t(), block_size).t()
    return out if alpha is None else out * alpha.double()


def _mm_bf16_fp4_reference(a, b, b_descale, alpha=None, block_size=16):  # type: ignore[no-untyped-def]
    out = a.double() @ _scaled_values(b, b_descale, block_size).t()
    return out if alpha is None else out * alpha.double()


def _weight_only_reference(a, b, alpha, bias=None):  # type: ignore[no-untyped-def]
    out = a.double() @ b.double().t() * alpha.double()
    return out if bias is None else out + bias.double()


def _mm_mxfp8_reference(a, b, a_descale, b_descale, use_8x4_sf_layout=False):  # type: ignore[no-untyped-def]
    left = _scaled_values(a, a_descale, 32, 8 if use_8x4_sf_layout else 128)
    return left @ _scaled_values(b.t(), b_descale.t() if b_descale.ndim == 2 else b_descale, 32).t()


def _bmm_mxfp8_reference(A, B, A_scale, B_scale):  # type: ignore[no-untyped-def]
    batch, m, k = A.shape
    left = _scaled_values(A.reshape(-1, k), A_scale, 32).view(batch, m, k)
    return left @ _scaled_values(B.mT.reshape(-1, k), B_scale, 32).view(batch, -1, k).mT


def _grouped_scaled_reference(a, b, a_descale, b_descale, m_indptr, alpha=None, block_size=32):  # type: ignore[no-untyped-def]
    import torch

    ends, left = m_indptr.tolist(), _scaled_values(a, a_descale, block_size)
    if ends[0] or ends[-1] != a.shape[0]:
        raise ValueError("rows of no group are not defined")
    own = b_descale.view(b.shape[0], -1)
    parts = [left[begin:end] @ _scaled_values(w, s, block_size).t() for begin, end, w, s in zip(ends, ends[1:], b, own)]
    out = torch.cat(parts)
    return out if alpha is None else out * alpha.double()


def _scales(draw: Draw, rows: int, k: int, block: int, layout: SfLayout, batch: tuple[int, ...] = ()) -> Any:
    """Scales between 1/4 and 2. If nasty one is 0, or the smallest power of two, and padding is NaN."""
    import torch

    low, high = (0x28, 0x41) if block == 16 else (125, 129)
    x = draw.integers(low, high, (*batch, *scale_shape(layout, rows, k // block)), "uint8")
    if draw.nasty and x.numel():
        x.view(-1)[0] = 0
        if layout is not SfLayout.layout_linear:
            columns = torch.arange(x.shape[-1] * x.shape[-2], device=x.device) % 512 % 4
            tiles = torch.arange(columns.numel(), device=x.device) // 512 % (x.shape[-1] // 4)
            if layout is SfLayout.layout_128x4:
                x.view(*batch, -1)[..., (columns + 4 * tiles) * block >= k] = _NAN_CODES[block]
    return x.view(torch.float8_e4m3fn) if block == 16 else x


def _packed(draw: Draw, *shape: int) -> Any:
    return draw.rows(draw.integers(0, 256, (*shape[:-1], shape[-1] // 2), "uint8"))


def _alpha(draw: Draw, k: int) -> Any:
    """Such that products of random codes are about N(0, 1)."""
    x = draw.normal((1,), "float32").abs().add_(0.5)
    return x.mul_(k**-0.5 / 16)


@sized(m=5, n=72, k=160, use_nvfp4=True, layout="128x4", out_dtype="bfloat16")
def _make_mm_fp4(draw: Draw, s: Any) -> dict[str, Any]:
    block = 16 if s.use_nvfp4 else 32
    of_weights = SfLayout.layout_linear if s.layout == "linear" else SfLayout.layout_128x4
    found = {"a": _packed(draw, s.m, s.k), "b": _packed(draw, s.n, s.k).t()}
    found["a_descale"] = _scales(draw, s.m, s.k, block, SfLayout[f"layout_{s.layout}"])
    found |= {"b_descale": _scales(draw, s.n, s.k, block, of_weights).t(), "alpha": _alpha(draw, s.k)}
    options = {"block_size": block, "use_nvfp4": s.use_nvfp4, "use_8x4_sf_layout": s.layout == "8x4"}
    return {**found, **options, "out_dtype": dtype_of(s.out_dtype)}


@sized(m=5, n=72, k=160, block_size=16, layout="128x4", out_dtype="bfloat16")
def _make_mm_bf16_fp4(draw: Draw, s: Any) -> dict[str, Any]:
    found = {"a": tokens(draw, (s.m, s.k), "bfloat16"), "b": _packed(draw, s.n, s.k)}
    found["b_descale"] = _scales(draw, s.n, s.k, s.block_size, SfLayout[f"layout_{s.layout}"])
    return {**found, "alpha": _alpha(draw, s.k), "block_size": s.block_size, "out_dtype": dtype_of(s.out_dtype)}


@sized(m=5, n=72, k=144, dtype="bfloat16", out_dtype="bfloat16", bias=False)
def _make_weight_only(draw: Draw, s: Any) -> dict[str, Any]:
    found = {"a": tokens(draw, (s.m, s.k), s.dtype), "b": draw.rows(draw.normal((s.n, s.k), "float8_e4m3fn"))}
    found |= {"alpha": draw.normal((1,), "float32").abs().add_(0.5).mul_(s.k**-0.5), "out_dtype": dtype_of(s.out_dtype)}
    return {**found, "bias": draw.normal((s.n,), s.out_dtype)} if s.bias else found


def _mxfp8(draw: Draw, rows: int, k: int, scale: float) -> Any:
    return draw.rows(draw.normal((rows, k), "float8_e4m3fn", scale))


@sized(m=5, n=72, k=160, layout="128x4", out_dtype="bfloat16")
def _make_mm_mxfp8(draw: Draw, s: Any) -> dict[str, Any]:
    of_weights = SfLayout.layout_linear if s.layout == "linear" else SfLayout.layout_128x4
    a_scale, b_scale = (
        _scales(draw, rows, s.k, 32, own) for rows, own in ((s.m, SfLayout[f"layout_{s.layout}"]), (s.n, of_weights))
    )
    a, b = _mxfp8(draw, s.m, s.k, 1.0), _mxfp8(draw, s.n, s.k, s.k**-0.5).t()
    scales = (a_scale, b_scale.t()) if s.layout == "linear" else (a_scale.view(-1), b_scale.view(-1))
    found = {"a": a, "b": b, **dict(zip(("a_descale", "b_descale"), scales))}
    return {**found, "use_8x4_sf_layout": s.layout == "8x4", "out_dtype": dtype_of(s.out_dtype)}


@sized(batch_size=3, m=5, n=72, k=160, out_dtype="bfloat16")
def _make_bmm_mxfp8(draw: Draw, s: Any) -> dict[str, Any]:
    """Scales are those of `mxfp8_quantize`, padded once for all rows."""
    a, b = (
        draw.rows(draw.normal((s.batch_size, rows, s.k), "float8_e4m3fn", scale))
        for rows, scale in ((s.m, 1.0), (s.n, s.k**-0.5))
    )
    rows = {"A_scale": s.batch_size * s.m, "B_scale": s.batch_size * s.n}
    scales = {name: _scales(draw, n, s.k, 32, SfLayout.layout_128x4).view(-1) for name, n in rows.items()}
    return {"A": a, "B": b.mT, **scales, "dtype": dtype_of(s.out_dtype)}


@sized(group_size=4, m=5, n=72, k=160, block_size=16, layout="linear", out_dtype="bfloat16")
def _make_grouped_fp4(draw: Draw, s: Any) -> dict[str, Any]:
    of_tokens = _scales(draw, s.group_size * s.m, s.k, s.block_size, SfLayout[f"layout_{s.layout}"])
    found = {"a": _packed(draw, s.group_size * s.m, s.k), "b": _packed(draw, s.group_size, s.n, s.k)}
    found["a_descale"] = draw.rows(of_tokens) if s.layout == "linear" else of_tokens
    found["b_descale"] = _scales(draw, s.n, s.k, s.block_size, SfLayout.layout_128x4, (s.group_size,))
    found |= {"m_indptr": groups_of(draw, s.group_size, s.m), "alpha": _alpha(draw, s.k)}
    return {**found, "block_size": s.block_size, "out_dtype": dtype_of(s.out_dtype)}


@sized(group_size=4, m=5, n=72, k=160, out_dtype="bfloat16")
def _make_grouped_mxfp8(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "a": _mxfp8(draw, s.group_size * s.m, s.k, 1.0),
        "b": draw.rows(draw.normal((s.group_size, s.n, s.k), "float8_e4m3fn", s.k**-0.5)),
        "a_descale": _scales(draw, s.group_size * s.m, s.k, 32, SfLayout.layout_128x4).view(-1),
        "b_descale": _scales(draw, s.n, s.k, 32, SfLayout.layout_128x4, (s.group_size,)),
        "m_indptr": groups_of(draw, s.group_size, s.m),
        "out_dtype": dtype_of(s.out_dtype),
    }


def _work(left: str = "a", right: str = "b", transposed: bool = False) -> Callable[[Mapping[str, Any]], Work]:
    """Two operations for each product; every tensor once. transposed: the function takes b as `[.., k, n]`."""

    def work(arguments: Mapping[str, Any]) -> Work:
        a, b = arguments[left], arguments[right]
        columns = b.mT if transposed else b
        n, k = columns.shape[-2], columns.shape[-1] * (2 if str(columns.dtype) == "torch.uint8" else 1)
        rows = a.numel() // max(a.shape[-1], 1)
        dtype = arguments.get("out_dtype") or arguments.get("dtype")
        tensors = (value for name, value in arguments.items() if name != "out")
        return Work(2 * rows * n * k, nbytes(*tensors) + rows * n * (2 if dtype is None else dtype.itemsize), "matmul")

    return work


_SHAPES = ((5, 72, 160), (1, 200, 512), (33, 130, 96), (140, 129, 64), (0, 64, 64), (16, 256, 1024))
_HELPERS = (linear, e2m1_values, powers, _scaled_values)
_ALPHA: dict[str, Tensor | Scalar] = {
    **tensors({"dtype": "float32", "optional": True}, alpha="one"),
    **options(int32="block_size"),
}
_FLAG = options(bool="use_8x4_sf_layout")
MM_FP4 = template(
    "mm_fp4",
    {
        **tensors(a="m k_bytes", b="k_bytes n", a_descale="a_scale_rows a_scale_columns"),
        **tensors(b_descale="b_scale_columns b_scale_rows"),
        **_ALPHA,
        **_FLAG,
    },
    "m n",
    (*_HELPERS, _mm_fp4_reference),
    _make_mm_fp4,
    (
        *(*sizes(_SHAPES), *sizes(_SHAPES[:3], use_nvfp4=False), *sizes(_SHAPES[:2], layout="8x4")),
        *sizes(_SHAPES[:2], layout="linear", out_dtype="float16"),
        *sizes(((7, 40, 48),), out_dtype="float32"),
    ),
    "The product of fp4 tokens and weights with block scales.",
    work=_work(transposed=True),
)
MM_BF16_FP4 = template(
    "mm_bf16_fp4",
    {**tensors(a="m k", b="n k_bytes", b_descale="b_scale_rows b_scale_columns"), **_ALPHA},
    "m n",
    (*_HELPERS, _mm_bf16_fp4_reference),
    _make_mm_bf16_fp4,
    (
        *(*sizes(_SHAPES), *sizes(_SHAPES[:3], block_size=32), *sizes(_SHAPES[:2], layout="linear")),
        *sizes(_SHAPES[:2], out_dtype="float32"),
    ),
    "The product of bf16 tokens and fp4 weights with block scales.",
    work=_work(),
)
_WEIGHT_ONLY = {**tensors(a="m k", b="n k", alpha="one"), **tensors({"optional": True, "dtype_from": "a"}, bias="n")}
MM_BF16_FP8 = template(
    "mm_bf16_fp8",
    _WEIGHT_ONLY,
    "m n",
    _weight_only_reference,
    with_sizes(_make_weight_only, ("dtype",), dtype="bfloat16"),
    (*sizes(_SHAPES), *sizes(_SHAPES[:3], bias=True), *sizes(_SHAPES[:2], out_dtype="float32")),
    "The product of bf16 tokens and fp8 weights with one scale.",
)
MM_FP16_FP8 = template(
    "mm_fp16_fp8",
    _WEIGHT_ONLY,
    "m n",
    _weight_only_reference,
    with_sizes(_make_weight_only, ("dtype",), dtype="float16"),
    (*sizes(_SHAPES[:3]), *sizes(_SHAPES[:2], bias=True)),
    "The product of fp16 tokens and fp8 weights with one scale.",
)
MM_MXFP8 = template(
    "mm_mxfp8",
    {**tensors(a="m k", b="k n", a_descale="a_scales", b_descale="b_scales"), **_FLAG},
    "m n",
    (*_HELPERS, _mm_mxfp8_reference),
    _make_mm_mxfp8,
    (*sizes(_SHAPES), *sizes(_SHAPES[:2], layout="8x4"), *sizes(_SHAPES[:1], out_dtype="float32")),
    "The product of MXFP8 tokens and weights.",
    work=_work(transposed=True),
)
BMM_MXFP8 = template(
    "bmm_mxfp8",
    tensors(A="batch_size m k", B="batch_size k n", A_scale="a_scales", B_scale="b_scales"),
    "batch_size m n",
    (*_HELPERS, _bmm_mxfp8_reference),
    _make_bmm_mxfp8,
    sizes(_SHAPES[:5]),
    "Products of a batch of MXFP8 matrices.",
    work=_work("A", "B", True),
)
_OF_GROUPS = tensors(b_descale="group_size b_scale_rows b_scale_columns", m_indptr="num_offsets")
GROUPED_FP4 = template(
    "grouped_mm_fp4",
    {
        **tensors(a="cum_m k_bytes", b="group_size n k_bytes", a_descale="a_scale_rows a_scale_columns"),
        **_OF_GROUPS,
        **_ALPHA,
    },
    "cum_m n",
    (*_HELPERS, _grouped_scaled_reference),
    _make_grouped_fp4,
    (*sizes(_SHAPES[:3]), *sizes(_SHAPES[:2], block_size=32, layout="128x4")),
    "Groups of fp4 tokens times the weights of their experts.",
    work=_work(),
)
GROUPED_MXFP8 = template(
    "grouped_mm_mxfp8",
    {**tensors(a="cum_m k", b="group_size n k", a_descale="a_scales"), **_OF_GROUPS},
    "cum_m n",
    (*_HELPERS, _grouped_scaled_reference),
    _make_grouped_mxfp8,
    sizes(_SHAPES[:3]),
    "Groups of MXFP8 tokens times the weights of their experts.",
    work=_work(),
    others=("sf_layout",),
)
