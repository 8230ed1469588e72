"""The name `torch` for modules that must not import it when they are imported: its first use imports it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any


class Lazy(ModuleType):
    """Stands for a module that is not imported yet. Its first use puts the module into all of fi_core that names it."""

    def __getattr__(self, attribute: str) -> Any:
        name = self.__name__
        module = importlib.import_module(name)
        for user in [vars(found) for key, found in list(sys.modules.items()) if key.startswith("fi_core.")]:
            if user.get(name) is self:
                user[name] = module
        return getattr(module, attribute)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = sys.modules.get("torch") or Lazy("torch")
