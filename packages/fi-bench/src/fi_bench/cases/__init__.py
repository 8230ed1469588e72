"""One module per routine family; each has `CASES`. Importing them does not import torch."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

from fi_bench import derived
from fi_bench.case import Case
from fi_bench.catalog import FAMILY_OF


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    found = pkgutil.iter_modules(__path__, f"{__name__}.")
    modules = (importlib.import_module(info.name) for info in found)
    return tuple(module for module in modules if hasattr(module, "CASES"))


def every() -> list[Case]:
    """The cases of all routines of the catalog."""
    return [found for routine in FAMILY_OF if (found := find(routine)) is not None]


def find(routine: str) -> Case | None:
    """The case of a routine: of a module in `cases/`, else of its description; None if it has neither."""
    own = (found for module in _modules() for found in module.CASES if found.routine == routine)
    return next(own, None) or derived.case(routine)
