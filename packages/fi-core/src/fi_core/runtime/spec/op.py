"""Op: the declaration of a kernel family; Implementation: one way to compute it; Spec: its compile-time
configuration.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from fi_core.runtime.spec.arguments import Argument, parse, unshared
from fi_core.runtime.spec.constraint import Constraint, Rule
from fi_core.runtime.spec.dtype import DTYPES, name_of_word
from fi_core.runtime.spec.target import Target

Values = Mapping[str, Any]


class Entry(NamedTuple):
    """A kernel entry: one `__global__` function of a unit, the device template that it instantiates, and its config.

    config: an instance of the op's config class; the C++ launcher reads it by the names of its fields.
    """

    name: str
    body: str
    threads: int
    config: Any = ()
    shared_bytes: int = 0
    ctas_per_sm: int = 0  # that registers must leave room for; 0: the compiler's choice

    def __str__(self) -> str:
        names = getattr(type(self.config), "_fields", ())
        config = ", ".join(f"{name}={int(value)}" for name, value in zip(names, self.config))
        return f"{self.name} ({self.threads} threads{f', {config}' if config else ''})"


# Flags of a unit whose entries several threads compile. Some units get other machine code by them, and do without.
THREADS = ("--split-compile=4",)


class Unit(NamedTuple):
    """A device translation unit: a header, a parameter struct and kernel entries.

    variant: the text of a user's attention variant. It precedes the header, and the entries receive its arguments as a
    second parameter. flags: additional compiler flags.
    """

    header: str
    params: str
    entries: tuple[Entry, ...]
    variant: str = ""
    flags: tuple[str, ...] = ()


class Field(NamedTuple):
    """A field of an op's request: the supported values (None: any) and the default. In C++ it is a DType, a bool, an
    int64_t, or an enum of its words; codes: their numbers, by default 0, 1, ...
    """

    values: tuple[Any, ...] | None
    default: Any
    codes: type[Enum] | None = None

    @property
    def kind(self) -> str:
        """dtype, bool, int or word."""
        one = self.default
        if isinstance(one, int):
            return "bool" if isinstance(one, bool) else "int"
        return "dtype" if DTYPES.keys() >= set(self.values or (one,)) else "word"

    def members(self) -> dict[str, int]:
        """The words of a field with their numbers in C++."""
        if self.kind != "word":
            return {}
        if self.codes is not None:
            return {name: self.codes[name].value for name in self.values or self.codes.__members__}
        return {name: number for number, name in enumerate(self.values or ())}

    def word(self, value: Any) -> int:
        """The value as a word of a request in C++."""
        if self.kind == "dtype":
            return DTYPES[value].word if value in DTYPES else -1
        return self.members()[value] if self.kind == "word" else int(value)

    def value(self, word: int) -> Any:
        """The value that a word of a request in C++ stands for; of an unknown word its number."""
        if self.kind == "dtype":
            return name_of_word(word)
        if self.kind == "word":
            names = {number: name for name, number in self.members().items()}
            known = {member.value: member.name for member in self.codes or ()}
            return names.get(word) or known.get(word, word)
        return bool(word) if self.kind == "bool" else word


def _same(values: Values) -> Values:
    return values


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Args:
        name: as in the glossary: "cpu", "cuda_core", "mma_sm80", "wgmma_sm90" and others.
        constraints: conditions of a request that it supports.
        unit: CUDA only; the device unit for axes, which include `capability`.
        axes: the compile-time axes for the values of a request, which include `device` and `capability`; default: the
            fields of the same names.
        backends: values of the caller's `backend` that select it.
        preferred: conditions under which it is fast. If they do not hold, an implementation whose conditions hold is
            preferred.
        by_name: only a named backend selects it.
    """

    name: str
    constraints: tuple[Constraint | Rule, ...]
    unit: Callable[[Values], Unit] | None = None
    axes: Callable[[Values], Values] = _same
    backends: tuple[str, ...] = ()
    preferred: tuple[Constraint | Rule, ...] = ()
    by_name: bool = False

    def refusals(self, values: Values) -> tuple[str, ...]:
        """The constraints that do not hold, in words; empty if this implementation supports the values."""
        return tuple(c.refusal(values) for c in self.constraints if not c.holds(values))

    def reservations(self, values: Values) -> tuple[str, ...]:
        """The reasons to prefer another implementation although this one supports the values."""
        return tuple(
            f"supports the request but is slow: {c.refusal(values)}" for c in self.preferred if not c.holds(values)
        )


