"""FlashInfer's import name for fi: `import flashinfer` in this process, or in a command and all that it starts.

The folder `site` holds a package `flashinfer` and the records of its distributions. Whoever has that folder on the
search path gets fi under FlashInfer's name: `fi-core exec` puts it on PYTHONPATH, `fi_core.compat.install` on
`sys.path`. The package forwards each of its submodules to the module of fi that has its names, the same object under
both names, so that what fi lacks answers in the same way under both (`compat.lacking`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fi_core.compat import names
from fi_core.compat.hook import Same, lacking_spec
from fi_core.compat.renamed import RENAMED

VERSION = "0.7.2.post1"  # of FlashInfer, whose API this is
NAME = "flashinfer"
SITE = Path(__file__).parent / "site"


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
        return getattr(core, name)

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
    """Finds `flashinfer.<module>`: the module of fi."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, name = fullname.partition(".")
        if top != NAME or not name:
            return None
        place = home(name)
        try:
            found = importlib.util.find_spec(place)
        except ModuleNotFoundError:  # its parent is no package of fi
            found = None
        if found is None:
            return lacking_spec(name, fullname)
        package = found.submodule_search_locations is not None or name in names.packages()
        return ModuleSpec(fullname, _Loader(place), origin=found.origin, is_package=package)


class _Loader(Same, Loader):
    """Gives the module of fi itself, and the modules below it that it has imported."""

    def exec_module(self, module: ModuleType) -> None:
        # Python stores a module that it imports in its package, in place of a function of the same name. So it must not
        # import under a second name what the package has imported.
        assert module.__spec__ is not None
        name = module.__spec__.name
        super().exec_module(module)
        for path, below in list(sys.modules.items()):
            package, _, last = path.rpartition(".")
            if package == self.home:
                sys.modules.setdefault(f"{name}.{last}", below)

    def get_code(self, fullname: str) -> Any:
        """For `python -m flashinfer.<module>`."""
        spec = importlib.util.find_spec(self.home)
        loader: Any = spec.loader if spec else None
        return loader.get_code(self.home) if hasattr(loader, "get_code") else None
