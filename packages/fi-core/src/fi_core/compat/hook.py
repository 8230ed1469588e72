"""Lets every module below fi_core answer for the names of FlashInfer that it lacks, once a look-up fails in it.

It is part of `import fi_core`, which must stay fast: the answers (`compat.lacking`) load with the first failed look-up.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder

from fi_core.compat.renamed import RENAMED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

TOP = "fi_core."
_INSIDE = ("runtime", "compat", "cli")  # of fi alone


class Finder:
    """Finds modules of fi as Python does, and those that FlashInfer has and fi has not."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(TOP):
            return None
        name = fullname[len(TOP) :]
        if name in RENAMED and name != "fi_trace":  # which is a function here
            return ModuleSpec(fullname, Same(f"{TOP}{RENAMED[name]}"))  # type: ignore[arg-type]
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return lacking_spec(name, fullname)
        if spec.loader is not None and (name.split(".")[0] not in _INSIDE or name in RENAMED.values()):
            spec.loader = Answering(spec.loader)  # type: ignore[assignment]
        return spec


class Answering:
    """Loads a module, and gives it the answers."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        answering(module)


class Same:
    """Gives a module that has another name too; its spec stays the first one's."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.home)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class Empty:
    """Makes a module that holds only names which stand for FlashInfer's."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        answering(module)


def lacking_spec(name: str, fullname: str) -> ModuleSpec | None:
    """The spec of a module that fi lacks, if it holds names that exist; None for others.

    Raises:
        ModuleNotFoundError: in an import statement, with what to use.
    """
    from fi_core.compat import lacking

    if not lacking.has_module(name, fullname):
        return None
    return ModuleSpec(fullname, Empty(), is_package=True)  # type: ignore[arg-type]


def answering(module: ModuleType) -> None:
    """Gives a module the answers for the modules of FlashInfer that it stands for."""
    name = module.__name__.partition(".")[2]
    places = (name, *(theirs for theirs, ours in RENAMED.items() if ours == name))
    own = vars(module).get("__getattr__")

    def __getattr__(wanted: str) -> Any:
        try:
            if own is not None:
                return own(wanted)
            raise AttributeError(f"module {module.__name__!r} has no attribute {wanted!r}", name=wanted, obj=module)
        except AttributeError:
            if wanted == "__path__" and _is_package(places):  # asked for by an import of a module below
                return []
            if wanted.startswith("__"):
                raise
            for place in places:
                if home := RENAMED.get(f"{place}.{wanted}"):
                    return importlib.import_module(f"{TOP}{home}")
            from fi_core.compat import lacking, names

            for place in places:
                if f"{place}.{wanted}" in names.answering_modules():
                    return importlib.import_module(f"{TOP}{place}.{wanted}")
            listed = [place for place in places if f"{place}.{wanted}" in names.read()]
            for place in listed or places:
                if (value := lacking.find(place, wanted)) is not None:
                    return value
            raise

    vars(module)["__getattr__"] = __getattr__


def _is_package(places: Sequence[str]) -> bool:
    from fi_core.compat import names

    return not names.packages().isdisjoint(places)


def install() -> None:
    """Puts the finder before Python's; part of `import fi_core`."""
    sys.meta_path.insert(0, Finder())
