"""Numbers count, not how tensors hold them: a call with a negated view gives what it gives for a copy, or an error.
Tried with every argument of every public function after a valid call.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import _neg_view

from fi_core.runtime.errors import LibraryError
from fi_core.runtime.launch.operator import operators
from fi_core.runtime.resolve import checks
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
            yield f"{name}: negated", {name: _neg_view(x.clone())}, {name: other}


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


class Wraps(Compares):
    """A hook that makes each call also with a number of a table that is 2^32 more, in int64."""

    def __call__(self, function: Any, arguments: Arguments, template: Any = None, planned: Any = None) -> Any:
        result = invoke(function, arguments)
        if function in self.tried or "plan" in function.__name__ or "self" in inspect.signature(function).parameters:
            return result
        self.tried.add(function)
        for name, x in arguments.items():
            if not is_plain(x) or x.dtype not in (torch.int32, torch.int64) or not x.numel():
                continue
            found = []  # with the numbers, with a larger one of 32 bits, and with one beyond
            own = int(x.reshape(-1)[-1])
            for last in (own, (1 << 31) - 1, own + (1 << 32)):
                wide = x.to(torch.int64, copy=True).contiguous()
                wide.view(-1)[-1] = last
                try:
                    found.append(self._results(function, arguments, {name: wide}))
                except (TypeError, ValueError):
                    found.append([])
            same, larger, beyond = found
            if same and _equal(same, beyond) and not _equal(same, larger):
                self.wrong.append(f"{function.__qualname__}({name} + 2^32)")
        return result


def _equal(got: list[Any], want: list[Any]) -> bool:
    pairs = list(_pairs(got, want))
    return bool(pairs) and len(got) == len(want) and all(_close(x, y) for x, y in pairs)


by_scenario = pytest.mark.parametrize(
    "scenario", {s.name: s for s in scenarios()}.values(), ids=lambda scenario: scenario.name
)


@by_scenario
@pytest.mark.filterwarnings("ignore")
def test_no_number_beyond_int32_wraps(scenario: Scenario) -> None:
    hook = Wraps()
    with contextlib.suppress(LibraryError):  # cuDNN is not installed everywhere
        scenario.start(hook, 1)
    assert hook.wrong == []


@by_scenario
@pytest.mark.filterwarnings("ignore")
def test_negated_views_count_as_their_copies(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FI_CHECK=1: without it a call whose kernel is known does not see the sign of a view."""
    monkeypatch.setattr(checks, "_CHECK", True)
    hook = Compares()
    for operator in operators().values():
        operator.restart()
    try:
        scenario.start(hook, 1)
    finally:
        for operator in operators().values():
            operator.restart()
    assert hook.wrong == []
