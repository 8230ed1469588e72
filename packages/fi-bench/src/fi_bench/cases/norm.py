"""Cases of the norm family."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work, dtype_of
from fi_bench.cases.common import ceil_div, nbytes, normal, to_fp8

if TYPE_CHECKING:
    import torch

_BLOCK = 128  # neighbours that share a scale


def _shape(p: Namespace) -> tuple[int, ...]:
    return (p.batch_size, p.hidden_size) if p.num_heads is None else (p.batch_size, p.num_heads, p.hidden_size)


def _make(*, residual: bool = False, quantised: bool = False, affine: bool = False) -> Callable[..., Inputs]:
    """Inputs of a routine: with a residual, with a quantised output and its scale, with layernorm's fp32 parameters."""

    def make(p: Namespace, device: Any, generator: Any) -> Inputs:
        import torch

        shape, dtype = _shape(p), dtype_of(p.input_dtype)
        x = Inputs(input=normal(shape, dtype, device, generator), eps=p.eps, pdl=p.enable_pdl or None)
        if residual:
            x["residual"] = normal(shape, dtype, device, generator)
        if affine:
            x["gemma"] = normal(shape[-1:], torch.float32, device, generator)
            x["beta"] = normal(shape[-1:], torch.float32, device, generator)
        else:
            x["weight"] = normal(shape[-1:], dtype, device, generator)
        if quantised:
            x["scale"] = torch.full((1,), p.scale, dtype=torch.float32, device=device)
            x["out"] = torch.empty(shape, dtype=dtype_of(p.out_dtype), device=device)
        elif not residual and not affine:
            x["out"] = torch.empty(shape, dtype=dtype, device=device)
        return x

    return make


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    scale = weight.double() + 1 if gemma else weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale


def _reference(gemma: bool = False) -> Callable[[Inputs], Outputs]:
    def reference(x: Inputs) -> Outputs:
        total = x.input.double() + (x.residual.double() if "residual" in x else 0)
        out = _normalised(total, x.weight, x.eps, gemma)
        if "scale" in x:
            out = to_fp8(out / x.scale.double(), x.out.dtype).double()
        return {"out": out} | ({"residual": total} if "residual" in x else {})

    return reference


def _layernorm_reference(x: Inputs) -> Outputs:
    import torch

    wide = x.input.double()
    out = torch.nn.functional.layer_norm(wide, wide.shape[-1:], x.gemma.double(), x.beta.double(), x.eps)
    return {"out": to_fp8(out / x.scale.double(), x.out.dtype).double() if "scale" in x else out}


def _torch_layernorm(x: Inputs) -> torch.Tensor:
    import torch

    out = torch.nn.functional.layer_norm(x.input.float(), x.gemma.shape, x.gemma, x.beta, x.eps)
    return to_fp8(out / x.scale, x.out.dtype) if "scale" in x else out.to(x.input.dtype)


def _torch(gemma: bool = False) -> Callable[[Inputs], Any]:
    """Eager torch as one would write it: in fp32, rounded once."""

    def run(x: Inputs) -> Any:
        import torch

        total = x.input.float() + x.residual.float() if "residual" in x else x.input.float()
        weight = x.weight.float() + 1 if gemma else x.weight.float()
        out = torch.nn.functional.rms_norm(total, weight.shape, weight, x.eps)
        out = to_fp8(out / x.scale, x.out.dtype) if "scale" in x else out.to(x.input.dtype)
        return (out, total.to(x.input.dtype)) if "residual" in x else out

    return run


def _torch_plain(x: Inputs) -> torch.Tensor:
    import torch

    return torch.nn.functional.rms_norm(x.input, x.weight.shape, x.weight, x.eps)


def _torch_outputs(x: Inputs, returned: Any) -> Outputs:
    return {"out": returned[0], "residual": returned[1]} if isinstance(returned, tuple) else {"out": returned}


def _work(flops: int) -> Callable[[Namespace, Inputs], Work]:
    """Every tensor once; a residual is read and written, and so is the input of the in-place forms."""

    def work(p: Namespace, x: Inputs) -> Work:
        out = x.get("out", x["input"])
        small = nbytes(x.get("weight"), x.get("gemma"), x.get("beta"))
        return Work(flops * x.input.numel(), nbytes(x.input, out) + small + 2 * nbytes(x.get("residual")))

    return work


def _returned(x: Inputs, returned: Any) -> Outputs:
    return {"out": returned}


def _in_place(x: Inputs, returned: Any) -> Outputs:
    return {"out": x.input, "residual": x.residual}


def _quantised(x: Inputs, returned: Any) -> Outputs:
    return {"out": x.out} | ({"residual": x.residual} if "residual" in x else {})


