"""Which public names of FlashInfer fi has, and where a call of them differs: docs/flashinfer.txt against the code."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).with_name("flashinfer.txt")
SAME, DIFFERS, BLACKWELL, LATER = "same", "differs", "Blackwell only", "not yet"
_STATES = {"blackwell": BLACKWELL, "false": BLACKWELL, "later": LATER, "probed": LATER}


class Row(NamedTuple):
    """One name of FlashInfer: "norm.rmsnorm", its state here, and how it differs or what to use in its place."""

    name: str
    state: str
    how: str


def recorded() -> Iterator[tuple[str, str, str | None, str]]:
    """(module, name, parameters, note) of each name in docs/flashinfer.txt; None for the parameters of a plain name."""
    module = ""
    for line in DATA.read_text().split("\n\n", 1)[1].splitlines():
        if line.startswith(" "):
            declared, _, note = line.strip().partition(" -- ")
            name, opened, parameters = declared.partition("(")
            yield module, name, parameters.removesuffix(")") if opened else None, note
        else:
            module = line


def find(module: str, name: str) -> Any:
    """The object of fi for a name of FlashInfer."""
    from fi_core.compat.alias import home

    found: Any = importlib.import_module(home(module))
    for part in name.split("."):
        found = getattr(found, part)
    return found


_Parameter = inspect.Parameter


def _plain(default: Any) -> bool:
    """Whether a default can be compared: the recorded default of an enum or dtype is its name."""
    return default is not _Parameter.empty and not (isinstance(default, str) and "." in default)


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
            if _Parameter.VAR_KEYWORD not in takes_all:
                found.append(f"`{parameter.name}` is missing")
        elif parameter.kind is _Parameter.POSITIONAL_OR_KEYWORD and places[place : place + 1] != [parameter.name]:
            where = (
                "by keyword only" if parameter.name not in places else f"at place {places.index(parameter.name) + 1}"
            )
            found.append(f"`{parameter.name}` {where}")
        elif parameter.default is not _Parameter.empty and own.default is _Parameter.empty:
            found.append(f"`{parameter.name}` is required")
        elif _plain(parameter.default) and own.default != parameter.default and type(own.default) in _LITERALS:
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


def rows() -> list[Row]:
    """Every public name, sorted."""
    from fi_core.compat import lacking

    found = []
    for module, name, parameters, note in recorded():
        value = find(module, name)
        wrong = [] if parameters is None else differences(lacking.parameters(parameters), inspect.signature(value))
        how = "; ".join([*wrong, *([note] if note else [])])
        found.append(Row(f"{module}.{name}", DIFFERS if how else SAME, how))
    for entries in lacking.table().values():
        for entry in entries.values():
            public = not any(part.startswith("_") for part in entry.dotted.split("."))
            if public:
                name = entry.dotted.removeprefix("flashinfer.")
                found.append(Row(name, _STATES[entry.kind], entry.instead))
    return sorted(set(found), key=lambda row: row.name.lower())
