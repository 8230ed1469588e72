"""Trace templates of the norm family, with fp64 references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.observe.draw import FLOATS, Draw, nbytes, without
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, samples, sized


def _make(heads: bool, residual: bool, quantized: bool, parameters: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    """Makes the inputs of a norm: strided rows, with a large value and a NaN in the last row."""

    @sized(
        dtype="bfloat16", out_dtype="float8_e4m3fn", batch_size=5, num_heads=3, hidden_size=136, scale=None, eps=1e-5
    )
    def make(draw: Draw, s: Any) -> dict[str, Any]:
        shape = (s.batch_size, s.num_heads, s.hidden_size) if heads else (s.batch_size, s.hidden_size)
        found = {"out": draw.empty(shape, s.out_dtype)} if quantized else {}
        found["input"] = draw.rows(draw.special(draw.normal(shape, s.dtype), float("nan")))
        if residual:
            found["residual"] = draw.rows(draw.normal(shape, s.dtype, 3.0 if draw.nasty else 1.0))
        kind = "float32" if "beta" in parameters else s.dtype
        found |= {parameter: draw.normal((s.hidden_size,), kind) for parameter in parameters}
        if quantized:
            drawn = draw.normal((1,), "float32").abs() + 0.01
            found["scale"] = drawn if s.scale is None else drawn.fill_(s.scale)
        return {**found, "eps": s.eps}

    return without(make, (("num_heads",) if not heads else ()) + (("out_dtype", "scale") if not quantized else ()))


def _samples(heads: bool, quantized: bool) -> tuple[dict[str, Any], ...]:
    """Row lengths, odd and large, for each dtype."""
    outs = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn")
    return samples(
        {
            **({"dtype, out_dtype": tuple(zip(FLOATS, outs))} if quantized else {"dtype": FLOATS}),
            "batch_size, hidden_size": ((5, 136), (1, 7), (2, 4096), (0, 64)),
            **({"num_heads": (3,)} if heads else {}),
        }
    )


def _work(flops: int) -> Callable[[Mapping[str, Any]], Work]:
    """Reads or writes each tensor once; a residual, and the input of in-place forms, is read and written."""

    def work(arguments: Mapping[str, Any]) -> Work:
        x, residual = arguments["input"], arguments.get("residual")
        small = nbytes(*(arguments.get(name) for name in ("weight", "gemma", "beta")))
        return Work(flops * x.numel(), nbytes(x, arguments.get("out", x)) + small + 2 * nbytes(residual))

    return work


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
        inputs = {"out": Tensor(dims, description="Receives the result; its dtype is the output format."), **inputs}
        outputs["output"] = Tensor(dims, param="out", dtype_from="out")
    else:
        outputs["output"] = Tensor(dims, param="input" if residual else None, dtype_from="hidden_states")
    if residual:
        inputs["residual"] = Tensor(dims)
        outputs["residual_output"] = Tensor(dims, param="residual", dtype_from="residual")
    inputs |= {parameter: Tensor(["hidden_size"]) for parameter in parameters}
    if quantized:
        inputs["scale"] = Scalar(description="Dequantization scale: the result is divided by it.")
    inputs["eps"] = Scalar(optional=True)
    axes: dict[str, Var | Const] = {"batch_size": Var()}
    if heads:
        axes["num_heads"] = Const(abbrev="n")
    axes["hidden_size"] = Const(abbrev="h")
    return TraceTemplate(
        name,
        axes,
        inputs,
        outputs,
        reference=reference,
        description=description,
        op="layernorm" if "beta" in parameters else "rmsnorm",
        make=_make(heads, residual, quantized, parameters),
        samples=_samples(heads, quantized),
        work=_work(5 + residual + quantized + 2 * ("beta" in parameters)),
        # Half a step of the fp8 mantissa, and the distance between the smallest e4m3 numbers.
        tolerance={"float8_e4m3fn": (0.07, 2e-3), "float8_e5m2": (0.14, 1e-4), "float32": (2e-5, 2e-5)},
    )


def _by_rank(plain: TraceTemplate, heads: TraceTemplate) -> Callable[..., TraceTemplate | None]:
    """The template for `[n, d]` or `[n, heads, d]` inputs."""

    def pick(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        rank = len(arguments["input"].shape)
        return plain if rank == 2 else heads if rank == 3 else None

    pick.templates = (plain, heads)  # type: ignore[attr-defined]
    return pick


# Trace files contain the source of a reference, so each reference is self-contained.
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
    factor = 1.0 / torch.as_tensor(scale, dtype=torch.float32)
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double() * factor
    top = torch.finfo(out.dtype).max
    return y.clamp(-top, top).to(out.dtype)


def _fused_add_rmsnorm_quant_reference(out, hidden_states, residual, weight, scale, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    s = hidden_states.double() + residual.double()
    factor = 1.0 / torch.as_tensor(scale, dtype=torch.float32)
    y = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double() * factor
    top = torch.finfo(out.dtype).max
    return y.clamp(-top, top).to(out.dtype), s


def _layernorm_reference(hidden_states, gemma, beta, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    x = hidden_states.double()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gemma.double(), beta.double(), eps)


def _layernorm_quant_reference(out, hidden_states, gemma, beta, scale, eps=1e-6):  # type: ignore[no-untyped-def]
    import torch

    x = hidden_states.double()
    factor = 1.0 / torch.as_tensor(scale, dtype=torch.float32)
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], gemma.double(), beta.double(), eps) * factor
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


_RMS = "Root mean square normalization over the last dimension"
_ADD = " of input + residual, with the sum written to residual"
RMSNORM = _by_rank(
    _template("rmsnorm", _rmsnorm_reference, f"{_RMS}."),
    _template("rmsnorm", _rmsnorm_reference, f"{_RMS} of each head.", heads=True),
)
GEMMA_RMSNORM = _by_rank(
    _template("gemma_rmsnorm", _gemma_rmsnorm_reference, f"{_RMS}, with 1 + weight."),
    _template("gemma_rmsnorm", _gemma_rmsnorm_reference, f"{_RMS} of each head, with 1 + weight.", heads=True),
)
FUSED_ADD_RMSNORM = _template("fused_add_rmsnorm", _fused_add_rmsnorm_reference, f"{_RMS}{_ADD}.", residual=True)
GEMMA_FUSED_ADD_RMSNORM = _template(
    "gemma_fused_add_rmsnorm",
    _gemma_fused_add_rmsnorm_reference,
    f"{_RMS}{_ADD}, with 1 + weight.",
    residual=True,
)
RMSNORM_QUANT = _template("rmsnorm_quant", _rmsnorm_quant_reference, f"{_RMS}, with an fp8 output.", quantized=True)
FUSED_ADD_RMSNORM_QUANT = _template(
    "fused_add_rmsnorm_quant",
    _fused_add_rmsnorm_quant_reference,
    f"{_RMS}{_ADD}, with an fp8 output.",
    residual=True,
    quantized=True,
)
_GEMMA_BETA = ("gemma", "beta")
LAYERNORM = _template(
    "layernorm", _layernorm_reference, "Layer normalization over the last dimension.", parameters=_GEMMA_BETA
)
LAYERNORM_QUANT = _template(
    "layernorm_quant",
    _layernorm_quant_reference,
    "Layer normalization over the last dimension, with an fp8 output.",
    quantized=True,
    parameters=_GEMMA_BETA,
)
_ROWS = ("batch_size", "hidden_size")


@sized(dtype="bfloat16", batch_size=5, hidden_size=384, eps=1e-5)
def _make_block_quant(draw: Draw, s: Any) -> dict[str, Any]:
    shape = (s.batch_size, s.hidden_size)
    scales = draw.normal((s.hidden_size // 128, -(-s.batch_size // 4) * 4), "float32").zero_()
    return {
        "out": draw.empty(shape, "float8_e4m3fn"),
        "block_scale": scales,
        "normed_out": draw.empty(shape, s.dtype),
        "input": draw.rows(draw.normal(shape, s.dtype)),
        "residual": draw.rows(draw.normal(shape, s.dtype)),
        "weight": draw.normal(shape[1:], s.dtype),
        "eps": s.eps,
    }


def _block_quant_work(arguments: Mapping[str, Any]) -> Work:
    once = [arguments[name] for name in ("input", "normed_out", "out", "block_scale", "weight")]
    return Work(8 * arguments["input"].numel(), nbytes(*once) + 2 * nbytes(arguments["residual"]))


def _block_scales(hidden_states: Any, residual: Any, weight: Any, eps: float = 1e-6) -> dict[str, Any]:
    """Those of rows, not of the padding."""
    import torch

    rows = len(hidden_states)
    return {"block_scale": torch.arange(-(-rows // 4) * 4, device=hidden_states.device) < rows}


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
    op="rmsnorm_block_quant",
    make=_make_block_quant,
    written=_block_scales,
    samples=samples({"dtype": FLOATS[:2], "batch_size, hidden_size": ((5, 384), (8, 128))}),
    work=_block_quant_work,
    # The scale is computed from rounded values, and a value halfway between two fp8 numbers may round to either.
    tolerance={"block_scale": (1e-2, 1e-6), "output": (0.13, 0.02)},
    description=f"{_RMS}{_ADD}, with a 16-bit output and an e4m3 output scaled per block of 128.",
)
