"""Numbers count, not how tensors hold them: a call with a negated view gives what it gives for a copy, or an error.
Tried with every argument of every public function after a valid call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fi_core.runtime.errors import LibraryError
from fuzz.calls import Arguments, Scenario, invoke, scenarios
from fuzz.case import _close, _copied, _pairs
from fuzz.hostile import is_plain

Pair = tuple[str, Arguments, Arguments]  # what is tried, the change, and the same numbers in copies


def _own(value: Any) -> Any:
    """Copies of tensors, with the same strides; other values as they are."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_own, value)) if type(value) in (tuple, list) else value
    return value.clone() if is_plain(value) else value


def negated(arguments: Arguments) -> Iterator[Pair]:
    for name, x in arguments.items():
        if is_plain(x) and x.dtype is not torch.bool and not x.dtype.is_complex and x.numel():
            try:
                other = -x
            except RuntimeError:  # torch does not negate fp8
                continue
            yield f"{name}: negated", {name: torch._neg_view(x.clone())}, {name: other}


class Compares:
    """A hook that makes each call in both forms before the valid one."""

    def __init__(self) -> None:
        self.wrong, self.tried = list[str](), set[Any]()

    def _results(self, function: Any, arguments: Arguments, change: Arguments) -> list[Any]:
        torch.manual_seed(0)
        given = {name: change.get(name, _own(value)) for name, value in arguments.items()}
        result = invoke(function, given)
        kept = [x for name, x in given.items() if name not in change and "workspace" not in name and name != "self"]
        return [_copied(result), _copied(kept)]

    def __call__(self, function: Any, arguments: Arguments, template: Any = None, planned: Any = None) -> Any:
        names = inspect.signature(function).parameters
        if function in self.tried or "plan" in function.__name__ or "self" in names:
            return invoke(function, arguments)  # an object would keep what a call before has given it
        self.tried.add(function)
        for text, change, copies in negated(arguments):
            try:
                want = self._results(function, arguments, copies)
            except Exception:  # the numbers themselves are wrong
                continue
            try:
                got = self._results(function, arguments, change)
            except (TypeError, ValueError):
                continue
            if not all(_close(x, y) for x, y in _pairs(got, want)):
                self.wrong.append(f"{function.__qualname__}({text})")
        try:
            return invoke(function, arguments)
        except LibraryError:  # cuDNN is not installed everywhere
            return None


@pytest.mark.parametrize("scenario", {s.name: s for s in scenarios()}.values(), ids=lambda scenario: scenario.name)
@pytest.mark.filterwarnings("ignore")
def test_negated_views_count_as_their_copies(scenario: Scenario) -> None:
    hook = Compares()
    scenario.start(hook, 1)
    assert hook.wrong == []
