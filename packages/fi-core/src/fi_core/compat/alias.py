"""FlashInfer's import name for fi: `import flashinfer` in this process, or in a command and all that it starts.

The folder `site` holds a package `flashinfer` and the records of its distributions. Whoever has that folder on the
search path gets fi under FlashInfer's name: `fi-core exec` puts it on PYTHONPATH, `fi_core.compat.install` on
`sys.path`. The package forwards each of its submodules to the module of fi that has its names, the same object under
both names; what fi lacks answers with the reason (`compat.lacking`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fi_core.compat import lacking

VERSION = "0.7.2.post1"  # of FlashInfer, whose API this is
NAME = "flashinfer"
SITE = Path(__file__).parent / "site"

# Modules of FlashInfer that have another name here.
RENAMED = {
    "autotuner.autotuner": "compat.autotuner",
    "fi_trace": "observe.trace",
    "trace": "observe.trace",
}


def install_here() -> None:
    """`fi_core.compat.install`."""
    known = sys.modules.get(NAME)
    if known is not None and not isinstance(known, _Forwarding):
        raise RuntimeError(f"flashinfer: {known.__file__} is imported already; call install() before the first import")
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
        importlib.invalidate_caches()


def home(name: str) -> str:
    """The module of fi for a module of FlashInfer, whose name is given without `flashinfer.`."""
    return f"fi_core.{RENAMED.get(name, name)}"


def forward(name: str) -> None:
    """Turns the package `flashinfer`, while it is imported, into one that forwards to fi_core."""
    sys.modules[name].__class__ = _Forwarding
    sys.meta_path.insert(0, _Finder())


class _Forwarding(ModuleType):
    """The package `flashinfer`: attributes are those of fi_core, also when they are set, as patches do."""

    def __getattr__(self, name: str) -> Any:
        core = importlib.import_module("fi_core")
        if name in core._HOME or not isinstance(vars(core).get(name, core), ModuleType):
            return getattr(core, name)
        if name.startswith("__"):
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}", name=name)
        if importlib.util.find_spec(f"{NAME}.{name}") is not None:
            return importlib.import_module(f"{NAME}.{name}")
        found = lacking.find(lacking.TOP, name)
        return getattr(core, name) if found is None else found

    def __setattr__(self, name: str, value: Any) -> None:
        core = importlib.import_module("fi_core")
        if isinstance(value, ModuleType) and name in core._HOME:
            return  # an import of flashinfer.fi_trace leaves the function of that name
        own = name.startswith("__") or isinstance(value, ModuleType)
        ModuleType.__setattr__(self if own else core, name, value)

    def __delattr__(self, name: str) -> None:
        ModuleType.__delattr__(self if name in vars(self) else importlib.import_module("fi_core"), name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(importlib.import_module("fi_core"))})


class _Finder(MetaPathFinder):
    """Finds `flashinfer.<module>`: a module of fi, or one that only lists what fi lacks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, name = fullname.partition(".")
        if top != NAME or not name:
            return None
        try:
            found = importlib.util.find_spec(home(name))
        except ModuleNotFoundError:  # its parent is no package of fi
            found = None
        if found is None and not lacking.has_module(name):
            return None
        inner = [other for other in (*RENAMED, *lacking.table()) if other.startswith(f"{name}.")]
        package = bool(inner) or (found is not None and found.submodule_search_locations is not None)
        origin = found.origin if found is not None else None
        return ModuleSpec(fullname, _Loader(name, found is not None), origin=origin, is_package=package)


class _Loader(Loader):
    """Gives the module of fi itself."""

    def __init__(self, name: str, ours: bool) -> None:
        self.name, self.ours = name, ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if not self.ours:
            return None
        module = importlib.import_module(home(self.name))
        self.spec = module.__spec__  # importlib sets the one under FlashInfer's name
        return module

    def get_code(self, fullname: str) -> Any:
        """For `python -m flashinfer.<module>`."""
        spec = importlib.util.find_spec(home(self.name)) if self.ours else None
        return spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None

    def exec_module(self, module: ModuleType) -> None:
        if self.ours:
            module.__spec__ = self.spec
        for name in lacking.table():
            known = module if name == self.name else sys.modules.get(home(name))
            if known is not None and f"{name}.".startswith(f"{self.name}."):  # also modules that fi imported itself
                lacking.answer(known, name)
