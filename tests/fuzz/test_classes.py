"""Each class of error that the fuzz has found, tried with every argument of every public function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fi_core.runtime.errors import LibraryError
from fuzz.calls import Arguments, Scenario, invoke, scenarios
from fuzz.case import Hostile
from fuzz.hostile import is_plain

Change = tuple[str, Arguments]  # what is changed, and the arguments that replace valid ones
LAYOUTS = torch.strided, torch.jagged
SIGNED = {"negated": torch._neg_view, "conjugate": lambda x: x.to(torch.complex64).conj()}


def _tensors(arguments: Arguments) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, x) for name, x in arguments.items() if is_plain(x))


def unreadable(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """Tensors that no kernel reads, and whose methods raise errors of torch."""
    for name, x in _tensors(arguments):
        for layout in LAYOUTS:
            yield f"{name}: nested", {name: torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=layout)}
        yield f"{name}: sparse", {name: x.float().to_sparse()}
        for kind, make in SIGNED.items():
            yield f"{name}: {kind}", {name: make(x)}


def dimensions(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """A dimension less, one more, and each of no elements."""
    for name, x in _tensors(arguments):
        yield f"{name}: one more", {name: x[None]}
        for axis in range(x.ndim):
            if x.shape[axis]:
                yield f"{name}: without axis {axis}", {name: x.select(axis, 0)}
            yield f"{name}: axis {axis} of 0", {name: x.narrow(axis, 0, 0)}


def options(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """Words that nobody knows, and tensors for what is no tensor; the latter also beside a fake tensor."""
    tensors = dict(_tensors(arguments))
    fake = {name: FakeTensorMode().from_tensor(x) for name, x in list(tensors.items())[:1]}
    for name in parameters:
        if name not in tensors:
            for text in ("", "\0"):
                yield f"{name}: {text!r}", {name: text}
            yield f"{name}: a tensor", {name: torch.ones(2)}
            yield f"{name}: a tensor, beside a fake one", {**fake, name: torch.ones(2)}


CLASSES: dict[str, Callable[[list[str], Arguments], Iterator[Change]]] = {
    "unreadable": unreadable, "dimensions": dimensions, "options": options,
}  # fmt: skip


class Tries:
    """A hook that makes each hostile call before the valid one."""

    def __init__(self, changes: Callable[[list[str], Arguments], Iterator[Change]]) -> None:
        self.changes, self.count = changes, 0
        self.unnamed: list[str] = []
        self.tried: set[Any] = set()

    def __call__(self, function: Any, arguments: Arguments, template: Any = None, planned: Any = None) -> Any:
        kinds = inspect.signature(function).parameters.values()
        names = [p.name for p in kinds if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        # A session calls it several times. A fast plan that fails asks for a plan.
        if function in self.tried or function.__name__ == "fast_decode_plan":
            return invoke(function, arguments)
        self.tried.add(function)
        positional = any(p.kind is p.VAR_POSITIONAL and p.name in arguments for p in kinds)
        for text, change in self.changes([name for name in names if name in arguments or not positional], arguments):
            self.count += 1
            given = {**arguments, **change}
            try:
                invoke(
                    function, {name: given[name] for name in inspect.signature(function).parameters if name in given}
                )
            except Exception as error:
                judge = Hostile("metadata", 0, 0)
                judge.names = set(names)
                judge._judge(error, function, later=False)
                if judge.record["outcome"] == "unnamed error":
                    said = f"{type(error).__name__}: {error}"
                    self.unnamed.append(f"{function.__qualname__}({text}): {said[:160]}")
        try:
            return invoke(function, arguments)
        except LibraryError:  # cuDNN is not installed everywhere
            return None


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("scenario", {s.name: s for s in scenarios()}.values(), ids=lambda scenario: scenario.name)
@pytest.mark.filterwarnings("ignore")
def test_each_argument_is_named(scenario: Scenario, kind: str) -> None:
    tries = Tries(CLASSES[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scenario.start(tries, 1)
    assert tries.unnamed == []
