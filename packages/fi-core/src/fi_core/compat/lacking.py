"""What stands for a name of FlashInfer that a module of fi lacks: the decisions of `compat.names`.

A second name of what fi has is that object. A name that an engine imports without asking exists, binds its arguments as
FlashInfer's does, and refuses to run. Any other does not exist: `hasattr` is False and a guarded import falls back, and
the error of a plain use says what to use.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import inspect
import sys
from types import FrameType
from typing import Any

from fi_core.compat import names
from fi_core.compat.renamed import RENAMED
from fi_core.runtime.errors import BackendSupportedError


def resolve(path: str) -> Any:
    """The object of a path of FlashInfer, as `norm.rmsnorm`, from the longest module in it."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(f"fi_core.{RENAMED.get(name, name)}")
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    return functools.reduce(getattr, parts, sys.modules["fi_core"])


def find(module: str, name: str) -> Any:
    """What stands for a name of a module of FlashInfer that a module of fi lacks; None if FlashInfer has no such name.

    Raises:
        AttributeError: The name does not exist here. An ImportError in an import statement.
    """
    entry = names.find(module, name)
    if entry is None or entry.kind == "undecided" or (entry.kind == "here" and not entry.same):
        return None
    if entry.kind == "here":
        return resolve(entry.same)
    if entry.kind in ("refuses", "false"):
        return stand_in(entry)
    # NOTE: `from m import n` drops the message of an AttributeError for one of its own, and keeps an ImportError.
    caller = _caller()
    if caller and caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]:
        raise ImportError(entry.reason, name=module)
    raise AttributeError(entry.reason, name=name, obj=None)


def has_module(place: str, fullname: str) -> bool:
    """Whether a module that fi lacks holds names that exist.

    Raises:
        ModuleNotFoundError: in an import statement, with what to use.
    """
    if place in names.answering_modules():
        return True
    caller = _caller()
    if caller and caller.f_code.co_name == "_find_and_load_unlocked":
        around, _, name = place.rpartition(".")
        entry = names.find(around, name)
        if entry is not None and entry.kind != "here":
            raise ModuleNotFoundError(entry.reason, name=fullname)
    return False


def _caller() -> FrameType | None:
    """The first frame above that is neither fi's nor the import system's search."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (
        frame.f_globals.get("__name__", "").split(".")[0] == "fi_core" or frame.f_code.co_name == "_find_spec"
    ):
        frame = frame.f_back
    return frame


@functools.cache
def stand_in(entry: names.Name) -> Any:
    """A function, a class or a constant that refuses to work; a query that answers."""
    if entry.name[:1].isupper() and not entry.name.isupper():
        members = {"__init__": _refusal(entry, method=True), "__module__": "flashinfer", "__doc__": entry.reason}
        return _Class(entry.name, (), members | {"_entry": entry})
    return _Constant(entry) if entry.parameters is None else _refusal(entry)


def _refusal(entry: names.Name, *, method: bool = False) -> Any:
    signature = parameters("..." if entry.parameters is None else entry.parameters, method)

    def refuse(*args: Any, **kwargs: Any) -> bool:
        signature.bind(*args, **kwargs)
        if entry.kind == "false":
            return False
        raise BackendSupportedError(entry.reason)

    refuse.__name__ = refuse.__qualname__ = entry.name
    refuse.__doc__ = entry.reason
    refuse.__signature__ = signature  # type: ignore[attr-defined]
    # The queries of backend_requirement, and of functools.cache, which engines call on functions of FlashInfer.
    for query in ("is_backend_supported", "is_compute_capability_supported", "has_backend", "has_backend_choices"):
        setattr(refuse, query, lambda *_, **__: False)
    refuse.cache_clear = lambda: None  # type: ignore[attr-defined]
    return refuse


class _Class(type):
    """The class of classes that fi lacks: their methods refuse too."""

    _entry: names.Name

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refusal(cls._entry._replace(path=f"{cls._entry.path}.{name}", parameters=None))


class _Constant:
    """A value that fi lacks. It can be stored and compared, but has no content."""

    def __init__(self, entry: names.Name) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BackendSupportedError(self._entry.reason)

    def __repr__(self) -> str:
        return f"<{self._entry.reason}>"


def parameters(text: str, method: bool = False) -> inspect.Signature:
    """The signature that a text such as `a, b=None, *, c=1, **options` declares; `...` takes anything."""
    declared = "*args, **kwargs" if text == "..." else text
    tree = ast.parse(f"def f({'self, ' if method else ''}{declared}): ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    given, kinds = tree.args, inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    found: list[tuple[ast.arg, ast.expr | None, Any]]
    found = [(a, d, kinds.POSITIONAL_OR_KEYWORD) for a, d in zip(plain, defaults)]
    found += [(given.vararg, None, kinds.VAR_POSITIONAL)] if given.vararg else []
    found += [(a, d, kinds.KEYWORD_ONLY) for a, d in zip(given.kwonlyargs, given.kw_defaults)]
    found += [(given.kwarg, None, kinds.VAR_KEYWORD)] if given.kwarg else []
    return inspect.Signature(
        [kinds(a.arg, kind, default=ast.literal_eval(d) if d is not None else kinds.empty) for a, d, kind in found]
    )
