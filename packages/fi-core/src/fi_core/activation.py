"""Gated activations (GLU variants): the activation of the first half of each row times the second half."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Tensor, TraceTemplate, Var, Work
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import torch

_SILU, _GELU, _GELU_TANH = range(3)  # enum Activation of act_and_mul.h
_DEVICE_NAMES = {_SILU: "fi::kSilu", _GELU: "fi::kGelu", _GELU_TANH: "fi::kGeluTanh"}


class _Config(NamedTuple):
    act: int
    vec_size: int  # elements per vector
    vectors_per_thread: int
    min_ctas_per_sm: int  # the entry is used only for a grid of at least so many CTAs per SM


def _unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype = DTYPES[str(axes["dtype"])]
    entries = []
    for act, name in _DEVICE_NAMES.items():
        for vec, num_vecs, min_ctas in ((16 // dtype.bytes, 4, 2), (16 // dtype.bytes, 1, 0), (2, 4, 0), (1, 4, 0)):
            body = f"act_and_mul<{dtype.device}, {name}, {vec}, {num_vecs}>"
            entry = f"{name.removeprefix('fi::k').lower()}_{vec}_{num_vecs}"
            entries.append(Entry(entry, body, 256, _Config(act, vec, num_vecs, min_ctas)))
    return Unit("fi/activation/act_and_mul.cuh", "ActAndMulParams", tuple(entries))


ACT_AND_MUL = Op(
    name="act_and_mul",
    family="activation",
    arguments="Tensor(a!) out, Tensor input, int act, bool? enable_pdl=None",
    read=lambda input: (input.dtype,),
    axes={"dtype": ("f16", "bf16", "f32")},
    config=_Config,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _unit)),
)

_act_and_mul = operator(ACT_AND_MUL)


def _new_out(input: torch.Tensor) -> torch.Tensor:
    *rows, width = input.shape
    return input.new_empty((*rows, width // 2))


def _gated(input, activation):  # type: ignore[no-untyped-def]
    gate, up = input.double().chunk(2, dim=-1)
    return activation(gate).where(gate != -float("inf"), -0.0) * up


def _silu_reference(input):  # type: ignore[no-untyped-def]
    return _gated(input, lambda x: x * x.sigmoid())


def _gelu_reference(input):  # type: ignore[no-untyped-def]
    return _gated(input, lambda x: x / 2 * (1 + (x / 2**0.5).erf()))


def _gelu_tanh_reference(input):  # type: ignore[no-untyped-def]
    return _gated(input, lambda x: x / 2 * (1 + ((2 / 3.141592653589793) ** 0.5 * (x + 0.044715 * x**3)).tanh()))


def _make(draw: Draw, *, dtype: str = "bfloat16", batch_size: int = 5, hidden_size: int = 260) -> dict[str, Any]:
    import torch

    inf, nan, half = float("inf"), float("nan"), (batch_size, hidden_size // 2)
    gate = draw.special(draw.normal(half, dtype, 2.0 if draw.nasty else 1.0), inf, -inf, nan, 0.0, -0.0, 88.5, -127.0)
    up = draw.special(draw.normal(half, dtype), inf, nan)
    return {"input": draw.rows(torch.cat((gate, up), dim=-1))}


_SAMPLES = tuple(
    {"dtype": dtype, "batch_size": rows, "hidden_size": width}
    for dtype in ("bfloat16", "float16", "float32")
    for rows, width in ((5, 260), (1, 16), (3, 14), (2, 4096), (0, 64))
)


def _work(arguments: Mapping[str, Any]) -> Work:
    """Every tensor once; about five operations an output."""
    read = nbytes(arguments["input"])
    return Work(5 * arguments["input"].numel() // 2, read + read // 2)


def _trace(name: str, reference: Callable[..., Any], description: str) -> TraceTemplate:
    return TraceTemplate(
        name,
        axes={"batch_size": Var(), "hidden_size": Const(abbrev="h"), "output_size": Var()},
        inputs={"input": Tensor(["batch_size", "hidden_size"])},
        outputs={"output": Tensor(["batch_size", "output_size"], dtype_from="input")},
        constraints=("hidden_size == 2 * output_size",),
        reference=(_gated, reference),
        description=description,
        op="act_and_mul",
        make=_make,
        samples=_SAMPLES,
        work=_work,
    )


@fi_api(trace=_trace("silu_and_mul", _silu_reference, "SiLU of the first half times the second half."))
def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """Computes `silu(input[..., :h]) * input[..., h:]` with `silu(x) = x / (1 + e^-x)` (SwiGLU, arXiv:2002.05202).

    The arithmetic is in fp32 with one rounding. `silu(-inf)` is its limit, -0.

    Args:
        input: `[..., 2 h]`, fp16, bf16 or fp32. A tensor of two dimensions may have strided rows; any other must be
            contiguous. Any h works; CUDA is fastest if `h * itemsize` is a multiple of 16 bytes.
        out: `[..., h]`, dtype of input, strides as for input; must not overlap input. Allocated if None.
        enable_pdl: programmatic dependent launch; None enables it where the hardware has it (sm_90 and later).

    Returns:
        out, `[..., h]`.

    Raises:
        ValueError: The last dimension is odd, or a shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    out = _new_out(input) if out is None else out
    _act_and_mul(out, input, _SILU, enable_pdl)
    return out


@fi_api(trace=_trace("gelu_and_mul", _gelu_reference, "GELU of the first half times the second half."))
def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """As `silu_and_mul`, with `gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))` (arXiv:1606.08415)."""
    out = _new_out(input) if out is None else out
    _act_and_mul(out, input, _GELU, enable_pdl)
    return out


@fi_api(
    trace=_trace("gelu_tanh_and_mul", _gelu_tanh_reference, "GELU by tanh of the first half times the second half.")
)
def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """As `silu_and_mul`, with `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    out = _new_out(input) if out is None else out
    _act_and_mul(out, input, _GELU_TANH, enable_pdl)
    return out
