"""Products of few bf16 tokens and fp32 weights, as routers have them, with the precision of fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.gemm.trace import sizes, template, tokens
from fi_core.observe.describe import sized, tensors
from fi_core.observe.draw import Draw
from fi_core.observe.log import fi_api
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch

_THREADS = 512


class GemmFp32WeightsConfig(NamedTuple):
    elements: int  # of a load of weights
    ctas: int  # of a cluster that share k, at most


def _unit(ctas: int) -> Unit:
    entries = (
        Entry(
            f"gemm_fp32_weights_{elements}",
            f"gemm_fp32_weights<{str(elements > 1).lower()}, {str(ctas > 1).lower()}>",
            _THREADS,
            GemmFp32WeightsConfig(elements, ctas),
            ctas_per_sm=1,
        )
        for elements in (4, 1)
    )
    return Unit("fi/gemm/gemm_fp32_weights.cuh", "GemmFp32WeightsParams", tuple(entries))


def _cluster_unit(axes: Values) -> Unit:
    return _unit(8)


def _cta_unit(axes: Values) -> Unit:
    return _unit(1)


GEMM_FP32_WEIGHTS = Op(
    name="gemm_fp32_weights",
    family="gemm",
    arguments="Tensor(a!) out, Tensor a, Tensor b, bool? enable_pdl=None",
    config=GemmFp32WeightsConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("cluster", at_least(90), _cluster_unit),
        Implementation("mma_sm80", (*at_least(80), Constraint("capability", "<=", 89)), _cta_unit),
    ),
)
_gemm_fp32_weights = operator(GEMM_FP32_WEIGHTS)


def _reference(a, b):  # type: ignore[no-untyped-def]
    return a.double() @ b.double().mT


@sized(m=5, n=72, k=136)
def _make(draw: Draw, s: Any) -> dict[str, Any]:
    return {"a": tokens(draw, (s.m, s.k), "bfloat16"), "b": draw.rows(draw.normal((s.n, s.k), "float32", s.k**-0.5))}


def _eager(a, b):  # type: ignore[no-untyped-def]
    return a.float() @ b.mT


@fi_api(
    trace=template(
        "mm_bf16_fp32",
        tensors(a="m k", b="n k"),
        "m n",
        _reference,
        _make,
        sizes(((5, 72, 136), (1, 64, 512), (17, 33, 7), (16, 256, 1028), (0, 64, 64), (64, 1, 1))),
        "The product of bf16 tokens and fp32 weights.",
        op="gemm_fp32_weights",
        outputs=tensors({"dtype": "float32"}, output="m n"),
        eager=_eager,
    )
)
def mm_bf16_fp32(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Computes `a @ b.T` for up to some hundred tokens, in one kernel that reads fp32 weights as they are.

    Each weight is the sum of three bf16 terms, which tensor cores multiply by bf16 tokens without rounding; only sums
    round. An element is off by at most `(k / 7 + 64) * 2**-24 * (a.abs() @ b.abs().T)`, a seventh of what an fp32 sum
    in turn may lose; on a GPU if tensor cores cut each sum of 16 products to 24 bits. Parts of weights below 2^-133 are
    lost, too. A token's result is the same in any batch.

    Args:
        a: `[m, k]`, bf16; rows may be strided. For each 16 tokens the weights are read once more.
        b: `[n, k]`, fp32; rows may be strided. Loads are fastest with k and strides that are multiples of 4.
        out: `[m, n]`, fp32, in memory of its own; allocated if None.
        enable_pdl: programmatic dependent launch; None means on where the hardware has it.

    Returns:
        out.

    Raises:
        ValueError: A shape, stride or device does not fit; the text names the argument.
        TypeError: A dtype does not fit.
    """
    if out is None:
        import torch

        out = torch.empty(*a.shape[:-1], b.shape[0], dtype=torch.float32, device=a.device)
    _gemm_fp32_weights(out, a, b, enable_pdl=enable_pdl)
    return out
