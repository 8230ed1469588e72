"""Gated activations (GLU variants): the activation of the first half of each row times the second half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.observe.draw import FLOATS, Draw
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Tensor, TraceTemplate, Var, samples
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch

_SILU, _GELU, _GELU_TANH = range(3)  # enum Activation of fi/activation.h


class _Config(NamedTuple):
    act: int
    vec_size: int  # elements per vector
    vectors_per_thread: int
    min_ctas_per_sm: int  # the entry requires a grid of at least this many CTAs per SM


def _unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype, entries = DTYPES[str(axes["dtype"])], []
    for act, name in enumerate(("Silu", "Gelu", "GeluTanh")):
        for vec, num_vecs, min_ctas in ((16 // dtype.bytes, 4, 2), (16 // dtype.bytes, 1, 0), (2, 4, 0), (1, 4, 0)):
            body = f"act_and_mul<{dtype.device}, fi::k{name}, {vec}, {num_vecs}>"
            entries.append(Entry(f"{name.lower()}_{vec}_{num_vecs}", body, 256, _Config(act, vec, num_vecs, min_ctas)))
    return Unit("fi/activation/act_and_mul.cuh", "ActAndMulParams", tuple(entries))


ACT_AND_MUL = Op(
    name="act_and_mul",
    family="activation",
    arguments="Tensor(a!) out, Tensor(a) input, int act, bool? enable_pdl=None",
    axes={"dtype": ("f16", "bf16", "f32")},
    config=_Config,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _unit)),
)
_act_and_mul = operator(ACT_AND_MUL)


def _run(act: int, input: torch.Tensor, out: torch.Tensor | None, enable_pdl: bool | None) -> torch.Tensor:
    if out is None:
        out = input.new_empty(*input.shape[:-1], input.shape[-1] // 2)
    _act_and_mul(out, input, act, enable_pdl)
    return out


def _gated(input, activation):  # type: ignore[no-untyped-def]
    gate, up = input.double().chunk(2, dim=-1)
    return activation(gate).where(gate != -float("inf"), -0.0) * up


def _silu_reference(input):  # type: ignore[no-untyped-def]
    return _gated(input, lambda x: x * x.sigmoid())


def _gelu_reference(input):  # type: ignore[no-untyped-def]
    return _gated(input, lambda x: x / 2 * (1 + (x / 2**0.5).erf()))


def _gelu_tanh_reference(input):  # type: ignore[no-untyped-def]
    return _gated(input, lambda x: x / 2 * (1 + ((2 / 3.141592653589793) ** 0.5 * (x + 0.044715 * x**3)).tanh()))


def _make(draw: Draw, *, dtype: str = "bfloat16", batch_size: int = 5, hidden_size: int = 130) -> dict[str, Any]:
    """hidden_size is h, the length of a row of the result."""
    inf, nan = float("inf"), float("nan")
    input = draw.normal((batch_size, 2 * hidden_size), dtype, 2.0 if draw.nasty else 1.0)
    draw.special(input[-1:, :hidden_size], inf, -inf, nan, 0.0, -0.0, 88.5, -127.0)
    draw.special(input[-1:, hidden_size:], inf, nan)
    return {"input": draw.rows(input)}


def _trace(name: str, reference: Any, word: str, **options: str) -> TraceTemplate:
    def eager(input):  # type: ignore[no-untyped-def]
        import torch

        gate, up = input.chunk(2, dim=-1)
        return getattr(torch.nn.functional, name.partition("_")[0])(gate, **options) * up

    return TraceTemplate(
        name,
        axes={"batch_size": Var(), "hidden_size": Const(abbrev="h"), "output_size": Var()},
        inputs={"input": Tensor(["batch_size", "hidden_size"])},
        outputs={"output": Tensor(["batch_size", "output_size"], dtype_from="input")},
        constraints=("output_size == hidden_size // 2",),
        reference=(_gated, reference),
        description=f"{word} of the first half times the second half.",
        op="act_and_mul",
        make=_make,
        samples=samples({"dtype": FLOATS, "batch_size, hidden_size": ((5, 130), (1, 8), (3, 7), (2, 2048), (0, 32))}),
        work=5,
        eager=eager,
    )


@fi_api(trace=_trace("silu_and_mul", _silu_reference, "SiLU"))
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
    return _run(_SILU, input, out, enable_pdl)


@fi_api(trace=_trace("gelu_and_mul", _gelu_reference, "GELU"))
def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """As `silu_and_mul`, with `gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))` (arXiv:1606.08415)."""
    return _run(_GELU, input, out, enable_pdl)


@fi_api(trace=_trace("gelu_tanh_and_mul", _gelu_tanh_reference, "GELU by tanh", approximate="tanh"))
def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """As `silu_and_mul`, with `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`."""
    return _run(_GELU_TANH, input, out, enable_pdl)
