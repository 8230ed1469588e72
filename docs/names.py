"""Which public names of FlashInfer fi has, and where a call differs: fi_core/compat/names.txt against the code."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, NamedTuple

SAME, DIFFERS = "same", "differs"
_STATES = {
    "blackwell": "Blackwell only", "fabric": "NVLink multicast", "later": "not yet", "form": "in another form",
    "inside": "a part of FlashInfer",
}  # fmt: skip


class Row(NamedTuple):
    """One name of FlashInfer: "norm.rmsnorm", its state here, and how it differs or what to use in its place."""

    name: str
    state: str
    how: str


_Parameter = inspect.Parameter


def _plain(default: Any, own: Any) -> bool:
    """Whether a default can be compared: that of an enum, dtype or constant is recorded by name, others are code."""
    if default is _Parameter.empty or not isinstance(default, str):
        return default is not _Parameter.empty
    constant = default.isupper() and "_" in default and not isinstance(own, str)
    return not (constant or default.startswith("_") or "." in default or " " in default)


def differences(theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    """What a call that FlashInfer accepts meets here."""
    mine = dict(ours.parameters)
    mine.pop("self", None)
    places = [p.name for p in mine.values() if p.kind in (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)]
    takes_all = {p.kind for p in mine.values()}
    found = []
    wanted = [p for p in theirs.parameters.values() if p.name != "self"]
    for place, parameter in enumerate(wanted):
        if parameter.kind in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD):
            continue
        own = mine.get(parameter.name)
        if own is None:
            hidden = _Parameter.VAR_KEYWORD in takes_all
            found.append(f"`{parameter.name}` is {'hidden in ** of the function' if hidden else 'missing'}")
        elif parameter.kind is _Parameter.POSITIONAL_OR_KEYWORD and places[place : place + 1] != [parameter.name]:
            where = (
                "by keyword only" if parameter.name not in places else f"at place {places.index(parameter.name) + 1}"
            )
            found.append(f"`{parameter.name}` {where}")
        elif parameter.default is not _Parameter.empty and own.default is _Parameter.empty:
            found.append(f"`{parameter.name}` is required")
        elif (
            _plain(parameter.default, own.default)
            and own.default != parameter.default
            and type(own.default) in _LITERALS
        ):
            found.append(f"`{parameter.name}` defaults to `{own.default!r}`")
    names = {parameter.name for parameter in wanted}
    found += [
        f"`{p.name}` is required"
        for p in mine.values()
        if p.name not in names and p.default is _Parameter.empty and p.kind is not _Parameter.VAR_POSITIONAL
        if p.kind is not _Parameter.VAR_KEYWORD
    ]
    return found


_LITERALS = (str, int, float, bool, type(None), tuple)


def _resolved(path: str) -> Any:
    """The object of a name, without torch, which the package itself imports for its own names."""
    from fi_core.compat import lacking

    first, *rest = path.split(".")
    home = vars(importlib.import_module("fi_core"))["_HOME"].get(first)
    return functools.reduce(getattr, (first, *rest), importlib.import_module(home)) if home else lacking.resolve(path)


def _passed_on(path: str) -> list[inspect.Parameter]:
    """The parameters of which a function takes those behind its own as `*args, **options`; [] if it passes none on."""
    from fi_core.jit import ops

    owner, _, name = path.rpartition(".")
    word = name.removeprefix("gen_").removesuffix("_module")
    if owner == "jit" and word in ops._OPTIONS:
        option, (default, *_) = ops._OPTIONS[word]
        return [_Parameter(option, _Parameter.POSITIONAL_OR_KEYWORD, default=default)]
    others = {
        "forward_return_lse": f"{owner}.forward",
        "get_customize_batch_prefill_module": "jit.gen_customize_batch_prefill_module",
        "run": "BatchPrefillWithPagedKVCacheWrapper.run",
    }  # fmt: skip
    if name not in others:
        return []
    return [*inspect.signature(_resolved(others[name])).parameters.values()]


def signature_of(path: str, value: Any) -> inspect.Signature:
    """The signature, with the parameters that `*args, **options` stand for."""
    found = inspect.signature(value)
    variable = _Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD
    if all(p.kind is not _Parameter.VAR_KEYWORD for p in found.parameters.values()):
        return found
    behind = [p for p in _passed_on(path) if p.kind not in variable and p.name not in found.parameters]
    if not behind:
        return found
    own = [p for p in found.parameters.values() if p.kind not in variable]
    order = sorted([*own, *behind], key=lambda p: p.kind)
    required = [p.replace(default=None) if p in behind and p.default is p.empty else p for p in order]
    return found.replace(parameters=required)


def compared() -> dict[str, list[str]]:
    """What differs, by the path of each name that fi has: its parameters, or that a member of a class is missing."""
    from fi_core.compat import lacking, names

    found = {}
    for path, entry in names.read().items():
        if entry.kind == "here" and not entry.same:
            try:
                value = _resolved(path)
                theirs = None if entry.parameters is None else lacking.parameters(entry.parameters)
                found[path] = [] if theirs is None else differences(theirs, signature_of(path, value))
            except AttributeError:
                found[path] = [f"`{entry.name}` is missing"]
    return found


def rows() -> list[Row]:
    """Every public name, sorted; one that only stands in another module too is left out."""
    from fi_core.compat import names

    found, wrong = [], compared()
    for path, entry in names.read().items():
        public = not any(part.startswith("_") for part in path.split("."))
        if entry.kind == "here" and not entry.same:
            how = "; ".join([*wrong[path], *([entry.note] if entry.note else [])])
            found.append(Row(path, DIFFERS if how else SAME, how))
        elif entry.kind == "here" and public and entry.name != entry.same.rpartition(".")[2]:
            found.append(Row(path, SAME, f"another name of `{entry.same}`"))
        elif entry.kind != "here" and not entry.same and public and entry.name != names.WHOLE:
            found.append(Row(path, _STATES[entry.why], entry.advice))
    return sorted(found, key=lambda row: row.name.lower())
