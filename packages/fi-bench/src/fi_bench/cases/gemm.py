"""Cases of matrix products: bf16, fp8 with one scale, fp8 with a scale per 128 values of k; dense, batched, grouped."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Planned, Tolerance, dtype_of
from fi_bench.described import described, sizes_of
from fi_bench.peers import DEEP_GEMM

if TYPE_CHECKING:
    import torch

_BLOCK = 128
_MNK = ("m", "n", "k")


def _bf16_sizes(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, *_MNK, out_dtype="out_dtype") | ({"bias": p.bias} if p.routine == "mm_bf16" else {})


def _fp8_sizes(p: Namespace) -> dict[str, Any]:
    sizes = sizes_of(p, *_MNK, input_dtype="input_dtype", mat2_dtype="mat2_dtype", out_dtype="out_dtype")
    return {**sizes, "rowwise": p.rowwise} if p.routine == "mm_fp8" else sizes


def _batched(sizes: Callable[[Namespace], dict[str, Any]]) -> Callable[[Namespace], dict[str, Any]]:
    return lambda p: {**sizes(p), "batch_size": p.batch_size}


def _groupwise_sizes(p: Namespace) -> dict[str, Any]:
    groups = _groups_of(p) if p.routine.startswith("group") else {}
    return {**sizes_of(p, *_MNK, mode="scale_major_mode", out_dtype="out_dtype"), **groups}


def _groups_of(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "group_size", "random_groups")


def _out(p: Namespace, x: Inputs) -> dict[str, Any]:
    """An output, and for peers the operands by one set of names."""
    import torch

    left, right = (
        next(x[name] for name in names if name in x) for names in (("a", "A", "input"), ("b", "B", "weight"))
    )
    shape = (*left.shape[:-1], p.n)
    out = {} if "out" in x else {"out": torch.empty(shape, dtype=dtype_of(p.out_dtype), device=left.device)}
    columns = right if p.routine in ("mm_bf16", "bmm_bf16", "bmm_fp8") else right.mT
    fast = {"use_fast_accum": p.accumulation == "fast", "cublas_fast": p.accumulation != "fp32"}
    return {**out, "left": left, "columns": columns, "mma_sm": p.mma_sm, **fast}


def _dequantized(x: torch.Tensor, scale: torch.Tensor, mode: str) -> torch.Tensor:
    """x in bf16 times the scales of blocks."""
    import torch

    scale = (scale if mode == "K" else scale.mT).to(torch.bfloat16)
    if scale.shape[-2] != x.shape[-2]:
        scale = scale.repeat_interleave(_BLOCK, -2)[..., : x.shape[-2], :]
    return x.to(torch.bfloat16) * scale.repeat_interleave(_BLOCK, -1)


def _torch_groupwise(x: Inputs) -> torch.Tensor:
    """As one would write it without a fused kernel: dequantise, then a bf16 product."""
    import torch

    a, b = (_dequantized(y, scale, x.scale_major_mode) for y, scale in ((x.a, x.a_scale), (x.b, x.b_scale)))
    product = torch.matmul(a, b.mT) if b.ndim == 2 else torch.nn.functional.grouped_mm(a, b.mT, offs=x.m_indptr[1:])
    return product.to(x.out.dtype)


def _torch_grouped(x: Inputs) -> torch.Tensor:
    """torch's grouped product, which is CUTLASS on Hopper."""
    import torch

    return torch.nn.functional.grouped_mm(x.left, x.columns, offs=x.m_indptr[1:]).to(x.out.dtype)


def _torch_bf16(x: Inputs) -> torch.Tensor:
    """torch.matmul, which is cuBLAS on a GPU; with a bias torch.addmm."""
    import torch

    if x.get("bias") is not None:
        return torch.addmm(x.bias.to(x.left.dtype), x.left, x.columns).to(x.out.dtype)
    product: torch.Tensor = torch.matmul(x.left, x.columns, out=x.out if x.out.dtype is x.left.dtype else None)
    return product.to(x.out.dtype)


