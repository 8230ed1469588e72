"""The dispatcher: `choose` maps a Request to a Choice. Nothing else chooses an implementation.

Both are frozen and printable; `choose` is a pure function, so that every decision can be tested and explained without a
GPU. A C++ launcher decides the rest for each call: the entry of the chosen unit, grid and cluster. In a rehearsal it
tells them, and `fi-core why` prints them beside the Choice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.invariance import is_on
from fi_core.runtime.spec.op import Entry, Implementation, Op, Spec
from fi_core.runtime.spec.target import Target

AUTO = "auto"


class Request(NamedTuple):
    """The request of a call to an op on a target: a value for each field, the backend that the caller named, and
    whether the bits of a row must depend on the row alone.
    """

    op: Op
    target: Target
    values: tuple[Any, ...]
    backend: str = AUTO
    batch_invariant: bool = False

    @classmethod
    def of(cls, op: Op, target: Target, given: Mapping[str, Any] | None = None, backend: str = AUTO) -> Request:
        """A request as of a call now, with default values for the fields that are not given. Raises ValueError for an
        unknown field.
        """
        return cls(op, target, tuple(op.values(given or {}).values()), backend, is_on())

    def facts(self) -> dict[str, Any]:
        """The values by name, with those of the target."""
        named = dict(zip(self.op.fields, self.values))
        place = {"device": self.target.kind, "capability": self.target.capability}
        return {**place, "batch_invariant": self.batch_invariant, **named}

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in zip(self.op.fields, self.values)]
        words += [f"backend={self.backend}"] if self.backend != AUTO else []
        words += ["batch_invariant"] if self.batch_invariant else []
        return f"{self.op.name}({', '.join(words)}) on {self.target}"


@dataclass(frozen=True, eq=False)
class Choice:
    """The implementation and spec that compute a request, and the reason against each other implementation.

    `choose` makes one for a request and keeps it: two choices are the same if they are one object.
    """

    request: Request
    implementation: str
    spec: Spec
    reasons: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def backend(self) -> str:
        """The public name of the implementation."""
        return (*self.request.op.implementation(self.implementation).backends, self.implementation)[0]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The kernel entries of its unit, of which the launcher picks one for a call; none on a CPU."""
        unit = self.spec.unit()
        return unit.entries if unit else ()

    def __str__(self) -> str:
        others = [f"{name}: {'; '.join(why)}" for name, why in self.reasons]
        return "\n  ".join([f"{self.request}: {self.implementation}", *others])


def explain(request: Request) -> dict[str, tuple[str, ...]]:
    """The reasons against each implementation; empty for the chosen one, if there is one."""
    op, facts = request.op, request.facts()
    wrong = tuple(
        f"requires {name} in {', '.join(map(str, field.values))}, got {facts[name]}"
        for name, field in op.fields.items()
        if field.values is not None and facts[name] not in field.values
    )
    refusals = {i.name: (*_not_asked(request, i), *wrong, *i.refusals(facts)) for i in op.implementations}
    takes = [i for i in op.implementations if not refusals[i.name]]
    chosen = next((i.name for i in takes if not i.reservations(facts)), takes[0].name if takes else "")
    for i in takes:
        if i.name != chosen:
            refusals[i.name] = i.reservations(facts) or (f"supports the request too; {chosen} is preferred",)
    return refusals


def _not_asked(request: Request, implementation: Implementation) -> tuple[str, ...]:
    """The reason why the caller's backend excludes it. The name of an implementation selects it, too."""
    names = (implementation.name, *implementation.backends)
    if request.backend == AUTO:
        return (f"runs only where the caller passes backend={names[-1]!r}",) if implementation.by_name else ()
    return () if request.backend in names else (f"is excluded by backend={request.backend!r}",)


@functools.lru_cache(maxsize=4096)
def choose(request: Request) -> Choice:
    """The first implementation, in the op's order, that the backend allows, that supports the request, and is fast for
    it.

    If none is fast for it, the first that supports it.

    Raises:
        UnsupportedError: no implementation supports it; with the reason of each that the backend allows.
        ValueError: the op has no such backend.
    """
    op = request.op
    asked = [i for i in op.implementations if request.backend == AUTO or not _not_asked(request, i)]
    if not asked:
        known = dict.fromkeys(name for i in op.implementations for name in (*i.backends, i.name))
        raise ValueError(f"backend: {op.name} has auto, {', '.join(known)}; got {request.backend!r}")
    reasons = explain(request)
    chosen = next((name for name, why in reasons.items() if not why), None)
    if chosen is None:
        raise UnsupportedError(f"{request} is not supported:", {i.name: reasons[i.name] for i in asked})
    spec = spec_of(request, chosen)
    return Choice(request, chosen, spec, tuple((name, why) for name, why in reasons.items() if name != chosen))


def spec_of(request: Request, name: str) -> Spec:
    """The spec of the named implementation for a request that it supports."""
    axes = request.op.implementation(name).axes(request.facts())
    return Spec(request.op, name, request.target, tuple((axis, axes[axis]) for axis in request.op.axes))


def specs(request: Request, slow: bool = True) -> list[Spec]:
    """One spec for each implementation of this library that supports the request on its target, preferred or not.
    slow: also those for whose speed a condition does not hold.
    """
    facts = request.facts()
    ours = (i for i in request.op.implementations if i.unit is not None or request.target.kind == "cpu")
    return [spec_of(request, i.name) for i in ours if not i.refusals(facts) and (slow or not i.reservations(facts))]
