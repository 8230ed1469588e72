"""The arguments of an op, parsed from its declaration: name, kind, default, and what is written to which memory."""

from __future__ import annotations

import functools
import numbers
import re
from typing import NamedTuple


class Required:
    """The default of an argument that a caller must pass."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = Required()


class Argument(NamedTuple):
    """`kind` is torch's word: Tensor, Tensor?, int, int?, float, bool, bool? or str. `written`: the op writes it.

    memory: letters; a written tensor may have the elements of another one of the same letter, at the same places.
    """

    name: str
    kind: str
    written: bool
    default: object
    memory: str = ""

    @property
    def is_tensor(self) -> bool:
        return self.kind.startswith("Tensor")

    def may_be(self, other: Argument) -> bool:
        """Whether one of the two may be the other, although the op writes it."""
        return self is not other and not set(self.memory).isdisjoint(other.memory)

    def wanted(self, value: object) -> str:
        """What a number, flag or word must be, if the value is none; else empty."""
        kind, words = _VALUES.get(self.kind.removesuffix("?"), (object, ""))
        return "" if isinstance(value, kind) or (value is None and self.kind.endswith("?")) else words

    @property
    def reader(self) -> str:
        """The C++ type whose `Argument` reads it from a call."""
        return _READERS[self.kind] if self.written or self.kind == "float" else CPP_TYPES[self.kind]


# In C++, None of a number or a flag is -1: "the default".
CPP_TYPES = {
    "Tensor": "Tensor",
    "Tensor?": "OptionalTensor",
    "int": "int64_t",
    "int?": "int64_t",
    "float": "double",
    "bool": "bool",
    "bool?": "int64_t",
    "str": "int64_t",  # the number that the operator gives the name of a backend
}
_VALUES: dict[str, tuple[type, str]] = {
    "int": (numbers.Integral, "an integer"),
    "float": (numbers.Real, "a number"),
    "bool": (numbers.Integral, "a bool"),
    "str": (str, "a string"),
}
# The C++ readers of numbers and of written tensors, which check more than the type.
_READERS = {"float": "Number", "Tensor": "Written", "Tensor?": "OptionalWritten"}
_ARGUMENT = re.compile(r"(Tensor|int|float|bool|str)(?:\(([a-z|]+)(!)?\))?(\?)? (\w+)(?:=(.+))?")
_WORDS = {"None": None, "True": True, "False": False}


def _default(kind: str, text: str | None) -> object:
    if text is None:
        return REQUIRED
    if text in _WORDS:
        return _WORDS[text]
    return float(text) if kind == "float" else int(text) if kind.startswith("int") else text.strip('"')


@functools.cache
def parse(text: str) -> tuple[Argument, ...]:
    """Parses `Tensor(a!) out, Tensor(a) input, float eps=1e-6`. Raises ValueError for other text."""
    found = []
    for word in text.split(", "):
        match = _ARGUMENT.fullmatch(word)
        if match is None:
            raise ValueError(f"arguments: an argument such as 'Tensor(a!) out' or 'int k=1' is required; got {word!r}")
        base, memory, written, optional, name, default = match.groups()
        kind = f"{base}{optional or ''}"
        found.append(Argument(name, kind, bool(written), _default(kind, default), (memory or "").replace("|", "")))
    return tuple(found)


def unshared(text: str) -> str:
    """The arguments as torch takes them: each written tensor has a letter of its own, and no other one has any."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    return re.sub(r"\([a-z|]+(!?)\)", lambda match: f"({next(letters)}!)" if match[1] else "", text)
