"""fi: kernels for LLM serving. Names are loaded on first use; importing this package loads nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = (Path(__file__).parent / "VERSION").read_text().strip()
__git_commit__ = __git_version__ = "unknown"  # FlashInfer's names; builds are identified by content, not by commit

# Where each public name lives.
_MODULES: dict[str, tuple[str, ...]] = {
    "norm": ("rmsnorm",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__git_commit__", "__git_version__", "__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import torch  # noqa: F401  (ops register with it as their family loads)

        value = getattr(importlib.import_module(f"fi_core.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    try:
        return importlib.import_module(f"fi_core.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"fi_core.{name}":
            raise
        raise AttributeError(f"module 'fi_core' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
