"""Functions with a signature of their own: generated, since packing and unpacking the values of a call costs 0.4 us."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any


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
