"""The backend `tuned`: the fastest of all configurations of an op, beside which `auto` shows what its choice costs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_MOST_TACTICS = 128  # of an implementation
_BEYOND = 1 << 20  # a number that no tactic has


class Configuration(NamedTuple):
    """An implementation, and a number that its launcher counts its tiles and splits by; -1: its own choice."""

    implementation: str
    tactic: int


class Tuned:
    """Stands for the operator in the module that calls it, and gives each call the tactic.

    operator: of fi_core, whose op has the argument `tactic`. function: the public function, whose module calls it.
    """

    def __init__(self, operator: Any, function: Callable[..., Any]) -> None:
        self.operator, self.tactic = operator, -1
        self.module: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
        self.name = next((n for n, value in self.module.items() if value is operator.function), None)

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self.operator.function(*args, **{**more, "tactic": self.tactic})

    def use(self, found: Configuration) -> None:
        self.tactic = found.tactic
        if self.operator.forced != found.implementation:
            self.operator.forced = found.implementation
            self.operator.forget()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block calls of the function take the tactic and the implementation of `use`."""
        assert self.name is not None
        before = self.operator.forced
        self.module[self.name] = self
        try:
            yield
        finally:
            self.module[self.name] = self.operator.function
            self.operator.forced = before
            self.operator.forget()

    def fastest(self, implementations: Iterable[str], time: Callable[[], float]) -> Configuration:
        """The configuration with the least time. `time` makes calls, and raises ValueError where they are refused."""
        found: list[tuple[float, Configuration]] = []
        for implementation in implementations:
            for tactic in range(_MOST_TACTICS) if self._counts(implementation, time) else (-1,):
                self.use(Configuration(implementation, tactic))
                with contextlib.suppress(ValueError):
                    found.append((time(), Configuration(implementation, tactic)))
        if not found:
            raise ValueError(f"no configuration of {self.operator.op.name} takes the case")
        return min(found)[1]

    def _counts(self, implementation: str, time: Callable[[], float]) -> bool:
        """Whether a launcher has tactics: it refuses a number that is too large."""
        self.use(Configuration(implementation, _BEYOND))
        try:
            time()
        except ValueError as error:
            return "tactic" in str(error)
        return False
