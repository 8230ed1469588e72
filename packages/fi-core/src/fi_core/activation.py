"""Gated activations: an activation of the first half of each row times the second half."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Tensor, TraceTemplate, Var
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch

_SILU, _GELU, _GELU_TANH = range(3)  # enum Activation of act_and_mul.h
_DEVICE_NAMES = {_SILU: "fi::kSilu", _GELU: "fi::kGelu", _GELU_TANH: "fi::kGeluTanh"}


def _unit(axes: Axes) -> Unit:
    """Entries in order of preference; config = (activation, elements a vector, vectors a thread, blocks an SM that the
    entry needs to be worth it)."""
    dtype = DTYPES[str(axes["dtype"])]
    entries = []
    for act, name in _DEVICE_NAMES.items():
        for vec, count, worth in ((16 // dtype.bytes, 4, 2), (16 // dtype.bytes, 1, 0), (2, 4, 0), (1, 4, 0)):
            body = f"act_and_mul<{dtype.device}, {name}, {vec}, {count}>"
            entry = f"{name.removeprefix('fi::k').lower()}_{vec}_{count}"
            entries.append(Entry(entry, body, 256, (act, vec, count, worth)))
    return Unit("fi/activation/act_and_mul.cuh", "ActAndMulParams", tuple(entries))


ACT_AND_MUL = Op(
    name="act_and_mul",
    family="activation",
    schema="(Tensor(a!) out, Tensor input, int act, bool? enable_pdl) -> ()",
    axes={"dtype": ("f16", "bf16", "f32")},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _unit)),
)

_act_and_mul = Launcher(ACT_AND_MUL, lambda out, input, *_: (input.get_device(), input.dtype))


def _new_out(input: torch.Tensor) -> torch.Tensor:
    *rows, width = input.shape
    return input.new_empty((*rows, width // 2))


def _silu_and_mul_reference(input):  # type: ignore[no-untyped-def]
    import torch

    gate, up = input.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _gelu_and_mul_reference(input):  # type: ignore[no-untyped-def]
    import torch

    gate, up = input.double().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def _gelu_tanh_and_mul_reference(input):  # type: ignore[no-untyped-def]
    import torch

    gate, up = input.double().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _trace(name: str, reference: Callable[..., Any], description: str) -> TraceTemplate:
    return TraceTemplate(
        name,
        axes={"batch_size": Var(), "hidden_size": Const(abbrev="h"), "output_size": Var()},
        inputs={"input": Tensor(["batch_size", "hidden_size"])},
        outputs={"output": Tensor(["batch_size", "output_size"], dtype_from="input")},
        constraints=("hidden_size == 2 * output_size",),
        reference=reference,
        description=description,
    )


@fi_api(trace=_trace("silu_and_mul", _silu_and_mul_reference, "SiLU of the first half times the second half."))
def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """`silu(input[..., :h]) * input[..., h:]` with `silu(x) = x / (1 + e^-x)` (SwiGLU, arXiv:2002.05202).

    input: `[..., 2 h]`, fp16, bf16 or fp32, contiguous; of two dimensions the rows may be strided. Any h: on CUDA it is
    fastest if `h * itemsize` is a multiple of 16 bytes. Arithmetic in fp32, one rounding; at -inf the limit, -0.
    out: `[..., h]`, same dtype, contiguous likewise, not overlapping input; allocated if None.
    enable_pdl: programmatic dependent launch; None means on where the hardware has it (sm_90 and later).

    Returns out. Raises ValueError (odd last dimension, shape, stride, device) or TypeError (dtype) naming the argument.
    """
    if out is None:
        out = _new_out(input)
    _act_and_mul(out, input, _SILU, enable_pdl)
    return out


@fi_api(trace=_trace("gelu_and_mul", _gelu_and_mul_reference, "GELU of the first half times the second half."))
def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """As `silu_and_mul`, with `gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))` (arXiv:1606.08415)."""
    if out is None:
        out = _new_out(input)
    _act_and_mul(out, input, _GELU, enable_pdl)
    return out


@fi_api(
    trace=_trace(
        "gelu_tanh_and_mul", _gelu_tanh_and_mul_reference, "GELU by tanh of the first half times the second half."
    )
)
def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """As `silu_and_mul`, with `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    if out is None:
        out = _new_out(input)
    _act_and_mul(out, input, _GELU_TANH, enable_pdl)
    return out
