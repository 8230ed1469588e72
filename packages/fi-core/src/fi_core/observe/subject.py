"""The tensor that an error is about, by the name that each caller has for it.

A function notes where the tensors lie that its error may name. Its caller, to which the same memory is known by another
name, puts that name into the error: `k` of an operator is `paged_kv_cache[0]` of `run`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fi_core.runtime.errors import blame
from fi_core.runtime.tensors import PLACES, Place, note, places

_OF_TORCH = (AttributeError, IndexError, RuntimeError)  # errors that name no argument


def leaves(name: str, value: Any, levels: int = 3) -> Iterable[tuple[str, Any]]:
    """The members of an argument, those of a tuple or list in it as "name[0]"."""
    if levels and isinstance(value, (tuple, list)):
        for i, member in enumerate(value):
            yield from leaves(f"{name}[{i}]", member, levels - 1)
    else:
        yield name, value


def _name_of(word: str, noted: Mapping[str, Place], given: Mapping[str, Any], taken: Collection[str]) -> str:
    """The argument that is this object, or begins there; else the only one that has the address in its memory, or the
    same integers, as a copy of another width has; else the word. noted: by words; taken: names of others.
    """
    place = noted[word]
    found = {name: own for name, own in places(given.items()).items() if name not in taken}

    def holds(name: str) -> bool:
        memory = given[name].untyped_storage()
        return bool(0 <= place[1] - memory.data_ptr() < memory.nbytes())

    for same in (
        [name for name, own in found.items() if own[0] == place[0]],
        [name for name, own in found.items() if own[1] == place[1] != 0],
    ):
        if same:  # several where a tensor was given twice: in their order
            twins = [other for other, own in noted.items() if own == place]
            return word if word in same else same[min(twins.index(word), len(same) - 1)]
    for same in (
        [name for name, own in found.items() if own[1] and place[1] and holds(name)],
        [name for name, own in found.items() if own[2] == place[2] != 0],
    ):
        if len(same) == 1:
            return same[0]
    return word


def rename(error: Exception, arguments: Iterable[tuple[str, Any]]) -> None:
    """Puts the caller's names for the tensors that an error is about into its text. arguments: those of the caller."""
    noted: dict[str, Place] = vars(error).get(PLACES, {})
    if error.args != (str(error),):
        return
    text, named = str(error), dict[str, str]()
    given = dict(arguments)
    given |= dict(leaf for name, value in given.items() for leaf in leaves(name, value))
    for word in noted:
        about = re.compile(rf"(^(?:\w+: )*|^.{{,80}} and |(?:dtype|device|shape) of ){re.escape(word)}(?!\w)")
        if about.search(str(error)):
            named[word] = _name_of(word, noted, given, named.values())
            text = about.sub(lambda found, name=named[word]: found[1] + name, text)  # type: ignore[misc]
    error.args = (text,)
    note(error, given.items())


def blamed(error: Exception, name: str, value: Any) -> Exception:
    """The error about an argument, or the one that names its member that is no dense tensor; a caller may rename it."""
    given = dict(leaves(name, value))
    try:
        if isinstance(error, _OF_TORCH):
            blame(error, **given)
    except Exception as found:
        error = found
    return note(error, {name: value, **given}.items())


def explain(error: Exception, check: Callable[[], None], others: Mapping[str, Any], **given: Any) -> None:
    """Raises the error that names the argument of a refused run that differs from its plan, which `check` looks for.

    given: the arguments that must be tensors; others: further ones. An error has their names, not those of the op.
    """
    arguments = {**given, **others}
    rename(error, arguments.items())
    try:
        check()
    except _OF_TORCH as found:
        if isinstance(error, _OF_TORCH):
            blame(found, **given)
    except Exception as found:
        rename(found, arguments.items())
        raise
