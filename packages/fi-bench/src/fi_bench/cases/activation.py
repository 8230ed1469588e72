"""Cases of the gated activations."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Work, dtype_of
from fi_bench.cases.common import nbytes, normal

if TYPE_CHECKING:
    import torch

_ACTIVATION = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}


def _make(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    dtype = dtype_of(p.input_dtype)
    return Inputs(
        input=normal((p.batch_size, 2 * p.hidden_size), dtype, device, generator),
        out=torch.empty((p.batch_size, p.hidden_size), dtype=dtype, device=device),
        pdl=p.enable_pdl or None,
    )


def _gated(name: str, x: torch.Tensor) -> torch.Tensor:
    import torch

    gate, up = x.chunk(2, dim=-1)
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def _outputs(x: Inputs, returned: Any) -> Outputs:
    return {"out": returned}


def _case(routine: str, name: str) -> Case:
    return Case(
        routine=routine,
        function=f"activation.{routine}",
        op="act_and_mul",
        make=_make,
        call=lambda f, x: f(x.input, out=x.out, enable_pdl=x.pdl),
        outputs=_outputs,
        reference=lambda x: {"out": _gated(name, x.input.double())},
        work=lambda p, x: Work(5 * x.out.numel(), nbytes(x.input, x.out)),
        torch=lambda x: _gated(name, x.input),
        poison=("out",),
        pdl=True,
    )


CASES = tuple(_case(routine, name) for routine, name in _ACTIVATION.items())
