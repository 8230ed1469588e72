"""Trace templates of the norm family, with fp64 references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var


def _template(
    name: str,
    reference: Callable[..., Any],
    description: str,
    *,
    heads: bool = False,
    residual: bool = False,
    quantized: bool = False,
    parameters: tuple[str, ...] = ("weight",),
) -> TraceTemplate:
    """A norm over the last dimension of `[batch_size, (num_heads,) hidden_size]`."""
    dims = ["batch_size", "num_heads", "hidden_size"] if heads else ["batch_size", "hidden_size"]
    inputs: dict[str, Tensor | Scalar] = {"hidden_states": Tensor(dims, param="input")}
    outputs: dict[str, Tensor | Scalar] = {}
    if quantized:
        inputs = {"out": Tensor(dims, description="Receives the result; its dtype is the format."), **inputs}
        outputs["output"] = Tensor(dims, param="out", dtype_from="out")
    else:
        outputs["output"] = Tensor(dims, param="input" if residual else None, dtype_from="hidden_states")
    if residual:
        inputs["residual"] = Tensor(dims)
        outputs["residual_output"] = Tensor(dims, param="residual", dtype_from="residual")
    inputs |= {parameter: Tensor(["hidden_size"]) for parameter in parameters}
    if quantized:
        inputs["scale"] = Scalar(description="Of dequantisation: the result is divided by it.")
    inputs["eps"] = Scalar(optional=True)
    axes: dict[str, Var | Const] = {"batch_size": Var()}
    if heads:
        axes["num_heads"] = Const(abbrev="n")
    axes["hidden_size"] = Const(abbrev="h")
    return TraceTemplate(name, axes, inputs, outputs, reference=reference, description=description)


def _by_rank(plain: TraceTemplate, heads: TraceTemplate) -> Callable[..., TraceTemplate | None]:
    """The template for `[n, d]` or `[n, heads, d]` inputs."""

    def pick(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        rank = len(arguments["input"].shape)
        return plain if rank == 2 else heads if rank == 3 else None

    pick.templates = (plain, heads)  # type: ignore[attr-defined]
    return pick


# The references are written into trace files as they stand here, so each is whole in itself.
def _rmsnorm_reference(hidden_states, weight, eps=1e-6):  # type: ignore[no-untyped-def]
    x = hidden_states.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _gemma_rmsnorm_reference(hidden_states, weight, eps=1e-6):  # type: ignore[no-untyped-def]
    x = hidden_states.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1.0 + weight.double())


def _fused_add_rmsnorm_reference(hidden_states, residual, weight, eps=1e-6):  # type: ignore[no-untyped-def]
    s = hidden_states.double() + residual.double()
    return s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double(), s


def _gemma_fused_add_rmsnorm_reference(hidden_states, residual, weight, eps=1e-6):  # type: ignore[no-untyped-def]
    s = hidden_states.double() + residual.double()
    return s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * (1.0 + weight.double()), s


def _rmsnorm_quant_reference(out, hidden_states, weight, scale, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    x = hidden_states.double()
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double() / float(scale)
    top = torch.finfo(out.dtype).max
    return y.clamp(-top, top).to(out.dtype)


def _fused_add_rmsnorm_quant_reference(out, hidden_states, residual, weight, scale, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    s = hidden_states.double() + residual.double()
    y = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double() / float(scale)
    top = torch.finfo(out.dtype).max
    return y.clamp(-top, top).to(out.dtype), s


def _layernorm_reference(hidden_states, gemma, beta, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    x = hidden_states.double()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gemma.double(), beta.double(), eps)


def _layernorm_quant_reference(out, hidden_states, gemma, beta, scale, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    x = hidden_states.double()
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], gemma.double(), beta.double(), eps) / float(scale)
    top = torch.finfo(out.dtype).max
    return y.clamp(-top, top).to(out.dtype)


def _block_quant_reference(hidden_states, residual, weight, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    s = hidden_states.double() + residual.double()
    normed = (s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(hidden_states.dtype)
    blocks = normed.double().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    padded = torch.nn.functional.pad(scale[..., 0].T, (0, -s.shape[0] % 4))
    return (blocks / scale).flatten(-2).to(torch.float8_e4m3fn), padded.float(), normed, s


_RMS = "Root mean square normalisation over the last dimension"
_ADD = ", of the sum with the residual, which is updated"
RMSNORM = _by_rank(
    _template("rmsnorm", _rmsnorm_reference, f"{_RMS}."),
    _template("rmsnorm", _rmsnorm_reference, f"{_RMS}, head by head.", heads=True),
)
GEMMA_RMSNORM = _by_rank(
    _template("gemma_rmsnorm", _gemma_rmsnorm_reference, f"{_RMS}, weights off by one."),
    _template("gemma_rmsnorm", _gemma_rmsnorm_reference, f"{_RMS}, head by head, weights off by one.", heads=True),
)
FUSED_ADD_RMSNORM = _template("fused_add_rmsnorm", _fused_add_rmsnorm_reference, f"{_RMS}{_ADD}.", residual=True)
GEMMA_FUSED_ADD_RMSNORM = _template(
    "gemma_fused_add_rmsnorm",
    _gemma_fused_add_rmsnorm_reference,
    f"{_RMS}{_ADD}; weights off by one.",
    residual=True,
)
RMSNORM_QUANT = _template("rmsnorm_quant", _rmsnorm_quant_reference, f"{_RMS}, to fp8.", quantized=True)
FUSED_ADD_RMSNORM_QUANT = _template(
    "fused_add_rmsnorm_quant",
    _fused_add_rmsnorm_quant_reference,
    f"{_RMS}{_ADD}; to fp8.",
    residual=True,
    quantized=True,
)
_GEMMA_BETA = ("gemma", "beta")
LAYERNORM = _template(
    "layernorm", _layernorm_reference, "Layer normalisation over the last dimension.", parameters=_GEMMA_BETA
)
LAYERNORM_QUANT = _template(
    "layernorm_quant",
    _layernorm_quant_reference,
    "Layer normalisation over the last dimension, to fp8.",
    quantized=True,
    parameters=_GEMMA_BETA,
)
_ROWS = ("batch_size", "hidden_size")
FUSED_ADD_RMSNORM_FP8_BLOCK_QUANT = TraceTemplate(
    "fused_add_rmsnorm_fp8_block_quant",
    axes={"batch_size": Var(), "hidden_size": Const(abbrev="h"), "num_blocks": Var(), "padded_batch_size": Var()},
    inputs={
        "hidden_states": Tensor(_ROWS, param="input"),
        "residual": Tensor(_ROWS),
        "weight": Tensor(["hidden_size"]),
        "eps": Scalar(optional=True),
    },
    outputs={
        "output": Tensor(_ROWS, param="out", dtype="float8_e4m3fn"),
        "block_scale": Tensor(["num_blocks", "padded_batch_size"], param="block_scale", dtype="float32"),
        "normed_output": Tensor(_ROWS, param="normed_out", dtype_from="hidden_states"),
        "residual_output": Tensor(_ROWS, param="residual", dtype_from="residual"),
    },
    constraints=("num_blocks == hidden_size // 128", "padded_batch_size == (batch_size + 3) // 4 * 4"),
    reference=_block_quant_reference,
    description=f"{_RMS}{_ADD}; in 16 bits and, scaled by blocks of 128, in e4m3.",
)
