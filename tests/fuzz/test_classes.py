"""Each class of error that the fuzz has found, tried with every argument of every public function."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import _neg_view
from torch._subclasses.fake_tensor import FakeTensorMode

from fi_core.runtime.errors import LibraryError
from fuzz.calls import Arguments, Scenario, invoke, scenarios
from fuzz.case import Hostile, drawn
from fuzz.hostile import is_plain

Change = tuple[str, Arguments]  # what is changed, and the arguments that replace valid ones
_WORST = (1 << 63) - 1
LAYOUTS = torch.strided, torch.jagged
SIGNED = {"negated": _neg_view, "conjugate": lambda x: x.to(torch.complex64).conj()}


Put = Callable[[Any], Arguments]


def _tensors(arguments: Arguments) -> Iterator[tuple[str, torch.Tensor, Put]]:
    """Tensors, also those in a tuple or list, each with what puts another value in its place."""
    for name, value in arguments.items():
        if is_plain(value):
            yield name, value, lambda x, name=name: {name: x}
        elif isinstance(value, (tuple, list)):
            for i, member in enumerate(value):
                if is_plain(member):
                    yield f"{name}[{i}]", member, functools.partial(_with_member, name, value, i)


def _with_member(name: str, values: tuple[Any, ...] | list[Any], i: int, x: Any) -> Arguments:
    members = [*values[:i], x, *values[i + 1 :]]
    return {name: members if isinstance(values, list) else tuple(members)}


def unreadable(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """Tensors that no kernel reads, and whose methods raise errors of torch."""
    for name, x, put in _tensors(arguments):
        for layout in LAYOUTS:
            yield f"{name}: nested", put(torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=layout))
        yield f"{name}: sparse", put(x.float().to_sparse())
        for kind, make in SIGNED.items():
            yield f"{name}: {kind}", put(make(x))


def dimensions(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """A dimension less, one more, and each of no elements."""
    for name, x, put in _tensors(arguments):
        yield f"{name}: one more", put(x[None])
        for axis in range(x.ndim):
            if x.shape[axis]:
                yield f"{name}: without axis {axis}", put(x.select(axis, 0))
            yield f"{name}: axis {axis} of 0", put(x.narrow(axis, 0, 0))


def options(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """Words that nobody knows, and tensors for what is no tensor; the latter also beside a fake tensor."""
    tensors = {name: x for name, x in arguments.items() if is_plain(x)}
    fake = {name: FakeTensorMode().from_tensor(x) for name, x in list(tensors.items())[:1]}
    for name, _, put in _tensors(arguments):
        for value in (torch.float32, "x"):
            yield f"{name}: {value!r}", put(value)
    for name, values in arguments.items():
        if type(values) in (tuple, list) and any(map(is_plain, values)):
            for value in (-1, "x"):
                yield f"{name}: members {value!r}", {name: type(values)([value] * len(values))}
    for one, other in itertools.pairwise(name for name in parameters if name not in tensors):
        yield f"{one}, {other}: tensors", {one: torch.ones(2, 1).to(torch.uint16), other: torch.ones(1) * 1j}
    for name in parameters:
        if name not in tensors:
            for text in ("", "\0"):
                yield f"{name}: {text!r}", {name: text}
            yield f"{name}: a tensor", {name: torch.ones(2)}
            yield f"{name}: a tensor, beside a fake one", {**fake, name: torch.ones(2)}


def sizes(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """Numbers at the ends of 64 bits, flags, and dimensions of as many elements, which share memory."""
    for name, value in arguments.items():
        for number in (0, -1, 1 << 62, _WORST, False, True) if type(value) is int else ():
            yield f"{name}: {number}", {name: number}
    for name, x, put in _tensors(arguments):
        for axis, size in enumerate(x.shape if x.numel() else ()):
            most = _WORST // (x.numel() // size)
            shape = [most if i == axis else n for i, n in enumerate(x.shape)]
            yield f"{name}: axis {axis} of {most}", put(x.narrow(axis, 0, 1).expand(shape))


def aliases(parameters: list[str], arguments: Arguments) -> Iterator[Change]:
    """A tensor in the place of another one of its shape and dtype, and results in the memory of each table."""
    known = list(_tensors(arguments))
    for name, x, put in known:
        for other, y, _ in known:
            fits = other != name and y.dtype is x.dtype
            if fits and y.shape == x.shape:
                yield f"{name}: {other}", put(y)
            elif fits and not x.dtype.is_floating_point and y.numel() > x.numel() > 0 and y.is_contiguous():
                yield f"{name}: in {other}", put(y.view(-1)[-x.numel() :].view(x.shape))


CLASSES: dict[str, Callable[[list[str], Arguments], Iterator[Change]]] = {
    "unreadable": unreadable, "dimensions": dimensions, "options": options, "sizes": sizes,
    "aliases": aliases,
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
                case = Hostile(functools.partial(drawn, "metadata", 0), 0)
                case.names = set(names)
                case.judge(error, function, later=False)
                if case.record["outcome"] == "unnamed error":
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
