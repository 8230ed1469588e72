"""Every argument of every call changed alone, in each of a list of ways: what random cases may miss."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import torch

from fi_core.runtime.errors import LibraryError
from fuzz.calls import Arguments, Scenario, invoke
from fuzz.hostile import NUMBERS, Change, bits_of, is_plain, tight

Make = Callable[[Any], Change]
Writes = Callable[[torch.Tensor], torch.Tensor]  # other numbers of a flat tensor, as int64 or fp32
_WORST = (1 << 63) - 1
_INTEGERS = (-1, 1000, 2**30, 2**31 - 1, -(2**31), 2**32 + 1, _WORST, -_WORST - 1)
_FLOATS = (float("nan"), float("inf"), -3.4e38, 3.4e38, -1.0, 0.0)


class Way(NamedTuple):
    """A change of one argument of the call with number `step` of a scenario."""

    step: int
    argument: str
    text: str


def _at(place: int | slice, value: float) -> Writes:
    def write(flat: torch.Tensor) -> torch.Tensor:
        flat[place] = value
        return flat

    return write


def _alternating(flat: torch.Tensor) -> torch.Tensor:
    """Differences of neighbours wrap."""
    flat[::2], flat[1::2] = -_WORST - 1, _WORST
    return flat


_PLACES: dict[str, int | slice] = {"all": slice(None), "the first": 0, "the last": -1}
_OF_INTEGERS: dict[str, Writes] = {
    **{f"{words} {value}": _at(place, value) for words, place in _PLACES.items() for value in _INTEGERS},
    "alternating": _alternating,
    "reversed": lambda flat: flat.flip(0),
    "one less": lambda flat: flat - 1,
    "one more": lambda flat: flat + 1,
}
_OF_FLOATS: dict[str, Writes] = {
    f"{words} {value}": _at(place, value) for words, place in list(_PLACES.items())[:2] for value in _FLOATS
}


def _written(write: Writes, x: torch.Tensor, text: str, wide: torch.dtype) -> Change:
    """Other numbers in the same memory; of integers the nearest ones that there are."""
    numbers = write(x.reshape(-1).to(wide, copy=True))
    extreme = False
    if wide is torch.int64:
        limits = torch.iinfo(x.dtype)
        numbers = numbers.clamp(limits.min, limits.max)
    else:  # of other numbers than before, only a zero in a place is as of a number
        extreme = not bool((numbers.abs() <= x.float().abs().max()).all())
    x.copy_(numbers.reshape(x.shape).to(x.dtype))
    return Change(text, x, extreme=extreme)


def _sized(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    if size * x.numel() > 1 << 26:  # elements that share memory
        return x.narrow(axis, 0, 1).expand([size if i == axis else n for i, n in enumerate(x.shape)])
    if not x.shape[axis]:
        return x.new_zeros([size if i == axis else n for i, n in enumerate(x.shape)])
    return x.view(bits_of(x)).index_select(axis, torch.arange(size) % x.shape[axis]).view(x.dtype)


def _of_tensor(x: torch.Tensor) -> Iterator[tuple[str, Make]]:
    plain = x.numel() > 0 and 0 not in x.stride()
    kind = torch.float32 if x.dtype.is_floating_point else torch.int64
    if plain and x.dtype is not torch.bool and not x.dtype.is_complex:
        for text, write in (_OF_FLOATS if kind is torch.float32 else _OF_INTEGERS).items():
            yield text, functools.partial(_changed, write, text, kind)
    for axis, size in enumerate(x.shape):
        others = x.numel() // max(size, 1)
        most = _WORST // max(others, 1)
        for new in (0, size - 1, size + 1, 2 * size + 1, *((2**31, most) if x.numel() else ())):
            if 0 <= new <= most and new != size:
                text = f"dimension {axis} of {new}"
                yield text, lambda x, axis=axis, new=new, text=text: Change(text, _sized(x, axis, new))
        if size > 1 and x.numel():
            text = f"elements of dimension {axis} in one place"
            yield text, lambda x, axis=axis, text=text: Change(text, x.narrow(axis, 0, 1).expand(x.shape))


def _changed(write: Writes, text: str, wide: torch.dtype, x: torch.Tensor) -> Change:
    return _written(write, x, text, wide)


def _member(make: Make, at: int, text: str, values: Any) -> Change:
    change = make(values[at])
    made = [*values[:at], change.value, *values[at + 1 :]]
    return change._replace(text=text, value=tuple(made) if isinstance(values, tuple) else made)


def _ways(value: Any) -> Iterator[tuple[str, Make]]:
    if type(value) in (tuple, list):
        for i, member in enumerate(value):
            for text, make in _ways(member):
                yield f"member {i}: {text}", functools.partial(_member, make, i, f"member {i}: {text}")
    elif is_plain(value):
        yield from _of_tensor(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        for number in NUMBERS:
            if isinstance(number, type(value)) and number != value:
                usual = type(number) is int or (1e-4 < abs(number) < 1e4 and abs(number) <= max(2.0, 16 * abs(value)))
                change = Change(repr(number), number, extreme=not usual)
                yield repr(number), lambda _, change=change: change


@functools.cache
def ways(scenario: Scenario) -> list[Way]:
    """All of a scenario, in a fixed order."""
    found: list[Way] = []
    count = 0

    def hook(function: Any, arguments: Arguments, template: Any = None, planned: Any = None) -> Any:
        nonlocal count
        step, count = count, count + 1
        found.extend(
            Way(step, name, text) for name, value in arguments.items() if name != "self" for text, _ in _ways(value)
        )
        return invoke(function, arguments)

    with contextlib.suppress(LibraryError):  # cuDNN is not installed everywhere
        scenario.start(hook, 0)
    return found


def numbers(scenarios: list[Scenario], most: int, seed: int) -> list[int]:
    """The numbers of at most so many cases of all, drawn by the seed; `find` is the inverse."""
    all_ = [i + k * len(scenarios) for i, scenario in enumerate(scenarios) for k in range(len(ways(scenario)))]
    return Random(seed).sample(all_, min(most, len(all_)))


def find(number: int, scenarios: list[Scenario]) -> tuple[Scenario, Way]:
    """The scenario and the way of a number."""
    way, scenario = divmod(number, len(scenarios))
    found = ways(scenarios[scenario])
    return scenarios[scenario], found[way % len(found)]


def changed(way: Way, function: Any, arguments: Arguments) -> tuple[Arguments, dict[str, Change]]:
    """The arguments, each tensor in an allocation that ends with it, with the change of the way."""
    made = {name: _tightened(value) for name, value in arguments.items()}
    change = next(make for text, make in _ways(made[way.argument]) if text == way.text)(made[way.argument])
    return {**made, way.argument: change.value}, {way.argument: change}


def _tightened(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_tightened, value))
    return tight(value) if is_plain(value) else value
