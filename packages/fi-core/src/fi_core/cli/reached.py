"""The ops that a public function reaches, read from its code: nothing is called."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from fi_core.registry import load

ROOT = "fi_core."
USERS = ("fi_core.attention.custom", "fi_core.jit")  # compile a user's code, which is not an op of the registry


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global, attribute and imported name of a code object, those of nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a callable: unwrapped, of a partial, or the methods of a class and its bases."""
    if isinstance(value, functools.partial):
        yield from _functions(value.func)
        yield from (f for argument in (*value.args, *value.keywords.values()) for f in _functions(argument))
    elif inspect.isclass(value):
        for base in value.__mro__:
            if base.__module__.startswith(ROOT):
                members = [m for m in vars(base).values() if inspect.isfunction(m) or isinstance(m, property)]
                yield from (f for member in members for f in _functions(member))
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if inspect.isfunction(f))
    elif inspect.isfunction(value) or hasattr(value, "__wrapped__"):
        inner = inspect.unwrap(value)
        home = getattr(inner, "__module__", None) or ""
        if inspect.isfunction(inner) and home.startswith(ROOT) and not home.startswith(USERS):
            yield inner


def _reached(function: types.FunctionType) -> Iterator[Any]:
    """The objects of fi_core that the names of a function stand for: globals, and attributes of modules of fi_core."""
    names = list(dict.fromkeys(_names(function.__code__)))
    spaces = [function.__globals__]
    modules = [function.__globals__.get(name) for name in names]
    modules += [sys.modules.get(name) for name in names]  # imported inside the function
    spaces += [vars(m) for m in modules if isinstance(m, types.ModuleType) and m.__name__.startswith(ROOT)]
    for name in names:
        for space in spaces:
            if name in space:
                yield space[name]


def ops_of(value: Any) -> list[str]:
    """The ops that a public function or class may launch, nearest first."""
    operators = {id(one): name for name, found in load().items() for one in (found, found.function, found.op)}
    found: dict[str, None] = {}
    todo, seen = [value], set()
    while todo:
        item = todo.pop(0)  # nearest first
        if id(item) in seen:
            continue
        seen.add(id(item))
        if id(item) in operators:
            found[operators[id(item)]] = None
            continue
        for function in _functions(item):
            todo += [other for other in _reached(function) if callable(other) or id(other) in operators]
    return list(found)
