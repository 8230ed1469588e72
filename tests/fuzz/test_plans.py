"""A plan of any wrapper that fails leaves no plan to run, whichever of its arguments is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from families.harness import assert_close
from fuzz.calls import Arguments, Scenario, invoke, marked, scenarios
from fuzz.case import _PLANS, _copied, _pairs

SESSIONS = {s.name: s for s in scenarios() if s.several and s.name != "session of other names"}


def wrong(parameters: Iterator[str], arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Values that hardly any argument of a plan may have; a list of tables has a wrong one at its end."""
    for name in parameters:
        if name in ("self", "wrapper"):
            continue
        for value in (object(), -7, torch.zeros(2, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)):
            given = arguments.get(name)
            yield name, [*given[:-1], value] if isinstance(given, list) else value


class FailsPlans:
    """A hook that fails the last plan before each run, once for each wrong value, and plans again."""

    def __init__(self) -> None:
        self.plan: tuple[Any, Arguments] | None = None
        self.failed, self.kept = 0, list[str]()

    def __call__(self, function: Any, arguments: Arguments, template: Any = None, planned: Any = None) -> Any:
        if function.__name__ in _PLANS:  # a fast plan needs a plan before
            self.plan = None if function.__name__ == "fast_decode_plan" else (function, arguments)
        elif self.plan and ("run" in function.__name__ or "plan" in arguments):
            self._attack(function, arguments, *self.plan)
        return invoke(function, arguments)

    def _attack(self, run: Any, arguments: Arguments, plan: Any, given: Arguments) -> None:
        want = _copied(invoke(run, arguments))
        for name, value in wrong(iter(inspect.signature(plan).parameters), given):
            try:
                invoke(plan, {key: {**given, name: value}[key] for key in inspect.signature(plan).parameters
                              if key in given or key == name})  # fmt: skip
            except Exception:
                self.failed += 1
                try:
                    invoke(run, arguments)
                    self.kept.append(f"{plan.__qualname__}({name}: {value}): run takes the plan before")
                except RuntimeError as error:
                    if "the last plan failed: call plan again" not in str(error):
                        self.kept.append(f"{plan.__qualname__}({name}: {value}): {error}")
            invoke(plan, given)
        for x, y in _pairs(_copied(invoke(run, arguments)), want):
            assert_close(x, y)
        self.plan = None


@pytest.mark.parametrize("scenario", SESSIONS.values(), ids=SESSIONS)
@pytest.mark.filterwarnings("ignore")
def test_no_run_after_a_failed_plan(scenario: Scenario) -> None:
    hook = FailsPlans()
    scenario.start(hook, 0)
    assert hook.failed > 20
    assert hook.kept == []


def test_every_plan_is_failed() -> None:
    """Each wrapper of the API with a plan has a session."""
    seen: set[str] = set()

    def watch(function: Any, arguments: Arguments, template: Any = None, planned: Any = None) -> Any:
        seen.add(f"{function.__module__}:{function.__qualname__}")
        return invoke(function, arguments)

    for scenario in SESSIONS.values():
        scenario.start(watch, 0)
    plans = {name for name in marked() if name.rpartition(".")[2] in _PLANS}
    assert plans and plans - seen == set()
