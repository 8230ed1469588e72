"""Every name that serving engines import from FlashInfer resolves, and every call of theirs binds.

The records beside this file are written by tools/engine_names.py.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fi_core.compat import alias, install, names

RECORDS = sorted(Path(__file__).parent.glob("*.txt"))
EMPTY = inspect.Parameter.empty


class Used(NamedTuple):
    """A line of a record."""

    name: str  # with `flashinfer.`
    what: str  # "import", "ask" or "call"
    where: str
    rest: tuple[str, ...]  # of an import "optional" and "lazy"


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
        if part is not parts[-1] and (module := sys.modules.get(".".join(parts[:end]))):
            found = module  # as `from` finds it, also where its package has a function of that name
    return found


def entry_of(dotted: str) -> names.Name | None:
    """The decision for a name, if fi lacks it."""
    module, _, name = dotted.partition(".")[2].rpartition(".")
    entry = names.find(module, name)
    return None if entry is None or entry.kind == "here" else entry


def probed(dotted: str) -> bool:
    """Whether a name does not exist, and says what to use."""
    entry = entry_of(dotted)
    return entry is not None and entry.kind == "absent"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_import_resolves(record: Path) -> None:
    """What engines import, but for what they ask for and do without."""
    imported = sorted({line.name for line in used(record) if line.what == "import"})
    assert len(imported) > 100
    missing = []
    for name in imported:
        try:
            resolve(name)
        except AttributeError as error:
            if not probed(name):
                missing.append(str(error))
    assert missing == []


def test_a_look_up_tells_the_truth() -> None:
    """What engines ask for exists only if it works; what a module of theirs imports at once exists."""
    lines = [line for record in RECORDS for line in used(record)]
    asked = {line.name for line in lines if line.what == "ask" or (line.what == "import" and "optional" in line.rest)}
    at_once = {line.name for line in lines if line.what == "import" and not line.rest}
    assert len(asked) > 80 and len(at_once) > 50
    known = names.read()
    entries = {name: known.get(name.partition(".")[2]) for name in asked | at_once}
    lies = [name for name in asked - at_once if (entry := entries[name]) and entry.kind == "refuses"]
    # These are asked for, so that they are absent; SGLang's module is imported where its backend was chosen.
    chosen = {"cute_dsl.blockscaled_gemm.grouped_gemm_nt_masked", "silu_and_mul_scaled_nvfp4_experts_quantize"}
    lost = [name for name in at_once if (entry := entries[name]) and entry.kind == "absent"]
    assert lies == [] and set(lost) == {f"flashinfer.{name}" for name in chosen}


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


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_call_binds(record: Path) -> None:
    calls = [line for line in used(record) if line.what == "call"]
    assert len(calls) > 250
    problems = [found for line in calls if (found := problem(line))]
    assert problems == [], "\n".join(problems)


def test_calls_of_names_that_fi_has_are_bound() -> None:
    """Stand-ins of other GPUs' names may take anything; the functions of fi have the signatures that are checked."""
    called = {line.name for record in RECORDS for line in used(record) if line.what == "call"}
    real = [name for name in called if entry_of(name) is None and not lacked(name)]
    assert len(real) > 90
    for name in real:
        kinds = [p.kind.name for p in inspect.signature(owner_of(name)[0]).parameters.values()]
        assert kinds != ["VAR_POSITIONAL", "VAR_KEYWORD"], name


def test_a_name_is_lacked_only_while_fi_lacks_it() -> None:
    """A decision that a new function makes wrong is changed with it: its lines move to [here]."""
    wrong = []
    for path, entry in names.read().items():
        module, _, name = path.rpartition(".")
        if entry.kind == "here" or module in names.read():
            continue
        try:
            found = importlib.import_module(alias.home(module) if module else "fi_core")
        except ModuleNotFoundError:
            continue
        own = {*vars(found), *getattr(found, "__all__", ())} if module else set(found.__all__)
        wrong += [path] if name in own else []
    assert wrong == []
