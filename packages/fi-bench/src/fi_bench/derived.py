"""Cases of fi_core's functions without a module in `cases/`: flags, inputs, work and reference of the description."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from fi_bench import flags

if TYPE_CHECKING:
    from fi_bench.case import Case
    from fi_bench.catalog import Family


@functools.cache
def _described(routine: str) -> Any:
    """(function, description) of a function of fi_core, or None."""
    from fi_core.observe.trace import described_function
    from fi_core.registry import load

    load()
    return described_function(routine)


def _sizes(routine: str) -> dict[str, Any]:
    """The sizes that the description makes inputs from, with their usual values."""
    parameters = inspect.signature(_described(routine)[1].make).parameters.values()
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
    own = tuple(_flag(name, usual) for name, usual in _sizes(routine).items())
    return Family(found[0].__module__.removeprefix("fi_core."), own, (routine,))


def case(routine: str) -> Case | None:
    """The case of a described function; None if it has no description."""
    from fi_bench.described import described

    pair = _described(routine)
    if pair is None or pair[1].work is None:
        return None
    module = pair[0].__module__.removeprefix("fi_core.")
    return described(
        f"{module}.{routine}",
        lambda p: {name: getattr(p, name) for name in _sizes(routine)},
        lambda function, x: function(**x),
        None,
        op=pair[1].ops[0],
        also=pair[1].ops[1:],
    )
