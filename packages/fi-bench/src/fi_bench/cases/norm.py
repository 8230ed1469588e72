"""Cases of the norm family."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Work, dtype_of
from fi_bench.cases.common import nbytes, normal, to_fp8
from fi_bench.derived import case_of
from fi_bench.described import described, eager, sizes_of
from fi_core.observe.template import TraceTemplate

if TYPE_CHECKING:
    import torch

_BLOCK = 128  # neighbours that share a scale


def _by_rank(p: Namespace, template: TraceTemplate) -> bool:
    return ("num_heads" in template.axes) == (p.num_heads is not None)


def _no_heads(backend: str, p: Namespace) -> str | None:
    return None if p.num_heads is None else f"--num_heads is for rmsnorm and gemma_rmsnorm, not for {p.routine}"


def _block_quant_refusal(backend: str, p: Namespace) -> str | None:
    if p.num_heads is not None or p.hidden_size % _BLOCK:
        return f"--hidden_size must be a multiple of {_BLOCK} without --num_heads, got {p.hidden_size}"
    return None


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


def torch_plain(x: Inputs) -> torch.Tensor:
    import torch

    return torch.nn.functional.rms_norm(x.input, x.weight.shape, x.weight, x.eps)


def _torch_block_quant(x: Inputs) -> tuple[torch.Tensor, ...]:
    import torch

    normed, total = _torch()(x)
    blocks = normed.float().unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1).clamp(min=1e-10) / 448
    quantised = (blocks / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return quantised, scale.t(), normed, total


def _without_padding(x: Inputs, outputs: Outputs) -> Outputs:
    return outputs | {"block_scale": outputs["block_scale"][:, : x.input.shape[0]]}


def _patches(p: Namespace) -> dict[str, Any]:
    """--hidden_size is that of q, of --num_heads heads; one head if left out."""
    heads = p.num_heads or 1
    sizes = {"head_dim": p.hidden_size // heads, "num_heads": heads, "dtype": dtype_of(p.input_dtype)}
    return {**sizes, **sizes_of(p, "batch_size", "ppf", "pph", "ppw")}


def _silu_of_norm(x: Inputs, dtype: torch.dtype) -> torch.Tensor:
    import torch

    wide, weight = x.input.to(dtype), x.weight.to(dtype)
    return torch.nn.functional.silu(torch.nn.functional.rms_norm(wide, weight.shape, weight, x.eps))


def _make_silu(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    dtype = dtype_of(p.input_dtype)
    x = Inputs(input=normal((p.batch_size, p.hidden_size), dtype, device, generator), eps=p.eps)
    return Inputs(x, weight=normal((p.hidden_size,), dtype, device, generator), out=torch.empty_like(x.input))


def _torch_silu(x: Inputs) -> torch.Tensor:
    import torch

    return _silu_of_norm(x, torch.float32).to(x.input.dtype)


def _silu_reference(x: Inputs) -> Outputs:
    import torch

    return {"out": _silu_of_norm(x, torch.float64)}


CASES = (
    described(
        "rope.fused_qk_rmsnorm_rope",
        _patches,
        None,
        functools.partial(eager, "rope.fused_qk_rmsnorm_rope"),
        op="qk_rmsnorm_rope",
    ),
    Case(
        routine="fused_rmsnorm_silu",
        function="norm.fused_rmsnorm_silu",
        op="rmsnorm",
        make=_make_silu,
        call=lambda f, x: f(x.input, x.weight, x.eps, out=x.out),
        outputs=lambda x, returned: {"out": returned},
        reference=_silu_reference,
        work=lambda p, x: Work(9 * x.input.numel(), 2 * nbytes(x.input) + nbytes(x.weight)),
        torch=_torch_silu,
        poison=("out",),
        unsupported=_no_heads,
    ),
    case_of("rmsnorm", torch_plain, which=_by_rank),
    case_of("gemma_rmsnorm", _torch(gemma=True), which=_by_rank),
    case_of("fused_add_rmsnorm", _torch(), unsupported=_no_heads),
    case_of("gemma_fused_add_rmsnorm", _torch(gemma=True), unsupported=_no_heads),
    case_of("rmsnorm_quant", _torch(), unsupported=_no_heads),
    case_of("fused_add_rmsnorm_quant", _torch(), unsupported=_no_heads),
    case_of(
        "fused_add_rmsnorm_fp8_block_quant",
        _torch_block_quant,
        compared=_without_padding,
        poison=("out", "block_scale", "normed_out"),
        unsupported=_block_quant_refusal,
    ),
    case_of("layernorm", _torch_layernorm, unsupported=_no_heads),
    case_of("layernorm_quant", _torch_layernorm, unsupported=_no_heads),
)
