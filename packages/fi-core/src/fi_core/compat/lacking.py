"""What FlashInfer has and fi has not: each name of `lacking.txt` answers a call, or a look-up, with the reason.

Engines import names of kernels that they will not run on the GPU at hand. Such a name exists, binds its arguments as
FlashInfer's does, and refuses to run. Only modules under FlashInfer's import name (`compat.alias`) have these names.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fi_core.runtime.errors import BackendSupportedError

TABLE = Path(__file__).with_name("lacking.txt")
TOP = "."  # the package itself
_ABSENT = "is not in fi: its kernels are for Blackwell (sm_100 and later)"
_STATES = {"blackwell": _ABSENT, "later": "is not in fi yet", "probed": "is not in fi yet", "false": "is not in fi"}


class Name(NamedTuple):
    """One name of FlashInfer that fi lacks."""

    module: str
    name: str
    kind: str  # "blackwell", "later", "probed" or "false"
    instead: str
    parameters: str | None  # None: it is no function or class

    @property
    def dotted(self) -> str:
        return f"flashinfer.{self.name}" if self.module == TOP else f"flashinfer.{self.module}.{self.name}"

    @property
    def reason(self) -> str:
        return f"{self.dotted} {_STATES[self.kind]}; {self.instead}"


@functools.cache
def table() -> dict[str, dict[str, Name]]:
    """All names by module; a module that others are below has an entry too."""
    found: dict[str, dict[str, Name]] = {TOP: {}}
    kind = instead = module = ""
    section: dict[str, dict[str, Name]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\[(\w+)\] (.+)", line)
        if header:
            kind, instead, section = header[1], header[2], {}
        elif not kind or not line:
            continue
        elif line.startswith(" "):
            name, opened, parameters = line.strip().partition("(")
            top = found[TOP].get(name)
            given = parameters.removesuffix(")") if opened else top.parameters if top else None
            section[module][name] = found[module][name] = Name(module, name, kind, instead, given)
        else:
            module, _, like = line.partition(" = ")
            found.setdefault(module, {})
            here = section.setdefault(module, {})
            here.update((name, entry._replace(module=module)) for name, entry in section.get(like, {}).items())
            found[module].update(here)
    for module in list(found):
        while "." in module.strip("."):
            module = module.rpartition(".")[0]
            found.setdefault(module, {})
    return found


def has_module(module: str) -> bool:
    """Whether FlashInfer's module of this name (without `flashinfer.`), or one below it, has names that fi lacks."""
    return module in table()


def find(module: str, name: str) -> Any:
    """What stands for a name of FlashInfer that fi lacks; None if it is none of them.

    Raises:
        AttributeError: Engines do without the name where it does not exist.
    """
    entry = table().get(module, {}).get(name)
    if entry is None:
        return None
    if entry.kind == "probed":
        raise AttributeError(entry.reason, name=name, obj=None)
    return stand_in(entry)


def answer(module: ModuleType, name: str) -> None:
    """Lets a module answer for the names that it lacks; its own names win."""
    own = vars(module).get("__getattr__")
    if getattr(own, "answers", None) == name:
        return

    def __getattr__(wanted: str) -> Any:
        try:
            if own is not None:
                return own(wanted)
        except AttributeError:
            if wanted not in table()[name]:
                raise
        found = find(name, wanted)
        if found is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {wanted!r}", name=wanted)
        return found

    __getattr__.answers = name  # type: ignore[attr-defined]
    vars(module)["__getattr__"] = __getattr__


@functools.cache
def stand_in(entry: Name) -> Any:
    """A function, a class or a constant that refuses to work; a query that answers."""
    if entry.parameters is None:
        return _Constant(entry)
    if entry.name[:1].isupper():
        members = {"__init__": _refusal(entry, method=True), "__module__": "flashinfer", "__doc__": entry.reason}
        return _Class(entry.name, (), members | {"_entry": entry})
    return _refusal(entry)


def _refusal(entry: Name, *, method: bool = False) -> Any:
    signature = parameters(entry.parameters or "...", method)

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

    _entry: Name

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refusal(cls._entry._replace(name=f"{cls._entry.name}.{name}", parameters="..."))


class _Constant:
    """A value that fi lacks. It can be stored and compared, but has no content."""

    def __init__(self, entry: Name) -> None:
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
