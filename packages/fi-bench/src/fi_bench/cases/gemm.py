"""Cases of matrix products: bf16, fp8 with one scale, fp8 with a scale per 128 values of k; dense, batched, grouped."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.baselines import DEEP_GEMM
from fi_bench.case import Case, Inputs, Outputs, Planned, Tolerance, Work, dtype_of
from fi_bench.cases.common import nbytes, normal, to_fp8
from fi_core.testing.quantize import FP8_MAX, dequantize_fp8, quantize_fp8

if TYPE_CHECKING:
    import torch

_BLOCK = 128
_ROWS_AT_ONCE = 4096  # of the fp64 product


def _batch(p: Namespace) -> tuple[int, ...]:
    return (p.batch_size,)


def _alone(p: Namespace) -> tuple[int, ...]:
    return ()


def _make_bf16(batch: Callable[[Namespace], tuple[int, ...]]) -> Callable[..., Inputs]:
    """a [.., m, k] and b [.., k, n], a transposed view of weights [.., n, k] so small that the products are N(0, 1)."""

    def make(p: Namespace, device: Any, generator: Any) -> Inputs:
        import torch

        dims = batch(p)
        a = normal((*dims, p.m, p.k), torch.bfloat16, device, generator)
        b = normal((*dims, p.n, p.k), torch.bfloat16, device, generator, p.k**-0.5).transpose(-2, -1)
        out_dtype = dtype_of(p.out_dtype)
        return Inputs(a=a, b=b, out=torch.empty((*dims, p.m, p.n), dtype=out_dtype, device=device), out_dtype=out_dtype)

    return make


def _quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x as fp8 and the scalar fp32 scale that gives it back."""
    scale = x.abs().amax().float() / FP8_MAX
    return to_fp8(x.double() / scale.double(), dtype), scale


def _make_fp8(batch: Callable[[Namespace], tuple[int, ...]]) -> Callable[..., Inputs]:
    """As _make_bf16, with fp8 operands and one fp32 scale each."""

    def make(p: Namespace, device: Any, generator: Any) -> Inputs:
        x = _make_bf16(batch)(p, device, generator)
        x["a"], x["a_scale"] = _quantized(x.a, dtype_of(p.input_dtype))
        weights, x["b_scale"] = _quantized(x.b.transpose(-2, -1), dtype_of(p.mat2_dtype))
        x["b"] = weights.transpose(-2, -1)
        x["scale"] = x.a_scale * x.b_scale
        return x

    return make


