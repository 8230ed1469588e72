"""Cases of functions without a module in `cases/`: flags, inputs, work, reference, torch peer of the description."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from fi_bench import flags

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from fi_bench.case import Case, Inputs
    from fi_bench.catalog import Family
    from fi_core.observe.trace import Described


@functools.cache
def _described(routine: str) -> Described | None:
    """A described function or wrapper of fi_core, or None."""
    from fi_core.registry import described

    return described(routine)


def _sizes(found: Described) -> dict[str, Any]:
    """The sizes that the description makes inputs from, with their usual values."""
    assert found.template.make is not None
    parameters = inspect.signature(found.template.make).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _flag(name: str, usual: Any) -> flags.Flag:
    help = f"{name} of the description"
    if isinstance(usual, bool):
        return flags.switch(name, help)
    if isinstance(usual, int):
        return flags.number(name, usual, help, least=0)
    if isinstance(usual, float):
        return flags.real(name, usual, help)
    return flags.dtype(name, usual) if name.endswith("dtype") else flags.Flag(name, help, default=usual)


def family(routine: str) -> Family | None:
    """A family of this routine alone, whose flags are the sizes of its description; None if it has none."""
    from fi_bench.catalog import Family

    found = _described(routine)
    if found is None:
        return None
    own = tuple(_flag(name, usual) for name, usual in _sizes(found).items())
    return Family(found.function.__module__.removeprefix("fi_core."), own, (routine,))


def case(routine: str) -> Case | None:
    """The case of a described function; None if it has no description."""
    found = _described(routine)
    return None if found is None or found.template.work is None else case_of(routine)


def case_of(routine: str, torch: Callable[[Inputs], Any] | None = None, **more: Any) -> Case:
    """The case of a described function, with other fields of the case, or other options of `described`.

    A function with `out` writes to a tensor that is allocated before, and one with `enable_pdl` obeys the flag.
    """
    from fi_bench.described import described, eager, public_backend

    found = _described(routine)
    assert found is not None, f"{routine} has no description"
    function = f"{(found.wrapper or found.function).__module__.removeprefix('fi_core.')}.{routine}"
    parameters = inspect.signature(found.function).parameters
    allocated, pdl = "out" in parameters and found.wrapper is None, "enable_pdl" in parameters
    own = {
        "op": found.template.ops[0],
        "also": found.template.ops[1:],
        "backend": public_backend if found.wrapper else None,
        "add": functools.partial(_added, function, allocated, pdl),
        "poison": ("out",) if allocated else (),
        "pdl": pdl,
    }
    peer = torch or (found.template.eager and functools.partial(eager, function))
    return described(function, functools.partial(_asked, tuple(_sizes(found))), None, peer, **{**own, **more})


def _asked(sizes: Sequence[str], p: Namespace) -> dict[str, Any]:
    """Sizes from flags of the same names that have a value; the data type of inputs may be the flag --input_dtype."""
    from fi_bench.case import dtype_of

    flag_of = {name: f"input_{name}" if name == "dtype" and "input_dtype" in p else name for name in sizes}
    asked = {name: value for name, flag in flag_of.items() if (value := getattr(p, flag, None)) is not None}
    return {name: dtype_of(value) if name.endswith("dtype") else value for name, value in asked.items()}


def _added(function: str, allocated: bool, pdl: bool, p: Namespace, x: Inputs) -> dict[str, Any]:
    """The arguments that a description leaves out: `out` for the first output, and `enable_pdl`."""
    import torch

    from fi_bench.case import dtype_of
    from fi_bench.described import description_of

    added: dict[str, Any] = {"enable_pdl": p.enable_pdl or None} if pdl else {}
    if allocated and "out" not in x:
        shape, dtype = next(iter(description_of(function, x).layouts(x).values()))
        device = next(value.device for value in x.values() if isinstance(value, torch.Tensor))
        added["out"] = torch.empty(shape, dtype=dtype_of(dtype), device=device)
    return added
