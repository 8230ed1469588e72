"""Functions with a signature of their own: generated, since packing and unpacking the values of a call costs 0.4 us."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any, TypeVar

F = TypeVar("F")


def define(name: str, parameters: Sequence[str], body: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function `def name(parameters): body`, which is added to the scope that its names are looked up in."""
    text = f"def {name}({', '.join(parameters)}):\n{textwrap.indent(body, '    ')}"
    exec(compile(text, f"<generated {name}>", "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


def redefine(function: Any, parameters: Sequence[Parameter], body: str, scope: dict[str, Any]) -> Any:
    """A function with these parameters and the defaults of another one."""
    taken = [p.name if p.default is p.empty else f"{p.name}=None" for p in parameters]  # true defaults: below
    at = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    made: Any = define(function.__name__, [*taken[:at], *(["*"] if taken[at:] else []), *taken[at:]], body, scope)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def passed(parameters: Sequence[Parameter]) -> str:
    """The parameters of a function as arguments of a call."""
    return ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)


def parameters(names: Iterable[str], *declared: Callable[..., Any], **defaults: Any) -> list[Parameter]:
    """Parameters by their names, each as the first of these functions that has it declares it.

    Those behind "*" go by keyword, all others may go by position. defaults: in place of those that are declared.
    """
    known = {p.name: p for function in reversed(declared) for p in inspect.signature(function).parameters.values()}
    for name, value in defaults.items():
        kinds = known[name].annotation if value is not None else f"{known[name].annotation} | None"
        known[name] = known[name].replace(default=value, annotation=kinds)
    names = [*names]
    at = names.index("*") if "*" in names else len(names)
    by_position = [known[name].replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for name in names[:at]]
    return [*by_position, *(known[name].replace(kind=Parameter.KEYWORD_ONLY) for name in names[at + 1 :])]


derived: dict[str, Callable[..., Any]] = {}  # what `takes` makes, by names, for tools/stubs.py


def takes(
    like: F, names: Iterable[str], *declared: Callable[..., Any], **defaults: Any
) -> Callable[[Callable[..., Any]], F]:
    """Decorates a function of a dictionary: it becomes one of `parameters`, which other functions declare, or itself.

    like: its name in `derived`, and to a checker its type. names: new=old is a parameter that is called old where it is
    declared, and in the dictionary if it is the first of this name. A method has `self` as the first. What the function
    itself declares it is given beside the dictionary.
    """
    pairs = [(new, old or new) for new, _, old in (name.partition("=") for name in names)]
    keys = {old: new for new, old in reversed(pairs)}  # the first

    def decorate(function: Callable[..., Any]) -> F:
        found = iter(parameters([old for _, old in pairs], function, *declared, **defaults))
        shown = [next(found).replace(name=new) for new, _ in pairs if new != "*"]
        start, scope = int(shown[0].name == "self"), {**function.__globals__, "function": function}
        own = [p.name for p in [*inspect.signature(function).parameters.values()][start + 1 :]]
        given = [f"{old if keys[old] == new else new!r}: {new}" for new, old in pairs[start:] if new not in (*own, "*")]
        values = [*["self"] * start, f"{{{', '.join(given)}}}", *(f"{name}={name}" for name in own)]
        made = redefine(function, shown, f"return function({', '.join(values)})", scope)
        usual = [p for p in shown if p.default is not p.empty]
        made.__defaults__ = tuple(p.default for p in usual if p.kind is not p.KEYWORD_ONLY)
        made.__kwdefaults__ = {p.name: p.default for p in usual if p.kind is p.KEYWORD_ONLY}
        functools.update_wrapper(made, function)
        del made.__wrapped__  # whose parameters are others
        made.__signature__ = inspect.Signature(shown, return_annotation=inspect.signature(function).return_annotation)
        derived[str(like)] = made
        return made  # type: ignore[no-any-return]

    return decorate
