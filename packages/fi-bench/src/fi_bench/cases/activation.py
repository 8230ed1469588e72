"""Cases of the gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_bench.case import Case
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch

_ACTIVATION = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}


def _gated(name: str, x: torch.Tensor) -> torch.Tensor:
    import torch

    gate, up = x.chunk(2, dim=-1)
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def _case(routine: str, name: str) -> Case:
    return described(
        f"activation.{routine}",
        lambda p: {**sizes_of(p, "batch_size", dtype="input_dtype"), "hidden_size": 2 * p.hidden_size},
        lambda f, x: f(x.input, out=x.out, enable_pdl=x.pdl),
        lambda x: _gated(name, x.input),
        add=lambda p, x: {"out": x.input.new_empty((p.batch_size, p.hidden_size)), "pdl": p.enable_pdl or None},
        op="act_and_mul",
        poison=("out",),
        pdl=True,
    )


CASES = tuple(_case(routine, name) for routine, name in _ACTIVATION.items())
