"""Every name that serving engines import from FlashInfer resolves, and every call of theirs binds.

The records beside this file are written by tools/engine_names.py.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fi_core.compat import alias, install, lacking

RECORDS = sorted(Path(__file__).parent.glob("*.txt"))
EMPTY = inspect.Parameter.empty


class Used(NamedTuple):
    """A line of a record."""

    name: str  # with `flashinfer.`
    what: str  # "import" or "call"
    where: str
    rest: tuple[str, ...]


def used(path: Path) -> Iterator[Used]:
    name = ""
    for line in path.read_text().splitlines()[1:]:
        if line.startswith("flashinfer"):
            name = line
        else:
            what, where, *rest = line.split()
            yield Used(name, what, where, tuple(rest))


@pytest.fixture(scope="module", autouse=True)
def flashinfer() -> Iterator[None]:
    """`import flashinfer` is fi, in this module's tests only."""
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    install()
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer" and name not in modules]:
        del sys.modules[name]


def resolve(dotted: str) -> Any:
    """The object of a dotted name, as an import statement finds it. Raises AttributeError or ImportError."""
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                raise AttributeError(f"{dotted}: no {part}") from None
    return found


def entry_of(dotted: str) -> lacking.Name | None:
    """The row of a name, if fi lacks it."""
    module, _, name = dotted.partition(".")[2].rpartition(".")
    return lacking.table().get(module or lacking.TOP, {}).get(name)


def probed(dotted: str) -> bool:
    """Whether a name is one that engines look for, and do without where it does not exist."""
    entry = entry_of(dotted)
    return entry is not None and entry.kind == "probed"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_import_resolves(record: Path) -> None:
    """What engines import, but for what they ask for and do without."""
    names = sorted({line.name for line in used(record) if line.what == "import"})
    assert len(names) > 100
    missing = []
    for name in names:
        try:
            resolve(name)
        except AttributeError as error:
            if not probed(name):
                missing.append(str(error))
    assert missing == []


def owner_of(dotted: str) -> tuple[Any, bool]:
    """What a call calls, and whether it is a method of an object."""
    found = resolve(dotted)
    owner = resolve(dotted.rpartition(".")[0])
    return found, inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, found.__name__, None))


def problem(line: Used) -> str | None:
    """Why the signature of fi refuses a call; None if it takes it."""
    try:
        function, method = owner_of(line.name)
        signature = inspect.signature(function)
    except AttributeError as error:
        return None if probed(line.name) or lacked(line.name) else str(error)
    except (TypeError, ValueError) as error:  # a call of an attribute, such as a tensor's copy_
        return f"{line.name}: {error}"
    count, words = int(line.rest[0]) + method, line.rest[1:]
    keywords = {word.removesuffix("="): None for word in words if word.endswith("=")}
    try:  # a call that passes on what it was given may give everything else
        bind = signature.bind_partial if {"*", "**"} & set(words) else signature.bind
        bind(*[None] * count, **keywords)
    except TypeError as error:
        return f"{line.where} {line.name}: {error}"
    return None


def lacked(dotted: str) -> bool:
    """Whether a name belongs to a class or function that fi lacks."""
    parts = dotted.split(".")
    return any(entry_of(".".join(parts[:end])) for end in range(2, len(parts)))


# Attributes of objects, whose methods torch brings.
OF_TORCH = re.compile(r"\.(_\w*buf\.copy_|_int_workspace_buffer\.view)$")


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_call_binds(record: Path) -> None:
    calls = [line for line in used(record) if line.what == "call" and not OF_TORCH.search(line.name)]
    assert len(calls) > 250
    problems = [found for line in calls if (found := problem(line))]
    assert problems == [], "\n".join(problems)


def test_calls_of_names_that_fi_has_are_bound() -> None:
    """Stand-ins of other GPUs' names may take anything; the functions of fi have the signatures that are checked."""
    names = {line.name for record in RECORDS for line in used(record) if line.what == "call"}
    real = [name for name in names if entry_of(name) is None and not lacked(name)]
    assert len(real) > 90
    for name in real:
        if not OF_TORCH.search(name):
            kinds = [p.kind.name for p in inspect.signature(owner_of(name)[0]).parameters.values()]
            assert kinds != ["VAR_POSITIONAL", "VAR_KEYWORD"], name


def test_a_name_stands_in_the_table_only_while_fi_lacks_it() -> None:
    """A row that a new function makes wrong is deleted with it."""
    wrong = []
    for module, names in lacking.table().items():
        place = "fi_core" if module == lacking.TOP else alias.home(module)
        try:
            found = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        own = {*vars(found), *getattr(found, "__all__", ())} if place != "fi_core" else set(found.__all__)
        wrong += [f"{module}: {name}" for name in names if name in own]
    assert wrong == []
