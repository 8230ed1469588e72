"""Cases of functions without a module in `cases/`: inputs, work, reference, torch peer of the description."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, dtype_of
from fi_bench.catalog import description, sizes
from fi_bench.described import described, description_of, eager, public_backend

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence


def case(routine: str) -> Case | None:
    """The case of a described function; None if it has no description."""
    found = description(routine)
    return None if found is None or found.template.work is None else case_of(routine)


def case_of(routine: str, torch: Callable[[Inputs], Any] | None = None, **more: Any) -> Case:
    """The case of a described function, with other fields of the case, or other options of `described`.

    A function with `out` writes to a tensor that is allocated before, and one with `enable_pdl` obeys the flag.
    """
    found = description(routine)
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
    return described(function, functools.partial(_asked, tuple(sizes(found))), None, peer, **{**own, **more})


def _asked(sizes: Sequence[str], p: Namespace) -> dict[str, Any]:
    """Sizes from flags of the same names that have a value; the data type of inputs may be the flag --input_dtype."""
    flag_of = {name: f"input_{name}" if name == "dtype" and "input_dtype" in p else name for name in sizes}
    asked = {name: value for name, flag in flag_of.items() if (value := getattr(p, flag, None)) is not None}
    return {name: dtype_of(value) if name.endswith("dtype") else value for name, value in asked.items()}


def _added(function: str, allocated: bool, pdl: bool, p: Namespace, x: Inputs) -> dict[str, Any]:
    """The arguments that a description leaves out: `out` for the first output, and `enable_pdl`."""
    import torch

    added: dict[str, Any] = {"enable_pdl": p.enable_pdl or None} if pdl else {}
    if allocated and "out" not in x:
        shape, dtype = next(iter(description_of(function, x).layouts(x).values()))
        device = next(value.device for value in x.values() if isinstance(value, torch.Tensor))
        added["out"] = torch.empty(shape, dtype=dtype_of(dtype), device=device)
    return added