@dataclass(frozen=True)
class Op:
    """The declaration of an op; the torch schema, the Python callable and the C++ structs are generated from it.

    Args:
        name, family: its name, and the folder of its host entry.
        implementations: in order of preference.
        arguments: a torch.library schema string with the written tensors marked, as in "Tensor(a!) out, Tensor(a) x,
            float eps=1e-6". A written tensor shares no memory with another one, but may be one of the same letter.
            Empty for a composite op: other ops compute it, in one way for each implementation.
        planned: the arguments that a plan fixes for all calls that follow; they cross to C++ once.
        fields: the fields of a request, which `request_of` of the host entry makes from the arguments of a call.
        axes: the axes of device code; default: the fields.
        config: the NamedTuple of integers of each kernel entry.
        prebuilt: requests whose kernels the binary packages ship, other fields having their default; empty: all.
        takes_variant: whether a user's device code can be compiled into its units.
        varies: the fields that differ between the calls of one layer, with values by which every kernel is reached, or
            a function that tells them by the other fields.
        beside: the ops that the same layer calls for other steps, with requests of the same fields.
        example: makes the arguments of a call from sizes that a user knows, for `fi-core why`.
    """

    name: str
    family: str
    implementations: tuple[Implementation, ...]
    arguments: str = ""
    planned: tuple[str, ...] = ()
    fields: Mapping[str, Field] = field(default_factory=dict)
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    config: type[tuple[int, ...]] | None = None
    prebuilt: tuple[Values, ...] = ()
    takes_variant: bool = False
    varies: Mapping[str, tuple[Any, ...] | Callable[[Values], tuple[Any, ...]]] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    example: Callable[..., dict[str, Any]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.axes and not self.fields:
            fields = {name: Field(values, values[0]) for name, values in self.axes.items()}
            object.__setattr__(self, "fields", fields)
        elif self.fields and not self.axes:
            axes = {name: f.values or () for name, f in self.fields.items()}
            object.__setattr__(self, "axes", axes)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_composite(self) -> bool:
        """Whether other ops compute it: it has no kernels of its own."""
        return not self.arguments

    @property
    def schema(self) -> str:
        """The torch.library schema of the out-variant, which has a letter for each written tensor alone."""
        return f"({unshared(self.arguments)}) -> ()"

    @property
    def parsed(self) -> tuple[Argument, ...]:
        return parse(self.arguments)

    @property
    def native(self) -> tuple[Argument, ...]:
        """The arguments in the order in which the host module takes them: those that a plan fixes come first."""
        return tuple(sorted(self.parsed, key=lambda argument: argument.name not in self.planned))

    @property
    def source(self) -> str:
        """The host entry, relative to the fi-kernels root."""
        return f"csrc/{self.family}/{self.name}.cc"

    @property
    def header(self) -> str:
        """The generated header with the argument and config structs, as the host entry includes it."""
        return f"fi/generated/{self.name}.h"

    def values(self, given: Values) -> dict[str, Any]:
        """A value for each field: the given ones, else the default. Raises ValueError for an unknown name."""
        unknown = [name for name in given if name not in self.fields]
        if unknown:
            known = ", ".join(self.fields) or "none"
            raise ValueError(f"{self.name}: fields of a request are {known}; got {', '.join(unknown)}")
        return {name: given.get(name, f.default) for name, f in self.fields.items()}

    def grid(self) -> Iterator[dict[str, Any]]:
        """The requests whose kernels are built ahead of time, as values of all fields."""
        if self.prebuilt:
            yield from (self.values(given) for given in self.prebuilt)
        else:
            choices = [f.values or (f.default,) for f in self.fields.values()]
            yield from (dict(zip(self.fields, combination)) for combination in itertools.product(*choices))

    def calls_of_layer(self, given: Values) -> Iterator[dict[str, Any]]:
        """The values of all fields in the calls of a layer, of which one has the given values."""
        values = self.values(given)
        choices = (v(values) if callable(v) else v for v in self.varies.values())
        yield from ({**values, **dict(zip(self.varies, combination))} for combination in itertools.product(*choices))

    def implementation(self, name: str) -> Implementation:
        for found in self.implementations:
            if found.name == name:
                return found
        known = ", ".join(i.name for i in self.implementations)
        raise ValueError(f"{self.name}: implementation must be one of {known}; got {name!r}")


@functools.lru_cache(maxsize=4096)
def _unit_of(spec: Spec) -> Unit | None:
    make = spec.op.implementation(spec.implementation).unit
    return make({**dict(spec.axes), "capability": spec.target.capability}) if make else None


@dataclass(frozen=True)
class Spec:
    """One compile-time configuration of an op: hashable, printable, enough to build it."""

    op: Op
    implementation: str
    target: Target
    axes: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The URI: unique for a compile-time configuration, and valid as a file name."""
        if self.target.kind == "cpu":
            return f"{self.op.name}_cpu"
        words = [self.op.name, *(f"{k}_{v}" for k, v in self.axes), self.implementation, str(self.target)]
        return "_".join(words)

    def unit(self) -> Unit | None:
        """Its device unit; None on a CPU, and if another library provides the kernels."""
        return _unit_of(self)

    def __str__(self) -> str:
        axes = ", ".join(f"{k}={v}" for k, v in self.axes)
        return f"{self.op.name}({axes}) by {self.implementation} on {self.target}"
