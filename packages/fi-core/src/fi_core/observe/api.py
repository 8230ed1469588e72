"""The functions and classes that `fi_api` marks, by name: all that a replay of dumps may call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

functions: dict[str, Callable[..., Any]] = {}  # "module:qualname" -> the function without its log
classes: dict[str, type] = {}


def name_of(marked: Any) -> str:
    """The name of a function or class in this registry."""
    return f"{marked.__module__}:{marked.__qualname__}"


def register(marked: Any) -> None:
    """Add what `fi_api` decorates. A name that is defined again replaces the older object."""
    known: dict[str, Any] = classes if isinstance(marked, type) else functions
    known[name_of(marked)] = marked


def api_function(name: str) -> Callable[..., Any]:
    """The function or method of a name, which imports nothing. Raises LookupError if `fi_api` marks none of it."""
    return _find(functions, name, "function")  # type: ignore[no-any-return]


def api_class(name: str) -> type:
    """The class of a name, which imports nothing. Raises LookupError if `fi_api` marks none of it."""
    return _find(classes, name, "class")  # type: ignore[no-any-return]


def class_of(value: object) -> type:
    """The nearest class of an object that `fi_api` marks; its own class if it has none."""
    return next((cls for cls in type(value).__mro__ if classes.get(name_of(cls)) is cls), type(value))


def _find(known: dict[str, Any], name: str, kind: str) -> Any:
    if name not in known:
        for family in sys.modules["fi_core"]._MODULES:  # the public modules, by fi_core's own list
            importlib.import_module(f"fi_core.{family}")
    if name not in known:
        raise LookupError(
            f"{name!r} is not a {kind} of the API; only functions and classes that fi_api marks are replayed"
        )
    return known[name]
