"""What one benchmark case is: inputs, call, fp64 reference, work, and eager torch; `cases/<family>.py` holds them."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """What a call must do at least: operations, and bytes to and from memory."""

    flops: int
    bytes: int


class Tolerance(NamedTuple):
    rtol: float
    atol: float


@dataclass(frozen=True)
class Case:
    """One routine. Every field but the names is a function; torch is imported inside them.

    make      (params, device, generator) -> Inputs; random data, never zeros
    call      (function, inputs) -> whatever the function returns
    outputs   (inputs, returned) -> the named tensors that are checked
    reference (inputs before the call) -> the same tensors in fp64, or exact
    work      (params, inputs) -> Work
    torch     (inputs) -> the same outputs from plain torch, for the backend `torch`
    """

    routine: str
    function: str  # below fi_core, and below any call-compatible library
    make: Callable[[Namespace, Any, Any], Inputs]
    call: Callable[[Callable[..., Any], Inputs], Any]
    outputs: Callable[[Inputs, Any], Outputs]
    reference: Callable[[Inputs], Outputs]
    work: Callable[[Namespace, Inputs], Work]
    torch: Callable[[Inputs], Any]
    op: str = ""  # name in fi_core's registry, where it is not the routine's
    poison: tuple[str, ...] = ()  # inputs that are pure outputs: filled with NaN before the check
    rivals: Mapping[str, Callable[[Inputs], Any]] = field(default_factory=dict)  # more baselines by backend name
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)  # per output, where the dtype's does not do
    torch_outputs: Callable[[Inputs, Any], Outputs] | None = None  # where rivals return other things than the call
    pdl: bool = False
    lengths: Callable[[Inputs], Mapping[str, float]] | None = None  # averages printed with -v, kept in the row
    unsupported: Callable[[str, Namespace], str | None] | None = None  # (backend, params) -> why not

    @property
    def family(self) -> str:
        return FAMILY_OF[self.routine]


def find(routine: str) -> Case | None:
    """The case of a routine; None if its family has none for it."""
    try:
        module = importlib.import_module(f"fi_bench.cases.{FAMILY_OF[routine]}")
    except ModuleNotFoundError as error:
        if error.name != f"fi_bench.cases.{FAMILY_OF[routine]}":
            raise
        return None
    return next((case for case in module.CASES if case.routine == routine), None)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype behind a name of --input_dtype and friends."""
    import torch

    table = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "nvfp4": "uint8"}
    found = getattr(torch, table.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown data type {name!r}")
    return found