def _make_groupwise(p: Namespace, device: Any, generator: Any) -> Inputs:
    """a [groups * m, k] with a scale per row and 128 k; b [groups, n, k] with one per 128 n and 128 k."""
    import torch

    grouped = p.routine.startswith("group")
    groups = p.group_size if grouped else 1
    a = normal((groups * p.m, p.k), torch.bfloat16, device, generator)
    b = normal((groups, p.n, p.k), torch.bfloat16, device, generator, p.k**-0.5)
    mode = p.scale_major_mode
    blocks = (p.n // _BLOCK, p.k // _BLOCK)
    a, a_scale = quantize_fp8(a, _major((a.shape[0], blocks[1]), mode), (1, _BLOCK), mode)
    b, b_scale = quantize_fp8(b, (groups, *_major(blocks, mode)), (1, _BLOCK, _BLOCK), mode)
    out_dtype = dtype_of(p.out_dtype)
    x = Inputs(a=a, b=b if grouped else b[0], a_scale=a_scale, b_scale=b_scale if grouped else b_scale[0], mode=mode,
               out=torch.empty((a.shape[0], p.n), dtype=out_dtype, device=device), out_dtype=out_dtype,
               mma_sm=p.mma_sm)  # fmt: skip
    if grouped:
        x["m_indptr"] = torch.arange(groups + 1, dtype=torch.int32, device=device) * p.m
    return x


def _major(shape: tuple[int, int], mode: str) -> tuple[int, int]:
    return shape if mode == "K" else (shape[1], shape[0])


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp64, some rows at a time."""
    import torch

    wide = b.double()
    return torch.cat([rows.double() @ wide for rows in a.split(_ROWS_AT_ONCE, dim=-2)], dim=-2)


def _reference(x: Inputs) -> Outputs:
    out = _product(x.a, x.b)
    return {"out": out * x.scale.double() if "scale" in x else out}


def _dequantized(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a [groups, m, k] and b [groups, n, k]; the scales are powers of two, so nothing is lost."""
    groups = x.b.shape[0] if x.b.ndim == 3 else 1
    a = dequantize_fp8(x.a, x.a_scale, x.mode).to(dtype).view(groups, -1, x.a.shape[1])
    b = dequantize_fp8(x.b, x.b_scale, x.mode).to(dtype)
    return a, b.view(groups, *b.shape[-2:])


def _groupwise_reference(x: Inputs) -> Outputs:
    import torch

    a, b = _dequantized(x, torch.float64)
    return {"out": torch.bmm(a, b.transpose(1, 2)).view(x.out.shape)}


def _torch_groupwise(x: Inputs) -> torch.Tensor:
    """As one would write it without a fused kernel: dequantise, then a bf16 product."""
    import torch

    a, b = _dequantized(x, torch.bfloat16)
    return torch.bmm(a, b.transpose(1, 2)).view(x.out.shape).to(x.out_dtype)


def _torch_bf16(x: Inputs) -> torch.Tensor:
    """torch.matmul, which is cuBLAS on a GPU."""
    import torch

    out = x.out if x.out_dtype is x.a.dtype else None
    product: torch.Tensor = torch.matmul(x.a, x.b, out=out)
    return product.to(x.out_dtype)


def _torch_fp8(x: Inputs) -> torch.Tensor:
    """Dequantised to bf16 first, as one would without fp8 matrix units."""
    import torch

    product: torch.Tensor = torch.matmul(x.a.to(torch.bfloat16), x.b.to(torch.bfloat16)) * x.scale
    return product.to(x.out_dtype)


def _cublas_fp8(x: Inputs) -> torch.Tensor:
    """cuBLASLt's fp8 product with a scale per tensor; matrices of a batch one after another."""
    import torch

    product_of = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  (the public one has no out=)
    one = functools.partial(product_of, scale_a=x.a_scale, scale_b=x.b_scale, out_dtype=x.out_dtype)
    if x.a.ndim == 2:
        one(x.a, x.b, use_fast_accum=True, out=x.out)
    else:
        for a, b, out in zip(x.a, x.b, x.out, strict=True):
            one(a, b, use_fast_accum=True, out=out)
    product: torch.Tensor = x.out
    return product


def _plan_deep_gemm(x: Inputs) -> tuple[Any, ...]:
    """Its function and the scales in its layout: a's k-major, b's row by row."""
    import torch

    library = DEEP_GEMM.load()
    k_major = x.mode == "K"
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


def _work(p: Namespace, x: Inputs) -> Work:
    rows = x.out.numel() // p.n
    unit = "matmul_fp8" if x.a.element_size() == 1 else "matmul"
    return Work(2 * rows * p.n * p.k, nbytes(x.a, x.b, x.out, x.get("a_scale"), x.get("b_scale")), unit)


def _outputs(x: Inputs, returned: Any) -> Outputs:
    return {"out": returned}


def _unsupported_groupwise(backend: str, p: Namespace) -> str | None:
    if p.n % _BLOCK or p.k % _BLOCK:
        return f"--n and --k must be multiples of {_BLOCK}, got {p.n} and {p.k}"
    if backend == "deepgemm" and p.out_dtype != "bfloat16":
        return f"deepgemm writes --out_dtype bfloat16, got {p.out_dtype}"
    if backend == "deepgemm" and p.routine.startswith("group") and p.m % _BLOCK:
        return f"deepgemm's grouped product takes groups of a multiple of {_BLOCK} rows, got --m {p.m}"
    return None


def _unsupported_fp8(backend: str, p: Namespace) -> str | None:
    for name in ("input_dtype", "mat2_dtype"):
        if not getattr(p, name).startswith("fp8"):
            return f"--{name} must be fp8_e4m3 or fp8_e5m2, got {getattr(p, name)}"
    if p.input_dtype == p.mat2_dtype == "fp8_e5m2":
        return "one of --input_dtype and --mat2_dtype must be fp8_e4m3"
    if backend == "cublas" and (p.n % 16 or p.k % 16):
        return f"cuBLASLt's fp8 product takes --n and --k that are multiples of 16, got {p.n} and {p.k}"
    return None


# Outputs are N(0, 1), sums of k terms: the rounding error is small against 1, not against an output near 0.
_FINE = {"out": Tolerance(1e-2, 1e-2)}
_FAST = {"out": Tolerance(1e-2, 6e-2)}  # the tensor cores' own fp8 sums: 0.025 at k = 7168 on an H200


def _dense(routine: str, batch: Callable[[Namespace], tuple[int, ...]]) -> Case:
    return Case(
        routine=routine,
        function=f"gemm.{routine}",
        make=_make_bf16(batch),
        call=lambda f, x: f(x.a, x.b, out=x.out, out_dtype=x.out_dtype),
        outputs=_outputs,
        reference=_reference,
        work=_work,
        torch=_torch_bf16,
        rivals={"cublas": _torch_bf16},
        poison=("out",),
        tolerance=_FINE,
    )


def _fp8(routine: str, batch: Callable[[Namespace], tuple[int, ...]], call: Callable[[Any, Inputs], Any]) -> Case:
    return Case(
        routine=routine,
        function=f"gemm.{routine}",
        make=_make_fp8(batch),
        call=call,
        outputs=_outputs,
        reference=_reference,
        work=_work,
        torch=_torch_fp8,
        rivals={"cublas": _cublas_fp8},
        poison=("out",),
        tolerance=_FAST,
        unsupported=_unsupported_fp8,
    )


def _groupwise(routine: str, call: Callable[[Any, Inputs], Any]) -> Case:
    return Case(
        routine=routine,
        function=f"gemm.{routine}",
        make=_make_groupwise,
        call=call,
        outputs=_outputs,
        reference=_groupwise_reference,
        work=_work,
        torch=_torch_groupwise,
        rivals={"deepgemm": Planned(_plan_deep_gemm, _run_deep_gemm)},
        poison=("out",),
        tolerance=_FINE,
        unsupported=_unsupported_groupwise,
    )


def _call_groupwise(f: Callable[..., Any], x: Inputs) -> Any:
    return f(x.a, x.b, x.a_scale, x.b_scale, scale_major_mode=x.mode, mma_sm=x.mma_sm, out=x.out, out_dtype=x.out_dtype)


def _call_group_groupwise(f: Callable[..., Any], x: Inputs) -> Any:
    return f(
        x.a, x.b, x.a_scale, x.b_scale, x.m_indptr, scale_major_mode=x.mode, mma_sm=x.mma_sm, out=x.out,
        out_dtype=x.out_dtype,
    )  # fmt: skip


CASES = (
    _dense("mm_bf16", _alone),
    _dense("bmm_bf16", _batch),
    _fp8("bmm_fp8", _batch, lambda f, x: f(x.a, x.b, x.a_scale, x.b_scale, x.out_dtype, out=x.out)),
    _fp8("mm_fp8", _alone, lambda f, x: f(x.a, x.b.t(), x.scale, out_dtype=x.out_dtype, out=x.out)),
    _groupwise("gemm_fp8_nt_groupwise", _call_groupwise),
    _groupwise("group_gemm_fp8_nt_groupwise", _call_group_groupwise),
)