def _make_block_quant(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    x = _make(residual=True)(p, device, generator)
    n, d = x.input.shape
    x["out"] = torch.empty((n, d), dtype=torch.float8_e4m3fn, device=device)
    x["normed_out"] = torch.empty_like(x.input)
    x["block_scale"] = torch.empty((d // _BLOCK, ceil_div(n, 4) * 4), dtype=torch.float32, device=device)
    return x


def _block_quant_refusal(p: Namespace) -> str | None:
    if p.num_heads is not None or p.hidden_size % _BLOCK:
        return f"--hidden_size must be a multiple of {_BLOCK} without --num_heads, got {p.hidden_size}"
    return None


def _block_scale(normed: torch.Tensor) -> torch.Tensor:
    """Of each 128 neighbours, [n, d / 128]."""
    largest: torch.Tensor = normed.unflatten(-1, (-1, _BLOCK)).abs().amax(-1)
    return largest.clamp(min=1e-10) / 448


def _block_quant_reference(x: Inputs) -> Outputs:
    total = x.input.double() + x.residual.double()
    normed = _normalised(total, x.weight, x.eps, gemma=False)
    return {"normed": normed, "residual": total, "scale": _block_scale(normed), "dequantised": normed}


def _block_quant_outputs(x: Inputs, returned: Any) -> Outputs:
    """fp8 times its scale: that the quantised values mean the right thing is what counts."""
    scale = x.block_scale.t()[: x.out.shape[0]]
    values = x.out.float().unflatten(-1, (-1, _BLOCK)) * scale.unsqueeze(-1)
    return {"normed": x.normed_out, "residual": x.residual, "scale": scale, "dequantised": values.flatten(-2)}


def _torch_block_quant(x: Inputs) -> Outputs:
    import torch

    normed, total = _torch()(x)
    scale = _block_scale(normed.float())
    blocks = normed.float().unflatten(-1, (-1, _BLOCK)) / scale.unsqueeze(-1)
    quantised = blocks.to(torch.float8_e4m3fn).float() * scale.unsqueeze(-1)
    return {"normed": normed, "residual": total, "scale": scale, "dequantised": quantised.flatten(-2)}


def _rms(name: str, gemma: bool) -> Case:
    return Case(
        routine=name,
        function=f"norm.{name}",
        op="rmsnorm",
        make=_make(),
        call=lambda f, x: f(x.input, x.weight, x.eps, out=x.out, enable_pdl=x.pdl),
        outputs=_returned,
        reference=_reference(gemma),
        work=_work(5),
        torch=_torch(gemma) if gemma else _torch_plain,
        poison=("out",),
        pdl=True,
    )


def _fused(name: str, gemma: bool) -> Case:
    return Case(
        routine=name,
        function=f"norm.{name}",
        op="rmsnorm",
        make=_make(residual=True),
        call=lambda f, x: f(x.input, x.residual, x.weight, x.eps, enable_pdl=x.pdl),
        outputs=_in_place,
        reference=_reference(gemma),
        work=_work(6),
        torch=_torch(gemma),
        torch_outputs=_torch_outputs,
        pdl=True,
    )


CASES = (
    _rms("rmsnorm", False),
    _rms("gemma_rmsnorm", True),
    _fused("fused_add_rmsnorm", False),
    _fused("gemma_fused_add_rmsnorm", True),
    Case(
        routine="rmsnorm_quant",
        function="norm.rmsnorm_quant",
        op="rmsnorm",
        make=_make(quantised=True),
        call=lambda f, x: f(x.out, x.input, x.weight, x.scale, x.eps, enable_pdl=x.pdl),
        outputs=_quantised,
        reference=_reference(),
        work=_work(6),
        torch=_torch(),
        torch_outputs=_torch_outputs,
        poison=("out",),
        pdl=True,
    ),
    Case(
        routine="fused_add_rmsnorm_quant",
        function="norm.fused_add_rmsnorm_quant",
        op="rmsnorm",
        make=_make(residual=True, quantised=True),
        call=lambda f, x: f(x.out, x.input, x.residual, x.weight, x.scale, x.eps, enable_pdl=x.pdl),
        outputs=_quantised,
        reference=_reference(),
        work=_work(7),
        torch=_torch(),
        torch_outputs=_torch_outputs,
        poison=("out",),
        pdl=True,
    ),
    Case(
        routine="fused_add_rmsnorm_fp8_block_quant",
        function="norm.fused_add_rmsnorm_fp8_block_quant",
        op="rmsnorm_block_quant",
        make=_make_block_quant,
        call=lambda f, x: f(x.out, x.block_scale, x.normed_out, x.input, x.residual, x.weight, x.eps, enable_pdl=x.pdl),
        outputs=_block_quant_outputs,
        reference=_block_quant_reference,
        work=lambda p, x: Work(
            8 * x.input.numel(), nbytes(x.input, x.normed_out, x.out, x.block_scale, x.weight) + 2 * nbytes(x.residual)
        ),
        torch=_torch_block_quant,
        torch_outputs=lambda x, returned: returned,
        poison=("out", "block_scale", "normed_out"),
        tolerance={"scale": Tolerance(1e-2, 1e-6), "dequantised": Tolerance(0.08, 1e-3)},
        pdl=True,
        unsupported=lambda backend, p: _block_quant_refusal(p),
    ),
    Case(
        routine="layernorm",
        function="norm.layernorm",
        op="layernorm",
        make=_make(affine=True),
        call=lambda f, x: f(x.input, x.gemma, x.beta, x.eps),
        outputs=_returned,
        reference=_layernorm_reference,
        work=_work(7),
        torch=_torch_layernorm,
    ),
    Case(
        routine="layernorm_quant",
        function="norm.layernorm_quant",
        op="layernorm",
        make=_make(affine=True, quantised=True),
        call=lambda f, x: f(x.out, x.input, x.gemma, x.beta, x.scale, x.eps),
        outputs=_quantised,
        reference=_layernorm_reference,
        work=_work(7),
        torch=_torch_layernorm,
        torch_outputs=_torch_outputs,
        poison=("out",),
    ),
)
