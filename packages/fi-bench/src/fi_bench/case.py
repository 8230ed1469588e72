"""A benchmark case: inputs, call, fp64 reference, work, and eager torch; `cases/<family>.py` holds them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_bench.catalog import family_of
from fi_core.observe.template import TraceTemplate, Work

if TYPE_CHECKING:
    import torch

__all__ = ["Case", "Inputs", "Outputs", "Planned", "Tolerance", "Work", "dtype_of"]

Outputs = dict[str, "torch.Tensor"]


class Inputs(dict[str, Any]):
    """Arguments of one call by name; `x.weight` is `x["weight"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tolerance(NamedTuple):
    rtol: float
    atol: float


class Planned(NamedTuple):
    """A peer with a plan: `plan(inputs)` runs once, untimed; `call(planned, inputs)` is timed."""

    plan: Callable[[Inputs], Any]
    call: Callable[[Any, Inputs], Any]


@dataclass(frozen=True)
class Case:
    """One routine. Every field but the names is a function; torch is imported inside them.

    make      (params, device, generator) -> Inputs; random data, never zeros
    call      (function, inputs) -> the result of the function
    outputs   (inputs, returned) -> the tensors to check, by name
    reference (inputs before the call) -> the same tensors in fp64, or exact
    work      (params, inputs) -> Work
    torch     (inputs) -> the same outputs from plain torch, for the backend `torch`; None: there is no such backend

    `function` is fi_core's, and FlashInfer's for the backend `flashinfer`. If it is a wrapper class, `plan` makes and
    plans one, once per measurement and untimed, and `call` runs it:

        function="decode.BatchDecodeWithPagedKVCacheWrapper",
        plan=lambda wrapper, x, backend: planned(wrapper(x.workspace, backend=backend), x),
        call=lambda planned, x: planned.run(x.q, (x.k_cache, x.v_cache)),

    `plan` receives the backend's name: `auto`, `cpu`, a public backend (`fa2`, `fa2_tc`, `fa3`), or the part of
    `flashinfer:fa3` behind the colon. It receives the inputs of the first call. Later calls use copies of them, so that
    the cache is cold; a plan must not keep their addresses. A peer with a plan of its own is a `Planned` in
    `peers`. The name of an implementation is forced on `op` while the backend runs.
    """

    routine: str
    function: str  # below fi_core, and below any call-compatible library
    make: Callable[[Namespace, Any, Any], Inputs]
    call: Callable[[Any, Inputs], Any]
    outputs: Callable[[Inputs, Any], Outputs]
    reference: Callable[[Inputs], Outputs]
    work: Callable[[Namespace, Inputs], Work]
    torch: Callable[[Inputs], Any] | None
    labels: tuple[str, ...] = ()  # FlashInfer's names of backends that time the function of fi_core
    op: str = ""  # name in fi_core's registry; its implementations are the backends
    also: tuple[str, ...] = ()  # other ops that the routine launches
    plan: Callable[[Callable[..., Any], Inputs, str], Any] | None = None
    poison: tuple[str, ...] = ()  # inputs that are pure outputs: filled with NaN before the check
    peers: Mapping[str, Callable[[Inputs], Any] | Planned] = field(default_factory=dict)  # by backend, beside torch
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)  # per output, instead of the description's
    description: Callable[[Inputs], TraceTemplate] | None = None  # of fi_core, by the arguments of a call
    torch_outputs: Callable[[Inputs, Any], Outputs] | None = None  # for peers that return other things than the call
    pdl: bool = False
    details: Callable[[Inputs], Mapping[str, object]] | None = None  # more lines of -vv, beside shapes of inputs
    lengths: Callable[[Inputs], Mapping[str, float]] | None = None  # averages printed with -v, kept in the row
    unsupported: Callable[[str, Namespace], str | None] | None = None  # (backend, params) -> the reason, if any

    def tolerances(self, inputs: Inputs, outputs: Outputs) -> Mapping[str, Tolerance]:
        """Of each output: its own, else the description's; an output without one is left out."""
        if self.description is None:
            return self.tolerance
        template = self.description(inputs)
        told = {name: Tolerance(*template.tolerance_of(name, x.dtype)) for name, x in outputs.items()}
        return told | dict(self.tolerance)

    @property
    def family(self) -> str:
        return family_of(self.routine).name


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype behind a name of --input_dtype and friends."""
    import torch

    table = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "nvfp4": "uint8"}
    found = getattr(torch, table.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown data type {name!r}")
    return found