def _scales(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a and b as torch._scaled_mm takes them: one scale, or of rows `[m, 1]` and of columns `[1, n]`."""
    if "alpha" in x:
        return x.alpha, x.alpha.new_ones(1)
    return (x.a_scale[:, None], x.b_scale[None]) if "a_scale" in x else (x.A_scale, x.B_scale)


def _torch_fp8(x: Inputs) -> torch.Tensor:
    """Dequantised to bf16 first, as one would without fp8 matrix units."""
    import torch

    a_scale, b_scale = _scales(x)
    product: torch.Tensor = torch.matmul(x.left.to(torch.bfloat16), x.columns.to(torch.bfloat16)) * a_scale * b_scale
    return product.to(x.out.dtype)


def _cublas_fp8(x: Inputs) -> torch.Tensor:
    """cuBLASLt's fp8 product with a scale per tensor, or torch's choice with scales of rows; matrices of a batch one
    after another.
    """
    import torch

    product_of = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  (the public one has no out=)
    (a_scale, b_scale), fast = _scales(x), x.cublas_fast
    one = functools.partial(product_of, scale_a=a_scale, scale_b=b_scale, out_dtype=x.out.dtype, use_fast_accum=fast)
    if x.left.ndim == 2:
        one(x.left, x.columns, out=x.out)
    else:
        for a, b, out in zip(x.left, x.columns, x.out, strict=True):
            one(a, b, out=out)
    product: torch.Tensor = x.out
    return product


def _plan_deep_gemm(x: Inputs) -> tuple[Any, ...]:
    """Its function and the scales in its layout: a's k-major, b's row by row."""
    import torch

    library = DEEP_GEMM.load()
    k_major = x.scale_major_mode == "K"
    a_scale = x.a_scale if k_major else x.a_scale.t()
    b_scale = (x.b_scale if k_major else x.b_scale.transpose(-2, -1)).contiguous()
    if x.b.ndim == 2:
        return library.fp8_gemm_nt, a_scale, b_scale, ()
    rows = x.a.shape[0] // x.b.shape[0]
    index = torch.arange(x.b.shape[0], dtype=torch.int32, device=x.a.device).repeat_interleave(rows)
    return library.m_grouped_fp8_gemm_nt_contiguous, a_scale, b_scale, (index,)


def _run_deep_gemm(planned: tuple[Any, ...], x: Inputs) -> torch.Tensor:
    function, a_scale, b_scale, more = planned
    function((x.a, a_scale), (x.b, b_scale), x.out, *more, disable_ue8m0_cast=True)
    out: torch.Tensor = x.out
    return out


def _plan_cublas_groupwise(x: Inputs) -> Callable[[], torch.Tensor]:
    """cuBLASLt's product with block scales, which it takes MN-major for a; K-major, padded to four, for b."""
    from torch.nn.functional import ScalingType, pad, scaled_mm

    a_scale, b_scale = (s if x.scale_major_mode == "K" else s.mT for s in (x.a_scale, x.b_scale))
    columns, b_columns = a_scale.mT.contiguous().mT, pad(b_scale, (0, -b_scale.shape[-1] % 4)).contiguous().mT
    one, block = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(x.a, x.b.mT, columns, one, b_columns, block, output_dtype=x.out.dtype)


def _unsupported_groupwise(backend: str, p: Namespace) -> str | None:
    if p.n % _BLOCK or p.k % _BLOCK:
        return f"--n and --k must be multiples of {_BLOCK}, got {p.n} and {p.k}"
    if backend == "cublas" and p.m % 4:  # H200, CUDA 13.0: NOT_SUPPORTED for 5 rows
        return f"cublas takes --m in multiples of 4, got {p.m}"
    if backend == "deepgemm" and p.out_dtype != "bfloat16":
        return f"deepgemm writes --out_dtype bfloat16, got {p.out_dtype}"
    if backend == "cublas" and (p.m == 1 or p.out_dtype != "bfloat16"):
        return f"cuBLASLt's product with block scales takes --m above 1 and bfloat16, got {p.m} and {p.out_dtype}"
    if backend == "deepgemm" and p.routine.startswith("group") and (p.m % _BLOCK or p.random_groups):
        got = "--random_groups" if p.random_groups else f"--m {p.m}"
        return f"deepgemm's grouped product takes groups of a multiple of {_BLOCK} rows, got {got}"
    return None


def _unsupported_fp8(backend: str, p: Namespace) -> str | None:
    for name in ("input_dtype", "mat2_dtype"):
        if not getattr(p, name).startswith("fp8"):
            return f"--{name} must be fp8_e4m3 or fp8_e5m2, got {getattr(p, name)}"
    if p.input_dtype == p.mat2_dtype == "fp8_e5m2":
        return "one of --input_dtype and --mat2_dtype must be fp8_e4m3"
    if backend == "cublas" and (p.n % 16 or p.k % 16):
        return f"cuBLASLt's fp8 product takes --n and --k that are multiples of 16, got {p.n} and {p.k}"
    if backend == "cublas" and p.rowwise and p.out_dtype != "bfloat16":
        return f"torch's product with scales of rows writes --out_dtype bfloat16, got {p.out_dtype}"
    return None


# Outputs are N(0, 1), sums of k terms: the rounding error is small against 1, not against an output near 0.
_FINE = {"output": Tolerance(1e-2, 1e-2)}
_FAST = {"output": Tolerance(1e-2, 6e-2)}  # the tensor cores' own fp8 sums: 0.025 at k = 7168 on an H200


def _dense(routine: str, sizes: Callable[[Namespace], dict[str, Any]], call: Callable[[Any, Inputs], Any]) -> Case:
    return described(
        f"gemm.{routine}",
        sizes,
        call,
        _torch_bf16,
        add=_out,
        op="gemm",
        peers={"cublas": _torch_bf16},
        poison=("out",),
        tolerance=_FINE,
    )


def _fp8(routine: str, sizes: Callable[[Namespace], dict[str, Any]], call: Callable[[Any, Inputs], Any]) -> Case:
    return described(
        f"gemm.{routine}",
        sizes,
        call,
        _torch_fp8,
        add=_out,
        op="gemm",
        peers={"cublas": _cublas_fp8},
        poison=("out",),
        tolerance=_FAST,
        unsupported=_unsupported_fp8,
    )


def _groupwise(routine: str, call: Callable[[Any, Inputs], Any]) -> Case:
    peers = {"deepgemm": Planned(_plan_deep_gemm, _run_deep_gemm)}
    if not routine.startswith("group"):
        peers["cublas"] = Planned(_plan_cublas_groupwise, lambda run, _: run())
    return described(
        f"gemm.{routine}",
        _groupwise_sizes,
        call,
        _torch_groupwise,
        add=_out,
        op="gemm",
        peers=peers,
        poison=("out",),
        tolerance=_FINE,
        unsupported=_unsupported_groupwise,
    )


def _call_mm_bf16(f: Callable[..., Any], x: Inputs) -> Any:
    return f(x.a, x.b, bias=x.get("bias"), out=x.out, out_dtype=x.out_dtype)


def _call_mm_fp8(f: Callable[..., Any], x: Inputs) -> Any:
    scales = {name: x[name] for name in ("alpha", "a_scale", "b_scale") if name in x}
    return f(x.a, x.b, **scales, out_dtype=x.out_dtype, out=x.out, use_fast_accum=x.use_fast_accum)


def _call_bmm_fp8(f: Callable[..., Any], x: Inputs) -> Any:
    return f(x.A, x.B, x.A_scale, x.B_scale, x.dtype, out=x.out, use_fast_accum=x.use_fast_accum)


def _call_tinygemm(f: Callable[..., Any], x: Inputs) -> Any:
    f(x.input, x.weight, x.out, x.get("bias"))
    return x.out


def _call_groupwise(f: Callable[..., Any], x: Inputs) -> Any:
    mode = x.scale_major_mode
    return f(x.a, x.b, x.a_scale, x.b_scale, scale_major_mode=mode, mma_sm=x.mma_sm, out=x.out, out_dtype=x.out_dtype)


def _call_group_groupwise(f: Callable[..., Any], x: Inputs) -> Any:
    return f(
        x.a,
        x.b,
        x.a_scale,
        x.b_scale,
        x.m_indptr,
        scale_major_mode=x.scale_major_mode,
        mma_sm=x.mma_sm,
        out=x.out,
        out_dtype=x.out_dtype,
    )


CASES = (
    _dense("mm_bf16", _bf16_sizes, _call_mm_bf16),
    _dense("bmm_bf16", _batched(_bf16_sizes), lambda f, x: f(x.A, x.B, out=x.out, out_dtype=x.out_dtype)),
    _dense("tinygemm_bf16", lambda p: sizes_of(p, *_MNK, "bias"), _call_tinygemm),
    _fp8("bmm_fp8", _batched(_fp8_sizes), _call_bmm_fp8),
    _fp8("mm_fp8", _fp8_sizes, _call_mm_fp8),
    _groupwise("gemm_fp8_nt_groupwise", _call_groupwise),
    _groupwise("group_gemm_fp8_nt_groupwise", _call_group_groupwise),
    described(
        "grouped_mm.grouped_mm_bf16",
        lambda p: {**sizes_of(p, *_MNK, out_dtype="out_dtype"), **_groups_of(p)},
        lambda f, x: f(x.a, x.b, x.m_indptr, x.out, x.out_dtype),
        _torch_grouped,
        add=_out,
        op="gemm",
        poison=("out",),
        tolerance=_FINE,
    ),
)
