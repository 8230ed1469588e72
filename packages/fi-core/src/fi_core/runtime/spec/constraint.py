"""Constraints of implementations, as data: they decide dispatch and print themselves when they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Constraint(NamedTuple):
    """`values[name] op bound`, where op is one of ==, >=, <=, in, multiple of."""

    name: str
    op: str
    bound: object

    def holds(self, values: Mapping[str, object]) -> bool:
        value = values[self.name]
        if self.op == "in":
            return value in self.bound  # type: ignore[operator]
        if self.op == "==":
            return value == self.bound
        assert isinstance(value, int) and isinstance(self.bound, int), f"{self} needs integers"
        if self.op == ">=":
            return value >= self.bound
        if self.op == "<=":
            return value <= self.bound
        if self.op == "multiple of":
            return value % self.bound == 0
        raise AssertionError(f"unknown operator {self.op!r}")

    def refusal(self, values: Mapping[str, object]) -> str:
        """The message if the values do not satisfy it: "requires capability >= 90, got 80"."""
        return f"requires {self}, got {values[self.name]}"

    def __str__(self) -> str:
        bound = ", ".join(map(str, self.bound)) if isinstance(self.bound, tuple) else str(self.bound)
        return f"{self.name} {self.op} {bound}"


class Rule(NamedTuple):
    """A condition on several values, described by `text`."""

    names: tuple[str, ...]
    text: str
    test: Callable[..., bool]

    def holds(self, values: Mapping[str, object]) -> bool:
        return self.test(*(values[name] for name in self.names))

    def refusal(self, values: Mapping[str, object]) -> str:
        """The message if the values do not satisfy it: "requires kv of q's dtype, got q=bf16, kv=f16"."""
        return f"requires {self}, got {', '.join(f'{name}={values[name]}' for name in self.names)}"

    def __str__(self) -> str:
        return self.text


def at_least(capability: int) -> tuple[Constraint, ...]:
    """Runs on CUDA devices of this compute capability (major * 10 + minor) and later."""
    return Constraint("device", "==", "cuda"), Constraint("capability", ">=", capability)


def exactly(capability: int) -> tuple[Constraint, ...]:
    """Uses instructions that only this compute capability has (an "a" architecture)."""
    return Constraint("device", "==", "cuda"), Constraint("capability", "==", capability)


# Of an implementation whose sums follow the batch: the switch of batch invariance excludes it.
VARIES = (
    Rule(
        ("batch_invariant",),
        "a call outside of fi_core.batch_invariant(), for its sums follow the batch",
        lambda batch_invariant: not batch_invariant,
    ),
)
ON_CPU = (Constraint("device", "==", "cpu"),)
