"""What one benchmark case is: inputs, call, fp64 reference, work, and eager torch; `cases/<family>.py` holds them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_bench import cases
from fi_bench.catalog import FAMILY_OF

if TYPE_CHECKING:
    import torch

Outputs = dict[str, "torch.Tensor"]


class Inputs(dict[str, Any]):
    """Arguments of one call by name; `x.weight` is `x["weight"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Work(NamedTuple):
    """What a call must do at least: operations, bytes to and from memory, and the ceiling that its operations have."""

    flops: int
    bytes: int
    unit: str = "matmul"  # a rate of `fi-bench calibrate`: matmul (16 bit) or matmul_fp8


class Tolerance(NamedTuple):
    rtol: float
    atol: float


class Planned(NamedTuple):
    """A baseline that prepares itself: `plan(inputs)` once and untimed, then `call(what it returned, inputs)`."""

    plan: Callable[[Inputs], Any]
    call: Callable[[Any, Inputs], Any]


@dataclass(frozen=True)
class Case:
    """One routine. Every field but the names is a function; torch is imported inside them.

    make      (params, device, generator) -> Inputs; random data, never zeros
    call      (function, inputs) -> whatever the function returns
    outputs   (inputs, returned) -> the named tensors that are checked
    reference (inputs before the call) -> the same tensors in fp64, or exact
    work      (params, inputs) -> Work
    torch     (inputs) -> the same outputs from plain torch, for the backend `torch`

    `function` is fi_core's, and FlashInfer's for the backend `flashinfer`. Where it is a wrapper class, `plan` makes
    and plans one, once per measurement and outside of what is timed, and `call` runs it:

        function="decode.BatchDecodeWithPagedKVCacheWrapper",
        plan=lambda wrapper, x, backend: planned(wrapper(x.workspace, backend=backend), x),
        call=lambda planned, x: planned.run(x.q, (x.k_cache, x.v_cache)),

    `plan` is told the backend's name as typed: an implementation (`fa2`, `fa2_tc`, `fa3`, `cpu` ...), `auto`, or what
    follows the colon of `flashinfer:fa3`. It sees the inputs that the first call gets; a cold cache is made by calls on
    copies of those, so what a plan keeps of them must not depend on their addresses. A baseline with a plan of its own
    is a `Planned` in `rivals`. An implementation name is forced on the launcher of `op` while the backend runs.
    """

    routine: str
    function: str  # below fi_core, and below any call-compatible library
    make: Callable[[Namespace, Any, Any], Inputs]
    call: Callable[[Any, Inputs], Any]
    outputs: Callable[[Inputs, Any], Outputs]
    reference: Callable[[Inputs], Outputs]
    work: Callable[[Namespace, Inputs], Work]
    torch: Callable[[Inputs], Any]
    op: str = ""  # name in fi_core's registry; its implementations are the backends
    also: tuple[str, ...] = ()  # other ops that the routine launches
    plan: Callable[[Callable[..., Any], Inputs, str], Any] | None = None
    poison: tuple[str, ...] = ()  # inputs that are pure outputs: filled with NaN before the check
    rivals: Mapping[str, Callable[[Inputs], Any] | Planned] = field(default_factory=dict)  # more baselines by backend
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)  # per output, where the dtype's does not do
    torch_outputs: Callable[[Inputs, Any], Outputs] | None = None  # where rivals return other things than the call
    pdl: bool = False
    lengths: Callable[[Inputs], Mapping[str, float]] | None = None  # averages printed with -v, kept in the row
    unsupported: Callable[[str, Namespace], str | None] | None = None  # (backend, params) -> why not

    @property
    def family(self) -> str:
        return FAMILY_OF[self.routine]


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    found = pkgutil.iter_modules(cases.__path__, f"{cases.__name__}.")
    modules = (importlib.import_module(info.name) for info in found)
    return tuple(module for module in modules if hasattr(module, "CASES"))


def every() -> list[Case]:
    """The cases of all modules in `cases/`."""
    return [found for module in _modules() for found in module.CASES]


def find(routine: str) -> Case | None:
    """The case of a routine; None if there is none yet."""
    return next((found for found in every() if found.routine == routine), None)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype behind a name of --input_dtype and friends."""
    import torch

    table = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "nvfp4": "uint8"}
    found = getattr(torch, table.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown data type {name!r}")
    return found
