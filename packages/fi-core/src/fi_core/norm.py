"""RMSNorm and LayerNorm with their residual-add and fp8 forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit

if TYPE_CHECKING:
    import torch


def _rmsnorm_unit(axes: Axes) -> Unit:
    """Entries in order of preference; config = (kind, vector elements, vectors a thread or lanes a row, largest d)."""
    dtype = DTYPES[str(axes["dtype"])]
    out = DTYPES[str(axes["out"])]
    types = f"{dtype.device}, {out.device}"
    residual = "true" if axes["residual"] else "false"
    vec = 16 // dtype.bytes
    entries = [
        Entry(f"rmsnorm_{lanes}_lanes", f"rmsnorm_lanes<{types}, {vec}, {lanes}, {residual}>", 256, (0, vec, lanes, vec * lanes))
        for lanes in (8, 16, 32)
    ]
    for count in (1, 2, 4):  # 8 vectors a thread spill
        body = f"rmsnorm_block<{types}, {vec}, {count}, {residual}>"
        entries.append(Entry(f"rmsnorm_block_{count}", body, 512, (1, vec, count, vec * count * 512)))
    entries.append(Entry("rmsnorm_loop", f"rmsnorm_loop<{types}, {vec}, {residual}>", 1024, (2, vec, 1, 2**31 - 1)))
    entries.append(Entry("rmsnorm_scalar", f"rmsnorm_loop<{types}, 1, {residual}>", 1024, (2, 1, 1, 2**31 - 1)))
    return Unit("fi/norm/rmsnorm.cuh", "RmsnormParams", tuple(entries))


RMSNORM = Op(
    name="rmsnorm",
    family="norm",
    schema="(Tensor(a!) out, Tensor input, Tensor(b!)? residual, Tensor weight, Tensor? scale, float eps, "
    "float weight_bias, bool? enable_pdl) -> ()",
    axes={"dtype": ("f16", "bf16", "f32"), "out": ("f16", "bf16", "f32", "e4m3", "e5m2"), "residual": (False, True)},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _rmsnorm_unit)),
    prebuilt=tuple(
        {"dtype": dtype, "out": out, "residual": residual}
        for dtype in ("f16", "bf16", "f32")
        for out in (dtype, "e4m3", "e5m2")
        for residual in (False, True)
    ),
)

_rmsnorm = Launcher(
    RMSNORM, lambda out, input, residual, *_: (input.device, input.dtype, out.dtype, residual is not None)
)


def _rmsnorm_reference(hidden_states, weight, eps=1e-6):  # type: ignore[no-untyped-def]
    x = hidden_states.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@fi_api(
    trace=TraceTemplate(
        "rmsnorm",
        axes={"batch_size": Var(), "hidden_size": Const(abbrev="h")},
        inputs={
            "hidden_states": Tensor(["batch_size", "hidden_size"], param="input"),
            "weight": Tensor(["hidden_size"]),
            "eps": Scalar(optional=True),
        },
        outputs={"output": Tensor(["batch_size", "hidden_size"], dtype_from="hidden_states")},
        reference=_rmsnorm_reference,
        description="Root mean square normalisation over the last dimension.",
    )
)
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """`input * weight / sqrt(mean(input^2) + eps)` over the last dimension (RMSNorm, arXiv:1910.07467).

    input: `[n, d]` or `[n, heads, d]`, fp16, bf16 or fp32; rows may be strided, the last dimension is contiguous.
    weight: `[d]`, same dtype. out: like input, may be input itself; allocated if None. Arithmetic in fp32, one rounding.
    enable_pdl: programmatic dependent launch; None means on where the hardware has it (sm_90 and later).

    Returns out. Raises ValueError (shape, stride, device) or TypeError (dtype) naming the argument.
    """
    if out is None:
        out = input.new_empty(input.shape)
    _rmsnorm(out, input, None, weight, None, eps, 0.0, enable_pdl)
    return out
