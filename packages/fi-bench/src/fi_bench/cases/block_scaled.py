"""Cases of matrix products whose operands have block scales, NVFP4, MXFP4 and MXFP8, or whose weights are fp8."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Planned, Tolerance, dtype_of
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch

_MNK = ("m", "n", "k")
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def _fp4_sizes(p: Namespace) -> dict[str, Any]:
    layout = "128x4" if p.use_128x4_sf_layout else "8x4"
    return {**sizes_of(p, *_MNK, out_dtype="out_dtype"), "use_nvfp4": p.use_nvfp4, "layout": layout}


def _weight_only_sizes(p: Namespace) -> dict[str, Any]:
    return {**sizes_of(p, *_MNK, out_dtype="out_dtype"), "block_size": 16 if p.use_nvfp4 else 32}


def _mxfp8_sizes(p: Namespace) -> dict[str, Any]:
    batch = {"batch_size": p.batch_size} if p.routine == "bmm_mxfp8" else {}
    return {**sizes_of(p, *_MNK, out_dtype="out_dtype"), **batch}


def _out(p: Namespace, x: Inputs) -> dict[str, Any]:
    import torch

    left = x["a"] if "a" in x else x["A"]
    return {"out": torch.empty((*left.shape[:-1], p.n), dtype=dtype_of(p.out_dtype), device=left.device)}


def _linear(scales: torch.Tensor, rows: int, columns: int, tile: int) -> torch.Tensor:
    """Scales [rows, columns] that are stored in tiles of 128 or 8 rows by 4."""
    inner = min(tile, 32)
    tiles = scales.reshape(-(-rows // tile), -(-columns // 4), inner, tile // inner, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(tiles.shape[0] * tile, -1)[:rows, :columns]


def _dequantized(values: torch.Tensor, scales: torch.Tensor, block: int, tile: int = 128) -> torch.Tensor:
    """A matrix in bf16 times its scales."""
    import torch

    if values.dtype is torch.uint8:
        codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).long()
        values = torch.tensor(_E2M1, dtype=torch.bfloat16, device=values.device)[codes]
    rows, k = values.shape
    bytes_ = _linear(scales.contiguous().view(torch.uint8), rows, k // block, tile)
    wide = bytes_.contiguous().view(torch.float8_e4m3fn) if block == 16 else torch.exp2(bytes_.float() - 127)
    return values.to(torch.bfloat16) * wide.to(torch.bfloat16).repeat_interleave(block, -1)


def _operands(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands in bf16: a, and b as `[n, k]`."""
    if "A" in x:
        a, b = (_dequantized(y.flatten(0, 1), s, 32).view(y.shape) for y, s in ((x.A, x.A_scale), (x.B.mT, x.B_scale)))
        return a, b
    block, tile = x.get("block_size", 32), 8 if x.get("use_8x4_sf_layout") else 128
    if "b_descale" not in x:
        return x.a, x.b.to(x.a.dtype)
    if "a_descale" not in x:
        return x.a, _dequantized(x.b, x.b_descale, block)
    b_scale = x.b_descale.t() if x.b_descale.ndim == 2 else x.b_descale
    return _dequantized(x.a, x.a_descale, block, tile), _dequantized(x.b.t(), b_scale, block)


def _product(operands: tuple[torch.Tensor, torch.Tensor], x: Inputs) -> torch.Tensor:
    import torch

    a, b = operands
    product = torch.matmul(a, b.mT)
    product = product * x.alpha if "alpha" in x else product
    return (product if x.get("bias") is None else product + x.bias).to(x.out.dtype)


def _unsupported(_: str, p: Namespace) -> str | None:
    if p.routine == "mm_bf16_fp8":
        return None
    block = 16 if p.routine in ("mm_fp4", "mm_bf16_fp4") and p.use_nvfp4 else 32
    return f"--k must be a multiple of {block}, got {p.k}" if p.k % block else None


_FINE = {"output": Tolerance(1e-2, 2e-2)}


def _case(routine: str, sizes: Callable[[Namespace], dict[str, Any]], call: Callable[..., Any], op: str) -> Case:
    """Peers: "torch" dequantizes both operands and multiplies; "cublas" multiplies operands that are bf16 already."""
    return described(
        f"gemm.{routine}",
        sizes,
        call,
        lambda x: _product(_operands(x), x),
        add=_out,
        op=op,
        peers={"cublas": Planned(_operands, _product)},
        poison=("out",),
        tolerance=_FINE,
        unsupported=_unsupported,
    )


def _call_mm_fp4(f: Callable[..., Any], x: Inputs) -> Any:
    return f(
        x.a,
        x.b,
        x.a_descale,
        x.b_descale,
        x.alpha,
        x.out_dtype,
        x.out,
        x.block_size,
        x.use_8x4_sf_layout,
        use_nvfp4=x.use_nvfp4,
    )


def _call_mm_mxfp8(f: Callable[..., Any], x: Inputs) -> Any:
    return f(x.a, x.b, x.a_descale, x.b_descale, x.out, x.out_dtype, x.use_8x4_sf_layout)


CASES = (
    _case("mm_fp4", _fp4_sizes, _call_mm_fp4, "gemm_few_bits"),
    _case(
        "mm_bf16_fp4",
        _weight_only_sizes,
        lambda f, x: f(x.a, x.b, x.b_descale, x.alpha, x.out_dtype, x.out, x.block_size),
        "gemm_few_bits",
    ),
    _case(
        "mm_bf16_fp8",
        lambda p: sizes_of(p, *_MNK, "bias", out_dtype="out_dtype"),
        lambda f, x: f(x.a, x.b, x.alpha, bias=x.get("bias"), out=x.out),
        "gemm_few_bits",
    ),
    _case("mm_mxfp8", _mxfp8_sizes, _call_mm_mxfp8, "gemm"),
    _case("bmm_mxfp8", _mxfp8_sizes, lambda f, x: f(x.A, x.B, x.A_scale, x.B_scale, x.dtype, x.out), "gemm"),
)
